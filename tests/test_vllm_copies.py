"""Loading and unloading beside an engine, without vLLM: a stand-in engine keeps what it is told.

Loads are held open by events, so nothing here depends on time.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from serving_kit import add_to_family, load_variant, make_family

from soupkit.errors import BundleError, ServingError
from soupkit.family import VariantRef
from soupkit.family_write import remove_variant
from soupkit.serving.vllm import store as store_module
from soupkit.serving.vllm.copies import Copies
from soupkit.serving.vllm.store import PREFIX, Store, read_copy, remove_leftovers

NAMES = ("linear", "norms", "rich")


class Request(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


class Engine:
    """What an engine would: the numbers that it has, and whether it ever was asked for another."""

    def __init__(self) -> None:
        self.numbers: dict[int, Any] = {}
        self.aborted: list[str] = []
        self.refuses = False
        self.refusal: Exception = RuntimeError("Call to add_lora method failed: no place")
        self.still_open = 0  # so many removals are refused
        self.adding = 0
        # Where these are there, adding and removing wait for them.
        self.adds: asyncio.Event | None = None
        self.removes: asyncio.Event | None = None

    async def add_lora(self, lora_request: Any) -> bool:
        await asyncio.sleep(0)
        self.adding += 1
        if self.adds is not None:
            await self.adds.wait()
        if self.refuses:
            raise self.refusal
        self.numbers[lora_request.lora_int_id] = read_copy(Path(lora_request.lora_path))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        await asyncio.sleep(0)
        if self.removes is not None:
            await self.removes.wait()
        if self.still_open:
            self.still_open -= 1
            raise RuntimeError("Call to remove_lora method failed: variant 1 has 1 requests")
        del self.numbers[lora_id]
        return True

    async def abort(self, request_id: list[str]) -> None:
        self.aborted += request_id


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"), names=NAMES) / "family"


class Held(Store):
    """A store whose copies can be held open, and that counts them."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.gates: dict[str, threading.Event] = {}
        self.began: list[str] = []

    def copy(self, ref: VariantRef) -> Path:
        self.began.append(ref.name)
        gate = self.gates.get(ref.name)
        assert gate is None or gate.wait(60)
        return super().copy(ref)


def run(
    family: Path, story: Callable[[Copies, Engine, Held], Awaitable[None]], **settings: Any
) -> None:
    """A story on a loop of its own."""

    async def main() -> None:
        store = Held(family, budget=settings.pop("budget", None))
        engine = Engine()
        copies = Copies(store, engine, Request, **settings)
        try:
            await asyncio.wait_for(story(copies, engine, store), 60)
        finally:
            for gate in store.gates.values():
                gate.set()
            copies.close()
        assert not store.folder.exists()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_many_that_ask_for_one_variant_wait_for_one_load_and_nobody_else_does(family: Path) -> None:
    """R6, SV21: while a load is held open, another variant is loaded and used."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        store.gates["rich"] = threading.Event()
        waiting = [asyncio.create_task(copies.take("rich")) for _ in range(6)]
        await until(lambda: store.began == ["rich"])
        other = await copies.take("linear")
        async with copies.using(other, "r1") as request:
            assert request.lora_int_id in engine.numbers
        waiting[0].cancel()  # a client that goes away ends nothing for the others
        assert not any(task.done() for task in waiting[1:])
        store.gates["rich"].set()
        found = await asyncio.gather(*waiting[1:])
        assert len({request.lora_int_id for request in found}) == 1
        assert store.began.count("rich") == 1

    run(family, story)


def test_loads_of_different_variants_at_once_are_not_mixed_up(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        engine.adds = asyncio.Event()
        tasks = [asyncio.create_task(copies.take(name)) for name in NAMES]
        await until(lambda: engine.adding == len(NAMES))
        engine.adds.set()
        found = await asyncio.gather(*tasks)
        for name, request in zip(NAMES, found, strict=True):
            assert request.lora_name == name
            assert engine.numbers[request.lora_int_id].digest == store.family.variants[name].digest
            async with copies.using(request, name) as current:
                assert current == request

    run(family, story)


def test_an_unknown_name_is_no_error_of_the_server(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        with pytest.raises(KeyError):
            await copies.take("nobody")
        assert copies.names() == sorted(NAMES)

    run(family, story)


def test_the_engine_has_what_the_bundle_says_and_its_path_names_the_content(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("rich")
        expected = load_variant(family.parent, "rich")
        found = engine.numbers[request.lora_int_id]
        assert request.lora_path.endswith(expected.digest.removeprefix("sha256:"))
        assert found.digest == expected.digest
        for name, value in expected.raw.items():
            assert torch.equal(found.raw[name], value)
        for name, value in expected.deltas.items():
            for mine, theirs in zip(found.deltas[name].parts, value.parts, strict=True):
                assert torch.equal(mine, theirs)

    run(family, story)


def test_a_rotten_variant_fails_its_own_requests_and_is_not_read_again_for_a_while(
    tmp_path: Path,
) -> None:
    """E11, R5."""
    root = make_family(tmp_path, names=("linear", "norms"))
    file = root / "family/variants/norms/variant.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 4
    file.write_bytes(damaged)
    now = [0.0]

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        for _ in range(3):
            with pytest.raises(ServingError, match=r"'norms' cannot be loaded.*digest"):
                await copies.take("norms")
        assert store.began.count("norms") == 1
        assert list(store.folder.iterdir()) == []
        await copies.take("linear")
        # Repaired, and asked for after a while.
        damaged[-3] ^= 4
        file.write_bytes(damaged)
        now[0] += 31
        assert (await copies.take("norms")).lora_int_id in engine.numbers

    run(root / "family", story, clock=lambda: now[0])


def test_a_variant_that_vanished_stays_for_those_who_have_it(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=("linear", "norms"))

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("norms")
        expected = load_variant(root, "norms")
        for name in ("norms", "linear"):
            (root / f"family/variants/{name}").rename(root / name)
        assert await copies.take("norms") == request
        held = engine.numbers[request.lora_int_id]
        store.drop(expected.digest)  # even its copy: what is mapped stays
        for name, value in expected.raw.items():
            assert torch.equal(held.raw[name], value)
        with pytest.raises(ServingError, match="'linear' cannot be loaded"):
            await copies.take("linear")

    run(root / "family", story)


@pytest.mark.parametrize("kind", [RuntimeError, ServingError])
def test_what_the_engine_refuses_leaves_no_copy(family: Path, kind: type[Exception]) -> None:
    """In an engine of its own process the error is another than in the server's."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        engine.refuses = True
        engine.refusal = kind("'linear' cannot be loaded: no place")
        with pytest.raises(ServingError, match=r"'linear' cannot be loaded.*no place"):
            await copies.take("linear")
        assert list(store.folder.iterdir()) == []

    run(family, story)


def test_unloading_hides_at_once_waits_for_open_requests_and_frees(family: Path) -> None:
    """R10, SV02."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("linear")
        async with copies.using(request, "r1"):
            unloading = asyncio.create_task(copies.unload("linear"))
            await until(lambda: "linear" not in copies.names())
            with pytest.raises(KeyError):
                await copies.take("linear")
            with pytest.raises(ServingError, match="was unloaded"):
                async with copies.using(request, "late"):
                    pass
            assert engine.numbers
            assert not unloading.done()
        await unloading
        assert not engine.numbers
        assert list(store.folder.iterdir()) == []
        await copies.load("linear")
        assert list(engine.numbers) == [2]

    run(family, story)


def test_a_variant_that_is_unloaded_while_it_loads_is_freed_and_serves_nobody(
    family: Path,
) -> None:
    """R10."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        store.gates["linear"] = threading.Event()
        waiting = asyncio.create_task(copies.take("linear"))
        await until(lambda: store.began == ["linear"])
        unloading = asyncio.create_task(copies.unload("linear"))
        await until(lambda: "linear" not in copies.names())
        assert not unloading.done()
        store.gates["linear"].set()
        request = await waiting
        with pytest.raises(ServingError, match="was unloaded"):
            async with copies.using(request, "r1"):
                pass
        await unloading
        assert not engine.numbers
        assert list(store.folder.iterdir()) == []

    run(family, story)


def test_what_was_replaced_while_it_loaded_is_freed_and_its_request_gets_the_new_content(
    tmp_path: Path,
) -> None:
    root = make_family(tmp_path, names=("linear",))

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        engine.adds = asyncio.Event()
        waiting = asyncio.create_task(copies.take("linear"))
        await until(lambda: engine.adding == 1)
        add_to_family(root, "linear", lambda n: "_proj" in n, encoding="row", seed=78)
        engine.adds.set()
        async with copies.using(await waiting, "r1") as request:
            newest = load_variant(root, "linear").digest
            assert engine.numbers[request.lora_int_id].digest == newest
        await until(lambda: len(engine.numbers) == 1)

    run(root / "family", story)


def test_requests_that_share_an_id_are_counted_each(family: Path) -> None:
    """R3: clients choose ids, with the header X-Request-Id."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("linear")
        async with copies.using(request, "same"):
            async with copies.using(request, "same"):
                pass
            unloading = asyncio.create_task(copies.unload("linear"))
            await until(lambda: "linear" not in copies.names())
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.numbers
        await unloading
        assert not engine.numbers

    run(family, story)


def test_a_request_that_is_open_in_the_engine_a_moment_longer_leaves_nothing(
    family: Path,
) -> None:
    """One that a stop string ended: the server knows first."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        await copies.take("linear")
        engine.still_open = 2
        await copies.unload("linear")
        assert not engine.numbers
        assert not engine.still_open

    run(family, story)


def test_a_variant_that_left_the_family_leaves_the_engine_when_anything_is_asked_for(
    tmp_path: Path,
) -> None:
    root = make_family(tmp_path, names=("linear", "norms"))

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("linear")
        async with copies.using(request, "r1"):
            remove_variant(root / "family", "linear")
            kept = await copies.take("norms")
            with pytest.raises(KeyError):
                await copies.take("linear")
            assert copies.known("linear") is None
            assert len(engine.numbers) == 2
        await until(lambda: list(engine.numbers) == [kept.lora_int_id])

    run(root / "family", story)


def test_a_name_is_known_between_the_check_of_a_request_and_its_run(family: Path) -> None:
    """With room for one copy, another request's load takes its place there."""
    probe = Store(family)
    budget = max(probe.size(probe.family.variants[name]) for name in ("linear", "norms"))
    probe.close()

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        assert copies.known("linear") is None
        checked = await copies.take("linear")
        await copies.take("norms")
        assert copies.known("linear") == checked
        assert checked.lora_int_id not in engine.numbers
        async with copies.using(copies.known("linear"), "r1") as request:
            digest = engine.numbers[request.lora_int_id].digest
            assert digest == store.family.variants["linear"].digest
        assert copies.known("nobody") is None

    run(family, story, budget=budget)


def test_requests_that_do_not_end_in_time_are_aborted(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        request = await copies.take("linear")
        ended = asyncio.Event()

        async def endless() -> None:
            async with copies.using(request, "r1"):
                await until(lambda: bool(engine.aborted))
            ended.set()

        task = asyncio.create_task(endless())
        await until(lambda: bool(copies._copies[1].users))
        await copies.unload("linear", drain_seconds=0.01)
        assert ended.is_set()
        await task
        assert engine.aborted == ["r1"]
        assert not engine.numbers

    run(family, story)


def test_another_content_of_a_name_takes_its_place_and_open_requests_keep_theirs(
    tmp_path: Path,
) -> None:
    """R1."""
    root = make_family(tmp_path, names=("linear",))

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        old = await copies.take("linear")
        async with copies.using(old, "r1"):
            add_to_family(root, "linear", lambda n: "_proj" in n, encoding="row", seed=77)
            assert copies.current("linear") is None
            new = await copies.take("linear")
            assert new.lora_int_id != old.lora_int_id
            assert new.lora_path != old.lora_path
            assert copies.requests() == {"linear": new}
            assert old.lora_int_id in engine.numbers
        await until(lambda: list(engine.numbers) == [new.lora_int_id])
        # One that was resolved before the change is served the new content.
        async with copies.using(old, "r2") as request:
            assert request == new
        assert [path.name for path in store.folder.iterdir()] == [Path(new.lora_path).name]

    run(root / "family", story)


def test_a_variant_that_is_asked_for_while_it_leaves_keeps_its_copy(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        old = await copies.take("linear")
        copies._let_go(copies._copies[old.lora_int_id])
        engine.adds, engine.removes = asyncio.Event(), asyncio.Event()
        again = asyncio.create_task(copies.take("linear"))
        # It has found the copy that is there, and has not been mapped by the engine.
        await until(lambda: engine.adding == 2)
        engine.removes.set()
        await until(lambda: not copies._copies)
        engine.adds.set()
        assert (await again).lora_int_id in engine.numbers

    run(family, story)


def test_the_budget_of_host_memory_holds_and_what_is_in_use_or_pinned_stays(family: Path) -> None:
    """R7, R8."""
    sizes = {}
    probe = Store(family)
    for name, ref in probe.family.variants.items():
        sizes[name] = probe.size(ref)
    probe.close()

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        def names() -> list[str]:
            return [copy.ref.name for copy in copies._copies.values()]

        pinned = await copies.take("linear")
        await copies.take("norms")
        await copies.take("rich")
        assert names() == ["linear", "rich"]
        assert len(engine.numbers) == 2
        rich = await copies.take("rich")
        async with copies.using(rich, "r1"), copies.using(pinned, "r2"):
            with pytest.raises(ServingError, match="all variants in host memory have requests"):
                await copies.take("norms")
        assert names() == ["linear", "rich"]
        # That was no fault of the variant: it is tried again at once.
        await copies.take("norms")
        assert names() == ["linear", "norms"]

    budget = sizes["linear"] + max(sizes["norms"], sizes["rich"]) + 10
    run(family, story, budget=budget, pins=frozenset({"linear"}), room_seconds=0.01)


def test_one_that_never_fits_says_so(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        with pytest.raises(
            ServingError, match=r"takes \d+ bytes of host memory, the budget is 100"
        ):
            await copies.take("rich")

    run(family, story, budget=100)


def test_only_checked_copies_are_mapped(family: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no checked copy"):
        read_copy(family / "variants/linear")
    store = Store(family, folder=tmp_path)
    copy = store.copy(store.family.variants["linear"])
    renamed = copy.with_name("0" * 64)
    copy.rename(renamed)
    with pytest.raises(ServingError, match="no checked copy"):
        read_copy(renamed)
    store.close()


def test_a_variant_of_another_base_is_refused(tmp_path: Path) -> None:
    one = make_family(tmp_path / "one", names=("linear",))
    two = make_family(tmp_path / "two", names=("linear",), hidden_size=20)
    store = Store(one / "family", folder=tmp_path)
    (one / "family/variants/linear").rename(tmp_path / "own")
    (two / "family/variants/linear").rename(one / "family/variants/linear")
    with pytest.raises(BundleError, match="made for another base"):
        store.copy(store.family.variants["linear"])
    assert list(store.folder.iterdir()) == []
    store.close()


def test_a_container_with_little_shared_memory_keeps_copies_elsewhere(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, other = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(store_module, "SHARED_MEMORY", memory)
    monkeypatch.setattr(store_module.tempfile, "gettempdir", lambda: str(other))
    free = {memory: 1 << 30, other: 1 << 40}
    monkeypatch.setattr(
        store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path])
    )
    for size, parent in ((1 << 30, memory), (1 << 10, other)):
        free[memory] = size
        store = Store(family)
        assert store.folder.parent == parent
        assert store.budget == free[parent] // 2
        store.close()
    assert "is too small for variants of" in caplog.text


def test_copies_of_processes_that_were_killed_go_and_those_of_living_ones_stay(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their locks: in another container a living one's number is nobody's, or another's here."""
    living = Store(family, folder=tmp_path)
    moved = living.folder.rename(tmp_path / f"{PREFIX}4000000-abcd_ef1")
    ours = tmp_path / f"{PREFIX}{os.getpid()}-killed_1"
    linked = tmp_path / f"{PREFIX}4000000-linked_1"
    other = tmp_path / "notes"
    strangers = [tmp_path / f"{PREFIX}{name}" for name in ("my-notes123", "7-notes", "2026-11-30")]
    for folder in (ours, other, *strangers):
        folder.mkdir()
        (folder / "copy").touch()
    linked.symlink_to(other)
    remove_leftovers(tmp_path)
    assert moved.exists()
    assert not ours.exists()
    assert (linked / "copy").exists()
    assert all(folder.exists() for folder in strangers)
    moved.rename(living.folder)
    living.close()
    assert not living.folder.exists()
    # What is another user's stays.
    ours.mkdir()
    monkeypatch.setattr(store_module.os, "getuid", lambda: os.geteuid() + 1)
    remove_leftovers(tmp_path)
    assert ours.exists()


def test_a_folder_that_was_taken_for_a_leftover_at_its_birth_is_made_again(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, made = store_module.hold_folder, []

    def late(folder: Path) -> int | None:
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()
        if len(made) == 2:
            return None  # somebody looks at it
        found: int | None = hold(folder)
        if len(made) == 3:
            folder.rmdir()
        return found

    monkeypatch.setattr(store_module, "hold_folder", late)
    monkeypatch.setattr(store_module, "remove_leftovers", lambda _: None)
    store = Store(family, folder=tmp_path)
    assert store.folder == made[3]
    assert store.copy(store.family.variants["linear"]).exists()
    store.close()


def test_what_a_killed_server_left_in_memory_does_not_push_the_next_one_out_of_it(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    left = memory / f"{PREFIX}4000000-abcdefgh"
    left.mkdir(parents=True)
    monkeypatch.setattr(store_module, "SHARED_MEMORY", memory)
    monkeypatch.setattr(
        store_module.shutil,
        "disk_usage",
        lambda _: SimpleNamespace(free=0 if left.exists() else 1 << 30),
    )
    store = Store(family)
    assert store.folder.parent == memory
    store.close()


def test_a_store_that_was_tidied_away_is_made_again_and_nothing_that_is_mapped_is_lost(
    family: Path,
) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        first = await copies.take("linear")
        store_module.shutil.rmtree(store.folder)
        second = await copies.take("norms")
        for request, name in ((first, "linear"), (second, "norms")):
            expected = load_variant(family.parent, name)
            held = engine.numbers[request.lora_int_id]
            for key, value in expected.raw.items():
                assert torch.equal(held.raw[key], value)
        assert (Path(second.lora_path).parent, store._lock is None) == (store.folder, False)

    run(family, story)


def test_a_full_disk_is_told_with_what_to_do_and_leaves_nothing(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = store_module.shutil.copyfile

    def full(source: Path, target: Path, **named: Any) -> None:
        copy(source, target, **named)
        if target.name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store_module.shutil, "copyfile", full)
            with pytest.raises(ServingError, match=r"is full: SOUPKIT_STORE.*HOST_CACHE_BYTES"):
                await copies.take("linear")
        assert list(store.folder.iterdir()) == []
        await copies.take("norms")

    run(family, story)
