"""OPCM: tasks merged one after the other, each without what would disturb the ones before.

    A_1 = tau_1,   A_t = A_{t-1} + P(tau_t; A_{t-1}),   W_t = W_base + A_t n_t / ||A_t||
    n_t = mean of ||tau_1||, ..., ||tau_t||,   norms over all parameters of the model together

With A = U S V^T of rank k, Z = U^T tau V, and r of its directions that hold the share alpha of
sum(S):  P keeps tau but for Z's diagonal and
    block       its leading r x r block     (the authors' code)
    two_sided   its leading r rows and r columns     (their paper)
arXiv 2501.09522, Algorithm 1; A is the paper's lambda_{t-1} (W_{t-1} - W_base). U and V are A's own
k directions only: where A lacks full rank the code also drops a diagonal in bases of the null space
that LAPACK may turn at will. Then <P(tau), A> = 0, P is linear and P(P(tau)) = P(tau).

Linear weights are projected, each expert by itself; vectors, embeddings and convolutions are
summed, as in the code. Not commutative. Not here: files, and which tasks are merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from soupkit.config import check_choice
from soupkit.delta import is_embedding, layout
from soupkit.errors import MergeError
from soupkit.factored import Pair, span
from soupkit.numeric import check_finite, full_precision
from soupkit.solvers import exact

Cut = Literal["block", "two_sided"]

# Matrices of up to so many entries are decomposed and projected in float64, larger ones in float32.
_WIDE_ENTRIES = 2**22


@dataclass(frozen=True, slots=True)
class OpcmRule:
    """How a task is projected.

    Args:
        alpha: share of the sum of singular values whose directions are protected, in [0, 1); or 1,
            where the authors' code protects none (but for roundings), and so does this.
        cut: "block" or "two_sided".
    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "opcm"
    alpha: float = 0.5
    cut: Cut = "block"

    def __post_init__(self) -> None:
        """Check both."""
        check_choice("cut", self.cut, get_args(Cut))
        if not (isinstance(self.alpha, float | int) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha={self.alpha!r}: must be in [0, 1]")

    def num_protected(self, values: Tensor) -> int:
        """The r of singular values [k], descending: how many leading shares of their sum are at
        most alpha.
        """
        if not values.numel() or self.alpha == 1:
            return 0
        above = values.double().cumsum(0) / values.double().sum() > self.alpha
        return int(above.to(torch.uint8).argmax()) if bool(above.any()) else values.numel()


def is_projected(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is projected; else tasks are summed there."""
    return layout(name, shape) in ("matrix", "experts") and not is_embedding(name)


def fold(name: str, held: Tensor, delta: Tensor, rule: OpcmRule) -> Tensor:
    """A_t of one parameter from A_{t-1} and tau_t; float32 (float64 of float64), fresh memory.

    Args:
        held, delta: the parameter's shape, floating, one device.
    Raises:
        MergeError: an entry is not finite, or the shapes differ.
    """
    if held.shape != delta.shape:
        raise MergeError(
            f"{name}: what is merged has shape {tuple(held.shape)}, the task {tuple(delta.shape)}: "
            "OPCM needs the same shape on both sides"
        )
    check_finite(name, held)
    check_finite(name, delta)
    wide = torch.promote_types(torch.promote_types(held.dtype, delta.dtype), torch.float32)
    held, delta = held.to(wide), delta.to(wide)
    if not is_projected(name, held.shape):
        return held + delta
    with full_precision(held):
        if held.ndim == 2:
            return held + project(delta, held, rule)
        return torch.stack(
            [one + project(task, one, rule) for one, task in zip(held, delta, strict=True)]
        )


def project(delta: Tensor, held: Tensor, rule: OpcmRule) -> Tensor:
    """P(delta; held), both [m, n] and finite, in delta's dtype; delta itself where held is 0."""
    left, values, right = _directions(held)
    kept, tall = delta.to(left.dtype), rule.num_protected(values)
    inner = left.T @ kept @ right  # Z
    removed = left[:, tall:] * inner.diagonal()[tall:] @ right[:, tall:].T
    block = left[:, :tall] @ inner[:tall, :tall] @ right[:, :tall].T
    if rule.cut == "block":
        removed += block
    else:
        over, across = left[:, :tall], right[:, :tall]
        removed += over @ (over.T @ kept) + (kept @ across) @ across.T - block
    return (kept - removed).to(delta.dtype)


def _directions(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, k], S [k], V [n, k] of its numerical rank k."""
    largest = float(matrix.abs().max()) if matrix.numel() else 0.0
    wide = matrix.dtype if matrix.numel() > _WIDE_ENTRIES else torch.float64
    if largest == 0.0:
        sides = (matrix.new_zeros(size, 0, dtype=wide) for size in matrix.shape)
        left, right = sides
        return left, matrix.new_zeros(0, dtype=torch.float64), right
    is_tall = matrix.shape[0] >= matrix.shape[1]
    tall = (matrix if is_tall else matrix.T).to(wide) / largest
    squares, vectors, _ = exact(tall)
    # Beyond that there are only the entries' roundings, whose directions mean nothing.
    limit = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    rank = int((squares.sqrt() > limit * squares[0].sqrt()).sum())
    vectors = vectors[:, :rank].to(wide)
    image = tall @ vectors
    sizes = torch.linalg.vector_norm(image, dim=0)
    unit = image / sizes
    values = sizes.double() * largest
    return (unit, values, vectors) if is_tall else (vectors, values, unit)


def fold_core(name: str, held: Pair, delta: Pair, rule: OpcmRule) -> tuple[Tensor, Tensor, Tensor]:
    """`fold` of factored deltas, no dense matrix; O((m + n) (sum of ranks)^2). A convolution, seen
    as a matrix [out, in * kernel], is projected too.

    Returns:
        (Q_b [m, p], core [p, q], Q_a [n, q]): A_t = Q_b core Q_a^T, float64, Q with orthonormal
        columns; its rank is at most the sum of both, nothing is cut.
    Raises:
        MergeError: an entry is not finite, or the shapes differ.
    """
    if held.shape != delta.shape:
        raise MergeError(
            f"{name}: what is merged has shape {held.shape}, the task {delta.shape}: OPCM needs "
            "the same shape on both sides"
        )
    for pair in (held, delta):
        check_finite(name, pair.a)
        check_finite(name, pair.b)
    with full_precision(held.a):
        basis_b, betas = span([held.b, delta.b], held.a.device)
        basis_a, alphas = span([held.a.T, delta.a.T], held.a.device)
        core, task = (
            pair.scale * beta @ alpha.T
            for pair, beta, alpha in zip((held, delta), betas, alphas, strict=True)
        )
        if is_projected(name, held.shape):
            task = project(task, core, rule)
        return basis_b, core + task, basis_a


def norm_of(energies: Sequence[float]) -> float:
    """||tau|| of a task from the squared norms of its parameters."""
    return math.sqrt(math.fsum(energies))


def rescaling(norms: Sequence[float], energy: float) -> float:
    """n_t / ||A_t||, by which A_t enters the model; 1 where it is 0.

    Args:
        norms: ||tau_s|| of every task so far. energy: ||A_t||^2 over all parameters.
    """
    mean = math.fsum(norms) / len(norms)
    return mean / math.sqrt(energy) if energy else 1.0
