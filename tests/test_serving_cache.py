"""Cache and policies: budgets of both tiers, who goes first, pins; SV..: faults of the field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soupkit.serving.cache import Costs, DeltaCache
from soupkit.serving.policy import LFU, LRU, Policy, Rates, RateWeighted, choose_pins


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(policy: Policy, *, budget: int = 30, host_bytes: int = 0) -> DeltaCache:
    """Three slots of 10 bytes, with a, b and c in them."""
    cache = DeltaCache(budget, policy, host_bytes=host_bytes)
    cache.plan_growth(10)
    cache.grow(10)
    for digest in "abc":
        policy.touch(digest)
        cache.note_costs(digest, Costs(load_seconds=1.0, install_seconds=0.1))
        assert cache.admit(digest) == ("abc".index(digest), [])
    return cache


def test_sv30_the_budget_counts_bytes_not_variants() -> None:
    cache = filled(LRU(), budget=39)
    assert (cache.num_slots, cache.used_bytes) == (3, 30)
    slot, gone = cache.admit("d")
    assert cache.used_bytes == 30 <= cache.budget_bytes
    assert [(e.digest, e.slot) for e in gone] == [("a", 0)]
    assert slot == 0


def test_r4_one_in_use_never_goes_whatever_its_value() -> None:
    cache = filled(LRU())
    assert cache.acquire("a") == 0
    assert [e.digest for e in cache.admit("d")[1]] == ["b"]
    cache.acquire("c")
    cache.acquire("d")
    assert not cache.has_room()
    with pytest.raises(ValueError, match="all 3 slots are used or pinned"):
        cache.admit("e")
    cache.release("a")
    assert [e.digest for e in cache.admit("e")[1]] == ["a"]


def test_r8_sv20_pins_stay_and_one_slot_always_floats() -> None:
    cache = filled(LRU())
    cache.pin(["a", "b", "c", "d"])
    assert cache.pinned == ("a", "b")
    for digest in ("d", "e", "c"):
        assert cache.admit(digest)[0] == 2
    cache.pin(["c"])
    assert cache.admit("d")[1][0].digest == "a"
    cache.policy.touch("d")
    assert cache.admit("e")[1][0].digest == "b"


def test_what_waits_least_when_it_is_gone_goes_first() -> None:
    cache = filled(RateWeighted())
    for _ in range(3):
        cache.policy.touch("a")
    cache.note_costs("b", Costs(load_seconds=9.0, install_seconds=0.1))
    # c: asked for once and quick to read; b: once, slow to read; a: four times.
    assert [e.digest for e in cache.admit("d")[1]] == ["c"]
    cache.policy.touch("d")
    cache.note_costs("d", Costs(load_seconds=5.0, install_seconds=0.1))
    assert [e.digest for e in cache.admit("e")[1]] == ["a"]


def test_one_that_host_memory_keeps_is_cheap_to_bring_back() -> None:
    cache = filled(RateWeighted(), host_bytes=10)
    cache.policy.touch("b")
    assert cache.host("b", 10, busy=frozenset()) == []
    assert [e.digest for e in cache.admit("d")[1]] == ["b"], "0.1 s twice is less than 1.1 s once"


def test_the_host_tier_holds_exact_bytes_and_lets_the_least_valued_go() -> None:
    policy = LRU()
    cache = DeltaCache(10, policy, host_bytes=100)
    for digest, size in [("a", 30), ("b", 50), ("c", 20)]:
        policy.touch(digest)
        assert cache.host(digest, size, busy=frozenset()) == []
    assert cache.host_used_bytes == 100
    assert cache.host("d", 40, busy={"a"}) == ["b"]
    assert cache.host("e", 81, busy={"a"}) is None
    assert (cache.host_used_bytes, cache.hosted_bytes("b"), cache.hosted_bytes("d")) == (90, 0, 40)


def test_slots_grow_without_moving_a_resident() -> None:
    cache = filled(LRU())
    cache.acquire("c")
    cache.plan_growth(15)
    assert (cache.num_slots, cache.beyond) == (2, ("c",))
    assert not cache.can_go("c")
    assert cache.has_room()
    with pytest.raises(ValueError, match="1 residents are in slots that go"):
        cache.grow(15)
    cache.release("c")
    cache.evict("c")
    cache.grow(15)
    assert (cache.slot_bytes, cache.used_bytes, cache.slot("b")) == (15, 30, 1)
    with pytest.raises(ValueError, match="slots never shrink"):
        cache.plan_growth(14)
    with pytest.raises(ValueError, match="at most the budget, 30"):
        cache.plan_growth(31)


def test_the_cache_refuses_misuse() -> None:
    cache = filled(LRU())
    for call, message in [
        (lambda: cache.admit("a"), "resident already"),
        (lambda: cache.release("a"), "more often than acquired"),
        (lambda: DeltaCache(0, LRU()), "budget_bytes=0"),
        (lambda: DeltaCache(1, LRU(), host_bytes=-1), "host_bytes=-1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    cache.acquire("a")
    with pytest.raises(ValueError, match="used by 1"):
        cache.evict("a")


def test_a_rate_is_forgotten_by_half_every_half_life() -> None:
    clock = Clock()
    rates = Rates(clock, half_life_seconds=10.0)
    for _ in range(600):
        clock.now += 0.5
        rates.touch("a")
    assert rates.rate("a") == pytest.approx(2.0, rel=0.05), "two a second"
    before = rates.rate("a")
    clock.now += 10.0
    assert rates.rate("a") == pytest.approx(before / 2)
    assert rates.rate("never") == 0.0
    rates.forget("a")
    assert rates.rate("a") == 0.0


def test_lru_and_lfu_value_what_their_names_say() -> None:
    for policy, best in [(LRU(), "b"), (LFU(), "a")]:
        for digest in "aaab":
            policy.touch(digest)
        assert max("ab", key=lambda d, p=policy: p.value(d, 1, 1.0)) == best  # type: ignore[misc]
        policy.forget("a")
        assert policy.value("a", 1, 1.0) == 0


def test_automatic_pins_change_only_where_the_difference_is_clear() -> None:
    rates = {"a": 10.0, "b": 9.0, "c": 1.0, "idle": 0.0}
    assert choose_pins(rates, (), count=1) == {"a"}
    assert choose_pins(rates, ("b",), count=1) == {"b"}, "a is not 1.5 times b"
    assert choose_pins(rates, ("c",), count=1) == {"a"}
    assert choose_pins(rates, ("gone",), count=9) == {"a", "b", "c"}


@given(
    st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=8),
    st.sets(st.text(max_size=3), max_size=4),
    st.integers(0, 5),
)
def test_automatic_pins_settle(rates: dict[str, float], now: set[str], count: int) -> None:
    first = choose_pins(rates, now, count=count)
    assert len(first) <= count
    assert first <= rates.keys()
    assert choose_pins(rates, first, count=count) == first, "they do not flap under steady rates"
