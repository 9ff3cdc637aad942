"""Arenas: what goes in comes out, in both orders; limits; shards; growth."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from delta_kit import ENCODINGS, Encoding, dense, make_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soupkit_kernels import Delta, DeltaArena, arena_of
from soupkit_kernels.arena import (
    COLUMN,
    DOWN,
    NUM_COLUMNS,
    PACKED,
    PLANES,
    RANK,
    SCALE,
    UP,
)
from soupkit_kernels.bitpack import pack, packed_width, unpack
from soupkit_kernels.slots import Room, form_bytes, form_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
sizes = st.integers(1, 300)
encodings = st.lists(st.sampled_from([None, *ENCODINGS]), min_size=1, max_size=4)


def deltas_of(
    kinds: list[Encoding | None], num_rows: int, num_columns: int, seed: int = 0
) -> list[Delta | None]:
    generator = torch.Generator().manual_seed(seed)
    return [k and make_delta(num_rows, num_columns, k, generator) for k in kinds]


def assert_same(found: Delta | None, given: Delta | None, dtype: torch.dtype) -> None:
    """Signs and row sums to the bit; what is stored in the weight's dtype within its precision."""
    if given is None:
        assert found is None
        return
    assert found is not None
    assert (found.planes, found.rank) == (given.planes, given.rank)
    if given.packed is not None:
        assert found.packed is not None
        columns = given.in_features
        assert torch.equal(unpack(found.packed, columns), unpack(given.packed, columns))
    shape = (given.out_features, given.in_features)
    expected = torch.from_numpy(dense(given, shape))
    top = float(expected.abs().max()) if expected.numel() else 0.0
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.dense(torch.float64), expected, rtol=2 * eps, atol=2 * eps * top
    )


@settings(deadline=None, max_examples=40)
@given(encodings, sizes, sizes, st.booleans(), st.sampled_from(DTYPES))
def test_what_is_put_comes_out(
    kinds: list[Encoding | None], rows: int, columns: int, is_lane: bool, dtype: torch.dtype
) -> None:
    deltas = deltas_of([ENCODINGS[0], *kinds], rows, columns)
    arena = arena_of(deltas, dtype=dtype, is_lane=is_lane)
    assert arena.slots == len(deltas)
    for slot, delta in enumerate(deltas):
        assert arena.is_empty(slot) == (delta is None)
        assert_same(arena.delta(slot), delta, dtype)


@pytest.mark.parametrize("is_lane", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 0), (0, 3), (0, 0)])
def test_a_layer_without_rows_or_columns(rows: int, columns: int, is_lane: bool) -> None:
    deltas = deltas_of(list(ENCODINGS), rows, columns)
    arena = arena_of(deltas, dtype=torch.float32, is_lane=is_lane)
    for slot, delta in enumerate(deltas):
        assert_same(arena.delta(slot), delta, torch.float32)


@pytest.mark.parametrize("is_lane", [False, True])
def test_the_table_says_what_the_docstring_says(is_lane: bool) -> None:
    kinds: list[Encoding | None] = [(2, True, 3, True), None, (1, False, 0, False)]
    deltas = deltas_of(kinds, 5, 130)
    arena = arena_of(deltas, dtype=torch.bfloat16, is_lane=is_lane)
    assert arena.table.dtype == torch.int64
    assert arena.table.shape == (3, NUM_COLUMNS)
    assert arena.table.tolist() == [list(arena.row(slot)) for slot in range(3)]
    first, second, third = arena.table.tolist()
    assert second == [0, -1, -1, -1, 0, -1, -1]
    assert (first[PLANES], first[RANK], third[PLANES], third[RANK]) == (2, 3, 1, 0)
    assert (third[DOWN], third[UP]) == (-1, -1)
    # Ones where a LANE arena has columns.
    assert (third[COLUMN] >= 0) == is_lane
    for row in (first, third):
        assert all(at == -1 or at % 128 == 0 for at in (row[i] for i in (1, 2, 3, 5, 6)))
    assert arena.data.numel() == 3 * arena.slot_bytes
    delta = deltas[0]
    assert delta is not None
    assert delta.scale is not None
    assert delta.up is not None
    scale = part(arena, first[SCALE], torch.float32, 2, 5)
    if not is_lane:
        assert torch.equal(scale, delta.scale.expand(2, 5))
        packed = part(arena, first[PACKED], torch.uint8, 2, 5, packed_width(130))
        assert delta.packed is not None
        assert torch.equal(packed, delta.packed)
        assert delta.column_scale is not None
        assert torch.equal(part(arena, first[COLUMN], torch.float32, 2, 130), delta.column_scale)
    else:
        columns = part(arena, first[COLUMN], torch.bfloat16, 2, 256)
        assert not columns[:, 130:].any()
        assert delta.column_scale is not None
        product = scale[:, :1] * -columns[:, :130].float()
        torch.testing.assert_close(
            product, delta.scale * delta.column_scale, rtol=2.0**-8, atol=0.0
        )
        ones = part(arena, third[COLUMN], torch.bfloat16, 1, 256)[:, :130]
        assert bool((ones == -1).all())
    up = part(arena, first[UP], torch.bfloat16, 3, 5)
    assert torch.equal(up, delta.up.T.bfloat16())


def part(arena: DeltaArena, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return arena.data[at : at + count].view(dtype).view(shape)


@pytest.mark.parametrize("is_lane", [False, True])
def test_a_slot_written_again_or_cleared_keeps_nothing(is_lane: bool) -> None:
    deltas = deltas_of([(2, True, 3, False), (1, False, 0, True)], 9, 140)
    large, small = deltas
    assert large is not None
    assert small is not None
    arena = arena_of([large, large], dtype=torch.float32, is_lane=is_lane)
    arena.put(0, small)
    fresh = arena_of([large, large], dtype=torch.float32, is_lane=is_lane)
    fresh.clear(0)
    fresh.put(0, small)
    assert torch.equal(arena.data, fresh.data)
    assert torch.equal(arena.table, fresh.table)
    assert_same(arena.delta(1), large, torch.float32)
    arena.clear(0)
    assert arena.is_empty(0)
    assert not arena.data[: arena.slot_bytes].any()
    arena.clear(1)
    assert not arena.data.any()
    assert arena.delta(1) is None


def test_limits_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    small = make_delta(6, 20, (1, False, 1, False), generator)
    arena = arena_of([small], dtype=torch.float32)
    assert arena.takes(small)
    for encoding, message in (
        ((2, False, 0, False), "planes 2: a slot takes 1"),
        ((1, False, 2, False), "rank 2: a slot takes 1"),
        ((1, True, 0, False), "column scales 1: a slot takes 0"),
    ):
        large = make_delta(6, 20, encoding, generator)
        assert not arena.takes(large)
        with pytest.raises(ValueError, match=message):
            arena.put(0, large)
    with pytest.raises(ValueError, match=r"\(6, 21\): needs \(6, 20\)"):
        arena.put(0, make_delta(6, 21, (1, False, 0, False), generator))
    for slot in (-1, 1):
        with pytest.raises(ValueError, match=f"slot {slot}: must be in"):
            arena.put(slot, small)
        with pytest.raises(ValueError, match=f"slot {slot}: must be in"):
            arena.clear(slot)
    with pytest.raises(ValueError, match="no delta"):
        arena_of([None], dtype=torch.float32)
    tight = DeltaArena(
        6, 20, slots=1, slot_bytes=256, planes=1, has_columns=False, rank=1,
        dtype=torch.float32, device="cpu", is_lane=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="bytes 512: a slot takes 256; resize the arena"):
        tight.put(0, small)
    # What was there is there still.
    assert_same(arena.delta(0), small, torch.float32)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("is_lane", [False, True])
def test_a_delta_needs_the_bytes_that_are_said(encoding: Encoding, is_lane: bool) -> None:
    delta = make_delta(7, 150, encoding, torch.Generator())
    arena = arena_of([delta], dtype=torch.bfloat16, is_lane=is_lane)
    needed = form_bytes(form_of(delta), 7, 150, dtype=torch.bfloat16, is_lane=is_lane)
    assert arena.slot_bytes == needed
    row, width = arena.row(0), 16 * 2 if is_lane else packed_width(150)
    ends = [
        row[SCALE] + delta.planes * 7 * 4,
        row[PACKED] + delta.planes * 7 * width,
        row[UP] + delta.rank * 7 * 2,
        row[DOWN] + delta.rank * 150 * 2,
    ]
    assert max(ends) <= needed


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ENCODINGS), sizes, sizes, st.integers(0, 1), st.data())
def test_shards_side_by_side_are_the_whole(
    encoding: Encoding, rows: int, columns: int, axis: int, data: st.DataObject
) -> None:
    """At odd cuts, inside a byte too; some shards are empty."""
    delta = make_delta(rows, columns, encoding, torch.Generator().manual_seed(rows))
    size = (rows, columns)[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    ends = [0, *cuts, size]
    shards = [delta.narrow(axis, start, end - start) for start, end in pairwise(ends)]
    whole = torch.cat([shard.dense(torch.float64) for shard in shards], dim=axis)
    # Another order of summing in the low-rank product is all that may differ.
    torch.testing.assert_close(whole, delta.dense(torch.float64), rtol=1e-12, atol=1e-12)
    for shard in shards:
        if 0 not in (shard.out_features, shard.in_features):
            arena = arena_of([shard], dtype=torch.float32, is_lane=True)
            assert_same(arena.delta(0), shard, torch.float32)


def test_lane_order_is_for_dtypes_that_have_a_kernel() -> None:
    delta = make_delta(4, 16, ENCODINGS[0], torch.Generator())
    assert arena_of([delta], dtype=torch.float64).is_lane is False
    with pytest.raises(ValueError, match=r"torch\.float64 in LANE order"):
        arena_of([delta], dtype=torch.float64, is_lane=True)


def test_a_shard_outside_is_refused() -> None:
    delta = make_delta(4, 10, ENCODINGS[0], torch.Generator())
    for axis, start, length in ((0, 3, 2), (1, -1, 3), (2, 0, 1), (1, 5, -1)):
        with pytest.raises(ValueError, match=f"axis {axis} from {start}"):
            delta.narrow(axis, start, length)


@settings(deadline=None, max_examples=40)
@given(encodings, st.sampled_from([None, *ENCODINGS]), st.integers(0, 7), st.booleans())
def test_a_resized_arena_holds_the_same_and_takes_more(
    kinds: list[Encoding | None], more: Encoding | None, extra: int, is_lane: bool
) -> None:
    deltas = deltas_of([ENCODINGS[0], *kinds], 11, 141)
    arena = arena_of(deltas, dtype=torch.bfloat16, is_lane=is_lane)
    before, table = arena.data.clone(), arena.table.clone()
    larger = deltas_of([more], 11, 141, seed=3)[0]
    there = [delta for delta in (*deltas, larger) if delta is not None]
    room = Room(11, 141, torch.bfloat16, is_lane, frozenset(map(form_of, there)))
    resized = arena.resized(len(deltas) + extra, room)
    assert torch.equal(arena.data, before)
    assert torch.equal(arena.table, table)
    assert resized.slots == len(deltas) + extra
    assert resized.data.nbytes == resized.slots * room.nbytes
    for slot, delta in enumerate(deltas):
        assert_same(resized.delta(slot), delta, torch.bfloat16)
        held = arena.delta(slot)
        if held is not None:
            again = resized.delta(slot)
            assert again is not None
            # Nothing is rounded a second time.
            torch.testing.assert_close(again.dense(), held.dense(), rtol=1e-6, atol=1e-9)
    assert resized.table.tolist() == [list(resized.row(slot)) for slot in range(resized.slots)]
    for slot in range(len(deltas), resized.slots):
        assert resized.is_empty(slot)
    if larger is not None:
        assert resized.takes(larger)
        resized.put(0, larger)
        assert_same(resized.delta(0), larger, torch.bfloat16)
        for slot, delta in list(enumerate(deltas))[1:]:
            assert_same(resized.delta(slot), delta, torch.bfloat16)


@pytest.mark.parametrize("is_lane", [False, True])
def test_an_arena_shrinks_to_what_it_holds_and_no_further(is_lane: bool) -> None:
    small, large = deltas_of([(1, False, 0, False), (2, False, 3, False)], 11, 141)
    assert small is not None
    assert large is not None
    arena = arena_of([small, large, small], dtype=torch.float32, is_lane=is_lane)
    room = Room(11, 141, torch.float32, is_lane, frozenset({form_of(small)}))
    with pytest.raises(ValueError, match="a slot takes 1"):
        arena.resized(3, room)
    arena.clear(1)
    with pytest.raises(ValueError, match=r"slot 2: must be in 0\.\.1"):
        arena.resized(2, room)
    arena.clear(2)
    shrunk = arena.resized(2, room)
    assert shrunk.data.nbytes == 2 * room.nbytes < arena.data.nbytes
    assert_same(shrunk.delta(0), small, torch.float32)


@pytest.mark.parametrize("is_lane", [False, True])
def test_a_slot_is_written_whole(is_lane: bool) -> None:
    """Serving rule R4: whatever a slot held, NaN too, nothing of it remains."""
    small, large = deltas_of([(1, False, 0, False), (3, True, 4, False)], 13, 141)
    assert large is not None
    for delta in (small, large):
        assert delta is not None
        arena = arena_of([large, large], dtype=torch.float32, is_lane=is_lane)
        fresh = arena.resized(2, Room(13, 141, torch.float32, is_lane, frozenset({form_of(large)})))
        arena.data.fill_(0xFF)
        for one in (arena, fresh):
            one.clear(0)
            one.put(0, delta)
        size = arena.slot_bytes
        assert torch.equal(arena.data[:size], fresh.data[:size])
        assert torch.equal(arena.table[0], fresh.table[0])
        arena.data.fill_(0xFF)
        arena.put(0, delta)
        assert torch.equal(arena.data[:size], fresh.data[:size])


def test_an_arena_over_its_tensors_reads_the_same() -> None:
    deltas = deltas_of([ENCODINGS[7], None], 6, 33)
    arena = arena_of(deltas, dtype=torch.float32)
    other = DeltaArena.over(
        arena.data, arena.table, out_features=6, in_features=33, planes=arena.planes,
        has_columns=arena.has_columns, rank=arena.rank, dtype=torch.float32, is_lane=False,
    )  # fmt: skip
    assert (other.slots, other.slot_bytes) == (arena.slots, arena.slot_bytes)
    assert_same(other.delta(0), deltas[0], torch.float32)
    assert other.is_empty(1)


def test_tiny_column_scales_survive_float16() -> None:
    """Columns are stored over their greatest magnitude, which goes into the row scale."""
    delta = Delta(
        2, 5, pack(torch.ones(1, 2, 5)), torch.full((1, 2), 0.5), torch.full((1, 5), 1e-7)
    )
    for columns in (delta.column_scale, torch.zeros(1, 5)):
        given = replace(delta, column_scale=columns)
        arena = arena_of([given], dtype=torch.float16, is_lane=True)
        assert_same(arena.delta(0), given, torch.float16)
