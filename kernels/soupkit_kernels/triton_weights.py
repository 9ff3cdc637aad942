"""Weights of a variant on a GPU: written out whole, a row a token, and the first low-rank product.

    reconstruct       out[n, k] = round(W[n, k] + D_v[n, k])
    embedding_rows    out[t, k] = round(W[ids[t], k] + D_v[ids[t], k])     v = variant of token t
    low_rank_product  low[t, r] = sum_k down_v[r, k] x[t, k]
    D_v[n, k] = sum_p row_v[p, n] S_v[p, n, k] column_v[p, k] + sum_r up_v[n, r] down_v[r, k]

Sums are in float32, in this order: ((W + term of plane 0) + term of plane 1) + .. + low-rank sum; a
term is row x column, rounded, with the sign of its bit. Fused multiply-adds are off: without a
low-rank part the result is torch's bit for bit on every machine. It is rounded once.

The arena (arena.py) is in LANE order (lane.py): of eight neighbouring k a thread finds the signs in
bits j and 16 + j of the four words of a block of 128, so it loads 16 bytes of words beside 16 bytes
of weights (neighbours share the words in L1), and a shift and one LOP3 put a bit onto a float32.

What a slot holds is read from the table, so that a captured graph follows it.

Legend: N out_features, K in_features, T tokens, R rank.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from soupkit_kernels import arena
from soupkit_kernels.plan import Groups

# A kernel reads globals only if they are constexpr.
_WIDTH = tl.constexpr(arena.NUM_COLUMNS)
_PLANES, _PACKED, _SCALE = map(tl.constexpr, (arena.PLANES, arena.PACKED, arena.SCALE))
_COLUMN, _RANK = map(tl.constexpr, (arena.COLUMN, arena.RANK))
_DOWN, _UP = map(tl.constexpr, (arena.DOWN, arena.UP))
_TOP_BIT = tl.constexpr(-(1 << 31))

# Tiles: 8 weights of a thread are 16 bytes; four such loads a thread are in flight.
_ROWS, _COLUMNS = 16, 256
_ROW_COLUMNS = 1024
# The low-rank product of few tokens: two rows of `down` a program, for many programs.
_RANK_ROWS, _RANK_COLUMNS = 2, 2048
# Of many: tokens that share a variant share its `down`.
_MANY_TOKENS = 65
_RANK_TILE, _TOKEN_TILE, _INPUT_TILE = 16, 64, 64


@triton.jit
def find_part(memory, entry, column: tl.constexpr):
    """Where a part of a slot begins; all begin at multiples of 128 bytes."""
    size: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
    return memory + tl.multiple_of(tl.load(entry + column) // size, 128 // size)


@triton.jit
def load_signs(words, rows, is_row, start, K, BLOCK_K: tl.constexpr):
    """The signs of [rows, start .. start + BLOCK_K) as the top bits of int32; 1 means +1.

    words: of one plane in LANE order. rows: int64 [ROWS]. start: a multiple of 128.
    """
    ROWS: tl.constexpr = rows.shape[0]
    BLOCKS: tl.constexpr = BLOCK_K // 128
    blocks = tl.cdiv(K, 128)
    block = start // 128 + tl.arange(0, BLOCKS)
    word = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = (rows * (blocks * 4))[:, None, None, None] + word[None, :, None, :]
    is_there = is_row[:, None, None, None] & (block < blocks)[None, :, None, None]
    # The sixteen threads of a block load the same 16 bytes: no exchange through shared memory.
    at = tl.broadcast_to(at, (ROWS, BLOCKS, 16, 4))
    lanes = tl.load(words + at, mask=tl.broadcast_to(is_there, (ROWS, BLOCKS, 16, 4)), other=0)
    j = tl.arange(0, 16)[None, None, :, None]
    pairs = tl.join(lanes << (31 - j), lanes << (15 - j))
    return tl.reshape(pairs, (ROWS, BLOCK_K)) & _TOP_BIT


@triton.jit
def add_planes(
    total, words, floats, values, entry, rows, is_row, start, N, K,
    HAS_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total [ROWS, BLOCK_K] float32 + the signed planes of a slot, from column `start` on."""
    k = start + tl.arange(0, BLOCK_K)
    row_words = tl.cdiv(K, 128) * 4
    signs = find_part(words, entry, _PACKED)
    scales = find_part(floats, entry, _SCALE)
    columns = find_part(values, entry, _COLUMN) + k
    for p in tl.range(tl.load(entry + _PLANES).to(tl.int32)):
        plane = tl.cast(p, tl.int64)
        bits = load_signs(signs + plane * N * row_words, rows, is_row, start, K, BLOCK_K)
        scale = tl.load(scales + plane * N + rows, mask=is_row, other=0.0)
        # The arena holds -column: a bit of 1 turns the sign of scale x -column.
        column = tl.full((BLOCK_K,), -1.0, tl.float32)
        if HAS_COLUMNS:
            at = columns + plane * (row_words * 32)
            column = tl.load(at, mask=k < K, other=0.0).to(tl.float32)
        term = scale[:, None] * column[None, :]
        total += (term.to(tl.int32, bitcast=True) ^ bits).to(tl.float32, bitcast=True)
    return total


@triton.jit(do_not_specialize=["slot"])
def reconstruct_kernel(
    weight, out,  # [N, K], the last axis contiguous
    words, floats, values,  # the arena's bytes as int32, float32 and the weight's dtype
    table,  # int64 [slots, 7]
    slot, N, K, stride_weight, stride_out,
    HAS_SIGNS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_LOW_RANK: tl.constexpr,  # any slot
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, tiles of K)."""
    dtype: tl.constexpr = weight.dtype.element_ty
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row = rows < N
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    is_there = is_row[:, None] & (k < K)[None, :]
    base = tl.load(weight + rows[:, None] * stride_weight + k[None, :], mask=is_there, other=0.0)
    total = base.to(tl.float32)
    entry = table + slot.to(tl.int64) * _WIDTH
    if HAS_SIGNS:
        total = add_planes(
            total, words, floats, values, entry, rows, is_row, start, N, K, HAS_COLUMNS, BLOCK_K
        )
    if HAS_LOW_RANK:
        rank = tl.load(entry + _RANK).to(tl.int32)
        ups = find_part(values, entry, _UP) + rows[:, None]
        downs = find_part(values, entry, _DOWN) + k[None, :]
        low = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for first in range(0, rank, BLOCK_R):
            r = (first + tl.arange(0, BLOCK_R)).to(tl.int64)
            up_mask = is_row[:, None] & (r < rank)[None, :]
            up = tl.load(ups + r[None, :] * N, mask=up_mask, other=0.0)
            down_mask = (r < rank)[:, None] & (k < K)[None, :]
            down = tl.load(downs + r[:, None] * K, mask=down_mask, other=0.0)
            low = tl.dot(up, down, low, input_precision="ieee")
        # Without a rank -0.0 stays what it is.
        total = tl.where(rank > 0, total + low, total)
    tl.store(out + rows[:, None] * stride_out + k[None, :], total.to(dtype), mask=is_there)


@triton.jit(do_not_specialize=["slots"])
def embedding_rows_kernel(
    ids, variants,  # integers [T]
    weight, out,  # [N, K] and [T, K], the last axis contiguous
    words, floats, values, table,  # as above
    slots, N, K, stride_weight, stride_out,
    HAS_SIGNS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_LOW_RANK: tl.constexpr,  # any slot
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of K)."""
    dtype: tl.constexpr = weight.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + token).to(tl.int64)
    variant = tl.load(variants + token).to(tl.int64)
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    total = tl.full((BLOCK_K,), float("nan"), tl.float32)
    if (row >= 0) & (row < N) & (variant < slots):
        base = weight + row * stride_weight + k
        total = tl.load(base, mask=k < K, other=0.0).to(tl.float32)
        entry = table + variant * _WIDTH
        if HAS_SIGNS and variant >= 0:
            # A tile of one row.
            rows = row + tl.arange(0, 1)
            tile = add_planes(
                total[None, :], words, floats, values, entry, rows, rows < N, start, N, K,
                HAS_COLUMNS, BLOCK_K,
            )  # fmt: skip
            total = tl.reshape(tile, (BLOCK_K,))
        if HAS_LOW_RANK and variant >= 0:
            rank = tl.load(entry + _RANK).to(tl.int32)
            ups = find_part(values, entry, _UP) + row
            downs = find_part(values, entry, _DOWN) + k
            low = tl.zeros((BLOCK_K,), tl.float32)
            for r in tl.range(rank):
                at = tl.cast(r, tl.int64)
                down = tl.load(downs + at * K, mask=k < K, other=0.0).to(tl.float32)
                low += tl.load(ups + at * N).to(tl.float32) * down
            total = tl.where(rank > 0, total + low, total)
    tl.store(out + token * stride_out + k, total.to(dtype), mask=k < K)


@triton.jit(do_not_specialize=["slots", "rank"])
def low_rank_rows_kernel(
    x,  # [T, K], the last axis contiguous
    values, table,  # as above
    order, variants,  # int32 [n]
    low,  # float32 [T, rank]
    slots, rank, K, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (n, tiles of rank): one token and BLOCK_R rows of its variant's `down`."""
    token = tl.load(order + tl.program_id(0)).to(tl.int64)
    variant = tl.load(variants + tl.program_id(0)).to(tl.int64)
    r = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    has_slot = (variant >= 0) & (variant < slots)
    entry = table + tl.where(has_slot, variant, 0) * _WIDTH
    own_rank = tl.load(entry + _RANK, mask=has_slot, other=0)
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    if tl.program_id(1) * BLOCK_R < own_rank:
        downs = find_part(values, entry, _DOWN) + r[:, None] * K
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            mask = (r < own_rank)[:, None] & (k < K)[None, :]
            down = tl.load(downs + k[None, :], mask=mask, other=0.0).to(tl.float32)
            row = tl.load(x + token * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
            total += down * row[None, :]
        # An inf or NaN of x must not reach the rows that `down` does not have.
        total = tl.where((r < own_rank)[:, None], total, 0.0)
    tl.store(low + token * rank + r, tl.sum(total, axis=1), mask=r < rank)


@triton.jit(do_not_specialize=["slots", "rank", "count"])
def low_rank_tiles_kernel(
    x, values, table, order, variants, low,  # as above
    slots, rank, count, K, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of n = count, tiles of rank): BLOCK_M tokens, one variant after the other."""
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(order + at, mask=at < count, other=0).to(tl.int64)
    own = tl.load(variants + at, mask=at < count, other=-1)
    own = tl.where((own >= 0) & (own < slots), own, -1)
    r = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    result = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    # Sorted by variant: the last is the greatest, and one with tokens follows another.
    variant = tl.max(own, axis=0)
    while variant >= 0:
        entry = table + variant.to(tl.int64) * _WIDTH
        own_rank = tl.load(entry + _RANK)
        is_own = own == variant
        if tl.program_id(1) * BLOCK_R < own_rank:
            downs = find_part(values, entry, _DOWN) + r[:, None] * K
            total = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
            for start in range(0, K, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                mask = (r < own_rank)[:, None] & (k < K)[None, :]
                down = tl.load(downs + k[None, :], mask=mask, other=0.0)
                mask = is_own[None, :] & (k < K)[:, None]
                columns = tl.load(x + token[None, :] * stride_x + k[:, None], mask=mask, other=0.0)
                total = tl.dot(down, columns, total, input_precision="ieee")
            result = tl.where(is_own[None, :] & (r < own_rank)[:, None], total, result)
        variant = tl.max(tl.where(own < variant, own, -1), axis=0)
    is_there = (r < rank)[:, None] & (at < count)[None, :]
    tl.store(low + token[None, :] * rank + r[:, None], result, mask=is_there)


def reconstruct(
    weight: Tensor, data: Tensor, table: Tensor, slot: int, out: Tensor, *,
    planes: int, has_columns: bool, rank: int,
) -> Tensor:  # fmt: skip
    """The effective weight of a slot's variant, written to `out`; an empty slot's is the base.

    Args:
        weight: [N, K], bfloat16, float16 or float32, the last axis contiguous.
        data, table: of the layer's arena in LANE order: uint8, and int64 [slots, 7].
        out: [N, K] in the weight's dtype, the last axis contiguous; may be the weight itself.
        planes, has_columns, rank: of the arena.
    Returns:
        out.
    Raises:
        ValueError: no such slot.
    """
    if not 0 <= slot < table.shape[0]:
        raise ValueError(f"slot {slot}: must be in 0..{table.shape[0] - 1}")
    n, k = weight.shape
    if weight.numel() == 0:
        return out
    with _on(weight):
        reconstruct_kernel[triton.cdiv(n, _ROWS), triton.cdiv(k, _COLUMNS)](
            weight, out, data.view(torch.int32), data.view(torch.float32), data.view(weight.dtype),
            table, slot, n, k, weight.stride(0), out.stride(0),
            HAS_SIGNS=planes > 0, HAS_COLUMNS=has_columns, HAS_LOW_RANK=rank > 0,
            BLOCK_N=_ROWS, BLOCK_K=_COLUMNS, BLOCK_R=_RANK_TILE,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def embedding_rows(
    ids: Tensor, weight: Tensor, data: Tensor, table: Tensor, variants: Tensor, out: Tensor, *,
    planes: int, has_columns: bool, rank: int,
) -> Tensor:  # fmt: skip
    """Rows of the effective weight of each token's variant, written to `out`.

    Rows of the base and of empty slots are exact copies. An id or a variant out of range gives NaN
    and reads nothing.

    Args:
        ids, variants: int64 or int32 [T]; variant -1 is the base.
        out: [T, K] in the weight's dtype, the last axis contiguous; the others as `reconstruct`.
    Returns:
        out.
    """
    n, k = weight.shape
    if out.numel() == 0:
        return out
    with _on(weight):
        embedding_rows_kernel[out.shape[0], triton.cdiv(k, _ROW_COLUMNS)](
            ids.contiguous(), variants.contiguous(), weight, out,
            data.view(torch.int32), data.view(torch.float32), data.view(weight.dtype), table,
            table.shape[0], n, k, weight.stride(0), out.stride(0),
            HAS_SIGNS=planes > 0, HAS_COLUMNS=has_columns, HAS_LOW_RANK=rank > 0,
            BLOCK_K=_ROW_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def low_rank_product(
    x: Tensor, values: Tensor, table: Tensor, groups: Groups, *, rank: int
) -> Tensor:
    """What the low-rank parts make of x before `up`: one launch, the same result every time.

    Args:
        x: [T, K], the last axis contiguous.
        values: the arena's data in x's dtype.
        table: of the arena.
        groups: of the plan; `order` names each row of x at most once.
        rank: of the arena, at least 1.
    Returns:
        float32 [T, rank]. Row t, for every token t of the groups, is down_v x[t], then zeros where
        v has a smaller rank. The base, empty slots and variants out of range have zeros, and their
        x is not read. Rows of other tokens are not written.
    """
    low = torch.empty(x.shape[0], rank, dtype=torch.float32, device=x.device)
    count, k = groups.order.numel(), x.shape[1]
    if count == 0:
        return low
    arguments = (x, values, table, groups.order, groups.variants, low, table.shape[0], rank)
    with _on(x):
        if count < _MANY_TOKENS:
            low_rank_rows_kernel[count, triton.cdiv(rank, _RANK_ROWS)](
                *arguments, k, x.stride(0),
                BLOCK_R=_RANK_ROWS, BLOCK_K=_RANK_COLUMNS, num_warps=4,
            )  # fmt: skip
        else:
            low_rank_tiles_kernel[triton.cdiv(count, _TOKEN_TILE), triton.cdiv(rank, _RANK_TILE)](
                *arguments, count, k, x.stride(0),
                BLOCK_M=_TOKEN_TILE, BLOCK_R=_RANK_TILE, BLOCK_K=_INPUT_TILE,
                num_warps=4, num_stages=3,
            )  # fmt: skip
    return low


def _on(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
