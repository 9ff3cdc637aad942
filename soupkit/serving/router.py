"""Who waits for which variant: a state machine without threads, clock or I/O of its own.

Identity is the content digest (R1); a model id is only a name for one. A request waits until its
variant is resident (residency.py), then for its turn, and holds the variant from the moment it is
resident until the request's last token (R3), so that it is never evicted in between (R4). Within a
variant requests start in the order they came; between variants, the base among them, they take
turns, so that none keeps another from the engine (R9). What does not fit in the queues is refused
at once (R12), what waits longer than the limit is answered with an error.

A variant that leaves the family takes no more requests; once those it has are over it is out of
both tiers. `unload` does that with a deadline, at which they are stopped (R10).

Every method runs on one thread; runner and mover must not call back into the router.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from soupkit.errors import ServingError

from .cache import DeltaCache
from .policy import Rates, choose_pins
from .residency import Residency, Variant
from .states import (
    BASE_DIGEST,
    Limits,
    Mover,
    NotServed,
    Phase,
    QueueFull,
    Runner,
    Ticket,
    TooMany,
    VariantStats,
    WaitedTooLong,
)


class Router:
    """Which request runs when; see the module."""

    def __init__(
        self,
        cache: DeltaCache,
        runner: Runner,
        mover: Mover,
        *,
        clock: Callable[[], float],
        limits: Limits,
    ) -> None:
        self.cache, self.limits = cache, limits
        self._runner, self._clock, self._rates = runner, clock, Rates(clock)
        self._residency = Residency(cache, runner, mover, clock=clock, limits=limits)
        # Requests whose variant is resident; the first queue is the next to get a turn.
        self._ready: dict[str, deque[Ticket]] = {}
        self._running: dict[Ticket, None] = {}
        self._known: frozenset[str] = frozenset()
        self._leaving = set[str]()  # not known any more, and not gone yet
        self._pins: tuple[str, ...] = ()
        self._auto_pins: frozenset[str] = frozenset()
        self._deadlines: dict[str, float] = {}  # of unloaded variants: when requests are stopped

    # What there is.

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting())

    def phase(self, digest: str) -> Phase:
        return self._residency.phase(digest)

    def knows(self, digest: str) -> bool:
        """Whether it is a variant of the family, or one that left it and is not gone yet."""
        return digest in self._variants

    def phases(self) -> dict[str, Phase]:
        """Of the variants that are anywhere but on disk, or waited for."""
        return self._residency.phases()

    def stats(self) -> dict[str, VariantStats]:
        """Every variant of the family, and those that left it but are not gone yet."""
        return {digest: self._stats(digest) for digest in self._variants}

    def _stats(self, digest: str) -> VariantStats:
        cache, variant, costs = self.cache, self._variants[digest], self.cache.costs(digest)
        return VariantStats(
            phase=variant.phase,
            pinned=digest in cache.pinned,
            users=cache.users(digest) if digest in cache else 0,
            waiting=self._num_waiting(digest),
            device_bytes=cache.slot_bytes if digest in cache else 0,
            host_bytes=cache.hosted_bytes(digest),
            hits=variant.counts["hits"],
            misses=variant.counts["misses"],
            loads=variant.counts["loads"],
            failures=variant.counts["failures"],
            evictions=variant.counts["evictions"],
            load_seconds=costs.load_seconds,
            install_seconds=costs.install_seconds,
            rate=self._rates.rate(digest),
        )

    @property
    def _variants(self) -> dict[str, Variant]:
        return self._residency.variants

    def _num_waiting(self, digest: str) -> int:
        waiters = self._variants[digest].waiters if digest in self._variants else ()
        return len(waiters) + len(self._ready.get(digest, ()))

    def _waiting(self) -> list[Ticket]:
        ready = [ticket for queue in self._ready.values() for ticket in queue]
        return ready + self._residency.waiting()

    # What people ask for.

    def set_family(self, digests: Iterable[str], pinned: Sequence[str] = ()) -> None:
        """Says which variants exist now, and which are pinned, the most important first.

        Others are dropped as soon as nobody uses them.
        """
        self._known, self._pins = frozenset(digests), tuple(pinned)
        for digest in sorted(self._known):
            self._variants.setdefault(digest, Variant())
            self._deadlines.pop(digest, None)
        self._leaving = self._variants.keys() - self._known
        self._follow()

    def unload(self, digest: str, *, deadline_seconds: float) -> None:
        """Takes a variant out of the family, until `set_family` names it again.

        Requests still open after `deadline_seconds` are stopped.
        """
        self._known -= {digest}
        self._leaving.update({digest} & self._variants.keys())
        self._deadlines[digest] = self._clock() + deadline_seconds
        self._follow()

    def reserve(self, slot_bytes: int) -> None:
        """Has slots of that size made before any variant needs them."""
        self.cache.plan_growth(slot_bytes)
        self._pump()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Takes requests in, all of them or none.

        Raises:
            QueueFull: they do not all fit in the queues now.
            TooMany: they would not if nothing else was there.
            NotServed: the variant was unloaded or has left the family.
            VariantUnavailable: a load failed a moment ago; it is tried again after the back-off.
        """
        counts = Counter(ticket.digest for ticket in tickets)
        self._check_queues(counts)
        for digest in counts:
            self._check_available(digest)
        for ticket in tickets:
            self._take(ticket)
        self._pump()

    def cancel(self, ticket: Ticket) -> bool:
        """Forgets a request that has not started; False if it runs or is over."""
        found = self._withdraw(ticket)
        self._pump()
        return found

    def _check_queues(self, counts: Counter[str]) -> None:
        limits, free = self.limits, max(0, self.limits.max_running - len(self._running))
        asked = [("", self.num_waiting, counts.total(), limits.max_queue)]
        for digest, count in counts.items():
            most = limits.max_variant_queue or limits.max_queue
            asked.append((" for this model", self._num_waiting(digest), count, most))
        for _, _, count, most in asked:
            if count > most + limits.max_running:
                most += limits.max_running
                raise TooMany(f"{count} sequences at once, the server takes {most}; ask for fewer")
        for whose, waiting, count, most in asked:
            if waiting + count > most + free:
                raise QueueFull(f"{waiting} requests{whose} wait, the limit is {most}; try later")

    def _check_available(self, digest: str) -> None:
        if digest == BASE_DIGEST:
            return
        if digest not in self._known:
            raise NotServed("the variant was unloaded or has left the family")
        variant = self._variants[digest]
        if variant.phase is Phase.FAILED and self._clock() < variant.retry_at:
            raise variant.refusal(self._clock())

    def _take(self, ticket: Ticket) -> None:
        digest, ticket.arrived = ticket.digest, self._clock()
        if digest == BASE_DIGEST:
            self._make_ready(ticket)
            return
        self._rates.touch(digest)
        self.cache.policy.touch(digest)
        is_hit = self.phase(digest) is Phase.RESIDENT
        self._variants[digest].counts["hits" if is_hit else "misses"] += 1
        if is_hit:
            self._make_ready(ticket)
        else:
            self._residency.wait(ticket)

    # What runner and mover report.

    def finished(self, ticket: Ticket) -> None:
        """A started request is over, however it ended."""
        del self._running[ticket]
        self._release(ticket)
        self._pump()

    def loaded(self, digest: str, num_bytes: int, *, slot_bytes: int) -> None:
        """A load succeeded.

        Args:
            num_bytes: what the variant takes in host memory.
            slot_bytes: what a slot must have so that it fits, and all before it do.
        """
        self._residency.loaded(digest, num_bytes, slot_bytes)
        self._pump()

    def installed(self, digest: str) -> None:
        """A variant is in its slot."""
        waiters = self._variants[digest].waiters
        while waiters:
            self._make_ready(waiters.popleft())
        self._residency.installed(digest)
        self._pump()

    def load_failed(self, digest: str, error: str) -> None:
        """A load or an install failed: its waiters are answered, others are not affected."""
        self._residency.load_failed(digest, error)
        self._pump()

    def grown(self) -> None:
        """The slots have the size that was asked for."""
        self._residency.grown()
        self._pump()

    def grow_failed(self, error: str) -> None:
        """The slots are as they were: variants that do not fit are answered."""
        self._residency.grow_failed(error)
        self._pump()

    def tick(self) -> None:
        """To be called now and then: acts on time that passed without an event."""
        self._follow()

    # What follows from it.

    def _follow(self) -> None:
        """After a change of the family, of pins or of traffic."""
        pins = [digest for digest in self._pins if digest in self._known]
        # One that cannot be loaded holds no place that the next could have.
        pins.sort(key=lambda digest: self._variants[digest].failures > 0)
        others = self._known.intersection(self.cache.digests).difference(pins)
        rates = {digest: self._rates.rate(digest) for digest in others}
        self._auto_pins = choose_pins(rates, self._auto_pins, count=self.limits.auto_pin)
        self.cache.pin([*pins, *sorted(self._auto_pins, key=lambda d: (-rates[d], d))])
        self._residency.served = self._known
        self._pump()

    def _pump(self) -> None:
        """Does everything that has become possible."""
        self._answer_overdue()
        self._residency.step()
        for digest in sorted(self._leaving):
            if self.phase(digest) in (Phase.DISK, Phase.FAILED):
                self._leaving.remove(digest)
                self._residency.forget(digest)
                self._deadlines.pop(digest, None)
                self.cache.forget(digest)
                self._rates.forget(digest)
        while self._ready and len(self._running) < self.limits.max_running:
            self._run_next()

    def _answer_overdue(self) -> None:
        """Requests that waited too long, and those of unloaded variants at the deadline."""
        now, limit = self._clock(), self.limits.max_wait_seconds
        for ticket in self._waiting():
            if now - ticket.arrived >= limit:
                self._give_up(ticket, WaitedTooLong(f"no turn within {limit:g} seconds", limit))
        for digest in [d for d, deadline in self._deadlines.items() if now >= deadline]:
            del self._deadlines[digest]
            error = NotServed("the variant was unloaded")
            for ticket in [t for t in self._waiting() if t.digest == digest]:
                self._give_up(ticket, error)
            for ticket in [t for t in self._running if t.digest == digest]:
                self._runner.halt(ticket, error)

    def _give_up(self, ticket: Ticket, error: ServingError) -> None:
        self._withdraw(ticket)
        self._runner.fail(ticket, error)

    def _withdraw(self, ticket: Ticket) -> bool:
        """Takes a request out of the queue it is in; False if it is in none."""
        digest = ticket.digest
        if ticket in self._ready.get(digest, ()):
            self._ready[digest].remove(ticket)
            if not self._ready[digest]:
                del self._ready[digest]
            self._release(ticket)
        elif digest in self._variants and ticket in self._variants[digest].waiters:
            self._variants[digest].waiters.remove(ticket)
        else:
            return False
        return True

    def _make_ready(self, ticket: Ticket) -> None:
        if ticket.digest != BASE_DIGEST:
            self.cache.acquire(ticket.digest)
        self._ready.setdefault(ticket.digest, deque()).append(ticket)

    def _run_next(self) -> None:
        digest = next(iter(self._ready))
        queue = self._ready.pop(digest)
        ticket = queue.popleft()
        if queue:
            self._ready[digest] = queue  # behind the others
        self._running[ticket] = None
        self._runner.run(ticket, None if digest == BASE_DIGEST else self.cache.slot(digest))

    def _release(self, ticket: Ticket) -> None:
        if ticket.digest != BASE_DIGEST:
            self.cache.release(ticket.digest)
