"""The multi-variant linear: checks what it is given, then takes the fastest path of this machine.

The equation is in naive.py. Inference only: there is no backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soupkit_kernels import native
from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.cpu import torch_delta_linear
from soupkit_kernels.fused import fused_delta_linear, why_not

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def path_name(weight: Tensor, packed: Sequence[Tensor] = ()) -> str:
    """The path that `delta_linear` takes for such a weight and variants, for logs and benchmarks.

    Returns:
        "native" and the instruction set, or "torch" and why: "native avx512_bf16",
        "torch: SOUPKIT_KERNEL=torch".
    """
    library = native.load() if weight.is_cpu else f"tensors on {weight.device}"
    reason = why_not(library, weight, packed)
    if reason is None and not isinstance(library, str):
        return f"native {library.isa_name(weight.dtype)}"
    return f"torch: {reason}"


def delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    packed: Sequence[Tensor],  # per variant uint8 [P, N, ceil(K / 8)]
    scale: Sequence[Tensor],  # per variant float32 [P, N] or [P, 1]
    variant_index: Tensor,  # int64 [...]; -1 is the base
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """x times the effective weight of each token's variant.

    Args:
        x: float16, bfloat16, float32 or float64, at least one axis; weight and bias have its dtype.
        packed, scale: one entry a variant, all on x's device; variants may differ in P and in the
            scale's form.
        variant_index: variant of each token, shaped like x without its last axis; -1 is the base.
    Returns:
        A fresh tensor; row t depends on nothing but x[t] and its variant.
    Raises:
        ValueError: a shape, dtype, device or index does not fit.
        RuntimeError: x requires grad while gradients are on.
    """
    _check_tokens(x, weight, variant_index, bias)
    _check_variants(x, weight, packed, scale)
    if variant_index.numel():
        low, high = (int(bound) for bound in torch.aminmax(variant_index))
        if low < -1 or high >= len(packed):
            raise ValueError(
                f"variant_index from {low} to {high}: must be in -1..{len(packed) - 1}"
            )
    library = native.load() if x.is_cpu else f"tensors on {x.device}"
    with torch.no_grad():
        if not isinstance(library, str) and why_not(library, weight, packed) is None:
            return fused_delta_linear(library, x, weight, packed, scale, variant_index, bias)
        return torch_delta_linear(x, weight, packed, scale, variant_index, bias)


def _check_tokens(x: Tensor, weight: Tensor, variant_index: Tensor, bias: Tensor | None) -> None:
    """Raise unless x, weight, variant_index and bias fit together."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "delta_linear has no backward: call it under torch.no_grad() or detach x"
        )
    if (
        x.dtype not in _FLOATS
        or weight.dtype != x.dtype
        or (bias is not None and bias.dtype != x.dtype)
    ):
        dtypes = [x.dtype, weight.dtype, None if bias is None else bias.dtype]
        raise ValueError(f"x, weight, bias are {dtypes}: need one floating dtype for all")
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: need [..., K] and [N, K]"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias {tuple(bias.shape)}: needs ({weight.shape[0]},)")
    if variant_index.dtype != torch.int64 or variant_index.shape != x.shape[:-1]:
        raise ValueError(
            f"variant_index {variant_index.dtype} {tuple(variant_index.shape)}: "
            f"needs int64 {tuple(x.shape[:-1])}"
        )


def _check_variants(
    x: Tensor, weight: Tensor, packed: Sequence[Tensor], scale: Sequence[Tensor]
) -> None:
    """Raise unless each variant's signs and scales fit the weight."""
    if len(packed) != len(scale):
        raise ValueError(
            f"{len(packed)} packed and {len(scale)} scale entries: need one of each a variant"
        )
    rows, width = weight.shape[0], packed_width(weight.shape[1])
    for variant, (signs, alpha) in enumerate(zip(packed, scale, strict=True)):
        planes = signs.shape[0] if signs.ndim else 0
        if signs.dtype != torch.uint8 or planes < 1 or tuple(signs.shape) != (planes, rows, width):
            raise ValueError(
                f"packed[{variant}] {signs.dtype} {tuple(signs.shape)}: "
                f"needs uint8 [planes >= 1, {rows}, {width}]"
            )
        if alpha.dtype != torch.float32 or tuple(alpha.shape) not in ((planes, rows), (planes, 1)):
            raise ValueError(
                f"scale[{variant}] {alpha.dtype} {tuple(alpha.shape)}: "
                f"needs float32 [{planes}, {rows}] or [{planes}, 1]"
            )
        if signs.device != x.device or alpha.device != x.device:
            raise ValueError(
                f"variant {variant} is on {signs.device} and {alpha.device}, x on {x.device}: "
                "move it there"
            )
