"""Truncated singular value decompositions of deltas, with figures for what they drop.

    T_r(A) = sum_{i <= r} sigma_i u_i v_i^T,   ||A - T_r(A)||_F^2 = sum_{i > r} sigma_i^2

(Eckart and Young). Only the short side is solved for: T_r(A) = (A V_r) V_r^T. Solvers are in
solvers.py. Effective rank: Roy and Vetterli 2007. Works on any device; leaves the global random
generators and the caller's float32 matmul precision as they are. Not here: merging, and what rank
to use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soupkit.config import check_count, check_share
from soupkit.numeric import check_finite, full_precision, squared_norm
from soupkit.solvers import ROUNDING, Leading, exact, leading

_TENSORS = ("left", "right", "singular_values")


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

    @property
    def short_side(self) -> Tensor:
        """The singular vectors of the short side (V_r if m >= n, else U_r), orthonormal, float32
        [short side, r]; a `start` for `truncated_svd` of a matrix near this one."""
        if self.left.shape[0] >= self.right.shape[1]:
            return self.right.T
        # Columns of left are orthogonal; QR makes up for those of length 0.
        with full_precision(self.left):
            basis: Tensor = torch.linalg.qr(self.left).Q
            return basis

    def to(self, device: torch.device | str) -> TruncatedSVD:
        """The same on a device; itself where it is there already."""
        if self.left.device == torch.device(device):
            return self
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, **moved)

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
    matrix: Tensor,
    *,
    rank: int | None = None,
    energy: float | None = None,
    seed: int = 0,
    start: Tensor | None = None,
) -> TruncatedSVD:
    """The best approximation of `matrix` of a rank, or of the least rank that keeps a share of the
    energy.

    Args:
        matrix: [m, n], any floating dtype, finite; computed in float32 or wider.
        rank: triplets to keep, >= 0; clamped to min(m, n). One of rank and energy.
        energy: share of ||matrix||_F^2 to keep, in (0, 1].
        seed: of the sketch; the same seed gives the same bits with the same number of threads.
        start: [min(m, n), k], floating, finite: a guess of the leading singular vectors of the
            short side (right ones if m >= n), best first; need not be orthonormal, any k. Makes a
            float32 matrix with a long short side cheaper, the better it is; never less accurate.
            Only with rank.
    Returns:
        A TruncatedSVD on matrix's device.
    Raises:
        ValueError: not a floating matrix, not exactly one of rank and energy, or a start of
            another length.
        MergeError: an entry is not finite, or every solver failed.
    """
    if (rank is None) == (energy is None):
        raise ValueError(f"rank={rank}, energy={energy}: give exactly one of the two")
    if rank is not None:
        check_count("rank", rank, least=0)
    if energy is not None:
        check_share("energy", energy, one_allowed=True)
    scaled, exponent = _scaled(matrix)
    if start is not None:
        start = _checked_start(start, scaled, energy)
    with full_precision(scaled):
        total = squared_norm(scaled)
        tall = scaled if scaled.shape[0] >= scaled.shape[1] else scaled.T
        kept = min(tall.shape[1], tall.shape[1] if rank is None else rank)
        if total == 0.0 or kept == 0:
            columns = 0 if rank is None else kept
            eye = torch.eye(tall.shape[1], columns, device=tall.device)
            found = Leading(eye, None, "none")
        elif energy is None:
            found = leading(tall, kept, total, seed, start)
        else:
            squares, every, solver = exact(tall)
            found = Leading(every[:, : _rank_for(energy, squares)], None, solver)
        return _assemble(scaled, found, exponent, total)


def _checked_start(start: Tensor, matrix: Tensor, energy: float | None) -> Tensor:
    """`start` on the matrix's device; raises as `truncated_svd` says."""
    short = min(matrix.shape)
    if start.ndim != 2 or start.shape[0] != short or not start.is_floating_point():
        raise ValueError(
            f"start is {start.dtype} {tuple(start.shape)}: a matrix {tuple(matrix.shape)} needs "
            f"floating columns [{short}, k]"
        )
    if energy is not None:
        raise ValueError("start= with energy=: every singular value is needed; leave start out")
    check_finite("start", start)
    return start.detach().to(matrix.device)


def spectrum(matrix: Tensor) -> Spectrum:
    """All singular values and the short side's singular vectors (right if m >= n, else left) of [m,
    n].

    Values below 1.5e-8 of the largest are rounding where the solver is gram.

    Raises:
        ValueError, MergeError: as `truncated_svd`.
    """
    scaled, exponent = _scaled(matrix)
    with full_precision(scaled):
        squares, vectors, solver = exact(scaled if scaled.shape[0] >= scaled.shape[1] else scaled.T)
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
    # aminmax, as abs() would be one more matrix
    peak = torch.stack(torch.aminmax(wide)).abs().amax() if wide.numel() else torch.zeros(())
    exponent = int(torch.frexp(peak.double()).exponent)
    return _unscaled(wide, -exponent), exponent


def _unscaled(tensor: Tensor, exponent: int) -> Tensor:
    """tensor times 2^exponent, in two factors because one may overflow float32."""
    half = exponent // 2
    return (tensor * 2.0**half).mul_(2.0 ** (exponent - half))


def _rank_for(energy: float, squares: Tensor) -> int:
    """The least rank whose squared singular values sum to `energy` of all."""
    cumulative = squares.cumsum(0)
    wanted = cumulative[-1] * energy * (1 - ROUNDING)
    return min(int(torch.searchsorted(cumulative, wanted)) + 1, squares.numel())


def _assemble(scaled: Tensor, found: Leading, exponent: int, total: float) -> TruncatedSVD:
    """TruncatedSVD from the leading vectors [p, r] of the short side of `scaled`."""
    vectors = found.vectors.to(scaled.dtype)
    is_tall = scaled.shape[0] >= scaled.shape[1]
    image = found.image if found.image is not None else (scaled if is_tall else scaled.T) @ vectors
    if is_tall:
        left, right = image, vectors.T
    else:
        # Columns of A^T U are orthogonal, so R is diagonal up to rounding; Q stays orthonormal
        # where a value is 0.
        q, r = torch.linalg.qr(image)
        left, right = vectors @ r.T, q.T
    values = torch.linalg.vector_norm(left, dim=0, dtype=torch.float64)
    left = _unscaled(left, exponent).float()
    check_finite("left singular vectors", left)
    return TruncatedSVD(
        left=left,
        right=right.float().contiguous(),
        singular_values=_unscaled(values.sort(descending=True).values, exponent),
        total_energy=total * 4.0**exponent,
        solver=found.solver,
    )
