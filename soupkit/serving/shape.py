"""How large a slot of the device is: what any variant of a family needs in each module.

    slot bytes = sum over modules of (largest packed form there + whole tensors there)

Slots are equal, so that any variant fits in any of them and taking one out for another changes no
shape and no address; the budget of a device over the bytes of a slot is how many there are.

For a captured CUDA graph that is half of what a replay needs. The other half would be that
`VariantBank.set_batch` fills buffers of fixed addresses instead of making new ones (`Rows.index`,
and a plan made on the device, `soupkit_kernels.plan.device_plan`, whose shapes follow from the
numbers of rows and slots alone), and that no patch asks which slots are active: all would take the
mixed way, in which an empty slot acts as the base.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from soupkit.manifest import Manifest, matrix_shape
from soupkit_kernels import Delta
from soupkit_kernels.slots import Room


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """A tensor that a slot holds whole: a norm's or a bias's, or a matrix stored raw."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the model's parameter

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """What a slot takes in one module: a packed delta of its weight, and whole tensors by name."""

    room: Room | None = None
    whole: Mapping[str, WholeSpec] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        packed = 0 if self.room is None else self.room.nbytes
        return packed + sum(spec.nbytes for spec in self.whole.values())

    def merged(self, other: "ModuleShape") -> "ModuleShape":
        """What takes either."""
        room = self.room or other.room
        if self.room is not None and other.room is not None:
            room = self.room.merged(other.room)
        return ModuleShape(room, {**self.whole, **other.whole})


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What a slot takes in every module, by the module's name in the model."""

    modules: Mapping[str, ModuleShape] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, exactly those that `VariantBank.reserve` allocates for it."""
        return sum(module.nbytes for module in self.modules.values())

    def merged(self, other: "SlotShape") -> "SlotShape":
        """A slot that takes whatever fits in one of the two."""
        modules = dict(self.modules)
        for name, module in other.modules.items():
            modules[name] = modules.get(name, ModuleShape()).merged(module)
        return SlotShape(modules)

    def over(self, shape_of: Callable[[str, str], Sequence[int]]) -> "SlotShape":
        """Slots of the same forms for parameters of other sizes.

        Args:
            shape_of: the shape of a parameter, by its module's name and its own.
        """
        modules = {}
        for name, module in self.modules.items():
            room = module.room
            if room is not None:
                rows, columns = shape_of(name, "weight")
                room = replace(room, out_features=rows, in_features=columns)
            whole = {
                own: replace(spec, shape=tuple(shape_of(name, own)))
                for own, spec in module.whole.items()
            }
            modules[name] = ModuleShape(room, whole)
        return SlotShape(modules)

    def takes(self, other: "SlotShape") -> bool:
        """Whether what `other` is the shape of fits as it is."""
        return self.merged(other).modules == self.modules


def outline(manifest: Manifest) -> tuple[dict[str, Delta], dict[str, Tensor]]:
    """The deltas and the whole tensors of a variant, by parameter, on the meta device: no data."""
    deltas: dict[str, Delta] = {}
    raw: dict[str, Tensor] = {}
    for entry in manifest.tensors:
        parts = {
            name.rpartition(".")[2]: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for name, spec in entry.stored_specs().items()
        }
        if entry.kind == "raw":
            raw[entry.name] = parts["raw"]
        elif entry.kind == "delta":
            deltas[entry.name] = Delta(
                *matrix_shape(entry.name, entry.shape), parts.get("sign"), parts.get("scale"),
                parts.get("column"), parts.get("up"), parts.get("down"),
            )  # fmt: skip
    return deltas, raw
