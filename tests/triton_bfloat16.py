"""Make Triton's CPU interpreter right for bfloat16; importing this module does it, once.

The interpreter (TRITON_INTERPRET=1; Triton 3.6 to 3.9) holds bfloat16 as its bits in uint16 and
computes with these integers; float32 -> bfloat16 truncates. Here operands are widened to float32
(exact) and results rounded once to nearest even, as an sm_90 GPU and torch do. Covered: dot,
elementwise binary and unary operations, compare, fma, casts. Not: reductions and scans over
bfloat16, and erf and rsqrt. test_triton_interpreter.py compares all of it with torch.

A test module that launches kernels imports this one (conftest.py has set TRITON_INTERPRET, which
`triton.jit` reads when it decorates); others do not pay for the import of triton. Where CUDA is at
hand this does nothing: kernels are compiled and run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

IS_INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")

_Array = np.ndarray[Any, np.dtype[Any]]
_Method = Callable[..., Any]


def widen(bits: _Array) -> _Array:
    """bfloat16 bits (uint16) -> the same values in float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: _Array) -> _Array:
    """float32 -> bfloat16 bits (uint16), to nearest, ties to even; every NaN becomes 0x7FC0."""
    values = np.asarray(values, dtype=np.float32)
    # NaNs go first: rounding would carry some of them into the sign.
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.asarray((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _patch() -> None:
    """Replace the methods of InterpreterBuilder that compute on values."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def is_bfloat16(value: Any) -> bool:
        return bool(value.dtype.scalar == tl.bfloat16)

    def floats(value: Any) -> _Array:
        return widen(value.data) if is_bfloat16(value) else np.asarray(value.data)

    def rounded(values: _Array) -> Any:
        return handle(narrow(values), tl.bfloat16)

    def binary(old: _Method) -> _Method:
        def binary_op(self: Any, left: Any, right: Any, op: _Method) -> Any:
            if not is_bfloat16(left):
                return old(self, left, right, op)
            result = op(floats(left), floats(right))
            return handle(result, tl.int1) if result.dtype == np.bool_ else rounded(result)

        return binary_op

    def unary(old: _Method) -> _Method:
        def unary_op(self: Any, value: Any, op: _Method) -> Any:
            return rounded(op(floats(value))) if is_bfloat16(value) else old(self, value, op)

        return unary_op

    def fma(old: _Method) -> _Method:
        def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            if not is_bfloat16(z):
                return old(self, x, y, z)
            return rounded(floats(x).astype(np.float64) * floats(y) + floats(z))

        return create_fma

    def cast(old: _Method) -> _Method:
        def cast_impl(self: Any, source: Any, target: Any, *mode: Any) -> Any:
            # `mode` is the rounding mode of create_fp_to_fp: None or to nearest for these types.
            if is_bfloat16(source) == (target.scalar == tl.bfloat16):
                return old(self, source, target, *mode)
            if target.scalar == tl.bfloat16:
                return rounded(source.data)
            return handle(floats(source).astype(interpreter._get_np_dtype(target)), target.scalar)

        return cast_impl

    def dot(old: _Method) -> _Method:
        def create_dot(self: Any, left: Any, right: Any, total: Any, *options: Any) -> Any:
            if not is_bfloat16(left):
                return old(self, left, right, total, *options)
            product = np.matmul(floats(left), floats(right), dtype=np.float32)
            return handle(product + total.data, total.dtype.scalar)

        return create_dot

    for name, patch in {
        "binary_op": binary,
        "unary_op": unary,
        "create_fma": fma,
        "cast_impl": cast,
        "create_fp_to_fp": cast,
        "create_dot": dot,
    }.items():
        setattr(builder, name, patch(getattr(builder, name)))
    # A GPU computes with inf and NaN and warns of nothing.
    executor = interpreter.GridExecutor
    executor.__call__ = np.errstate(all="ignore")(executor.__call__)
    # A literal beside a bfloat16 tensor; Triton 3.6 and 3.7 have no such method.
    builder.get_bf16 = lambda self, value: rounded(np.array([value]))


if IS_INTERPRETED:
    _patch()
