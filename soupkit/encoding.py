"""Encodings of a delta: how it is stored, what that costs in bytes, and what it loses.

    delta ~ sum_p diag(row_p) S_p diag(column_p) + up down

    name                      signs                               low-rank part
    "row" "matrix" "column"   one plane, a scale each             none
    "rank1"                   row and column scales, u v^T        none
    "row-x3"                  three planes, greedy                none
    "row-x3-refit"            three planes, fitted together       none
    "lowrank-16"              none                                of the delta
    "lowrank-16+row"          of what the low rank leaves         of the delta
    "row+lowrank-16"          of the delta                        of what the signs leave
    "sparse"                  of the support, exact zeros beside  none

Signs: signs.py and refit.py; the low-rank part is the truncated SVD (svd.py) with sqrt(S) in both
factors, rounded to its stored dtype, and signs that follow are of what the rounded one leaves. On
which tensors to spend which bytes is not decided here, nor what is stored whole. Source of the
combinations: BitDelta, arXiv 2402.10193; low rank and signs: D-QReLO, arXiv 2604.16940.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from soupkit.forms import Encoding as Encoding
from soupkit.lora import balanced
from soupkit.numeric import check_finite, full_precision, rounded, squared_norm
from soupkit.refit import refit
from soupkit.signs import Read, encode_signs, encode_sparse, row_blocks
from soupkit.svd import truncated_svd
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import packed_width

FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stored_bytes(
    shape: tuple[int, int], encoding: Encoding, factor_dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of all tensors of a delta [N, K] so encoded, factors in `factor_dtype`."""
    out_features, in_features = shape
    planes = encoding.stored_planes
    row_scales = out_features if encoding.scale in ("row", "rank1") else 1
    column_scales = in_features if encoding.scale in ("column", "rank1") else 0
    signs = out_features * packed_width(in_features)
    rank = min(encoding.rank, out_features, in_features)
    factors = rank * (out_features + in_features) * factor_dtype.itemsize
    return planes * (signs + 4 * (row_scales + column_scales)) + factors


def encode(
    delta: Tensor,
    encoding: Encoding,
    *,
    factor_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Delta:
    """Encode a delta.

    Args:
        delta: float32 [N, K], finite.
        factor_dtype: of the low-rank part as it is stored: float32, bfloat16 or float16.
        seed: of the SVD's sketch, where one is used.
    Returns:
        A Delta on delta's device, `stored_bytes` long; the same bits for the same input.
    Raises:
        ValueError: wrong dtype or shape. MergeError: an entry is not finite, or a factor is beyond
            the range of `factor_dtype`.
    """
    if delta.ndim != 2 or delta.dtype != torch.float32:
        raise ValueError(f"delta {delta.dtype} {tuple(delta.shape)}: needs a float32 matrix [N, K]")
    check_finite("delta", delta)
    delta = delta.detach()
    shape = (delta.shape[0], delta.shape[1])
    return encode_blocks(
        lambda rows: delta[rows],
        shape,
        encoding,
        factor_dtype=factor_dtype,
        seed=seed,
        device=delta.device,
    )


def encode_blocks(
    read: Read,
    shape: tuple[int, int],
    encoding: Encoding,
    *,
    factor_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | None = None,
) -> Delta:
    """`encode` of a delta that is handed out in blocks of rows, so that it need not be in memory.

    For a low-rank part the whole delta is held, as the SVD needs it. Else it is asked for in blocks
    of about a hundred thousand entries: once each for row scales, otherwise once a plane and round.

    Args:
        read: rows of the delta, float32 and finite, on `device`; every time the same.
        shape: [N, K] of the delta.
        device: of the blocks; None: the CPU.
        encoding, factor_dtype, seed: as for `encode`.
    Raises:
        ValueError, MergeError: as `encode`.
    """
    if factor_dtype not in FACTOR_DTYPES:
        raise ValueError(f"factor_dtype={factor_dtype}: use one of {FACTOR_DTYPES}")
    device = torch.device("cpu") if device is None else device
    if not encoding.rank:
        return _encode_signs(read, shape, encoding, device)
    if not encoding.low_rank_first:
        signs = _encode_signs(read, shape, encoding, device)
        left = torch.empty(shape, device=device)
        for rows in row_blocks(shape):
            left[rows] = read(rows) - decode_rows(signs, rows)
        low = _encode_low_rank(left, encoding.rank, factor_dtype, seed)
        return replace(signs, up=low.up, down=low.down)
    low = _encode_low_rank(read(slice(0, shape[0])), encoding.rank, factor_dtype, seed)
    if not encoding.planes:
        return low
    signs = _encode_signs(lambda rows: read(rows) - decode_rows(low, rows), shape, encoding, device)
    return replace(signs, up=low.up, down=low.down)


def decode(encoded: Delta) -> Tensor:
    """The delta that `encoded` stands for: float32 [N, K]."""
    shape = (encoded.out_features, encoded.in_features)
    device = encoded.parts[0].device if encoded.parts else None
    decoded = torch.empty(shape, device=device)
    for rows in row_blocks(shape):
        decoded[rows] = decode_rows(encoded, rows)
    return decoded


def decode_rows(encoded: Delta, rows: slice) -> Tensor:
    """Some rows of `decode(encoded)`: float32 [rows, K]."""
    part = encoded.narrow(0, rows.start, rows.stop - rows.start)
    with full_precision(encoded.parts[0] if encoded.parts else torch.empty(0)):
        return part.dense()


def residual_energy(delta: Tensor, encoded: Delta) -> float:
    """||delta - decode(encoded)||^2 / ||delta||^2 in float64; 0.0 for a zero delta.

    Raises:
        ValueError: the shapes differ.
    """
    shape = (encoded.out_features, encoded.in_features)
    if tuple(delta.shape) != shape:
        raise ValueError(
            f"delta of shape {tuple(delta.shape)} against an encoding of {shape}; compare a delta "
            "with its own"
        )
    total = squared_norm(delta)
    if total == 0.0:
        return 0.0
    lost = sum(squared_norm(delta[rows] - decode_rows(encoded, rows)) for rows in row_blocks(shape))
    return lost / total


def _encode_signs(
    read: Read, shape: tuple[int, int], encoding: Encoding, device: torch.device
) -> Delta:
    """The planes of an encoding, without its low-rank part."""
    if encoding.scale != "row" or not shape[0]:
        return _encode_planes(read, shape, encoding, device)
    # Rows do not know of each other: a block is read once for all its planes.
    planes = encoding.stored_planes
    packed = torch.empty(planes, shape[0], packed_width(shape[1]), dtype=torch.uint8, device=device)
    scale = torch.empty(planes, shape[0], device=device)
    for rows in row_blocks(shape):
        block = read(rows)
        size = (rows.stop - rows.start, shape[1])
        part = _encode_planes(block.__getitem__, size, encoding, device)
        assert part.packed is not None
        assert part.scale is not None
        # Copied at once: parts kept until the end would lie between the blocks' temporaries and
        # have the heap grow with the matrix.
        packed[:, rows], scale[:, rows] = part.packed, part.scale
    return Delta(*shape, packed, scale)


def _encode_planes(
    read: Read, shape: tuple[int, int], encoding: Encoding, device: torch.device
) -> Delta:
    """The same for rows that may share scales."""
    if encoding.is_sparse:
        return encode_sparse(read, shape, device=device)
    signs = encode_signs(read, shape, scale=encoding.scale, planes=encoding.planes, device=device)
    return refit(read, shape, signs, scale=encoding.scale) if encoding.refit else signs


def _encode_low_rank(delta: Tensor, rank: int, dtype: torch.dtype, seed: int) -> Delta:
    """The truncated SVD of the whole delta as factors in their stored dtype."""
    factors = balanced(truncated_svd(delta, rank=rank, seed=seed))
    up = rounded("low-rank factor up", factors.b, dtype).contiguous()
    down = rounded("low-rank factor down", factors.a, dtype).contiguous()
    return Delta(delta.shape[0], delta.shape[1], up=up, down=down)
