"""Where each variant is between the disk and the device: a state machine without threads or clock.

    disk --needed--> queued --> loading --> host --room--> installing --> resident
    loading, host, installing --fault--> failed --needed after the back-off--> queued
    resident --room for another--> host if a copy is kept there, else disk
    resident --another starves, or slots grow--> draining --its last user ends--> as above

However many requests wait for a variant, one load runs (single flight); loads of different variants
run side by side up to a bound, and what they read counts against the bound until it is in the host
tier or in its slot (R6). A failed load fails exactly its own waiters and is not tried again before
its back-off (R5). A variant that found no room for `starve_seconds` because requests for the
residents keep coming makes one of them drain: new requests for that one wait, so that its users end
and it can go (R9). A family may have thousands of variants: no step walks over those at rest.

Not here: requests whose variant is resident (router.py), who goes first (cache.py, policy.py).
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .cache import Costs, DeltaCache, Evicted
from .states import Limits, Mover, Phase, Runner, Ticket, VariantUnavailable


@dataclass(slots=True)
class Variant:
    """What is remembered of one variant besides what the cache knows."""

    phase: Phase = Phase.DISK
    since: float = 0.0  # when the phase began
    order: int = 0  # of all phases begun so far
    waiters: deque[Ticket] = field(default_factory=deque)  # until it is resident
    slot_bytes: int = 0
    failures: int = 0  # since the last success
    retry_at: float = 0.0
    error: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def refusal(self, now: float) -> VariantUnavailable:
        """Of a failed one, until its next try."""
        return VariantUnavailable(self.error, max(0.0, self.retry_at - now))


class Residency:
    """The variants of a family and what the mover does with them; see the module."""

    def __init__(
        self,
        cache: DeltaCache,
        runner: Runner,
        mover: Mover,
        *,
        clock: Callable[[], float],
        limits: Limits,
    ) -> None:
        self.cache, self.variants = cache, dict[str, Variant]()
        # Those that are waited for, or are in any phase but disk.
        self._awake = dict[str, None]()
        self.served: frozenset[str] = frozenset()  # others go as soon as nobody uses them
        self._runner, self._mover, self._clock, self._limits = runner, mover, clock, limits
        self._growing_to = 0  # bytes of a slot, while the mover is at it
        self._order = itertools.count(1)

    def phase(self, digest: str) -> Phase:
        return self.variants[digest].phase if digest in self.variants else Phase.DISK

    def wait(self, ticket: Ticket) -> None:
        """A request for a variant that is not resident, or about to go."""
        variant = self.variants[ticket.digest]
        if variant.phase is Phase.HOST and not self._is_needed(ticket.digest):
            self._enter(ticket.digest, Phase.HOST)  # it waits for room from now on
        variant.waiters.append(ticket)
        self._awake[ticket.digest] = None

    def waiting(self) -> list[Ticket]:
        """All whose variant is not resident yet."""
        return [ticket for digest in self._awake for ticket in self.variants[digest].waiters]

    def phases(self) -> dict[str, Phase]:
        """Of all that are awake; the others are on disk."""
        return {digest: self.variants[digest].phase for digest in self._awake}

    def forget(self, digest: str) -> None:
        """Of a variant that is in no tier and will not come back."""
        self._awake.pop(digest, None)
        del self.variants[digest]

    # What the mover reports.

    def loaded(self, digest: str, num_bytes: int, slot_bytes: int) -> None:
        variant, costs, cache = self.variants[digest], self.cache.costs(digest), self.cache
        seconds = _mean(costs.load_seconds, self._clock() - variant.since)
        cache.note_costs(digest, Costs(seconds, costs.install_seconds))
        variant.counts["loads"] += 1
        variant.slot_bytes = slot_bytes
        self._enter(digest, Phase.HOST)
        if slot_bytes > cache.budget_bytes:
            reason = f"a slot of {slot_bytes} bytes, the cache has {cache.budget_bytes}"
            self._fail(digest, f"the variant needs {reason}; raise --cache-bytes")
            return
        cache.plan_growth(max(slot_bytes, cache.planned_bytes))
        busy = {d for d in self._in(Phase.HOST) if self._is_needed(d)}
        busy.update(self._in(Phase.INSTALLING))
        for gone in cache.host(digest, num_bytes, busy=busy) or ():
            self._drop(gone)

    def installed(self, digest: str) -> None:
        variant, costs = self.variants[digest], self.cache.costs(digest)
        seconds = _mean(costs.install_seconds, self._clock() - variant.since)
        self.cache.note_costs(digest, Costs(costs.load_seconds, seconds))
        self._enter(digest, Phase.RESIDENT)
        variant.failures = 0
        self.cache.release(digest)
        if not self.cache.is_hosted(digest):
            self._mover.drop(digest)

    def load_failed(self, digest: str, error: str) -> None:
        if self.phase(digest) is Phase.INSTALLING:
            self.cache.release(digest)
            self.cache.evict(digest)
        self._fail(digest, error)

    def grown(self) -> None:
        self.cache.grow(self._growing_to)
        self._growing_to = 0

    def grow_failed(self, error: str) -> None:
        """The slots are as they were: variants that do not fit are answered."""
        self._growing_to = 0
        self.cache.drop_plan()
        for digest in self._in(Phase.HOST):
            if self.variants[digest].slot_bytes > self.cache.slot_bytes:
                self._fail(digest, error)

    # What follows from it.

    def step(self) -> None:
        """Does everything that has become possible."""
        self._clear_out()
        self._queue_needed()
        self._grow()
        self._install()
        self._load()

    def _clear_out(self) -> None:
        """Evicts what has drained, and all of what is served no more and used by nobody."""
        for digest in self.cache.digests:
            leaves = self.phase(digest) is Phase.RESIDENT and digest not in self.served
            if (leaves or self.phase(digest) is Phase.DRAINING) and not self.cache.users(digest):
                self._evict(digest)
        for digest in self._in(Phase.HOST):
            if digest not in self.served and not self._is_needed(digest):
                self._drop(digest)

    def _queue_needed(self) -> None:
        pinned = (digest for digest in self.cache.pinned if digest in self.variants)
        for digest in list(dict.fromkeys((*self._awake, *pinned))):
            variant, needed = self.variants[digest], self._is_needed(digest)
            may_try = variant.phase is Phase.FAILED and self._clock() >= variant.retry_at
            if needed and (variant.phase is Phase.DISK or may_try):
                self._enter(digest, Phase.QUEUED)
            elif not needed and variant.phase is Phase.QUEUED:
                self._enter(digest, Phase.DISK)
            elif not needed and variant.phase is Phase.HOST and not self.cache.is_hosted(digest):
                self._drop(digest)

    def _grow(self) -> None:
        """Empties the slots that larger ones leave no room for, then has them made."""
        if self._growing_to or self.cache.planned_bytes == self.cache.slot_bytes:
            return
        for digest in self.cache.beyond:
            if not self.cache.users(digest):
                self._evict(digest)
            elif self.phase(digest) is Phase.RESIDENT:
                self._enter(digest, Phase.DRAINING)
        if not self.cache.beyond:
            self._growing_to = self.cache.planned_bytes
            self._mover.grow(self.cache.num_slots, self._growing_to)

    def _install(self) -> None:
        num_starving = 0
        for digest in filter(self._is_needed, self._in(Phase.HOST)):
            variant = self.variants[digest]
            if variant.slot_bytes > self.cache.slot_bytes:
                continue  # until the slots have grown
            if not self.cache.has_room():
                num_starving += self._clock() - variant.since >= self._limits.starve_seconds
                continue
            slot, gone = self.cache.admit(digest)
            # Held until it is in its slot, so that another install cannot take the slot away.
            self.cache.acquire(digest)
            self._enter(digest, Phase.INSTALLING)
            for evicted in gone:
                self._note_eviction(evicted)
            self._mover.install(digest, slot, gone)
        self._drain(num_starving - len(self._in(Phase.DRAINING)))

    def _drain(self, count: int) -> None:
        """Makes the least valued of the residents that are in use drain."""
        if count <= 0:
            return
        pinned = self.cache.pinned
        used = [d for d in self._in(Phase.RESIDENT) if d not in pinned]
        for digest in sorted(used, key=self.cache.value)[:count]:
            self._enter(digest, Phase.DRAINING)

    def _load(self) -> None:
        held = self._in(Phase.LOADING, Phase.HOST, Phase.INSTALLING)
        num_held = sum(not self.cache.is_hosted(digest) for digest in held)
        for digest in self._in(Phase.QUEUED)[: max(0, self._limits.max_loads - num_held)]:
            self._enter(digest, Phase.LOADING)
            self._mover.load(digest)

    # Steps.

    def _is_needed(self, digest: str) -> bool:
        """Whether it should be resident."""
        return bool(self.variants[digest].waiters) or digest in self.cache.pinned

    def _in(self, *phases: Phase) -> list[str]:
        """Digests in a phase, those that entered it first, first."""
        found = [d for d in self._awake if self.variants[d].phase in phases]
        return sorted(found, key=lambda d: self.variants[d].order)

    def _enter(self, digest: str, phase: Phase) -> None:
        variant = self.variants[digest]
        variant.phase, variant.since, variant.order = phase, self._clock(), next(self._order)
        if phase is Phase.DISK and not variant.waiters:
            self._awake.pop(digest, None)
        else:
            self._awake[digest] = None

    def _evict(self, digest: str) -> None:
        evicted = self.cache.evict(digest)
        self._note_eviction(evicted)
        self._mover.evict(evicted)

    def _note_eviction(self, evicted: Evicted) -> None:
        digest = evicted.digest
        self.variants[digest].counts["evictions"] += 1
        self._enter(digest, Phase.HOST if self.cache.is_hosted(digest) else Phase.DISK)

    def _drop(self, digest: str) -> None:
        """What was read of a variant goes."""
        if self.cache.is_hosted(digest):
            self.cache.unhost(digest)
        self._mover.drop(digest)
        if self.phase(digest) is Phase.HOST:
            self._enter(digest, Phase.DISK)

    def _fail(self, digest: str, error: str) -> None:
        variant, limits = self.variants[digest], self._limits
        if variant.phase is not Phase.LOADING:
            self._drop(digest)
        variant.failures += 1
        variant.counts["failures"] += 1
        backoff = limits.first_backoff_seconds * 2 ** min(variant.failures - 1, 30)
        variant.retry_at = self._clock() + min(backoff, limits.max_backoff_seconds)
        variant.error = error
        self._enter(digest, Phase.FAILED)
        waiters, variant.waiters = variant.waiters, deque()
        for ticket in waiters:
            self._runner.fail(ticket, variant.refusal(self._clock()))


def _mean(old: float, new: float) -> float:
    """A measured time, smoothed: one slow read should not decide."""
    return (old + new) / 2 if old else new
