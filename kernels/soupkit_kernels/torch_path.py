"""The multi-variant layers in plain torch: where the C library (native.py) cannot be had.

Any device and dtype, every encoding, signs in the order of files. Tokens are grouped by variant;
the base product of all groups that need one is a single F.linear.
- few tokens of a variant: y = x W^T + scale * (S (column * x)) + up (down x), the signs unpacked in
  x's dtype.
- many: y = x (W + S)^T + up (down x), S the signs with their scales, the sum W + S built and used
  a block of rows at a time.
- an embedding unpacks the rows asked for, and no others.

Measured with torch 2.13 and MKL on one thread of an x86 CPU with AVX512_BF16: median of 15 runs in
thread CPU time, alternating with F.linear of the base, weights rotating over 60 MB. Time over that
of the base, for M tokens of one variant and for four variants in turn (`SOUPKIT_KERNEL=torch
soupkit bench kernel` prints them anew; a busy machine gives up to twice these):

    N x K        dtype     one: M = 1   4    8   64  512   four: M = 4   8   64  512
    576 x 576    bfloat16       2.2  2.0  2.0  1.7  1.1         7.5  6.7  4.6  2.0
    1536 x 576   bfloat16       1.6  1.7  1.7  1.9  1.2         5.6  4.9  3.7  1.7
    2048 x 2048  bfloat16       2.1  2.2  2.4  1.9  1.2         6.0  5.5  3.2  1.8
    576 x 576    float32        1.4  1.4  1.3  1.2  1.1         4.9  5.3  2.7  1.5
    1536 x 576   float32        1.8  1.5  1.5  1.3  1.1         3.5  4.0  2.3  1.4
    2048 x 2048  float32        2.7  1.8  1.6  1.2  1.0         4.9  4.3  2.4  1.3

Tried and slower: rows of a 256 x 8 or 65536 x 16 table by F.embedding, shifts and masks, sums of a
table of x per byte by embedding_bag (wins for float32 at 2048 x 2048, M = 1 only), int8 products
(aten._weight_int8pack_mm), the whole effective weight at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels.arena import DeltaArena
from soupkit_kernels.bitpack import unpack, unpack_into
from soupkit_kernels.delta import Delta
from soupkit_kernels.plan import Plan

# From so many tokens of one variant on, building its effective weight is the cheaper way.
_MANY_TOKENS_16_BIT = 64
_MANY_TOKENS_WIDE = 4
# Entries of a block of rows, the scratch of a call; 2^17 to 2^19 were slower.
_BLOCK_ENTRIES = 1 << 20
# Signs unpacked at a time for few tokens; bounds the scratch of a large head.
_SIGNS_ENTRIES = 1 << 22


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    arena: DeltaArena,
    step: Plan,
) -> Tensor:  # [T, N] in x's dtype
    """The equation of naive.py; arguments are as `op.delta_linear` checks them."""
    changed = list(_changed(arena, step))
    if not changed:
        return F.linear(x, weight, bias)
    if len(changed) == 1 and changed[0][1] is None:
        return _one_variant(x, weight, bias, changed[0][0])
    y = x.new_empty(x.shape[0], arena.out_features)
    limit = _many_tokens(x.dtype)
    is_plain = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    for delta, rows in changed:
        assert rows is not None
        if rows.numel() >= limit and delta.planes:
            y[rows] = _effective(x[rows], weight, bias, delta)
            is_plain[rows] = False
    rows = is_plain.nonzero().squeeze(1)
    if rows.numel():
        y[rows] = F.linear(x[rows], weight, bias)
    for delta, rows in changed:
        if rows is not None and (rows.numel() < limit or not delta.planes):
            y[rows] = _add_delta(y[rows], x[rows], delta)
    return y


def add(y: Tensor, x: Tensor, arena: DeltaArena, step: Plan) -> None:
    """y[t] += x[t] D_v^T, rounded once; tokens of the base keep theirs.

    Args:
        y: [T, N] contiguous, in x's dtype. x: [T, K].
    """
    for delta, rows in _changed(arena, step):
        if rows is None:
            y.copy_(_add_delta(y, x, delta))
        else:
            y[rows] = _add_delta(y[rows], x[rows], delta)


def embedding(ids: Tensor, weight: Tensor, arena: DeltaArena, step: Plan) -> Tensor:
    """Rows `ids` [T] of W + D_v, summed in float32 or wider and rounded once: [T, K]."""
    out = F.embedding(ids, weight)
    for delta, rows in _changed(arena, step):
        if rows is None:
            return _rows(ids, out, delta)
        out[rows] = _rows(ids[rows], out[rows], delta)
    return out


def _changed(arena: DeltaArena, step: Plan) -> Iterator[tuple[Delta, Tensor | None]]:
    """The delta of each variant that has one here, and its rows; None: all of them."""
    for variant, count in step.tokens_by_variant().items():
        delta = arena.delta(variant) if variant >= 0 else None
        if delta is not None:
            whole = count == step.num_tokens
            yield delta, None if whole else (step.index == variant).nonzero().squeeze(1)


def _many_tokens(dtype: torch.dtype) -> int:
    """Tokens of a variant from which its effective weight is built."""
    return _MANY_TOKENS_16_BIT if dtype.itemsize == 2 else _MANY_TOKENS_WIDE


def _one_variant(x: Tensor, weight: Tensor, bias: Tensor | None, delta: Delta) -> Tensor:
    """All tokens of one variant: no rows to gather."""
    if x.shape[0] >= _many_tokens(x.dtype) and delta.planes:
        return _effective(x, weight, bias, delta)
    return _add_delta(F.linear(x, weight, bias), x, delta)


def _row_blocks(num_rows: int, num_columns: int, entries: int) -> list[slice]:
    """Slices of rows of about `entries` entries each."""
    step = max(1, entries // max(1, num_columns))
    return [slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step)]


def _add_delta(
    y: Tensor,  # [T, N] in x's dtype
    x: Tensor,  # [T, K]
    delta: Delta,
) -> Tensor:  # [T, N] in x's dtype
    """y + x D^T, scaled and added in float32 or wider."""
    # In float16 a sum of signed inputs may pass 65504 before it is scaled.
    part = x.float() if x.dtype == torch.float16 else x
    wide = torch.promote_types(x.dtype, torch.float32)
    entries = _SIGNS_ENTRIES if part.dtype.itemsize == 2 else _BLOCK_ENTRIES
    total = y.to(wide, copy=True)
    for plane in range(delta.planes):
        assert delta.packed is not None
        assert delta.scale is not None
        signs, alpha, given = delta.packed[plane], delta.scale[plane].to(wide), part
        if delta.column_scale is not None:
            given = (x.to(wide) * delta.column_scale[plane].to(wide)).to(part.dtype)
        for rows in _row_blocks(signs.shape[0], x.shape[1], entries):
            product = F.linear(given, unpack(signs[rows], x.shape[1], part.dtype))
            total[:, rows].addcmul_(product.to(wide), alpha[rows])
    return _add_low_rank(total, x, delta).to(x.dtype)


def _add_low_rank(total: Tensor, x: Tensor, delta: Delta) -> Tensor:
    """total + up (down x), in place, in total's dtype: two thin products."""
    if delta.up is not None and delta.down is not None:
        thin = F.linear(x.to(total.dtype), delta.down.to(total.dtype))
        total.addmm_(thin, delta.up.T.to(total.dtype))
    return total


def _effective(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,
    delta: Delta,
) -> Tensor:  # [T, N] in x's dtype
    """x times base and signs, summed in float32 or wider and rounded once; then low rank."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_rows, num_columns = weight.shape
    blocks = _row_blocks(num_rows, num_columns, _BLOCK_ENTRIES)
    # Allocated once: memory fresh from the system costs more than the arithmetic (page faults).
    total = x.new_empty(blocks[0].stop if blocks else 0, num_columns, dtype=wide)
    rounded = total if wide == x.dtype else torch.empty_like(total, dtype=x.dtype)
    y = x.new_empty(x.shape[0], num_rows)
    for rows in blocks:
        size = rows.stop - rows.start
        block = _sign_rows(delta, rows, total[:size]).add_(weight[rows])
        effective = block if wide == x.dtype else rounded[:size].copy_(block)
        y[:, rows] = F.linear(x, effective, None if bias is None else bias[rows])
    return y if delta.up is None else _add_low_rank(y.to(wide), x, delta).to(x.dtype)


def _rows(ids: Tensor, base: Tensor, delta: Delta) -> Tensor:
    """base [T, K], rows `ids` of a weight, with those of a delta; in base's dtype."""
    wide = torch.promote_types(base.dtype, torch.float32)
    total = _sign_rows(delta, ids, torch.empty_like(base, dtype=wide))
    if delta.up is not None and delta.down is not None:
        total.addmm_(delta.up[ids].to(wide), delta.down.to(wide))
    return total.add_(base).to(base.dtype)


def _sign_rows(delta: Delta, rows: slice | Tensor, out: Tensor) -> Tensor:
    """Write rows of a delta's scaled signs into `out` [n, K], float32 or wider, and return it."""
    wide = out.dtype
    for plane in range(delta.planes):
        assert delta.packed is not None
        assert delta.scale is not None
        signs = delta.packed[plane][rows]
        alpha = delta.scale[plane][rows].to(wide).unsqueeze(1)
        column = None if delta.column_scale is None else delta.column_scale[plane].to(wide)
        if plane == 0:
            unpack_into(signs, out).mul_(alpha)
            if column is not None:
                out.mul_(column)
        else:
            term = unpack(signs, out.shape[1], wide)
            out.addcmul_(term if column is None else term * column, alpha)
    if not delta.planes:
        out.zero_()
    return out
