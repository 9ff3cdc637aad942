"""Faults of a front and its replicas that an attack found: each test failed once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_kit import ADMIN, Fake, Stage, stage
from serving_kit import wait_for

from soupkit.errors import ServingError
from soupkit.serving import fleet as fleet_module
from soupkit.serving import front_app
from soupkit.serving.fleet import Fleet
from soupkit.serving.front import whole_events
from soupkit.serving.front_app import FrontServer


def play(scene: Callable[[Stage], Awaitable[None]], count: int = 2, **settings: Any) -> None:
    async def run() -> None:
        async with stage(count, **settings) as found:
            await scene(found)

    asyncio.run(asyncio.wait_for(run(), 60))


async def raw_get(it: Stage, path: bytes, route: str) -> tuple[int, bytes]:
    """As a client asks that changes nothing of a path; httpx takes dots and fragments out."""
    sent: list[Any] = []
    ask = [{"type": "http.request", "body": b""}]

    async def receive() -> Any:
        if not ask:
            await asyncio.Event().wait()
        return ask.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": route, "raw_path": path, "headers": [],
        "query_string": b"", "server": ("front", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    await it.app(scope, receive, send)
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)


@pytest.mark.parametrize("name", ["..", ".", "a#b", "%2e%2e", "a%0d%0ab"])
def test_a_path_comes_to_a_replica_as_it_was_sent(name: str) -> None:
    async def scene(it: Stage) -> None:
        path = f"/v1/models/{name}"
        await raw_get(it, path.encode(), path)
        assert [one for fake in it.fakes for one in fake.targets] == [path.encode()]

    play(scene)


def test_only_a_name_follows_models() -> None:
    async def scene(it: Stage) -> None:
        for path in ("/v1/models/../../status", "/v1/models/a/b", "/v1/models/a/../b"):
            status, _ = await raw_get(it, path.encode(), path)
            assert status == 404
        assert not any(fake.targets for fake in it.fakes)
        moved = await it.client.get("/v1/models/")
        assert (moved.status_code, moved.headers["location"]) == (307, "http://front/v1/models")

    play(scene)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_on_a_replica_that_is_lost_is_no_internal_error(pinned: bool) -> None:
    async def scene(it: Stage) -> None:
        answer = it.fakes[0].answer

        async def is_lost(request: httpx.Request) -> httpx.Response:
            if request.method == "POST":
                raise httpx.ReadError("gone")
            return await answer(request)

        it.fakes[0].answer = is_lost  # type: ignore[method-assign]
        body = {"lora_name": "a", "pinned": pinned}
        told = await it.client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert (told.status_code, told.json()["id"]) == (200, "a")
        assert ("a" in it.fakes[1].pinned) == pinned

    play(scene, pin=("a",))


def test_what_was_unpinned_while_its_replica_was_down_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        spawn, goes_on = it.fleet._spawn, asyncio.Event()

        async def fails_first(line: str) -> Any:
            if not goes_on.is_set():
                await goes_on.wait()
                raise ServingError("not yet")
            return await spawn(line)

        it.fleet._spawn = fails_first
        it.fakes[0].over.set()
        while it.fleet.members[0].is_up:
            await asyncio.sleep(0)
        body = {"lora_name": "a", "pinned": False}
        told = await it.client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert told.status_code == 200
        goes_on.set()
        while len(it.fakes) < 3:
            await asyncio.sleep(0)
        assert it.fakes[2].line["settings"]["pin"] == []

    play(scene, pin=("a",))


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("no JSON")])
def test_a_start_that_fails_in_any_way_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        spawn, failures = it.fleet._spawn, [error, error]

        async def fails_first(line: str) -> Any:
            if failures:
                raise failures.pop()
            return await spawn(line)

        it.fleet._spawn = fails_first
        it.fakes[0].over.set()
        assert (await it.ask("a")).status_code == 200
        assert len(it.fakes) == 2

    play(scene, 1)
    assert caplog.text.count("replica 0 does not start") == 2


@pytest.mark.parametrize("told", [{"error": {"message": "internal error"}}, [], {"state": "ready"}])
def test_a_status_that_is_none_is_one_of_a_replica_that_is_down(told: Any) -> None:
    async def scene(it: Stage) -> None:
        status = Fake.status
        it.fakes[0].status = lambda: told  # type: ignore[method-assign]
        it.fleet.members[0].ask_now.set()
        while it.fleet.members[0].is_up:
            await asyncio.sleep(0)
        assert (await it.client.get("/status")).json()["replicas"][0]["state"] == "down"
        it.fakes[0].status = lambda: status(it.fakes[0])  # type: ignore[method-assign]
        while not it.fleet.members[0].is_up:
            it.fleet.members[0].ask_now.set()
            await asyncio.sleep(0)
        assert (await it.ask("a")).status_code == 200

    play(scene, 1)


def test_a_replica_that_hangs_is_killed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "ASK_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        first, got = it.fakes[0], []

        def dies_late(number: int) -> None:
            got.append(number)
            asyncio.get_running_loop().call_later(0.05, first.over.set)

        first.send_signal = dies_late  # type: ignore[method-assign]
        first.state = "cannot generate"
        it.fleet.members[0].ask_now.set()
        while len(it.fakes) < 2:
            await asyncio.sleep(0)
        assert got == [signal.SIGKILL]

    play(scene, 1)
    assert caplog.text.count("and is killed") == 1


def test_a_second_ctrl_c_waits_for_no_replica(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene(it: Stage) -> None:
        stuck, got = it.fakes[0], []

        def stops_late(number: int) -> None:
            got.append(number)
            if number == signal.SIGKILL:
                stuck.over.set()

        stuck.send_signal = stops_late  # type: ignore[method-assign]
        server = FrontServer(it.app, it.fleet, host="127.0.0.1", port=0)
        # `serve` but for its handlers of signals, which would be this process's.
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0)
        server.handle_exit(signal.SIGINT, None)
        while not got:
            await asyncio.sleep(0)
        server.handle_exit(signal.SIGINT, None)
        await asyncio.wait_for(serving, 20)
        assert got[:2] == [signal.SIGTERM, signal.SIGKILL]

    play(scene, 1)
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_while_replicas_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_: Fleet) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(Fleet, "start", start)
    monkeypatch.setattr(front_app, "open_family", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        front_app.run("family", replicas=2, port=0)


@pytest.mark.skipif(sys.platform != "linux", reason="a process that is stopped, and its parent's")
def test_a_stopped_process_ends_with_the_one_that_started_it() -> None:
    child = (
        "import os, signal\n"
        "from soupkit.serving import lifeline\n"
        "lifeline.hold()\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE).wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())

        def state() -> str:
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return "gone"

        try:
            wait_for(lambda: state() == "T", "it is stopped")
            started.kill()
            wait_for(lambda: state() in ("gone", "Z"), "it has ended")
        finally:
            if state() == "T":
                os.kill(pid, signal.SIGKILL)


def test_bodies_that_wait_for_a_replica_are_bounded() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].over.set()
        await it.sees()
        most = it.fleet.most_waiting
        assert most == 4
        waiting = [asyncio.create_task(it.ask("a")) for _ in range(most + 1)]
        answers, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = [one.result() for one in answers]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        it.fleet.terminate()
        assert {(await one).status_code for one in waiting} == {429, 503}

    play(scene, 1, max_queue=4)


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
def test_events_that_came_together_are_sent_together(size: int) -> None:
    """One by one each was a write of its own, and asyncio told of each whose client was gone."""
    told = b"".join(b'data: {"n": %d}\n\n' % n for n in range(8))

    async def run() -> list[bytes]:
        async def parts() -> AsyncIterator[bytes]:
            for at in range(0, len(told), size):
                yield told[at : at + size]

        return [part async for part in whole_events(parts())]

    found = asyncio.run(run())
    assert b"".join(found) == told
    assert all(part.endswith(b"\n\n") for part in found)
    assert len(found) <= -(-len(told) // size)


def test_one_replica_that_hangs_spoils_no_scrape() -> None:
    async def scene(it: Stage) -> None:
        answer, seconds = it.fakes[0].answer, []

        async def hangs(request: httpx.Request) -> httpx.Response:
            if request.url.path != "/metrics":
                return await answer(request)
            seconds.append(request.extensions["timeout"]["read"])
            raise httpx.ReadTimeout("it hangs")

        it.fakes[0].answer = hangs  # type: ignore[method-assign]
        found = await it.client.get("/metrics")
        assert 'soupkit_loads_total{replica="1"} 2.0' in found.text
        assert 'replica="0"} 2.0' not in found.text
        assert seconds[0] < 10, "Prometheus would not wait so long"

    play(scene)
