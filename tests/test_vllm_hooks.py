"""Each private name of vLLM that the plug-in uses is there, and in the table that people read."""

import importlib
import inspect
from pathlib import Path

import pytest
from vllm_kit import NEEDS_VLLM

from soupkit.serving.vllm.hooks import HOOKS, Hook

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_table_that_people_read_has_each_hook(hook: Hook) -> None:
    module, _, name = hook.name.partition(":")
    shown = f"| `{module.removeprefix('vllm.')}` `{name}` | {hook.use} | {hook.breaks} |"
    assert shown in CONTRIBUTING.read_text()


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
