"""Replay of traces: the bounds are bounds, the static set is the best, and the goals are met."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.bench import cache as bench
from soupkit.bench.cache_bounds import best_static, clairvoyant
from soupkit.bench.cache_traces import MB, Trace, traces
from soupkit.serving.policy import LFU, LRU, RateWeighted


def small(order: list[int], sizes: list[int], tier: str, room: int) -> Trace:
    sizes = [size * 10 * MB for size in sizes]
    return Trace("small", np.array(order), sizes, tier, room)  # type: ignore[arg-type]


def least_cost(trace: Trace, seconds: list[float]) -> float:
    """By trying every choice: what is kept beside the variant that is asked for."""
    is_host = trace.tier == "host"
    sizes = trace.sizes if is_host else [1] * len(seconds)
    budget = trace.budget_bytes if is_host else trace.room
    states: dict[frozenset[int], float] = {frozenset(): 0.0}
    for variant in trace.order.tolist():
        following: dict[frozenset[int], float] = {}
        for held, paid in states.items():
            cost = paid + (0.0 if variant in held else seconds[variant])
            for count in range(len(held) + 2):
                for kept in itertools.combinations(held | {variant}, count):
                    # A host copy of the one that is asked for is optional, its slot is not.
                    fits = sum(sizes[v] for v in kept) <= budget
                    if fits and (is_host or variant in kept):
                        key = frozenset(kept)
                        following[key] = min(cost, following.get(key, cost))
        states = following
    return min(states.values())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.lists(st.sampled_from([1, 1, 2, 5]), min_size=4, max_size=4),
    st.sampled_from(["device", "host"]),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_choice_is_cheaper_than_the_clairvoyant_bound(
    order: list[int], sizes: list[int], tier: str, room: int
) -> None:
    trace = small(order, sizes, tier, room)
    seconds = bench.reload_seconds(trace)
    bound, least = clairvoyant(trace, seconds), least_cost(trace, seconds)
    assert bound <= least + 1e-9
    if tier == "device" and len(set(sizes)) == 1:
        assert bound == pytest.approx(least), "Belady is exact where bytes and seconds are equal"
    for policy in (RateWeighted(), LRU(), LFU()):
        assert bench.replay(trace, policy) >= least - 1e-9


def test_the_static_set_of_the_host_tier_is_the_best_of_all_sets() -> None:
    rng = np.random.default_rng(0)
    order = rng.choice(6, size=60, p=[0.3, 0.3, 0.15, 0.1, 0.1, 0.05]).tolist()
    trace = small(order, [6, 2, 3, 5, 1, 4], "host", 2)
    seconds = bench.reload_seconds(trace)

    def cost(kept: tuple[int, ...]) -> float:
        seen: set[int] = set()
        paid = 0.0
        for variant in order:
            paid += 0.0 if variant in kept and variant in seen else seconds[variant]
            seen.add(variant)
        return paid

    subsets = (s for n in range(7) for s in itertools.combinations(range(6), n))
    fitting = [s for s in subsets if sum(trace.sizes[v] for v in s) <= trace.budget_bytes]
    assert best_static(trace, seconds) == pytest.approx(min(map(cost, fitting)))


def test_on_the_device_all_slots_but_one_are_static() -> None:
    trace = small([0, 0, 1, 2, 2, 0, 1, 0], [1, 1, 1], "device", 2)
    seconds = [1.0, 1.0, 1.0]
    # 0 is pinned and read once; 1, 2 (once for two in a row) and 1 take turns in the other slot.
    assert best_static(trace, seconds) == 4.0


def test_rate_weighting_meets_its_goals_on_short_traces() -> None:
    rows = bench.run(quick=True)
    missed = [(row.name, row.baseline, row.ratio) for row in rows if row.ok is False]
    assert not missed
    assert {row.goal for row in rows} == {None, 1.0, 1.02, 1.1}
    assert all(row.ratio >= 1.0 for row in rows if "clairvoyant" in row.baseline)


def test_the_same_seed_gives_the_same_traces() -> None:
    for one, two in zip(traces(requests=50, seed=3), traces(requests=50, seed=3), strict=True):
        assert (one.order == two.order).all()
        assert one.sizes == two.sizes
