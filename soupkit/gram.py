"""Scales by layer-wise least squares: the least error of a layer's output, from its inputs' Gram.

    G = X^T X [K, K];   min over scales  ||X (delta - D)^T||^2 = sum_i (delta_i - D_i) G (...)^T
    one plane of row scales:  alpha_i = (S_i G delta_i^T) / (S_i G S_i^T);   G = I: the mean rule

Row and matrix scales of all planes are one small linear system a row or a matrix, solved exactly;
column scales are a system of K unknowns a plane, plane after plane; rank-1 scales take turns.
Every solve starts from the scales there are and can only lower the error. The low-rank part stays.
float64 throughout, in blocks of rows. Source: the closed form of activation-aware scales, as in
algorithms 1.2; no logits and no gradients. Not here: where G comes from.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from soupkit.encoding import decode_rows
from soupkit.forms import Encoding
from soupkit.signs import Read, row_blocks
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import unpack

# Sweeps where scales are found in turns, and the ridge of a system relative to its mean diagonal:
# it decides only where inputs say nothing, and there the scale stays.
_SWEEPS = 3
_RIDGE = 1e-9


def fit_scales(read: Read, encoded: Delta, encoding: Encoding, gram: Tensor) -> Delta:
    """`encoded` with the scales that `encoding` has fitted to a layer's inputs.

    Args:
        read: rows of the true delta, float32 [rows, K] on the CPU.
        encoded: it, encoded; must have signs.
        gram: float64 [K, K], symmetric and positive semidefinite.
    Raises:
        ValueError: gram has another shape or dtype.
    """
    size = encoded.in_features
    if gram.dtype != torch.float64 or tuple(gram.shape) != (size, size):
        raise ValueError(
            f"gram {gram.dtype} {tuple(gram.shape)}: needs a float64 matrix [{size}, {size}]"
        )
    fit = _Fit(read, encoded, gram, is_sparse=encoding.is_sparse)
    has_rows, has_columns = encoding.scale != "column", encoding.scale in ("column", "rank1")
    is_in_turns = has_columns and (has_rows or encoded.planes > 1)
    for _ in range(_SWEEPS if is_in_turns else 1):
        if has_rows:
            fit.rows(is_matrix=fit.scale.shape[1] == 1)
        for plane in range(encoded.planes if has_columns else 0):
            fit.columns(plane)
    return fit.result()


def output_error(read: Read, encoded: Delta, gram: Tensor) -> float:
    """||X (delta - D)^T||^2 for G = X^T X, float64."""
    error = 0.0
    for rows in row_blocks((encoded.out_features, encoded.in_features)):
        left = (read(rows) - decode_rows(encoded, rows)).double()
        error += float(((left @ gram) * left).sum())
    return error


class _Fit:
    """Scales in float64 on their way."""

    def __init__(self, read: Read, encoded: Delta, gram: Tensor, *, is_sparse: bool) -> None:
        assert encoded.scale is not None
        self._read, self._encoded, self._gram = read, encoded, gram
        self._is_sparse = is_sparse
        self.scale = encoded.scale.double()
        columns = encoded.column_scale
        self._columns = None if columns is None else columns.double()

    def rows(self, *, is_matrix: bool) -> None:
        """The best row scales, or matrix scales, for the column scales there are."""
        total: tuple[Tensor, Tensor] | None = None
        for rows in row_blocks(self._shape):
            # A row's system in its change: A change = b, A [rows, P, P], b [rows, P].
            terms = self._unscaled(rows)
            left = self._left(rows, self._scaled(terms, rows))
            images = terms @ self._gram
            matrix = torch.einsum("prk,qrk->rpq", images, terms)
            wanted = torch.einsum("prk,rk->rp", images, left)
            if not is_matrix:
                self.scale[:, rows] += _solve(matrix, wanted).T
            elif total is None:
                total = matrix.sum(0), wanted.sum(0)
            else:
                total = total[0] + matrix.sum(0), total[1] + wanted.sum(0)
        if total is not None:
            self.scale += _solve(*total).unsqueeze(1)

    def columns(self, plane: int) -> None:
        """The best column scales of one plane, all else as it is."""
        assert self._columns is not None
        size = self._shape[1]
        matrix = torch.zeros(size, size, dtype=torch.float64)
        wanted = torch.zeros(size, dtype=torch.float64)
        for rows in row_blocks(self._shape):
            left = self._left(rows, self._scaled(self._unscaled(rows), rows))
            term = self._signs(rows)[plane] * self._row_scales(rows)[plane].unsqueeze(1)
            matrix += term.T @ term
            wanted += (term * (left @ self._gram)).sum(0)
        self._columns[plane] += _solve(matrix.mul_(self._gram), wanted)

    def result(self) -> Delta:
        """The delta with the scales found, rounded to float32."""
        columns = None if self._columns is None else self._columns.float()
        return replace(self._encoded, scale=self.scale.float(), column_scale=columns)

    @property
    def _shape(self) -> tuple[int, int]:
        return self._encoded.out_features, self._encoded.in_features

    def _signs(self, rows: slice) -> Tensor:
        """float64 [P, rows, K]."""
        assert self._encoded.packed is not None
        return unpack(self._encoded.packed[:, rows], self._shape[1], torch.float64)

    def _row_scales(self, rows: slice) -> Tensor:
        """float64 [P, rows]."""
        return self.scale.expand(-1, self._shape[0])[:, rows]

    def _unscaled(self, rows: slice) -> Tensor:
        """What the row scales multiply: [P, rows, K], or [1, rows, K] of a sparse delta, whose two
        planes have one scale.
        """
        signs = self._signs(rows)
        if self._columns is not None:
            signs = signs * self._columns.unsqueeze(1)
        return signs.sum(0, keepdim=True) if self._is_sparse else signs

    def _scaled(self, terms: Tensor, rows: slice) -> Tensor:
        """The sum of the planes, [rows, K]."""
        scales = self._row_scales(rows)[: terms.shape[0]]
        return (terms * scales.unsqueeze(-1)).sum(0)

    def _left(self, rows: slice, planes: Tensor) -> Tensor:
        """What the planes and the low-rank part leave of the delta, float64 [rows, K]."""
        left = self._read(rows).double() - planes
        up, down = self._encoded.up, self._encoded.down
        if up is not None and down is not None:
            left -= up[rows].double() @ down.double()
        return left


def _solve(matrix: Tensor, wanted: Tensor) -> Tensor:
    """(matrix + ridge)^-1 wanted, of matrices [..., n, n] that are positive semidefinite."""
    size = matrix.shape[-1]
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    # A matrix of zeros has zeros beside it: any ridge gives no change.
    ridge = torch.where(mean > 0, mean * _RIDGE, 1.0)
    eye = torch.eye(size, dtype=matrix.dtype)
    factor = torch.linalg.cholesky(matrix + ridge[..., None, None] * eye)
    return torch.cholesky_solve(wanted.unsqueeze(-1), factor).squeeze(-1)
