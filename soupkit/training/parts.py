"""Parts: what one rank holds of a weight, and where that lies in the whole.

A part is live memory that is a box of the whole, seen in some shape of it: all of it (plain, DDP),
a range of the flat tensor (ZeRO, FSDP1) or a box of rows and columns (DTensor). Everything that is
done to weights is done to parts, so a strategy only has to say what its parts are. Sums of bits
add up over parts, so a checksum needs one small reduction, whatever the sharding. Not here: which
strategy has which parts, and communication.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The integer type whose bits are summed, by bytes an entry.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One rank's live memory of a weight.

    Args:
        data: writing it changes the weight.
        view: shape of the whole in which the part is a box; as many axes as `data`.
        start: the box's first corner.
    """

    data: Tensor
    view: tuple[int, ...]
    start: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The same box of a contiguous whole, as a view of it."""
        corners = zip(self.start, self.data.shape, strict=True)
        return whole.view(self.view)[tuple(slice(at, at + count) for at, count in corners)]


@dataclass(frozen=True, slots=True, eq=False)
class Weight(ABC):
    """One parameter or buffer of a model, as this rank holds it.

    Args:
        tensor: by which the model knows it.
    """

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the value: of the optimizer's master copy, where there is one."""
        dtype: torch.dtype = self.tensor.dtype
        return dtype

    @property
    def is_trainable(self) -> bool:
        """Whether it takes gradients."""
        return bool(self.owner.requires_grad)

    @property
    def owner(self) -> Tensor:
        """The tensor by which an optimizer knows it."""
        owner: Tensor = self.tensor
        return owner

    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Parts of the value; none where other ranks hold it."""

    def copies(self) -> tuple[Part, ...]:
        """Parts of the copies that follow the value, rounded to their own dtypes."""
        return ()


def whole_part(tensor: Tensor) -> Part:
    """The part that is all of a weight."""
    shape = tuple(tensor.shape)
    return Part(tensor, shape, (0,) * len(shape))


def flat_part(data: Tensor, *, start: int, numel: int) -> Part:
    """The part that is entries [start, start + len(data)) of a weight of `numel` entries."""
    return Part(data, (numel,), (start,))


@dataclass(frozen=True, slots=True, eq=False)
class Whole(Weight):
    """A weight that every rank holds whole: plain, DDP.

    Args:
        master: the optimizer's float32 copy, where it keeps one.
    """

    master: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        value: Tensor = self.tensor if self.master is None else self.master
        return value.dtype

    def parts(self) -> tuple[Part, ...]:
        """See Weight."""
        value = self.tensor if self.master is None else self.master
        return (whole_part(value.detach().view(self.shape)),)

    def copies(self) -> tuple[Part, ...]:
        """See Weight."""
        return () if self.master is None else (whole_part(self.tensor.detach()),)


def sum_of_bits(part: Part, shape: tuple[int, ...]) -> Tensor:
    """0-d int64: bits of the part's entries as integers, each row's sum times 2 row + 1, wrapped.

    Rows are those of the whole (entries, where it has at most one axis), so the sums of all counted
    parts add up to that of the whole.
    """
    data = part.data.contiguous()
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=data.device)
    bits = data.view(_BITS[data.element_size()])
    if len(shape) < 2:
        return _weighted(bits.reshape(-1, 1), part.start[0] if part.start else 0)
    if part.view == shape:
        return _weighted(bits.reshape(data.shape[0], -1), part.start[0])
    # A flat range: the end of a row, whole rows, the beginning of a row.
    length = math.prod(shape[1:])
    row, inside = divmod(part.start[0], length)
    head = min((length - inside) % length, bits.numel())
    body = (bits.numel() - head) // length * length
    pieces = [
        (bits[:head], row),
        (bits[head : head + body], row + (head > 0 or inside > 0)),
        (bits[head + body :], row + (head > 0 or inside > 0) + body // length),
    ]
    sums = [
        _weighted(piece.reshape(-1, length) if index == 1 else piece.reshape(1, -1), first)
        for index, (piece, first) in enumerate(pieces)
        if piece.numel()
    ]
    return torch.stack(sums).sum()


def _weighted(bits: Tensor, first_row: int) -> Tensor:
    """Sum over rows of (2 row + 1) times the row's sum of integers."""
    sums = bits.sum(dim=1, dtype=torch.int64)
    rows = torch.arange(first_row, first_row + len(sums), device=bits.device)
    return (sums * (rows * 2 + 1)).sum()
