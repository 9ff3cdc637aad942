"""How alike two adapters are: inner products of factored deltas, and the cosine that K-Merge picks
its slot by; never a dense matrix.

    <s1 b1 a1, s2 b2 a2> = s1 s2 tr((b2^T b1) (a1 a2^T))

O((out + in) r^2), in float64. Source: arXiv 2510.13537 (K-Merge), its similarity. Not here: which
adapters are compared, and what is merged (factored.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from soupkit.config import check_choice
from soupkit.errors import MergeError
from soupkit.factored import Pair
from soupkit.numeric import full_precision

Weighting = Literal["module", "norm"]

# Squared norms below this share of ||b||^2 ||a||^2 have lost half their digits to cancellation, and
# norms below this one of ||b|| ||a|| all of them.
_CANCELLED = 1e-8
_ROUNDING = 1e-14


def inner(first: Pair, second: Pair) -> float:
    """The inner product of two deltas of one shape; ranks, scales and dtypes may differ.

    Raises:
        MergeError: the shapes differ.
    """
    if first.shape != second.shape:
        raise MergeError(
            f"deltas of shapes {first.shape} and {second.shape} have no inner product: compare "
            "adapters of one base"
        )
    with full_precision(first.a):
        left = _wide(first.b).T @ _wide(second.b)
        right = _wide(first.a) @ _wide(second.a).T
        return first.scale * second.scale * float((left * right).sum())


def norm(pair: Pair) -> float:
    """The Frobenius norm of a delta; 0.0 where it is zero but for float64's rounding."""
    with full_precision(pair.a):
        b, a = _wide(pair.b), _wide(pair.a)
        gram_b, gram_a = b.T @ b, a @ a.T
        bound = float(gram_b.trace() * gram_a.trace())
        square = float((gram_b * gram_a).sum())
        if square > _CANCELLED * bound:
            return abs(pair.scale) * math.sqrt(square)
        if bound == 0.0:
            return 0.0
        # Columns that cancel: the cores of QR keep twice the digits.
        core = torch.linalg.qr(b, mode="r").R @ torch.linalg.qr(a.T, mode="r").R.T
        size = float(torch.linalg.matrix_norm(core))
        return abs(pair.scale) * size if size > _ROUNDING * math.sqrt(bound) else 0.0


def cosine(first: Pair, second: Pair) -> float:
    """The cosine of two deltas, in [-1, 1]; 0.0 where one is zero. Raises MergeError as `inner`."""
    return _ratio(inner(first, second), norm(first), norm(second))


def norms_of(modules: Mapping[str, Pair]) -> dict[str, float]:
    """The norm of each delta of an adapter."""
    return {name: norm(modules[name]) for name in modules}


def similarity(
    first: Mapping[str, Pair],
    second: Mapping[str, Pair],
    *,
    weighting: Weighting = "module",
    norms: Mapping[str, float] | None = None,
) -> float:
    """How alike two adapters are, over the modules that both have.

    Args:
        first, second: deltas by module.
        norms: of `first` (`norms_of`), where it is compared with many; None: they are computed.
        weighting: "module": the plain mean of the modules' cosines, as the paper has it; "norm":
            the cosine of all their entries together, in which a module counts by its norm.
    Returns:
        In [-1, 1]; a zero delta counts 0; -inf where no module is in both.
    Raises:
        ValueError: another weighting. MergeError: a module's shapes differ.
    """
    check_choice("weighting", weighting, get_args(Weighting))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return -math.inf
    inners, sizes = [], []
    for name in shared:
        one, other = first[name], second[name]
        try:
            inners.append(inner(one, other))
        except MergeError as error:
            raise MergeError(f"{name}: {error}") from None
        sizes.append((norm(one) if norms is None else norms[name], norm(other)))
    if weighting == "module":
        cosines = (_ratio(dot, *pair) for dot, pair in zip(inners, sizes, strict=True))
        return math.fsum(cosines) / len(shared)
    return _ratio(math.fsum(inners), *(math.hypot(*side) for side in zip(*sizes, strict=True)))


def _ratio(dot: float, first: float, second: float) -> float:
    """dot / (first second) in [-1, 1]; 0.0 where a norm is 0."""
    if first == 0.0 or second == 0.0:
        return 0.0
    return max(-1.0, min(1.0, dot / first / second))


def _wide(factor: Tensor) -> Tensor:
    return factor.detach().double()
