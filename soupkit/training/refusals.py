"""What cannot be merged while it trains: refused by name, with the remedy, before any work."""

from __future__ import annotations

from torch import Tensor, nn

from soupkit.delta import canonical_name
from soupkit.errors import TrainingError
from soupkit.training import fsdp, zero
from soupkit.training.peft import is_peft, lora_units
from soupkit.training.weights import unwrap

_QUANTISED = frozenset({"Params4bit", "Int8Params"})


def refuse_unsupported(model: nn.Module) -> None:
    """Raise TrainingError, with the remedy, for a model whose weights cannot be read whole."""
    for module in model.modules():
        if zero.is_engine(module):
            zero.refuse_engine(module)
        if fsdp.is_fsdp1(module):
            fsdp.refuse_fsdp1(module)
    if is_peft(model):
        # Its base is read for the export only, so it may be in 4 or 8 bits.
        lora_units(model)
        trained = [item for item in model.named_parameters() if item[1].requires_grad]
        for name, parameter in trained:
            _refuse_parameter(canonical_name(name), parameter)
        return
    if getattr(unwrap(model), "is_quantized", False):
        raise TrainingError(
            "this model is quantised; a merge needs dense floating weights: load it without "
            "quantization_config"
        )
    for name, parameter in model.named_parameters():
        _refuse_parameter(canonical_name(name), parameter)


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    if zero.is_held(parameter):
        zero.refuse_parameter(name, parameter)
        return
    if fsdp.is_dtensor(parameter):
        fsdp.refuse_dtensor(name, parameter)
        return
    if type(parameter).__name__ in _QUANTISED:
        raise TrainingError(
            f"{name} is quantised ({type(parameter).__name__}, {parameter.dtype}); a merge needs "
            "dense floating weights: load the model without quantization_config"
        )
    if parameter.is_meta:
        raise TrainingError(
            f"{name} is on the meta device (offloaded or not loaded); load the model onto the "
            "training device, without device_map offload"
        )
    kind = type(parameter.data)
    if kind is not Tensor and kind.__name__ != "FlatParameter":
        raise TrainingError(
            f"{name} is a {kind.__name__}, not a plain tensor; load the model with dense weights"
        )
