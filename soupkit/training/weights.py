"""The weights of a model by the names of its checkpoint, under whatever trains it.

One process, DDP, DataParallel, torch.compile, DeepSpeed, FSDP1 and 2, tensor parallel: the strategy
is found from the model itself, so what is printed is what is in force. A weight that is tied counts
once, under the name that its checkpoint file uses. Not here: what cannot be read (refusals.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from soupkit.delta import canonical_name
from soupkit.errors import TrainingError
from soupkit.training import fsdp, zero
from soupkit.training.parts import Weight, Whole


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, DeepSpeed, FSDP1 and torch.compile, in any nesting."""
    *_, inner = _layers(model)
    return inner


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what it wraps, from outside to inside."""
    while True:
        yield model
        if (
            isinstance(model, (DistributedDataParallel, DataParallel))
            or zero.is_engine(model)
            or fsdp.is_fsdp1(model)
        ):
            inner: Any = model.module
            model = inner
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as accelerate's and DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def strategy_name(model: nn.Module) -> str:
    """What trains the model, as people call it: "one process", "DDP", "ZeRO-3", "FSDP2", ..."""
    sharded = zero.strategy_name(model) or fsdp.strategy_name(model)
    if sharded is not None:
        return sharded
    if any(isinstance(layer, DistributedDataParallel) for layer in _layers(model)):
        return "DDP"
    has_others = dist.is_initialized() and dist.get_world_size() > 1
    return "unwrapped replicas" if has_others else "one process"


class ModelTensors:
    """Parameters and persistent buffers of a model's checkpoint, tied ones once; a TensorSource.

    Making it, and reading a tensor, is collective unless `is_whole`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at the live weights of `model`."""
        inner = unwrap(model)
        # Gathered copies are dropped before anything is read or written; see `settle`.
        self._units = fsdp.units(model)
        self._partitioner = zero.partitioner(model)
        for unit in self._units:
            fsdp.reshard(unit)
        tied = set(getattr(inner, "all_tied_weights_keys", None) or {})
        ignored = set(getattr(inner, "_keys_to_ignore_on_save", None) or ())
        self.weights: dict[str, Weight] = {}
        seen: dict[Any, str] = {}
        found = {
            canonical_name(name): (weight, identity)
            for name, weight, identity in _named_weights(model)
        }
        # Names that are the source of a tie come first, so that they are the ones kept.
        for name in sorted(found, key=lambda key: (key in tied, key)):
            weight, identity = found[name]
            if name in ignored or seen.setdefault(identity, name) != name:
                continue
            self.weights[name] = weight
        # Those that a tie or the model leaves out of its checkpoint among them.
        self.every: dict[str, Weight] = {name: weight for name, (weight, _) in found.items()}
        self.names: tuple[str, ...] = tuple(sorted(self.weights))
        self.is_whole = all(isinstance(weight, Whole) for weight in self.weights.values())
        # For each weight, which of this rank's parts count: those that no lower rank has, too.
        self.counted: dict[str, tuple[bool, ...]] = {}
        # Names of those that have a part which several ranks hold.
        self.replicated: frozenset[str] = frozenset()
        if not self.is_whole:
            self.counted, self.replicated = _first_of_their_kind(self.every)

    def settle(self) -> None:
        """Drop what forwards have left gathered, which a write would not reach. Local."""
        for unit in self._units:
            fsdp.reshard(unit)
        if self._partitioner is not None:
            zero.release(self._partitioner, self.every.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self.every[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor's value: float32 where an optimizer keeps a float32 master."""
        return self.every[name].dtype

    def tensor(self, name: str) -> Tensor:
        """The value on the CPU in its own dtype, of any of `every`; a whole one shares the model's
        memory there.
        """
        return self.read(name).cpu()

    def read(self, name: str) -> Tensor:
        """The value, of any of `every`, where ranks exchange it; do not write to it."""
        self.settle()
        weight = self.every[name]
        tensors = [part.data for part in weight.parts()]
        return assemble(weight, tensors, weight.dtype, counted=self.counted.get(name, ()))


def _first_of_their_kind(
    weights: dict[str, Weight],
) -> tuple[dict[str, tuple[bool, ...]], frozenset[str]]:
    """For each weight, whether each of this rank's parts is on no lower rank: replicas over a mesh
    axis, or over ranks that a mesh knows nothing of, must not be summed; and the names of the
    weights that have replicas. Collective.
    """
    boxes = {
        name: [(part.view, part.start, tuple(part.data.shape)) for part in weight.parts()]
        for name, weight in weights.items()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, boxes)
    if odd := next(
        (min(boxes.keys() ^ other.keys()) for other in every if {*other} != {*boxes}), ""
    ):
        raise TrainingError(
            f"not every rank has {odd}: pipeline stages, of which each rank has layers of its own, "
            "are not merged; shard every layer over all ranks with ZeRO or FSDP2"
        )
    lower = every[: dist.get_rank()]
    counted = {
        name: tuple(all(box not in other[name] for other in lower) for box in own)
        for name, own in boxes.items()
    }
    held = {name: [box for of_rank in every for box in of_rank[name]] for name in boxes}
    return counted, frozenset(
        name for name, all_of in held.items() if len(set(all_of)) < len(all_of)
    )


def _named_weights(model: nn.Module) -> Iterator[tuple[str, Weight, Any]]:
    """(dotted name, weight, what two names of one weight have in common)."""
    flat = {canonical_name(name): weight for name, weight in fsdp.fsdp1_weights(model)}
    if not flat:
        inner = unwrap(model)
        engine = next(filter(zero.is_engine, model.modules()), None)
        masters = {} if engine is None else zero.masters(engine)
        names: dict[str, str] = {}
        for name, tensor in inner.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                continue
            other = names.setdefault(canonical_name(name), name)
            if other != name:
                raise TrainingError(
                    f"two tensors of the model are both called {canonical_name(name)} without "
                    "their wrapper's parts; rename one of the modules"
                )
            yield name, _weight(tensor, masters), _identity(tensor)
        return
    for name, weight in flat.items():
        yield name, weight, (id(weight.tensor), weight.index)
    for name, tensor in (*model.named_parameters(), *_persistent_buffers(model)):
        if canonical_name(name) not in flat and not name.endswith("_flat_param"):
            yield name, _weight(tensor, {}), _identity(tensor)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _weight(tensor: Tensor, masters: dict[int, Tensor]) -> Weight:
    if zero.is_held(tensor):
        return zero.zero_weight(tensor)
    if fsdp.is_dtensor(tensor):
        return fsdp.Sharded(tensor)
    return Whole(tensor, masters.get(id(tensor)))


def _identity(tensor: Tensor) -> Any:
    """What two names of one weight have in common."""
    if zero.is_held(tensor) or fsdp.is_dtensor(tensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def assemble(
    weight: Weight, tensors: Sequence[Tensor], dtype: torch.dtype, *, counted: Sequence[bool]
) -> Tensor:
    """The whole tensor, bit for bit, from what each rank has for its parts. Collective if sharded.

    Args:
        tensors: one for each of this rank's `weight.parts()`, of its shape, all of `dtype`.
        counted: which of them no other rank brings, too.

    Returns:
        The whole on the device that ranks communicate on; the one tensor itself where a rank holds
        all.
    """
    if isinstance(weight, Whole):
        return tensors[0]
    parts = weight.parts()
    device = communication_device(tensors[0].device if tensors else None)
    whole = torch.zeros(weight.shape, dtype=dtype, device=device)
    for part, tensor, is_counted in zip(parts, tensors, counted, strict=True):
        if is_counted:
            part.of(whole).copy_(tensor)
    if whole.numel():
        # As integers: a sum of floats with zeros would turn -0.0 into 0.0.
        wide = {4: torch.int32, 8: torch.int64}.get(whole.element_size(), torch.uint8)
        dist.all_reduce(whole.view(-1).view(wide))
    return whole


def communication_device(at: torch.device | None) -> torch.device:
    """Where ranks exchange a tensor that lies at `at`: there, unless their backend cannot."""
    backend = str(dist.get_backend()).lower()
    if "gloo" in backend or "mpi" in backend:
        return at or torch.device("cpu")
    if at is not None and at.type != "cpu":
        return at
    return torch.device("cuda", torch.cuda.current_device())
