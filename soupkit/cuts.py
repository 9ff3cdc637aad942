"""Truncations that outlive the merge that made them: kept, checked against a delta, and summed.

    sum_i w_i L_i R_i = [w_1 L_1 ..] [R_1; ..] = M Q^T,   [R_1; ..]^T = Q X,  M = [w_1 L_1 ..] X^T
    T_r of it = (M V_r) (Q V_r)^T,   V the eigenvectors of the small M^T M

Exact but for rounding, at the cost of the factors. Not here: merging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soupkit.numeric import full_precision, inner_product, squared_norm
from soupkit.solvers import WARM_ALWAYS_FROM
from soupkit.svd import TruncatedSVD, truncated_svd

# The truncations of one parameter, one a matrix: experts have several.
Cuts = tuple[TruncatedSVD, ...]
# Cosine of two deltas above which the second is cut from the vectors of the first.
_ALIKE = 0.99
# Singular values that a report shows.
_POINTS = 64


def cut_of_sum(cuts: Sequence[TruncatedSVD], weights: Sequence[float], rank: int) -> TruncatedSVD:
    """T_rank of sum_i w_i left_i @ right_i, from QR of the factors; never a dense matrix.

    Args:
        cuts: at least one, of one shape [m, n]. weights: one a cut, any finite numbers.
        rank: >= 0; clamped to what the factors span.
    Returns:
        A cut whose total_energy is that of the sum.
    """
    lefts = torch.cat([cut.left * weight for cut, weight in zip(cuts, weights, strict=True)], dim=1)
    rights = torch.cat([cut.right for cut in cuts])
    with full_precision(lefts):
        basis, rest = torch.linalg.qr(rights.T)
        image = lefts @ rest.T
        wide = image.double()
        squares, turn = torch.linalg.eigh(wide.T @ wide)
        turn = turn.flip(1)[:, :rank].float()
        left, right = image @ turn, (basis @ turn).T
        values = torch.linalg.vector_norm(left, dim=0, dtype=torch.float64)
    return TruncatedSVD(
        left=left,
        right=right.contiguous(),
        singular_values=values.sort(descending=True).values,
        total_energy=float(squares.clamp(min=0).sum()),
        solver="core",
    )


def cuts_of_sum(
    cuts: Sequence[Cuts | None], weights: Sequence[float], rank: int | None
) -> Cuts | None:
    """The same for each matrix of one parameter.

    Args:
        cuts: of each delta. rank: None: not known before the next delta's spectrum is.
    Returns:
        None without a rank, or where a delta has no cuts.
    """
    present = [of_delta for of_delta in cuts if of_delta is not None]
    if rank is None or len(present) < len(cuts):
        return None
    return tuple(cut_of_sum(of_matrix, weights, rank) for of_matrix in zip(*present, strict=True))


def fitting(
    known: Sequence[Cuts | None], batches: Sequence[Tensor], rank: int | None
) -> list[Cuts | None]:
    """For each batch of matrices [count, m, n] its known cuts, on its device.

    Args:
        known: at most one a batch. rank: that a cut must have; None: none fits.
    Returns:
        One entry a batch; None where nothing is known, or of another number, shape or rank.
    """
    found: list[Cuts | None] = [None] * len(batches)
    for index, (cuts, batch) in enumerate(zip(known, batches, strict=False)):
        count, rows, columns = batch.shape
        wanted = (rows, columns, rank)
        if cuts is not None and [_form(cut) for cut in cuts] == [wanted] * count:
            found[index] = tuple(cut.to(batch.device) for cut in cuts)
    return found


def _form(cut: TruncatedSVD) -> tuple[int, int, int]:
    return cut.left.shape[0], cut.right.shape[1], cut.rank


def picked(values: Tensor) -> tuple[float, ...]:
    """The values [p], or 64 of them, evenly, with the first and the last."""
    if values.numel() > _POINTS:
        places = torch.linspace(0, values.numel() - 1, _POINTS, dtype=torch.float64)
        values = values[places.round().long().to(values.device)]
    return tuple(values.tolist())


def cuts_of(
    matrices: Sequence[Tensor],
    known: Sequence[TruncatedSVD | None],
    *,
    rank: int | None,
    energy: float | None,
    seed: int,
) -> Cuts:
    """T_r of each matrix: the known one, or computed, from the first known or computed one where
    that pays.

    Args:
        known: one a matrix, None where it is to be computed. rank, energy, seed: see truncated_svd.
    """
    first = next((index for index, cut in enumerate(known) if cut is not None), 0)
    guide = known[first]
    found: list[TruncatedSVD] = []
    for matrix, cut in zip(matrices, known, strict=True):
        if cut is not None:
            found.append(replace(cut, solver="known"))
            continue
        nearby = guide or (found[0] if found else None)
        # A long short side gains from a start that is far off, too; elsewhere such a one costs a
        # fifth more than none (`soupkit bench merge`; merge points of real runs are 30-50 % apart).
        pays = nearby is not None and (
            (guide is not None and min(matrix.shape) >= WARM_ALWAYS_FROM)
            or _are_alike(matrices[first], matrix)
        )
        start = nearby.short_side if nearby is not None and pays and rank else None
        found.append(truncated_svd(matrix, rank=rank, energy=energy, seed=seed, start=start))
    return tuple(found)


def _are_alike(first: Tensor, other: Tensor) -> bool:
    """Whether the vectors of one are a start for the other; about 10 % apart, it pays."""
    scale = math.sqrt(squared_norm(first) * squared_norm(other))
    return inner_product(first, other) >= _ALIKE * scale
