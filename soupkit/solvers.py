"""Right singular vectors of a tall matrix: all of them, or the leading ones at the least cost.

Three solvers:
- full: LAPACK's SVD in float64; small matrices.
- gram: eigenvectors of the Gram matrix of the short side, in float64; "gram32" in float32, where a
  bound says that its rounding is harmless, or where the passes of krylov confirm it ("refined").
- krylov: randomised block Krylov (Musco and Musco, arXiv 1504.05477) where the rank is far below
  a long short side. The dropped energy is measured on A - T_r(A) itself; it is accepted when
  further passes can win no more than TOLERANCE of it, else gram takes over.
Every function takes A [m, n] with m >= n and n >= 1, finite, its largest entry near 1, inside
`numeric.full_precision`. Not here: wide matrices, scaling, and what to do with the vectors.
"""

from __future__ import annotations

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
_OVERSAMPLE = 8

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, not in its stubs


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at 0) and eigenvectors as columns, largest first."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp(min=0), vectors.flip(1)


def _gram64(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values and right vectors of tall, by its Gram matrix in float64."""
    wide = tall.double()
    return _eigh(wide.T @ wide)


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


def leading(tall: Tensor, rank: int, total: float, seed: int) -> tuple[Tensor, str]:
    """The leading right vectors of tall [m, n], m >= n, by the first solver that passes."""
    short, width = tall.shape[1], min(rank + _OVERSAMPLE, tall.shape[1])
    if tall.dtype == torch.float32 and short > _EXACT_MAX:
        if short >= _KRYLOV_MIN and rank * _KRYLOV_SHARE <= short:
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(short, width, generator=generator).to(tall.device)
            vectors, passes = _krylov(tall, start, rank, total, short // (3 * width) + 1)
            if vectors is not None:
                return vectors, f"krylov q={passes}"
        values, every = _eigh(tall.T @ tall)
        if _rounding_is_harmless(values, rank, total):
            return every[:, :rank], "gram32"
        vectors, _ = _krylov(tall, every[:, :width], rank, total, 2)
        if vectors is not None:
            return vectors, "gram32 refined"
    _, every, solver = exact(tall)
    return every[:, :rank], solver


def _rounding_is_harmless(squares: Tensor, rank: int, total: float) -> bool:
    """True if the rounding of a float32 Gram matrix cannot cost what TOLERANCE allows."""
    # It costs at most 2 rank ||E||_2 (Ky Fan), E the rounding of the matrix and of its
    # eigenvectors, which is taken to be 10 units of the largest eigenvalue.
    cost = 20 * rank * torch.finfo(torch.float32).eps * float(squares[0])
    kept = float(squares[:rank].double().sum())
    return cost <= TOLERANCE * min(kept, total - kept)


def _krylov(
    tall: Tensor, start: Tensor, rank: int, total: float, passes: int
) -> tuple[Tensor | None, int]:
    """Leading right vectors from a block Krylov basis that grows from `start` [n, width].

    Returns:
        (vectors [n, rank], passes taken), or (None, passes) where `passes` did not settle it.
    """
    basis = torch.linalg.qr(tall.T @ (tall @ start)).Q
    dropped: list[float] = []
    # The basis has no more columns than the short side.
    passes = min(passes, tall.shape[1] // start.shape[1])
    for done in range(1, passes + 1):
        image = tall @ basis
        vectors, energy = _ritz(tall, basis, image, rank)
        dropped.append(energy)
        if _settled(dropped, total):
            return vectors, done
        fresh = tall.T @ image[:, -start.shape[1] :]
        fresh -= basis @ (basis.T @ fresh)
        # All of it, so that it stays orthonormal where `fresh` holds nothing new.
        basis = torch.linalg.qr(torch.cat([basis, fresh], dim=1)).Q
    return None, passes


def _settled(dropped: list[float], total: float) -> bool:
    """True if the passes to come can win no more than TOLERANCE of what is dropped or kept."""
    limit = TOLERANCE * min(dropped[-1], total - dropped[-1])
    if dropped[-1] <= ROUNDING * total:
        return True
    if len(dropped) < 2:
        return False
    gain = dropped[-2] - dropped[-1]
    if abs(gain) <= limit or len(dropped) < 3:
        return abs(gain) <= limit
    # Gains fall at least geometrically, so their ratio bounds the sum of those to come.
    ratio = gain / (dropped[-3] - dropped[-2])
    return 0 < ratio < 1 and 0 < gain * ratio <= limit * (1 - ratio)


def _ritz(tall: Tensor, basis: Tensor, image: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best right vectors in span(basis) and the energy they drop; image = tall @ basis."""
    wide = image.double()
    _, rotation = _eigh(wide.T @ wide)
    rotation = rotation[:, :rank].to(basis.dtype)
    vectors = basis @ rotation
    # The difference of two energies would lose a small tail to rounding; the difference of matrices
    # does not.
    return vectors, squared_norm(torch.addmm(tall, image @ rotation, vectors.T, alpha=-1))
