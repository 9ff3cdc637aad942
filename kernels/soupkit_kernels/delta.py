"""What one variant adds to one linear layer, in any of the stored encodings.

    D = sum_p diag(scale_p) S_p diag(column_scale_p) + up down

S_p is a matrix of +-1, packed (bitpack.py). A scale per row or per matrix, per column beside it,
a low-rank part, several planes: every encoding of a bundle is a case of this sum. Sources:
BitDelta, arXiv 2402.10193 (signs); LoRA, arXiv 2106.09685 (up down). Not here: what acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soupkit_kernels.bitpack import pack, packed_width, unpack


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The delta of one matrix; N out_features, K in_features, P planes, R rank.

    Args:
        packed: uint8 [P, N, ceil(K / 8)]; None without signs.
        scale: float32 [P, N], a row each, or [P, 1], one a matrix.
        column_scale: float32 [P, K], or None for ones.
        up, down: [N, R] and [R, K] in one floating dtype; None without a low-rank part.
    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """

    out_features: int
    in_features: int
    packed: Tensor | None = None
    scale: Tensor | None = None
    column_scale: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        rows, columns = self.out_features, self.in_features
        if (self.packed is None) != (self.scale is None):
            raise ValueError("packed and scale come together: give both or neither")
        if (self.up is None) != (self.down is None):
            raise ValueError("up and down come together: give both or neither")
        if self.packed is not None:
            planes = self.packed.shape[0] if self.packed.ndim else 0
            _check("packed", self.packed, torch.uint8, (planes, rows, packed_width(columns)))
            assert self.scale is not None
            wide = (planes, 1) if self.scale.shape[-1:] == (1,) else (planes, rows)
            _check("scale", self.scale, torch.float32, wide)
        if self.column_scale is not None:
            if not self.planes:
                raise ValueError("column_scale without packed signs scales nothing: leave it out")
            _check("column_scale", self.column_scale, torch.float32, (self.planes, columns))
        if self.up is not None and self.down is not None:
            rank = self.up.shape[-1] if self.up.ndim else 0
            if not self.up.is_floating_point():
                raise ValueError(f"up is {self.up.dtype}: needs a floating dtype")
            _check("up", self.up, self.up.dtype, (rows, rank))
            _check("down", self.down, self.up.dtype, (rank, columns))
        if len({part.device for part in self.parts}) > 1:
            raise ValueError(f"parts on {[str(p.device) for p in self.parts]}: move them together")

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that are there."""
        every = (self.packed, self.scale, self.column_scale, self.up, self.down)
        return tuple(part for part in every if part is not None)

    @property
    def planes(self) -> int:
        """P, 0 without signs."""
        return 0 if self.packed is None else self.packed.shape[0]

    @property
    def rank(self) -> int:
        """R, 0 without a low-rank part."""
        return 0 if self.up is None else self.up.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def narrow(self, axis: int, start: int, length: int) -> Delta:
        """Rows (axis 0) or columns (axis 1) from `start` on: a tensor-parallel shard.

        The shards of a layer's rows, side by side, or of its columns, summed, are the whole: signs
        are cut in the order of files, where a shard may begin inside a byte.

        Raises:
            ValueError: the axis is neither, or the range is outside the matrix.
        """
        limit = (self.out_features, self.in_features)[axis] if axis in (0, 1) else -1
        if not 0 <= start <= start + length <= limit:
            raise ValueError(
                f"axis {axis} from {start}, {length} long: needs axis 0 of {self.out_features} or "
                f"1 of {self.in_features}"
            )
        end, packed, scale = start + length, self.packed, self.scale
        if axis == 0:
            if packed is not None and scale is not None:
                packed = packed[:, start:end]
                scale = scale if scale.shape[1] == 1 else scale[:, start:end]
            up = None if self.up is None else self.up[start:end]
            return replace(self, out_features=length, packed=packed, scale=scale, up=up)
        if packed is not None:
            packed = _cut_columns(packed, start, end, self.in_features)
        column_scale = None if self.column_scale is None else self.column_scale[:, start:end]
        down = None if self.down is None else self.down[:, start:end]
        return replace(
            self, in_features=length, packed=packed, column_scale=column_scale, down=down
        )

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum itself, [N, K], computed in `dtype`; differentiable by scales and factors."""
        device = self.parts[0].device if self.parts else None
        total: Tensor | None = None
        for plane in range(self.planes):
            assert self.packed is not None
            assert self.scale is not None
            term = self.scale[plane].to(dtype).unsqueeze(1) * unpack(
                self.packed[plane], self.in_features, dtype
            )
            if self.column_scale is not None:
                term = term * self.column_scale[plane].to(dtype)
            total = term if total is None else total + term
        if self.up is not None and self.down is not None:
            low = self.up.to(dtype) @ self.down.to(dtype)
            total = low if total is None else total + low
        if total is None:
            return torch.zeros(self.out_features, self.in_features, dtype=dtype, device=device)
        return total


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)}: needs {dtype} {shape}")


def _cut_columns(packed: Tensor, start: int, end: int, num_signs: int) -> Tensor:
    """The signs of columns start..end-1, packed anew where they begin inside a byte."""
    if start % 8 == 0:
        return packed[..., start // 8 : packed_width(end)]
    return pack(unpack(packed, num_signs, torch.int8)[..., start:end])
