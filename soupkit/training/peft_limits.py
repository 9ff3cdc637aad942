"""Which PEFT models cannot be merged while they train, each refused by name with a remedy.

What is refused either changes a weight by more than scale * B A (DoRA, biases of factors, other
tuners), or is no state of one run (several adapters, an adapter merged into its base), or cannot be
written (shared or half frozen factors). Not here: what takes part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from soupkit.delta import canonical_name
from soupkit.errors import TrainingError
from soupkit.lora_kinds import MICA, VARIANTS

_WITHOUT = "or train without soupkit"
# What PEFT calls a variant of a layer, by the start of its class's name, and how it is asked for.
_VARIANTS = {
    "Dora": VARIANTS["use_dora"],
    "_Dora": VARIANTS["use_dora"],
    "ALora": VARIANTS["alora_invocation_tokens"],
    "QALora": VARIANTS["use_qalora"],
    "Arrow": VARIANTS["arrow_config"],
    "BdLora": VARIANTS["use_bdlora"],
    "Velora": VARIANTS["velora_config"],
    "Monteclora": VARIANTS["monteclora_config"],
    "MiCA": MICA,
    "Kasa": VARIANTS["kasa_config"],
}
_LAYERS = {
    "AdaLoraLayer": "AdaLoRA",
    "ParamWrapper": "LoRA on bare parameters (target_parameters)",
    "MultiheadAttention": "LoRA on nn.MultiheadAttention",
    "LoraParallelLinear": "LoRA on Megatron's parallel layers",
}


def kinds_of(module: nn.Module) -> set[str]:
    """Names of a module's classes."""
    return {kind.__name__ for kind in type(module).__mro__}


def base_name(own_name: str) -> str:
    """A readable name, near the base model's, for messages."""
    name = canonical_name(own_name).removeprefix("base_model.model.")
    return name.replace(".base_layer", "")


def refuse_types(inner: nn.Module) -> None:
    """Raise TrainingError where a part of the unwrapped model is another kind of adapter."""
    configs: Any = getattr(inner, "peft_config", None) or {}
    for adapter, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise TrainingError(
                f"adapter {adapter!r} is {kind}; only LoRA adapters are merged: use LoraConfig, "
                f"{_WITHOUT}"
            )
    for own_name, module in inner.named_modules():
        kinds = kinds_of(module)
        if not kinds & {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}:
            continue
        odd = next((text for kind, text in _LAYERS.items() if kind in kinds), None)
        if odd is None and not kinds & {"LoraLayer", "ModulesToSaveWrapper"}:
            odd = type(module).__name__
        if odd is not None:
            raise TrainingError(
                f"{base_name(own_name)}: {odd} is not merged yet: name linear, embedding or "
                f"convolution modules in LoraConfig(target_modules=...), {_WITHOUT}"
            )
        _refuse_state(base_name(own_name), module)


def _refuse_state(name: str, module: nn.Module) -> None:
    held: Any = module
    if getattr(held, "merged_adapters", None):
        raise TrainingError(
            f"{name}: adapter {held.merged_adapters[0]!r} is merged into its base; call "
            "model.unmerge_adapter() before training"
        )
    if held.disable_adapters:
        raise TrainingError(
            f"{name}: adapters are disabled; call model.enable_adapter_layers() before training"
        )


def refuse_layer(name: str, layer: nn.Module, adapter: str) -> None:
    """Raise TrainingError where a LoRA layer changes its weight by more than scale * B A."""
    held: Any = layer
    odd = None
    if adapter in held.lora_variant or held.use_dora.get(adapter):
        variant = type(held.lora_variant.get(adapter)).__name__
        odd = next((text for key, text in _VARIANTS.items() if variant.startswith(key)), variant)
    elif held.lora_bias.get(adapter):
        odd = VARIANTS["lora_bias"]
    if odd is not None:
        raise TrainingError(
            f"{name}: {odd} changes more than the weight's scale * B A, so its factors cannot be "
            f"merged: use plain LoRA (LoraConfig without it), {_WITHOUT}"
        )
    groups = getattr(held.get_base_layer(), "groups", 1)
    if groups > 1:
        raise TrainingError(
            f"{name}: LoRA on a convolution with groups={groups} is no change of its weight (PEFT "
            f"cannot merge it either): leave it out of target_modules, {_WITHOUT}"
        )
    if held.scaling[adapter] == 0:
        raise TrainingError(f"{name}: lora_alpha is 0, so the adapter does nothing; set it above 0")


def refuse_adapters(adapters: Iterable[str], inner: nn.Module) -> None:
    """Raise TrainingError unless exactly one adapter is active and no other is trainable."""
    active = sorted(set(adapters))
    if not active:
        raise TrainingError(
            "no LoRA adapter is active, so there is nothing to merge: call model.set_adapter(NAME)"
        )
    if len(active) > 1:
        raise TrainingError(
            f"adapters {active} are active at once; a merge knows one: call "
            "model.set_adapter(NAME) with the one that is trained"
        )
    for own_name, module in inner.named_modules():
        for place in _adapter_places(module):
            for adapter, part in getattr(module, place).items():
                tensors = [part] if isinstance(part, Tensor) else part.parameters()
                if adapter != active[0] and any(tensor.requires_grad for tensor in tensors):
                    raise TrainingError(
                        f"{base_name(own_name)}: adapter {adapter!r} is trainable and not active "
                        f"({active[0]!r} is): call model.set_adapter({active[0]!r}), which "
                        "freezes the others"
                    )


def _adapter_places(module: nn.Module) -> tuple[str, ...]:
    kinds = kinds_of(module)
    if "LoraLayer" in kinds:
        return ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    return ("modules_to_save",) if "ModulesToSaveWrapper" in kinds else ()


def refuse_factors(name: str, a: Tensor, b: Tensor, seen: dict[int, str]) -> None:
    """Raise TrainingError where one factor is frozen, or lies in memory of another unit's.

    Args:
        seen: names by address of the factors so far; these two are added.
    """
    if a.requires_grad != b.requires_grad:
        frozen, trained = ("B", "A") if a.requires_grad else ("A", "B")
        raise TrainingError(
            f"{name}: factor {frozen} is frozen and factor {trained} is trained (as LoRA-FA has "
            f"it); a merge writes both: train both, {_WITHOUT}"
        )
    for factor in (a, b):
        # Placeholders and shards have no memory of their own to compare.
        if factor.numel() == 0 or factor.is_meta or type(factor.data) is not Tensor:
            continue
        other = seen.setdefault(factor.data_ptr(), name)
        if other != name:
            raise TrainingError(
                f"{name} and {other} share one memory for their factors (ensure_weight_tying=True "
                "on target_modules), and the optimizer steps it twice: target only one of the two"
            )


def refuse_frozen(adapter: str) -> None:
    """Raise the TrainingError that says that no factor is trained."""
    raise TrainingError(
        f"adapter {adapter!r} is active but frozen (inference_mode=True, or loaded without "
        "is_trainable=True), so there is nothing to merge: load it for training"
    )


def refuse_quantised(name: str, tensor: Tensor, *, is_adapted: bool) -> None:
    """Raise TrainingError where a base weight is stored in 4 or 8 bits, so that it is not dense."""
    kind = type(tensor).__name__
    is_packed = is_adapted and not tensor.is_floating_point()
    if kind in ("Params4bit", "Int8Params") or is_packed:
        raise TrainingError(
            f"{name} is quantised ({kind}, {tensor.dtype}), so there is no dense weight to add the "
            "adapter to: save the adapter, load the base without quantization_config, "
            "merge_and_unload() and run `soupkit export` on the result"
        )


def refuse_half_a_tie(name: str, other: str) -> None:
    """Raise the TrainingError that says that an adapter changes two tied weights differently."""
    raise TrainingError(
        f"{other} and {name} are tied in the base, and the adapter changes one of them only, which "
        "no checkpoint of the base can hold: leave both out of target_modules and "
        "modules_to_save, tie them there too (modules_to_save with ensure_weight_tying=True), or "
        "load the base with tie_word_embeddings=False"
    )
