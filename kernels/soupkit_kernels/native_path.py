"""The multi-variant linear on a CPU through the C library of native.py.

Tokens are grouped by variant, where that pays:
- few of a variant: all such tokens, of any variants and of the base, in one fused pass that reads
  the weights and the bits once (`soupkit_decode`);
- many of one: its effective weight, a block of rows at a time, and F.linear;
- many of the base: F.linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels import native

# From so many tokens of one variant on, building its effective weight is the cheaper way. Measured
# where `soupkit bench kernel` was (README.md), one variant and four, 2048 x 2048 and 4096 x 4096.
MANY_TOKENS = {"portable": 3, "avx2": 10, "avx512": 20, "avx512_bf16": 16}
# A block of rows, the scratch of a call. Smaller ones make F.linear pack x more often: bfloat16,
# 512 tokens, 2048 x 2048, 1 / 2 / 4 / 8 MB: 1.12 / 1.10 / 1.08 / 1.06 of the base; 32 MB pays page
# faults, 1.3 at 4096 x 4096.
BLOCK_BYTES = 1 << 23


def why_not(library: native.Library | str, weight: Tensor, packed: Sequence[Tensor]) -> str | None:
    """Why such tensors cannot go through the library; None where they can."""
    if isinstance(library, str):
        return library
    if not library.supports(weight.dtype):
        return f"{weight.dtype} on {library.isa_name(weight.dtype)}"
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return "the rows of the weight are not contiguous"
    planes = max((signs.shape[0] for signs in packed), default=0)
    if planes > native.MAX_PLANES:
        return f"{planes} planes, more than {native.MAX_PLANES}"
    return None


def fused_delta_linear(
    library: native.Library,
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    packed: Sequence[Tensor],  # per variant uint8 [P, N, ceil(K / 8)]
    scale: Sequence[Tensor],  # per variant float32 [P, N] or [P, 1]
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """The equation of naive.py; arguments as `op.delta_linear` and `why_not` let them through."""
    tokens = x.reshape(variant_index.numel(), x.shape[-1])
    index = variant_index.reshape(-1)
    counts = Counter(index.tolist())
    limit = MANY_TOKENS[library.isa_name(x.dtype)]
    many = [variant for variant, count in counts.items() if count >= limit]
    if len(counts) == len(many) == 1 or counts.keys() <= {-1}:
        y = _one(library, tokens, weight, packed, scale, next(iter(counts), -1), bias)
    elif not many:
        y = _few(library, tokens, weight, packed, scale, index, bias)
    else:
        y = tokens.new_empty(tokens.shape[0], weight.shape[0])
        groups = [index == variant for variant in many]
        groups.append(~torch.stack(groups).any(dim=0))
        for group in groups:
            if bool(group.any()):
                y[group] = fused_delta_linear(
                    library, tokens[group], weight, packed, scale, index[group], bias
                )
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _few(
    library: native.Library,
    x: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    index: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """All tokens in one pass over the weights."""
    rows = packed[0].stride(1)
    if any(signs.stride(2) != 1 or signs.stride(1) != rows for signs in packed):
        packed = [signs.contiguous() for signs in packed]
    y = library.decode(x, weight, packed, scale, index.contiguous())
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _one(
    library: native.Library,
    x: Tensor,
    weight: Tensor,
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    variant: int,
    bias: Tensor | None,
) -> Tensor:
    """Many tokens of one variant, or any of the base."""
    if variant < 0:
        return F.linear(x, weight, bias)
    signs, alpha = packed[variant], scale[variant]
    if signs.stride(2) != 1:
        signs = signs.contiguous()
    num_rows, width = weight.shape
    step = min(num_rows, max(1, BLOCK_BYTES // max(1, width * weight.itemsize)))
    scratch = x.new_empty(step, width)
    y = x.new_empty(x.shape[0], num_rows)
    for at in range(0, num_rows, step):
        rows = slice(at, min(at + step, num_rows))
        block = scratch[: rows.stop - at]
        library.reconstruct(
            weight[rows], signs[:, rows], alpha if alpha.shape[1] == 1 else alpha[:, rows], block
        )
        y[:, rows] = F.linear(x, block, None if bias is None else bias[rows])
    return y
