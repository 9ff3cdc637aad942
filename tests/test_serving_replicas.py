"""The choice of a replica: what it promises, on every state and along whole runs."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.serving.replicas import PATIENCE, Replica, choose
from soupkit.serving.states import Phase

VARIANTS = [f"v{i}" for i in range(6)]


def replica(**settings: object) -> Replica:
    plain = Replica(is_up=True, open=0, max_running=4, max_queue=8, slots=3)
    return replace(plain, **settings)  # type: ignore[arg-type]


@st.composite
def replica_states(draw: st.DrawFn) -> Replica:
    open_for = draw(st.dictionaries(st.sampled_from(VARIANTS), st.integers(0, 6)))
    phases = draw(st.dictionaries(st.sampled_from(VARIANTS), st.sampled_from(list(Phase))))
    return Replica(
        is_up=draw(st.booleans()),
        open=sum(open_for.values()) + draw(st.integers(0, 4)),
        max_running=draw(st.integers(1, 6)),
        max_queue=draw(st.integers(1, 6)),
        slots=draw(st.integers(1, 6)),
        phases=phases,
        pinned=frozenset(draw(st.lists(st.sampled_from(VARIANTS), max_size=2))),
        open_for=open_for,
    )


fleets = st.lists(replica_states(), min_size=1, max_size=4)


@settings(max_examples=150)
@given(fleets, st.sampled_from([None, *VARIANTS]), st.sets(st.integers(0, 3), max_size=2))
def test_one_that_is_up_and_not_excluded_if_there_is_one(
    fleet: list[Replica], variant: str | None, excluded: set[int]
) -> None:
    able = [i for i, one in enumerate(fleet) if one.is_up and i not in excluded]
    found = choose(fleet, variant, excluded=excluded)
    assert (found is None) == (not able)
    if found is not None:
        assert found in able
        # Refused only where all would refuse.
        assert not fleet[found].is_full or all(fleet[i].is_full for i in able)
        assert choose(fleet, variant, excluded=excluded) == found


@settings(max_examples=150)
@given(fleets, st.sampled_from(VARIANTS))
def test_no_load_that_nobody_needs(fleet: list[Replica], variant: str) -> None:
    found = choose(fleet, variant)
    if found is None or fleet[found].holds(variant):
        return
    # It is about to be loaded once more: then no replica that holds it could have answered now...
    for one in fleet:
        if one.is_up and one.holds(variant):
            assert one.is_busy
            # ... and none was loading it already, unless that one would have refused.
            assert one.is_full or not one.loads(variant)


@settings(max_examples=150)
@given(fleets, st.sampled_from(VARIANTS))
def test_a_copy_puts_nothing_out_of_the_fleet_unless_the_queue_is_long(
    fleet: list[Replica], variant: str
) -> None:
    found = choose(fleet, variant)
    able = [one for one in fleet if one.is_up and not one.is_full]
    holders = [one for one in able if one.holds(variant)]
    if found is None or not holders or fleet[found].holds(variant):
        return
    one = fleet[found]
    assert not one.is_busy
    has_room = len(one.held) < one.slots
    is_double = any(
        other.phases.get(v) is Phase.RESIDENT
        for v in one.idle
        for i, other in enumerate(fleet)
        if i != found and other.is_up
    )
    assert has_room or is_double or max(h.load for h in holders) >= PATIENCE
    assert one.idle.isdisjoint(one.pinned)


def test_followers_go_where_it_loads() -> None:
    fleet = [
        replica(),
        replica(phases={"a": Phase.LOADING}, open=3, open_for={"a": 3}),
        replica(),
    ]
    assert choose(fleet, "a") == 1
    # The load began a moment ago, and the replica has not told yet.
    assert choose([replica(), replica(open=1, open_for={"a": 1})], "a") == 1
    # A flood of followers still waits for the one load.
    assert choose([replica(), replica(phases={"a": Phase.LOADING}, open=9)], "a") == 1


def test_a_hot_variant_gets_a_second_replica_and_then_they_share() -> None:
    hot = replica(phases={"a": Phase.RESIDENT}, open=4, open_for={"a": 4})
    assert choose([hot, replica()], "a") == 1
    both = [hot, replica(phases={"a": Phase.RESIDENT}, open=2, open_for={"a": 2})]
    assert choose(both, "a") == 1
    assert choose([both[1], hot], "a") == 0
    # Not while a batch has a place.
    assert choose([replace(hot, open=3), replica()], "a") == 0


def test_a_copy_waits_where_it_would_put_the_last_of_another_out() -> None:
    hot = replica(phases={"a": Phase.RESIDENT}, open=4, open_for={"a": 4})
    full = replica(phases=dict.fromkeys("bcd", Phase.RESIDENT))
    assert choose([hot, full], "a") == 0
    assert choose([replace(hot, open=8), full], "a") == 1  # the queue is as long as two batches
    assert (
        choose([hot, full, replica(phases={"b": Phase.RESIDENT}, open=4)], "a") == 1
    )  # b is twice


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        # A copy in host memory needs no disk.
        ([replica(), replica(phases={"a": Phase.HOST}, open=2)], 1),
        # Not behind a full batch.
        ([replica(), replica(phases={"a": Phase.HOST}, open=4)], 0),
        # Room before other loads, before work.
        ([replica(phases=dict.fromkeys("bcd", Phase.RESIDENT)), replica(open=3)], 1),
        ([replica(phases={"b": Phase.LOADING}), replica(open=3)], 1),
        ([replica(open=3), replica()], 1),
        ([replica(phases={"b": Phase.RESIDENT}), replica()], 1),
        # One that failed, or that is putting it out, comes last.
        ([replica(phases={"a": Phase.FAILED}), replica(open=4)], 1),
        ([replica(phases={"a": Phase.DRAINING}), replica(open=4)], 1),
        ([replica(phases={"a": Phase.FAILED})], 0),
    ],
)
def test_where_a_cold_one_goes(fleet: list[Replica], expected: int) -> None:
    assert choose(fleet, "a") == expected


def test_cold_ones_spread_and_come_back() -> None:
    fleet = [replica(slots=8) for _ in range(3)]
    first = {f"v{i}": choose(fleet, f"v{i}") for i in range(60)}
    assert min(Counter(first.values()).values()) >= 10
    assert {name: choose(fleet, name) for name in first} == first


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_with_room_for_all_loads_each_once(seed: int) -> None:
    """A run: requests come and go, loads take a while, no batch is ever full."""
    rng = random.Random(seed)
    fleet = [replica(slots=4, max_running=100) for _ in range(3)]
    loads: Counter[str] = Counter()
    names = [f"v{i}" for i in range(12)]
    open_ones: list[tuple[int, str]] = []
    for _ in range(600):
        name = rng.choice(names)
        i = choose(fleet, name)
        assert i is not None
        one = fleet[i]
        if not one.holds(name):
            loads[name] += 1
            assert one.free_slots
        one = replace(
            one,
            open=one.open + 1,
            open_for={**one.open_for, name: one.open_for.get(name, 0) + 1},
            phases={**one.phases, name: one.phases.get(name, Phase.LOADING)},
        )
        fleet[i] = one
        open_ones.append((i, name))
        if rng.random() < 0.9:
            i, name = open_ones.pop(rng.randrange(len(open_ones)))
            one = fleet[i]
            left = {**one.open_for, name: one.open_for[name] - 1}
            ready = {**one.phases, name: Phase.RESIDENT}
            fleet[i] = replace(one, open=one.open - 1, open_for=left, phases=ready)
    assert loads == dict.fromkeys(names, 1)
