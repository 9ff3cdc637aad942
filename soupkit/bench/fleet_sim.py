"""A fleet on a virtual clock: the code that serves (choice of a replica, router, cache, policy),
and a cost model in the place of disks, links and GPUs.

An event is an arrival, the end of a load, of an install, of a prompt, or of the next sequence that
ends. A replica's engine computes prompts one after the other before it goes on with its sequences,
which all advance by a token a step; steps are not events: between two events their length stands.
One disk a replica reads one variant after the other. The choice sees what replicas hold as it is,
not as it was told a moment ago. Not here: costs (fleet_cost.py), failures, cancellations.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from soupkit.errors import ServingError
from soupkit.serving.cache import DeltaCache, Evicted
from soupkit.serving.policy import RateWeighted
from soupkit.serving.replicas import Replica, choose
from soupkit.serving.router import Router
from soupkit.serving.states import BASE_DIGEST, Limits, Phase, QueueFull, Ticket

TICK_SECONDS = 0.5


class Costs(Protocol):
    """Seconds of what a replica does."""

    load_seconds: float
    install_seconds: float

    def prompt(self, tokens: int, *, is_base: bool) -> float:
        """The first token of a prompt, alone in the engine."""

    def step(self, sequences: int, variants: int) -> float:
        """A token of each of so many sequences of so many distinct variants."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a replica has room for, in bytes: slots of equal size, host memory, a variant's file."""

    slots: int
    slot_bytes: int
    file_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. model: BASE_DIGEST for the base."""

    at: float
    model: str
    prompt: int
    tokens: int


@dataclass(slots=True, eq=False)
class Job(Ticket):
    """One request on its way."""

    asked: float
    prompt: int
    tokens: int
    is_counted: bool = True
    ends_at: float = 0.0  # in steps of its engine


@dataclass(slots=True)
class Outcome:
    """What a run was like; seconds."""

    first: list[float] = field(default_factory=list)  # to the first token, of each request
    whole: list[float] = field(default_factory=list)  # to the last
    hits: int = 0
    misses: int = 0
    loads: int = 0
    refused: int = 0
    until: float = 0.0
    per_replica: list[int] = field(default_factory=list)  # requests

    @property
    def hit_rate(self) -> float:
        """Of requests for variants."""
        return self.hits / max(1, self.hits + self.misses)


class Clock:
    """Virtual time and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Has something happen so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


class Engine:
    """Prompts and sequences of one replica."""

    def __init__(self, clock: Clock, costs: Costs, outcome: Outcome) -> None:
        self._clock, self._costs, self._outcome = clock, costs, outcome
        self.finished: Callable[[Job], None] = lambda _: None
        self._prompts: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []  # by when they end
        self._variants: Counter[str] = Counter()  # of those that run
        self._order = itertools.count()
        self._steps = 0.0  # done so far
        self._since = 0.0  # when that was
        self._is_prompting = False
        self._version = 0  # of the next end that is scheduled

    def run(self, job: Job) -> None:
        """Takes a request in."""
        self._prompts.append(job)
        self._go_on()

    def _go_on(self) -> None:
        """What has become possible; called whenever something ends or comes."""
        if self._is_prompting:
            return
        self._settle()
        if self._prompts:
            job = self._prompts.popleft()
            self._is_prompting = True
            seconds = self._costs.prompt(job.prompt, is_base=job.digest == BASE_DIGEST)
            self._version += 1
            self._clock.after(seconds, lambda: self._prompted(job))
        elif self._running:
            self._version += 1
            version, left = self._version, max(0.0, self._running[0][0] - self._steps)
            self._clock.after(left * self._step(), lambda: self._ended(version))

    def _prompted(self, job: Job) -> None:
        self._is_prompting, self._since = False, self._clock.now
        if job.is_counted:
            self._outcome.first.append(self._clock.now - job.asked)
        if job.tokens <= 1:
            self._end(job)
        else:
            job.ends_at = self._steps + job.tokens - 1
            heapq.heappush(self._running, (job.ends_at, next(self._order), job))
            self._variants[job.digest] += 1
        self._go_on()

    def _ended(self, version: int) -> None:
        if version != self._version or self._is_prompting:
            return
        self._settle()
        # Rounding must not leave the one that is due.
        self._steps = max(self._steps, self._running[0][0])
        while self._running and self._running[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._running)
            self._variants[job.digest] -= 1
            if not self._variants[job.digest]:
                del self._variants[job.digest]
            self._end(job)
        self._go_on()

    def _end(self, job: Job) -> None:
        if job.is_counted:
            self._outcome.whole.append(self._clock.now - job.asked)
        # Not at once: the router may be in the middle of something.
        self._clock.after(0.0, lambda: self.finished(job))

    def _settle(self) -> None:
        """Counts the steps since the last event."""
        if self._running:
            self._steps += (self._clock.now - self._since) / self._step()
        self._since = self._clock.now

    def _step(self) -> float:
        return self._costs.step(len(self._running), len(self._variants.keys() - {BASE_DIGEST}))


class SimReplica:
    """The router's Runner and Mover, on a virtual clock."""

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        room: Room,
        outcome: Outcome,
        *,
        limits: Limits,
        warm_until: float = 0.0,
    ) -> None:
        self._warm_until = warm_until
        self._clock, self._costs, self._room, self._outcome = clock, costs, room, outcome
        cache = DeltaCache(
            max(1, room.slots * room.slot_bytes), RateWeighted(), host_bytes=room.host_bytes
        )
        self.router = Router(cache, self, self, clock=clock, limits=limits)
        self.engine = Engine(clock, costs, outcome)
        self.engine.finished = self._finish
        self.open_for: Counter[str] = Counter()
        self._known: set[str] = set()
        self._moving: dict[str, Phase] = {}
        self._disk_free = 0.0
        self._limits = limits
        if room.slots:
            self.router.reserve(room.slot_bytes)

    def view(self, name: str) -> Replica:
        """What the choice of a replica for a variant looks at."""
        cache = self.router.cache
        phases = dict.fromkeys(cache.digests, Phase.RESIDENT) | self._moving
        if cache.is_hosted(name):
            phases.setdefault(name, Phase.HOST)
        return Replica(
            is_up=True,
            open=self.open_for.total(),
            max_running=self._limits.max_running,
            max_queue=self._limits.max_queue,
            slots=cache.num_slots,
            phases=phases,
            open_for={name: n for name, n in self.open_for.items() if name != BASE_DIGEST},
        )

    def submit(self, arrival: Arrival) -> None:
        """A request comes."""
        name, outcome = arrival.model, self._outcome
        if name != BASE_DIGEST and name not in self._known:
            self._known.add(name)
            self.router.set_family(self._known)
        is_hit = self.router.phase(name) is Phase.RESIDENT
        now = self._clock.now
        job = Job(name, now, arrival.prompt, arrival.tokens, is_counted=now >= self._warm_until)
        self.open_for[name] += 1
        try:
            self.router.submit([job])
        except QueueFull:
            self._forget(name)
            outcome.refused += job.is_counted
            return
        if name != BASE_DIGEST and job.is_counted:
            outcome.hits += is_hit
            outcome.misses += not is_hit

    def _finish(self, job: Job) -> None:
        self._forget(job.digest)
        self.router.finished(job)

    def _forget(self, name: str) -> None:
        self.open_for[name] -= 1
        if not self.open_for[name]:
            del self.open_for[name]

    # Runner.

    def run(self, ticket: Ticket, slot: int | None) -> None:
        assert isinstance(ticket, Job)
        self._clock.after(0.0, lambda: self.engine.run(ticket))

    def halt(self, ticket: Ticket, error: ServingError) -> None:
        raise AssertionError("nothing is unloaded here") from error

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        self._forget(ticket.digest)
        self._outcome.refused += 1

    # Mover.

    def load(self, digest: str) -> None:
        self._moving[digest] = Phase.LOADING
        now = self._clock.now
        is_warm = now >= self._warm_until
        self._disk_free = max(self._disk_free, now) + is_warm * self._costs.load_seconds
        self._outcome.loads += is_warm
        self._clock.after(self._disk_free - now, lambda: self._loaded(digest))

    def _loaded(self, digest: str) -> None:
        room = self._room
        self.router.loaded(digest, room.file_bytes, slot_bytes=room.slot_bytes)

    def drop(self, digest: str) -> None:
        if self._moving.get(digest) is Phase.LOADING:
            del self._moving[digest]  # nobody waits for it any more

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        self._moving[digest] = Phase.INSTALLING
        self._clock.after(self._costs.install_seconds, lambda: self._installed(digest))

    def _installed(self, digest: str) -> None:
        del self._moving[digest]
        self.router.installed(digest)

    def evict(self, evicted: Evicted) -> None:
        pass

    def grow(self, num_slots: int, slot_bytes: int) -> None:
        self._clock.after(0.0, self.router.grown)


def simulate(
    arrivals: Iterable[Arrival],
    *,
    replicas: int,
    costs: Costs,
    room: Room,
    limits: Limits,
    warm_until: float = 0.0,
) -> Outcome:
    """Runs requests through a fleet of equal replicas until the last one has ended.

    Args:
        warm_until: before it the disk takes no time and nothing is counted.
    """
    clock, outcome = Clock(), Outcome()
    fleet = [
        SimReplica(clock, costs, room, outcome, limits=limits, warm_until=warm_until)
        for _ in range(replicas)
    ]
    outcome.per_replica = [0] * replicas
    coming = iter(arrivals)
    is_over = False

    def arrive(arrival: Arrival) -> None:
        name = None if arrival.model == BASE_DIGEST else arrival.model
        chosen = choose([one.view(arrival.model) for one in fleet], name)
        assert chosen is not None
        outcome.per_replica[chosen] += 1
        fleet[chosen].submit(arrival)
        follow()

    def follow() -> None:
        nonlocal is_over
        arrival = next(coming, None)
        if arrival is None:
            is_over = True
        else:
            clock.after(max(0.0, arrival.at - clock.now), lambda: arrive(arrival))

    def tick() -> None:
        for one in fleet:
            one.router.tick()
        if not is_over or any(one.open_for for one in fleet):
            clock.after(TICK_SECONDS, tick)

    follow()
    clock.after(TICK_SECONDS, tick)
    clock.run()
    outcome.until = clock.now
    return outcome
