"""Weights that PyTorch shards: DTensor (FSDP2, tensor parallel) and the flat parameters of FSDP1.

Both keep what the optimizer steps on as this rank's shard; a forward gathers it and rounds it to
the compute dtype. A forward that no backward follows may leave gathered copies behind, which would
go on with old weights: `reshard` drops them before anything is read or written.

FSDP1 is read through its handles (`_flat_param.py` of torch 2.6 to 2.13): `_shard_param_infos`,
`_local_shard`, `_fqns`, `_shapes`; its public way, summon_full_params, gathers a whole unit for
each of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soupkit.errors import TrainingError
from soupkit.training.parts import Part, Weight, flat_part


def _is_a(value: object, kind: str) -> bool:
    """Whether a class of that name is among the value's; without importing it."""
    return any(found.__name__ == kind for found in type(value).__mro__)


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor`, or a parameter's data, is a DTensor."""
    return _is_a(tensor, "DTensor") or (
        isinstance(tensor, Tensor) and _is_a(tensor.data, "DTensor")
    )


def is_fsdp1(module: nn.Module) -> bool:
    """Whether `module` is a FullyShardedDataParallel."""
    return _is_a(module, "FullyShardedDataParallel")


@dataclass(frozen=True, slots=True, eq=False)
class Sharded(Weight):
    """A DTensor: a box of the whole, uneven ones and several mesh axes included."""

    def parts(self) -> tuple[Part, ...]:
        """See Weight."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        if mesh.get_coordinate() is None:
            return ()
        local = self.tensor.detach().to_local()
        _, start = compute_local_shape_and_global_offset(self.tensor.shape, mesh, placements)
        # An empty box may be said to start behind the end.
        corner = tuple(min(int(at), length) for at, length in zip(start, self.shape, strict=True))
        return (Part(local, self.shape, corner),)


@dataclass(frozen=True, slots=True, eq=False)
class Flat(Weight):
    """One original parameter inside a flat parameter of FSDP1: a range of it, or none."""

    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        return tuple(self.tensor._shapes[self.index])

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        dtype: torch.dtype = self._shard.dtype
        return dtype

    @property
    def owner(self) -> Tensor:
        """See Weight."""
        # use_orig_params=False: the optimizer knows the flat parameter only.
        original = getattr(self.tensor, "_params", None)
        owner: Tensor = self.tensor if original is None else original[self.index]
        return owner

    @property
    def _shard(self) -> Tensor:
        flat = self.tensor
        # Before the first forward there is no `_local_shard`; the data are the shard.
        shard: Tensor = getattr(flat, "_local_shard", flat.data)
        return shard.detach()

    def parts(self) -> tuple[Part, ...]:
        """See Weight."""
        info = self.tensor._shard_param_infos[self.index]
        if not info.in_shard:
            return ()
        data = self._shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        return (flat_part(data, start=info.intra_param_start_idx, numel=math.prod(self.shape)),)


def fsdp1_weights(model: nn.Module) -> Iterator[tuple[str, Flat]]:
    """(dotted name with wrapper parts, weight) of every parameter in FSDP1 units below `model`."""
    for prefix, module in model.named_modules():
        handle: Any = getattr(module, "_handle", None)
        if not is_fsdp1(module) or handle is None:
            continue
        for index, name in enumerate(handle.flat_param._fqns):
            yield (f"{prefix}.{name}" if prefix else name), Flat(handle.flat_param, index)


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that gather weights for a forward."""
    return [module for module in model.modules() if _is_a(module, "FSDPModule") or is_fsdp1(module)]


def reshard(unit: Any) -> None:
    """Drop the gathered copy that a forward without a backward has left behind in a unit. Local."""
    if is_fsdp1(unit):
        _reshard_fsdp1(unit)
    else:
        unit.reshard()


def _reshard_fsdp1(unit: Any) -> None:
    """The outermost unit keeps its gathered copy after every forward."""
    handle = getattr(unit, "_handle", None)
    # Without `_local_shard` no forward has been.
    if handle is None or not hasattr(handle.flat_param, "_local_shard"):
        return
    if handle.uses_sharded_strategy and not handle.needs_unshard():
        from torch.distributed.fsdp._runtime_utils import _reshard

        _reshard(unit, handle, True)  # type: ignore[no-untyped-call, unused-ignore]


def strategy_name(model: nn.Module) -> str | None:
    """ "FSDP2", "FSDP1" or "DTensor"; None where nothing is sharded by PyTorch."""
    modules = list(model.modules())
    if any(_is_a(module, "FSDPModule") for module in modules):
        return "FSDP2"
    if any(map(is_fsdp1, modules)):
        return "FSDP1"
    return "DTensor" if any(map(is_dtensor, model.parameters())) else None


def refuse_fsdp1(module: Any) -> None:
    """Raise TrainingError for a way of sharding whose parts are not known here."""
    handle = getattr(module, "_handle", None)
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    if strategy.startswith(("HYBRID", "_HYBRID")):
        raise TrainingError(
            f"FSDP1 with {strategy} is not merged; use FSDP2 (fully_shard), or FULL_SHARD"
        )
    if handle is not None and not hasattr(handle.flat_param, "_shard_param_infos"):
        raise TrainingError("FSDP1 of this torch keeps no record of its shards; use FSDP2")


def refuse_dtensor(name: str, tensor: Any) -> None:
    """Raise TrainingError for a DTensor whose ranks hold partial sums."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise TrainingError(f"{name} is a DTensor of partial sums, which is no weight to merge")
