"""Effective weights, embedding rows and the low-rank product: exact, or against float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton_bfloat16
from torch import Tensor

from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import pack, unpack
from soupkit_kernels.delta import Delta
from soupkit_kernels.plan import Groups, groups_of
from soupkit_kernels.triton_weights import embedding_rows, low_rank_product, reconstruct

DEVICE = triton_bfloat16.DEVICE
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [1, 7, 8, 33, 127, 128, 130, 200, 264, 1000]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_delta(
    n: int, k: int, *, planes: int = 0, columns: bool = False, rank: int = 0, seed: int = 0
) -> Delta:
    """A random delta; scales of either sign."""
    seed *= 10
    return Delta(
        n,
        k,
        packed=pack(random(seed, planes, n, k)) if planes else None,
        scale=random(seed + 1, planes, n) * 0.05 if planes else None,
        column_scale=random(seed + 2, planes, k) if columns and planes else None,
        up=random(seed + 3, n, rank) * 0.1 if rank else None,
        down=random(seed + 4, rank, k) * 0.1 if rank else None,
    )


def make_arena(deltas: Sequence[Delta | None], dtype: torch.dtype) -> DeltaArena:
    return arena_of(deltas, dtype=dtype, device=DEVICE, is_lane=True)


def make_weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (random(99, n, k) * 0.1).to(DEVICE, dtype)


def whole(weight: Tensor, arena: DeltaArena, slot: int) -> Tensor:
    """The formula of triton_weights in torch, in its order; what the slot holds is read back."""
    held = arena.delta(slot)
    total = weight.float()
    if held is None:
        return weight
    for plane in range(held.planes):
        assert held.packed is not None
        assert held.scale is not None
        term = held.scale[plane][:, None]
        if held.column_scale is not None:
            term = term * held.column_scale[plane]
        total = total + term * unpack(held.packed[plane], held.in_features)
    if held.up is not None and held.down is not None:
        total = total + held.up.float() @ held.down.float()
    return total.to(weight.dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def limits(arena: DeltaArena) -> dict[str, Any]:
    return {"planes": arena.planes, "has_columns": arena.has_columns, "rank": arena.rank}


def rebuilt(weight: Tensor, arena: DeltaArena, slot: int) -> Tensor:
    """reconstruct into rows of a larger NaN tensor, which must stay NaN around them."""
    n, k = weight.shape
    room = poisoned(n + 1, k + 3, dtype=weight.dtype)
    out = reconstruct(weight, arena.data, arena.table, slot, room[:n, :k], **limits(arena))
    assert room[n:].isnan().all()
    assert room[:, k:].isnan().all()
    return out


def test_the_reference_is_what_the_delta_says() -> None:
    delta = make_delta(5, 37, planes=2, columns=True, rank=3)
    weight = make_weight(5, 37, torch.float32)
    expected = weight.double().cpu() + delta.dense(torch.float64)
    got = whole(weight, make_arena([delta], torch.float32), 0).cpu().double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rebuilt_weight_equals_torch_bit_for_bit(k: int, dtype: torch.dtype) -> None:
    planes = WIDTHS.index(k) % 4 + 1
    deltas = [
        make_delta(19, k, planes=planes, seed=1),
        make_delta(19, k, planes=planes, columns=k % 2 == 0, seed=2),
        make_delta(19, k),
        None,
    ]
    arena = make_arena(deltas, dtype)
    weight = make_weight(19, k, dtype)
    for slot in range(len(deltas)):
        assert torch.equal(rebuilt(weight, arena, slot), whole(weight, arena, slot))


@pytest.mark.parametrize("planes", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("columns", [False, True])
def test_every_number_of_planes(planes: int, columns: bool) -> None:
    arena = make_arena([make_delta(3, 130, planes=planes, columns=columns)], torch.bfloat16)
    weight = make_weight(3, 130, torch.bfloat16)
    assert torch.equal(rebuilt(weight, arena, 0), whole(weight, arena, 0))


@pytest.mark.parametrize(("k", "rank"), [(7, 1), (130, 16), (264, 21)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_rank_part_is_added_in_float32(k: int, rank: int, dtype: torch.dtype) -> None:
    deltas = [make_delta(21, k, rank=rank, seed=1), make_delta(21, k, planes=1, rank=2, seed=2)]
    arena = make_arena(deltas, dtype)
    weight = make_weight(21, k, dtype)
    for slot in range(2):
        held = arena.delta(slot)
        assert held is not None
        expected = weight.double() + held.dense(torch.float64)
        # One rounding to the dtype, and float32 sums of rank + 3 terms before it.
        eps = torch.finfo(dtype).eps / 2 + (rank + 3) * 2**-24
        got = rebuilt(weight, arena, slot).double()
        assert ((got - expected).abs() <= eps * (expected.abs() + 1)).all()
        exact = got == whole(weight, arena, slot)
        assert exact.double().mean() > (0.9 if dtype != torch.float32 else 0.3)


def test_weights_may_be_rows_of_a_larger_one_and_hold_inf_and_nan() -> None:
    arena = make_arena([make_delta(4, 40, planes=1)], torch.bfloat16)
    weight = make_weight(9, 56, torch.bfloat16)[2:6, 8:48]
    weight[0, 3], weight[1, 4] = float("inf"), float("nan")
    got, expected = rebuilt(weight, arena, 0), whole(weight, arena, 0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().sum() == 1


def test_shards_of_rows_and_columns_are_the_rows_and_columns_of_the_whole() -> None:
    delta = make_delta(12, 172, planes=2, columns=False, seed=3)
    weight = make_weight(12, 172, torch.bfloat16)
    full = rebuilt(weight, make_arena([delta], torch.bfloat16), 0)
    for axis, length in ((0, 4), (1, 43)):  # 43 cuts bytes and blocks
        for start in range(0, weight.shape[axis], length):
            arena = make_arena([delta.narrow(axis, start, length)], torch.bfloat16)
            part = rebuilt(weight.narrow(axis, start, length), arena, 0)
            assert torch.equal(part, full.narrow(axis, start, length))


def test_in_place_and_nothing_to_do() -> None:
    arena = make_arena([make_delta(4, 40, planes=1)], torch.float16)
    weight = make_weight(4, 40, torch.float16)
    expected = whole(weight, arena, 0)
    reconstruct(weight, arena.data, arena.table, 0, weight, **limits(arena))
    assert torch.equal(weight, expected)
    assert reconstruct(weight[:0], arena.data, arena.table, 0, weight[:0], **limits(arena)).shape
    minus_zero = torch.full_like(weight, -0.0)
    many = make_arena([None, make_delta(4, 40, planes=1, rank=2)], torch.float16)
    assert rebuilt(minus_zero, many, 0).signbit().all()


def test_a_slot_that_is_not_there() -> None:
    arena = make_arena([make_delta(2, 8, planes=1)], torch.bfloat16)
    weight = make_weight(2, 8, torch.bfloat16)
    for slot in (-1, 1):
        with pytest.raises(ValueError, match=r"slot -?1: must be in 0\.\.0"):
            rebuilt(weight, arena, slot)


def mixed_deltas(n: int, k: int) -> list[Delta | None]:
    return [
        make_delta(n, k, planes=1, seed=1),
        None,
        make_delta(n, k, planes=3, columns=k % 2 == 0, seed=2),
        make_delta(n, k, rank=5, seed=3),
        make_delta(n, k, planes=2, rank=2, seed=4),
    ]


@pytest.mark.parametrize("k", [1, 7, 33, 128, 130, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_rows(k: int, dtype: torch.dtype) -> None:
    n = 13
    arena = make_arena(mixed_deltas(n, k), dtype)
    weight = make_weight(n, k, dtype)
    variants = torch.tensor([-1, 0, 1, 2, 3, 4, 0, 5, 1 << 20, -1, 2], device=DEVICE)
    ids = torch.tensor([12, 0, 3, 12, 7, 7, 0, 1, 2, 13, -1], device=DEVICE)
    out = poisoned(len(ids), k + 1, dtype=dtype)[:, :k]
    embedding_rows(ids, weight, arena.data, arena.table, variants, out, **limits(arena))
    full = [whole(weight, arena, slot) for slot in range(5)]
    for i, (row, variant) in enumerate(zip(ids.tolist(), variants.tolist(), strict=True)):
        if variant > 4 or not 0 <= row < n:
            assert out[i].isnan().all()
        elif variant in (3, 4):
            bound = torch.finfo(dtype).eps + 8 * 2**-24
            torch.testing.assert_close(out[i], full[variant][row], rtol=bound, atol=bound * 0.1)
        else:
            assert torch.equal(out[i], (weight if variant < 0 else full[variant])[row])


def test_embedding_takes_int32_and_no_token() -> None:
    arena = make_arena([make_delta(4, 16, planes=1)], torch.bfloat16)
    weight = make_weight(4, 16, torch.bfloat16)
    ids = torch.tensor([3, 0, 1, 0], dtype=torch.int32, device=DEVICE)[::2]
    variants = torch.tensor([0, -1], dtype=torch.int32, device=DEVICE)
    out = poisoned(2, 16, dtype=torch.bfloat16)
    embedding_rows(ids, weight, arena.data, arena.table, variants, out, **limits(arena))
    assert torch.equal(out, torch.stack((whole(weight, arena, 0)[3], weight[1])))
    none = poisoned(0, 16, dtype=torch.bfloat16)
    embedding_rows(ids[:0], weight, arena.data, arena.table, variants[:0], none, **limits(arena))


def test_an_arena_without_slots() -> None:
    arena = DeltaArena(
        4, 16, slots=0, slot_bytes=0, planes=1, has_columns=True, rank=2, dtype=torch.bfloat16,
        device=DEVICE, is_lane=True,
    )  # fmt: skip
    weight = make_weight(4, 16, torch.bfloat16)
    variants = torch.tensor([-1, 0], device=DEVICE)
    out = poisoned(2, 16, dtype=torch.bfloat16)
    embedding_rows(variants + 1, weight, arena.data, arena.table, variants, out, **limits(arena))
    assert torch.equal(out[0], weight[0])
    assert out[1].isnan().all()
    low = low_rank_product(
        weight[:2], arena.data.view(weight.dtype), arena.table, plan_of([-1, 0]), rank=2
    )
    assert not low.any()


def plan_of(variants: list[int]) -> Groups:
    return groups_of(
        torch.tensor(variants, dtype=torch.int64, device=DEVICE), num_variants=8, planes=1
    )


def expected_low(x: Tensor, arena: DeltaArena, variants: list[int]) -> Tensor:
    """float64 [T, rank]."""
    low = torch.zeros(x.shape[0], arena.rank, dtype=torch.float64, device=DEVICE)
    for token, variant in enumerate(variants):
        held = arena.delta(variant) if 0 <= variant < arena.slots else None
        if held is not None and held.down is not None:
            low[token, : held.rank] = held.down.double() @ x[token].double()
    return low


@pytest.mark.parametrize(("k", "count"), [(1, 3), (33, 9), (130, 4), (1000, 6), (2200, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_low_rank_product_of_few_tokens(k: int, count: int, dtype: torch.dtype) -> None:
    check_low_rank_product(k, [4, -1, 3, 0, 3, 1, 2, 4, 9][:count], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_low_rank_product_of_many_tokens(dtype: torch.dtype) -> None:
    check_low_rank_product(200, [(7 * i + 4) % 6 - 1 for i in range(64)] + [9] * 3, dtype)


def check_low_rank_product(k: int, variants: list[int], dtype: torch.dtype) -> None:
    deltas = mixed_deltas(6, k)
    deltas[3] = make_delta(6, k, rank=19, seed=3)
    arena = make_arena(deltas, dtype)
    # Columns beyond K are NaN: rows are not contiguous.
    x = poisoned(len(variants), k + 2, dtype=dtype)[:, :k]
    x[:] = random(5, len(variants), k).to(dtype)
    lost = [token for token, variant in enumerate(variants) if variant not in (3, 4)]
    expected = expected_low(x, arena, variants)
    # x of tokens without a low-rank part is never read.
    x[lost] = float("nan")
    got = low_rank_product(x, arena.data.view(dtype), arena.table, plan_of(variants), rank=19)
    assert got.dtype == torch.float32
    assert not got[lost].any()
    bound = expected.abs().amax() * k * 2**-23 + 1e-9
    assert ((got.double() - expected).abs() <= bound).all()
    again = low_rank_product(x, arena.data.view(dtype), arena.table, plan_of(variants), rank=19)
    assert torch.equal(got, again)


@pytest.mark.parametrize("count", [4, 70])
def test_an_inf_of_one_token_stays_in_its_row(count: int) -> None:
    arena = make_arena(
        [make_delta(4, 24, rank=3, seed=1), make_delta(4, 24, rank=5)], torch.float16
    )
    x = random(1, count, 24).to(DEVICE, torch.float16)
    x[1, 5] = float("inf")
    variants = [0] * (count - 1) + [1]
    low = low_rank_product(x, arena.data.view(x.dtype), arena.table, plan_of(variants), rank=5)
    assert (~low[1, :3].isfinite()).all()
    assert torch.equal(low[1, 3:], torch.zeros(2, device=DEVICE))
    assert low[[0, *range(2, count)]].isfinite().all()


def test_only_tokens_of_the_groups_are_written() -> None:
    arena = make_arena([make_delta(4, 24, rank=3)], torch.float32)
    groups = plan_of([0, 0])
    x = random(2, 5, 24).to(DEVICE)
    order = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    some = Groups(
        order, groups.variants, groups.starts, groups.members, groups.locks, groups.block_m
    )
    low = low_rank_product(x, arena.data.view(x.dtype), arena.table, some, rank=3)
    expected = expected_low(x, arena, [0] * 5)
    torch.testing.assert_close(low[[1, 3]].double(), expected[[1, 3]], rtol=1e-5, atol=1e-6)
    none = low_rank_product(x[:0], arena.data.view(x.dtype), arena.table, plan_of([]), rank=3)
    assert none.shape == (0, 3)


def test_a_rebuilt_weight_does_not_depend_on_the_other_slots() -> None:
    delta = make_delta(5, 72, planes=2, rank=3, seed=6)
    weight = make_weight(5, 72, torch.bfloat16)
    alone = rebuilt(weight, make_arena([delta], torch.bfloat16), 0)
    others = [make_delta(5, 72, planes=4, rank=7, seed=s) for s in (7, 8)]
    arena = make_arena([others[0], delta, others[1]], torch.bfloat16)
    assert torch.equal(rebuilt(weight, arena, 1), alone)
    arena.clear(1)
    assert torch.equal(rebuilt(weight, arena, 1), weight)


FAR = """
import mmap, torch, triton_bfloat16
from soupkit_kernels.arena import PACKED, SCALE, DOWN, UP, arena_of
from soupkit_kernels.delta import Delta
from soupkit_kernels.plan import groups_of
from soupkit_kernels.triton_weights import embedding_rows, low_rank_product, reconstruct

# Zeros that take no memory until they are written to (0x4000 is MAP_NORESERVE).
room = mmap.mmap(-1, 24 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
data = torch.frombuffer(room, dtype=torch.uint8)
values = data.view(torch.bfloat16)

# A table of 6 10^8 rows: the words (4 a row) and the last rows of up, [5, N], are past 2^31.
n = 600_000_000
weight = values[:n].view(n, 1)
signs, scale, up, down = 2 << 30, 12 << 30, 16 << 30, (24 << 30) - 128
table = torch.tensor([[1, signs, scale, -1, 5, down, up]])
weight[n - 1] = 1
data[signs:].view(torch.int32)[4 * (n - 1)] = 1
data[scale : scale + 4 * n].view(torch.float32)[n - 1] = 2
data[up:down].view(torch.bfloat16)[5 * n - 1] = 4
data[down:].view(torch.bfloat16)[4] = 8
ids, out = torch.tensor([n - 1, n - 1]), torch.full((2, 1), float("nan"), dtype=torch.bfloat16)
limits = {'planes': 1, 'has_columns': False, 'rank': 5}
embedding_rows(ids, weight, data, table, torch.tensor([-1, 0]), out, **limits)
assert out.flatten().tolist() == [1, 1 + 2 + 32], out

# Rows 1.5 10^8 apart, of the weight, of the result and of x; a slot past 2^32 bytes.
delta = Delta(17, 16, torch.full((1, 17, 2), 0xA5, dtype=torch.uint8), torch.ones(1, 17),
              up=torch.ones(17, 1), down=torch.ones(1, 16))
near = arena_of([delta], dtype=torch.bfloat16, is_lane=True)
far = 15 << 30
data[far : far + near.data.numel()] = near.data
table = near.table.clone()
table[0, [PACKED, SCALE, DOWN, UP]] += far
apart = values.as_strided((17, 16), (150_000_000, 1), 4096)
other = apart.as_strided((17, 16), (150_000_000, 1), 8192)
apart[:] = torch.randn(17, 16)
reconstruct(apart, data, table, 0, other, **limits)
assert torch.equal(other, apart + delta.dense(torch.bfloat16)), other
groups = groups_of(torch.zeros(17, dtype=torch.int64), num_variants=1, planes=1)
low = low_rank_product(apart, values, table, groups, rank=1)
torch.testing.assert_close(low[:, 0], apart.float().sum(1))
"""


@pytest.mark.skipif(not triton_bfloat16.IS_INTERPRETED, reason="maps memory of the host")
def test_offsets_are_64_bit() -> None:
    # In a process of its own: a wrong address ends it.
    code = subprocess.run(
        [sys.executable, "-c", FAR],
        env={"PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert code.returncode == 0, code.stderr
