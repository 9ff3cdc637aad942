"""A delta as planes of signs with scales: the greedy encoders.

    delta ~ sum_p diag(row_p) S_p diag(column_p),   S_p = sign(residual_p) in {-1, +1}
    residual_0 = delta,   residual_{p+1} = residual_p - plane_p

Scales with the least Frobenius error: the mean of |residual| over a row, a column or the matrix;
for row and column scales together ("rank1") the best u v^T for |residual|, by alternating least
squares (a power iteration; all entries stay >= 0). The sign of zero is +1 and zeros count in the
means. A sparse delta keeps its zeros: two planes of half the scale cancel where it is 0. Source:
BitDelta, arXiv 2402.10193; further planes are its fidelity ablation. Not here: planes fitted
together (refit.py), low-rank parts (encoding.py), scale distillation, files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from soupkit.forms import SignScale
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import pack, packed_width

# Hands out some rows of the delta, float32 [rows, K]; asked for the same rows several times.
Read = Callable[[slice], Tensor]

# Entries of a block of rows: its float32, float64 and bool copies are the only temporaries. With
# 2^19 the allocator asks the system for fresh pages every time: a sum over signs takes 3 times as
# long (512 x 1024, one thread of a 2-core AMD EPYC).
_BLOCK_ENTRIES = 1 << 17
# Passes of the rank-1 fit, and the share of the kept energy that one must win for another to
# follow. |delta| is far from a second rank, so that 3 or 4 are usual.
_RANK1_PASSES = 20
_RANK1_WIN = 1e-6


def row_blocks(shape: tuple[int, int]) -> Iterator[slice]:
    """Slices of the rows of [N, K] whose blocks hold about _BLOCK_ENTRIES entries."""
    out_features, in_features = shape
    rows = max(1, _BLOCK_ENTRIES // max(1, in_features))
    for start in range(0, out_features, rows):
        yield slice(start, min(start + rows, out_features))


def encode_signs(
    read: Read, shape: tuple[int, int], *, scale: SignScale, planes: int, device: torch.device
) -> Delta:
    """Encode a delta greedily, plane by plane, each on the residual of the planes before it.

    Args:
        read: rows of the delta, on `device`; asked for once a plane, for rank-1 scales about four
            times.
        shape: [N, K] of the delta.
    Returns:
        A Delta with signs alone. Column scales are near 1, their size is in the scale beside them
        (a power of two for "column"), so that float16 can hold them. A zero row, or a zero matrix,
        has scale 0.
    """
    found: list[Delta] = []
    for _ in range(planes):
        found.append(_encode_plane(_residual(read, found), shape, scale, device))
    return _stacked(found)


def encode_sparse(read: Read, shape: tuple[int, int], *, device: torch.device) -> Delta:
    """Support and sign: scale_i sign(delta_ij) where delta_ij is not 0, exactly 0 elsewhere.

    scale_i = mean of |delta_ij| over the support of row i, 0 for a zero row. Args: as encode_signs.
    """
    out_features, in_features = shape
    packed = torch.empty(2, out_features, packed_width(in_features), dtype=torch.uint8)
    packed = packed.to(device)
    scale = torch.zeros(2, out_features, device=device)
    for rows in row_blocks(shape):
        block = read(rows)
        positive, support = block >= 0, block != 0
        packed[0, rows] = pack(positive)
        packed[1, rows] = pack(positive == support)
        total = block.abs().sum(dim=1, dtype=torch.float64)
        scale[:, rows] = (total / support.sum(dim=1).clamp(min=1)).float() / 2
    return Delta(out_features, in_features, packed, scale)


def _stacked(planes: Sequence[Delta]) -> Delta:
    """Deltas of one plane each as one of several."""
    first = planes[0]
    if len(planes) == 1:
        return first
    packed, scale, columns = (
        [part for part in parts if part is not None]
        for parts in zip(
            *((one.packed, one.scale, one.column_scale) for one in planes), strict=True
        )
    )
    return Delta(
        first.out_features,
        first.in_features,
        torch.cat(packed),
        torch.cat(scale),
        torch.cat(columns) if columns else None,
    )


def _residual(read: Read, planes: Sequence[Delta]) -> Read:
    """What the planes so far leave of the delta."""
    if not planes:
        return read
    found = _stacked(planes)
    return lambda rows: read(rows) - found.narrow(0, rows.start, rows.stop - rows.start).dense()


def _encode_plane(
    read: Read, shape: tuple[int, int], scale: SignScale, device: torch.device
) -> Delta:
    """The signs of a residual and their best scales."""
    packed = torch.empty(1, shape[0], packed_width(shape[1]), dtype=torch.uint8, device=device)
    has_columns = scale in ("column", "rank1")
    by_row, by_column = _write_signs(read, shape, packed[0], has_columns=has_columns)
    if scale == "matrix":
        mean = by_row.sum() / max(1, math.prod(shape))
        return Delta(*shape, packed, mean.float().reshape(1, 1))
    if scale == "row":
        return Delta(*shape, packed, (by_row / max(1, shape[1])).float().unsqueeze(0))
    if scale == "column":
        means = (by_column / max(1, shape[0])).float().unsqueeze(0)
        return Delta(*shape, packed, *split_columns(means))
    u, v = _fit_rank1(read, shape, by_row, by_column)
    return Delta(*shape, packed, u.float().unsqueeze(0), v.float().unsqueeze(0))


def _write_signs(
    read: Read, shape: tuple[int, int], packed: Tensor, *, has_columns: bool
) -> tuple[Tensor, Tensor]:
    """Pack the signs into `packed`; returns sums of |.|, float64: by row [N], by column [K], the
    latter zeros where they are not asked for (a tenth of the time of plain row scales).
    """
    by_row = torch.zeros(shape[0], dtype=torch.float64, device=packed.device)
    by_column = torch.zeros(shape[1], dtype=torch.float64, device=packed.device)
    for rows in row_blocks(shape):
        block = read(rows)
        packed[rows] = pack(block)
        magnitude = block.abs()
        by_row[rows] = magnitude.sum(dim=1, dtype=torch.float64)
        if has_columns:
            by_column += magnitude.sum(dim=0, dtype=torch.float64)
    return by_row, by_column


def split_columns(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Column scales [P, K] as a power of two each, [P, 1], times what has its mean in [1, 2).

    The product is the column scales to the bit; zeros for a plane of zeros.
    """
    mean = scales.double().sum(dim=1, keepdim=True) / max(1, scales.shape[1])
    exponent = torch.frexp(mean).exponent - 1
    one = torch.where(mean > 0, torch.ldexp(torch.ones_like(mean), exponent), 0.0)
    columns = scales.double() / torch.where(one > 0, one, 1.0)
    return one.float(), columns.float()


def _fit_rank1(
    read: Read, shape: tuple[int, int], by_row: Tensor, by_column: Tensor
) -> tuple[Tensor, Tensor]:
    """u [N], v [K], float64, >= 0, the mean of v 1, with the least || |D| - u v^T ||_F.

    Each half step is the least-squares optimum, so the error never grows, and the start is the
    better one of row scales alone and column scales alone.

    Args:
        by_row, by_column: sums of |D|.
    """
    ones = torch.ones_like(by_column)
    if float(by_row.sum()) == 0.0:
        return by_row, ones
    is_by_row = float(by_row.square().sum()) * shape[0] >= (
        float(by_column.square().sum()) * shape[1]
    )
    v, kept = ones if is_by_row else by_column, 0.0
    for _ in range(_RANK1_PASSES):
        v = v / v.amax()
        image, fresh = torch.empty_like(by_row), torch.zeros_like(by_column)
        for rows in row_blocks(shape):
            magnitude = read(rows).abs().double()
            image[rows] = magnitude @ v
            fresh += magnitude.T @ image[rows]
        # image / (v v) is the best u for v, and it keeps this; fresh is the best v for that u.
        before, kept = kept, float(image.square().sum() / v.square().sum())
        v = fresh
        if kept <= before * (1 + _RANK1_WIN):
            break
    mean = v.mean()
    return image * (mean / image.square().sum()), v / mean
