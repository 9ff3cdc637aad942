"""The multi-variant layers in a few lines of torch: their meaning, not their speed.

    y[t] = x[t] (W + D_v)^T + bias,   v = variant_index[t];   v = -1, or no delta: the base
    e[t] = (W + D_v)[ids[t]]

D_v is in delta.py. Everything is computed in float32 (float64 if x is) and rounded once. Gradients
flow to x, scales and factors: distillation differentiates this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soupkit_kernels.delta import Delta


def delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    deltas: Sequence[Delta | None],
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """x times the effective weight of each token's variant."""
    wide = _wide(x.dtype)
    y = x.to(wide) @ weight.to(wide).T
    for variant, delta in enumerate(deltas):
        if delta is not None:
            is_its = (variant_index == variant).unsqueeze(-1)
            y = torch.where(is_its, y + x.to(wide) @ delta.dense(wide).T, y)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def delta_embedding(
    ids: Tensor,  # int64 [...]
    weight: Tensor,  # [N, K]
    deltas: Sequence[Delta | None],
    variant_index: Tensor,  # int64 [...], as ids; -1 is the base
) -> Tensor:  # [..., K] in the weight's dtype
    """The row of each token's variant."""
    wide = _wide(weight.dtype)
    rows = weight[ids].to(wide)
    for variant, delta in enumerate(deltas):
        if delta is not None:
            is_its = (variant_index == variant).unsqueeze(-1)
            rows = torch.where(is_its, rows + delta.dense(wide)[ids], rows)
    return rows.to(weight.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
