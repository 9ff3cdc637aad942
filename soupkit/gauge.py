"""The gauge of a factored delta: which of the many pairs (b, a) with one product b a is written.

    (b, a) and (b G, G^-1 a) have one product; an optimizer's moments belong to one gauge only

The pair that is nearest to a given one, its own, is chosen among three: a moved only as far as its
row space must be, b corrected to fit; the same with the roles swapped; and the balanced pair (U
sqrt(S), sqrt(S) V^T), turned and scaled towards the own one (orthogonal Procrustes and a scalar).
What the product leaves free stays as it is in the own pair, so that no direction dies with zeros on
both sides. Takes small float64 matrices on the CPU. Not here: which product, and its rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# Alternations between the turn and the scale of the balanced pair; the cost falls with each.
_ROUNDS = 8
# Relative error of the product above which a pair is dismissed as ill-conditioned, and the share of
# the largest singular value that counts as zero: both far below float32's rounding.
_TOLERANCE = 1e-9


def nearest_factors(
    left: Tensor, values: Tensor, right: Tensor, *, own_b: Tensor, own_a: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors of left diag(values) right^T in the gauge nearest to (own_b, own_a).

    Args:
        left, right: orthonormal columns, [m, q] and [n, q]. values: [q], positive, q <= r.
        own_b, own_a: [m, r] and [r, n]; need not have a similar product.
    Returns:
        (b [m, r], a [r, n]), float64.
    """
    product = (left * values) @ right.T
    a_kept = _keep_rows(product, right, own_b, own_a)
    b_kept = _keep_rows(product.T, left, own_a.T, own_b.T)
    found = [a_kept, (b_kept[1].T, b_kept[0].T)]
    limit = _TOLERANCE * float(torch.linalg.vector_norm(values))
    found = [(b, a) for b, a in found if float(torch.linalg.matrix_norm(b @ a - product)) <= limit]
    found.append(_balanced(left, values, right, own_b, own_a))
    return min(
        found,
        key=lambda pair: float((pair[0] - own_b).square().sum() + (pair[1] - own_a).square().sum()),
    )


def _keep_rows(
    product: Tensor, right: Tensor, own_b: Tensor, own_a: Tensor
) -> tuple[Tensor, Tensor]:
    """own_a projected on a row space that holds the product's, and the b nearest to own_b."""
    rest = own_a - (own_a @ right) @ right.T
    _, sizes, rows = torch.linalg.svd(rest, full_matrices=False)
    room = own_a.shape[0] - right.shape[1]
    solid = int((sizes > _TOLERANCE * torch.linalg.matrix_norm(own_a)).sum())
    basis = torch.cat([right, rows[: min(room, solid)].T], dim=1)
    a = (own_a @ basis) @ basis.T
    return own_b + (product - own_b @ a) @ torch.linalg.pinv(a), a


def _balanced(
    left: Tensor, values: Tensor, right: Tensor, own_b: Tensor, own_a: Tensor
) -> tuple[Tensor, Tensor]:
    """(c U sqrt(S) Q, Q^T sqrt(S) V^T / c), Q [q, r] and c nearest to the own pair."""
    root = values.sqrt()
    b, a = left * root, root.unsqueeze(1) * right.T
    towards_b, towards_a = b.T @ own_b, a @ own_a.T
    total, scale = float(values.sum()), 1.0
    turn = torch.eye(*towards_b.shape, dtype=b.dtype)
    for _ in range(_ROUNDS):
        u, _, v = torch.linalg.svd(scale * towards_b + towards_a / scale, full_matrices=False)
        turn = u @ v
        scale = _scale(total, float((turn * towards_b).sum()), float((turn * towards_a).sum()))
    b, a = scale * b @ turn, turn.T @ a / scale
    free = torch.eye(turn.shape[1], dtype=b.dtype) - turn.T @ turn
    free_b, free_a = own_b @ free, free @ own_a
    # One side only: their product is not part of the result.
    if float(free_a.square().sum()) >= float(free_b.square().sum()):
        return b, a + free_a
    return b + free_b, a


def _scale(total: float, along_b: float, along_a: float) -> float:
    """The c > 0 that minimises c^2 t + t / c^2 - 2 c x - 2 y / c."""

    def cost(c: float) -> float:
        return c * c * total + total / (c * c) - 2 * c * along_b - 2 * along_a / c

    size = max(total, abs(along_b), abs(along_a))
    if size == 0.0 or not math.isfinite(size):
        return 1.0
    roots = np.roots(np.array([total, -along_b, 0.0, along_a, -total]) / size)
    return min([1.0, *(float(root.real) for root in roots if root.real > 0)], key=cost)
