"""LoRA adapters of a pool beside 1-bit variants in one batch: the tokens of PEFT's own merge; also
of adapters that come into the pool when they are asked for.
"""

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from serving_kit import TOKENIZER, WAIT, add_to_family, dense, greedy, make_base, serving, wait_for
from torch import nn
from transformers import AutoModelForCausalLM

from soupkit.adapter_folder import Module, open_adapter, write_adapter
from soupkit.adapter_variant import adapter_manifest
from soupkit.errors import BundleError, ServingError
from soupkit.factored import Pair
from soupkit.kmerge import PoolRule
from soupkit.pool import AdapterPool
from soupkit.serving.server import build_service
from soupkit.serving.shelf import Shelf

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]

PROMPT = "Once upon"
TOKENS = 12


def make_adapter(
    root: Path, folder: Path, *, seed: int, targets: tuple[str, ...] = ("q_proj", "down_proj"),
    rank: int = 3,
) -> Path:  # fmt: skip
    """A PEFT adapter of root/base whose greedy texts differ from the base's."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=5, target_modules=list(targets), use_rslora=seed % 2 == 1
    )
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.35 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def merged(root: Path, adapter: Path) -> nn.Module:
    """The oracle: PEFT merges the folder into a dense float32 model."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


def live(root: Path, adapter: Path) -> nn.Module:
    """The same beside the weights, as it was trained: a tied head does not follow an embedding."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).eval()


def expected(model: Any) -> str:
    tokens = TOKENIZER(PROMPT)["input_ids"]
    return TOKENIZER.decode(greedy(model, tokens, TOKENS), skip_special_tokens=True)


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, a family of one 1-bit variant, and adapters of several kinds."""
    folder = tmp_path_factory.mktemp("adapters")
    make_base(folder / "base")
    add_to_family(folder, "linear", lambda name: "_proj" in name, encoding="row", seed=1)
    make_adapter(folder, folder / "source" / "one", seed=1)
    make_adapter(folder, folder / "source" / "two", seed=2, targets=("v_proj", "up_proj"), rank=5)
    make_adapter(folder, folder / "source" / "table", seed=3, targets=("embed_tokens", "o_proj"))
    return folder


def make_pool(root: Path, folder: Path, *names: str, **rule: Any) -> AdapterPool:
    pool = AdapterPool.create(folder, PoolRule(**{"capacity_bytes": 10**7, **rule}))
    for name in names:
        pool.add(root / "source" / name)
    return pool


def test_adapters_and_variants_share_a_batch(root: Path, tmp_path: Path) -> None:
    pool = make_pool(root, tmp_path / "pool", "one", "two", "table")
    oracles = {
        "base": expected(dense(root, None)),
        "linear": expected(dense(root, "linear")),
        **{name: expected(live(root, pool.resolve(name))) for name in pool.tasks},
    }
    assert len(set(oracles.values())) == 5
    with serving(root, pool=pool.folder) as (_, url), ThreadPoolExecutor(10) as threads:
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == ["base", "one", "table", "two", "linear"]
        asked = [*oracles] * 4
        found = list(threads.map(lambda name: text(ask(url, name)), asked))
        assert found == [oracles[name] for name in asked]


@pytest.mark.parametrize("targets", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_an_adapter_of_a_tied_table_changes_its_own_side_alone(
    root: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    make_adapter(root, tmp_path / "side", seed=4, targets=targets)
    pool = AdapterPool.create(tmp_path / "pool", PoolRule(capacity_bytes=10**7))
    pool.add(tmp_path / "side")
    oracle = expected(live(root, tmp_path / "side"))
    assert oracle != expected(merged(root, tmp_path / "side"))
    with serving(root, pool=pool.folder) as (_, url):
        assert text(ask(url, "side")) == oracle


def test_tasks_of_one_slot_are_one_content(root: Path, tmp_path: Path) -> None:
    pool = make_pool(root, tmp_path / "pool", "one", "two", slots=1)
    oracle = expected(merged(root, pool.resolve("one")))
    with serving(root, pool=pool.folder) as (server, url):
        assert text(ask(url, "one")) == text(ask(url, "two")) == oracle
        stats = server._service.residents()
        assert stats["one"] is not None
        assert server._service.resolve("one").digest == server._service.resolve("two").digest
        assert server._service.router.cache.num_slots >= 1
        assert len(server._service.router.cache.digests) == 1


def test_an_adapter_comes_once_however_many_ask(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single flight; then it is a task like the others, and a later one is merged into its slot."""
    pool = make_pool(root, tmp_path / "pool", slots=1)
    calls: list[str] = []
    original = AdapterPool.add

    def add(self: AdapterPool, adapter: Path, **options: Any) -> Any:
        calls.append(options["task"])
        return original(self, adapter, **options)

    monkeypatch.setattr(AdapterPool, "add", add)
    with (
        serving(root, pool=pool.folder, adapters=root / "source") as (_, url),
        ThreadPoolExecutor(8) as threads,
    ):
        names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        assert names == ["base", "linear", "one", "table", "two"]
        found = {text(one) for one in threads.map(lambda _: ask(url, "one"), range(6))}
        assert (found, calls) == ({expected(merged(root, root / "source" / "one"))}, ["one"])
        both = text(ask(url, "two"))
        assert calls == ["one", "two"]
        assert pool.tasks == {"one": 0, "two": 0}
        assert both == expected(merged(root, pool.resolve("two"))) == text(ask(url, "one"))
        assert ask(url, "three").status_code == 404


def test_what_does_not_come_is_told_and_not_tried_at_once_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(root / "source" / "one", source / "rotten")
    weights = source / "rotten" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    (source / "bad name").mkdir()
    (source / "bad name" / "adapter_config.json").write_text("{}")
    pool = make_pool(root, tmp_path / "pool", "one")
    before = (pool.folder / "pool.json").read_bytes()
    calls = 0
    original = AdapterPool.add

    def add(self: AdapterPool, adapter: Path, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(self, adapter, **options)

    monkeypatch.setattr(AdapterPool, "add", add)
    with serving(root, pool=pool.folder, adapters=source) as (_, url):
        for _ in range(2):
            refused = ask(url, "rotten")
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "variant_unavailable"
            assert "rotten" in error["message"]
            assert str(tmp_path) not in error["message"]
        assert calls == 1
        assert ask(url, "bad name").status_code == 404
        assert ask(url, "../source/rotten").status_code == 404
        assert text(ask(url, "one")) == expected(merged(root, root / "source" / "one"))
    assert (pool.folder / "pool.json").read_bytes() == before


def test_a_pool_that_others_change_is_followed(root: Path, tmp_path: Path) -> None:
    """The slot's content is another one after a merge, and so are the answers."""
    pool = make_pool(root, tmp_path / "pool", "one", slots=1)
    with serving(root, pool=pool.folder) as (_, url):
        assert text(ask(url, "one")) == expected(merged(root, pool.resolve("one")))
        pool.add(root / "source" / "two")
        oracle = expected(merged(root, pool.resolve("one")))
        assert text(ask(url, "one")) == text(ask(url, "two")) == oracle
        pool.remove("two")
        assert ask(url, "two").status_code == 404
        assert text(ask(url, "one")) == oracle
        (pool.folder / "pool.json").write_text("{")
        assert text(ask(url, "one")) == oracle


def test_a_variant_of_the_family_goes_before_a_task_of_its_name(root: Path, tmp_path: Path) -> None:
    pool = AdapterPool.create(tmp_path / "pool", PoolRule(capacity_bytes=10**7))
    pool.add(root / "source" / "one", task="linear")
    with serving(root, pool=pool.folder) as (_, url):
        assert text(ask(url, "linear")) == expected(dense(root, "linear"))


def test_uses_are_written_into_the_pool_now_and_then(root: Path, tmp_path: Path) -> None:
    pool = make_pool(root, tmp_path / "pool", "one", "two")
    now = 0.0
    shelf = Shelf(pool.folder, clock=lambda: now)
    for name in ("one", "one", "two", "linear"):
        shelf.count(name)
    shelf.tell_uses()
    assert [slot.uses for slot in pool.slots] == [0, 0]
    now = 11.0
    shelf.tell_uses()
    wait_for(lambda: [slot.uses for slot in pool.slots] == [2, 1], "uses are told")
    refs = shelf.refs
    assert not shelf.refresh()
    assert shelf.refs == refs
    shelf.close()


def test_a_client_that_goes_away_ends_no_admission(root: Path, tmp_path: Path) -> None:
    pool = make_pool(root, tmp_path / "pool")

    async def run() -> None:
        shelf = Shelf(pool.folder, adapters=root / "source")
        first, second = (asyncio.create_task(shelf.admit("one")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        await shelf.admit("one")  # by a server that has not looked yet
        assert shelf.refresh()
        with pytest.raises(KeyError):
            await shelf.admit("one")
        shelf.close()

    asyncio.run(run())
    assert list(pool.tasks) == ["one"]


def refusals(root: Path, tmp_path: Path) -> dict[str, Callable[[], object]]:
    quality = AdapterPool.create(
        tmp_path / "quality", PoolRule(capacity_bytes=10**6, gate_quality=0.9)
    )
    pool = make_pool(root, tmp_path / "pool")
    family = root / "family"
    return {
        "needs pool=": lambda: build_service(family, adapters=tmp_path),
        "no such folder": lambda: build_service(
            family, pool=pool.folder, adapters=tmp_path / "gone"
        ),
        "gate asks for the quality": lambda: build_service(
            family, pool=quality.folder, adapters=root / "source"
        ),
    }


@pytest.mark.parametrize("reason", ["needs pool=", "no such folder", "gate asks for the quality"])
def test_what_cannot_be_served_is_told_at_the_start(
    root: Path, tmp_path: Path, reason: str
) -> None:
    with pytest.raises((ServingError, ValueError), match=reason):
        refusals(root, tmp_path)[reason]()


def test_a_convolution_has_no_place_in_a_batch(tmp_path: Path) -> None:
    pair = Pair(a=torch.ones(2, 12), b=torch.ones(5, 2), scale=1.0)
    write_adapter(tmp_path / "conv", {"conv": Module("conv", pair, (3,))}, base="b", revision=None)
    info = open_adapter(tmp_path / "conv").info
    with pytest.raises(BundleError, match="'conv' is a LoRA of kind 'conv'"):
        adapter_manifest(info, name="x", base_fingerprint="f", digest="d")
