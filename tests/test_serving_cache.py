"""Cache and router: no request lost, doubled or crossed; budgets hold; loads are single-flight."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from soupkit.errors import ServingError
from soupkit.serving.cache import DeltaCache, Evicted
from soupkit.serving.router import Router
from soupkit.serving.states import (
    BASE_DIGEST,
    Limits,
    Phase,
    QueueFull,
    Ticket,
    VariantUnavailable,
)

SIZES = {"a": 30, "b": 40, "c": 50, "d": 60, "e": 100, "f": 140}
BUDGET = 130
LIMITS = Limits(max_running=3, max_queue=6, max_loads=2, starve_seconds=2.0)


@dataclass
class Fake:
    """The driver of the tests: notes what it is told and answers when the test says so."""

    loading: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    installing: list[tuple[str, int]] = field(default_factory=list)
    running: list[tuple[Ticket, int | None]] = field(default_factory=list)
    failed: list[tuple[Ticket, ServingError]] = field(default_factory=list)
    holds: dict[int, str] = field(default_factory=dict)  # slot -> digest, as an engine would
    num_loads: Counter[str] = field(default_factory=Counter)
    last: dict[str, int] = field(default_factory=dict)  # digest -> number of the latest that ran

    def load(self, digest: str) -> None:
        assert digest not in self.loading, "two loads of one variant"
        self.loading.append(digest)
        self.num_loads[digest] += 1

    def drop(self, digest: str) -> None:
        assert digest not in self.loading
        self.dropped.append(digest)

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        for gone in evicted:
            self.evict(gone)
        assert slot not in self.holds, "a slot was overwritten"
        self.holds[slot] = digest
        self.installing.append((digest, slot))

    def evict(self, evicted: Evicted) -> None:
        assert not [t for t, slot in self.running if slot == evicted.slot], "evicted while in use"
        assert self.holds.pop(evicted.slot) == evicted.digest

    def run(self, ticket: Ticket, slot: int | None) -> None:
        if isinstance(ticket, Numbered):
            assert ticket.number > self.last.get(ticket.digest, -1), "order within a variant"
            self.last[ticket.digest] = ticket.number
        if ticket.digest == BASE_DIGEST:
            assert slot is None
        else:
            assert slot is not None
            assert self.holds[slot] == ticket.digest, "answered by another variant"
            assert ticket.digest not in [d for d, _ in self.installing], "ran before it was there"
        self.running.append((ticket, slot))

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        self.failed.append((ticket, error))


@dataclass(slots=True, eq=False)
class Numbered(Ticket):
    """A request that knows its place in the order of arrival."""

    number: int = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(budget: int = BUDGET, limits: Limits = LIMITS) -> tuple[Router, Fake, Clock]:
    fake, clock = Fake(), Clock()
    router = Router(DeltaCache(budget), fake, clock=clock, limits=limits)
    router.set_family(SIZES)
    return router, fake, clock


def arrive(router: Router, fake: Fake, digest: str) -> None:
    """A load and the install that follows."""
    fake.loading.remove(digest)
    router.loaded(digest, SIZES[digest])
    settle(router, fake)


def settle(router: Router, fake: Fake) -> None:
    while fake.installing:
        digest, _ = fake.installing.pop(0)
        router.installed(digest)


def finish(router: Router, fake: Fake, ticket: Ticket) -> None:
    fake.running = [(t, slot) for t, slot in fake.running if t is not ticket]
    router.finished(ticket)


def test_a_burst_of_misses_makes_one_load_and_runs_in_order() -> None:
    router, fake, _ = make()
    tickets = [Ticket("a") for _ in range(5)]
    for ticket in tickets:
        router.submit([ticket])
    assert fake.loading == ["a"]
    arrive(router, fake, "a")
    assert [t for t, _ in fake.running] == tickets[:3]
    for ticket in tickets[:3]:
        finish(router, fake, ticket)
    assert [t for t, _ in fake.running] == tickets[3:]
    assert fake.num_loads["a"] == 1


def test_a_slow_load_delays_no_other_variant() -> None:
    router, fake, _ = make()
    slow, quick, base = Ticket("a"), Ticket("b"), Ticket(BASE_DIGEST)
    for ticket in (slow, quick, base):
        router.submit([ticket])
    assert fake.loading == ["a", "b"]
    arrive(router, fake, "b")
    assert [t for t, _ in fake.running] == [base, quick]
    assert router.phase("a") is Phase.LOADING


def test_a_failed_load_fails_its_waiters_only_and_backs_off() -> None:
    router, fake, clock = make()
    doomed, fine = [Ticket("a"), Ticket("a")], Ticket("b")
    router.submit([*doomed, fine])
    fake.loading.remove("a")
    router.load_failed("a", "the file is gone")
    assert [t for t, _ in fake.failed] == doomed
    with pytest.raises(VariantUnavailable, match="the file is gone") as caught:
        router.submit([Ticket("a")])
    assert caught.value.retry_seconds == 1.0
    clock.now += 1.0
    router.submit([Ticket("a")])
    fake.loading.remove("a")
    router.load_failed("a", "still gone")
    clock.now += 1.5
    with pytest.raises(VariantUnavailable):
        router.submit([Ticket("a")])
    clock.now += 0.5
    router.submit([Ticket("a")])
    arrive(router, fake, "b")
    arrive(router, fake, "a")
    assert len(fake.running) == 2


def test_the_oldest_idle_variant_goes_first_and_a_used_one_never() -> None:
    router, fake, _ = make()
    used, idle = Ticket("a"), Ticket("b")
    router.submit([used, idle])
    arrive(router, fake, "a")
    arrive(router, fake, "b")
    finish(router, fake, idle)
    router.submit([Ticket("e")])
    arrive(router, fake, "e")
    assert set(router.cache.digests) == {"a", "e"}, "b was idle, a is older but used"


def test_a_pinned_variant_is_loaded_at_once_and_never_evicted() -> None:
    router, fake, _ = make()
    router.set_family(SIZES, pinned={"a"})
    assert fake.loading == ["a"]
    arrive(router, fake, "a")
    for digest in ("e", "b", "c", "e"):
        ticket = Ticket(digest)
        router.submit([ticket])
        arrive(router, fake, digest)
        finish(router, fake, ticket)
        assert "a" in router.cache


def test_a_variant_larger_than_the_budget_is_refused_with_both_numbers() -> None:
    router, fake, _ = make()
    router.submit([Ticket("f")])
    fake.loading.remove("f")
    router.loaded("f", SIZES["f"])
    assert "140 bytes, the cache has 130" in str(fake.failed[0][1])


def test_a_variant_that_new_pins_leave_no_room_for_fails_instead_of_waiting_for_ever() -> None:
    router, fake, _ = make()
    users = [Ticket("b"), Ticket("e"), Ticket("a")]
    for ticket in users:
        router.submit([ticket])
    arrive(router, fake, "b")
    fake.loading.remove("e")
    router.loaded("e", SIZES["e"])
    # e waits for b's room, which is never given back from now on; a fits and must not wait behind.
    router.set_family(SIZES, pinned={"b"})
    assert "100 bytes, the cache has 90" in str(fake.failed[0][1])
    assert fake.dropped == ["e"]
    arrive(router, fake, "a")
    assert [t for t, _ in fake.running] == [users[0], users[2]]


def test_a_full_queue_refuses_all_or_nothing() -> None:
    router, fake, _ = make()
    router.submit([Ticket(BASE_DIGEST) for _ in range(3 + 5)])
    with pytest.raises(QueueFull, match="5 requests wait, the limit is 6"):
        router.submit([Ticket(BASE_DIGEST), Ticket(BASE_DIGEST)])
    assert router.num_waiting == 5
    router.submit([Ticket(BASE_DIGEST)])
    assert len(fake.running) == 3


def test_a_starving_variant_drains_the_residents() -> None:
    router, fake, clock = make()
    first = Ticket("e")
    router.submit([first])
    arrive(router, fake, "e")
    router.submit([Ticket("c")])
    fake.loading.remove("c")
    router.loaded("c", SIZES["c"])
    # Requests for e keep coming and overlap, so that e is never idle.
    second = Ticket("e")
    router.submit([second])
    finish(router, fake, first)
    clock.now += LIMITS.starve_seconds
    late = Ticket("e")
    router.tick()
    router.submit([late])
    assert router.phase("e") is Phase.DRAINING
    finish(router, fake, second)
    settle(router, fake)
    assert router.phase("c") is Phase.RESIDENT
    assert [t.digest for t, _ in fake.running] == ["c"]
    finish(router, fake, fake.running[0][0])
    arrive(router, fake, "e")
    assert [t for t, _ in fake.running] == [late]


def test_a_variant_that_left_the_family_goes_when_its_last_request_ends() -> None:
    router, fake, _ = make()
    ticket = Ticket("a")
    router.submit([ticket])
    arrive(router, fake, "a")
    router.set_family([d for d in SIZES if d != "a"])
    assert "a" in router.cache
    finish(router, fake, ticket)
    assert "a" not in router.cache


def test_the_cache_refuses_misuse() -> None:
    cache = DeltaCache(100)
    cache.admit("x", 60)
    for call, message in [
        (lambda: cache.admit("x", 1), "resident already"),
        (lambda: cache.release("x"), "more often than acquired"),
        (lambda: DeltaCache(0), "budget_bytes=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    cache.acquire("x")
    assert not cache.has_room(41)
    with pytest.raises(ValueError, match="no room for 41 bytes"):
        cache.admit("y", 41)
    with pytest.raises(ValueError, match="used by 1"):
        cache.evict("x")


class RouterMachine(RuleBasedStateMachine):
    """Random interleavings of everything that can happen."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.fake, self.clock = make()
        self.open: list[Ticket] = []  # accepted, no answer yet
        self.pinned: frozenset[str] = frozenset()
        self.known = set(SIZES)
        self.seen = 0

    @rule(digest=st.sampled_from([BASE_DIGEST, *SIZES]), count=st.integers(1, 3))
    def submit(self, digest: str, count: int) -> None:
        if digest != BASE_DIGEST and digest not in self.known:
            return
        tickets = [Numbered(digest, self.seen + i) for i in range(count)]
        self.seen += count
        before = self.router.num_waiting
        try:
            self.router.submit(tickets)
        except QueueFull:
            assert before + count > LIMITS.max_queue
        except VariantUnavailable:
            assert self.router.phase(digest) is Phase.FAILED
        else:
            self.open += tickets

    def _note(self) -> None:
        """Answers that came in since."""
        for ticket, error in self.fake.failed:
            assert isinstance(error, VariantUnavailable)
            assert ticket in self.open
            self.open.remove(ticket)
        self.fake.failed.clear()

    @precondition(lambda self: self.fake.loading)
    @rule(data=st.data(), works=st.booleans())
    def load_ends(self, data: Any, works: bool) -> None:
        digest = data.draw(st.sampled_from(self.fake.loading))
        waiters = {t for t in self.open if t.digest == digest}
        self.fake.loading.remove(digest)
        if works:
            self.router.loaded(digest, SIZES[digest])
        else:
            self.router.load_failed(digest, "broken")
        assert {t for t, _ in self.fake.failed} <= waiters
        self._note()

    @precondition(lambda self: self.fake.installing)
    @rule(works=st.booleans())
    def install_ends(self, works: bool) -> None:
        digest, slot = self.fake.installing.pop(0)
        if works:
            self.router.installed(digest)
        else:
            del self.fake.holds[slot]
            self.router.load_failed(digest, "broken")
        self._note()

    @precondition(lambda self: self.fake.running)
    @rule(data=st.data())
    def ends(self, data: Any) -> None:
        ticket, _ = data.draw(st.sampled_from(self.fake.running))
        self.open.remove(ticket)
        finish(self.router, self.fake, ticket)
        self._note()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        runs = any(t is ticket for t, _ in self.fake.running)
        assert self.router.cancel(ticket) is not runs
        if not runs:
            self.open.remove(ticket)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.router.tick()

    @rule(
        gone=st.sets(st.sampled_from(sorted(SIZES)), max_size=2),
        pinned=st.sampled_from([(), ("a",), ("b",)]),
    )
    def family_changes(self, gone: set[str], pinned: tuple[str, ...]) -> None:
        self.known = set(SIZES) - gone
        self.pinned = frozenset(pinned) & self.known
        self.router.set_family(self.known, pinned)

    @invariant()
    def budgets_hold(self) -> None:
        cache = self.router.cache
        assert cache.used_bytes == sum(cache.num_bytes(d) for d in cache.digests) <= BUDGET
        assert self.fake.holds == {cache.slot(d): d for d in cache.digests}
        assert len(self.fake.running) == self.router.num_running <= LIMITS.max_running
        assert len(self.fake.loading) <= LIMITS.max_loads

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.open) == self.router.num_running + self.router.num_waiting
        assert {id(t) for t, _ in self.fake.running} <= {id(t) for t in self.open}
        assert len({id(t) for t, _ in self.fake.running}) == len(self.fake.running)

    def teardown(self) -> None:
        """Whatever happened, everything that is open can be brought to an end."""
        for _ in range(200):
            if not self.open:
                return
            self.clock.now += 100.0
            self.router.tick()
            for digest in list(self.fake.loading):
                self.fake.loading.remove(digest)
                self.router.loaded(digest, SIZES[digest])
            settle(self.router, self.fake)
            for ticket, _ in list(self.fake.running):
                self.open.remove(ticket)
                finish(self.router, self.fake, ticket)
            self._note()
        raise AssertionError(f"{len(self.open)} requests never end")


RouterMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
test_random_interleavings = RouterMachine.TestCase
