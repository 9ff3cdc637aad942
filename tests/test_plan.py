"""The plan of a step: every token once, groups within their limits, the same on host and device."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soupkit_kernels import configs, plan_of
from soupkit_kernels.plan import (
    LONG_BASE_TOKENS,
    LONG_TOKENS,
    MAX_LOCKS,
    Groups,
    Plan,
    groups_of,
)

SLOTS = 9
indices = st.lists(st.integers(-1, SLOTS - 1), max_size=200)
# Runs of one variant, some of them long enough for a path of their own.
runs = st.lists(
    st.tuples(st.integers(-1, 3), st.sampled_from([1, 2, 63, 70, 130, LONG_TOKENS])), max_size=6
)


def check_groups(groups: Groups, index: Tensor, rows: list[int]) -> None:
    """Every row of `rows` once, sorted by variant and stable; starts and members say the truth."""
    order, variants = groups.order.tolist(), groups.variants.tolist()
    assert order == sorted(rows, key=lambda row: (int(index[row]), row))
    assert variants == [int(index[row]) for row in order]
    starts, members = groups.starts.tolist(), groups.members.tolist()
    assert len(starts) == groups.num_groups + 1
    assert len(members) == groups.num_groups
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, len(order))
    for (first, last), there in zip(pairwise(starts), members, strict=True):
        assert last - first <= groups.block_m
        assert len(there) == groups.variants_per_group
        named = [v for v in there if v != -1]
        assert named == sorted({v for v in variants[first:last] if v >= 0})
    for part in (groups.order, groups.variants, groups.starts, groups.members, groups.locks):
        assert part.dtype == torch.int32
        assert part.is_contiguous()
    assert groups.locks.shape == (MAX_LOCKS,)
    assert not groups.locks.any()


def rows_of(step: Plan) -> list[int]:
    """Every row that the plan sends anywhere."""
    found = [] if step.groups is None else step.groups.order.tolist()
    for part in step.long:
        found += range(step.num_tokens) if part.rows is None else part.rows.tolist()
    return sorted(found)


@settings(deadline=None, max_examples=150)
@given(indices, st.integers(0, 4))
def test_groups_hold_every_token_once(variants: list[int], planes: int) -> None:
    index = torch.tensor(variants, dtype=torch.int64)
    step = plan_of(index, slots=SLOTS, planes=planes, is_lane=True)
    assert step.counts == {v: variants.count(v) for v in sorted(set(variants))}
    assert rows_of(step) == list(range(len(variants)))
    if step.groups is not None:
        check_groups(step.groups, index, step.groups.order.sort().values.tolist())
        terms = step.groups.variants_per_group * max(1, planes)
        assert terms <= configs.MAX_TERMS[step.groups.block_m]


@settings(deadline=None, max_examples=60)
@given(runs, st.randoms(use_true_random=False))
def test_long_runs_go_another_way(parts: list[tuple[int, int]], random: object) -> None:
    variants = [v for v, count in parts for _ in range(count)]
    random.shuffle(variants)  # type: ignore[attr-defined]
    index = torch.tensor(variants, dtype=torch.int64)
    step = plan_of(index, slots=4, is_lane=True)
    assert rows_of(step) == list(range(len(variants)))
    counts = {v: variants.count(v) for v in set(variants)}
    expected = {v for v, n in counts.items() if n >= (LONG_BASE_TOKENS if v < 0 else LONG_TOKENS)}
    if set(variants) == {-1}:
        expected = {-1}
    assert {part.variant for part in step.long} == expected
    for part in step.long:
        rows = range(len(variants)) if part.rows is None else part.rows.tolist()
        assert [variants[row] for row in rows] == [part.variant] * counts[part.variant]
        # None stands for all rows, and for nothing else.
        assert (part.rows is None) == (counts[part.variant] == len(variants))
        assert part.rows is None or part.rows.dtype == torch.int64
    if step.groups is not None:
        rest = [row for row, v in enumerate(variants) if v not in expected]
        check_groups(step.groups, index, rest)


@settings(deadline=None, max_examples=100)
@given(indices, st.integers(1, 4))
def test_on_the_device_the_groups_are_the_same_but_for_their_bound(
    variants: list[int], planes: int
) -> None:
    """What a GPU computes from shapes alone; with the host's bound it is the host's plan."""
    index = torch.tensor(variants, dtype=torch.int64)
    blind = groups_of(index, num_variants=min(index.numel(), SLOTS + 1), planes=planes)
    check_groups(blind, index, list(range(len(variants))))
    on_host = plan_of(index, slots=SLOTS, planes=planes, is_lane=True)
    if on_host.groups is None or on_host.long:
        return
    distinct = len(set(variants) - {-1})
    same = groups_of(index, num_variants=distinct, planes=planes)
    for name in ("order", "variants", "starts", "members", "locks"):
        assert torch.equal(getattr(same, name), getattr(on_host.groups, name))
    assert same.block_m == on_host.groups.block_m


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 150), st.integers(1, 4), st.integers(0, 2**31))
def test_shapes_on_the_device_follow_from_the_number_of_tokens(
    count: int, planes: int, seed: int
) -> None:
    """So that a captured graph serves every batch of that size."""
    generator = torch.Generator().manual_seed(seed)
    bound = min(count, SLOTS + 1)
    made = [
        groups_of(
            torch.randint(-1, high, (count,), generator=generator),
            num_variants=bound,
            planes=planes,
        )
        for high in (0, 1, SLOTS)
    ]
    assert len({(g.members.shape, g.starts.shape, g.block_m) for g in made}) == 1


def test_int32_any_shape_and_no_tokens() -> None:
    index = torch.tensor([[0, 2], [-1, 1]])
    for is_lane in (False, True):
        wide = plan_of(index, slots=3, is_lane=is_lane)
        narrow = plan_of(index.int(), slots=3, is_lane=is_lane)
        assert wide.num_tokens == 4
        assert torch.equal(wide.index, narrow.index)
        assert wide.index.tolist() == [0, 2, -1, 1]
        assert wide.index.dtype == (torch.int32 if is_lane else torch.int64)
        assert plan_of(index[:0], slots=3, is_lane=is_lane).num_tokens == 0
    assert plan_of(index, slots=3).groups is None
    assert plan_of(index, slots=3).tokens_by_variant() == {-1: 1, 0: 1, 1: 1, 2: 1}


def test_what_cannot_be_is_refused() -> None:
    index = torch.tensor([0, 2, -1])
    for bad, message in ((index + 1, "from 0 to 3"), (index - 1, "from -2 to 1")):
        with pytest.raises(ValueError, match=rf"{message}: must be in -1\.\.2"):
            plan_of(bad, slots=3)
    with pytest.raises(ValueError, match=r"torch\.float32: needs int32 or int64"):
        plan_of(index.float(), slots=3)
    with pytest.raises(ValueError, match="planes=5: the GPU kernel takes at most 4"):
        plan_of(index, slots=3, planes=5, is_lane=True)
