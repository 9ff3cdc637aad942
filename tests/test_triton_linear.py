"""The fused Triton kernel against float64, unmodified under Triton's interpreter (or on CUDA)."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton_bfloat16
from soupkit_kernels import pack
from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.delta import Delta
from torch import Tensor
from triton_bfloat16 import DEVICE

if triton_bfloat16.IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

from soupkit_kernels import gpu
from soupkit_kernels.plan import Groups, groups_of

# Half a unit in the last place of the result, and the float32 sum of a few hundred terms.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
SUM_ERROR = 2.0**-18


def random_delta(n: int, k: int, planes: int, seed: int, *, columns: bool = False) -> Delta:
    g = torch.Generator().manual_seed(seed)
    if not planes:
        return Delta(n, k)
    return Delta(
        n, k,
        packed=pack(torch.randn(planes, n, k, generator=g)),
        scale=torch.randn(planes, n, generator=g) / 8,
        # Powers of two, and a column that is exactly what every dtype holds.
        column_scale=2.0 ** torch.randint(-3, 1, (planes, k), generator=g) if columns else None,
    )  # fmt: skip


def reference(
    x: Tensor, weight: Tensor | None, deltas: list[Delta | None], index: list[int],
    bias: Tensor | None, y: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """float64 [T, N] and a bound of its sum of magnitudes."""
    x = x.double().cpu()
    rows, sizes = [], []
    n = y.shape[1] if y is not None else weight.shape[0]  # type: ignore[union-attr]
    for t, v in enumerate(index):
        matrix = torch.zeros(n, x.shape[1]).double()
        if weight is not None:
            matrix = matrix + weight.double().cpu()
        row = torch.zeros(n).double() if y is None else y[t].double().cpu()
        if bias is not None:
            row = row + bias.double().cpu()
        size = row.abs() + matrix.abs() @ x[t].abs()
        delta = deltas[v] if v >= 0 else None
        if delta is not None and delta.parts:
            dense = delta.dense(torch.float64)
            matrix = matrix + dense
            size = size + dense.abs() @ x[t].abs()
        rows.append(matrix @ x[t] + row)
        sizes.append(size)
    return torch.stack(rows), torch.stack(sizes)


def run(
    x: Tensor, weight: Tensor | None, arena: DeltaArena, index: list[int],
    bias: Tensor | None = None, y: Tensor | None = None, groups: Groups | None = None,
) -> Tensor:  # fmt: skip
    if groups is None:
        flat = torch.tensor(index, device=DEVICE)
        groups = groups_of(
            flat, num_variants=len({v for v in index if v >= 0}), planes=arena.planes
        )
    out = gpu.linear(
        x, weight, bias, arena.data, arena.table, groups,
        planes=arena.planes, has_columns=arena.has_columns, rank=arena.rank, y=y,
    )  # fmt: skip
    assert not groups.locks.any(), "locks are left zero"
    return out


def check(result: Tensor, want: Tensor, sizes: Tensor) -> None:
    error = (result.double().cpu() - want).abs()
    bound = ROUNDING[result.dtype] * want.abs() + SUM_ERROR * sizes + 1e-7
    assert bool((error <= bound).all()), float((error - bound).max())


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "index"),
    [
        (torch.bfloat16, 70, 256, [1, -1, 0]),
        (torch.bfloat16, 64, 264, [2, 0, 2, -1, 1, 1, 0, 2, 2, 0]),
        (torch.float16, 33, 77, [0, 0, 1]),
        (torch.float32, 45, 130, [1, -1, 0, 1]),
        (torch.float32, 1, 1, [0]),
        (torch.bfloat16, 130, 48, [-1, -1]),
        (torch.float16, 9, 128, list(range(8)) * 2 + [-1]),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_of_mixed_variants(
    dtype: torch.dtype, n: int, k: int, index: list[int], has_bias: bool
) -> None:
    deltas: list[Delta | None] = [random_delta(n, k, 1, v) for v in range(max(2, max(index) + 1))]
    arena = arena_of(deltas, dtype=dtype, device=DEVICE, is_lane=True)
    x, weight = values(dtype, len(index), k, seed=1), values(dtype, n, k, seed=2)
    bias = values(dtype, n, seed=3) if has_bias else None
    out = run(x, weight, arena, index, bias)
    check(out, *reference(x, weight, deltas, index, bias, None))
