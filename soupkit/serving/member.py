"""One replica as its front sees it: its process, what it told last, what it was given since."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from soupkit.errors import ServingError

from . import lifeline
from .pulse import EFFORT_SECONDS, Stillness, effort_of
from .replicas import Replica
from .states import Phase

# How often one that starts is looked at.
LOOK_SECONDS = 0.5
# A load that takes so long is no reason to wait for it here: another replica may load it.
LATE_LOAD_SECONDS = 60.0


class Running(Protocol):
    """A replica's process."""

    url: str

    async def wait(self) -> object:
        """Until it is over."""

    def send_signal(self, number: int) -> None:
        """As os.kill; nothing if it is over."""


class ReplicaProcess:
    """A replica in a process of its own, in no terminal's group: whoever started it ends it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process, self.url = process, f"http://127.0.0.1:{port}"

    @classmethod
    async def start(cls, line: str, *, threads: int, still_seconds: float) -> "ReplicaProcess":
        """Starts one and waits until it can answer, however long that takes.

        Raises:
            ServingError: its reason, or it did nothing for so many seconds (pulse.py).
        """
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        # The same modules as here, and none from the folder that this was started in.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment["PYTHONSAFEPATH"] = "1"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", lifeline.start_of("replica_process"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            answer = await _answer(process, line, still_seconds=still_seconds)
            told = json.loads(answer) if answer else {}
            if "port" not in told:
                code = await process.wait()
                raise ServingError(told.get("error") or f"a replica ended with {code} at its start")
            return cls(process, told["port"])
        except BaseException:
            if process.returncode is None:
                _kill(process)
                await process.wait()
            raise

    async def wait(self) -> int:
        return await self._process.wait()

    def send_signal(self, number: int) -> None:
        if self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            _kill(self._process)
        else:
            self._process.send_signal(number)


def _kill(process: asyncio.subprocess.Process) -> None:
    """With all that it has started: a rank may be stopped, and not tied to it yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _answer(process: asyncio.subprocess.Process, line: str, *, still_seconds: float) -> bytes:
    """What a process that starts answers to a line; nothing if it ends first."""

    async def exchange() -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line.encode())
            await process.stdin.drain()
        return await process.stdout.readline()

    asked, still = asyncio.ensure_future(exchange()), Stillness(step=EFFORT_SECONDS)
    try:
        while not (await asyncio.wait({asked}, timeout=LOOK_SECONDS))[0]:
            effort = await asyncio.to_thread(effort_of, process.pid)
            if still.look(effort) > still_seconds:
                raise ServingError(
                    f"a replica did nothing for {still_seconds:g} seconds at its start; is it "
                    "stopped, or a disk gone?"
                )
        return asked.result()
    finally:
        asked.cancel()


@dataclass(slots=True, eq=False)
class Member:
    """One replica, whatever process it has now.

    Args:
        told: the status that it told last. open_for: sequences that it was given, by model.
        hidden: names that it hides though they are served. pins: names that stay there.
        loading_since: when the loads that are under way were first told of.
    """

    index: int
    pins: dict[str, None]
    process: Running | None = None
    url: str = ""
    is_up: bool = False
    told: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    loading_since: dict[str, float] = field(default_factory=dict)
    open_for: Counter[str] = field(default_factory=Counter)
    hidden: set[str] = field(default_factory=set)
    restarts: int = 0
    heard: float = 0.0
    ask_now: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self, base: frozenset[str]) -> Replica:
        """What the choice looks at. base: names of the base."""
        if not self.is_up:
            return Replica(is_up=False, open=0, max_running=1, max_queue=1, slots=0)
        queue = self.told["queue"]
        return Replica(
            is_up=True,
            open=self.open_for.total(),
            max_running=queue["max_running"],
            max_queue=queue["max_queue"],
            slots=self.told["device"]["slots"],
            phases=self.phases,
            pinned=self.pinned,
            open_for={name: n for name, n in self.open_for.items() if n and name not in base},
            late={
                name
                for name, since in self.loading_since.items()
                if self.heard - since > LATE_LOAD_SECONDS
            },
        )

    @property
    def pinned(self) -> frozenset[str]:
        models = self.told.get("models", ())
        return frozenset(m["name"] for m in models if m["variant"] and m["variant"]["pinned"])

    def hear(self, told: dict[str, Any], now: float) -> None:
        """Takes what it tells of itself."""
        state, models = told["state"], [model for model in told["models"] if model["variant"]]
        self.told, self.heard, self.is_up = told, now, state == "ready"
        self.phases = {model["name"]: Phase(model["variant"]["phase"]) for model in models}
        self.loading_since = {
            name: self.loading_since.get(name, now)
            for name, phase in self.phases.items()
            if phase in (Phase.LOADING, Phase.INSTALLING)
        }
