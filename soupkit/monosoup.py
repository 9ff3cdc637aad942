"""MonoSoup: one delta, its spectral head and tail reweighted (arXiv 2602.09689).

    f(d) = lambda_high T_k(d) + lambda_low (d - T_k(d)),   lambda_high = 1 - lambda_low
    lambda_low = rho + (1 - rho) cos,   rho = (sigma_{k+1} / sigma_1)^2,   cos = sqrt(1 - P_k)

P_k is the share of sum sigma^2 in the first k. k is the effective rank rounded up, or the least
rank that keeps the share `energy` of the squares (the paper's variance variant, R). Nothing is
truncated. Several checkpoints are averaged before the edit. Not here: the average, and what happens
to vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.config import check_truncation
from soupkit.numeric import full_precision
from soupkit.svd import effective_rank, spectrum


@dataclass(frozen=True, slots=True, eq=False)
class Edited:
    """An edited delta, float32 [out, in]; k, P_k, the energy before the edit, the solver."""

    matrix: Tensor
    rank: int
    kept_energy: float
    total_energy: float
    solver: str


def monosoup_coefficients(
    singular_values: Tensor, *, energy: float | None = None
) -> tuple[int, float, float, float, float, float]:
    """MonoSoup's numbers from all singular values of a delta.

    Args:
        singular_values: [p], >= 0, any order, p >= 1. Values below p float32 roundings of the
            largest count as 0, because they are the rounding of the matrix they come from.
        energy: None: k is the effective rank rounded up; else the least k with this share of the
            squares.
    Returns:
        (k, lambda_high, lambda_low, P_k, rho, cos); for all zeros (1, 1, 0, 1, 0, 0).
    Raises:
        ValueError: no value, or one that is negative or not finite.
    """
    if singular_values.numel() == 0:
        raise ValueError(
            "no singular values: an empty matrix has no MonoSoup edit; treat it as a vector"
        )
    check_truncation(None, energy)
    values = singular_values.double().sort(descending=True).values
    noise = values.numel() * torch.finfo(torch.float32).eps * values[0]
    values = torch.where(values > noise, values, torch.zeros_like(values))
    rank = effective_rank(values)
    if rank == 0.0:
        return 1, 1.0, 0.0, 1.0, 0.0, 0.0
    squares = (values / values[0]).square()
    total = float(squares.sum())
    # A flat spectrum has a whole effective rank up to rounding, which must not round up.
    k = math.ceil(rank - 1e-6)
    if energy is not None:
        k = int((squares.cumsum(0) < energy * total * (1 - 1e-12)).sum()) + 1
    k = min(max(k, 1), values.numel())
    tail = float(squares[k:].sum()) / total
    rho = float(squares[k]) if k < values.numel() else 0.0
    cos = math.sqrt(tail)
    low = min(max(rho + (1 - rho) * cos, 0.0), 1.0)
    return k, 1.0 - low, low, 1.0 - tail, rho, cos


def edit(delta: Tensor, *, energy: float | None = None) -> Edited:
    """f(delta) of the module's equation; a fresh tensor of delta's shape and dtype.

    Args:
        delta: float32 [out, in], finite, not empty.
        energy: see `monosoup_coefficients`.
    Raises:
        ValueError: no matrix, or energy out of (0, 1]. MergeError: an entry is not finite.
    """
    parts = spectrum(delta)
    k, high, low, kept, _, _ = monosoup_coefficients(parts.singular_values, energy=energy)
    # The smaller of the two projections is computed, the other part is what it leaves.
    tail_is_smaller = 2 * k > parts.vectors.shape[1]
    vectors = parts.vectors[:, k:] if tail_is_smaller else parts.vectors[:, :k]
    vectors = vectors.to(delta.dtype)
    with full_precision(delta):
        if delta.shape[0] >= delta.shape[1]:
            part = (delta @ vectors) @ vectors.T
        else:
            part = vectors @ (vectors.T @ delta)
        scale, extra = (high, low - high) if tail_is_smaller else (low, high - low)
        matrix = (delta * scale).add_(part, alpha=extra)
    total = float(parts.singular_values.square().sum())
    return Edited(matrix, k, kept, total, parts.solver)
