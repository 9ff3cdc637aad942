"""The multi-variant layers: check what they are given, then take the fastest path of this machine.

The equations are in naive.py. Inference only: there is no backward. Paths:
- triton: a GPU, an arena in LANE order (triton_path.py);
- native: a CPU, the C library (native_path.py);
- torch: anything else (torch_path.py).
Under torch.compile the layers are the operators soupkit::delta_linear, soupkit::add_delta_ and
soupkit::delta_embedding, which it does not look into; with variants on the host give them a plan
made outside, since making one reads them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from soupkit_kernels import native, native_path, torch_path, triton_support
from soupkit_kernels.arena import DeltaArena
from soupkit_kernels.plan import Groups, Long, Plan, plan_of

_NOTHING = nullcontext()
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def path_name(arena: DeltaArena, weight: Tensor | None = None) -> str:
    """The path that the layer of an arena takes, for logs and benchmarks.

    Args:
        weight: of the layer; without it, one of contiguous rows is meant.
    Returns:
        "triton", "native" and the instruction set, or "torch" and why: "native avx512_bf16",
        "torch: SOUPKIT_KERNEL=torch".
    """
    if arena.is_lane:
        return "triton"
    library: native.Library | str = "signs in the order of files, as it was asked for"
    if arena.data.is_cpu:
        library = native.load()
    elif refusal := triton_support.why_not(
        arena.device, arena.dtype, arena.in_features, arena.planes
    ):
        library = refusal
    reason = native_path.why_not(library, arena, weight)
    if reason is None and not isinstance(library, str):
        return f"native {library.isa_name(arena.dtype)}"
    return f"torch: {reason}"


def delta_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    arena: DeltaArena,
    variants: Tensor | Plan,  # int64 [...], -1 is the base; or the plan of the step
    bias: Tensor | None = None,  # [N]
) -> Tensor:  # [..., N] in x's dtype
    """x times the effective weight of each token's variant.

    Args:
        x: float16, bfloat16, float32 or float64, at least one axis; weight, bias and the arena have
            its dtype and device.
        variants: slot of each token, shaped like x without its last axis; -1, and an empty slot,
            are the base. A plan serves all layers of a step and saves its making in each.
    Returns:
        A fresh tensor; row t depends on nothing but x[t] and its variant.
    Raises:
        ValueError: a shape, dtype, device or variant does not fit. (On a GPU a variant out of range
            gives NaN: nothing waits for the device.)
        RuntimeError: a gradient would be required.
    """
    _check(x, weight, arena, bias)
    step = _plan_for(variants, x.shape[:-1], arena)
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.soupkit.delta_linear(x, weight, bias, *_operands(arena, step))
        return y
    return _linear(x, weight, bias, arena, step)


def add_delta_(y: Tensor, x: Tensor, arena: DeltaArena, variants: Tensor | Plan) -> Tensor:
    """y[t] += x[t] D_v^T in place, added in float32: y is a base that another kernel computed.

    A quantised base's own product gives y; tokens of the base keep theirs. For many tokens of one
    variant D_v itself is rounded to x's dtype first, which changes the sum less than its rounding.

    Args:
        y: [..., N] contiguous, in x's dtype. Others as `delta_linear` has them.
    Returns:
        y.
    Raises:
        ValueError, RuntimeError: as `delta_linear`.
    """
    _check(x, None, arena, None)
    _check_no_gradient(y)
    if y.dtype != x.dtype or y.shape != (*x.shape[:-1], arena.out_features):
        raise ValueError(
            f"y {y.dtype} {tuple(y.shape)}: needs {x.dtype} {(*x.shape[:-1], arena.out_features)}"
        )
    if not y.is_contiguous() or y.device != x.device:
        raise ValueError(f"y on {y.device}, strides {y.stride()}: needs {x.device}, contiguous")
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and y.numel() and y.data_ptr() == x.data_ptr():
        raise ValueError("y is x, which is read while y is written: add to a copy")
    step = _plan_for(variants, x.shape[:-1], arena)
    if is_compiling:
        torch.ops.soupkit.add_delta_(y, x, *_operands(arena, step))
    else:
        _add(y, x, arena, step)
    return y


def delta_embedding(
    ids: Tensor,  # int64 [...]
    weight: Tensor,  # [N, K]
    arena: DeltaArena,
    variants: Tensor | Plan,  # int64 [...], -1 is the base; or the plan of the step
) -> Tensor:  # [..., K] in the weight's dtype
    """The row of each token's variant: of the base plus its delta, summed in float32, rounded once.

    Args:
        ids: rows, within 0..N-1.
        variants: slot of each token, shaped like ids.
    Raises:
        ValueError, RuntimeError: as `delta_linear`.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids {ids.dtype}: needs int64 or int32")
    _check_weight(weight, arena, ids.device)
    _check_no_gradient(weight)
    step = _plan_for(variants, ids.shape, arena)
    if torch.compiler.is_compiling():
        rows: Tensor = torch.ops.soupkit.delta_embedding(ids, weight, *_operands(arena, step))
        return rows
    return _embedding(ids, weight, arena, step)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, arena: DeltaArena, step: Plan
) -> Tensor:
    if not step.num_tokens or not arena.out_features:
        return x.new_empty(*x.shape[:-1], arena.out_features)
    tokens = x.reshape(step.num_tokens, arena.in_features)
    with _plainly(x.device):
        if arena.is_lane:
            from soupkit_kernels import triton_path

            y = triton_path.linear(tokens, weight, bias, arena, step)
        else:
            library = native.load() if x.is_cpu else f"tensors on {x.device}"
            if not isinstance(library, str) and not native_path.why_not(library, arena, weight):
                y = native_path.linear(library, tokens, weight, bias, arena, step)
            else:
                y = torch_path.linear(tokens, weight, bias, arena, step)
    return y.reshape(*x.shape[:-1], arena.out_features)


def _add(y: Tensor, x: Tensor, arena: DeltaArena, step: Plan) -> None:
    if not y.numel():
        return
    tokens = x.reshape(step.num_tokens, arena.in_features)
    rows = y.view(step.num_tokens, arena.out_features)
    with _plainly(x.device):
        if arena.is_lane:
            from soupkit_kernels import triton_path

            triton_path.add(rows, tokens, arena, step)
            return
        library = native.load() if x.is_cpu else f"tensors on {x.device}"
        if not isinstance(library, str) and not native_path.why_not(library, arena, None):
            native_path.add(library, rows, tokens, arena, step)
        else:
            torch_path.add(rows, tokens, arena, step)


def _embedding(ids: Tensor, weight: Tensor, arena: DeltaArena, step: Plan) -> Tensor:
    with _plainly(ids.device):
        if arena.is_lane:
            from soupkit_kernels import triton_path

            rows = triton_path.embedding(ids.reshape(-1), weight, arena, step)
        else:
            rows = torch_path.embedding(ids.reshape(-1), weight, arena, step)
    return rows.view(*ids.shape, arena.in_features)


def _plainly(device: torch.device) -> AbstractContextManager[Any]:
    """No gradients, and the types that are given; costs nothing where it is so already."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type):
        return _NOTHING
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _plan_for(variants: Tensor | Plan, lead: torch.Size, arena: DeltaArena) -> Plan:
    """The plan given, or one of these variants, fit for the arena."""
    if isinstance(variants, Tensor):
        if variants.shape != lead:
            raise ValueError(f"variants {tuple(variants.shape)}: needs {tuple(lead)}")
        return plan_of(
            variants, slots=arena.slots, planes=arena.planes, device=arena.device,
            is_lane=arena.is_lane,
        )  # fmt: skip
    if variants.num_tokens != lead.numel():
        raise ValueError(f"a plan of {variants.num_tokens} tokens for {tuple(lead)}")
    is_lane = variants.groups is not None or bool(variants.long)
    if arena.is_lane and variants.num_tokens and not is_lane:
        raise ValueError("a plan without groups, an arena in LANE order: make it with is_lane=True")
    if variants.index.device != arena.device:
        raise ValueError(f"a plan on {variants.index.device}: needs the arena's {arena.device}")
    if variants.slots > arena.slots or variants.planes < arena.planes:
        raise ValueError(
            f"a plan for {variants.slots} slots and {variants.planes} planes, an arena of "
            f"{arena.slots} and {arena.planes}: make it for the most planes and least slots of all"
        )
    return variants


def _check(x: Tensor, weight: Tensor | None, arena: DeltaArena, bias: Tensor | None) -> None:
    """Raise unless x, weight, bias and the arena fit together."""
    _check_no_gradient(x, weight, bias)
    if x.ndim == 0 or x.shape[-1] != arena.in_features:
        raise ValueError(f"x {tuple(x.shape)}: needs [..., {arena.in_features}]")
    if x.dtype not in _FLOATS or x.dtype != arena.dtype or x.device != arena.device:
        raise ValueError(
            f"x {x.dtype} on {x.device}: needs the arena's {arena.dtype} on {arena.device}"
        )
    if weight is not None:
        _check_weight(weight, arena, x.device)
    if bias is None:
        return
    if bias.dtype != x.dtype or tuple(bias.shape) != (arena.out_features,):
        raise ValueError(
            f"bias {bias.dtype} {tuple(bias.shape)}: needs {x.dtype} ({arena.out_features},)"
        )
    if bias.device != x.device:
        raise ValueError(f"bias on {bias.device}: needs {x.device}")


def _check_weight(weight: Tensor, arena: DeltaArena, device: torch.device) -> None:
    shape = (arena.out_features, arena.in_features)
    if tuple(weight.shape) != shape or weight.dtype != arena.dtype:
        raise ValueError(
            f"weight {weight.dtype} {tuple(weight.shape)}: needs the arena's {arena.dtype} {shape}"
        )
    if weight.device != device or arena.device != device:
        raise ValueError(f"weight on {weight.device}, arena on {arena.device}: need {device}")


def _check_no_gradient(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "this layer has no backward: call it under torch.no_grad(); naive.py has gradients"
        )


# -- the operators of torch.compile: an arena and a plan as tensors and numbers --

_OPERANDS = (
    "Tensor data, Tensor table, int[] layout, Tensor index, Tensor[] groups, int block_m, "
    "int[] long_variants, Tensor[] long_rows"
)
# torch.library is not typed.
_torch_library: Any = torch.library
_library = _torch_library.Library("soupkit", "FRAGMENT")
_library.define(f"delta_linear(Tensor x, Tensor weight, Tensor? bias, {_OPERANDS}) -> Tensor")
_library.define(f"add_delta_(Tensor(a!) y, Tensor x, {_OPERANDS}) -> ()")
_library.define(f"delta_embedding(Tensor ids, Tensor weight, {_OPERANDS}) -> Tensor")


def _operands(arena: DeltaArena, step: Plan) -> tuple[Any, ...]:
    """An arena and a plan in the operators' types; `_layer` is the inverse."""
    layout = [
        arena.out_features, arena.in_features, arena.planes, int(arena.has_columns), arena.rank,
        int(arena.is_lane),
    ]  # fmt: skip
    tensors, block_m = [], 0
    if step.groups is not None:
        there = step.groups
        tensors = [there.order, there.variants, there.starts, there.members, there.locks]
        block_m = there.block_m
    long = [part.variant for part in step.long]
    rows = [part.rows for part in step.long if part.rows is not None]
    return arena.data, arena.table, layout, step.index, tensors, block_m, long, rows


def _layer(
    dtype: torch.dtype,
    data: Tensor,
    table: Tensor,
    layout: list[int],
    index: Tensor,
    groups: list[Tensor],
    block_m: int,
    long_variants: list[int],
    long_rows: list[Tensor],
) -> tuple[DeltaArena, Plan]:
    out_features, in_features, planes, has_columns, rank, is_lane = layout
    arena = DeltaArena.over(
        data, table, out_features=out_features, in_features=in_features, planes=planes,
        has_columns=bool(has_columns), rank=rank, dtype=dtype, is_lane=bool(is_lane),
    )  # fmt: skip
    # No rows: one run that is the whole batch.
    rows: list[Tensor] | list[None] = long_rows or [None] * len(long_variants)
    long = tuple(Long(v, r) for v, r in zip(long_variants, rows, strict=True))
    there = None
    if groups:
        order, variants, starts, members, locks = groups
        there = Groups(order, variants, starts, members, locks, block_m)
    return arena, Plan(index, None, arena.slots, planes, there, long)


def _linear_operator(x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Any) -> Tensor:
    return _linear(x, weight, bias, *_layer(x.dtype, *operands))


def _add_operator(y: Tensor, x: Tensor, *operands: Any) -> None:
    _add(y, x, *_layer(x.dtype, *operands))


def _embedding_operator(ids: Tensor, weight: Tensor, *operands: Any) -> Tensor:
    return _embedding(ids, weight, *_layer(weight.dtype, *operands))


for _device in ("CPU", "CUDA"):
    _library.impl("delta_linear", _linear_operator, _device)
    _library.impl("add_delta_", _add_operator, _device)
    _library.impl("delta_embedding", _embedding_operator, _device)


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _add_shape(*_: Any) -> None:
    return None


def _embedding_shape(ids: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


for _name, _shape in (
    ("delta_linear", _linear_shape),
    ("add_delta_", _add_shape),
    ("delta_embedding", _embedding_shape),
):
    _torch_library.register_fake(f"soupkit::{_name}", _shape, lib=_library)
