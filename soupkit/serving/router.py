"""Who waits for which variant: a state machine without threads, clock or I/O of its own.

    cold --request--> queued --> loading --> loaded --room--> installing --> resident
    loading, loaded, installing --fault--> failed --request after the back-off--> queued
    resident --room for another--> cold
    resident --another starves--> draining --its last user ends--> cold

Identity is the content digest; a model id is only a name for one. However many requests wait for a
variant, one load runs (single flight); loads of different variants run side by side up to a bound.
A request holds its variant from the moment the variant is resident until its last token, so it
cannot be evicted in between. A failed load fails exactly its own waiters. Within a variant requests
start in the order they came.

If a loaded variant finds no room for `starve_seconds` because requests for the residents keep
coming, the least recently used residents drain: new requests for them wait, so that their users end
and they can go.

Every method runs on one thread; the driver's methods must not call back into the router.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .cache import DeltaCache, Evicted
from .states import BASE_DIGEST, Driver, Limits, Phase, QueueFull, Ticket, VariantUnavailable


@dataclass(slots=True)
class _Variant:
    phase: Phase = Phase.COLD
    waiters: deque[Ticket] = field(default_factory=deque)
    num_bytes: int = 0
    since: float = 0.0  # when the phase began
    failures: int = 0
    retry_at: float = 0.0
    error: str = ""


class Router:
    """Which request runs when; see the module."""

    def __init__(
        self, cache: DeltaCache, driver: Driver, *, clock: Callable[[], float], limits: Limits
    ) -> None:
        self.cache, self.limits = cache, limits
        self._driver, self._clock = driver, clock
        self._variants: dict[str, _Variant] = {}
        self._ready: deque[Ticket] = deque()
        self._running: set[Ticket] = set()
        self._known: frozenset[str] = frozenset()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + sum(len(v.waiters) for v in self._variants.values())

    def phase(self, digest: str) -> Phase:
        return self._variants[digest].phase if digest in self._variants else Phase.COLD

    def set_family(self, digests: Iterable[str], pinned: Iterable[str] = ()) -> None:
        """Says which variants exist now; others are dropped as soon as nobody uses them."""
        self._known = frozenset(digests)
        pins = frozenset(pinned) & self._known
        self.cache.pin(pins)
        for digest in sorted(pins):
            self._want(digest)
        self._pump()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Takes requests in, all of them or none.

        Raises:
            QueueFull: they do not all fit in the queue.
            VariantUnavailable: a load failed a moment ago; it is tried again after the back-off.
        """
        waiting, free = self.num_waiting, self.limits.max_running - len(self._running)
        if waiting + len(tickets) > self.limits.max_queue + max(0, free):
            raise QueueFull(
                f"{waiting} requests wait, the limit is {self.limits.max_queue}; try later"
            )
        for digest in {ticket.digest for ticket in tickets}:
            self._check_backoff(digest)
        for ticket in tickets:
            self._take(ticket)
        self._pump()

    def cancel(self, ticket: Ticket) -> bool:
        """Forgets a request that has not started; False if it runs or is over."""
        if ticket in self._ready:
            self._ready.remove(ticket)
            self._release(ticket)
        elif ticket.digest in self._variants and ticket in self._variants[ticket.digest].waiters:
            self._variants[ticket.digest].waiters.remove(ticket)
        else:
            return False
        self._pump()
        return True

    def finished(self, ticket: Ticket) -> None:
        """A started request is over, however it ended."""
        self._running.remove(ticket)
        self._release(ticket)
        self._pump()

    def loaded(self, digest: str, num_bytes: int) -> None:
        """A load succeeded."""
        self._variants[digest].num_bytes = num_bytes
        self._enter(digest, Phase.LOADED)
        self._pump()

    def installed(self, digest: str) -> None:
        """A variant is in its slot."""
        variant = self._variants[digest]
        self._enter(digest, Phase.RESIDENT)
        variant.failures = 0
        while variant.waiters:
            self.cache.acquire(digest)
            self._ready.append(variant.waiters.popleft())
        self.cache.release(digest)
        self._pump()

    def load_failed(self, digest: str, error: str) -> None:
        """A load or an install failed: its waiters are answered, others are not affected."""
        if self.phase(digest) is Phase.INSTALLING:
            self.cache.release(digest)
            self.cache.evict(digest)
        self._fail(digest, error)
        self._pump()

    def tick(self) -> None:
        """To be called now and then: acts on time that passed without an event."""
        self._pump()

    def _fail(self, digest: str, error: str) -> None:
        variant = self._variants[digest]
        variant.failures += 1
        backoff = self.limits.first_backoff_seconds * 2 ** min(variant.failures - 1, 30)
        variant.retry_at = self._clock() + min(backoff, self.limits.max_backoff_seconds)
        variant.error = error
        self._enter(digest, Phase.FAILED)
        waiters, variant.waiters = variant.waiters, deque()
        for ticket in waiters:
            self._driver.fail(ticket, self._unavailable(variant))

    def _take(self, ticket: Ticket) -> None:
        if ticket.digest == BASE_DIGEST:
            self._ready.append(ticket)
        elif self.phase(ticket.digest) is Phase.RESIDENT:
            self.cache.acquire(ticket.digest)
            self._ready.append(ticket)
        else:
            self._want(ticket.digest)
            self._variants[ticket.digest].waiters.append(ticket)

    def _want(self, digest: str) -> None:
        if self.phase(digest) in (Phase.COLD, Phase.FAILED):
            self._enter(digest, Phase.QUEUED)

    def _enter(self, digest: str, phase: Phase) -> None:
        variant = self._variants.setdefault(digest, _Variant())
        variant.phase, variant.since = phase, self._clock()

    def _check_backoff(self, digest: str) -> None:
        variant = self._variants.get(digest)
        if (
            variant is not None
            and variant.phase is Phase.FAILED
            and self._clock() < variant.retry_at
        ):
            raise self._unavailable(variant)

    def _unavailable(self, variant: _Variant) -> VariantUnavailable:
        return VariantUnavailable(variant.error, max(0.0, variant.retry_at - self._clock()))

    def _release(self, ticket: Ticket) -> None:
        if ticket.digest != BASE_DIGEST:
            self.cache.release(ticket.digest)

    def _in(self, phase: Phase) -> list[str]:
        """Digests in a phase, those that entered it first, first."""
        found = [d for d, v in self._variants.items() if v.phase is phase]
        return sorted(found, key=lambda d: self._variants[d].since)

    def _pump(self) -> None:
        """Does everything that has become possible."""
        self._drop_idle()
        self._start_installs()
        busy = len(self._in(Phase.LOADING)) + len(self._in(Phase.LOADED))
        for digest in self._in(Phase.QUEUED)[: max(0, self.limits.max_loads - busy)]:
            self._enter(digest, Phase.LOADING)
            self._driver.load(digest)
        while self._ready and len(self._running) < self.limits.max_running:
            ticket = self._ready.popleft()
            self._running.add(ticket)
            slot = None if ticket.digest == BASE_DIGEST else self.cache.slot(ticket.digest)
            self._driver.run(ticket, slot)

    def _drop_idle(self) -> None:
        """Evicts drained variants and those that left the family, and forgets the latter."""
        for digest in self.cache.digests:
            draining = self.phase(digest) is Phase.DRAINING
            stale = digest not in self._known and self.phase(digest) is Phase.RESIDENT
            if (draining or stale) and self.cache.users(digest) == 0:
                evicted = self.cache.evict(digest)
                self._note_eviction(evicted)
                self._driver.evict(evicted)
        for digest, variant in list(self._variants.items()):
            if variant.phase in (Phase.COLD, Phase.FAILED) and digest not in self._known:
                del self._variants[digest]

    def _start_installs(self) -> None:
        for digest in self._in(Phase.LOADED):
            variant = self._variants[digest]
            # Asked each time: pins may have changed while it waited.
            most = self.cache.budget_bytes - self.cache.pinned_bytes_besides(digest)
            if variant.num_bytes > most:
                self._driver.drop(digest)
                self._fail(
                    digest,
                    f"the variant has {variant.num_bytes} bytes, the cache has {most} besides "
                    "pinned ones; raise --cache-bytes or pin less",
                )
                continue
            if not self.cache.has_room(variant.num_bytes):
                if self._clock() - variant.since >= self.limits.starve_seconds:
                    self._drain_for(variant.num_bytes)
                return  # first come, first installed: a smaller one may not overtake for ever
            slot, gone = self.cache.admit(digest, variant.num_bytes)
            # Held until it is in its slot, so that another install cannot take the slot away.
            self.cache.acquire(digest)
            self._enter(digest, Phase.INSTALLING)
            for evicted in gone:
                self._note_eviction(evicted)
            self._driver.install(digest, slot, gone)

    def _drain_for(self, num_bytes: int) -> None:
        promised = self.cache.budget_bytes - self.cache.used_bytes + self.cache.evictable_bytes
        promised += sum(self.cache.num_bytes(d) for d in self._in(Phase.DRAINING))
        for digest in self.cache.digests:
            if promised >= num_bytes:
                return
            idle = self.cache.users(digest) == 0
            if (
                self.phase(digest) is Phase.RESIDENT
                and not self.cache.is_pinned(digest)
                and not idle
            ):
                promised += self.cache.num_bytes(digest)
                self._enter(digest, Phase.DRAINING)

    def _note_eviction(self, evicted: Evicted) -> None:
        waiting = bool(self._variants[evicted.digest].waiters)
        self._enter(evicted.digest, Phase.QUEUED if waiting else Phase.COLD)
