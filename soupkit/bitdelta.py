"""BitDelta: a delta as packed signs and scales of a row or of the whole matrix.

The first encodings that bundles held, on top of encoding.py and signs.py, which hold the rest: how
scales are found, and a tensor of any layout as one matrix. Source: BitDelta, arXiv 2402.10193. Not
here: scale distillation, files, what to encode at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit import encoding
from soupkit.config import MAX_PLANES, Scale, check_choice, check_count
from soupkit.delta import as_matrices, from_matrices, layout
from soupkit.numeric import check_finite
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import packed_width


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
    check_choice("scale", scale, ("row", "matrix"))
    check_count("planes", planes, least=1, most=MAX_PLANES)
    encoded = encoding.encode(delta, encoding.Encoding(planes=planes, scale=scale))
    assert encoded.packed is not None
    assert encoded.scale is not None
    return SignDelta(encoded.packed, encoded.scale, encoded.in_features)


def decode(encoded: SignDelta) -> Tensor:
    """The delta that `encoded` stands for: float32 [out, in]."""
    return encoding.decode(_as_delta(encoded))


def residual_energy(delta: Tensor, encoded: SignDelta) -> float:
    """||delta - decode(encoded)||^2 / ||delta||^2 in float64; 0.0 for a zero delta.

    Raises:
        ValueError: the shapes differ.
    """
    return encoding.residual_energy(delta, _as_delta(encoded))


def _as_delta(encoded: SignDelta) -> Delta:
    """The same, as what all other encodings are."""
    return Delta(encoded.out_features, encoded.in_features, encoded.signs, encoded.scale)


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
