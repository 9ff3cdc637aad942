"""Where a checkpoint's tensor lies in vLLM's merged and split modules: arithmetic, no vLLM.

vLLM joins matrices that read the same input (q, k, v; gate, up) into one module, and under tensor
parallelism holds of each its own rows (column-parallel) or columns (row-parallel). A module's rows
on one rank are its parts, one after another:

    local rows = [part 0's share | part 1's share | ...],  share = full[start : start + length]

then padding (vocabularies). Ranks beyond the number of key/value heads hold copies of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels import Delta


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one checkpoint matrix that a rank holds, in rows.

    Attributes:
        full: rows in the checkpoint. start, length: of the share. padding: rows after it that no
            checkpoint has.
    """

    full: int
    start: int
    length: int
    padding: int = 0

    @property
    def local(self) -> int:
        """Rows in the module."""
        return self.length + self.padding


@dataclass(frozen=True, slots=True)
class Layout:
    """What a rank holds of a module's matrix: the parts of its rows, and a range of its columns."""

    parts: tuple[Part, ...]
    columns: Part

    @property
    def rows(self) -> int:
        """Rows in the module."""
        return sum(part.local for part in self.parts)

    def offset(self, index: int) -> int:
        """Where a part begins among the module's rows."""
        return sum(part.local for part in self.parts[:index])

    def shares(self, value: Delta | Tensor, index: int | None) -> dict[int, Delta | Tensor]:
        """What a checkpoint's tensor is in this module, by part.

        Args:
            value: the whole matrix, or a bias. index: the part that it is; None: all of them, in
                one tensor, as some checkpoints have them.
        Raises:
            ValueError: its shape is another.
        """
        parts = self.parts if index is None else (self.parts[index],)
        rows = sum(part.full for part in parts)
        if isinstance(value, Delta):
            shape: tuple[int, ...] = (value.out_features, value.in_features)
        else:
            shape = tuple(value.shape)
        wanted = (rows,) if len(shape) == 1 else (rows, self.columns.full)
        if shape != wanted:
            raise ValueError(f"shape {shape}, the base's is {wanted}")
        found: dict[int, Delta | Tensor] = {}
        begin = 0
        for number, part in enumerate(parts, start=index or 0):
            share = value.narrow(0, begin + part.start, part.length)
            begin += part.full
            if len(shape) == 2 and self.columns.length != self.columns.full:
                share = share.narrow(1, self.columns.start, self.columns.length)
            found[number] = padded(share, part.padding) if part.padding else share
        return found


def padded(value: Delta | Tensor, rows: int) -> Delta | Tensor:
    """With rows of zeros after its own."""
    if isinstance(value, Tensor):
        return F.pad(value, (*[0, 0] * (value.ndim - 1), 0, rows))
    packed, scale, up = value.packed, value.scale, value.up
    if packed is not None and scale is not None:
        packed = F.pad(packed, (0, 0, 0, rows))
        scale = F.pad(scale.expand(-1, value.out_features), (0, rows))
    if up is not None:
        up = F.pad(up, (0, 0, 0, rows))
    return replace(value, out_features=value.out_features + rows, packed=packed, scale=scale, up=up)


def whole(size: int) -> Part:
    """A dimension that is not split."""
    return Part(size, 0, size)


def split(size: int, ranks: int, rank: int) -> Part:
    """A dimension that is split evenly."""
    return Part(size, rank * (size // ranks), size // ranks)


def qkv_parts(
    heads: int, kv_heads: int, head_sizes: tuple[int, int], *, ranks: int, rank: int
) -> tuple[Part, ...]:
    """The rows of q, k and v.

    Args:
        heads, kv_heads: of the whole model. head_sizes: rows a head, of q and k, and of v.
        ranks: more than `kv_heads` of them share each in groups.
    """
    copies = max(1, ranks // kv_heads)
    size, value_size = head_sizes
    shares = max(1, ranks // copies)
    return (
        split(heads * size, ranks, rank),
        split(kv_heads * size, shares, rank // copies),
        split(kv_heads * value_size, shares, rank // copies),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's place: the module, the part of its rows (None: all), the parameter there."""

    module: str
    part: int | None
    parameter: str


def place_of(
    name: str, modules: Sequence[str] | Mapping[str, object], packed: Mapping[str, Sequence[str]]
) -> Place | None:
    """Where the tensor of that name lies; None if the model has no such module.

    Args:
        name: as the model names it, "model.layers.0.self_attn.q_proj.weight". modules: their
            names. packed: of joined modules the names of what is joined.
    """
    path, _, parameter = name.rpartition(".")
    if path in modules:
        return Place(path, None, parameter)
    parent, _, leaf = path.rpartition(".")
    for joined, leaves in packed.items():
        candidate = f"{parent}.{joined}" if parent else joined
        if leaf in leaves and candidate in modules:
            return Place(candidate, list(leaves).index(leaf), parameter)
    return None


def meta_like(value: Delta | Tensor) -> Delta | Tensor:
    """Its shape without its data."""
    if isinstance(value, Tensor):
        return value.to("meta")
    parts = (value.packed, value.scale, value.column_scale, value.up, value.down)
    moved: list[Tensor | None] = [
        None if part is None else torch.empty_like(part, device="meta") for part in parts
    ]
    return Delta(value.out_features, value.in_features, *moved)
