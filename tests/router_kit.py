"""A runner and mover for the router's tests: notes what it is told and holds the promises to it."""

from collections import Counter
from dataclasses import dataclass, field

from soupkit.errors import ServingError
from soupkit.serving.cache import DeltaCache, Evicted
from soupkit.serving.policy import RateWeighted
from soupkit.serving.router import Router
from soupkit.serving.states import BASE_DIGEST, Limits, Phase, Ticket

# digest -> bytes of the slot it needs; beside BUDGET: 10, 5, 3 and 2 slots, and one too large.
NEEDS = {"a": 10, "b": 10, "c": 20, "d": 20, "e": 33, "f": 50, "huge": 140}
BUDGET = 100
HOST_SIZES = {"a": 9, "b": 11, "c": 18, "d": 22, "e": 30, "f": 45, "huge": 130}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class Numbered(Ticket):
    """A request that knows its place in the order of arrival."""

    number: int = 0


@dataclass
class Fake:
    """Does nothing until the test says that it is done."""

    router: Router = field(init=False)
    loading: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)  # read and not dropped yet
    installing: list[tuple[str, int]] = field(default_factory=list)
    growing: tuple[int, int] | None = None
    slots: tuple[int, int] = (0, 0)  # how many, and their bytes
    shape: int = 0  # bytes of the slot that takes all that was loaded
    running: list[tuple[Ticket, int | None]] = field(default_factory=list)
    halted: list[Ticket] = field(default_factory=list)
    failed: list[tuple[Ticket, ServingError]] = field(default_factory=list)
    holds: dict[int, str] = field(default_factory=dict)  # slot -> digest, as an engine would
    num_loads: Counter[str] = field(default_factory=Counter)
    last: dict[str, int] = field(default_factory=dict)  # digest -> number of the latest that ran
    # While a request is next of its variant: how often each other variant had a turn.
    passed: dict[str, Counter[str]] = field(default_factory=dict)

    def load(self, digest: str) -> None:
        assert digest not in self.loading, "R6: two loads of one variant"
        assert digest not in self.held, "loaded though it is in host memory"
        self.loading.append(digest)
        self.num_loads[digest] += 1

    def drop(self, digest: str) -> None:
        assert digest not in [d for d, _ in self.installing], "dropped while it is copied"
        self.held.remove(digest)

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        assert digest in self.held
        for gone in evicted:
            self.evict(gone)
        assert slot not in self.holds, "R4: a slot was overwritten"
        assert slot < self.slots[0], "no such slot"
        assert NEEDS[digest] <= self.slots[1], "it does not fit"
        self.holds[slot] = digest
        self.installing.append((digest, slot))

    def evict(self, evicted: Evicted) -> None:
        cache, digest = self.router.cache, evicted.digest
        assert not [t for t, slot in self.running if slot == evicted.slot], "R4: evicted in use"
        taken_away = evicted.slot >= cache.num_slots
        assert taken_away or digest not in cache.pinned or self.phase_was(digest, Phase.DRAINING)
        assert self.holds.pop(evicted.slot) == digest

    def phase_was(self, digest: str, phase: Phase) -> bool:
        return self.phases.get(digest) is phase

    phases: dict[str, Phase] = field(default_factory=dict)  # before the router was last called

    def grow(self, num_slots: int, slot_bytes: int) -> None:
        assert self.growing is None, "grown twice at a time"
        assert slot_bytes > self.slots[1]
        assert num_slots * slot_bytes <= BUDGET
        assert all(slot < num_slots for slot in self.holds), "a resident lost its slot"
        self.growing = (num_slots, slot_bytes)

    def run(self, ticket: Ticket, slot: int | None) -> None:
        if isinstance(ticket, Numbered):
            assert ticket.number > self.last.get(ticket.digest, -1), "order within a variant"
            self.last[ticket.digest] = ticket.number
        if ticket.digest == BASE_DIGEST:
            assert slot is None
        else:
            assert slot is not None
            assert self.holds[slot] == ticket.digest, "R2: answered by another variant"
            assert ticket.digest not in [d for d, _ in self.installing], "ran before it was there"
        self._count_turn(ticket.digest)
        self.running.append((ticket, slot))

    def _count_turn(self, digest: str) -> None:
        others = self.router._ready.keys() - {digest}
        self.passed = {other: self.passed.get(other, Counter()) for other in others}
        for other, turns in self.passed.items():
            turns[digest] += 1
            assert turns[digest] <= 1, f"R9: {digest} had two turns while {other} waited for one"

    def halt(self, ticket: Ticket, error: ServingError) -> None:
        assert ticket in [t for t, _ in self.running]
        self.halted.append(ticket)

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        self.failed.append((ticket, error))

    # What the test lets happen.

    def loads(self, digest: str) -> None:
        """A load ends well."""
        self.loading.remove(digest)
        self.held.add(digest)
        slot_bytes = max(self.shape, NEEDS[digest])
        if slot_bytes <= BUDGET:
            self.shape = slot_bytes
        self.router.loaded(digest, HOST_SIZES[digest], slot_bytes=slot_bytes)

    def grows(self) -> None:
        """The slots have been made anew."""
        assert self.growing is not None
        self.slots, self.growing = self.growing, None
        self.router.grown()

    def installs(self) -> None:
        """The oldest install ends well."""
        digest, _ = self.installing.pop(0)
        self.router.installed(digest)

    def settles(self) -> None:
        """Everything but loads and requests ends well."""
        while self.installing or self.growing:
            if self.growing:
                self.grows()
            else:
                self.installs()

    def arrives(self, digest: str) -> None:
        """A load and all that follows from it."""
        self.loads(digest)
        self.settles()

    def ends(self, ticket: Ticket) -> None:
        """A request has its last token."""
        self.running = [(t, slot) for t, slot in self.running if t is not ticket]
        self.router.finished(ticket)


LIMITS = Limits(max_running=3, max_queue=6, max_loads=2, starve_seconds=2.0)


def make(
    limits: Limits = LIMITS, *, host_bytes: int = 0, slot_bytes: int = 0
) -> tuple[Router, Fake, Clock]:
    """A router over all of NEEDS; with `slot_bytes` its slots are there already."""
    fake, clock = Fake(), Clock()
    cache = DeltaCache(BUDGET, RateWeighted(), host_bytes=host_bytes)
    router = fake.router = Router(cache, fake, fake, clock=clock, limits=limits)
    router.set_family(NEEDS)
    if slot_bytes:
        fake.shape = slot_bytes
        router.reserve(slot_bytes)
        fake.settles()
    return router, fake, clock
