"""The multi-variant layers through the Triton kernels: on a GPU, or interpreted.

Tokens in groups take the fused kernel; many tokens of one variant take its effective weight,
written to a scratch of the layer's shape, and cuBLAS. The scratch comes from torch's allocator,
which gives the layers of a step the same memory and keeps that of streams and graphs apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels import gpu
from soupkit_kernels.arena import DeltaArena
from soupkit_kernels.plan import Plan
from soupkit_kernels.triton_weights import embedding_rows, reconstruct


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    arena: DeltaArena,
    plan: Plan,
) -> Tensor:  # [T, N] in x's dtype
    """The equation of naive.py; arguments as op.py has checked them."""
    y: Tensor | None = None
    if plan.groups is None and len(plan.long) == 1 and plan.long[0].rows is None:
        return F.linear(x, _effective(weight, arena, plan.long[0].variant), bias)
    if plan.groups is not None:
        y = gpu.linear(
            x, weight, bias, arena.data, arena.table, plan.groups, planes=arena.planes,
            has_columns=arena.has_columns, rank=arena.rank,
        )  # fmt: skip
    if y is None:
        y = x.new_empty(x.shape[0], weight.shape[0])
    for part in plan.long:
        assert part.rows is not None, "a long run beside others names its rows"
        product = F.linear(x[part.rows], _effective(weight, arena, part.variant), bias)
        y.index_copy_(0, part.rows, product)
    return y


def add(
    y: Tensor,  # [T, N], contiguous
    x: Tensor,  # [T, K]
    arena: DeltaArena,
    plan: Plan,
) -> None:
    """y[t] += x[t] D_v^T in place."""
    if plan.groups is not None:
        gpu.linear(
            x, None, None, arena.data, arena.table, plan.groups, planes=arena.planes,
            has_columns=arena.has_columns, rank=arena.rank, y=y,
        )  # fmt: skip
    for part in plan.long:
        if part.variant < 0:
            continue
        nothing = x.new_zeros(arena.out_features, arena.in_features)
        delta = _effective(nothing, arena, part.variant, out=nothing)
        # One product that adds: the sum is rounded once.
        if part.rows is None:
            y.addmm_(x, delta.T)
        else:
            y.index_copy_(0, part.rows, torch.addmm(y[part.rows], x[part.rows], delta.T))


def embedding(
    ids: Tensor,  # [T]
    weight: Tensor,  # [N, K]
    arena: DeltaArena,
    plan: Plan,
) -> Tensor:  # [T, K] in the weight's dtype
    """The row of each token's variant."""
    out = weight.new_empty(ids.shape[0], weight.shape[1])
    return embedding_rows(
        ids, _rows_contiguous(weight), arena.data, arena.table, plan.index, out,
        planes=arena.planes, has_columns=arena.has_columns, rank=arena.rank,
    )  # fmt: skip


def _effective(
    weight: Tensor, arena: DeltaArena, variant: int, out: Tensor | None = None
) -> Tensor:
    """W_eff of a variant, [N, K], in a scratch or in `out`; the base itself for -1."""
    if variant < 0:
        return weight
    weight = _rows_contiguous(weight)
    return reconstruct(
        weight, arena.data, arena.table, variant,
        torch.empty_like(weight, memory_format=torch.contiguous_format) if out is None else out,
        planes=arena.planes, has_columns=arena.has_columns, rank=arena.rank,
    )  # fmt: skip


def _rows_contiguous(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 else weight.contiguous()
