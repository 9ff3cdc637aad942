"""Merges: several deltas of one parameter into one.

    mean      sum_i w_i delta_i
    svd_mean  sum_i w_i T_r(delta_i)                      truncate, then average
    monosoup  lambda_high T_k(d) + lambda_low (d - T_k(d)),   d = sum_i w_i delta_i

svd_mean is the operator of the project's design document; monosoup is arXiv 2602.09689, section 4.
The weights are normalised to sum 1. For monosoup k is the effective rank of d rounded up (or the
least rank that keeps the share `energy`), lambda_low = rho + (1 - rho) cos, lambda_high = 1 -
lambda_low, with rho = (sigma_{k+1} / sigma_1)^2 and cos = sqrt(1 - P_k). Vectors (biases, norms)
are always averaged plainly; experts are merged one by one. Deltas are float32. No files here, and
no decision when to merge.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from soupkit.config import Method, check_choice, check_count, check_truncation
from soupkit.cuts import Cuts as Cuts
from soupkit.cuts import cuts_of, cuts_of_sum, fitting, picked
from soupkit.delta import as_matrices, from_matrices, layout
from soupkit.errors import MergeError
from soupkit.monosoup import edit
from soupkit.monosoup import monosoup_coefficients as monosoup_coefficients
from soupkit.numeric import check_finite, full_precision, inner_product, squared_norm
from soupkit.svd import TruncatedSVD


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How deltas are merged.

    Args:
        method: "svd_mean", "monosoup" or "mean".
        rank, energy: svd_mean needs exactly one; for monosoup energy is the R of its variance
            variant and None means effective rank; mean uses neither.
        weights: one a delta, finite, positive sum; stored normalised to sum 1. None: equal.
        seed: of the sketches; each parameter gets its own from it and its name.
    Raises:
        ValueError: a value out of range.
    """

    method: Method = "svd_mean"
    rank: int | None = None
    energy: float | None = None
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field; normalise the weights."""
        check_choice("method", self.method, get_args(Method))
        check_truncation(self.rank, self.energy)
        if self.method == "svd_mean" and self.rank is None and self.energy is None:
            raise ValueError("method='svd_mean' needs rank= or energy=, as in rank=64")
        check_count("seed", self.seed, least=0)
        if self.weights is None:
            return
        complaint = f"weights={self.weights!r}: need finite numbers with a positive sum"
        try:
            total = math.fsum(self.weights)
        except (OverflowError, ValueError):  # beyond the largest float; infinities of both signs
            raise ValueError(complaint) from None
        if not total > 0 or not all(math.isfinite(weight / total) for weight in self.weights):
            raise ValueError(complaint)
        object.__setattr__(self, "weights", tuple(weight / total for weight in self.weights))

    def weights_for(self, count: int) -> tuple[float, ...]:
        """The normalised weights of `count` deltas; ValueError if the rule has another number."""
        weights = self.weights or (1.0 / count,) * count
        if len(weights) != count:
            raise ValueError(f"{len(weights)} weights for {count} deltas: give one a delta")
        return weights


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """What one merge did to one parameter.

    Args:
        name, shape: of the parameter. method: as applied ("mean" for vectors).
        rank: largest rank kept over deltas and experts; 0 for a plain mean.
        kept_energy: share of the deltas' energy that entered the result (monosoup: P_k).
        delta_norms: Frobenius norm of each delta. merged_norm: of the result.
        cosine: between the first two deltas; 0.0 where one is zero, 1.0 if there is one delta.
        solver: of the decomposition, several joined by "+"; "none" if there was none.
        seconds: wall time.
        spectrum: kept singular values of the first delta (of its first expert), descending, at most
            64, evenly picked; empty where nothing was truncated.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    rank: int
    kept_energy: float
    delta_norms: tuple[float, ...]
    merged_norm: float
    cosine: float
    solver: str
    seconds: float
    spectrum: tuple[float, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The fields as JSON types."""
        lists = {name: list(getattr(self, name)) for name in ("shape", "delta_norms", "spectrum")}
        return {**asdict(self), **lists}


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """One merged parameter.

    Args:
        delta: float32, the parameter's shape, fresh memory. report: what was done.
        cuts: of each delta, T_r of each of its matrices; None for a method that truncates nothing,
            for a vector, and where r cuts nothing.
        weights, rank: of the rule.
    """

    delta: Tensor
    report: MatrixReport
    cuts: tuple[Cuts | None, ...]
    weights: tuple[float, ...]
    rank: int | None

    @property
    def merged(self) -> Cuts | None:
        """T_r of the merged delta's matrices, computed from the factors of the cuts, so that it can
        be a known cut of the next merge; None where `cuts` are, and for a rule with energy=.
        """
        return cuts_of_sum(self.cuts, self.weights, self.rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Merged:
    """One merged matrix and its figures; energies are absolute, so that experts add up."""

    matrix: Tensor
    rank: int
    kept: float
    total: float
    solvers: frozenset[str]
    cuts: Cuts = ()


def merge_deltas(
    name: str, deltas: Sequence[Tensor], rule: MergeRule
) -> tuple[Tensor, MatrixReport]:
    """Merge the deltas of one parameter.

    Args:
        name: canonical, decides the layout and seeds the sketches.
        deltas: at least one, float32, one shape, finite.
        rule: see MergeRule.
    Returns:
        The merged delta (float32, same shape, fresh memory, first delta's device) and its report.
        The order of deltas with their weights changes it by float32 rounding, or where deltas are
        alike by what `truncated_svd` leaves open.
    Raises:
        ValueError: no deltas, a dtype other than float32, or weights of another number.
        MergeError: shapes differ, or an entry is not finite.
    """
    done = _merge(name, deltas, rule, ())
    return done.delta, done.report


def merge_with_cuts(
    name: str, deltas: Sequence[Tensor], rule: MergeRule, *, known: Sequence[Cuts | None] = ()
) -> Merge:
    """`merge_deltas` that takes truncations known already and hands back all it has.

    Args:
        known: at most one a delta, in their order; [0] is of deltas[0]. A cut of delta i that fits
            it (number of matrices, shape, rank) takes the place of its decomposition: it must be of
            that very delta, which is not checked. The others start from the first cut that fits, so
            they cost less if their delta is like that one. Cuts that do not fit are left unused.
    Raises:
        ValueError: more cuts than deltas; else as `merge_deltas`.
    """
    if len(known) > len(deltas):
        raise ValueError(f"{name}: {len(known)} known cuts for {len(deltas)} deltas")
    return _merge(name, deltas, rule, known)


def _merge(
    name: str, deltas: Sequence[Tensor], rule: MergeRule, known: Sequence[Cuts | None]
) -> Merge:
    """See `merge_with_cuts`."""
    started = time.perf_counter()
    _check_deltas(name, deltas)
    shape = tuple(deltas[0].shape)
    weights = rule.weights_for(len(deltas))
    norms = tuple(math.sqrt(squared_norm(delta)) for delta in deltas)
    with full_precision(deltas[0]):
        if rule.method == "mean" or layout(name, shape) == "vector":
            method, merged = "mean", _mean(deltas, weights)
            parts = [_Merged(merged, 0, 1.0, 1.0, frozenset())]
        else:
            method = rule.method
            batches = [as_matrices(name, delta) for delta in deltas]
            rank = rule.rank if method == "svd_mean" else None
            usable = fitting(known, batches, rank)
            # One after the other: matmul, QR and eigh of a stack of 16 experts 1024 x 768 take the
            # CPU time of a loop within 7 % (one thread), of 32 experts 256 x 128 within 8 %.
            parts = [
                _merge_matrices(
                    [batch[index] for batch in batches],
                    weights,
                    replace(rule, seed=_seed(rule.seed, name, index)),
                    [None if cuts is None else cuts[index] for cuts in usable],
                )
                for index in range(batches[0].shape[0])
            ]
            # One matrix needs no copy into a stack.
            merged = torch.stack([p.matrix for p in parts]) if len(parts) > 1 else parts[0].matrix
            merged = from_matrices(name, merged, shape)
    check_finite(name, merged)
    total = math.fsum(part.total for part in parts)
    report = MatrixReport(
        name=name,
        shape=shape,
        method=method,
        rank=max(part.rank for part in parts),
        kept_energy=math.fsum(part.kept for part in parts) / total if total else 1.0,
        delta_norms=norms,
        merged_norm=math.sqrt(squared_norm(merged)),
        cosine=_cosine(deltas, norms),
        solver="+".join(sorted(frozenset().union(*(part.solvers for part in parts)))) or "none",
        seconds=time.perf_counter() - started,
        spectrum=picked(parts[0].cuts[0].singular_values) if parts[0].cuts else (),
    )
    cuts = tuple(zip(*(part.cuts for part in parts), strict=True)) or (None,) * len(deltas)
    return Merge(merged, report, cuts, weights, rule.rank)


def _check_deltas(name: str, deltas: Sequence[Tensor]) -> None:
    """Raise as `merge_deltas` says unless the deltas can be merged."""
    if not deltas:
        raise ValueError(f"{name}: no deltas to merge; give at least one")
    for delta in deltas:
        if delta.dtype != torch.float32:
            raise ValueError(
                f"{name}: delta is {delta.dtype}; deltas are float32, see soupkit.delta.subtract"
            )
        if delta.shape != deltas[0].shape:
            raise MergeError(
                f"{name}: deltas of shapes {tuple(deltas[0].shape)} and {tuple(delta.shape)}; "
                "a merge needs one shape"
            )
        check_finite(name, delta)


def _seed(seed: int, name: str, index: int) -> int:
    """A seed of its own for each matrix, the same on every machine."""
    return zlib.crc32(f"{seed}:{name}:{index}".encode())


def _cosine(deltas: Sequence[Tensor], norms: Sequence[float]) -> float:
    """Cosine of the first two deltas; see MatrixReport."""
    if len(deltas) == 1:
        return 1.0
    scale = norms[0] * norms[1]
    return max(-1.0, min(1.0, inner_product(deltas[0], deltas[1]) / scale)) if scale else 0.0


def _mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i delta_i."""
    total = deltas[0] * weights[0]
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total.add_(delta, alpha=weight)
    return total


def _merge_matrices(
    matrices: Sequence[Tensor],
    weights: Sequence[float],
    rule: MergeRule,
    known: Sequence[TruncatedSVD | None],
) -> _Merged:
    """Merge matrices [out, in] by svd_mean or monosoup; see `merge_with_cuts` for `known`."""
    if rule.method == "monosoup":
        done = edit(_mean(matrices, weights), energy=rule.energy)
        kept = done.kept_energy * done.total_energy
        return _Merged(done.matrix, done.rank, kept, done.total_energy, frozenset({done.solver}))
    return _svd_mean(matrices, weights, rule, known)


def _svd_mean(
    matrices: Sequence[Tensor],
    weights: Sequence[float],
    rule: MergeRule,
    known: Sequence[TruncatedSVD | None],
) -> _Merged:
    """sum_i w_i T_r(delta_i); the plain mean, exactly, where r cuts nothing."""
    if rule.rank is not None and rule.rank >= min(matrices[0].shape):
        return _Merged(_mean(matrices, weights), min(matrices[0].shape), 1.0, 1.0, frozenset())
    cuts = cuts_of(matrices, known, rank=rule.rank, energy=rule.energy, seed=rule.seed)
    merged = cuts[0].left @ cuts[0].right * weights[0]
    for cut, weight in zip(cuts[1:], weights[1:], strict=True):
        merged.addmm_(cut.left, cut.right, alpha=weight)
    return _Merged(
        merged,
        max(cut.rank for cut in cuts),
        math.fsum(cut.kept_energy * cut.total_energy for cut in cuts),
        math.fsum(cut.total_energy for cut in cuts),
        frozenset(cut.solver for cut in cuts),
        cuts,
    )
