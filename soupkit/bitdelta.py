"""BitDelta: a delta as packed signs and scales.

    delta ~ sum_p scale_p * S_p,   S_p = sign(residual_p) in {-1, +1},   scale_p = mean |residual_p|
    residual_0 = delta,   residual_{p+1} = residual_p - scale_p * S_p

The mean of absolute values is the scale with the least Frobenius error, for a row ("row") or for
the whole matrix ("matrix", the paper's form). The sign of zero is +1 and zeros count in the mean.
Source: BitDelta, arXiv 2402.10193; planes beyond the first are its fidelity ablation. Not here:
scale distillation, files, what to encode at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.config import MAX_PLANES, Scale, check_choice, check_count
from soupkit.delta import as_matrices, from_matrices, layout
from soupkit.numeric import check_finite, squared_norm
from soupkit_kernels.bitpack import pack, packed_width, unpack

# Entries of a block of rows: its float32 and float64 copies are the only temporaries.
_BLOCK_ENTRIES = 1 << 19


@dataclass(frozen=True, slots=True, eq=False)
class SignDelta:
    """One delta matrix in packed form.

    Args:
        signs: uint8 [planes, out, ceil(in / 8)], least significant bit first, 1 means +1.
        scale: float32 [planes, out] (a row each) or [planes, 1] (one a matrix).
        in_features: columns of the matrix; bits beyond it are never read.
    Raises:
        ValueError: a dtype or shape does not fit the others.
    """

    signs: Tensor
    scale: Tensor
    in_features: int

    def __post_init__(self) -> None:
        """Check that the three belong together."""
        if self.signs.dtype != torch.uint8 or self.scale.dtype != torch.float32:
            raise ValueError(
                f"signs {self.signs.dtype}, scale {self.scale.dtype}: needs uint8 and float32"
            )
        if self.signs.ndim != 3 or self.signs.shape[2] != packed_width(self.in_features):
            raise ValueError(
                f"signs of shape {tuple(self.signs.shape)} for in_features={self.in_features}: "
                f"needs [planes, out, {packed_width(self.in_features)}]"
            )
        if tuple(self.scale.shape) not in ((self.planes, self.out_features), (self.planes, 1)):
            raise ValueError(
                f"scale of shape {tuple(self.scale.shape)}: "
                f"needs [{self.planes}, {self.out_features}] or [{self.planes}, 1]"
            )

    @property
    def planes(self) -> int:
        """Number of sign planes."""
        return self.signs.shape[0]

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.signs.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of signs and scales."""
        return self.signs.nbytes + self.scale.nbytes


def _row_blocks(out_features: int, in_features: int) -> Iterator[slice]:
    """Slices of rows whose blocks hold about _BLOCK_ENTRIES entries."""
    rows = max(1, _BLOCK_ENTRIES // max(1, in_features))
    for start in range(0, out_features, rows):
        yield slice(start, min(start + rows, out_features))


def _decode_rows(signs: Tensor, scale: Tensor, rows: slice, in_features: int) -> Tensor:
    """sum_p scale_p * S_p for some rows: float32 [rows, in]; no planes: zeros."""
    total = torch.zeros(rows.stop - rows.start, in_features, device=signs.device)
    for plane_signs, plane_scale in zip(signs, scale, strict=True):
        alpha = plane_scale if plane_scale.numel() == 1 else plane_scale[rows]
        total.addcmul_(unpack(plane_signs[rows], in_features), alpha.unsqueeze(1))
    return total


def _encode_plane(delta: Tensor, signs: Tensor, scale: Tensor, plane: int) -> Tensor:
    """Write the signs of what earlier planes leave; return its row means of |.|, float64 [out]."""
    out_features, in_features = delta.shape
    means = torch.zeros(out_features, dtype=torch.float64, device=delta.device)
    for rows in _row_blocks(out_features, in_features):
        residual = delta[rows]
        if plane:
            residual = residual - _decode_rows(signs[:plane], scale[:plane], rows, in_features)
        signs[plane, rows] = pack(residual)
        if in_features:
            means[rows] = residual.abs().mean(dim=1, dtype=torch.float64)
    return means


def _check_delta(delta: Tensor, scale: Scale, planes: int) -> None:
    """Raise ValueError or MergeError unless `delta` and the options can be encoded."""
    check_choice("scale", scale, ("row", "matrix"))
    check_count("planes", planes, least=1, most=MAX_PLANES)
    if delta.ndim != 2 or delta.dtype != torch.float32:
        raise ValueError(
            f"delta {delta.dtype} {tuple(delta.shape)}: needs a float32 matrix [out, in]"
        )
    check_finite("delta", delta)


def encode(delta: Tensor, *, scale: Scale = "row", planes: int = 1) -> SignDelta:
    """Encode a delta greedily, plane by plane, each on the residual of the planes before it.

    Args:
        delta: float32 [out, in], finite.
        scale: "row" or "matrix".
        planes: 1 to 4; the residual energy never grows with it.
    Returns:
        A SignDelta on delta's device. A zero row (or matrix) has scale 0.
    Raises:
        ValueError: wrong dtype, shape or option. MergeError: an entry is not finite.
    """
    _check_delta(delta, scale, planes)
    out_features, in_features = delta.shape
    delta = delta.detach()
    signs = delta.new_empty((planes, out_features, packed_width(in_features)), dtype=torch.uint8)
    scales = delta.new_zeros((planes, out_features if scale == "row" else 1))
    for plane in range(planes):
        means = _encode_plane(delta, signs, scales, plane)
        if scale == "row":
            scales[plane] = means.float()
        elif out_features:
            scales[plane] = means.mean().float()
    return SignDelta(signs, scales, in_features)


def decode(encoded: SignDelta) -> Tensor:
    """The delta that `encoded` stands for: float32 [out, in]."""
    rows = slice(0, encoded.out_features)
    return _decode_rows(encoded.signs, encoded.scale, rows, encoded.in_features)


def residual_energy(delta: Tensor, encoded: SignDelta) -> float:
    """||delta - decode(encoded)||^2 / ||delta||^2 in float64; 0.0 for a zero delta.

    Raises:
        ValueError: the shapes differ.
    """
    if tuple(delta.shape) != (encoded.out_features, encoded.in_features):
        raise ValueError(
            f"delta of shape {tuple(delta.shape)} against an encoding of "
            f"({encoded.out_features}, {encoded.in_features}); compare a delta with its own"
        )
    total = squared_norm(delta)
    if total == 0.0:
        return 0.0
    lost = 0.0
    for rows in _row_blocks(*delta.shape):
        lost += squared_norm(
            delta[rows] - _decode_rows(encoded.signs, encoded.scale, rows, encoded.in_features)
        )
    return lost / total


def encode_tensor(name: str, delta: Tensor, *, scale: Scale = "row", planes: int = 1) -> SignDelta:
    """Encode a delta of any layout as the matrix [batch * out, in] of its `as_matrices` view.

    Experts with scale="matrix" get one scale an expert, repeated on its rows.

    Raises:
        ValueError: a vector, a wrong dtype or option. MergeError: an entry is not finite.
    """
    matrices = as_matrices(name, delta)
    batch, out_features, in_features = matrices.shape
    check_finite(name, delta)
    if scale == "row" or batch == 1:
        return encode(
            matrices.reshape(batch * out_features, in_features), scale=scale, planes=planes
        )
    encoded = [encode(matrix, scale=scale, planes=planes) for matrix in matrices]
    signs = torch.cat([one.signs for one in encoded], dim=1)
    scales = torch.cat([one.scale.expand(planes, out_features) for one in encoded], dim=1)
    return SignDelta(signs, scales.contiguous(), in_features)


def decode_tensor(name: str, encoded: SignDelta, shape: Sequence[int]) -> Tensor:
    """The inverse of `encode_tensor`: float32 of `shape`.

    Raises:
        ValueError: `shape` is a vector's or has another number of entries.
    """
    if layout(name, shape) == "vector":
        raise ValueError(f"{name}: shape {tuple(shape)} is no matrix; vectors are stored whole")
    return from_matrices(name, decode(encoded), shape)
