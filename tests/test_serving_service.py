"""The service without HTTP: what requests, changes and faults at once must not do.

The tests drive its event loop themselves, so that each interleaving is chosen and not hoped for.
"""

import asyncio
import json
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from serving_kit import TOKENIZER, VARIANTS, WAIT, dense, greedy, make_family

from soupkit.errors import ServingError
from soupkit.serving import service as service_module
from soupkit.serving.admin import Admin, LoadRequest, UnloadRequest
from soupkit.serving.engine import Engine
from soupkit.serving.jobs import End, Generation, Job
from soupkit.serving.openai import ApiError
from soupkit.serving.patches import DeltaPatch
from soupkit.serving.sampling import Sampling, Token
from soupkit.serving.server import build_service
from soupkit.serving.service import Service
from soupkit.serving.states import (
    BASE_DIGEST,
    NotServed,
    Phase,
    QueueFull,
    TooMany,
    VariantUnavailable,
    WaitedTooLong,
)

PROMPT = tuple(TOKENIZER("ask")["input_ids"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def slot_bytes(root: Path) -> int:
    """Of a slot that takes any of them."""
    service = build_service(root / "family")
    service.engine.close()
    return service.engine.slot_bytes(service.catalog.manifests().values())


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A family of the test's own, over the same base."""
    shutil.copytree(root / "family", tmp_path / "family")
    (tmp_path / "base").symlink_to(root / "base")
    return tmp_path


def list_variants(root: Path, names: Mapping[str, str]) -> None:
    """Has family.json list, under each name, what it lists as another in its first version."""
    file, kept = root / "family" / "family.json", root / "family.json"
    if not kept.exists():
        shutil.copy(file, kept)
    document = json.loads(kept.read_text())
    there = document["variants"]
    document["variants"] = {name: there[of] for name, of in names.items()}
    (root / "new").write_text(json.dumps(document))
    os.replace(root / "new", file)


@asynccontextmanager
async def started(root: Path, **settings: Any) -> AsyncIterator[Service]:
    """A service that runs; a fault in any callback of its loop fails the test."""
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    service = build_service(root / "family", **({"max_running": 4} | settings))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        assert not faults


def request(service: Service, model: str, *, tokens: int = 8) -> Generation:
    ref = service.resolve(model)
    digest = BASE_DIGEST if ref is None else ref.digest
    job = Job(PROMPT, tokens, frozenset(), Sampling(temperature=0))
    return Generation(digest=digest, model=model, job=job, score_prompt=False)


def ask(service: Service, *models: str, tokens: int = 8) -> list[Generation]:
    """One request each, submitted one after the other."""
    found = [request(service, model, tokens=tokens) for model in models]
    for generation in found:
        service.submit([generation])
    return found


async def ending(generation: Generation) -> tuple[list[int], Any]:
    """The tokens of a request, and its last event."""
    tokens = []
    while True:
        event = await asyncio.wait_for(generation.events.get(), WAIT)
        if not isinstance(event, Token):
            return tokens, event
        tokens.append(event.id)


async def until(condition: Any, what: str) -> None:
    for _ in range(WAIT * 200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


@cache
def expected(root: Path, name: str) -> list[int]:
    """What the dense model says to `ask`."""
    return greedy(dense(root, name), list(PROMPT), 8, stop=None)


class Held:
    """Calls of a method that wait until they are let go, and may fail then."""

    def __init__(self, owner: Any, name: str) -> None:
        self.waits, self.go = threading.Event(), threading.Event()
        self.faults: list[BaseException] = []
        self._original = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.waits.set()
        assert self.go.wait(WAIT)
        if self.faults:
            raise self.faults.pop()
        return self._original(*args, **named)


# SV20: pins for the latency-critical ones; which of them must not depend on their names.
def test_of_too_many_pins_the_first_hold_and_the_others_are_told(
    root: Path, slot_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    order = ("norms", "linear")

    async def run() -> None:
        caplog.clear()
        async with started(root, cache_bytes=2 * slot_bytes, pin=order) as service:
            await until(lambda: service.residents()[order[0]].phase is Phase.RESIDENT, "it loads")
            pinned = [name for name, stats in service.residents().items() if stats.pinned]
            assert pinned == [order[0]]
            (told,) = [r.getMessage() for r in caplog.records if "not pinned" in r.getMessage()]
            assert f": {order[1]}; raise --cache-bytes" in told
            # What an administrator asks for comes behind, and its refusal changes nothing.
            with pytest.raises(ApiError, match="of 2 slots"):
                await Admin(service).load(LoadRequest(lora_name="embed", pinned=True))
            assert list(service.pins) == list(order)
            with pytest.raises(ApiError, match="of 2 slots"):
                await Admin(service).load(LoadRequest(lora_name=order[1], pinned=True))
            assert list(service.pins) == list(order)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_pin_of_a_variant_that_leaves_gives_way_and_returns_with_it(
    copy: Path, slot_bytes: int
) -> None:
    async def run() -> None:
        def pinned(service: Service) -> list[str]:
            return [
                name
                for name, stats in service.residents().items()
                if stats.pinned and stats.phase is Phase.RESIDENT
            ]

        settings = {"cache_bytes": 2 * slot_bytes, "pin": ("norms", "linear")}
        async with started(copy, **settings) as service:
            for left in ("norms", "linear", "norms"):
                names = {"linear", "norms", "embed"} - ({"norms"} if left == "linear" else set())
                list_variants(copy, {name: name for name in names})
                await until(lambda left=left: pinned(service) == [left], f"{left} is pinned")

    asyncio.run(run())


# SV26 and R3 for the names of a content: hundreds of hot adds leave nothing behind.
def test_variants_that_come_and_go_leave_no_trace(copy: Path) -> None:
    async def run() -> None:
        file = copy / "family" / "family.json"
        document = json.loads(file.read_text())
        async with started(copy) as service:
            admin, loader = Admin(service), service.loader
            for number in range(300):
                digest = f"sha256:{number:064x}"
                gone = {"path": f"variants/gone-{number}", "digest": digest}
                document["variants"] |= {f"gone-{number}": gone}
                document["variants"].pop(f"gone-{number - 2}", None)
                (copy / "new").write_text(json.dumps(document))
                os.replace(copy / "new", file)
                assert f"gone-{number}" in service.names()
                if not number % 20:
                    (waiting,) = ask(service, f"gone-{number}")
                    _, fault = await ending(waiting)
                    assert isinstance(fault, VariantUnavailable)
                    with pytest.raises(VariantUnavailable, match=f"'gone-{number}' cannot be"):
                        await admin.load(LoadRequest(lora_name=f"gone-{number}"))
            page = service.render_metrics().decode()
            assert [n for n in range(300) if f'"gone-{n}"' in page] == [298, 299]
            # The last two, and those that leave with the next change.
            assert len(loader._refs) <= len(document["variants"]) + 2
            assert len(service.router.stats()) == len(document["variants"])
            assert not admin._turns
            cache = service.router.cache
            assert len(cache._costs) <= len(document["variants"])

    asyncio.run(run())


def test_a_failed_load_of_one_that_left_is_told_by_its_name(copy: Path) -> None:
    async def run() -> None:
        async with started(copy) as service:
            load = Held(service.catalog, "load")
            load.faults.append(ServingError("broken"))
            (waiting,) = ask(service, "norms")
            await until(load.waits.is_set, "it is read")
            for names in (["linear"], ["linear", "embed"], ["linear"]):
                list_variants(copy, {name: name for name in names})
                assert "norms" not in service.names()
            load.go.set()
            _, fault = await ending(waiting)
            assert str(fault) == "variant 'norms' cannot be loaded: broken"

    asyncio.run(run())


def test_a_variant_renamed_while_it_is_read_is_read_by_its_new_name(root: Path, copy: Path) -> None:
    async def run() -> None:
        async with started(copy) as service:
            load = Held(service.catalog, "load")
            (old,) = ask(service, "norms")
            await until(load.waits.is_set, "it is read")
            list_variants(copy, {"linear": "linear", "renamed": "norms"})
            (new,) = ask(service, "renamed")
            load.go.set()
            wanted = expected(root, "norms")
            for generation in (old, new):
                tokens, end = await ending(generation)
                assert end == End("length")
                assert tokens == wanted

    asyncio.run(run())


# SV03, SV26: what is unloaded is gone, whatever content the name had when its requests came.
def test_an_unload_ends_requests_for_older_contents_of_the_name(root: Path, copy: Path) -> None:
    async def unload(service: Service, seconds: float) -> None:
        list_variants(copy, {"norms": "norms", "linear": "linear"})
        prepare = Held(service.engine, "_prepare")
        (old,) = ask(service, "norms")
        await until(prepare.waits.is_set, "it is generated")
        list_variants(copy, {"norms": "embed", "linear": "linear"})
        (new,) = ask(service, "norms")
        (other,) = ask(service, "linear")
        body = UnloadRequest(lora_name="norms", deadline_seconds=seconds)
        unloading = asyncio.create_task(Admin(service).unload(body))
        await until(lambda: service.catalog.is_hidden("norms"), "it is hidden")
        if not seconds:
            for generation in (old, new):
                _, fault = await ending(generation)
                assert isinstance(fault, NotServed)
        assert not unloading.done()
        prepare.go.set()
        told = await unloading
        assert told["requests_ended"] == (0 if seconds else 2)
        assert not [one for one in service.open if one.model == "norms"]
        if seconds:
            assert await ending(old) == (expected(root, "norms"), End("length"))
            assert await ending(new) == (expected(root, "embed"), End("length"))
        assert await ending(other) == (expected(root, "linear"), End("length"))

    async def run() -> None:
        async with started(copy) as service:
            await unload(service, 0.0)
            service.catalog.show("norms")
            await unload(service, WAIT)

    asyncio.run(run())


def test_changes_of_a_name_act_on_the_content_it_has_by_their_turn(copy: Path) -> None:
    async def run() -> None:
        async with started(copy) as service:
            admin, load = Admin(service), Held(service.catalog, "load")
            first = asyncio.create_task(admin.load(LoadRequest(lora_name="norms")))
            await until(load.waits.is_set, "it is read")
            second = asyncio.create_task(admin.load(LoadRequest(lora_name="norms")))
            third = asyncio.create_task(admin.unload(UnloadRequest(lora_name="norms")))
            await asyncio.sleep(0)
            list_variants(copy, {"norms": "embed"})
            digest = service.resolve("norms").digest  # type: ignore[union-attr]
            load.go.set()
            with pytest.raises(VariantUnavailable, match="has digest"):
                await first
            assert (await second)["digest"] == digest
            assert (await third)["digest"] == digest
            assert not service.router.stats()
            assert not admin._turns

    asyncio.run(run())


def test_the_bases_folder_name_is_a_variants_even_while_that_is_unloaded(copy: Path) -> None:
    async def run() -> None:
        async with started(copy) as service:
            service._folder_name = "tiny"
            list_variants(copy, {"linear": "linear"})
            assert service.names() == ["tiny", "linear"]
            list_variants(copy, {"linear": "linear", "tiny": "norms"})
            assert service.names() == ["base", "linear", "tiny"]
            await Admin(service).unload(UnloadRequest(lora_name="tiny"))
            assert service.names() == ["base", "linear"]
            with pytest.raises(KeyError):
                service.resolve("tiny")

    asyncio.run(run())


# SV24, R12: a flood for one model fills no queue but its own; what can never fit is no matter of
# trying again.
def test_a_flood_for_one_model_leaves_room_for_others(root: Path) -> None:
    async def run() -> None:
        async with started(root, max_running=1, max_queue=8) as service:
            for flooded in ("base", "linear"):
                prepare = Held(service.engine, "_prepare")
                accepted = ask(service, *[flooded] * 5)
                with pytest.raises(QueueFull, match="for this model wait, the limit is 4"):
                    ask(service, flooded)
                with pytest.raises(TooMany, match="6 sequences at once, the server takes 5; ask"):
                    service.submit([request(service, flooded) for _ in range(6)])
                accepted += ask(service, "norms", "embed")
                prepare.go.set()
                for generation in accepted:
                    assert (await ending(generation))[1] == End("length")

    asyncio.run(run())


def test_a_stop_answers_what_waits_and_what_runs(root: Path) -> None:
    async def run() -> None:
        async with started(root) as service:
            running = ask(service, "base", tokens=150)
            await running[0].events.get()
            load = Held(service.catalog, "load")
            waiting = ask(service, "linear", "norms", "embed")
            await until(load.waits.is_set, "they are read")
            await service.stop()
            load.go.set()
            for generation in running + waiting:
                _, fault = await ending(generation)
                assert "the server is stopping" in str(fault)
            with pytest.raises(ServingError, match="the server is stopping"):
                ask(service, "base")
            # Loads that end later find nobody.
            await asyncio.to_thread(service.loader._readers.shutdown)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_fault_where_a_request_starts_is_its_own(root: Path) -> None:
    async def run() -> None:
        async with started(root, max_running=1) as service:
            manager = service.engine._manager
            put = manager.input_queue.put

            def fails(*args: Any, **named: Any) -> None:
                manager.input_queue.put = put
                raise MemoryError

            manager.input_queue.put = fails
            broken, fine = ask(service, "linear", "linear")
            _, fault = await ending(broken)
            assert str(fault) == "internal error (MemoryError)"
            assert await ending(fine) == (expected(root, "linear"), End("length"))
            assert not service.engine.num_open
            service.engine.free(service.router.cache.slot(service.resolve("linear").digest))  # type: ignore[union-attr]

    asyncio.run(run())


def test_a_fault_of_a_look_at_the_family_ends_no_deadline(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TICK_SECONDS", 0.01)

    async def run() -> None:
        async with started(root, max_running=1, max_wait_seconds=0.1) as service:
            looks = Held(service.catalog, "refresh")
            looks.go.set()
            prepare = Held(service.engine, "_prepare")
            running, waiting = ask(service, "base", "base")
            looks.faults.append(RuntimeError("odd"))
            assert isinstance((await ending(waiting))[1], WaitedTooLong)
            assert not looks.faults
            prepare.go.set()
            assert (await ending(running))[1] == End("length")

    asyncio.run(run())


class FailsOnce:
    """A method that raises at its call number `at`, and works before and after."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, *, at: int) -> None:
        self.left = at
        original = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError
            return original(*args, **named)

        patch.setattr(owner, name, call)


# SV11, SV12: a fault half-way, of memory above all, must leave the slots as they were.
def test_growth_and_installs_that_fail_half_way_leave_all_answers_right(
    root: Path, copy: Path, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {name: expected(root, name) for name in VARIANTS}
    served = ["linear", "norms"]
    list_variants(copy, {name: name for name in served})

    async def run() -> None:
        async with started(copy, cache_bytes=3 * slot_bytes, max_running=2) as service:

            async def answers(name: str) -> bool:
                """False for a refusal, which the next try does not have to wait for."""
                try:
                    (generation,) = ask(service, name)
                    tokens, end = await ending(generation)
                except VariantUnavailable as error:
                    end = error
                if isinstance(end, VariantUnavailable):
                    assert "MemoryError" in str(end)
                    for variant in service.router._residency.variants.values():
                        variant.retry_at = 0.0
                    return False
                assert (tokens, end) == (wanted[name], End("length")), name
                return True

            faults = [
                ("embed", DeltaPatch, "resize", 4),  # of 15 modules, in smaller slots so far
                ("matrix", Engine, "reserve", 1),
                ("rich", DeltaPatch, "put", 6),
                (None, Engine, "free", 1),
                (None, DeltaPatch, "clear", 3),
            ]
            for name in served:
                assert await answers(name)
            for new, owner, method, at in faults:
                there = service.residents()
                name = new or next(n for n in served if there[n].phase is not Phase.RESIDENT)
                if new:
                    served.append(new)
                    list_variants(copy, {name: name for name in served})
                fault = FailsOnce(monkeypatch, owner, method, at=at)
                others = [other for other in served if other != name]
                running = ask(service, others[0], tokens=60)
                assert not await answers(name), (name, method)
                assert fault.left <= 0
                for other in [*others, name, *others]:
                    assert await answers(other), (name, method)
                assert (await ending(running[0]))[0][:8] == wanted[others[0]]
            cache = service.router.cache
            assert service.engine._bank.slots == {cache.slot(d) for d in cache.digests}
            assert service.engine.arena_bytes <= cache.budget_bytes

    asyncio.run(run())


# R7, SV30, SV34: one that is larger than all there is stands in nobody's way.
def test_one_larger_than_the_budget_is_refused_and_evicts_nobody(copy: Path) -> None:
    list_variants(copy, {"linear": "linear", "norms": "norms"})

    async def run() -> None:
        async with started(copy, cache_bytes=2 * 7712) as service:
            for generation in ask(service, "linear", "norms"):
                assert (await ending(generation))[1] == End("length")
            list_variants(copy, {name: name for name in ("linear", "norms", "rich")})
            (large,) = ask(service, "rich")
            _, fault = await ending(large)
            assert isinstance(fault, VariantUnavailable)
            assert "the cache has 15424; raise --cache-bytes" in str(fault)
            stats = service.residents()
            assert {stats[name].phase for name in ("linear", "norms")} == {Phase.RESIDENT}
            assert {stats[name].evictions for name in stats} == {0}

    asyncio.run(run())


def test_a_slot_that_could_not_be_emptied_keeps_no_growth_from_happening(
    root: Path, copy: Path, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_variants(copy, {"linear": "linear", "norms": "norms"})

    async def run() -> None:
        async with started(copy, cache_bytes=slot_bytes) as service:
            for generation in ask(service, "linear", "norms"):
                assert (await ending(generation))[1] == End("length")
            list_variants(copy, {"rich": "rich", "linear": "linear"})
            # Only one such slot fits: the second variant has to go from its own.
            fault = FailsOnce(monkeypatch, Engine, "free", at=1)
            (large,) = ask(service, "rich")
            assert await ending(large) == (expected(root, "rich"), End("length"))
            assert fault.left < 0
            assert service.router.cache.num_slots == 1

    asyncio.run(run())
