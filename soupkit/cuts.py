"""Truncations that outlive the merge that made them: kept, checked against a delta, and summed.

    sum_i w_i L_i R_i = [w_1 L_1 ..] [R_1; ..] = M Q^T,   [R_1; ..]^T = Q X,  M = [w_1 L_1 ..] X^T
    T_r of it = (M V_r) (Q V_r)^T,   V the eigenvectors of the small M^T M

Exact but for rounding, at the cost of the factors. Not here: merging.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soupkit.numeric import full_precision
from soupkit.svd import TruncatedSVD

# The truncations of one parameter, one a matrix: experts have several.
Cuts = tuple[TruncatedSVD, ...]
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
