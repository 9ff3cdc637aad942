"""Shared by the kernel tests: deltas of every encoding, and what they mean in float64."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soupkit_kernels import Delta, pack

# planes, has column scales, rank, one scale a matrix
Encoding = tuple[int, bool, int, bool]
ENCODINGS: tuple[Encoding, ...] = (
    (1, False, 0, False),
    (1, False, 0, True),
    (3, False, 0, False),
    (1, True, 0, False),
    (2, True, 0, True),
    (0, False, 3, False),
    (1, False, 2, False),
    (2, True, 1, False),
)


def make_delta(
    num_rows: int, num_columns: int, encoding: Encoding, generator: torch.Generator
) -> Delta:
    """Scales are a few percent of a weight of 0.05, as real deltas are; some are 0 or negative."""
    planes, has_columns, rank, is_matrix = encoding
    packed = scale = columns = up = down = None
    if planes:
        signs = torch.randn(planes, num_rows, num_columns, generator=generator)
        packed = pack(signs)
        width = 1 if is_matrix else num_rows
        scale = torch.randn(planes, width, generator=generator) * 0.005
        scale = torch.where(torch.rand(scale.shape, generator=generator) < 0.1, 0.0, scale)
    if has_columns:
        columns = torch.randn(planes, num_columns, generator=generator)
    if rank:
        up = torch.randn(num_rows, rank, generator=generator) * 0.05
        down = torch.randn(rank, num_columns, generator=generator) * 0.05
    return Delta(num_rows, num_columns, packed, scale, columns, up, down)


def dense(delta: Delta | None, shape: tuple[int, int]) -> np.ndarray:
    """The delta in float64, the signs by numpy's own unpacking."""
    total = np.zeros(shape)
    if delta is None:
        return total
    for plane in range(delta.planes):
        assert delta.packed is not None
        assert delta.scale is not None
        bits = np.unpackbits(delta.packed[plane].numpy(), axis=1, count=shape[1], bitorder="little")
        term = delta.scale[plane].double().numpy()[:, None] * (bits * 2.0 - 1.0)
        if delta.column_scale is not None:
            term = term * delta.column_scale[plane].double().numpy()
        total = total + term
    if delta.up is not None and delta.down is not None:
        total = total + delta.up.double().numpy() @ delta.down.double().numpy()
    return total


def effective(weight: Tensor, deltas: Sequence[Delta | None]) -> list[np.ndarray]:
    """The float64 effective weight of each variant; the last, index -1, is the base."""
    base = weight.double().numpy()
    return [base + dense(delta, base.shape) for delta in (*deltas, None)]


def reference(
    x: Tensor,  # [..., K]
    weight: Tensor,
    deltas: Sequence[Delta | None],
    index: Tensor,  # [...]
    bias: Tensor | None = None,
) -> Tensor:  # [..., N] float64
    matrices = effective(weight, deltas)
    flat, rows = x.double().reshape(-1, x.shape[-1]).numpy(), index.reshape(-1).tolist()
    y = np.stack([matrices[v] @ row for row, v in zip(flat, rows, strict=True)])
    if bias is not None:
        y = y + bias.double().numpy()
    return torch.from_numpy(y).reshape(*x.shape[:-1], weight.shape[0])
