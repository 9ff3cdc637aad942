"""Each private name of vLLM that the plug-in uses is there, and in the table that people read."""

import ast
import asyncio
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_kit import NEEDS_VLLM

from soupkit.errors import ServingError
from soupkit.serving.vllm.hooks import HOOKS, Hook, _prompt_logits, _wrap_engine, _wrap_offline

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_table_that_people_read_has_each_hook(hook: Hook) -> None:
    module, _, name = hook.name.partition(":")
    shown = f"| `{module.removeprefix('vllm.')}` `{name}` | {hook.use} | {hook.breaks} |"
    assert shown in CONTRIBUTING.read_text()


def test_every_private_name_that_the_plug_in_says_is_in_the_table() -> None:
    """Underscores: of attributes of what is vLLM's, and of names in texts."""
    rooms = Path(__file__).resolve().parents[1] / "soupkit/serving/vllm"
    known = {hook.name.rpartition(".")[2] for hook in HOOKS}
    found = set()
    for room in ("hooks", "limits", "model", "models", "worker"):
        for node in ast.walk(ast.parse((rooms / f"{room}.py").read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
                found.add(str(node.value))
    private = {name for name in found if name.startswith("_") and not name.startswith("__")}
    assert "_map_name" in private
    assert private <= known


# -- what the hooks do, on stand-ins --


class Core:
    """vLLM's EngineCore, as far as its hooks know it."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={})
        self.loaded: list[int] = []
        self.fails = False

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def add_lora(self, lora_request: Any) -> bool:
        self.loaded.append(lora_request.lora_int_id)
        if self.fails:
            raise ServingError("rotten")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.loaded.remove(lora_id)
        return True


def request(name: str, number: int | None) -> Any:
    lora = None if number is None else SimpleNamespace(lora_int_id=number)
    return SimpleNamespace(request_id=name, lora_request=lora, client_index=3)


def test_a_request_is_admitted_with_its_variant_and_the_variant_stays_as_long() -> None:
    """R3, SV22: the engine's own bookkeeping, whoever asks it."""

    class Engine(Core):
        pass

    _wrap_engine(Engine)
    engine = Engine()
    for name, number in (("a", None), ("b", 5), ("c", 5)):
        engine.add_request(request(name, number))
    assert engine.loaded == [5]
    with pytest.raises(ServingError, match="has 2 requests"):
        engine.remove_lora(5)
    engine.scheduler.requests.clear()
    assert engine.remove_lora(5)
    assert engine.loaded == []
    engine.add_request(request("d", 5))
    assert engine.loaded == [5]


def test_a_request_whose_variant_cannot_be_had_is_refused_alone() -> None:
    """E11: in the engine's own process the client is told; in the caller's, the caller."""

    class Engine(Core):
        pass

    class Process(Core):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        def _send_error_outputs_to_client(self, names: list[str], client: int) -> None:
            self.told.append((names, client))

    _wrap_engine(Engine)
    _wrap_engine(Process)
    process = Process()
    process.fails = True
    process.add_request(request("x", 7))
    process.add_request(request("y", None))
    assert process.told == [(["x"], 3)]
    assert list(process.scheduler.requests) == ["y"]
    # Nothing of it is left on any rank, and the next one tries anew.
    assert process.loaded == []
    process.fails = False
    process.add_request(request("z", 7))
    assert process.loaded == [7]
    engine = Engine()
    engine.fails = True
    with pytest.raises(ServingError, match="rotten"):
        engine.add_request(request("x", 7))


def test_vllm_llm_is_told_before_anything_knows_the_request() -> None:
    order: list[str] = []

    class Engine:
        engine_core = SimpleNamespace(add_lora=lambda lora: order.append(f"lora {lora}"))

        def add_request(self, name: str, prompt: Any, lora_request: Any = None) -> str:
            order.append(name)
            return name

    _wrap_offline(Engine)
    assert Engine().add_request("a", None) == "a"
    Engine().add_request("b", None, "x")
    Engine().add_request("c", None, lora_request="y")
    assert order == ["a", "lora x", "b", "lora y", "c"]


def test_logits_of_slices_of_hidden_states_are_their_tokens() -> None:
    found: list[Any] = []

    class Bank:
        @contextmanager
        def prompt_rows(self, start: int, count: int) -> Iterator[None]:
            found.append((start, count))
            yield

    class Model(torch.nn.Module):
        def compute_logits(self, states: Any) -> Any:
            return states.sum(-1)

    model, hidden = Model(), torch.arange(60.0).view(2, 30)[1:].view(10, 3)
    with _prompt_logits(model, Bank(), hidden):
        for start, stop in ((0, 4), (4, 5), (7, 10)):
            assert torch.equal(model.compute_logits(hidden[start:stop]), hidden[start:stop].sum(-1))
    assert found == [(0, 4), (4, 1), (7, 3)]
    model.compute_logits(hidden)
    assert len(found) == 3


def source(dotted: str) -> str:
    module, _, names = dotted.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return inspect.getsource(inspect.unwrap(found)) if callable(found) else ""


# What the code behind a hook has to say for the plug-in to act.
SAYS = {
    "LoRAModelRunnerMixin._set_active_loras": ["prompt_lora_mapping", "set_active_adapters("],
    "GPUModelRunner._get_prompt_logprobs_dict": [
        "hidden_states[offset : offset + num_logits]",
        "self.model.compute_logits(prompt_hidden_states)",
        "self.num_prompt_logprobs",
    ],
    "Scheduler.__init__": ["self.requests"],
    "Scheduler.schedule": ["max_loras"],
    "_gen_lora_extra_hash_keys": ["lora_request.lora_path"],
    "BaseServing._check_model": ["self.models.lora_requests", "self.models.resolve_lora("],
    "VocabParallelEmbedding.forward": ["self.quant_method.embedding(", "self.use_fused_embedding"],
    "LogitsProcessor._apply_head": ["lm_head.quant_method.apply("],
    "Attention.forward": ["unified_kv_cache_update(", "key, value, self.layer_name"],
    "QKVParallelLinear.__init__": [
        "self.total_num_heads",
        "self.total_num_kv_heads",
        "self.head_size",
        "self.v_head_size",
    ],
    "VocabParallelEmbedding.__init__": [
        "self.shard_indices",
        "self.org_vocab_size",
        "self.num_embeddings_per_partition",
    ],
    "RMSNorm.forward_native": ["self.pass_weight", "self.pass_weight_add"],
    "LinearBase.__init__": ["quant_method"],
}


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
class TestInstalled:
    pytestmark = NEEDS_VLLM

    def test_vllm_has_it(self, hook: Hook) -> None:
        text = source(hook.name)
        for said in SAYS.get(hook.name.partition(":")[2], []):
            assert said in text


@pytest.mark.slow
class TestLinears:
    pytestmark = NEEDS_VLLM

    def test_every_linear_that_variants_act_in_computes_by_its_method(self) -> None:
        from soupkit.serving.vllm.model import LAYOUTS

        for kind in LAYOUTS:
            assert "self.quant_method.apply(self, " in inspect.getsource(kind.forward)

    def test_vllm_warms_up_with_the_path_that_is_looked_for(self) -> None:
        from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

        from soupkit.serving.vllm.worker import WARM_UP_PATH

        found = inspect.getsource(LoRAModelRunnerMixin.maybe_select_dummy_loras)
        assert f'lora_path="{WARM_UP_PATH}"' in found


@pytest.mark.slow
class TestModels:
    pytestmark = NEEDS_VLLM

    def test_a_variant_that_the_bases_name_would_hide_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from soupkit.serving.vllm import models

        class Models:
            def __init__(self, engine_client: Any) -> None:
                pass

            def is_base_model(self, name: str) -> bool:
                return name == "coder"

        found = SimpleNamespace(copies=SimpleNamespace(names=lambda: ["chat", "coder"]))
        monkeypatch.setattr(models, "settings", lambda: found)
        monkeypatch.setattr(models, "make_resolver", lambda *_: found)
        models.replace_models(Models)
        with pytest.raises(ServingError, match=r"'coder'.*--served-model-name"):
            Models(SimpleNamespace(generate=None))

    def test_a_variant_is_loaded_though_vllm_is_told_to_look_at_no_names(self) -> None:
        """VLLM_SKIP_MODEL_NAME_VALIDATION: a name that nobody asked for before was the base."""
        from soupkit.serving.vllm.models import check_first

        class Serving:
            def __init__(self, models: Any) -> None:
                self.models = models

            async def _check_model(self, request: Any) -> None:
                return None

        loaded: list[str] = []

        class Resolver:
            async def resolve_lora(self, base: str, name: str) -> None:
                loaded.append(name)

        check_first(Serving)
        models = SimpleNamespace(soupkit=Resolver(), is_base_model=lambda name: name == "base")
        for served in (models, SimpleNamespace()):  # one without an engine has no family
            for name in ("base", None, "coder"):
                asyncio.run(Serving(served)._check_model(SimpleNamespace(model=name)))
        assert loaded == ["coder"]
