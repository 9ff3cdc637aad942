"""K-Merge without files: what a pool decides, and how two adapters become one."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import merge_utils
from torch import Tensor

from soupkit.alike import similarity
from soupkit.errors import MergeError
from soupkit.factored import Pair
from soupkit.kmerge import Decision, PoolRule, SlotView, decide
from soupkit.opcm import OpcmRule, fold
from soupkit.slot_merge import (
    SlotState,
    drop,
    elected_mean,
    first_state,
    fitting_rank,
    merge_modules,
    trim,
)

HUGE = 2**40
SHAPES = {"q": (7, 12), "v": (5, 12), "o": (12, 7)}
Adapter = dict[str, Pair]


def random_adapter(seed: int, *, ranks=(1, 4), names=tuple(SHAPES), scale: float = 1.0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in names:
        rows, columns = SHAPES[name]
        rank = int(torch.randint(ranks[0], ranks[1] + 1, (), generator=generator))
        a = torch.randn(rank, columns, generator=generator)
        made[name] = Pair(a, torch.randn(rows, rank, generator=generator) * 0.3, scale)
    return made


def dense(adapter: Adapter) -> dict[str, np.ndarray]:
    """Deltas in float64, by numpy; zero where a module is not there."""
    found = {}
    for name, shape in SHAPES.items():
        found[name] = np.zeros(shape)
        if name in adapter:
            pair = adapter[name]
            found[name] = pair.scale * (pair.b.double().numpy() @ pair.a.double().numpy())
    return found


def check_close(got: Adapter, wanted: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    ours = dense(got)
    size = math.sqrt(sum(float((one**2).sum()) for one in wanted.values()))
    for name, one in wanted.items():
        assert np.abs(ours[name] - one).max() <= tolerance * max(size, 1e-3), name


def through(adapters: list[Adapter], rule: PoolRule) -> tuple[Adapter, SlotState, list[Any]]:
    """All of them in one slot, in this order."""
    slot, state, reports = adapters[0], first_state(adapters[0]), []
    for adapter in adapters[1:]:
        slot, state, report = merge_modules(slot, adapter, rule, state)
        reports.append(report)
    return slot, state, reports


# ---- rules and decisions ----


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes=0"),
        ({"capacity_bytes": 2.5}, "capacity_bytes=2.5"),
        ({"slots": 0}, "slots=0"),
        ({"rank": 0}, "rank=0"),
        ({"merge": "slerp"}, "merge='slerp'"),
        ({"similarity": "l2"}, "similarity='l2'"),
        ({"when_full": "wait"}, "when_full='wait'"),
        ({"merge": "ties"}, 'merge="ties" needs rank='),
        ({"merge": "dare"}, 'merge="dare" needs rank='),
        ({"open_below": math.nan}, "open_below=nan"),
        ({"gate_similarity": "high"}, "gate_similarity='high'"),
        ({"gate_quality": 0}, "gate_quality=0"),
        ({"gate_quality": 1.5}, "gate_quality=1.5"),
        ({"density": 0.0}, "density=0.0"),
        ({"alpha": 2.0}, "alpha=2.0"),
        ({"cut": "diagonal"}, "cut='diagonal'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_rule_names_what_is_out_of_range(options, word):
    with pytest.raises(ValueError, match=r"[a-z]") as told:
        PoolRule(**{"capacity_bytes": HUGE, **options})
    assert word in str(told.value)
    assert "\n" not in str(told.value)


def view(number: int, similarity: float, **options: Any) -> SlotView:
    told = {"nbytes": 10, "num_tasks": 1, "uses": 0, "last_used": 0, **options}
    return SlotView(number=number, similarity=similarity, **told)


def test_an_adapter_that_fits_gets_a_slot_of_its_own_whatever_it_is_like():
    rule = PoolRule(30, slots=3)
    assert decide(rule, [], 10).action == "store"
    assert decide(rule, [view(0, 1.0), view(1, -1.0)], 10) == Decision(
        "store", "fits", similarity=1.0
    )


@pytest.mark.parametrize("rule", [PoolRule(25), PoolRule(1000, slots=2)], ids=["bytes", "slots"])
def test_when_full_it_is_merged_into_the_nearest_and_ties_go_to_the_lowest_number(rule):
    slots = [view(4, 0.1), view(2, 0.3), view(1, 0.3)]
    told = decide(rule, slots, 10)
    assert (told.action, told.slot, told.similarity) == ("merge", 1, 0.3)
    # With nothing in common anywhere there is still a lowest number.
    assert decide(rule, [view(3, -math.inf), view(2, -math.inf)], 10).slot == 2


def test_an_adapter_larger_than_the_pool_is_refused_before_all_else():
    for slots in ([], [view(0, 0.9)]):
        told = decide(PoolRule(99, when_full="evict"), slots, 100)
        assert told.action == "refuse"
        assert "100 bytes" in told.reason
        assert "99" in told.reason


def test_plus_plus_opens_a_slot_only_for_what_is_like_none():
    rule = PoolRule(1000, open_below=0.2)
    assert decide(rule, [view(0, 0.19), view(1, -0.5)], 10).action == "store"
    told = decide(rule, [view(0, -0.5), view(1, 0.2)], 10)
    assert (told.action, told.slot) == ("merge", 1)
    # No module in common is like nothing, even below -1.
    assert decide(replace(rule, open_below=-1.0), [view(0, -math.inf)], 10).action == "store"


def test_the_similarity_gate_and_what_follows_a_rejection():
    slots = [view(0, 0.1, uses=5), view(1, 0.2, uses=1)]
    gated = PoolRule(20, gate_similarity=0.3)
    refused = decide(gated, slots, 10)
    assert refused.action == "refuse"
    assert "0.2" in refused.reason
    assert "0.3" in refused.reason
    assert decide(replace(gated, gate_similarity=0.2), slots, 10).slot == 1
    evicting = decide(replace(gated, when_full="evict"), slots, 10)
    assert (evicting.action, evicting.evicted) == ("store", (1,))
    # An early merge that fails its gate has a free slot left.
    early = decide(PoolRule(1000, open_below=0.0), slots, 10, rejected="task a lost too much")
    assert (early.action, early.evicted) == ("store", ())
    assert "task a lost too much" in early.reason


def test_utility_is_tasks_and_uses_a_byte_and_age_breaks_ties():
    rule = PoolRule(40, when_full="evict")
    slots = [
        view(0, 0.0, nbytes=20, num_tasks=2, uses=2),  # 0.2 a byte
        view(1, 0.0, nbytes=10, num_tasks=1, uses=1, last_used=7),  # 0.2
        view(2, 0.0, nbytes=10, num_tasks=1, uses=2, last_used=1),  # 0.3
    ]
    assert decide(rule, slots, 10, rejected="no").evicted == (0,)
    slots[0] = replace(slots[0], last_used=9)
    assert decide(rule, slots, 10, rejected="no").evicted == (1,)
    assert decide(rule, slots, 30, rejected="no").evicted == (1, 0)
    assert decide(replace(rule, slots=2), slots, 1, rejected="no").evicted == (1, 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(-1, 1), st.integers(0, 5)), min_size=1, max_size=30
    ),
    st.integers(40, 120),
    st.none() | st.integers(1, 4),
    st.none() | st.floats(-1.5, 1.5),
    st.none() | st.floats(-1, 1),
    st.sampled_from(["evict", "refuse"]),
)
def test_no_decision_ever_breaks_the_budget(events, capacity, most, below, gate, when_full):
    rule = PoolRule(
        capacity, slots=most, open_below=below, gate_similarity=gate, when_full=when_full
    )
    slots: dict[int, SlotView] = {}
    for clock, (nbytes, alike, uses) in enumerate(events):
        seen = [replace(slot, similarity=math.sin(alike * slot.number)) for slot in slots.values()]
        told = decide(rule, seen, nbytes)
        for number in told.evicted:
            del slots[number]
        if told.action == "merge":
            assert told.slot in slots
            slots[told.slot] = replace(slots[told.slot], num_tasks=slots[told.slot].num_tasks + 1)
            assert gate is None or max(slot.similarity for slot in seen) >= gate
        elif told.action == "store":
            slots[clock] = view(clock, 0.0, nbytes=nbytes, uses=uses, last_used=clock)
        else:
            assert when_full == "refuse"
        assert len(slots) <= (most or len(slots))
        assert sum(slot.nbytes for slot in slots.values()) <= capacity


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.floats(-3, -1), st.floats(1.001, 5))
def test_thresholds_of_plus_plus_beyond_the_cosines(likes, low, high):
    """4.7.5: at most -1 opens no slot after the first; above 1 is plain K-Merge."""
    slots = [view(number, alike) for number, alike in enumerate(likes)]
    assert decide(PoolRule(HUGE, open_below=low), slots, 10).action == "merge"
    for capacity in (HUGE, 10 * len(likes)):
        plain = PoolRule(capacity, slots=None)
        assert decide(plain, slots, 10) == decide(replace(plain, open_below=high), slots, 10)


# ---- merges ----

seeds = st.lists(st.integers(0, 10**6), min_size=2, max_size=5, unique=True)


@settings(max_examples=25)
@given(seeds, st.randoms(use_true_random=False))
def test_history_mean_is_the_batch_mean_in_any_order(numbers, order):
    """4.7.2, in full delta space."""
    adapters = [
        random_adapter(seed, scale=(-2.0, 0.5, 4.0)[seed % 3], names=list(SHAPES)[: 1 + seed % 3])
        for seed in numbers
    ]
    wanted = {
        name: np.mean([dense(one)[name] for one in adapters], axis=0)
        for name in {name for one in adapters for name in one}
    }
    order.shuffle(adapters)
    slot, state, reports = through(adapters, PoolRule(HUGE))
    check_close(slot, wanted)
    assert set(slot) == set(wanted)
    assert state.tasks == len(adapters)
    for report in reports:
        assert report.lost_energy < 1e-10


@settings(max_examples=25)
@given(seeds, st.integers(1, 5))
def test_cuts_move_the_history_mean_by_no_more_than_the_sum_of_the_tails(numbers, rank):
    """4.7.2: with a cut after each of the merges; the cut itself is numpy's."""
    adapters = [random_adapter(seed, names=("q",)) for seed in numbers]
    slot, state = adapters[0], first_state(adapters[0])
    bound, exact = 0.0, dense(adapters[0])["q"]
    for number, adapter in enumerate(adapters[1:], start=2):
        before = dense(slot)["q"] * (1 - 1 / number) + dense(adapter)["q"] / number
        exact = exact * (1 - 1 / number) + dense(adapter)["q"] / number
        values = np.linalg.svd(before, compute_uv=False)
        slot, state, report = merge_modules(slot, adapter, PoolRule(HUGE, rank=rank), state)
        tail = math.sqrt((values[rank:] ** 2).sum())
        assert report.lost_energy == pytest.approx(tail**2 / (values**2).sum(), abs=1e-9)
        assert report.ranks["q"] == slot["q"].rank <= rank
        bound = bound * (1 - 1 / number) + tail
    assert np.linalg.norm(dense(slot)["q"] - exact) <= bound + 1e-5 * np.linalg.norm(exact)


def test_one_adapter_n_times_is_that_adapter_and_its_rank_stays():
    """4.3: PEFT's linear gives n times it."""
    adapter = random_adapter(3, ranks=(2, 2))
    slot, _, _ = through([adapter] * 6, PoolRule(HUGE))
    check_close(slot, dense(adapter))
    assert {pair.rank for pair in slot.values()} == {2}


@pytest.mark.parametrize("merge", ["history_mean", "opcm", "ties", "dare"])
def test_a_zero_adapter_merges_and_disjoint_ones_are_united(merge):
    rule = PoolRule(HUGE, merge=merge, rank=12, density=1.0)
    full = random_adapter(5)
    zero = {
        name: Pair(torch.randn(3, pair.shape[1]), torch.zeros(pair.shape[0], 3), 2.0)
        for name, pair in full.items()
    }
    for pair in ((full, zero), (zero, full), (zero, zero)):
        slot, state, _ = through(list(pair), rule)
        assert state.tasks == 2
        share = 0.0 if pair == (zero, zero) else 1.0 if merge == "ties" else 0.5
        check_close(slot, {name: one * share for name, one in dense(full).items()})
        assert all(pair.rank >= 1 for pair in slot.values())
    assert similarity(zero, full) == 0.0
    left, right = {"q": full["q"]}, {"o": full["o"]}
    assert similarity(left, right) == -math.inf
    slot, _, _ = through([left, right], rule)
    assert set(slot) == {"q", "o"}


@settings(max_examples=20)
@given(seeds, st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.sampled_from(["block", "two_sided"]))
def test_opcm_in_a_slot_is_the_dense_fold_rescaled_over_all_modules(numbers, alpha, cut):
    """The state (t, sum of norms, rescaling) is all that is carried beside the slot (3.3)."""
    adapters = [random_adapter(seed) for seed in numbers]
    rule = PoolRule(HUGE, merge="opcm", alpha=alpha, cut=cut)
    slot, state, _ = through(adapters, rule)
    held = {name: torch.from_numpy(one) for name, one in dense(adapters[0]).items()}
    for adapter in adapters[1:]:
        for name, one in dense(adapter).items():
            held[name] = fold(name, held[name], torch.from_numpy(one), OpcmRule(alpha, cut))
    norms = [np.sqrt(sum((one**2).sum() for one in dense(a).values())) for a in adapters]
    size = math.sqrt(sum(float((one**2).sum()) for one in held.values()))
    wanted = {name: one.numpy() * np.mean(norms) / size for name, one in held.items()}
    check_close(slot, wanted, 1e-4)
    assert state.norms == pytest.approx(sum(norms))
    assert state.rescaling == pytest.approx(np.mean(norms) / size, rel=1e-5)


def test_opcm_is_rescaled_after_its_cut():
    adapters = [random_adapter(seed) for seed in (1, 2, 3)]
    slot, _, reports = through(adapters, PoolRule(HUGE, merge="opcm", rank=2))
    norms = [np.sqrt(sum((one**2).sum() for one in dense(a).values())) for a in adapters]
    got = math.sqrt(sum(float((one**2).sum()) for one in dense(slot).values()))
    assert got == pytest.approx(np.mean(norms), rel=1e-5)
    assert reports[-1].lost_energy > 0.01


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0.05, 1.0))
def test_ties_is_pefts_own_of_every_task_of_the_slot(seed, others, density):
    """A slot of n - 1 tasks and a new one: PEFT's ties of n - 1 equal deltas and the new one."""
    held, incoming = random_adapter(seed), random_adapter(seed + 1)
    rule = PoolRule(HUGE, merge="ties", rank=12, density=density)
    slot, state, report = merge_modules(held, incoming, rule, SlotState(others))
    for name, pair in held.items():
        if int(density * pair.matrix().numel()) == 0:
            continue
        tensors = [pair.matrix()] * others + [incoming[name].matrix()]
        wanted = _ties_of_peft(tensors, density)
        torch.testing.assert_close(slot[name].matrix(), wanted, rtol=1e-4, atol=1e-5)
    assert state.tasks == others + 1
    assert report.lost_energy < 1e-8


def _ties_of_peft(tensors: list[Tensor], density: float) -> Tensor:
    ones = torch.ones(len(tensors))
    if density < 1:
        return merge_utils.ties(tensors, ones, density)
    with pytest.warns(UserWarning, match="no pruning"):
        return merge_utils.ties(tensors, ones, density)


@pytest.mark.parametrize("density", [0.2, 0.7])
def test_dare_is_pefts_own_with_the_same_draws(density, monkeypatch):
    held, incoming = random_adapter(1, names=("q",)), random_adapter(2, names=("q",))
    draws: list[Tensor] = []
    draw = torch.bernoulli

    def recorded(*args: Any, **options: Any) -> Tensor:
        draws.append(draw(*args, **options))
        return draws[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "bernoulli", recorded)
        rule = PoolRule(HUGE, merge="dare", rank=12, density=density, seed=7)
        slot, _, _ = merge_modules(held, incoming, rule, SlotState())
    assert len(draws) == 2
    assert not torch.equal(*draws)
    with monkeypatch.context() as patch:
        replay = iter(draws)
        patch.setattr(torch, "bernoulli", lambda input: next(replay))
        tensors = [held["q"].matrix(), incoming["q"].matrix()]
        wanted = merge_utils.dare_linear(tensors, torch.full((2,), 0.5), density)
    torch.testing.assert_close(slot["q"].matrix(), wanted, rtol=1e-4, atol=1e-5)
    again, _, _ = merge_modules(held, incoming, rule, SlotState())
    torch.testing.assert_close(again["q"].b, slot["q"].b, rtol=0, atol=0)
    other, _, _ = merge_modules(held, incoming, replace(rule, seed=8), SlotState())
    assert not torch.allclose(other["q"].matrix(), slot["q"].matrix())


def test_dare_drops_from_each_task_once():
    held, incoming = random_adapter(1), random_adapter(2)
    rule = PoolRule(HUGE, merge="dare", rank=12, density=0.5)
    first, state, _ = merge_modules(held, incoming, rule, SlotState())
    third = random_adapter(3)
    slot, _, _ = merge_modules(first, third, rule, state)
    for name, pair in third.items():
        # What is left of the slot is untouched: the difference is a dropped third, thrice.
        left = (slot[name].matrix() - first[name].matrix() * (2 / 3)) * 3
        whole = pair.matrix()
        is_kept = torch.isclose(left, 2 * whole, rtol=1e-3, atol=1e-4)
        is_dropped = left.abs() < 1e-4
        assert bool((is_kept | is_dropped).all())
        assert 0 < int(is_kept.sum()) < whole.numel()


def test_the_parts_of_ties_and_dare_by_hand():
    one = torch.tensor([[4.0, -1.0], [2.0, 0.0]])
    other = torch.tensor([[-1.0, -3.0], [2.0, 5.0]])
    assert trim(one, 0.5).tolist() == [[4, 0], [2, 0]]
    assert elected_mean([(0.5, one), (0.5, other)]).tolist() == [[4, -2], [2, 5]]
    # With three quarters of the weight: 3 * 4 - 1 > 0; (3 * -1 - 3) / 4; a zero has no say.
    assert elected_mean([(0.75, one), (0.25, other)]).tolist() == [[4, -1.5], [2, 5]]
    assert elected_mean([(0.1, one), (0.9, other)]).tolist()[0] == [-1, pytest.approx(-2.8)]
    left = drop(torch.ones(100, 100), 0.25, 3)
    assert set(left.unique().tolist()) == {0.0, 4.0}
    assert float(left.mean()) == pytest.approx(1.0, abs=0.1)


def test_what_cannot_be_merged_is_named():
    adapter = random_adapter(1)
    other = {"q": Pair(torch.ones(1, 5), torch.ones(7, 1), 1.0)}
    for merge in ("history_mean", "opcm", "ties", "dare"):
        rule = PoolRule(HUGE, merge=merge, rank=3)
        with pytest.raises(MergeError, match=r"^q: the slot has shape \(7, 12\).* \(7, 5\)"):
            merge_modules(adapter, other, rule, SlotState())
        bad = random_adapter(2)
        bad["v"].b[1, 0] = math.nan
        with pytest.raises(MergeError, match=r"^v.*nan at index \(1, 0\)"):
            merge_modules(adapter, bad, rule, SlotState())


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=1),
    st.integers(0, 2000),
    st.none() | st.integers(1, 20),
)
def test_the_fitting_rank_is_the_largest_that_fits(held, incoming, nbytes, rank):
    shapes = {"a": (5, 8), "b": (20, 30), "c": (3, 40)}
    sides = [
        {name: (own, *shapes[name]) for name, own in side.items()} for side in (held, incoming)
    ]

    def taken(cap: int) -> int:
        names = {*held, *incoming}
        ranks = {name: held.get(name, 0) + incoming.get(name, 0) for name in names}
        return sum(4 * min(cap, ranks[n], *shapes[n]) * sum(shapes[n]) for n in names)

    got = fitting_rank(*sides, nbytes=nbytes, itemsize=4, rank=rank)
    fitting = [cap for cap in range(1, (rank or 18) + 1) if taken(cap) <= nbytes]
    if not fitting:
        assert got is None
    else:
        assert got is not None
        assert taken(got) == taken(fitting[-1])
        assert got <= (rank or 18)


def test_orders_of_opcm_differ_and_those_of_the_mean_do_not():
    adapters = [random_adapter(seed) for seed in (1, 2, 3)]
    for merge, is_same in (("history_mean", True), ("opcm", False)):
        slots = [
            through(list(order), PoolRule(HUGE, merge=merge))[0]
            for order in itertools.permutations(adapters)
        ]
        same = [
            torch.allclose(slots[0]["q"].matrix(), slot["q"].matrix(), atol=1e-5)
            for slot in slots[1:]
        ]
        assert all(same) is is_same
