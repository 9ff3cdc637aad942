"""The replicas of a family on one machine: their processes, what each told last, what it was given.

Each is a server of its own (replica_process.py) that listens on 127.0.0.1. It is asked for its
status a few times a second; one that ends, whose engine stops or hangs (pulse.py) or that does not
answer is replaced after a back-off. What the front itself gave a replica counts from that moment,
so that a load is known before the replica tells of it. Which replica answers is replicas.py's
choice.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import httpx

from soupkit.errors import ServingError

from .listening import DRAIN_SECONDS, LAST_SECONDS
from .member import Member, ReplicaProcess, Running
from .pulse import Stillness
from .replica_process import ReplicaSettings
from .replicas import choose
from .states import Phase, QueueFull

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.25
# A replica that has not answered for so long hangs: answering is the work of a thread that does
# little else, so this is the time that a page fault or another thread may hold it up.
HANG_SECONDS = 30.0
# As does one whose engine was still for so long; from a third of that on it gets no more requests.
# One that starts has twice as long, as it may wait for what another one builds.
STILL_SECONDS = 60.0
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0
# One that has run for so long starts without a back-off of its past.
STEADY_SECONDS = 60.0
# Requests, by replicas, that may wait while none is up, unless settings say how many.
MAX_WAITING = 512


Spawn = Callable[[str], Awaitable[Running]]


class Fleet:
    """All replicas of a family."""

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        count: int,
        client: httpx.AsyncClient,
        keys: list[str] | None = None,
        admin_keys: list[str] | None = None,
        spawn: Spawn | None = None,
        max_wait_seconds: float,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            keys, admin_keys: that the replicas ask for, too. spawn: starts a replica that is told a
                line; by default a process. max_wait_seconds: for any replica to be up.
        """
        self.client, self._settings = client, settings
        self._keys, self.admin_keys = keys or [], admin_keys or []
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // (count * settings.tensor_parallel))
        self._spawn = spawn or (
            lambda line: ReplicaProcess.start(
                line, threads=threads, still_seconds=2 * STILL_SECONDS
            )
        )
        self._max_wait_seconds = max_wait_seconds
        self.most_waiting = count * (settings.max_queue or MAX_WAITING)
        self._waiting = 0
        self.draining, self._ending_since = False, 0.0
        self.copies = 0  # requests that began the load of what another replica holds
        # Each pin on one replica: together they pin more than one could.
        self.members = [Member(i, dict.fromkeys(settings.pin[i::count])) for i in range(count)]
        self._changed = asyncio.Event()  # of the replicas that are up; a new one each time
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all replicas and waits for them. Raises ServingError if one cannot start."""
        starts = [asyncio.ensure_future(self._begin(member)) for member in self.members]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for starting in starts:
                starting.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop(seconds=0)
            raise
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self.members]

    def terminate(self) -> None:
        """Has the replicas answer what is open and end."""
        self.draining = True
        self._ending_since = self._ending_since or time.monotonic()
        self._tell_change()
        for keeper in self._keepers:
            keeper.cancel()
        for member in self.members:
            if member.process is not None:
                member.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the replicas at once, with all that is open."""
        for member in self.members:
            if member.process is not None:
                member.process.send_signal(signal.SIGKILL)

    async def stop(self, *, seconds: float = DRAIN_SECONDS + LAST_SECONDS) -> None:
        """Ends all replicas; those that have not ended so many seconds after they were told to are
        killed, now if that is long ago, but for a few seconds in which others close.
        """
        self.terminate()
        past = time.monotonic() - self._ending_since
        await asyncio.gather(*self._keepers, return_exceptions=True)
        ends = [asyncio.create_task(_ended(m.process)) for m in self.members if m.process]
        if ends:
            await asyncio.wait(ends, timeout=max(min(seconds, LAST_SECONDS), seconds - past))
        self.kill()
        await asyncio.gather(*ends)

    # What the front asks.

    def names(self) -> list[str]:
        """Model ids, the base's own first."""
        told = max(self.members, key=lambda member: (member.is_up, member.heard)).told
        return [model["name"] for model in told.get("models", ())]

    def end_open(self) -> None:
        """The replicas do, each at the end of its own time."""

    async def pick(
        self,
        model: str,
        *,
        weight: int,
        excluded: Collection[int] = (),
        beginning: bytes = b"",
    ) -> Member:
        """The replica for a request, whose sequences it has from now on until `release`.

        Args:
            weight: sequences. excluded: replicas that come last, as they have refused it.
            beginning: see `choose`.
        Raises:
            ServingError: the server stops, or no replica was up for too long.
            QueueFull: none is up, and too many requests wait for one.
        """
        deadline = time.monotonic() + self._max_wait_seconds
        while not self.draining:
            base = frozenset({"base", *self.names()[:1]})
            views = [member.view(base) for member in self.members]
            variant = None if model in base else model
            chosen = choose(views, variant, excluded=excluded, beginning=beginning)
            if chosen is None:
                chosen = choose(views, variant, beginning=beginning)
            if chosen is not None:
                if not views[chosen].holds(model) and any(view.holds(model) for view in views):
                    self.copies += 1
                self.hold(self.members[chosen], model, weight)
                return self.members[chosen]
            if self._waiting >= self.most_waiting:
                raise QueueFull(f"{self._waiting} requests wait for a replica; ask again later")
            self._waiting += 1
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                break
            finally:
                self._waiting -= 1
        if self.draining:
            raise ServingError("the server is stopping; ask again later")
        raise ServingError("no replica is up; ask again later")

    def hold(self, member: Member, model: str, weight: int) -> None:
        """Counts sequences that a replica is given."""
        member.open_for[model] += weight

    def release(self, member: Member, model: str, weight: int) -> None:
        """They are over."""
        member.open_for[model] -= weight
        if member.open_for[model] <= 0:
            del member.open_for[model]

    def note_answer(self, member: Member, model: str) -> None:
        """It has answered for a model, which is resident there, whatever it told before."""
        if model in member.phases:
            member.phases[model] = Phase.RESIDENT

    def note_load(self, member: Member, name: str, *, loaded: bool) -> None:
        """It has just loaded a variant, or let it go, whatever it told before."""
        member.phases[name] = Phase.RESIDENT if loaded else Phase.DISK

    def note_pin(self, member: Member, name: str, pinned: bool) -> None:
        """It pins a model or does not; those that are down will not when they are started."""
        for one in self.members:
            if one is member or not one.is_up:
                one.pins.pop(name, None)
        if pinned:
            member.pins[name] = None

    def note_fault(self, member: Member) -> None:
        """A connection to it broke: nothing goes there until it has answered."""
        member.is_up = False
        member.ask_now.set()

    # Processes.

    async def _begin(self, member: Member) -> None:
        served = set(self.names())
        pins = [name for name in member.pins if not served or name in served]
        line = replace(self._settings, pin=tuple(pins)).to_json(
            index=member.index,
            count=len(self.members),
            keys=self._keys,
            admin_keys=self.admin_keys,
        )
        member.process = await self._spawn(line)
        member.url = member.process.url
        member.hidden.clear()
        member.heard = time.monotonic()
        await self._ask(member)

    async def _keep(self, member: Member) -> None:
        """Looks after a replica and starts it anew whenever it ends."""
        failures, began = 0, time.monotonic()
        while True:
            if member.process is not None:
                await self._watch(member, member.process)
                member.is_up, member.process = False, None
                failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures
                logger.warning("replica %d has ended; it is started again", member.index)
            failures += 1
            backoff = FIRST_BACKOFF_SECONDS * 2 ** min(failures - 1, 30)
            await asyncio.sleep(min(backoff, MAX_BACKOFF_SECONDS))
            member.restarts += 1
            began = time.monotonic()
            try:
                await self._begin(member)
            except (ServingError, OSError, ValueError) as error:
                logger.warning("replica %d does not start: %s", member.index, error)

    async def _watch(self, member: Member, process: Running) -> None:
        """Asks a replica for its status until its process is over."""
        ending = asyncio.ensure_future(process.wait())
        # The front may have been stopped itself: of an answer that did not come counts its timeout.
        unheard = Stillness(step=1e-6, longest_gap=HANG_SECONDS / 3)
        try:
            while not ending.done():
                has_told = await self._ask(member)
                why = _fault(member, has_told, unheard.look(member.heard))
                if why is not None:
                    logger.warning("replica %d %s and is killed", member.index, why)
                    self.note_fault(member)
                    process.send_signal(signal.SIGKILL)
                    await ending
                    return
                poke = asyncio.ensure_future(member.ask_now.wait())
                await asyncio.wait(
                    {ending, poke}, timeout=ASK_SECONDS, return_when="FIRST_COMPLETED"
                )
                poke.cancel()
                member.ask_now.clear()
        finally:
            ending.cancel()

    async def _ask(self, member: Member) -> bool:
        """Whether it has told its status."""
        was_up, has_told = member.is_up, True
        try:
            answer = await self.client.get(f"{member.url}/status", timeout=HANG_SECONDS / 3)
            member.hear(answer.json(), time.monotonic())
            member.is_up = member.is_up and member.told["still_seconds"] <= STILL_SECONDS / 3
        except (httpx.HTTPError, ValueError, TypeError, KeyError):  # an error's body has no state
            member.is_up = has_told = False
        if member.is_up != was_up:
            self._tell_change()
        return has_told

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _fault(member: Member, has_told: bool, unheard: float) -> str | None:
    """Why a replica has to be replaced, if it has to."""
    if has_told and member.told["state"] == "cannot generate":
        return "cannot generate"
    if has_told and member.told["still_seconds"] > STILL_SECONDS:
        return f"has done nothing for {STILL_SECONDS:g} seconds"
    return f"has not answered for {HANG_SECONDS:g} seconds" if unheard > HANG_SECONDS else None


async def _ended(process: Running) -> None:
    await process.wait()
