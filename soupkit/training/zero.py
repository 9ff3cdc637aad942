"""Weights that DeepSpeed holds: ZeRO-1/2/3 and its mixed-precision optimizers.

The float32 master decides: a low-precision weight that is changed alone is overwritten by it at the
next step. So the parts of a weight are this rank's piece of the master, and the low-precision
weight (whole under stage 1/2, partitioned under stage 3) is a copy that follows.

Reached for by name in DeepSpeed (0.16 to 0.19): `_hp_mapping` (stage 1/2, BF16_Optimizer),
`ds_id`, `ds_shape`, `ds_tensor`, `ds_status`, `_z3_optimizer._get_fp32_opt_state_partition` (stage
3), `fp16_groups`, `fp32_groups_flat` or `fp32_groups` (stage 0). DeepSpeed's own
safe_set_full_fp32_param fails where the ranks do not divide the entries, and its getters turn -0.0
into 0.0; so neither is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from soupkit.errors import TrainingError
from soupkit.training.parts import Part, Weight, flat_part, whole_part


@dataclass(frozen=True, slots=True, eq=False)
class Fragment(Weight):
    """A weight of stage 1/2: whole low-precision copy, a range of the float32 master, or none."""

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return torch.float32

    def parts(self) -> tuple[Part, ...]:
        """See Weight."""
        mapping = self.tensor._hp_mapping
        if mapping is None:
            return ()
        address = mapping.lp_fragment_address
        data = mapping.hp_fragment.detach()
        return (flat_part(data, start=address.start, numel=self.tensor.numel()),)

    def copies(self) -> tuple[Part, ...]:
        """See Weight."""
        return (whole_part(self.tensor.detach()),)


@dataclass(frozen=True, slots=True, eq=False)
class Partition(Weight):
    """A weight of stage 3: a padded range of the float32 master and of the low-precision weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See Weight."""
        return tuple(self.tensor.ds_shape)

    @property
    def dtype(self) -> torch.dtype:
        """See Weight."""
        return torch.float32 if self._has_master else self.tensor.dtype

    @property
    def _has_master(self) -> bool:
        return self.is_trainable and hasattr(self.tensor, "_z3_optimizer")

    def _range(self, data: Tensor) -> Part:
        """The entries that are no padding."""
        numel = math.prod(self.shape)
        # Padded to the same length on every rank.
        start = data.numel() * dist.get_rank(self.tensor.ds_process_group)
        count = max(0, min(data.numel(), numel - start))
        return flat_part(data.detach()[:count], start=min(start, numel), numel=numel)

    def parts(self) -> tuple[Part, ...]:
        """See Weight."""
        if not self._has_master:
            return (self._range(self.tensor.ds_tensor),)
        master, _ = self.tensor._z3_optimizer._get_fp32_opt_state_partition(
            self.tensor, release_swap_buffers=False
        )
        return (self._range(master),)

    def copies(self) -> tuple[Part, ...]:
        """See Weight."""
        copies = [self._range(self.tensor.ds_tensor)] if self._has_master else []
        # Small weights stay gathered between steps (stage3_param_persistence_threshold).
        if self.tensor.ds_status.name == "AVAILABLE":
            copies.append(whole_part(self.tensor.detach().view(self.shape)))
        return tuple(copies)


def is_engine(model: nn.Module) -> bool:
    """Whether `model` is a DeepSpeed engine; without importing DeepSpeed."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def is_held(tensor: Any) -> bool:
    """Whether ZeRO holds this parameter."""
    return hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping")


def zero_weight(tensor: Any) -> Weight:
    """The weight that ZeRO holds as `tensor`."""
    return Partition(tensor) if hasattr(tensor, "ds_id") else Fragment(tensor)


def partitioner(model: nn.Module) -> Any:
    """The stage 3 optimizer that gathers and partitions the model's weights; None without one."""
    found = (getattr(parameter, "_z3_optimizer", None) for parameter in model.parameters())
    return next((optimizer for optimizer in found if optimizer is not None), None)


def release(optimizer: Any, weights: Iterable[Any]) -> None:
    """Drop the gathered copies that stage 3 keeps between forwards, or that a forward without a
    backward has left behind. Local.
    """
    partitions = (weight for weight in weights if isinstance(weight, Partition))
    if any(weight.tensor.ds_status.name == "AVAILABLE" for weight in partitions):
        optimizer.empty_partition_cache()


def masters(engine: nn.Module) -> dict[int, Tensor]:
    """id of a parameter -> its whole float32 master, under a mixed-precision engine of stage 0."""
    optimizer: Any = getattr(engine, "optimizer", None)
    groups = getattr(optimizer, "fp16_groups", None)
    if engine.zero_optimization_stage() > 0 or not groups:  # type: ignore[operator]
        return {}
    found = {}
    flat_groups = getattr(optimizer, "fp32_groups_flat", None)
    for index, group in enumerate(groups):
        if flat_groups is not None and not getattr(optimizer, "fp32_groups", None):
            # fused: one flat tensor a group, the parameters one after another
            sizes = [parameter.numel() for parameter in group]
            pieces = flat_groups[index].detach()[: sum(sizes)].split(sizes)
        else:
            pieces = tuple(optimizer.fp32_groups[index])
        for parameter, piece in zip(group, pieces, strict=True):
            found[id(parameter)] = piece.detach().view(parameter.shape)
    return found


def strategy_name(model: nn.Module) -> str | None:
    """ "ZeRO-2", say, or None without DeepSpeed."""
    for module in model.modules():
        if is_engine(module):
            stage = int(module.zero_optimization_stage())  # type: ignore[operator]
            return f"ZeRO-{stage}" if stage else "DeepSpeed"
    held = [parameter for parameter in model.parameters() if is_held(parameter)]
    if any(hasattr(parameter, "ds_id") for parameter in held):
        return "ZeRO-3"
    return "ZeRO-1/2" if held else None


def refuse_engine(engine: Any) -> None:
    """Raise TrainingError, with the remedy, for a DeepSpeed feature that is not supported."""
    kinds = {kind.__name__ for kind in type(engine).__mro__}
    if "PipelineEngine" in kinds:
        raise TrainingError(
            "this is a DeepSpeed pipeline: each rank has layers of its own, which are not merged; "
            "use ZeRO instead of pipeline stages"
        )
    if getattr(engine, "has_moe_layers", False):
        raise TrainingError(
            "this DeepSpeed engine has expert-parallel layers, which are not merged; train it "
            "without expert parallelism"
        )
    optimizer: Any = getattr(engine, "optimizer", None)
    if getattr(optimizer, "swap_optimizer", False) or getattr(
        optimizer, "params_in_nvme_and_cpu", False
    ):
        raise TrainingError(
            "this run offloads to NVMe, where a merge cannot reach; offload to cpu instead"
        )
    if engine.zero_optimization_stage() == 0 and _keeps_unknown_masters(engine, optimizer):
        raise TrainingError(
            f"DeepSpeed's {type(optimizer).__name__} without ZeRO keeps float32 weights where "
            "soupkit does not find them; set zero_optimization.stage to 1"
        )


def _keeps_unknown_masters(engine: Any, optimizer: Any) -> bool:
    """Whether a low-precision engine of stage 0 has masters that `masters` and Fragment miss."""
    low = [p for p in engine.module.parameters() if p.requires_grad and p.dtype != torch.float32]
    if not low or optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return False
    known = masters(engine)
    return any(id(p) not in known and not hasattr(p, "_hp_mapping") for p in low)


def refuse_parameter(name: str, parameter: Any) -> None:
    """Raise TrainingError for a ZeRO parameter that is partitioned in an unsupported way."""
    group = getattr(parameter, "ds_process_group", None) or getattr(parameter, "_dp_group", None)
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise TrainingError(
            f"{name} is partitioned over {dist.get_world_size(group)} of {dist.get_world_size()} "
            "ranks (MiCS, tensor, sequence or expert parallel); soupkit merges ZeRO over all ranks"
        )
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        raise TrainingError(
            f"{name} has a secondary ZeRO++ partition, which would keep old weights; set "
            "zero_hpz_partition_size to 1"
        )
    is_trained = parameter.requires_grad and hasattr(parameter, "ds_id")
    if is_trained and not hasattr(parameter, "_z3_optimizer"):
        raise TrainingError(
            f"{name} is partitioned by ZeRO-3, but no DeepSpeed optimizer holds it yet: call "
            "deepspeed.initialize or accelerator.prepare first, then build Soup"
        )
    status = getattr(getattr(parameter, "ds_tensor", None), "status", None)
    if getattr(status, "name", "AVAILABLE") != "AVAILABLE":
        raise TrainingError(f"{name} is offloaded to NVMe; offload parameters to cpu instead")
