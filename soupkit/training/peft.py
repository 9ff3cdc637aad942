"""What of a PEFT model takes part in merges, and the whole weights that its adapter makes.

    W = W_base + scale * B A,   scale = lora_alpha / r, or lora_alpha / sqrt(r) for rslora

A unit is one base weight with the two LoRA factors that change it. Only the factors are read and
written, so the base may be sharded, or in 4 or 8 bits. modules_to_save and trainable biases are
plain parameters. Names: a parameter's own dotted name is the one in the unwrapped model; its base
name is the one that the base model's checkpoint has. What is not LoRA, or changes more than B A
says, is refused by name. Written for PEFT 0.21, which is not imported: its layers are known by the
names of their classes. Not here: reading and writing (the store's), and merging (factored.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soupkit import lora_kinds
from soupkit.delta import WRAPPER_PARTS, canonical_name
from soupkit.factored import Pair
from soupkit.lora_kinds import Kind
from soupkit.training import peft_limits as limits
from soupkit.training.weights import unwrap


@dataclass(frozen=True, slots=True)
class LoraUnit:
    """One base weight and the LoRA factors that change it.

    Args:
        name: base name of the weight, as "model.layers.0.self_attn.q_proj.weight".
        a, b: own names of the factors.
        scale: delta = scale * B A.
        shape: of the base weight.
        kind: how PEFT keeps the factors; see soupkit.lora_kinds.
        is_trained: whether the factors are trainable; if not, they change the weight all the same.
    """

    name: str
    a: str
    b: str
    scale: float
    shape: tuple[int, ...]
    kind: Kind
    is_trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A tensor of the base model's checkpoint: base name, own name, and the LoRA layer that adapts
    it with that layer's own prefix.
    """

    name: str
    own: str
    tensor: Tensor
    layer: nn.Module | None
    prefix: str


def is_peft(model: nn.Module) -> bool:
    """Whether a model holds a PEFT adapter of any kind."""
    return bool(getattr(unwrap(model), "peft_config", None)) or any(
        "BaseTunerLayer" in limits.kinds_of(module) for module in model.modules()
    )


def lora_units(model: nn.Module) -> tuple[LoraUnit, ...]:
    """The weights that the active LoRA adapter changes, sorted by base name.

    Raises:
        TrainingError: the model's adapters cannot be merged, named with the remedy.
    """
    inner = unwrap(model)
    limits.refuse_types(inner)
    own_names: dict[int, str] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        own_names.setdefault(id(parameter), name)
    found: dict[int, LoraUnit] = {}
    adapters: set[str] = set()
    seen: dict[int, str] = {}
    for stored in sorted(_walk(inner, adapted=True), key=lambda one: _order(inner, one.name)):
        # A layer that the model uses under two names is one unit.
        if stored.layer is None or id(stored.layer) in found:
            continue
        for adapter in _active(stored.layer):
            limits.refuse_layer(stored.name, stored.layer, adapter)
            a, b = _factors(stored.layer, adapter)
            limits.refuse_factors(stored.name, a, b, seen)
            found[id(stored.layer)] = _unit(stored, adapter, own_names)
            adapters.add(adapter)
    limits.refuse_adapters(adapters, inner)
    if not any(unit.is_trained for unit in found.values()):
        limits.refuse_frozen(sorted(adapters)[0])
    return tuple(sorted(found.values(), key=lambda unit: unit.name))


def plain_parameters(model: nn.Module) -> tuple[str, ...]:
    """Own names of the floating trainable parameters that are no LoRA factor (modules_to_save,
    biases), sorted; one that is shared counts once.

    Raises:
        TrainingError: as `lora_units`.
    """
    units = lora_units(model)
    factors = {name for unit in units for name in (unit.a, unit.b)}
    return tuple(
        sorted(
            name
            for name, parameter in unwrap(model).named_parameters()
            if parameter.requires_grad and parameter.is_floating_point() and name not in factors
        )
    )


def pair_of(unit: LoraUnit, a: Tensor, b: Tensor) -> Pair:
    """The factors as a pair whose matrix, reshaped to `unit.shape`, is the weight's delta."""
    return lora_kinds.pair_of(unit.kind, a, b, unit.scale)


def factors_of(unit: LoraUnit, pair: Pair) -> tuple[Tensor, Tensor]:
    """(A, B) in the parameters' own shapes; the inverse of `pair_of`."""
    return lora_kinds.factors_of(unit.kind, pair, kernel=unit.shape[2:])


class MergedWeights:
    """The base model's tensors with the adapter in them, one at a time; a TensorSource.

    Weights that an adapter changes come in float32 (float64 where the base has it), all others in
    their own dtype; modules_to_save replace what they copy. Live: nothing is kept.
    """

    def __init__(
        self, model: nn.Module, read: Callable[[str], Tensor], *, adapted: bool = True
    ) -> None:
        """Find the tensors.

        Args:
            read: gives a parameter or buffer, whole, by its own name; called in the order of use,
                so it may gather from other ranks.
            adapted: False: the base model as it is without the adapter; a trained bias, which PEFT
                changes in place, is as it is now.

        Raises:
            TrainingError: as `lora_units`; or the base is quantised, so that it has no dense
                weights; or the adapter changes one of two tied weights.
        """
        self._read = read
        units = lora_units(model) if adapted else ()
        inner = unwrap(model)
        ignored = set(getattr(unwrap(root(inner)[0]), "_keys_to_ignore_on_save", None) or ())
        live = {stored.name: stored for stored in _walk(inner, adapted=adapted)}
        base = {stored.name: id(stored.tensor) for stored in _walk(inner, adapted=False)}
        self._stored: dict[str, _Stored] = {}
        first: dict[int, str] = {}
        for name in sorted(base.keys() - ignored, key=lambda name: _order(inner, name)):
            kept = first.setdefault(base[name], name)
            if kept == name:
                self._stored[name] = live[name]
            elif adapted and not _is_same(live[name], live[kept]):
                limits.refuse_half_a_tie(name, kept)
        self._units = {unit.name: unit for unit in units}
        for name, stored in self._stored.items():
            limits.refuse_quantised(name, stored.tensor, is_adapted=name in self._units)
        self.names: tuple[str, ...] = tuple(sorted(self._stored))

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of one tensor."""
        # Under ZeRO-3 a parameter is an empty placeholder that knows its shape.
        tensor = self._stored[name].tensor
        return tuple(getattr(tensor, "ds_shape", tensor.shape))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which `tensor` gives it."""
        dtype = self._stored[name].tensor.dtype
        return torch.promote_types(dtype, torch.float32) if name in self._units else dtype

    def own_name(self, name: str) -> str:
        """The dotted name, in the unwrapped model, of the parameter or buffer behind a tensor."""
        return self._stored[name].own

    def is_adapted(self, name: str) -> bool:
        """Whether LoRA factors change the tensor."""
        return name in self._units

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU; it may share the model's memory where no adapter changes it."""
        value = self._read(self._stored[name].own).detach()
        unit = self._units.get(name)
        if unit is not None:
            pair = pair_of(unit, self._read(unit.a).detach(), self._read(unit.b).detach())
            delta = pair.matrix().reshape(unit.shape).to(value.device)
            value = value.to(self.dtype(name), copy=True).add_(delta)
        return value.cpu()


def _order(inner: nn.Module, name: str) -> tuple[bool, str]:
    """Sorts names so that the source of a tie, whose name its checkpoint keeps, comes first."""
    tied = getattr(unwrap(root(inner)[0]), "all_tied_weights_keys", None) or {}
    return name in tied, name


def _is_same(first: _Stored, second: _Stored) -> bool:
    return first.tensor is second.tensor and first.layer is second.layer


def _active(layer: nn.Module) -> list[str]:
    """The active adapters that this LoRA layer has factors of."""
    held: Any = layer
    return [
        name
        for name in held.active_adapters
        if name in held.lora_A or name in held.lora_embedding_A
    ]


def root(inner: nn.Module) -> tuple[nn.Module, str]:
    """The base model and the own name's prefix before its names: ("base_model.model.") inside a
    PeftModel, "" where layers were injected into the model itself.
    """
    tuner = getattr(inner, "base_model", None)
    if isinstance(tuner, nn.Module) and "BaseTuner" in limits.kinds_of(tuner):
        return getattr(tuner, "model"), "base_model.model."  # noqa: B009  # untyped
    return inner, ""


def _walk(inner: nn.Module, *, adapted: bool) -> Iterator[_Stored]:
    """Every parameter and persistent buffer of the base model, tied ones under each name; with
    `adapted`, trained copies instead of what they replace.
    """
    top, prefix = root(inner)

    def visit(
        module: nn.Module, own: str, name: str, layer: nn.Module | None, at: str
    ) -> Iterator[_Stored]:
        kinds = limits.kinds_of(module)
        held: Any = module
        if "LoraLayer" in kinds:
            yield from visit(held.base_layer, f"{own}base_layer.", name, module, own)
            return
        if "ModulesToSaveWrapper" in kinds:
            copies = [key for key in held.active_adapters if key in held.modules_to_save]
            place = f"modules_to_save.{copies[0]}" if adapted and copies else "original_module"
            yield from visit(module.get_submodule(place), f"{own}{place}.", name, None, "")
            return
        transient = module._non_persistent_buffers_set
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in transient:
                adapting = layer if key == "weight" else None
                yield _Stored(canonical_name(name + key), own + key, tensor, adapting, at)
        for key, child in module._modules.items():
            if child is not None:
                # Between a LoRA layer and its weight there may be wrappers, and nothing else.
                below = layer if key in WRAPPER_PARTS else None
                yield from visit(child, f"{own}{key}.", f"{name}{key}.", below, at)

    yield from visit(top, prefix, "", None, "")


def _factors(layer: nn.Module, adapter: str) -> tuple[Tensor, Tensor]:
    held: Any = layer
    if adapter in held.lora_embedding_A:
        return held.lora_embedding_A[adapter], held.lora_embedding_B[adapter]
    return held.lora_A[adapter].weight, held.lora_B[adapter].weight


def _unit(stored: _Stored, adapter: str, own_names: dict[int, str]) -> LoraUnit:
    # Shapes come from the layers, because a sharded factor need not know its own.
    held: Any = stored.layer
    kind: Kind = "linear"
    shape: tuple[int, ...] = (held.out_features, held.in_features)
    parts, ending = ("lora_A", "lora_B"), ".weight"
    if adapter in held.lora_embedding_A:
        kind, shape, ending = "embedding", shape[::-1], ""
        parts = ("lora_embedding_A", "lora_embedding_B")
    elif "_ConvNd" in limits.kinds_of(held):
        kind, shape = "conv", (*shape, *held.get_base_layer().kernel_size)
    elif getattr(held, "fan_in_fan_out", False):
        kind, shape = "fan_in_fan_out", shape[::-1]
    a, b = _factors(held, adapter)
    own_a, own_b = (f"{stored.prefix}{part}.{adapter}{ending}" for part in parts)
    return LoraUnit(
        name=stored.name,
        # By identity first: a factor may have a wrapper of its own.
        a=own_names.get(id(a), own_a),
        b=own_names.get(id(b), own_b),
        scale=float(held.scaling[adapter]),
        shape=shape,
        kind=kind,
        is_trained=bool(a.requires_grad),
    )
