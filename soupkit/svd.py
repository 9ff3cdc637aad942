"""Truncated singular value decompositions of deltas, with figures for what they drop.

    T_r(A) = sum_{i <= r} sigma_i u_i v_i^T,   ||A - T_r(A)||_F^2 = sum_{i > r} sigma_i^2

(Eckart and Young). Only the short side is solved for: T_r(A) = (A V_r) V_r^T. Three solvers:
- full: LAPACK's SVD in float64; small matrices.
- gram: eigenvectors of the Gram matrix of the short side; in float32 where its rounding, bounded
  afterwards, cannot cost more than TOLERANCE of the dropped energy ("gram32"), else in float64
  ("gram").
- krylov: randomised block Krylov (Musco and Musco, arXiv 1504.05477) where the rank is far below
  the short side. Its dropped energy is measured on A - T_r(A) itself; accepted when another pass
  would win less than TOLERANCE of it, else gram takes over.
Effective rank: Roy and Vetterli 2007. Works on any device; leaves the global random generators and
the caller's float32 matmul precision as they are. Not here: merging, and what rank to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.config import check_count, check_share
from soupkit.errors import MergeError
from soupkit.numeric import check_finite, full_precision, squared_norm

# Share of the dropped energy by which a solver may miss the best; 5e-5 of the error's norm.
TOLERANCE = 1e-4
# Dropped energy below this share of the whole is float32 rounding; nothing is left to win.
_ROUNDING = 1e-12
# Short sides up to this take the float64 SVD: 2 ms at 128 x 128 (MKL, one thread).
_FULL_MAX = 128
# Krylov wins over an eigendecomposition where the rank is below this share of the short side.
_KRYLOV_SHARE = 16
_OVERSAMPLE = 8

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, not in its stubs


@dataclass(frozen=True, slots=True, eq=False)
class TruncatedSVD:
    """A ~ left @ right.

    Args:
        left: U_r S_r, float32 [m, r].
        right: V_r^T, orthonormal rows, float32 [r, n].
        singular_values: the r kept ones, float64 [r], descending.
        total_energy: ||A||_F^2.
        solver: name of the solver that gave it.
    """

    left: Tensor
    right: Tensor
    singular_values: Tensor
    total_energy: float
    solver: str

    @property
    def rank(self) -> int:
        """Number of triplets kept."""
        return self.right.shape[0]

    @property
    def kept_energy(self) -> float:
        """Share of the energy kept, 0 to 1; 1.0 for A = 0."""
        if self.total_energy == 0.0:
            return 1.0
        return min(1.0, float(self.singular_values.square().sum()) / self.total_energy)

    def matrix(self) -> Tensor:
        """T_r(A), float32 [m, n]."""
        with full_precision(self.left):
            return self.left @ self.right


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """All singular values of A, float64 [p], and its short side's vectors, columns of [p, p]."""

    singular_values: Tensor
    vectors: Tensor
    solver: str


def truncated_svd(
    matrix: Tensor, *, rank: int | None = None, energy: float | None = None, seed: int = 0
) -> TruncatedSVD:
    """The best approximation of `matrix` of a rank, or of the least rank that keeps a share of the
    energy.

    Args:
        matrix: [m, n], any floating dtype, finite; computed in float32 or wider.
        rank: triplets to keep, >= 0; clamped to min(m, n). One of rank and energy.
        energy: share of ||matrix||_F^2 to keep, in (0, 1].
        seed: of the sketch; the same seed gives the same bits.
    Returns:
        A TruncatedSVD on matrix's device.
    Raises:
        ValueError: not a floating matrix, or not exactly one of rank and energy.
        MergeError: an entry is not finite, or every solver failed.
    """
    if (rank is None) == (energy is None):
        raise ValueError(f"rank={rank}, energy={energy}: give exactly one of the two")
    if rank is not None:
        check_count("rank", rank, least=0)
    if energy is not None:
        check_share("energy", energy, one_allowed=True)
    scaled, exponent = _scaled(matrix)
    with full_precision(scaled):
        total = squared_norm(scaled)
        tall = scaled if scaled.shape[0] >= scaled.shape[1] else scaled.T
        kept = min(tall.shape[1], tall.shape[1] if rank is None else rank)
        if total == 0.0 or kept == 0:
            vectors, solver = (
                torch.eye(tall.shape[1], 0 if rank is None else kept, device=tall.device),
                "none",
            )
        elif energy is None:
            vectors, solver = _leading(tall, kept, total, seed)
        else:
            squares, every, solver = _exact(tall)
            vectors = every[:, : _rank_for(energy, squares)]
        return _assemble(scaled, vectors.to(scaled.dtype), exponent, total, solver)


def spectrum(matrix: Tensor) -> Spectrum:
    """All singular values and the short side's singular vectors (right if m >= n, else left) of [m,
    n].

    Values below 1.5e-8 of the largest are rounding where the solver is gram.

    Raises:
        ValueError, MergeError: as `truncated_svd`.
    """
    scaled, exponent = _scaled(matrix)
    with full_precision(scaled):
        squares, vectors, solver = _exact(
            scaled if scaled.shape[0] >= scaled.shape[1] else scaled.T
        )
    return Spectrum(_unscaled(squares.sqrt(), exponent), vectors, solver)


def singular_values(matrix: Tensor) -> Tensor:
    """All singular values of [m, n], float64, descending; accuracy and errors as `spectrum`."""
    return spectrum(matrix).singular_values


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values over their sum (Roy and Vetterli), in float64; 0.0 if
    all are 0.

    Raises:
        ValueError: a value is negative or not finite.
    """
    values = values.double()
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError("singular values must be finite and >= 0")
    total = values.sum()
    if values.numel() == 0 or float(total) == 0.0:
        return 0.0
    return float(torch.special.entr(values / total).sum().exp())


def _scaled(matrix: Tensor) -> tuple[Tensor, int]:
    """matrix * 2^-exponent, largest entry in [0.5, 1), and the exponent; exact but underflow."""
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(f"{matrix.dtype} {tuple(matrix.shape)}: needs a floating matrix [m, n]")
    check_finite("matrix", matrix)
    wide = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    peak = wide.abs().amax() if wide.numel() else torch.zeros(())
    exponent = int(torch.frexp(peak.double()).exponent)
    return _unscaled(wide, -exponent), exponent


def _unscaled(tensor: Tensor, exponent: int) -> Tensor:
    """tensor times 2^exponent, in two factors because one may overflow float32."""
    half = exponent // 2
    return (tensor * 2.0**half).mul_(2.0 ** (exponent - half))


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


def _exact(tall: Tensor) -> tuple[Tensor, Tensor, str]:
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


def _leading(tall: Tensor, rank: int, total: float, seed: int) -> tuple[Tensor, str]:
    """The leading right vectors of tall [m, n], m >= n, by the first solver that passes."""
    short = tall.shape[1]
    vectors, solver = None, ""
    if short > _FULL_MAX and rank * _KRYLOV_SHARE <= short:
        vectors, solver = _krylov(tall, rank, total, seed)
    if vectors is None and short > _FULL_MAX and tall.dtype == torch.float32:
        vectors, solver = _gram32(tall, rank, total), "gram32"
    if vectors is None:
        _, every, solver = _exact(tall)
        vectors = every[:, :rank]
    return vectors, solver


def _gram32(tall: Tensor, rank: int, total: float) -> Tensor | None:
    """Leading right vectors from a float32 Gram matrix, or None where its rounding could matter."""
    try:
        values, vectors = _eigh(tall.T @ tall)
    except LinAlgError:
        return None
    # The captured energy misses the best by at most 2 rank ||E||_2, E the rounding of the Gram
    # matrix and of its eigenvectors; 10 units of the largest value is the most seen over flat,
    # decaying and low-rank spectra.
    miss = 20 * rank * torch.finfo(torch.float32).eps * float(values[0])
    dropped = total - float(values[:rank].double().sum())
    return vectors[:, :rank] if miss <= TOLERANCE * dropped else None


def _krylov(tall: Tensor, rank: int, total: float, seed: int) -> tuple[Tensor | None, str]:
    """Leading right vectors from a growing block Krylov basis; None if not converged at n/3."""
    generator = torch.Generator().manual_seed(seed)
    width = rank + _OVERSAMPLE
    start = torch.randn(tall.shape[1], width, generator=generator).to(tall.device, tall.dtype)
    basis = torch.linalg.qr(tall.T @ (tall @ start)).Q
    before = total
    for passes in range(1, tall.shape[1] // (3 * width) + 2):
        image = tall @ basis
        vectors, dropped = _ritz(tall, basis, image, rank)
        # Gains shrink from pass to pass, so the next is taken to be at most this one.
        if dropped <= _ROUNDING * total or before - dropped <= TOLERANCE * dropped:
            return vectors, f"krylov q={passes}"
        before = dropped
        fresh = tall.T @ image[:, -width:]
        # Projected twice: once leaves what float32 cancelled.
        for _ in range(2):
            fresh = torch.linalg.qr(fresh - basis @ (basis.T @ fresh)).Q
        basis = torch.cat([basis, fresh], dim=1)
    return None, ""


def _ritz(tall: Tensor, basis: Tensor, image: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best right vectors in span(basis) and the energy they drop; image = tall @ basis."""
    wide = image.double()
    _, rotation = _eigh(wide.T @ wide)
    rotation = rotation[:, :rank].to(basis.dtype)
    vectors = basis @ rotation
    # The difference of two energies would lose a small tail to rounding; the difference of matrices
    # does not.
    return vectors, squared_norm(torch.addmm(tall, image @ rotation, vectors.T, alpha=-1))


def _rank_for(energy: float, squares: Tensor) -> int:
    """The least rank whose squared singular values sum to `energy` of all."""
    cumulative = squares.cumsum(0)
    wanted = cumulative[-1] * energy * (1 - _ROUNDING)
    return min(int(torch.searchsorted(cumulative, wanted)) + 1, squares.numel())


def _assemble(
    scaled: Tensor, vectors: Tensor, exponent: int, total: float, solver: str
) -> TruncatedSVD:
    """TruncatedSVD from the leading vectors [p, r] of the short side of `scaled`."""
    if scaled.shape[0] >= scaled.shape[1]:
        left, right = scaled @ vectors, vectors.T
    else:
        # Columns of A^T U are orthogonal, so R is diagonal up to rounding; Q stays orthonormal
        # where a value is 0.
        q, r = torch.linalg.qr(scaled.T @ vectors)
        signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
        left, right = vectors @ (r * signs.unsqueeze(1)).T, (q * signs).T
    values = torch.linalg.vector_norm(left, dim=0, dtype=torch.float64)
    left = _unscaled(left, exponent)
    check_finite("left singular vectors", left)
    return TruncatedSVD(
        left=left.float(),
        right=right.float().contiguous(),
        singular_values=_unscaled(values.sort(descending=True).values, exponent),
        total_energy=total * 4.0**exponent,
        solver=solver,
    )
