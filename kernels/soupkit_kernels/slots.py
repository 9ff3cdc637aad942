"""How large a slot of a layer's arena has to be, from what variants hold there; no tensors.

A slot takes P planes of signs with their scales, column scales, and a low-rank part of rank R, each
from a multiple of 128 bytes on (arena.py has the layout). Slots are equal, so an arena that any of
several forms must fit in has slots as large as the largest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.delta import Delta
from soupkit_kernels.lane import BLOCK_SIGNS, lane_words

# Parts begin at multiples of a cache line.
ALIGNMENT = 128


class Form(NamedTuple):
    """What a delta of one layer consists of, beside the layer's shape."""

    planes: int
    rank: int
    has_columns: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The slots of one layer's arena: they take a delta of any of these forms.

    Args:
        dtype: of the layer's weight. is_lane: signs in LANE order.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    is_lane: bool
    forms: frozenset[Form]

    @property
    def planes(self) -> int:
        """The most that a slot may hold."""
        return max((form.planes for form in self.forms), default=0)

    @property
    def rank(self) -> int:
        """The most that a slot may hold."""
        return max((form.rank for form in self.forms), default=0)

    @property
    def has_columns(self) -> bool:
        """Whether slots may hold column scales."""
        return any(form.has_columns for form in self.forms)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, a multiple of 128."""
        has_columns = self.has_columns
        sizes = (
            form_bytes(
                form, self.out_features, self.in_features, dtype=self.dtype,
                is_lane=self.is_lane, has_columns=has_columns,
            )
            for form in self.forms
        )  # fmt: skip
        return max(sizes, default=0)

    def merged(self, other: Room) -> Room:
        """Slots of the same layer that take the forms of both.

        Raises:
            ValueError: it is of another layer.
        """
        if replace(other, forms=self.forms) != self:
            raise ValueError(f"slots of {self} and {other}: these are not of one layer")
        return replace(self, forms=self.forms | other.forms)


def form_of(delta: Delta) -> Form:
    """What a delta consists of."""
    return Form(delta.planes, delta.rank, delta.column_scale is not None)


def form_bytes(
    form: Form,
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype,
    is_lane: bool,
    has_columns: bool = False,
) -> int:
    """Bytes that a delta of a form takes in a slot.

    Args:
        has_columns: whether any slot of the arena has columns: in LANE order all have then.
    """
    planes, rows, columns = form.planes, out_features, in_features
    sizes = [planes * rows * (4 * lane_words(columns) if is_lane else packed_width(columns))]
    sizes.append(planes * rows * 4)
    if form.has_columns or (is_lane and has_columns):
        whole_blocks = BLOCK_SIGNS * -(-columns // BLOCK_SIGNS)
        sizes.append(planes * (whole_blocks * dtype.itemsize if is_lane else columns * 4))
    sizes += [form.rank * columns * dtype.itemsize, form.rank * rows * dtype.itemsize]
    return sum(map(aligned, sizes))


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
