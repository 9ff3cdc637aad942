"""Who hangs and who works long: by CPU time, not by the clock."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from front_kit import Stage, stage
from serving_kit import wait_for

from soupkit.errors import ServingError
from soupkit.serving import fleet as fleet_module
from soupkit.serving import member as member_module
from soupkit.serving import pulse
from soupkit.serving.fleet import Fleet
from soupkit.serving.member import LATE_LOAD_SECONDS, ReplicaProcess
from soupkit.serving.pulse import EFFORT_SECONDS, Pulse, Stillness, effort_of
from soupkit.serving.replica_process import ReplicaSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CPU times come from /proc")


def play(scene: Callable[[Stage], Awaitable[None]], count: int = 2, **settings: Any) -> None:
    async def run() -> None:
        async with stage(count, **settings) as found:
            await scene(found)

    asyncio.run(asyncio.wait_for(run(), 60))


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed a line."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_still_is_the_time_without_a_change_that_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    still = Stillness(step=0.5, longest_gap=4.0)
    found = []
    for seconds, number in [
        (1, 0.0), (2, 0.4), (3, 0.5), (1, 0.9), (1, 0.1), (3, 0.0), (60, 0.0), (1, None), (1, 0.0),
    ]:  # fmt: skip
        now += seconds
        found.append(still.look(number))
    #               a change  less than a step: from the last mark   stopped
    assert found == [1, 3, 0, 1, 2, 0, 4, 0, 1]


def test_an_engine_that_computes_is_not_still_and_one_that_waits_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if a second had passed whenever it is looked at.
    seconds = iter(range(1, 1 << 30))
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    engine, goes_on, ends = Pulse(), threading.Event(), threading.Event()
    state, look = ["computes"], engine.still_seconds

    def run() -> None:
        engine.beat()
        while state[0] == "computes":
            sum(range(10_000))
        goes_on.wait()
        while not ends.is_set():
            engine.beat()
            ends.wait(0.001)

    thread = threading.Thread(target=run)
    assert look() == 0, "it has not begun"
    thread.start()
    look()
    wait_for(lambda: look() == 0, "a thread that computes is at work")
    wait_for(lambda: look() == 0, "a thread that computes is at work")
    state[0] = "waits"
    wait_for(lambda: look() > 50, "one that waits does nothing")
    goes_on.set()
    wait_for(lambda: look() == 0, "one that comes round, if only to wait, is at work")
    ends.set()
    thread.join()
    wait_for(lambda: look() == 0, "one that has ended does not hang")


def test_an_engine_whose_compiler_computes_is_not_still(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ends, seconds = Pulse(), threading.Event(), iter(range(1, 1 << 30))
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    def run() -> None:
        engine.beat()
        ends.wait()

    thread = threading.Thread(target=run)
    thread.start()
    compiler = "import sys; print(1, flush=True); sys.stdin.read()\nwhile True: pass"
    with child(compiler) as process:
        wait_for(lambda: engine.still_seconds() > 20, "both wait")
        assert process.stdin is not None
        process.stdin.close()
        wait_for(lambda: engine.still_seconds() == 0, "it compiles")
    ends.set()
    thread.join()


def test_the_effort_of_a_process_is_that_of_all_it_has_started() -> None:
    busy = "import sys; print(1, flush=True)\nwhile True: pass"
    parent = (
        "import subprocess, sys\n"
        f"with subprocess.Popen([sys.executable, '-c', {busy!r}], stdout=subprocess.PIPE) as one:\n"
        "    one.stdout.readline()\n"
        "    print(one.pid, flush=True)\n"
        "    sys.stdin.read()\n"
        "    one.kill()\n"
    )
    with child(parent) as process:
        first = effort_of(process.pid)
        assert first is not None
        wait_for(lambda: (effort_of(process.pid) or 0) > first + 5 * EFFORT_SECONDS, "it computes")
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    with child("import sys; print(1, flush=True); sys.stdin.read()") as process:
        os.kill(process.pid, signal.SIGSTOP)
        first = effort_of(process.pid)
        assert first is not None
        assert effort_of(process.pid) == first
    assert effort_of(process.pid) is None


def test_a_replica_that_is_stopped_at_its_start_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_module, "LOOK_SECONDS", 0.05)
    started: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def create_stopped(*args: Any, **rest: Any) -> asyncio.subprocess.Process:
        started.append(await create(*args, **rest))
        os.kill(started[-1].pid, signal.SIGSTOP)
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_stopped)
    line = ReplicaSettings("family").to_json(
        index=0, count=1, keys=["k" * (1 << 20)], admin_keys=[]
    )

    async def run() -> None:
        with pytest.raises(ServingError, match=r"did nothing for 0\.3 seconds at its start"):
            await ReplicaProcess.start(line, threads=1, still_seconds=0.3)
        assert started[0].returncode == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replica_whose_engine_hangs_gets_no_more_requests_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "STILL_SECONDS", 30.0)

    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].still_seconds = 9.0
        await it.sees()
        assert (await it.ask("a")).json()["from"] == 0, "a step may take a while"
        it.fakes[0].still_seconds = 11.0
        await it.sees()
        assert (await it.ask("a")).json()["from"] == 1
        assert not it.fakes[0].over.is_set()
        it.fakes[0].still_seconds = 31.0
        while len(it.fakes) < 3:
            it.fleet.members[0].ask_now.set()
            await asyncio.sleep(0)
        assert it.fakes[0].over.is_set()

    play(scene)
    assert "replica 0 has done nothing for 30 seconds and is killed" in caplog.text


def test_a_front_that_was_stopped_itself_blames_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by SIGSTOP or a machine that slept: its clock has moved on, and an answer was late."""
    monkeypatch.setattr(fleet_module, "ASK_SECONDS", 0.0)
    late = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    for module in (fleet_module, pulse):
        monkeypatch.setattr(module, "time", clock)

    async def scene(it: Stage) -> None:
        nonlocal late
        ask, failures = Fleet._ask, 2

        async def fails(fleet: Fleet, member: Any) -> bool:
            nonlocal late, failures
            if not failures:
                return await ask(fleet, member)
            failures -= 1
            late += 3600.0
            return False

        monkeypatch.setattr(Fleet, "_ask", fails)
        it.fleet.members[0].ask_now.set()
        while failures:
            await asyncio.sleep(0)
        assert (await it.ask("a")).status_code == 200
        assert not it.fakes[0].over.is_set()

    play(scene, 1)


def test_a_load_that_never_ends_is_begun_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    late = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    for module in (fleet_module, pulse):
        monkeypatch.setattr(module, "time", clock)

    async def scene(it: Stage) -> None:
        nonlocal late
        it.fakes[0].phases["a"] = "loading"
        it.fakes[0].hold = asyncio.Event()
        await it.sees()
        waits = asyncio.create_task(it.ask("a"))
        while not it.fakes[0].asked:
            await asyncio.sleep(0)
        late = LATE_LOAD_SECONDS + 1
        await it.sees()
        assert (await it.ask("a")).json()["from"] == 1
        assert (await it.ask("a")).json()["from"] == 1
        it.fakes[0].hold.set()
        assert (await waits).json()["from"] == 0

    play(scene)
