"""Right singular vectors of a tall matrix: all of them, or the leading ones at the least cost.

Four solvers:
- full: LAPACK's SVD in float64; small matrices.
- gram: eigenvectors of the Gram matrix of the short side, in float64; "gram32" in float32, where a
  bound says that its rounding is harmless, or where a pass of krylov confirms it ("refined").
- krylov: randomised block Krylov (Musco and Musco, arXiv 1504.05477) where the rank is far below
  a long short side.
- warm: the same from a guess of the vectors, such as those of the matrix some steps ago.
A Krylov result is accepted when `_certified` says that the best truncation keeps no more than
TOLERANCE of the dropped (and of the kept) energy beyond it; else the next solver takes over, so a
rotten guess costs time only. That is an estimate: of 554 cuts through random tight clusters around
sigma_r 7 missed by more, 1.4 TOLERANCE at worst. Every function takes A [m, n] with m >= n and
n >= 1, finite, its largest entry near 1, inside `numeric.full_precision`. Not here: wide matrices,
scaling, and what to do with the vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.errors import MergeError
from soupkit.numeric import squared_norm

# Share of the dropped energy, and of the kept, by which a solver may miss the best truncation.
TOLERANCE = 1e-4
# Dropped energy below this share of the whole is float32 rounding; nothing is left to win.
ROUNDING = 1e-12
# Short sides up to these take the float64 SVD (2 ms at 128 x 128, one thread) and the float64 Gram
# matrix (6 ms at 192 x 576, no slower than float32 with its check).
_FULL_MAX = 128
_EXACT_MAX = 256
# Krylov wins over an eigendecomposition where the rank is below this share of a short side of at
# least this length; at 576, rank 32, it saves 10 of 25 ms and is not exact.
_KRYLOV_SHARE = 16
_KRYLOV_MIN = 768
# From this short side on, a guess that is 30 % off still saves time.
WARM_ALWAYS_FROM = _KRYLOV_MIN
# A basis may grow to this share of the short side: at 576 x 576 and 72 columns three blocks take 18
# ms and the cold path 28 (one thread; `soupkit bench merge`).
_BASIS_SHARE = 0.4
# A block that comes wins a factor of (theta_r / mean outside)^2, at most this: 4 on flat spectra,
# 60 on steep ones. Where that cannot suffice, give up early.
_BLOCK_WINS = 20.0
# The certificate asks for less than TOLERANCE, because its bound is an estimate. Its mean with the
# gains counts only where the bound is near the limit already: without that, clusters cost 2.7
# TOLERANCE; with a lower one, decaying spectra a block more.
_MARGIN = 0.7
_NEAR = 2.5
# Columns beside the wanted ones; with a guess, probes for what it lacks.
_OVERSAMPLE = 8
# Below this share, what is dropped is measured on A - T_r(A): a difference of energies would lose
# it to rounding.
_SMALL_TAIL = 1e-2
# Entries that are widened at once for a float64 Gram matrix.
_GRAM_ENTRIES = 2**22
# Cosine between two columns of a basis that counts as float32 rounding.
_SKEW = 5e-7

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, not in its stubs


def _eigh(gram: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at 0), all, and the first `count` eigenvectors, largest first."""
    values, vectors = torch.linalg.eigh(gram)
    least = 0 if count is None else vectors.shape[1] - count
    return values.flip(0).clamp(min=0), vectors[:, least:].flip(1)


def _gram64(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values and right vectors of tall, by its Gram matrix in float64."""
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    # In blocks of rows: a whole float64 copy would be twice the matrix.
    rows = max(1, _GRAM_ENTRIES // tall.shape[1])
    for block in tall.split(rows):  # type: ignore[no-untyped-call]
        wide = block.double()
        gram.addmm_(wide.T, wide)
    return _eigh(gram)


def _full(tall: Tensor) -> tuple[Tensor, Tensor]:
    """The same by LAPACK's SVD in float64."""
    _, values, right = torch.linalg.svd(tall.double(), full_matrices=False)
    return values.square(), right.T


def exact(tall: Tensor) -> tuple[Tensor, Tensor, str]:
    """Squared singular values, right vectors [n, n], solver; a second one if LAPACK gives up."""
    order = [("full", _full), ("gram", _gram64)]
    if tall.shape[1] > _FULL_MAX:
        order.reverse()
    reasons = []
    for solver, solve in order:
        try:
            return (*solve(tall), solver)
        except LinAlgError as error:
            reasons.append(f"{solver}: {error}")
    raise MergeError(
        f"no decomposition of a finite {tuple(tall.shape)} matrix: {'; '.join(reasons)}"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Leading:
    """Leading right vectors [n, r], A @ vectors where it came for free, and the solver's name."""

    vectors: Tensor
    image: Tensor | None
    solver: str


def leading(
    tall: Tensor, rank: int, total: float, seed: int, start: Tensor | None = None
) -> Leading:
    """The leading right vectors of tall [m, n], m >= n, by the first solver that passes.

    Args:
        rank: of the vectors, 1 to n. total: ||tall||_F^2. seed: of the random columns.
        start: [n, k], a guess of the vectors; None: there is none.
    """
    short, width = tall.shape[1], min(rank + _OVERSAMPLE, tall.shape[1])
    if tall.dtype == torch.float32 and short > _EXACT_MAX:
        blocks = int(short * _BASIS_SHARE) // width
        if start is not None and blocks >= 2:
            guess = _guess(tall, start, rank, width, seed)
            found = _krylov(tall, guess, rank, total, blocks)
            if found is not None:
                return _named(found, "warm")
        if short >= _KRYLOV_MIN and rank * _KRYLOV_SHARE <= short:
            # A power step first: the Ritz values of random columns say nothing.
            sketch = tall.T @ (tall @ _random(short, width, seed, tall.device))
            found = _krylov(tall, torch.linalg.qr(sketch).Q, rank, total, short // (3 * width) + 1)
            if found is not None:
                return _named(found, "krylov")
        values, every = _eigh(tall.T @ tall, width)
        if _rounding_is_harmless(values, rank, total):
            return Leading(every[:, :rank], None, "gram32")
        found = _krylov(tall, every, rank, total, min(2, short // width))
        if found is not None:
            return Leading(found.vectors, found.image, "gram32 refined")
    _, every, solver = exact(tall)
    return Leading(every[:, :rank], None, solver)


def _named(found: Leading, family: str) -> Leading:
    return Leading(found.vectors, found.image, f"{family} {found.solver}")


def _random(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """Normal entries [rows, columns], the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(device)


def _guess(tall: Tensor, start: Tensor, rank: int, width: int, seed: int) -> Tensor:
    """Orthonormal columns [n, width]: at most `rank` of the start, then probes beside them.

    The probes are random columns after a power step at right angles to the rest: what the start
    lacks, even if it is at right angles to it, shows there unless it is too small to matter.
    """
    known = start[:, :rank].to(torch.float64)
    known = (known / torch.linalg.vector_norm(known, dim=0).clamp(min=1e-300)).float()
    basis: Tensor = torch.linalg.qr(known).Q
    probes = _random(start.shape[0], width - known.shape[1], seed, start.device)
    probes = tall.T @ (tall @ _beside(basis, probes))
    return torch.cat([basis, _beside(basis, probes)], dim=1)


def _rounding_is_harmless(squares: Tensor, rank: int, total: float) -> bool:
    """True if the rounding of a float32 Gram matrix cannot cost what TOLERANCE allows."""
    # It costs at most 2 rank ||E||_2 (Ky Fan), E the rounding of the matrix and of its
    # eigenvectors, which is taken to be 10 units of the largest eigenvalue.
    cost = 20 * rank * torch.finfo(torch.float32).eps * float(squares[0])
    kept = float(squares[:rank].double().sum())
    return cost <= TOLERANCE * min(kept, total - kept)


def _krylov(tall: Tensor, basis: Tensor, rank: int, total: float, blocks: int) -> Leading | None:
    """Leading right vectors from a block Krylov basis that grows from `basis` [n, width],
    orthonormal.

    Returns:
        The vectors, `solver` the passes over the matrix ("q=1" if the start was right), or None
        where `blocks` blocks did not settle it or cannot.
    """
    short, width = basis.shape
    image = tall @ basis
    wide = image.double()
    gram = wide.T @ wide
    kept: list[float] = []
    for left in reversed(range(blocks)):
        squares, rotation = _eigh(gram)
        if not kept:
            # Ritz vectors, so that the rounding of the next product is relative to each of them.
            basis, image = basis @ rotation.float(), image @ rotation.float()
            gram, rotation = torch.diag(squares), torch.eye(width).to(rotation)
        kept.append(float(squares[:rank].sum()))
        turn = rotation[:, :rank].float()
        dropped = total - kept[-1]
        if dropped <= _SMALL_TAIL * total:
            dropped = _energy_beside(tall, image @ turn, basis @ turn)
        # G basis lies in the basis but for what the last block adds.
        fresh = tall.T @ image[:, -width:]
        fresh -= basis @ (basis.T @ fresh)
        residuals = _residuals(fresh, rotation[-width:])
        bound = _loss_bound(squares, residuals, rank, len(kept))
        limit = _MARGIN * TOLERANCE * min(kept[-1], dropped)
        mean = max(total - float(squares.sum()), 0.0) / max(short - squares.numel(), 1)
        is_open = len(kept) == 1 and _reach(squares, residuals, rank, mean) > limit
        if dropped <= ROUNDING * total or (not is_open and _certified(kept, bound, limit)):
            return Leading(basis @ turn, image @ turn, f"q={len(kept)}")
        wins = min(_BLOCK_WINS, (float(squares[rank - 1]) / max(mean, ROUNDING * total)) ** 2)
        if not left or bound > limit * wins**left:
            return None
        added = _beside(basis, fresh)
        basis = torch.cat([basis, added], dim=1)
        image = torch.cat([image, tall @ added], dim=1)
        cross = image.double().T @ image[:, -width:].double()
        gram = torch.cat([torch.cat([gram, cross[:-width]], dim=1), cross.T])
    return None


def _energy_beside(tall: Tensor, image: Tensor, vectors: Tensor) -> float:
    """||tall - image vectors^T||_F^2, in blocks of rows, so that no second matrix is held."""
    rows = max(1, _GRAM_ENTRIES // tall.shape[1])
    pairs = zip(tall.split(rows), image.split(rows), strict=True)  # type: ignore[no-untyped-call]
    return math.fsum(
        squared_norm(torch.addmm(block, part, vectors.T, alpha=-1)) for block, part in pairs
    )


def _beside(basis: Tensor, fresh: Tensor) -> Tensor:
    """Orthonormal columns at right angles to the basis that span what `fresh` [n, width] adds."""
    added: Tensor = torch.linalg.qr(fresh).Q
    added = torch.linalg.qr(added - basis @ (basis.T @ added)).Q
    if bool(((basis.T @ added).abs() > _SKEW).any()):
        # `fresh` holds less than its number of columns: QR of all of it fills up at right angles.
        added = torch.linalg.qr(torch.cat([basis, fresh], dim=1)).Q[:, basis.shape[1] :]
    return added


def _residuals(fresh: Tensor, weights: Tensor) -> Tensor:
    """||G v - theta v|| of each Ritz vector, float64 [columns of weights].

    Args:
        fresh: what G adds to the basis [n, width]. weights: of the last block in the Ritz vectors.
    """
    wide = fresh.double()
    squares = (weights * (wide.T @ wide @ weights)).sum(dim=0)
    return squares.clamp(min=0).sqrt()


def _loss_bound(squares: Tensor, residuals: Tensor, rank: int, blocks: int) -> float:
    """What the best `rank` vectors keep beyond the Ritz vectors, at most.

    Each pair (theta_i, a direction outside of the basis, coupled by the residual e_i) gains at most
    (sqrt(g^2 + 4 e^2) - g) / 2 with g = theta_i - kappa; kappa is the largest value outside, taken
    to be the first Ritz value that is not kept. In the first block that one is of a random column
    and says little; there the last one kept is taken.
    """
    outside = rank - 1 if blocks == 1 else min(rank, squares.numel() - 1)
    gaps = squares[:rank] - squares[outside]
    roots = (gaps.square() + 4 * residuals[:rank].square()).sqrt()
    return float((roots - gaps).sum()) / 2


def _reach(squares: Tensor, residuals: Tensor, rank: int, mean: float) -> float:
    """By how much a column past the rank may outgrow the last one kept, in squared values.

    A mixture of a vector of value lambda with those of value mu has the Ritz value theta and the
    residual e with theta + e^2 / (theta - mu) = lambda; mu is `mean`, that outside of the basis.
    """
    if squares.numel() == rank:
        return 0.0
    above = (squares[rank:] - mean).clamp(min=ROUNDING * float(squares[0]))
    grown = squares[rank:] + residuals[rank:].square() / above
    return float(grown.amax() - squares[rank - 1])


def _certified(kept: list[float], bound: float, limit: float) -> bool:
    """True if the bound is within the limit, or its mean with what the gains foretell is.

    Gains alone are not trusted: in a tight cluster around sigma_r they are small long before they
    end, and fall ever slower (up to fifty times too little, where the bound is right). The bound
    alone is ten times too high on decaying spectra. Hence a geometric mean, the bound twice.
    """
    if bound <= limit:
        return True
    if len(kept) < 3 or bound > _NEAR * limit:
        return False
    before, gain = (
        max(late - early, 0.0) for early, late in zip(kept[-3:], kept[-2:], strict=False)
    )
    if gain >= before:
        return False
    foretold = gain * gain / (before - gain)
    return bound * bound * foretold <= limit**3
