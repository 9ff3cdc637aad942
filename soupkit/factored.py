"""Merges of deltas that are kept as thin factors, as LoRA adapters are; never a dense matrix.

    delta_i = s_i b_i a_i,   [b_1 .. b_k] = Q_b [beta_1 .. beta_k],   the same for a_i^T
    merge(delta_1 .. delta_k) = Q_b merge(s_i beta_i alpha_i) Q_a^T

because every rule of merge.py commutes with rotations of both sides. The cores have as many rows
and columns as the ranks sum to. The result is cut to the rank that can be written back, and its
factors are those nearest to the first pair's own (gauge.py), so that an optimizer's moments stay
meaningful. Averaging a and b each on its own would merge something else. All in float64. Not here:
names of adapters, and how a convolution or an embedding becomes a pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.config import check_count
from soupkit.errors import MergeError
from soupkit.gauge import nearest_factors
from soupkit.merge import MatrixReport, MergeRule
from soupkit.monosoup import monosoup_coefficients
from soupkit.numeric import check_finite, full_precision
from soupkit.solvers import ROUNDING, exact

# Singular values below this share of the largest count as zero, a hundredth of float32's rounding,
# and those below ROUNDING of the largest delta, which is what is left where deltas cancel.
_ZERO = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """delta = scale * b @ a.

    Args:
        a, b: [r, in] and [out, r], floating, any dtype and device.
        scale: finite, not 0; PEFT's lora_alpha / r, or lora_alpha / sqrt(r) for rslora.
    Raises:
        ValueError: no pair of matrices, or a scale that is 0 or not finite.
    """

    a: Tensor
    b: Tensor
    scale: float

    def __post_init__(self) -> None:
        """Check the shapes and the scale."""
        shapes = f"a {tuple(self.a.shape)}, b {tuple(self.b.shape)}"
        if self.a.ndim != 2 or self.b.ndim != 2 or self.a.shape[0] != self.b.shape[1]:
            raise ValueError(f"{shapes}: a pair needs a [r, in] and b [out, r] of one rank r")
        if not (self.a.is_floating_point() and self.b.is_floating_point()):
            raise ValueError(f"{self.a.dtype}, {self.b.dtype}: factors are floating")
        if not math.isfinite(self.scale) or self.scale == 0.0:
            raise ValueError(f"scale={self.scale}: must be finite and not 0 (is lora_alpha 0?)")

    @property
    def rank(self) -> int:
        """Rows of a; the delta's rank may be lower."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the delta."""
        return self.b.shape[0], self.a.shape[1]

    def matrix(self) -> Tensor:
        """The dense delta, float32 [out, in], on b's device; for one weight that needs it whole."""
        with full_precision(self.b):
            return (self.b.float() @ self.a.to(self.b.device).float()).mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """U diag(S) V^T of a core, float64 on the CPU, and the solver that gave it."""

    left: Tensor
    values: Tensor
    right: Tensor
    solver: str

    def matrix(self, rank: int) -> Tensor:
        """The best approximation of this rank."""
        return (self.left[:, :rank] * self.values[:rank]) @ self.right[:, :rank].T

    def energy(self, rank: int | None = None) -> float:
        """Sum of the first `rank` squared singular values, or of all."""
        return float(self.values[:rank].square().sum())


def merge_pairs(
    name: str, pairs: Sequence[Pair], rule: MergeRule, *, rank: int
) -> tuple[Tensor, Tensor, MatrixReport]:
    """Merge the factored deltas of one parameter. Deterministic; O((out + in) (sum of ranks)^2).

    Args:
        name: for messages and the report.
        pairs: at least one, deltas of one shape, finite; ranks, scales and dtypes may differ.
        rule: as for `merge.merge_deltas`; its seed is not used.
        rank: of the factors returned; the first pair's own for its gauge to be kept whole.
    Returns:
        (a [rank, in], b [out, rank], report): float32, fresh memory, the first pair's device; the
        merged delta is pairs[0].scale * b @ a. Where no delta has an entry but 0, the first pair's
        own factors. In the report rank is that of the delta written, and kept_energy the share that
        the rule keeps (monosoup: P_k) times the share that the cut to `rank` keeps.
    Raises:
        ValueError: no pairs, weights of another number, rank below 1.
        MergeError: shapes differ, or an entry is not finite.
    """
    started = time.perf_counter()
    weights = rule.weights_for(len(pairs)) if pairs else ()
    _check(name, pairs, rank)
    first = pairs[0]
    with full_precision(first.a):
        basis_b, betas = span([pair.b for pair in pairs], first.a.device)
        basis_a, alphas = span([pair.a.T for pair in pairs], first.a.device)
        cores = [
            pair.scale * beta @ alpha.T
            for pair, beta, alpha in zip(pairs, betas, alphas, strict=True)
        ]
        norms = tuple(float(torch.linalg.matrix_norm(core)) for core in cores)
        merged, share, solver = _merge_cores(cores, weights, rule)
        done = decompose(merged)
        floor = max(_ZERO * float(done.values[0]), ROUNDING * max(norms))
        kept = min(rank, int((done.values > floor).sum()))
        if any(norms) or rank != first.rank:
            own = _resized(betas[0], rank), _resized(alphas[0], rank).T
            beta, alpha = _in_gauge_of(own, done, kept, first.scale)
            b = (basis_b @ beta.to(basis_b.device)).float()
            a = (alpha.to(basis_a.device) @ basis_a.T).float()
        else:
            a, b = first.a.detach().float().clone(), first.b.detach().float().clone()
    check_finite(name, a)
    check_finite(name, b)
    total = done.energy()
    return (
        a,
        b.to(a.device),
        MatrixReport(
            name=name,
            shape=first.shape,
            method=rule.method,
            rank=kept,
            kept_energy=share * (done.energy(kept) / total if total else 1.0),
            delta_norms=norms,
            merged_norm=math.sqrt(done.energy(kept)),
            cosine=_cosine(cores, norms),
            solver="+".join(sorted({"qr", done.solver, *solver})),
            seconds=time.perf_counter() - started,
        ),
    )


def _check(name: str, pairs: Sequence[Pair], rank: int) -> None:
    """Raise as `merge_pairs` says unless the pairs can be merged."""
    if not pairs:
        raise ValueError(f"{name}: no pairs to merge; give at least one")
    check_count("rank", rank, least=1)
    for pair in pairs:
        if pair.shape != pairs[0].shape:
            raise MergeError(
                f"{name}: deltas of shapes {pairs[0].shape} and {pair.shape}; a merge needs one "
                "shape"
            )
        check_finite(name, pair.a)
        check_finite(name, pair.b)


def span(columns: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """An orthonormal basis [m, k] of all columns, on the device, and each one's coordinates in it,
    [k, r_i] on the CPU, where LAPACK is the faster for matrices of this size.
    """
    wide = [part.detach().to(device, torch.float64) for part in columns]
    basis, coordinates = torch.linalg.qr(torch.cat(wide, dim=1))
    return basis, list(coordinates.cpu().split([part.shape[1] for part in wide], dim=1))


def decompose(core: Tensor) -> Core:
    """The SVD of a core, short side first solved for."""
    is_tall = core.shape[0] >= core.shape[1]
    tall = core if is_tall else core.T
    _, vectors, solver = exact(tall)
    image = tall @ vectors
    values = torch.linalg.vector_norm(image, dim=0)
    values, order = values.sort(descending=True, stable=True)
    image, vectors = image[:, order], vectors[:, order]
    unit = image / torch.where(values > 0, values, torch.ones_like(values))
    return Core(unit, values, vectors, solver) if is_tall else Core(vectors, values, unit, solver)


def _in_gauge_of(
    own: tuple[Tensor, Tensor], done: Core, kept: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Factors of the core's first `kept` triplets over `scale`, near the own (beta, alpha^T)."""
    return nearest_factors(
        done.left[:, :kept] * math.copysign(1.0, scale),
        done.values[:kept] / abs(scale),
        done.right[:, :kept],
        own_b=own[0],
        own_a=own[1],
    )


def _merge_cores(
    cores: Sequence[Tensor], weights: Sequence[float], rule: MergeRule
) -> tuple[Tensor, float, set[str]]:
    """The rule on cores: the merged core, the share of energy that it keeps, its solvers."""
    share, solvers = 1.0, set[str]()
    if rule.method == "svd_mean":
        cuts = [decompose(core) for core in cores]
        ranks = [_rank_for(rule, cut.values) for cut in cuts]
        total = math.fsum(cut.energy() for cut in cuts)
        kept = math.fsum(cut.energy(rank) for cut, rank in zip(cuts, ranks, strict=True))
        share, solvers = (kept / total if total else 1.0), {cut.solver for cut in cuts}
        cores = [cut.matrix(rank) for cut, rank in zip(cuts, ranks, strict=True)]
    mean = torch.stack([core * weight for core, weight in zip(cores, weights, strict=True)]).sum(0)
    if rule.method != "monosoup":
        return mean, share, solvers
    whole = decompose(mean)
    k, high, low, share, _, _ = monosoup_coefficients(whole.values, energy=rule.energy)
    return low * mean + (high - low) * whole.matrix(k), share, {whole.solver}


def _rank_for(rule: MergeRule, values: Tensor) -> int:
    """How many singular values svd_mean keeps."""
    if rule.energy is None:
        assert rule.rank is not None
        return min(rule.rank, values.numel())
    cumulative = values.square().cumsum(0)
    wanted = cumulative[-1] * rule.energy * (1 - ROUNDING)
    return min(int(torch.searchsorted(cumulative, wanted)) + 1, values.numel())


def _resized(columns: Tensor, rank: int) -> Tensor:
    """The first `rank` columns, filled up with zeros."""
    return torch.nn.functional.pad(columns[:, :rank], (0, max(0, rank - columns.shape[1])))


def _cosine(cores: Sequence[Tensor], norms: Sequence[float]) -> float:
    """Cosine of the first two deltas; see MatrixReport."""
    if len(cores) == 1:
        return 1.0
    scale = norms[0] * norms[1]
    return max(-1.0, min(1.0, float((cores[0] * cores[1]).sum()) / scale)) if scale else 0.0
