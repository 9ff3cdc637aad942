"""The multi-variant linear in plain torch: where the C library (native.py) cannot be had.

Tokens are grouped by variant; the base product of all groups that need one is a single F.linear.
- few tokens of a variant: y = x W^T + scale * (S x), the signs unpacked in x's dtype.
- many: y = x (W + scale S)^T, the effective weight built and used a block of rows at a time.

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

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels.bitpack import unpack, unpack_into

# From so many tokens of one variant on, building its effective weight is the cheaper way.
_MANY_TOKENS_16_BIT = 64
_MANY_TOKENS_WIDE = 4
# Entries of a block of rows, the scratch of a call; 2^17 to 2^19 were slower.
_BLOCK_ENTRIES = 1 << 20
# Signs unpacked at a time for few tokens; bounds the scratch of a large head.
_SIGNS_ENTRIES = 1 << 22


def torch_delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    packed: Sequence[Tensor],  # per variant uint8 [P, N, ceil(K / 8)]
    scale: Sequence[Tensor],  # per variant float32 [P, N] or [P, 1]
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """The equation of naive.py; arguments are as `op.delta_linear` checks them."""
    tokens = x.reshape(variant_index.numel(), x.shape[-1])
    index = variant_index.reshape(-1)
    variants = sorted(set(index.tolist()))
    if len(variants) == 1:
        y = _one_variant(tokens, weight, packed, scale, variants[0], bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])
    y = tokens.new_empty(tokens.shape[0], weight.shape[0])
    groups = {variant: (index == variant).nonzero().squeeze(1) for variant in variants}
    limit = _many_tokens(x.dtype)
    many = {v for v, rows in groups.items() if v >= 0 and rows.numel() >= limit}
    plain = [rows for variant, rows in groups.items() if variant not in many]
    if plain:
        rows = torch.cat(plain)
        y[rows] = F.linear(tokens[rows], weight, bias)
    for variant, rows in groups.items():
        if variant in many:
            y[rows] = _effective(tokens[rows], weight, packed[variant], scale[variant], bias)
        elif variant >= 0:
            y[rows] = _add_delta(y[rows], tokens[rows], packed[variant], scale[variant])
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _many_tokens(dtype: torch.dtype) -> int:
    """Tokens of a variant from which its effective weight is built."""
    return _MANY_TOKENS_16_BIT if dtype.itemsize == 2 else _MANY_TOKENS_WIDE


def _one_variant(
    x: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    variant: int,
    bias: Tensor | None,
) -> Tensor:
    """All tokens of one variant, or all of the base: no rows to gather."""
    if variant < 0:
        return F.linear(x, weight, bias)
    if x.shape[0] >= _many_tokens(x.dtype):
        return _effective(x, weight, packed[variant], scale[variant], bias)
    return _add_delta(F.linear(x, weight, bias), x, packed[variant], scale[variant])


def _row_blocks(num_rows: int, num_columns: int, entries: int) -> list[slice]:
    """Slices of rows of about `entries` entries each."""
    step = max(1, entries // max(1, num_columns))
    return [slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step)]


def _add_delta(
    y: Tensor,  # [T, N] in x's dtype
    x: Tensor,  # [T, K]
    packed: Tensor,  # [P, N, ceil(K / 8)]
    scale: Tensor,  # [P, N] or [P, 1]
) -> Tensor:  # [T, N] in x's dtype
    """y + sum_p scale_p * (S_p x), scaled and added in float32 or wider."""
    # In float16 a sum of signed inputs may pass 65504 before it is scaled.
    part = x.float() if x.dtype == torch.float16 else x
    wide = torch.promote_types(x.dtype, torch.float32)
    entries = _SIGNS_ENTRIES if part.dtype.itemsize == 2 else _BLOCK_ENTRIES
    total = y.to(wide, copy=True)
    for plane, alpha in zip(packed, scale.to(wide), strict=True):
        for rows in _row_blocks(plane.shape[0], x.shape[1], entries):
            product = F.linear(part, unpack(plane[rows], x.shape[1], part.dtype))
            total[:, rows].addcmul_(product.to(wide), alpha if alpha.numel() == 1 else alpha[rows])
    return total.to(x.dtype)


def _effective(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    packed: Tensor,  # [P, N, ceil(K / 8)]
    scale: Tensor,  # [P, N] or [P, 1]
    bias: Tensor | None,
) -> Tensor:  # [T, N] in x's dtype
    """x times the effective weight, which is summed in float32 or wider and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_rows, num_columns = weight.shape
    alpha = scale.to(wide).expand(-1, num_rows).unsqueeze(2)
    blocks = _row_blocks(num_rows, num_columns, _BLOCK_ENTRIES)
    # Allocated once: memory fresh from the system costs more than the arithmetic (page faults).
    total = x.new_empty(blocks[0].stop if blocks else 0, num_columns, dtype=wide)
    rounded = total if wide == x.dtype else torch.empty_like(total, dtype=x.dtype)
    y = x.new_empty(x.shape[0], num_rows)
    for rows in blocks:
        size = rows.stop - rows.start
        block = unpack_into(packed[0, rows], total[:size]).mul_(alpha[0, rows])
        for plane in range(1, packed.shape[0]):
            signs = unpack(packed[plane, rows], num_columns, wide)
            block.addcmul_(signs, alpha[plane, rows])
        block.add_(weight[rows])
        effective = block if wide == x.dtype else rounded[:size].copy_(block)
        y[:, rows] = F.linear(x, effective, None if bias is None else bias[rows])
    return y
