"""The patched interpreter equals torch bit for bit: without this no bfloat16 kernel test counts."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
import triton_bfloat16
from torch import Tensor
from triton_bfloat16 import DEVICE

BLOCK = 256


@triton.jit
def elementwise(left, right, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(left + at)
    y = tl.load(right + at)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "where":
        z = tl.where(x > y, x, y)
    elif OP == "literal":
        z = x * 0.3
    tl.store(out + at, z)


@triton.jit
def compare(left, right, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(left + at)
    y = tl.load(right + at)
    if OP == "lt":
        z = x < y
    elif OP == "le":
        z = x <= y
    elif OP == "gt":
        z = x > y
    elif OP == "ge":
        z = x >= y
    elif OP == "eq":
        z = x == y
    elif OP == "ne":
        z = x != y
    tl.store(out + at, z.to(tl.int8))


@triton.jit
def cast(source, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at).to(out.dtype.element_ty))


@triton.jit
def store_rounds(source, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at))


@triton.jit
def dot(left, right, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(left + m[:, None] * K + k[None, :])
    y = tl.load(right + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y))


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, but any NaN equals any NaN: their bits differ between CPUs and GPUs."""
    integer = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    is_nan = expected.isnan()
    same = got.view(integer) == expected.view(integer)
    return bool(got.dtype == expected.dtype and (same | is_nan & got.isnan()).all())


def values(seed: int) -> Tensor:
    """Random values over many binades, subnormals, signed zeros, extremes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCK, generator=generator)
    x *= torch.exp2(torch.randint(-130, 100, (BLOCK,), generator=generator).float())
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.38e38, -3.38e38])
    return x.to(torch.bfloat16).to(DEVICE)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("add", torch.add),
        ("sub", torch.sub),
        ("mul", torch.mul),
        ("minimum", torch.minimum),
        ("maximum", torch.maximum),
        ("where", torch.maximum),
        ("literal", lambda x, _: x * torch.tensor(0.3, dtype=x.dtype, device=x.device)),
    ],
)
def test_arithmetic_rounds_as_torch(name: str, meaning: Callable[..., Tensor]) -> None:
    left = values(1)
    # Signed zeros: a minimum of 0 and -0 may be either; the rest of the edges meet each other.
    right = values(2).roll(2) if name in ("add", "sub", "mul", "literal") else values(2).roll(8)
    out = torch.full_like(left, float("nan"))
    elementwise[(1,)](left, right, out, OP=name, BLOCK=BLOCK)
    assert same_bits(out, meaning(left, right))


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons(name: str) -> None:
    left, right = values(1), values(2)
    left[100], right[101], left[102] = float("nan"), float("nan"), float("inf")
    right[64:96] = left[64:96]
    out = torch.full((BLOCK,), 7, dtype=torch.int8, device=DEVICE)
    compare[(1,)](left, right, out, OP=name, BLOCK=BLOCK)
    assert torch.equal(out.bool(), getattr(torch, name)(left, right))


def float32_edges() -> Tensor:
    """Every sign and exponent with mantissas below, at and above a tie, odd and even; specials."""
    high = torch.arange(0, 1 << 16, 5, dtype=torch.int64)  # 5 and 2^16 are coprime: all patterns
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((high[:, None] << 16) | low).flatten()
    x = bits.to(torch.int32).view(torch.float32)
    return x[: x.numel() // 1024 * 1024].to(DEVICE)


@pytest.mark.parametrize("kernel", [cast, store_rounds])
def test_float32_to_bfloat16_is_to_nearest_even(kernel: Any) -> None:
    x = float32_edges()
    assert x.isnan().any()
    assert x.isinf().any()
    assert ((x != 0) & (x.abs() < 1e-39)).any()
    out = torch.zeros(x.numel(), dtype=torch.bfloat16, device=DEVICE)
    kernel[(x.numel() // 1024,)](x, out, BLOCK=1024)
    assert same_bits(out, x.to(torch.bfloat16))


def test_bfloat16_to_float32_is_exact() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).to(DEVICE)
    out = torch.full((x.numel(),), -7.0, device=DEVICE)
    cast[(x.numel() // 4096,)](x, out, BLOCK=4096)
    assert same_bits(out, x.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_adds_in_float32(dtype: torch.dtype) -> None:
    # Integers and their products are exact in every dtype and order, so equal means equal.
    generator = torch.Generator().manual_seed(3)
    left = torch.randint(-9, 10, (16, 64), generator=generator).to(dtype).to(DEVICE)
    right = torch.randint(-9, 10, (64, 32), generator=generator).to(dtype).to(DEVICE)
    out = torch.full((16, 32), float("nan"), device=DEVICE)
    dot[(1,)](left, right, out, M=16, N=32, K=64)
    assert torch.equal(out, left.float() @ right.float())


def test_a_kernel_is_interpreted_without_a_gpu() -> None:
    assert ("Interpreted" in type(dot).__name__) == triton_bfloat16.IS_INTERPRETED
