"""Plain-torch multi-variant linear."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels.bitpack import unpack

_FEW_TOKENS = 64


def torch_delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    packed: Sequence[Tensor],  # per variant uint8 [P, N, ceil(K / 8)]
    scale: Sequence[Tensor],  # per variant float32 [P, N] or [P, 1]
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """The equation of naive.py."""
    tokens = x.reshape(-1, x.shape[-1])
    y = F.linear(tokens, weight, bias)
    index = variant_index.reshape(-1)
    for variant in sorted(set(index.tolist())):
        if variant < 0:
            continue
        rows = (index == variant).nonzero().squeeze(1)
        part = tokens[rows]
        total = y[rows].float()
        for plane_signs, plane_alpha in zip(packed[variant], scale[variant], strict=True):
            total += plane_alpha * (part.float() @ unpack(plane_signs, x.shape[-1]).T)
        y[rows] = total.to(y.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])
