"""LoRA adapters of a pool beside 1-bit variants in one batch: the tokens of PEFT's own merge; also
of adapters that come into the pool when they are asked for.
"""

import asyncio
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from serving_kit import TOKENIZER, WAIT, add_to_family, dense, greedy, make_base, serving, wait_for
from torch import nn
from transformers import AutoModelForCausalLM

from soupkit.adapter_folder import Module, open_adapter, write_adapter
from soupkit.adapter_variant import adapter_manifest
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import BundleError, ServingError
from soupkit.factored import Pair
from soupkit.family import open_family
from soupkit.files import locked
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
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    shutil.copytree(root / "source" / "one", source / "rotten")
    weights = source / "rotten" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    (source / "bad name").mkdir()
    (source / "bad name" / "adapter_config.json").write_text("{}")
    pool = make_pool(root, tmp_path / "pool", "one")

    def contents() -> str:
        # What was used is told when the server stops.
        return re.sub(r'"(clock|last_used|uses)": \d+', "", (pool.folder / "pool.json").read_text())

    before = contents()
    with serving(root, pool=pool.folder, adapters=source) as (_, url):
        for _ in range(2):
            refused = ask(url, "rotten")
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "variant_unavailable"
            assert "rotten" in error["message"]
            assert str(tmp_path) not in error["message"]
        tried = [line for line in caplog.messages if "does not come into the pool" in line]
        assert len(tried) == 1
        assert ask(url, "bad name").status_code == 404
        assert ask(url, "../source/rotten").status_code == 404
        assert text(ask(url, "one")) == expected(merged(root, root / "source" / "one"))
    assert contents() == before


def plain(folder: Path, shapes: dict[str, tuple[int, int]], *, base: str, rank: int = 2) -> Path:
    """An adapter of ones and no model."""
    modules = {
        name: Module("linear", Pair(torch.ones(rank, columns), torch.ones(rows, rank), 1e-3))
        for name, (rows, columns) in shapes.items()
    }
    return write_adapter(folder, modules, base=base)


UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def test_what_the_model_cannot_take_does_not_change_the_pool(root: Path, tmp_path: Path) -> None:
    """It would be merged into the slot of others, which could not be served any more either."""
    source, pool = tmp_path / "source", AdapterPool.create(tmp_path / "pool", PoolRule(10**7, 1))
    good = {UP: (52, 40)}
    plain(source / "good", good, base="org/hub")
    plain(source / "shape", {**good, QUERY: (24, 24)}, base="org/hub")
    plain(source / "unknown", {**good, "model.layers.0.self_attn.zero": (40, 40)}, base="org/hub")
    pair = Pair(a=torch.ones(2, 12), b=torch.ones(5, 2), scale=1.0)
    write_adapter(source / "conv", {"conv": Module("conv", pair, (3,))}, base="org/hub")
    plain(source / "large", {QUERY: (40, 40)}, base="org/hub", rank=40)
    with serving(root, pool=pool.folder, adapters=source, cache_bytes=9000) as (_, url):
        oracle = text(ask(url, "good"))
        for name, words in {
            "shape": "stored shape (24, 24), the base's is (40, 40)",
            "unknown": "the base model has no such parameter",
            "conv": "is a LoRA of kind 'conv'",
            "large": "the cache has 9000; raise --cache-bytes",
        }.items():
            refused = ask(url, name)
            assert refused.status_code == 503
            assert words in refused.json()["error"]["message"]
        assert text(ask(url, "good")) == oracle
    assert pool.tasks == {"good": 0}
    assert len(pool.slots[0].history) == 1


def test_by_default_all_that_merges_may_make_fits_into_the_cache(
    root: Path, tmp_path: Path
) -> None:
    """Ranks add up in a slot; nothing of it is there yet when the server starts."""
    source = tmp_path / "source"
    for number in range(6):
        make_adapter(root, source / f"a{number}", seed=20 + number)
    pool = make_pool(root, tmp_path / "pool", slots=1)
    with (
        serving(root, pool=pool.folder, adapters=source) as (_, url),
        ThreadPoolExecutor(6) as threads,
    ):
        names = [f"a{number}" for number in range(6)]
        assert [one.status_code for one in threads.map(lambda n: ask(url, n), names)] == [200] * 6
        found = {text(ask(url, name)) for name in names}
        assert found == {expected(merged(root, pool.resolve("a0")))}


def test_a_pool_of_another_base_is_refused(root: Path, tmp_path: Path) -> None:
    """Its shapes fit, so its answers would be wrong without a word."""
    make_base(tmp_path / "other", seed=5)
    shutil.copytree(root / "base", tmp_path / "copy")
    pools = {}
    for kind, base in {"other": tmp_path / "other", "copy": tmp_path / "copy", "far": "f"}.items():
        pools[kind] = AdapterPool.create(tmp_path / f"{kind}-pool", PoolRule(10**7))
        pools[kind].add(plain(tmp_path / f"{kind}-source" / "task", {UP: (52, 40)}, base=str(base)))
    with pytest.raises(ServingError, match=r"other, whose weights are not those of the base"):
        build_service(root / "family", pool=pools["other"].folder)
    # A copy is the same base. Of a name that is not here nothing can be told.
    for kind in ("copy", "far"):
        build_service(root / "family", pool=pools[kind].folder)
    # Of an empty pool the first adapter decides, so it is looked at.
    empty, source = (
        AdapterPool.create(tmp_path / "empty", PoolRule(10**7)),
        tmp_path / "other-source",
    )
    shelf = build_service(root / "family", pool=empty.folder, adapters=source).catalog.shelf
    assert shelf is not None
    with pytest.raises(ServingError, match=r"does not come into the pool: .*whose weights"):
        asyncio.run(shelf.admit("task"))
    assert empty.slots == ()
    # Another process may add it; then it is not loaded.
    empty.add(source / "task")
    assert shelf.refresh()
    with pytest.raises(BundleError, match="whose weights are not those"):
        shelf.load(shelf.refs["task"], "")


def test_a_refusal_is_told_again_only_while_nothing_has_changed(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(root / "source" / "one", source / "one")
    weights = source / "one" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    pool = make_pool(root, tmp_path / "pool", "two")
    config = pool.resolve("two") / "adapter_config.json"
    told = config.read_text()
    now = 0.0
    shelf = Shelf(pool.folder, adapters=source, clock=lambda: now)

    def refused(words: str) -> None:
        with pytest.raises(ServingError, match=words):
            asyncio.run(shelf.admit("one"))

    weights.unlink()
    refused("no adapter_model")
    weights.write_bytes(whole[:-8])  # another fault by now
    refused("truncated")
    weights.write_bytes(whole)
    config.write_text("{}")
    refused("slot 0 is damaged")
    config.write_text(told)
    refused("slot 0 is damaged")  # not seen
    now = 31.0
    asyncio.run(shelf.admit("one"))
    assert set(pool.tasks) == {"one", "two"}
    shelf.close()


def test_servers_of_one_pool_that_ask_for_one_adapter_both_get_it(
    root: Path, tmp_path: Path
) -> None:
    """The other one adds it between the look and the lock."""
    pool = make_pool(root, tmp_path / "pool")
    shelf = Shelf(pool.folder, adapters=root / "source")
    base = open_checkpoint(root / "base")
    shelf.serve_with(base, open_family(root / "family").base)
    shelf.check_by(lambda manifest: pool.add(root / "source" / "one"))
    asyncio.run(shelf.admit("one"))
    assert shelf.refresh()
    assert list(shelf.refs) == ["one"]
    shelf.close()


def test_waiting_for_an_adapter_ends(root: Path, tmp_path: Path) -> None:
    """While another process has the pool, as long as a quality gate takes."""
    pool = make_pool(root, tmp_path / "pool")
    with (
        locked(pool.folder / ".lock"),
        serving(
            root, pool=pool.folder, adapters=root / "source", max_wait_seconds=2, max_queue=1
        ) as (_, url),
        ThreadPoolExecutor(3) as threads,
    ):
        found = list(threads.map(lambda name: ask(url, name), ("one", "two", "table")))
        codes = sorted(answer.status_code for answer in found)
        assert codes == [429, 429, 503]
        late = next(answer for answer in found if answer.status_code == 503)
        assert "still waits for the pool" in late.json()["error"]["message"]
        assert text(ask(url, "linear"))

    async def stop() -> None:
        shelf = Shelf(pool.folder, adapters=root / "source")
        with locked(pool.folder / ".lock"):
            waiter = asyncio.create_task(shelf.admit("one"))
            await asyncio.sleep(0)
            shelf.stop()
            with pytest.raises(ServingError, match="the server is stopping"):
                await asyncio.wait_for(waiter, WAIT)
            # A thread that waited on would keep the process.
            threads = {one for one in threading.enumerate() if "soupkit-pool" in one.name}
            assert threads
            shelf.close()
            for one in threads:
                await asyncio.to_thread(one.join, WAIT)
                assert not one.is_alive()

    asyncio.run(stop())


def test_names_of_adapters_that_wait_are_told_as_they_are_served(
    root: Path, tmp_path: Path
) -> None:
    """The base gives its folder's name to an adapter, an unloaded variant is not listed."""
    shutil.copytree(root / "base", tmp_path / "smol")
    for name in ("smol", "linear", "one"):
        shutil.copytree(root / "source" / "one", tmp_path / "source" / name)
    pool = make_pool(root, tmp_path / "pool")
    service = build_service(
        root / "family", base=tmp_path / "smol", pool=pool.folder, adapters=tmp_path / "source"
    )
    assert service.names() == ["base", "linear", "one", "smol"]
    service.catalog.hide("linear")
    assert service.names() == ["base", "one", "smol"]
    with pytest.raises(KeyError):
        asyncio.run(service.admit("linear"))


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_merge_before_the_slot_is_read_delays_the_answer_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    pool = make_pool(root, tmp_path / "pool", "one", slots=1)
    original, asked = Shelf.load, []

    def load(self: Shelf, ref: Any, fingerprint: str) -> Any:
        asked.append(ref.digest)
        if len(asked) == 1:
            pool.add(root / "source" / "two")
        return original(self, ref, fingerprint)

    monkeypatch.setattr(Shelf, "load", load)
    with (
        serving(root, pool=pool.folder, cache_bytes=10**6) as (_, url),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        settings: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "stream": stream}
        answer = client.completions.create(model="one", prompt=PROMPT, **settings)
        found = "".join(part.choices[0].text for part in (answer if stream else [answer]))
    assert found == expected(merged(root, pool.resolve("one")))
    assert len(set(asked)) == 2


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
    shelf.count("two")
    shelf.close()
    wait_for(lambda: [slot.uses for slot in pool.slots] == [2, 2], "the last uses are told")


def test_an_administrator_loads_an_adapter_that_may_come(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "source" / "one", tmp_path / "source" / "one")
    shutil.copytree(root / "source" / "two", tmp_path / "source" / "bad")
    (tmp_path / "source" / "bad" / "adapter_model.safetensors").unlink()
    pool = make_pool(root, tmp_path / "pool")
    with serving(root, pool=pool.folder, adapters=tmp_path / "source", admin_keys=("secret",)) as (
        _,
        url,
    ):

        def change(route: str, name: str) -> httpx.Response:
            headers = {"authorization": "Bearer secret"}
            body = {"lora_name": name}
            return httpx.post(f"{url}/v1/{route}", json=body, headers=headers, timeout=WAIT)

        early = change("unload_lora_adapter", "one")
        assert early.status_code == 404
        assert "there are base, linear, bad" in early.json()["error"]["message"]
        loaded = change("load_lora_adapter", "one")
        assert (loaded.status_code, loaded.json()["phase"]) == (200, "resident")
        assert pool.tasks == {"one": 0}
        refused = change("load_lora_adapter", "bad")
        assert refused.status_code == 503
        assert "no adapter_model" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
        assert change("load_lora_adapter", "none").status_code == 404


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
        "needs --pool": lambda: build_service(family, adapters=tmp_path),
        "no such folder": lambda: build_service(
            family, pool=pool.folder, adapters=tmp_path / "gone"
        ),
        "without --adapters.*add.ADAPTER, quality=SCORE": lambda: build_service(
            family, pool=quality.folder, adapters=root / "source"
        ),
    }


@pytest.mark.parametrize(
    "reason", ["needs --pool", "no such folder", "without --adapters.*add.ADAPTER, quality=SCORE"]
)
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
