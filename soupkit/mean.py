"""The plain mean of checkpoints, block by block in memory that is used again.

    W = W_base + sum_i w_i (W_i - W_base)    in float32 (float64 where an input has it)

A block's copies stay in the cache of a core, and each entry of a checkpoint is read once: norms and
the product of the first two deltas are taken on the way. It is merge.py's "mean", which makes whole
deltas; no files here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.numeric import check_finite, inner_product

# Entries of a block, four copies of 1 MB. CPU time of a mean of two, ns an entry (one thread of a
# 2-core AMD EPYC with 1 MB of L2 a core): 1.87 at 2^16, 1.45 at 2^18, 2.2 at 2^22.
BLOCK_ENTRIES = 2**18
# Below this the squares of single entries may have been lost to float32's range.
_LEAST_SQUARE = 1e-25


@dataclass(frozen=True, slots=True)
class Sums:
    """What a report needs to know of some entries: ||delta_i||^2, <delta_0, delta_1> (0.0 of one
    delta), ||merged||^2.
    """

    squares: tuple[float, ...]
    product: float
    merged: float


def joined(parts: Sequence[Sums]) -> Sums:
    """The sums of all parts of a parameter; at least one."""
    return Sums(
        tuple(math.fsum(column) for column in zip(*(one.squares for one in parts), strict=True)),
        math.fsum(one.product for one in parts),
        math.fsum(one.merged for one in parts),
    )


def mean_blocks(
    name: str,
    theirs: Tensor | None,
    ours: Sequence[Tensor],
    weights: Sequence[float],
    *,
    whole: Sequence[int],
    start: int = 0,
) -> Iterator[tuple[Tensor, Sums]]:
    """The mean of some entries of a parameter, in consecutive blocks.

    Args:
        theirs: the base's entries [n], floating; None: the base has none, and the mean is that of
            the checkpoints' own.
        ours: each checkpoint's [n], at least one. weights: one each, of sum 1.
        whole, start: shape of the parameter, and how many of its entries come before these.
    Yields:
        The mean of the next block, float32 (float64 if an input is): valid until the next one is
        asked for, and may be changed. Its sums, of no meaning without `theirs`.
    Raises:
        MergeError: an entry of a delta or of the mean is not finite.
    """
    dtypes = {one.dtype for one in (*ours, *(() if theirs is None else (theirs,)))}
    block = _Block(torch.float64 if torch.float64 in dtypes else torch.float32, name, whole)
    for at in range(0, len(ours[0]), BLOCK_ENTRIES):
        entries = slice(at, at + BLOCK_ENTRIES)
        base = None if theirs is None else theirs[entries]
        yield block.mean(base, [one[entries] for one in ours], weights, start + at)


class _Block:
    """Memory for a block, and the mean in it."""

    def __init__(self, wide: torch.dtype, name: str, whole: Sequence[int]) -> None:
        size = min(BLOCK_ENTRIES, math.prod(whole))
        self._base = torch.empty(size, dtype=wide)
        self._wide = torch.empty(size, dtype=wide) if wide == torch.float64 else None
        self._total, self._delta, self._spare = (
            torch.empty(size, dtype=torch.float32) for _ in range(3)
        )
        self._name, self._whole = name, whole

    def mean(
        self, theirs: Tensor | None, ours: Sequence[Tensor], weights: Sequence[float], start: int
    ) -> tuple[Tensor, Sums]:
        """See mean_blocks."""
        size = len(ours[0])
        base, total, delta = (one[:size] for one in (self._base, self._total, self._delta))
        base.zero_() if theirs is None else base.copy_(theirs)
        squares = [self._subtract(ours[0], base, total, start)]
        product = 0.0
        for index, (one, weight) in enumerate(zip(ours[1:], weights[1:], strict=True)):
            squares.append(self._subtract(one, base, delta, start))
            if index == 0:
                product = self._product(total, delta, size=math.sqrt(math.prod(squares)))
                total.mul_(weights[0])
            total.add_(delta, alpha=weight)
        if len(ours) == 1:
            total.mul_(weights[0])
        merged = self._product(total, total)
        self._check(total, merged, start)
        return base.add_(total), Sums(tuple(squares), product, merged)

    def _subtract(self, one: Tensor, base: Tensor, out: Tensor, start: int) -> float:
        """out = one - base; returns ||out||^2."""
        wide = out if self._wide is None else self._wide[: len(out)]
        wide.copy_(one).sub_(base)
        if wide is not out:
            out.copy_(wide)
        square = self._product(out, out)
        self._check(out, square, start)
        return square

    def _product(self, a: Tensor, b: Tensor, *, size: float | None = None) -> float:
        """<a, b>; `size` is ||a|| ||b||, None: the product itself.

        torch sums float32 in pairs of pairs, right to 2e-7 of `size`, unless that is out of range.
        """
        product = float(torch.mul(a, b, out=self._spare[: len(a)]).sum())
        if not math.isfinite(product) or (product if size is None else size) < _LEAST_SQUARE:
            # Frozen layers have deltas of zeros.
            return inner_product(a, b) if bool(a.any()) and bool(b.any()) else 0.0
        return product

    def _check(self, entries: Tensor, square: float, start: int) -> None:
        if not math.isfinite(square):
            check_finite(self._name, entries, whole=self._whole, start=start)
