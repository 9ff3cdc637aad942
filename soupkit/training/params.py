"""The parameters that take part in merges: read whole, written whole, summed up in a checksum.

A parameter takes part if it is floating, trainable and chosen by include/exclude. Reading gathers
one at a time where the strategy shards them; writing is local, because every rank is given the
whole new value and takes its own part: master, low-precision copy and partition all follow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from soupkit.delta import canonical_name, selected
from soupkit.errors import TrainingError
from soupkit.training.parts import Part, Weight, sum_of_bits
from soupkit.training.peft import LoraUnit, is_peft, lora_units
from soupkit.training.refusals import refuse_unsupported
from soupkit.training.weights import (
    ModelTensors,
    assemble,
    communication_device,
    strategy_name,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is merged at once.

    Args:
        name: what reports call it. names: the parameters it is made of.
        lora: the adapter whose factors A and B they are, in this order; None: one whole parameter.
        has_base: whether it is merged as a delta against the base's tensor of its name.
    """

    name: str
    names: tuple[str, ...]
    lora: LoraUnit | None = None
    has_base: bool = True


class ParamStore:
    """The parameters of a model that take part in merges; a TensorSource over their values."""

    def __init__(
        self, model: nn.Module, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        """Find the parameters that take part. Collective where they are sharded.

        Raises:
            TrainingError: the model's weights cannot be merged (named with the remedy), or none
                takes part.
        """
        refuse_unsupported(model)
        self.model = model
        self.strategy = strategy_name(model)
        self._tensors = every = ModelTensors(model)
        self.is_whole = every.is_whole
        self.is_lora = is_peft(model)
        # Under all names of a PEFT model: a tie of its base concerns no factor.
        trained = {
            name: weight
            for name, weight in (every.every if self.is_lora else every.weights).items()
            if weight.is_trainable and weight.dtype.is_floating_point
        }
        units = list(_lora_units(model, trained) if self.is_lora else map(_whole_unit, trained))
        names = [unit.name for unit in units]
        chosen = [unit for unit in units if selected(unit.name, include, exclude)]
        self.units: tuple[Unit, ...] = tuple(sorted(chosen, key=lambda unit: unit.name))
        self.names: tuple[str, ...] = tuple(sorted(name for one in chosen for name in one.names))
        self.weights: dict[str, Weight] = {name: trained[name] for name in self.names}
        self.has_all_trainable = len(self.weights) == len(trained)
        if not self.names:
            known = f"; one that is trainable is called {sorted(names)[0]}" if names else ""
            raise TrainingError(
                "no parameter takes part: none is trainable and chosen by "
                f"include={tuple(include)}, exclude={tuple(exclude)}{known}"
            )
        if not self.is_whole:
            self._check_coverage()

    @property
    def devices(self) -> set[torch.device]:
        """Devices that hold parameters of the model, those that take no part among them."""
        return {parameter.device for parameter in self.model.parameters()}

    @property
    def device(self) -> torch.device:
        """Where whole values are, and are decomposed."""
        first = self.weights[self.names[0]]
        at = next((part.data.device for part in first.parts()), None)
        if self.is_whole and at is not None:
            return at
        return communication_device(at)

    @property
    def dtypes(self) -> str:
        """The values' dtypes in words, as "float32" or "bfloat16 + float32"."""
        return " + ".join(sorted({_word(weight.dtype) for weight in self.weights.values()}))

    @property
    def description(self) -> str:
        """The dtypes, and those of the copies that follow a master."""
        copies = {
            _word(copy.data.dtype)
            for weight in self.weights.values()
            for copy in weight.copies()
            if copy.data.dtype != weight.dtype
        }
        if not copies:
            return self.dtypes
        return f"{' + '.join(sorted(copies))} with {self.dtypes} master"

    @property
    def count(self) -> str:
        """How many take part, in words: tensors, or LoRA adapters and other tensors."""
        adapters = sum(unit.lora is not None for unit in self.units)
        others = len(self.units) - adapters
        parts = [f"LoRA adapters: {adapters}"] * bool(adapters)
        return ", ".join(parts + [f"tensors: {others}"] * bool(others))

    @property
    def names_digest(self) -> str:
        """Hex digest of the names."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all values that take part, whole."""
        return sum(
            math.prod(weight.shape) * weight.dtype.itemsize for weight in self.weights.values()
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of one parameter."""
        return self.weights[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one parameter's value: float32 where an optimizer keeps a float32 master."""
        return self.weights[name].dtype

    def tensor(self, name: str) -> Tensor:
        """The value on the CPU in its own dtype; a whole one shares the model's memory there.
        Collective where it is sharded.
        """
        return self.read(name).cpu()

    def parts(self, name: str) -> tuple[Part, ...]:
        """This rank's live parts of one parameter; none where other ranks hold it."""
        self._tensors.settle()
        return self.weights[name].parts()

    def all_parts(self) -> list[tuple[str, tuple[Part, ...]]]:
        """(name, this rank's live parts) of every parameter, sorted by name."""
        self._tensors.settle()
        return [(name, weight.parts()) for name, weight in self.weights.items()]

    def memory(self) -> list[Tensor]:
        """All live memory of this rank that the parameters are in: parts, then their copies."""
        self._tensors.settle()
        return [
            part.data
            for weight in self.weights.values()
            for part in (*weight.parts(), *weight.copies())
        ]

    def assemble(
        self, name: str, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The whole tensor from what each rank has for its `parts`, bit for bit. Collective where
        it is sharded.

        Args:
            tensors: one a part of this rank, of its shape. dtype: theirs; None: the value's.
        """
        counted = self._tensors.counted.get(name, ())
        return assemble(self.weights[name], tensors, dtype or self.dtype(name), counted=counted)

    def read(self, name: str) -> Tensor:
        """The whole value on the device it is trained on; do not write to it. Collective where it
        is sharded.
        """
        return self.assemble(name, [part.data for part in self.parts(name)])

    def write(self, name: str, value: Tensor) -> None:
        """Overwrite one parameter in place by a value of its dtype, the same on every rank. Local.

        Raises:
            ValueError: another dtype or shape, which would be rounded or broadcast silently.
        """
        weight = self.weights[name]
        if value.dtype != weight.dtype or tuple(value.shape) != weight.shape:
            raise ValueError(
                f"{name}: {value.dtype} {tuple(value.shape)} does not fit into {weight.dtype} "
                f"{weight.shape}"
            )
        whole = value.detach().contiguous()
        self._tensors.settle()
        # Views without gradient, so that no grad mode has to be put back after an interrupt.
        for part in (*weight.parts(), *weight.copies()):
            part.data.copy_(part.of(whole))

    def flush(self) -> None:
        """Let the low-precision copies follow parts that were written directly. Collective where
        parameters are sharded.
        """
        for name, weight in self.weights.items():
            # On all ranks or on none: copies differ in number only, never in being there.
            if copies := weight.copies():
                whole = self.read(name)
                for copy in copies:
                    copy.data.copy_(copy.of(whole))

    def checksum(self) -> str:
        """Hex digest that changes with any bit of any value; cheap, no guard against malice. Does
        not depend on how values are sharded. Collective where they are.
        """
        sums = torch.stack([self._sum(name) for name in self.names])
        if not self.is_whole:
            sums = sums.to(communication_device(sums.device))
            dist.all_reduce(sums)
        digest = hashlib.sha256("\n".join(self.names).encode())
        for value in sums.tolist():
            digest.update(value.to_bytes(8, "little", signed=True))
        return digest.hexdigest()

    def replica_sums(self) -> dict[tuple[Any, ...], int]:
        """(name, where in it) of each of this rank's parts that other ranks may hold, too -> a sum
        of its bits, which must be the same on those; none where every rank holds all. Local.
        """
        return {
            (name, part.view, part.start, tuple(part.data.shape)): int(
                sum_of_bits(part, self.shape(name))
            )
            for name in self.names
            if name in self._tensors.replicated
            for part in self.parts(name)
        }

    def _sum(self, name: str) -> Tensor:
        sums = [sum_of_bits(part, self.shape(name)).cpu() for part in self._counted(name)]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)

    def _counted(self, name: str) -> list[Part]:
        """This rank's parts that no lower rank has."""
        parts = self.parts(name)
        counted = self._tensors.counted.get(name, (True,) * len(parts))
        return [part for part, is_counted in zip(parts, counted, strict=True) if is_counted]

    def _check_coverage(self) -> None:
        """Raise TrainingError unless the ranks' counted parts make each parameter exactly once."""
        counts = torch.tensor(
            [sum(part.data.numel() for part in self._counted(name)) for name in self.names],
            device=communication_device(None),
        )
        dist.all_reduce(counts)
        for name, count in zip(self.names, counts.tolist(), strict=True):
            if count != math.prod(self.shape(name)):
                raise TrainingError(
                    f"{name} has {math.prod(self.shape(name))} entries, the ranks' shards have "
                    f"{count} ({self.strategy}): this way of sharding is not supported; shard it "
                    "over all ranks with ZeRO or FSDP2"
                )


def _whole_unit(name: str) -> Unit:
    return Unit(name, (name,))


def _lora_units(model: nn.Module, trained: dict[str, Weight]) -> list[Unit]:
    """The adapters' pairs of factors, and what else is trained, which is averaged plainly."""
    found = [
        Unit(unit.name, (canonical_name(unit.a), canonical_name(unit.b)), unit)
        for unit in lora_units(model)
        if unit.is_trained
    ]
    factors = {name for unit in found for name in unit.names}
    plain = [Unit(name, (name,), has_base=False) for name in trained if name not in factors]
    return [*found, *plain]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
