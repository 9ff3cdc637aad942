"""Whole weights out of a model and back, a parameter at a time: one process, DDP, DataParallel.

Every rank holds all weights here, so reading is local; a writer has to give every rank the same
value. A parameter takes part if it is floating, trainable and chosen by include/exclude; one that
is tied counts once, under the name that its checkpoint file uses. Sharded strategies are refused by
name: they need a store of their own, whose `read` gathers and whose `write` scatters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from soupkit.delta import canonical_name, selected
from soupkit.errors import TrainingError

# The integer type whose bits are summed, by bytes an entry.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUANTISED = frozenset({"Params4bit", "Int8Params"})


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile wrappers, in any nesting."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def refuse_unsupported(model: nn.Module) -> None:
    """Raise TrainingError, with the remedy, for a model whose weights cannot be read whole."""
    kinds = {kind.__name__ for kind in type(model).__mro__} | {
        kind.__name__ for module in model.modules() for kind in type(module).__mro__
    }
    remedy = "train it in one process or under DDP, or without soupkit"
    if "DeepSpeedEngine" in kinds:
        raise TrainingError(
            f"this is a DeepSpeed engine, whose weights are not merged yet; {remedy}"
        )
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TrainingError(f"this model is sharded by FSDP, which is not merged yet; {remedy}")
    if hasattr(unwrap(model), "peft_config") or "BaseTunerLayer" in kinds:
        raise TrainingError(
            "this is a PEFT model; adapters are not merged yet: train all weights (no "
            "peft_config), or train the adapter without soupkit, merge_and_unload() it and run "
            "`soupkit merge` on the result"
        )
    if getattr(unwrap(model), "is_quantized", False):
        raise TrainingError(
            "this model is quantised; a merge needs dense floating weights: load it without "
            "quantization_config"
        )
    for name, parameter in model.named_parameters():
        _refuse_parameter(canonical_name(name), parameter)


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    kind = type(parameter.data).__name__
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        raise TrainingError(
            f"{name} is held by DeepSpeed ZeRO, which is not merged yet: use DDP, or train "
            "without soupkit"
        )
    if "DTensor" in {k.__name__ for k in type(parameter.data).__mro__}:
        raise TrainingError(
            f"{name} is a DTensor (FSDP2 or tensor parallel), which is not merged yet: use DDP"
        )
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
    if type(parameter.data) is not Tensor:
        raise TrainingError(
            f"{name} is a {kind}, not a plain tensor; load the model with dense weights"
        )


def _location(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tensor have in common."""
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class ModelTensors:
    """Parameters and persistent buffers of a model's checkpoint, tied ones once; a TensorSource."""

    def __init__(self, model: nn.Module) -> None:
        """Look at the live tensors of `model`."""
        inner = unwrap(model)
        tied = set(getattr(inner, "all_tied_weights_keys", None) or {})
        ignored = set(getattr(inner, "_keys_to_ignore_on_save", None) or ())
        self._tensors: dict[str, Tensor] = {}
        self.name_at: dict[tuple[Any, ...], str] = {}
        state = inner.state_dict()
        # Names that are the source of a tie come first, so that they are the ones kept.
        for stored in sorted(state, key=lambda key: (key in tied, key)):
            tensor, name = state[stored], canonical_name(stored)
            if stored in ignored or not isinstance(tensor, Tensor):
                continue
            if name in self._tensors:
                raise TrainingError(
                    f"two tensors of the model are both called {name} without their wrapper's "
                    "parts; rename one of the modules"
                )
            if tensor.numel() and self.name_at.setdefault(_location(tensor), name) != name:
                continue
            self._tensors[name] = tensor
        self.names: tuple[str, ...] = tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor."""
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its own dtype; on a CPU model it shares the model's memory."""
        return self._tensors[name].detach().cpu()


class ParamStore:
    """The parameters of a model that take part in merges; a TensorSource over them."""

    def __init__(
        self, model: nn.Module, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        """Find the parameters that take part.

        Raises:
            TrainingError: the model's weights cannot be merged (named with the remedy), or none
                takes part.
        """
        refuse_unsupported(model)
        self.model = model
        name_at = ModelTensors(model).name_at
        found: dict[str, nn.Parameter] = {}
        for own_name, parameter in unwrap(model).named_parameters():
            name = name_at.get(_location(parameter), canonical_name(own_name))
            wanted = parameter.requires_grad and parameter.is_floating_point()
            if wanted and selected(name, include, exclude):
                found.setdefault(name, parameter)
        if not found:
            raise TrainingError(
                "no parameter takes part: none is trainable and chosen by "
                f"include={tuple(include)}, exclude={tuple(exclude)}"
            )
        self.parameters: dict[str, nn.Parameter] = dict(sorted(found.items()))
        self.names: tuple[str, ...] = tuple(self.parameters)

    @property
    def devices(self) -> set[torch.device]:
        """Devices that hold parameters of the model, those that take no part among them."""
        return {parameter.device for parameter in self.model.parameters()}

    @property
    def dtypes(self) -> str:
        """The dtypes in words, as "float32" or "bfloat16 + float32"."""
        return " + ".join(
            sorted({str(p.dtype).removeprefix("torch.") for p in self.parameters.values()})
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters that take part."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of one parameter."""
        return tuple(self.parameters[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one parameter."""
        return self.parameters[name].dtype

    def tensor(self, name: str) -> Tensor:
        """The parameter on the CPU in its own dtype; a CPU model's shares the model's memory."""
        return self.parameters[name].detach().cpu()

    def read(self, name: str) -> Tensor:
        """The live parameter where it lies, without gradient; do not write to it."""
        return self.parameters[name].detach()

    def write(self, name: str, value: Tensor) -> None:
        """Overwrite one parameter in place by a value of its dtype, the same on every rank.

        Raises:
            ValueError: another dtype or shape, which would be rounded or broadcast silently.
        """
        parameter = self.parameters[name]
        if value.dtype != parameter.dtype or value.shape != parameter.shape:
            raise ValueError(
                f"{name}: {value.dtype} {tuple(value.shape)} does not fit into {parameter.dtype} "
                f"{tuple(parameter.shape)}"
            )
        # No grad mode to put back, so an interrupt leaves none behind; autograd notices the write.
        parameter.detach().copy_(value)

    def checksum(self) -> str:
        """Hex digest that changes with any bit of any parameter; cheap, no guard against malice."""
        sums = [_sum_of_bits(parameter.detach()) for parameter in self.parameters.values()]
        digest = hashlib.sha256("\n".join(self.names).encode())
        for value in sums:
            digest.update(int(value).to_bytes(8, "little", signed=True))
        return digest.hexdigest()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """0-d int64: the entries' bits as integers, each row's sum times its row number, summed with
    wrap-around.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    rows = tensor.reshape(
        tensor.shape[0] if tensor.dim() > 1 else -1, *([-1] if tensor.dim() > 1 else [1])
    )
    bits = rows.contiguous().view(_BITS[tensor.element_size()])
    row_sums = bits.sum(dim=1, dtype=torch.int64)
    factors = torch.arange(1, len(row_sums) + 1, device=tensor.device) * 2 - 1
    return (row_sums * factors).sum()


def innermost(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def reset_moments(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Let the optimizer forget its state of `parameters`, as before its first step."""
    inner = innermost(optimizer)
    chosen = set(map(id, parameters))
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state.get(parameter)
            if not state or id(parameter) not in chosen:
                continue
            if isinstance(inner, torch.optim.Adagrad):
                # The only one of torch that makes its state when it is built, and needs it.
                state["sum"].fill_(group["initial_accumulator_value"])
                state["step"].zero_()
            else:
                # Not zeroed: zero is no start for step sizes (Rprop, ASGD) or for copies of weights
                # (schedule-free ones). A state that is gone is made anew by the next step.
                del inner.state[parameter]
