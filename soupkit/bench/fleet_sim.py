"""A fleet of replicas by a virtual clock: the router, cache, policy and choice that serve, with an
engine and a mover that only take time.

An engine makes iterations: as many tokens of waiting prompts as a batch takes, and one more token
for every sequence that is past its prompt. Iterations that are alike are taken in one stride, which
a new sequence cuts short at the next boundary. Replicas of one node share its disk, which reads one
file after the other; each has a link of its own.

Requests go where `choose` sends them, by what is true of each replica at that moment. Prompts have
nothing in common, so nothing is taken from a prefix cache.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from soupkit.bench.fleet_costs import Costs, Piece
from soupkit.errors import ServingError
from soupkit.serving.cache import DeltaCache, Evicted
from soupkit.serving.policy import RateWeighted
from soupkit.serving.replicas import Replica, choose
from soupkit.serving.router import Router
from soupkit.serving.service import TICK_SECONDS
from soupkit.serving.states import BASE_DIGEST, Limits, Phase, QueueFull, Ticket, VariantUnavailable


@dataclass(slots=True, eq=False)
class Ask(Ticket):
    """A request: when it comes, its prompt and answer in tokens, and what became of it."""

    at: float
    prompt: int
    tokens: int
    was_resident: bool = field(default=False, init=False)
    first: float = field(default=math.nan, init=False)  # when its first token came
    done: float = field(default=math.nan, init=False)
    refused: str = field(default="", init=False)


class Clock:
    """Time that passes from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, act: Callable[[], None]) -> None:
        """`act` at that time; those of one time in the order they were given."""
        heapq.heappush(self._events, (when, next(self._number), act))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()


class Line:
    """A disk or a link: so many transfers at a time, each at full speed, the others in turn."""

    def __init__(self, width: int = 1) -> None:
        self._free_at = [0.0] * width

    def take(self, now: float, seconds: float) -> float:
        """When a transfer that is asked for now is over."""
        done = max(self._free_at[0], now) + seconds
        heapq.heapreplace(self._free_at, done)
        return done


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of each replica: slots and their bytes, host memory for variants, a batch, a variant."""

    slots: int
    slot_bytes: int
    host_bytes: int
    batch_tokens: int
    file_bytes: int


class SimReplica:
    """One engine with its router; it is the router's runner and mover."""

    def __init__(
        self, clock: Clock, costs: Costs, sizes: Sizes, *, limits: Limits, disk: Line
    ) -> None:
        self._clock, self._costs, self._sizes, self._limits = clock, costs, sizes, limits
        self._disk, self._link = disk, Line()
        cache = DeltaCache(
            sizes.slots * sizes.slot_bytes, RateWeighted(), host_bytes=sizes.host_bytes
        )
        self.router = Router(cache, self, self, clock=clock, limits=limits)
        self._open = Counter[str]()
        self._prompts = deque[Ask]()
        self._left = dict[Ask, int]()  # of the prompt of those that wait; of the answer of others
        self._decoding = dict[Ask, None]()
        self._taken: list[tuple[Ask, int]] = []  # pieces of prompts in this iteration
        self._is_busy, self._epoch, self._count = False, 0, 0
        self._began, self._each = 0.0, 0.0
        self._ticks = False
        self._seen: Replica | None = None
        self.busy_seconds = 0.0

    # What the fleet asks.

    def begin(self, digests: Sequence[str]) -> None:
        """The family, with slots made."""
        self.router.set_family(digests)
        self.router.reserve(self._sizes.slot_bytes)

    def look(self) -> Replica:
        """What a front knows of it."""
        if self._seen is None:
            cache = self.router.cache
            self._seen = Replica(
                is_up=True,
                open=self._open.total(),
                max_running=self._limits.max_running,
                max_queue=self._limits.max_queue,
                slots=self._sizes.slots,
                phases=self.router.phases(),
                pinned=cache.pinned,
                open_for=dict(self._open),
            )
        return self._seen

    def submit(self, ask: Ask) -> None:
        """Raises QueueFull or VariantUnavailable."""
        is_resident = self.router.phase(ask.digest) is Phase.RESIDENT
        self.router.submit([ask])
        ask.was_resident = is_resident or ask.digest == BASE_DIGEST
        self._open[ask.digest] += 1
        self._seen = None
        if not self._ticks:
            self._ticks = True
            self._later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self.router.tick()
        self._ticks = self._open.total() > 0
        if self._ticks:
            self._later(TICK_SECONDS, self._tick)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + seconds, partial(self._act, act))

    def _act(self, act: Callable[[], None]) -> None:
        self._seen = None
        act()

    # Mover.

    def load(self, digest: str) -> None:
        sizes, now = self._sizes, self._clock.now
        done = self._disk.take(now, self._costs.load(sizes.file_bytes))
        told = partial(self.router.loaded, digest, sizes.file_bytes, slot_bytes=sizes.slot_bytes)
        self._later(done - now, told)

    def drop(self, digest: str) -> None:
        """Memory that is given back takes no time."""

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        done = self._link.take(self._clock.now, self._costs.install(self._sizes.file_bytes))
        self._later(done - self._clock.now, partial(self.router.installed, digest))

    def evict(self, evicted: Evicted) -> None:
        """A slot that is left takes no time."""

    def grow(self, num_slots: int, slot_bytes: int) -> None:
        self._later(0.0, self.router.grown)

    # Runner.

    def run(self, ticket: Ticket, slot: int | None) -> None:
        assert isinstance(ticket, Ask)
        self._prompts.append(ticket)
        self._left[ticket] = ticket.prompt
        if not self._is_busy:
            self._is_busy = True
            self._later(0.0, self._next)
        elif self._count > 1 and self._each > 0:
            done = math.ceil((self._clock.now - self._began) / self._each - 1e-9)
            if max(1, done) < self._count:
                self._stride(self._began, max(1, done))

    def halt(self, ticket: Ticket, error: ServingError) -> None:
        raise AssertionError("nothing is unloaded here")

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        assert isinstance(ticket, Ask)
        ticket.refused = type(error).__name__
        self._open[ticket.digest] -= 1

    # The engine.

    def _next(self) -> None:
        """Begins an iteration, or as many as are alike."""
        room = self._sizes.batch_tokens - len(self._decoding)
        self._taken = []
        for ask in self._prompts:
            if room <= 0:
                break
            self._taken.append((ask, min(room, self._left[ask])))
            room -= self._taken[-1][1]
        if not self._taken and not self._decoding:
            self._is_busy = False
            return
        digests = {ask.digest for ask in (*self._decoding, *(a for a, _ in self._taken))}
        pieces = [
            Piece(tokens, None if ask.digest == BASE_DIGEST else ask.digest)
            for ask, tokens in self._taken
        ]
        self._each = self._costs.iteration(
            len(self._decoding), len(digests - {BASE_DIGEST}), pieces
        )
        alike = 1 if self._taken else min(self._left[ask] for ask in self._decoding)
        self._stride(self._clock.now, alike)

    def _stride(self, began: float, count: int) -> None:
        self._epoch += 1
        self._began, self._count = began, count
        over = max(0.0, began + count * self._each - self._clock.now)
        self._later(over, partial(self._end, self._epoch))

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return  # it was cut short
        self.busy_seconds += self._count * self._each
        over = []
        for ask in self._decoding:
            self._left[ask] -= self._count
            if not self._left[ask]:
                over.append(ask)
        for ask, tokens in self._taken:
            self._left[ask] -= tokens
            if not self._left[ask]:
                ask.first = self._clock.now
                self._prompts.popleft()
                self._left[ask] = ask.tokens - 1
                if self._left[ask]:
                    self._decoding[ask] = None
                else:
                    over.append(ask)
        self._taken = []
        for ask in over:
            self._decoding.pop(ask, None)
            del self._left[ask]
            ask.done = self._clock.now
            self._open[ask.digest] -= 1
        self._count = 0  # what starts now waits for the next iteration
        for ask in over:
            self.router.finished(ask)
        self._next()


class Fleet:
    """Replicas behind one choice."""

    def __init__(self, clock: Clock, replicas: Sequence[SimReplica]) -> None:
        self._clock, self.replicas = clock, replicas

    def ask(self, asks: Sequence[Ask]) -> None:
        """Has every request come at its time, and all of them end."""
        for ask in asks:
            self._clock.at(ask.at, partial(self._arrives, ask))
        self._clock.run()

    def _arrives(self, ask: Ask) -> None:
        variant = None if ask.digest == BASE_DIGEST else ask.digest
        refused: set[int] = set()
        while True:
            chosen = choose([one.look() for one in self.replicas], variant, excluded=refused)
            if chosen is None:
                ask.refused = "QueueFull"
                return
            try:
                self.replicas[chosen].submit(ask)
            except (QueueFull, VariantUnavailable):
                refused.add(chosen)
            else:
                return
