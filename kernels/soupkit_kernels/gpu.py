"""Launches of the Triton kernels, on CUDA tensors, or on CPU tensors with TRITON_INTERPRET=1.

Tensors are taken as they should be: op.py has checked them. Only this module and triton_*.py import
triton; op.py imports this one when it is first needed.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from soupkit_kernels.configs import Config, bucket, config, is_in_turn
from soupkit_kernels.plan import MAX_LOCKS, Groups
from soupkit_kernels.triton_linear import delta_linear_kernel
from soupkit_kernels.triton_weights import low_rank_product

# Multiprocessors and compute capability assumed where there is no GPU: an H100's.
_ASSUMED_CHIP = (132, 90)
# Steps of K that a split must have: fewer, and its start and the sum cost more than it saves.
_LEAST_STEPS = 4

# -1 as the kernel takes it (`flip`): twice in a 16-bit dtype, as an int32.
_MINUS_ONE = {
    torch.bfloat16: 0xBF80BF80 - (1 << 32),
    torch.float16: 0xBC00BC00 - (1 << 32),
    torch.float32: 0xBF800000 - (1 << 32),
}
_POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor | None,  # [N, K]
    bias: Tensor | None,  # [N]
    data: Tensor,  # uint8, the arena's, in LANE order
    table: Tensor,  # int64 [slots, 7]
    groups: Groups,
    *,
    planes: int,
    has_columns: bool,
    rank: int,
    y: Tensor | None = None,
) -> Tensor:  # [T, N]
    """x times the effective weight of each token's variant, for the tokens of the groups.

    Args:
        weight: None: x D_v^T is added to y; there is no bias then.
        planes, has_columns, rank: of the arena.
        y: rows contiguous, written in place; by default a new tensor. Only rows of tokens of the
            groups are written.
    Returns:
        y. A token whose variant has no slot gets NaN.
    """
    assert weight is not None or bias is None
    if y is None:
        assert weight is not None, "without a weight the product is added to y: give y"
        y = x.new_empty(x.shape[0], weight.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    if weight is not None and weight.stride(1) != 1:
        weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if y.numel() == 0 or groups.num_groups == 0:
        return y
    # Triton launches on the current device.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _launch(x, weight, bias, y, data, table, groups, planes, has_columns, rank)
    return y


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, data: Tensor, table: Tensor,
    groups: Groups, planes: int, has_columns: bool, rank: int,
) -> None:  # fmt: skip
    """Choose a tile shape, split K, make room for the splits' sums, launch."""
    (n, k), num_groups = (y.shape[1], x.shape[1]), groups.num_groups
    num_sms, capability = chip(x.device)
    terms = bucket(groups.variants_per_group * planes)
    chosen = config(groups.block_m, terms, x.element_size(), capability)
    tiles = -(-n // chosen.block_n)
    width, splits = split(k, num_groups * tiles, chosen.block_k, chosen.per_sm * num_sms)
    partials = locks = None
    if splits > 1:
        size = num_groups * tiles * splits * chosen.block_n * groups.block_m
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        locks = groups.locks
    values = data.view(x.dtype)
    low = low_rank_product(x, values, table, groups, rank=rank) if rank else None
    delta_linear_kernel[num_groups, tiles, splits](
        x, weight, bias, y,
        data.view(torch.int32), data.view(torch.float32), values, table, low,
        groups.order, groups.variants, groups.starts, groups.members, partials, locks,
        n, k, x.stride(0), 0 if weight is None else weight.stride(0), y.stride(0), width,
        table.shape[0], planes, groups.variants_per_group, rank, _MINUS_ONE[x.dtype],
        TERMS=terms, BLOCK_M=groups.block_m, BLOCK_N=chosen.block_n, BLOCK_K=chosen.block_k,
        IS_EVEN_K=k % chosen.block_k == 0, IS_IN_TURN=is_in_turn(groups.block_m, capability),
        SPLIT_K=splits > 1, HAS_BASE=weight is not None,
        HAS_BIAS=bias is not None, HAS_COLUMNS=has_columns and planes > 0, HAS_LOW_RANK=rank > 0,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def split(k: int, tiles: int, block_k: int, programs: int) -> tuple[int, int]:
    """How K is split so that about as many programs run as fit the GPU at once.

    Args:
        tiles: programs without a split.
        programs: that fit.
    Returns:
        inputs of a split, a multiple of block_k, and the number of splits.
    """
    steps = max(1, -(-k // block_k))
    wanted = programs // tiles
    if tiles > MAX_LOCKS or wanted < 2:
        return steps * block_k, 1
    per_split = max(-(-steps // wanted), min(_LEAST_STEPS, steps))
    return per_split * block_k, -(-steps // per_split)


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a device, and its compute capability as 10 major + minor."""
    if device.type != "cuda":
        return _ASSUMED_CHIP
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, 10 * found.major + found.minor


def static_case(
    block_m: int,
    terms: int,
    dtype: torch.dtype,
    *,
    is_split: bool = True,
    is_even_k: bool = True,
    has_base: bool = True,
    has_bias: bool = False,
    has_columns: bool = False,
    has_low_rank: bool = False,
    capability: int = 90,
    chosen: Config | None = None,
) -> tuple[Any, dict[str, str], dict[str, Any], list[str], int, int]:
    """What a launch compiles for tensors as a Llama has them, for checks without a GPU.

    Returns:
        the kernel, types of arguments, constants, names of multiples of 16, num_warps, num_stages.
    """
    if chosen is None:
        chosen = config(block_m, terms, dtype.itemsize, capability)
    constants: dict[str, Any] = {
        "TERMS": terms, "BLOCK_M": block_m, "BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k,
        "IS_EVEN_K": is_even_k, "IS_IN_TURN": is_in_turn(block_m, capability),
        "SPLIT_K": is_split, "HAS_BASE": has_base, "HAS_BIAS": has_bias,
        "HAS_COLUMNS": has_columns, "HAS_LOW_RANK": has_low_rank,
    }  # fmt: skip
    split = {"partials": is_split, "locks": is_split}
    there = {"w": has_base, "bias": has_bias, "low": has_low_rank, **split}
    constants |= {name: None for name, is_there in there.items() if not is_there}
    own = dict.fromkeys(("x", "w", "bias", "y", "values"), _POINTER[dtype])
    floats = dict.fromkeys(("floats", "low", "partials"), "*fp32")
    plan = dict.fromkeys(("order", "variants", "starts", "members", "locks"), "*i32")
    pointers = {**own, **floats, "words": "*i32", "table": "*i64"}
    multiples = ("N", "K", "stride_x", "stride_w", "stride_y", "split_width")
    others = ("slots", "planes", "variants_per_group", "rank", "flip")
    types = {**pointers, **plan, **dict.fromkeys((*multiples, *others), "i32")}
    signature = {name: kind for name, kind in types.items() if name not in constants}
    aligned = [name for name in (*pointers, *multiples) if name in signature]
    return delta_linear_kernel, signature, constants, aligned, chosen.num_warps, chosen.num_stages
