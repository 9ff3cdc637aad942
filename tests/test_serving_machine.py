"""The router under random interleavings of everything that can happen.

Held to after every step: no request is lost, doubled or answered by another variant (R2, R3, SV01,
SV10, SV35), nothing in use is evicted or overwritten (R4), one load a variant and a bound on all
(R6, SV28, SV32), budgets of both tiers in bytes (R7, SV30), pins stay and one slot floats (R8),
turns between variants (R9, SV14, SV24), order within one. At the end: everything that is open comes
to an end (SV22), and what is served no more is in no tier (R10, SV02, SV03).
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from router_kit import BUDGET, HOST_SIZES, NEEDS, Numbered, make

from soupkit.serving.states import (
    BASE_DIGEST,
    Limits,
    NotServed,
    Phase,
    QueueFull,
    Ticket,
    VariantUnavailable,
    WaitedTooLong,
)

INFINITY = float("inf")


class RouterMachine(RuleBasedStateMachine):
    """What a server, its clients and its disk may do, in any order."""

    @initialize(
        host_bytes=st.sampled_from([0, 40, 200]),
        auto_pin=st.sampled_from([0, 0, 1, 3]),
        max_wait=st.sampled_from([INFINITY, INFINITY, 30.0]),
        slot_bytes=st.sampled_from([0, 20]),
    )
    def start(self, host_bytes: int, auto_pin: int, max_wait: float, slot_bytes: int) -> None:
        self.limits = Limits(
            max_running=3,
            max_queue=8,
            max_variant_queue=4,
            max_loads=2,
            starve_seconds=2.0,
            max_wait_seconds=max_wait,
            auto_pin=auto_pin,
        )
        self.router, self.fake, self.clock = make(
            self.limits, host_bytes=host_bytes, slot_bytes=slot_bytes
        )
        self.open: list[Ticket] = []  # accepted, no answer yet
        self.known = set(NEEDS)
        self.unloaded: dict[str, float] = {}
        self.seen = 0

    def _note(self) -> None:
        """Answers that came in since, and the phases from here on."""
        for ticket, error in self.fake.failed:
            self.open.remove(ticket)
            if isinstance(error, WaitedTooLong):
                assert self.clock.now - ticket.arrived >= self.limits.max_wait_seconds
            elif isinstance(error, NotServed):
                assert self.clock.now >= self.unloaded[ticket.digest]
            else:
                assert isinstance(error, VariantUnavailable)
        self.fake.failed.clear()
        self.fake.phases = {digest: self.router.phase(digest) for digest in NEEDS}

    @rule(digest=st.sampled_from([BASE_DIGEST, *NEEDS]), count=st.integers(1, 3))
    def submit(self, digest: str, count: int) -> None:
        tickets = [Numbered(digest, self.seen + i) for i in range(count)]
        self.seen += count
        before = self.router.num_waiting
        own = sum(t.digest == digest for t in self.open) - len(self._running(digest))
        try:
            self.router.submit(tickets)
        except QueueFull:
            free = 3 - self.router.num_running
            assert before + count > 8 + free or own + count > 4 + free
        except NotServed:
            assert digest not in self.known
        except VariantUnavailable:
            assert self.router.phase(digest) is Phase.FAILED
        else:
            assert digest in self.known or digest == BASE_DIGEST
            self.open += tickets
        self._note()

    def _running(self, digest: str) -> list[Ticket]:
        return [t for t, _ in self.fake.running if t.digest == digest]

    @precondition(lambda self: self.fake.loading)
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def load_ends(self, data: Any, works: bool) -> None:
        digest = data.draw(st.sampled_from(self.fake.loading))
        waiters = {t for t in self.open if t.digest == digest}
        if works:
            self.fake.loads(digest)
        else:
            self.fake.loading.remove(digest)
            self.router.load_failed(digest, "broken")
        failed = {t for t, e in self.fake.failed if not isinstance(e, WaitedTooLong)}
        assert failed <= waiters, "R5: a failed load failed others"
        self._note()

    @rule()
    def all_arrives(self) -> None:
        """So that a run gets deep."""
        for _ in range(3):
            for digest in list(self.fake.loading):
                self.fake.loads(digest)
            self.fake.settles()
        self._note()

    @precondition(lambda self: self.fake.installing)
    @rule(works=st.sampled_from([True, True, False]))
    def install_ends(self, works: bool) -> None:
        if works:
            self.fake.installs()
        else:
            digest, slot = self.fake.installing.pop(0)
            del self.fake.holds[slot]
            self.router.load_failed(digest, "broken")
        self._note()

    @precondition(lambda self: self.fake.growing)
    @rule(works=st.sampled_from([True, True, False]))
    def growth_ends(self, works: bool) -> None:
        if works:
            self.fake.grows()
        else:
            self.fake.growing, self.fake.shape = None, self.fake.slots[1]
            self.router.grow_failed("no memory")
        self._note()

    @precondition(lambda self: self.fake.running)
    @rule(data=st.data())
    def ends(self, data: Any) -> None:
        ticket, _ = data.draw(st.sampled_from(self.fake.running))
        self.open.remove(ticket)
        self.fake.ends(ticket)
        self._note()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        runs = ticket in self._running(ticket.digest)
        assert self.router.cancel(ticket) is not runs
        if not runs:
            self.open.remove(ticket)
        self._note()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 70.0]), ticks=st.booleans())
    def time_passes(self, seconds: float, ticks: bool) -> None:
        self.clock.now += seconds
        if ticks:
            self.router.tick()
        self._note()

    @rule(
        gone=st.sets(st.sampled_from(sorted(NEEDS)), max_size=2),
        pinned=st.lists(st.sampled_from(sorted(NEEDS)), max_size=3),
    )
    def family_changes(self, gone: set[str], pinned: list[str]) -> None:
        self.known = set(NEEDS) - gone
        self.unloaded = {d: when for d, when in self.unloaded.items() if d in gone}
        self.router.set_family(self.known, pinned)
        self._note()

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 5.0]))
    def unload(self, data: Any, seconds: float) -> None:
        used = {t.digest for t in self.open} - {BASE_DIGEST}
        digest = data.draw(st.sampled_from(sorted(used or NEEDS)))
        self.known.discard(digest)
        self.unloaded[digest] = self.clock.now + seconds
        running = self._running(digest)
        self.router.unload(digest, deadline_seconds=seconds)
        if not seconds:
            assert set(running) <= set(self.fake.halted)
            assert {t for t in self.open if t.digest == digest} == {
                *self._running(digest), *(t for t, _ in self.fake.failed if t.digest == digest)
            }  # fmt: skip
        self._note()

    @invariant()
    def budgets_hold(self) -> None:
        cache, fake = self.router.cache, self.fake
        assert fake.holds == {cache.slot(d): d for d in cache.digests}
        assert cache.used_bytes == len(fake.holds) * fake.slots[1] <= BUDGET
        hosted = {d for d in NEEDS if cache.is_hosted(d)}
        assert sum(HOST_SIZES[d] for d in hosted) == cache.host_used_bytes <= cache.host_bytes
        assert hosted <= fake.held, "the cache counts what is not there"
        transit = len(fake.held - hosted) + len(fake.loading)
        assert transit <= self.limits.max_loads, "R6: more is read than the bound says"
        if cache.planned_bytes:
            assert len(cache.pinned) < max(1, cache.num_slots), "R8: no slot floats"

    @invariant()
    def nothing_is_lost(self) -> None:
        fake, router = self.fake, self.router
        assert len(fake.running) == router.num_running <= self.limits.max_running
        assert len(self.open) == router.num_running + router.num_waiting
        assert {id(t) for t, _ in fake.running} <= {id(t) for t in self.open}
        assert len({id(t) for t, _ in fake.running}) == len(fake.running)
        if router.num_running < self.limits.max_running:
            assert not router._ready, "a request whose turn it is does not run"

    @invariant()
    def stats_add_up(self) -> None:
        stats = self.router.stats()
        base = sum(t.digest == BASE_DIGEST for t in self.open)
        running = self.router.num_running
        assert sum(s.waiting for s in stats.values()) + running <= len(self.open)
        assert sum(s.waiting for s in stats.values()) + running >= len(self.open) - base
        for digest, found in stats.items():
            assert (found.device_bytes > 0) == (digest in self.router.cache)
            assert found.users >= len(self._running(digest))
            assert found.loads <= self.fake.num_loads[digest]

    def teardown(self) -> None:
        """Whatever happened, with loads that succeed and requests that end everything ends."""
        if not hasattr(self, "router"):
            return
        for _ in range(150):
            if not self.open and not self.fake.loading:
                break
            self.clock.now += 1.0
            self.router.tick()
            for digest in list(self.fake.loading):
                self.fake.loads(digest)
            self.fake.settles()
            for ticket, _ in self.fake.running[:2]:  # never all: residents stay in use
                self.open.remove(ticket)
                self.fake.ends(ticket)
            self._note()
            self.budgets_hold()
        assert not self.open, f"{len(self.open)} requests never end"
        self.router.set_family(())
        self.fake.settles()
        assert not self.router.cache.digests
        assert not self.fake.holds
        assert not self.fake.held, "R10: a tier holds what is served no more"
        assert not self.router.stats()


RouterMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
)
test_random_interleavings = RouterMachine.TestCase
