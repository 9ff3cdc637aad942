"""The deltas of one layer in one piece of memory: slots of equal size and a table of what is where.

Every variant of a batch is found through the table, so variants of different encodings mix, and one
slot takes another variant without a change of any shape or address: a captured CUDA graph stays
good. A slot is written whole: nothing of what it held remains. Signs lie in the order of files, or
for the Triton kernels in LANE order (lane.py). Not here: which variant is in which slot, and when
one may be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from soupkit_kernels import triton_support
from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.delta import Delta
from soupkit_kernels.lane import BLOCK_SIGNS, from_lane, lane_words, to_lane
from soupkit_kernels.slots import Form, Room, aligned, form_bytes, form_of

# Columns of the table. Offsets are bytes from the start of the arena; -1 where a part is absent.
PLANES, PACKED, SCALE, COLUMN, RANK, DOWN, UP = range(7)
NUM_COLUMNS = 7
_EMPTY = (0, -1, -1, -1, 0, -1, -1)


class DeltaArena:
    """The slots of one layer.

    A slot holds, in this order and each from a multiple of 128 bytes on:
        signs   uint8 [P, N, row_bytes], row_bytes ceil(K / 8), or 16 ceil(K / 128) in LANE order
        scale   float32 [P, N]: one of a matrix is repeated
        columns float32 [P, K]; in LANE order the weight's dtype [P, 128 ceil(K / 128)], negated,
                divided by their greatest magnitude (which goes into the scale)
        down    the weight's dtype [R, K]
        up      the weight's dtype [R, N], transposed
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        slots: int,
        slot_bytes: int,
        planes: int,
        has_columns: bool,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        is_lane: bool,
    ) -> None:
        """All slots are empty.

        Args:
            slots, slot_bytes: how many and how large; slots.py says what a delta takes.
            planes, rank: the most that a slot may hold.
            has_columns: whether slots may hold column scales.
            dtype: of the layer's weight.
            is_lane: signs in LANE order, for the Triton kernels.
        Raises:
            ValueError: a count is negative, or LANE order for a dtype that has no kernel.
        """
        if min(out_features, in_features, slots, slot_bytes, planes, rank) < 0:
            raise ValueError(
                f"sizes {(out_features, in_features, slots, slot_bytes, planes, rank)}: "
                "none may be negative"
            )
        if is_lane and dtype not in triton_support.DTYPES:
            raise ValueError(f"{dtype} in LANE order: needs one of {triton_support.DTYPES}")
        self.out_features, self.in_features = out_features, in_features
        self.slots, self.slot_bytes = slots, aligned(slot_bytes)
        self.planes, self.has_columns, self.rank = planes, has_columns, rank
        self.dtype, self.is_lane = dtype, is_lane
        self.data = torch.zeros(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        # A copy of the table on the host, so that nobody has to ask the device.
        self._rows: list[tuple[int, ...]] = [_EMPTY] * slots
        # Slots that hold something, columns, a low-rank part; `native` keeps its view of them here.
        self.filled: set[int] = set()
        self.with_columns: set[int] = set()
        self.with_rank: set[int] = set()
        self.native_struct: Any = None
        self.table = torch.tensor(self._rows, dtype=torch.int64).view(slots, NUM_COLUMNS).to(device)

    @classmethod
    def over(
        cls,
        data: Tensor,
        table: Tensor,
        *,
        out_features: int,
        in_features: int,
        planes: int,
        has_columns: bool,
        rank: int,
        dtype: torch.dtype,
        is_lane: bool,
    ) -> DeltaArena:
        """The arena whose `data` and `table` these are, to be read: what an operator is given."""
        arena = cls(
            out_features, in_features, slots=0, slot_bytes=0, planes=planes,
            has_columns=has_columns, rank=rank, dtype=dtype, device=data.device, is_lane=is_lane,
        )  # fmt: skip
        arena.data, arena.table, arena.slots = data, table, table.shape[0]
        arena.slot_bytes = data.numel() // max(1, arena.slots)
        # The Triton path never reads it, and a GPU would have to be waited for.
        arena._rows = [] if is_lane else [tuple(row) for row in table.tolist()]
        for slot, row in enumerate(arena._rows):
            arena._note(slot, row)
        return arena

    @property
    def device(self) -> torch.device:
        return self.data.device

    def is_empty(self, slot: int) -> bool:
        """Whether the slot acts as the base; known without asking the device."""
        return slot not in self.filled

    def row(self, slot: int) -> tuple[int, ...]:
        """The slot's row of the table; known without asking the device."""
        return self._rows[slot]

    def takes(self, delta: Delta) -> bool:
        """Whether a slot has room for it."""
        return not any(has > limit for _, has, limit in self._limits(form_of(delta)))

    def put(self, slot: int, delta: Delta) -> None:
        """Write a delta into a slot; what it held is gone.

        Raises:
            ValueError: no such slot, another shape, or more than the arena or a slot takes.
        """
        self._check(slot, form_of(delta), (delta.out_features, delta.in_features))
        parts = self._stored(delta)
        row, at = list(_EMPTY), slot * self.slot_bytes
        row[PLANES], row[RANK] = delta.planes, delta.rank
        memory = self.data[at : at + self.slot_bytes]
        used = 0
        self._set_row(slot, _EMPTY)
        for column, part in parts.items():
            row[column] = at + used
            flat = part.contiguous().view(-1).view(torch.uint8)
            memory[used : used + flat.numel()].copy_(flat)
            end = aligned(used + flat.numel())
            memory[used + flat.numel() : end].zero_()
            used = end
        memory[used:].zero_()
        self._set_row(slot, tuple(row))

    def clear(self, slot: int) -> None:
        """Empty a slot: it acts as the base.

        Raises:
            ValueError: no such slot.
        """
        self._check_slot(slot)
        self._set_row(slot, _EMPTY)
        self.data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes].zero_()

    def delta(self, slot: int) -> Delta | None:
        """What a slot holds, in the order of files; None if it is empty.

        Without LANE order these are views, good until the slot is written.
        """
        self._check_slot(slot)
        if self.is_empty(slot):
            return None
        rows, columns, row = self.out_features, self.in_features, self._rows[slot]
        planes, rank = row[PLANES], row[RANK]
        packed = scale = column_scale = up = down = None
        if planes:
            if self.is_lane:
                words = self._part(row[PACKED], torch.int32, planes, rows, lane_words(columns))
                packed = from_lane(words, columns)
            else:
                packed = self._part(row[PACKED], torch.uint8, planes, rows, packed_width(columns))
            scale = self._part(row[SCALE], torch.float32, planes, rows)
        if row[COLUMN] >= 0:
            stored = self._part(row[COLUMN], self._column_dtype, planes, self._column_width)
            column_scale = -stored[:, :columns].float() if self.is_lane else stored
        if rank:
            down = self._part(row[DOWN], self.dtype, rank, columns)
            up = self._part(row[UP], self.dtype, rank, rows).T
        return Delta(rows, columns, packed, scale, column_scale, up, down)

    def resized(self, slots: int, room: Room) -> DeltaArena:
        """A new arena with the same content in other slots; this one is left as it is.

        Raises:
            ValueError: what a slot holds has no place there, or the room is of another layer.
        """
        other = arena_for(room, slots=slots, device=self.device)
        # Bytes lie the same in both, but LANE order has columns in all slots or in none.
        is_same = not self.is_lane or other.has_columns == self.has_columns
        for slot in range(self.slots):
            if self.is_empty(slot):
                continue
            row = self._rows[slot]
            form = Form(row[PLANES], row[RANK], row[COLUMN] >= 0)
            other._check(slot, form, (self.out_features, self.in_features))
            if is_same:
                other._copy_slot(slot, self)
            else:
                delta = self.delta(slot)
                assert delta is not None
                other.put(slot, delta)
        return other

    def _copy_slot(self, slot: int, source: DeltaArena) -> None:
        """A slot of another arena, byte for byte; past its content both are zero."""
        to, at = slot * self.slot_bytes, slot * source.slot_bytes
        size = min(self.slot_bytes, source.slot_bytes)
        self.data[to : to + size].copy_(source.data[at : at + size])
        row = list(source.row(slot))
        for column in (PACKED, SCALE, COLUMN, DOWN, UP):
            row[column] += to - at if row[column] >= 0 else 0
        self._set_row(slot, tuple(row))

    @property
    def _column_dtype(self) -> torch.dtype:
        return self.dtype if self.is_lane else torch.float32

    @property
    def _column_width(self) -> int:
        if self.is_lane:
            return BLOCK_SIGNS * -(-self.in_features // BLOCK_SIGNS)
        return self.in_features

    def _part(self, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
        end = at + dtype.itemsize * torch.Size(shape).numel()
        return self.data[at:end].view(dtype).view(shape)

    def _set_row(self, slot: int, row: tuple[int, ...]) -> None:
        self._rows[slot] = row
        self._note(slot, row)
        self.table[slot] = torch.tensor(row, dtype=torch.int64)

    def _note(self, slot: int, row: tuple[int, ...]) -> None:
        """Keep the sets of slots as the row says."""
        for slots, has in (
            (self.filled, row != _EMPTY),
            (self.with_columns, row[COLUMN] >= 0),
            (self.with_rank, row[RANK] > 0),
        ):
            if has:
                slots.add(slot)
            else:
                slots.discard(slot)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot}: must be in 0..{self.slots - 1}")

    def _check(self, slot: int, form: Form, shape: tuple[int, int]) -> None:
        self._check_slot(slot)
        if shape != (self.out_features, self.in_features):
            raise ValueError(f"a delta {shape}: needs {(self.out_features, self.in_features)}")
        for name, has, limit in self._limits(form):
            if has > limit:
                raise ValueError(
                    f"a delta with {name} {has}: a slot takes {limit}; resize the arena"
                )

    def _limits(self, form: Form) -> tuple[tuple[str, int, int], ...]:
        """What a delta has and what a slot takes."""
        needed = form_bytes(
            form, self.out_features, self.in_features, dtype=self.dtype, is_lane=self.is_lane,
            has_columns=self.has_columns,
        )  # fmt: skip
        return (
            ("planes", form.planes, self.planes),
            ("rank", form.rank, self.rank),
            ("column scales", int(form.has_columns), int(self.has_columns)),
            ("bytes", needed, self.slot_bytes),
        )

    def _stored(self, delta: Delta) -> dict[int, Tensor]:
        """The parts as they lie in a slot, by column of the table, in order."""
        parts: dict[int, Tensor] = {}
        device = self.device
        if delta.packed is not None and delta.scale is not None:
            packed = delta.packed.to(device)
            parts[PACKED] = to_lane(packed, self.in_features) if self.is_lane else packed
            scale = delta.scale.to(device).expand(-1, self.out_features)
            columns = None if delta.column_scale is None else delta.column_scale.to(device)
            if self.is_lane and self.has_columns:
                if columns is None:
                    columns = scale.new_ones(delta.planes, self.in_features)
                # In float16 small scales would lose bits or vanish.
                top = columns.abs().amax(dim=1, keepdim=True) if self.in_features else columns
                top = torch.where(top > 0, top, 1.0) if self.in_features else scale.new_ones(1, 1)
                scale = scale * top
                stored = columns.new_zeros(delta.planes, self._column_width, dtype=self.dtype)
                stored[:, : self.in_features] = -columns / top
                columns = stored
            parts[SCALE] = scale
            if columns is not None:
                parts[COLUMN] = columns
        if delta.down is not None and delta.up is not None:
            parts[DOWN] = delta.down.to(device, self.dtype)
            parts[UP] = delta.up.to(device, self.dtype).T
        return parts


def arena_of(
    deltas: Sequence[Delta | None],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    is_lane: bool | None = None,
) -> DeltaArena:
    """An arena with a slot for each delta, as large as the largest needs.

    Args:
        deltas: of one layer, at least one; None leaves a slot empty.
        dtype, device: of the layer's weight.
        is_lane: LANE order; None: where the Triton kernels can take the layer.
    Raises:
        ValueError: no delta, or one of another shape.
    """
    there = [delta for delta in deltas if delta is not None]
    if not there:
        raise ValueError("no delta: the shape of the layer is unknown; make a DeltaArena")
    planes = max(delta.planes for delta in there)
    if is_lane is None:
        is_lane = triton_support.why_not(device, dtype, there[0].in_features, planes) is None
    room = Room(
        there[0].out_features, there[0].in_features, dtype, is_lane,
        frozenset(form_of(delta) for delta in there),
    )  # fmt: skip
    arena = arena_for(room, slots=len(deltas), device=device)
    for slot, delta in enumerate(deltas):
        if delta is not None:
            arena.put(slot, delta)
    return arena


def arena_for(room: Room, *, slots: int, device: torch.device | str) -> DeltaArena:
    """An arena of empty slots that take what the room says."""
    return DeltaArena(
        room.out_features, room.in_features, slots=slots, slot_bytes=room.nbytes,
        planes=room.planes, has_columns=room.has_columns, rank=room.rank, dtype=room.dtype,
        device=device, is_lane=room.is_lane,
    )  # fmt: skip
