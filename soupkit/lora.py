"""A delta as a product of two thin factors, the form of a LoRA adapter.

    delta ~ b @ a,   b [out, r] = U_r sqrt(S_r),   a [r, in] = sqrt(S_r) V_r^T

sqrt(S) on both sides keeps the factors in one range, as PEFT's adapters have after training. Not
here: adapter folders, lora_alpha (a factor of 1 is meant), and which modules an adapter may hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.config import check_count, check_share
from soupkit.numeric import full_precision, squared_norm
from soupkit.svd import TruncatedSVD, singular_values, truncated_svd


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """delta ~ b @ a; a float32 [r, in], b float32 [out, r]."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """Number of columns of b; 0 for a zero delta."""
        return self.a.shape[0]

    def matrix(self) -> Tensor:
        """b @ a, float32 [out, in]."""
        with full_precision(self.a):
            return self.b @ self.a


def rounding_tolerance(shape: tuple[int, ...]) -> float:
    """The relative singular value below which a float32 matrix holds only rounding."""
    return max(shape) * torch.finfo(torch.float32).eps


def numerical_rank(delta: Tensor, *, tolerance: float | None = None) -> int:
    """Singular values of [out, in] above `tolerance` times the largest; None: float32 rounding."""
    values = singular_values(delta)
    if values.numel() == 0 or float(values[0]) == 0.0:
        return 0
    limit = rounding_tolerance(tuple(delta.shape)) if tolerance is None else tolerance
    return int((values > limit * values[0]).sum())


def balanced(cut: TruncatedSVD) -> Factors:
    """The truncation as factors, sqrt(S) on both sides; a singular value of 0 gives zeros."""
    root = cut.singular_values.sqrt().to(cut.left.dtype)
    # Its column of left is zero; dividing by 1 keeps it so.
    inverse = torch.where(root > 0, root, torch.ones_like(root)).reciprocal()
    return Factors(a=cut.right * root.unsqueeze(1), b=cut.left * inverse)


def factor(
    delta: Tensor, *, rank: int | None = None, tolerance: float | None = None, seed: int = 0
) -> tuple[Factors, float]:
    """Factor a delta.

    Args:
        delta: [out, in], floating, finite.
        rank: to cut to; None: the numerical rank, so that only rounding is lost.
        tolerance: relative singular value that counts as zero, in (0, 1); None: float32 rounding.
        seed: of the sketch where one is used.
    Returns:
        The factors, of rank at most the numerical rank where `rank` is None, and the lost energy
        ||delta - b a||^2 / ||delta||^2 (0.0 for a zero delta).
    Raises:
        ValueError: wrong dtype or shape, or an option out of range. MergeError: an entry is not
            finite.
    """
    if rank is not None:
        check_count("rank", rank, least=1)
    if tolerance is not None:
        check_share("tolerance", tolerance, one_allowed=False)
    kept = numerical_rank(delta, tolerance=tolerance) if rank is None else rank
    factors = balanced(truncated_svd(delta, rank=kept, seed=seed))
    total = squared_norm(delta)
    lost = squared_norm(delta.float() - factors.matrix()) / total if total else 0.0
    return factors, lost
