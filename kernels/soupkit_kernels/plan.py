"""What the variants of a batch ask of every layer: made once a step, used by all of them.

The Triton kernel takes tokens in groups: at most `block_m` tokens, of at most `variants_per_group`
variants, neighbours when the tokens are sorted by variant. The weights of a tile meet a whole group
at once, so fewer groups read less. Tokens that a variant (or the base) has many of go another way:
its effective weight, and a plain matrix product (`Long`).

With the variants on the host everything here is exact and goes to the GPU in one copy. With the
variants on the GPU nothing is asked of it: shapes follow from the number of tokens and slots alone,
so the plan itself can be captured in a CUDA graph; groups that are not needed are empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels import configs

# Counters of split sums; a launch that splits has no more tiles than this.
MAX_LOCKS = 1024
# A variant that no arena has a slot for, on a GPU; 7 times it fits an int32.
OUT_OF_RANGE = 1 << 28
# From so many tokens of one variant on, writing its effective weight and a cuBLAS product are
# cheaper than two products of signs and weights in one kernel (a model, kernels/README.md).
LONG_TOKENS = 384
# Of the base there is nothing to write.
LONG_BASE_TOKENS = 65


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Tokens in groups, for the Triton kernel; int32 on its device. G groups.

    Args:
        order: [n] rows of x, sorted by variant, the base first; tokens of one variant keep theirs.
        variants: [n] the variant of each of them; -1 is the base; OUT_OF_RANGE.
        starts: [G + 1]: group g is order[starts[g] : starts[g + 1]]; it may be empty.
        members: [G, variants_per_group]: the variants in a group, ascending; -1 where none is.
        locks: [MAX_LOCKS] zeros, and zeros again after every launch. Launches that may run at once
            need plans of their own.
        block_m: most tokens of a group.
    """

    order: Tensor
    variants: Tensor
    starts: Tensor
    members: Tensor
    locks: Tensor
    block_m: int

    @property
    def num_groups(self) -> int:
        return self.members.shape[0]

    @property
    def variants_per_group(self) -> int:
        return self.members.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Long:
    """Many tokens of one variant. rows: of x, int64 on its device; None: all of them."""

    variant: int
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A step's variants, ready for every layer.

    Args:
        index: [T] the variant of each token, on the device of the layers; int32 with groups, else
            int64.
        counts: tokens of each variant, where the host knows them.
        slots, planes: of the arenas it is good for: these slots, and no more planes.
        groups: the tokens of the Triton kernel; None where it has none, or is not there.
        long: the other tokens, where there are groups or could be.
    """

    index: Tensor
    counts: Mapping[int, int] | None
    slots: int
    planes: int
    groups: Groups | None
    long: tuple[Long, ...]

    @property
    def num_tokens(self) -> int:
        return self.index.numel()

    def tokens_by_variant(self) -> Mapping[int, int]:
        """`counts`, asked of the device where the host does not know them.

        Raises:
            ValueError: a variant is out of range.
        """
        return _count(self.index, self.slots) if self.counts is None else self.counts


def plan_of(
    variant_index: Tensor,
    *,
    slots: int,
    planes: int = 1,
    device: torch.device | str | None = None,
    is_lane: bool | None = None,
) -> Plan:
    """The plan of a step.

    Args:
        variant_index: int64 or int32, any shape: the slot of each token; -1 is the base. On the
            host if it is known there: that gives the better plan.
        slots, planes: of the arenas, the most planes of any layer.
        device: of the layers; the variants' own by default.
        is_lane: as the arenas; None: on a GPU only.
    Raises:
        ValueError: on the host, a variant out of range. On a GPU such a token gets NaN.
    """
    if variant_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"variant_index {variant_index.dtype}: needs int32 or int64")
    device = variant_index.device if device is None else torch.device(device)
    is_lane = device.type == "cuda" if is_lane is None else is_lane
    flat = variant_index.reshape(-1)
    counts = _count(flat, slots) if flat.is_cpu else None
    if not is_lane:
        return Plan(flat.long().to(device), counts, slots, planes, None, ())
    if counts is None:
        return device_plan(flat, slots=slots, planes=planes, device=device)
    return _host_plan(flat, counts, slots=slots, planes=planes, device=device)


def device_plan(flat: Tensor, *, slots: int, planes: int, device: torch.device) -> Plan:
    """The plan of variants [T] that the host does not look at; no operation waits for them."""
    flat = torch.where((flat < -1) | (flat >= slots), OUT_OF_RANGE, flat).to(device)
    # One more: all that is out of range is one variant. Not `slots`: a larger arena has that one.
    groups = groups_of(flat, num_variants=min(flat.numel(), slots + 1), planes=planes)
    return Plan(flat.int(), None, slots, planes, groups, ())


def _host_plan(
    flat: Tensor, counts: Mapping[int, int], *, slots: int, planes: int, device: torch.device
) -> Plan:
    """The plan of variants [T] on the host."""
    long = [v for v, n in counts.items() if n >= (LONG_BASE_TOKENS if v < 0 else LONG_TOKENS)]
    if counts.keys() == {-1}:
        long = [-1]
    groups = None
    if len(long) < len(counts):
        in_groups = torch.ones_like(flat, dtype=torch.bool)
        for variant in long:
            in_groups &= flat != variant
        rows = in_groups.nonzero().squeeze(1)
        num_variants = len(counts.keys() - {-1} - set(long))
        groups = groups_of(flat[rows], num_variants=num_variants, planes=planes)
        groups = _moved(groups, rows, device)
    is_whole = groups is None and len(long) == 1
    runs = tuple(
        Long(v, None if is_whole else (flat == v).nonzero().squeeze(1).to(device)) for v in long
    )
    return Plan(flat.int().to(device), counts, slots, planes, groups, runs)


def groups_of(index: Tensor, *, num_variants: int, planes: int) -> Groups:
    """Tokens in groups, on their device, by operations of fixed shapes.

    Args:
        index: [n] integers, the variant of each token, -1 the base.
        num_variants: an upper bound of the distinct ones beside the base.
        planes: the most planes of any layer.
    """
    count, device = index.numel(), index.device
    block_m, width = configs.shape(count, num_variants, planes)
    num_groups = configs.most_groups(count, num_variants, block_m, width) if count else 0
    variants, order = torch.sort(index, stable=True)
    at = torch.arange(count, device=device)
    before = torch.cat((variants.new_full((min(count, 1),), -1), variants[:-1]))
    rank = ((variants != before) & (variants >= 0)).cumsum(0).sub(1).clamp(min=0)
    block = rank // width
    is_block_start = torch.ones_like(block, dtype=torch.bool)
    is_block_start[1:] = block[1:] != block[:-1]
    block_start = torch.where(is_block_start, at, 0).cummax(0).values if count else at
    group = (is_block_start | ((at - block_start) % block_m == 0)).cumsum(0).sub(1)
    starts = torch.searchsorted(group, torch.arange(num_groups + 1, device=device))
    members = torch.full((num_groups * width + 1,), -1, dtype=torch.int64, device=device)
    # The base is no member: it writes to the entry past the end.
    place = torch.where(variants >= 0, group * width + rank % width, num_groups * width)
    members.scatter_(0, place, variants.long())
    return Groups(
        order=order.int(),
        variants=variants.int(),
        starts=starts.int(),
        members=members[:-1].view(num_groups, width).int(),
        locks=torch.zeros(MAX_LOCKS, dtype=torch.int32, device=device),
        block_m=block_m,
    )


def _moved(groups: Groups, rows: Tensor, device: torch.device) -> Groups:
    """Groups of these rows of x, on the device by one copy."""
    order = rows[groups.order.long()].int()
    parts = (order, groups.variants, groups.starts, groups.members.reshape(-1), groups.locks)
    # Each from a multiple of 16 bytes on: Triton compiles anew for another alignment.
    padded = [F.pad(part, (0, -part.numel() % 4)) for part in parts]
    sizes = [part.numel() for part in padded]
    moved = torch.split(torch.cat(padded).to(device, non_blocking=True), sizes)
    order, variants, starts, members, locks = (
        there[: part.numel()] for there, part in zip(moved, parts, strict=True)
    )
    return Groups(order, variants, starts, members.view_as(groups.members), locks, groups.block_m)


def _count(flat: Tensor, slots: int) -> dict[int, int]:
    counts = Counter(flat.tolist())
    if counts and not -1 <= min(counts) <= max(counts) < slots:
        raise ValueError(
            f"variant_index from {min(counts)} to {max(counts)}: must be in -1..{slots - 1}"
        )
    return dict(sorted(counts.items()))
