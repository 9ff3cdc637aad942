"""Complaints of other servers' users that no part of ours alone can answer: the whole of it."""

import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_kit import make
from serving_kit import (
    CONTEXT,
    VARIANTS,
    WAIT,
    Oracle,
    add_to_family,
    load_variant,
    make_family,
    metrics_of,
    serving,
    wait_for,
)

from soupkit.serving.server import build_service
from soupkit.serving.states import Phase, Ticket

ADMIN = {"authorization": "Bearer admin-key"}
ADMINS: dict[str, Any] = {"admin_keys": ("admin-key",)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


def slot_bytes(root: Path) -> int:
    """Of a slot that takes every variant of the family."""
    service = build_service(root / "family")
    service.engine.close()
    return service.engine.slot_bytes(service.catalog.manifests().values())


def ask(url: str, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": "ask", "max_tokens": 8, "temperature": 0} | body
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def unload(url: str, name: str) -> dict[str, Any]:
    body = {"lora_name": name, "deadline_seconds": WAIT}
    answer = httpx.post(f"{url}/v1/unload_lora_adapter", json=body, headers=ADMIN, timeout=2 * WAIT)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# SV01: slots were given out anew, and a request under way was answered by another's adapter.
def test_loads_into_the_other_slot_leave_a_request_under_way_its_own(
    root: Path, oracle: Oracle
) -> None:
    done, expected = threading.Event(), oracle("linear", "long", 60)
    options = {"cache_bytes": 2 * slot_bytes(root)}
    with serving(root, **options) as (server, url), ThreadPoolExecutor(2) as pool:
        service = server._service
        mine = service.catalog.variants["linear"].digest
        # What is under way is what the cache would let go first.
        service.router.cache.policy.value = lambda digest, *_: float(digest != mine)

        def keep_asking() -> list[str]:
            found = []
            while not done.is_set():
                found.append(text_of(ask(url, "linear", prompt="long", max_tokens=60)))
            return found

        asking = [pool.submit(keep_asking) for _ in range(2)]
        try:
            for name in ("norms", "embed", "matrix", "rich", "norms"):
                assert text_of(ask(url, name)) == oracle(name, "ask", 8)
        finally:
            done.set()
        assert {text for future in asking for text in future.result()} == {expected}
        assert metrics_of(url)["soupkit_cache_slots"] == 2
        assert metrics_of(url)["soupkit_evictions_total"] >= 4


# SV11, SV12: an evicted adapter whose files had gone took the engine, and so the server, with it.
def test_an_evicted_variant_whose_files_are_gone_fails_alone(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear", "norms"])
    with serving(root, cache_bytes=slot_bytes(root)) as (server, url):
        texts = {name: text_of(ask(url, name)) for name in ("norms", "linear")}
        assert server._service.router.cache.num_slots == 1
        shutil.rmtree(root / "family" / "variants" / "norms")
        for _ in range(2):
            gone = ask(url, "norms")
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "variant_unavailable")
            assert text_of(ask(url, "linear")) == texts["linear"]
        assert httpx.get(f"{url}/ready").status_code == 200


# SV02, SV03, SV34: memory that an unload did not free; a tier of an adapter's size that refused it.
@pytest.mark.parametrize("missing", [0, 1])
def test_a_host_tier_of_a_variants_bytes_holds_it_until_it_is_unloaded(
    root: Path, oracle: Oracle, missing: int
) -> None:
    nbytes = load_variant(root, "linear").nbytes
    host_bytes = 0 if missing else nbytes
    options = {"host_cache_bytes": nbytes - missing, "cache_bytes": 1_000_000}
    with serving(root, **options, **ADMINS) as (server, url):
        loader, read = server._service.loader, []
        load = server._service.catalog.load

        def noted(ref: Any) -> Any:
            variant = load(ref)
            read.append(weakref.ref(next(iter(variant.deltas.values())).packed))
            return variant

        server._service.catalog.load = noted
        for _ in range(2):
            assert text_of(ask(url, "linear")) == oracle("linear", "ask", 8)
        assert metrics_of(url)["soupkit_host_cache_used_bytes"] == host_bytes
        assert len(loader._loaded) == (not missing)
        freed = unload(url, "linear")["freed_bytes"]
        assert freed["device"] > 0
        assert freed["host"] == host_bytes
        assert not loader._loaded
        assert len(read) == 1
        wait_for(lambda: read[0]() is None, "what was read is freed")


# R3, SV22: after several choices of one prompt the count of uses never came back to zero.
def test_choices_that_end_in_any_way_leave_nobody_in_the_slot(root: Path) -> None:
    many = {"n": 4, "ignore_eos": True}
    with serving(root, **ADMINS) as (_, url):
        long = {"model": "norms", "prompt": ["a", "b"], "max_tokens": CONTEXT - 10, **many}
        with httpx.stream("POST", f"{url}/v1/completions", json=long | {"stream": True}) as stream:
            next(stream.iter_raw())
        assert ask(url, "norms", **many, echo=True, logprobs=1).status_code == 200
        assert ask(url, "norms", **many, max_tokens=CONTEXT).status_code == 400
        assert ask(url, "norms", **many, stop=["\n", "a"]).status_code == 200
        found = unload(url, "norms")
        assert found["requests_ended"] == 0
        assert found["freed_bytes"]["device"] > 0
        assert metrics_of(url)["soupkit_requests_running"] == 0


# R13, SV17: what was added at run time was forgotten by a restart. SV37: one permanently bad
# adapter blocked the syncing of all others.
def test_beside_a_bad_variant_new_ones_come_and_stay(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["norms"])
    (root / "family" / "variants" / "norms" / "manifest.json").write_text("{")
    texts = []
    for has_come in (False, True):
        with serving(root, pin=("norms",)) as (_, url):
            if not has_come:
                add_to_family(root, "fresh", VARIANTS["rich"][0], encoding="row", seed=7)
            texts.append(text_of(ask(url, "fresh")))
            assert ask(url, "norms").status_code == 503
            assert text_of(ask(url, "base")) != texts[0]
            assert httpx.get(f"{url}/ready").status_code == 200
    assert texts == [Oracle(root, names=["fresh"])("fresh", "ask", 8)] * 2


# SV31: adapters asked for one after another each waited for a turn of the scheduler's clock.
def test_one_variant_after_another_waits_for_no_clock() -> None:
    router, fake, _ = make(slot_bytes=100, host_bytes=40)
    for digest in "abcabcdede":
        ticket = Ticket(digest)
        router.submit([ticket])
        if digest in fake.loading:
            fake.loads(digest)
        # Its copy into the one slot begins as soon as it is read, and it runs as soon as that ends.
        assert fake.installing == [(digest, 0)]
        fake.installs()
        assert [t for t, _ in fake.running] == [ticket]
        fake.ends(ticket)
        assert router.phase(digest) is Phase.RESIDENT
    assert max(fake.num_loads[digest] for digest in "abc") == 1
