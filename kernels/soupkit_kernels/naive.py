"""The multi-variant linear in a few lines of torch: its meaning, not its speed.

    y[t] = x[t] W^T + sum_p scale_v[p] * (S_v[p] x[t]) + bias,   v = variant_index[t]
    y[t] = x[t] W^T + bias                                       where v = -1

Legend: T tokens, K in_features, N out_features, P planes. Source of the delta form: BitDelta, arXiv
2402.10193. Everything is computed in float32 (float64 if x is) and rounded to x's dtype once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soupkit_kernels.bitpack import unpack


def delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    packed: Sequence[Tensor],  # per variant uint8 [P, N, ceil(K / 8)]
    scale: Sequence[Tensor],  # per variant float32 [P, N] or [P, 1]
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """x times the effective weight of each token's variant; see the module for the equation."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.to(wide).T
    for variant, (signs, alpha) in enumerate(zip(packed, scale, strict=True)):
        tokens = variant_index == variant
        for plane_signs, plane_alpha in zip(signs, alpha, strict=True):
            y[tokens] += plane_alpha.to(wide) * (
                x[tokens].to(wide) @ unpack(plane_signs, x.shape[-1], wide).T
            )
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
