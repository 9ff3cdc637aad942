"""The tensors that variants hold whole in one module: norms, biases, matrices stored raw.

One table [slots, *shape] for each parameter that some variant may hold. A table of vectors has one
row more in front, the base's, and a slot without a vector of its own repeats it: the values of all
tokens are then one gather, whatever variants they are of.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .parallel import local
from .shape import WholeSpec


class WholeTensors:
    """The slots of one module; none holds anything at first."""

    def __init__(self, module: nn.Module, specs: Mapping[str, WholeSpec], slots: int) -> None:
        """specs: by the parameter's name in the module; they have its shapes and dtypes."""
        self.specs, self.slots = dict(specs), slots
        self.held: dict[int, frozenset[str]] = {}  # slot -> the names that it has of its own
        self._module = module
        self._tables: dict[str, Tensor] = {}
        for name, spec in specs.items():
            base = _parameter(module, name)
            self._tables[name] = (
                base.detach().expand(slots + 1, -1).clone()
                if len(spec.shape) == 1
                else base.new_zeros(slots, *spec.shape)
            )
        self._clones: dict[int, Any] = {}
        self._mixed: Any = None

    @property
    def nbytes(self) -> int:
        """Of the slots, without the rows of the base."""
        return sum(self._slots_of(name).nbytes for name in self._tables)

    def put(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a slot, which holds nothing."""
        if tensors:
            self.held[slot] = frozenset(tensors)
        for name, tensor in tensors.items():
            self._slots_of(name)[slot].copy_(tensor)

    def clear(self, slot: int) -> None:
        """Make a slot as it was at first."""
        self._clones.pop(slot, None)
        for name in self.held.pop(slot, frozenset()):
            if self._is_vector(name):
                self._slots_of(name)[slot].copy_(self._tables[name][0])
            else:
                self._slots_of(name)[slot].zero_()

    def resized(self, specs: Mapping[str, WholeSpec], slots: int) -> "WholeTensors":
        """As many slots of other tensors, holding what these hold; it must fit."""
        other = WholeTensors(self._module, specs, slots)
        for slot, names in self.held.items():
            other.put(slot, {name: self._slots_of(name)[slot] for name in names})
        return other

    def own(self, slot: int, name: str) -> Tensor:
        """A parameter as a slot has it: its own or the base's, a view."""
        if name in self.held.get(slot, ()):
            return self._slots_of(name)[slot]
        return _parameter(self._module, name)

    def base(self, name: str) -> Tensor:
        """The base's vector, as the table has it."""
        return self._tables[name][0]

    def vectors(self, name: str, index: Tensor, ndim: int, axis: int) -> Tensor:
        """[rows, 1, ..., n]: the vector of each row, to meet [..., n] that has rows along `axis`.

        Args:
            index: [rows] int64, slot + 1; 0 is the base.
        """
        rows = self._tables[name].index_select(0, index)
        return rows.view(-1, *[1] * (ndim - axis - 2), rows.shape[1])

    def clone(self, slot: int) -> Any:
        """The module with what a slot holds in its place."""
        found = self._clones.get(slot)
        if found is None:
            parts = {name: self._slots_of(name)[slot] for name in self.held[slot]}
            found = self._clones[slot] = with_parameters(self._module, parts)
        return found

    def mixed(self, index: Tensor, ndim: int, axis: int) -> Any:
        """The module with each row's own vectors; only on the thread that runs the forwards."""
        if self._mixed is None:
            self._mixed = with_parameters(self._module, {})
        for name in self._tables:
            self._mixed._parameters[name] = self.vectors(name, index, ndim, axis)
        return self._mixed

    def _is_vector(self, name: str) -> bool:
        return len(self.specs[name].shape) == 1

    def _slots_of(self, name: str) -> Tensor:
        """[slots, *shape], a view."""
        return self._tables[name][1:] if self._is_vector(name) else self._tables[name]


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters[name]
    assert parameter is not None
    return local(parameter)


def with_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Any:
    """A shallow copy of a leaf module with some parameters replaced; everything else is shared."""
    clone = copy.copy(module)
    clone.__dict__.pop("forward", None)
    clone.__dict__["_parameters"] = {**module._parameters, **parameters}
    return clone


@torch.no_grad()
def takes_vectors_per_token(module: nn.Module, inputs: Tensor, axis: int) -> bool:
    """Whether the module, given a vector a row in place of each of its parameters, gives each row
    what it gives alone with its vectors: so it is for norms that multiply, not for F.layer_norm.

    Args:
        inputs: that the module was given, its rows along `axis`.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    rows = inputs.shape[axis]
    if any(p.ndim != 1 for p in own.values()) or not 0 <= axis < inputs.ndim - 1:
        return False
    steps = torch.arange(rows, device=inputs.device).view(-1, 1)
    tables = {name: p + (steps * 0.125).to(p.dtype) for name, p in own.items()}
    middle = [1] * (inputs.ndim - axis - 2)
    spread = {name: t.view(rows, *middle, t.shape[1]) for name, t in tables.items()}
    try:
        together = with_parameters(module, spread).forward(inputs)
    except (RuntimeError, TypeError, ValueError):
        return False
    for row in (0, rows // 2, rows - 1):
        alone = with_parameters(module, {name: t[row] for name, t in tables.items()})
        expected = alone.forward(inputs.narrow(axis, row, 1))
        found = together.narrow(axis, row, 1) if together.shape == inputs.shape else None
        if found is None or not torch.equal(found, expected):
            return False
    return True
