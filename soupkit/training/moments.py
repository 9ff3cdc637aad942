"""An optimizer's memory of a run: has it begun, and can it forget.

Plain and DTensor parameters have a state of their own, which is deleted and made anew by the next
step. DeepSpeed keeps one state for many parameters in a flat tensor; it is zeroed as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soupkit.errors import TrainingError
from soupkit.training.params import ParamStore
from soupkit.training.weights import unwrap_optimizer
from soupkit.training.zero import Fragment, Partition

# States that begin as zeros, in the optimizers that DeepSpeed and torch know.
_ZERO_AT_START = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})


def check_reset(store: ParamStore, optimizer: Any) -> None:
    """Raise TrainingError if `reset_moments` could not do its work."""
    if not _is_flat(store):
        return
    if not store.has_all_trainable:
        raise TrainingError(
            f'optimizer_state="reset" under {store.strategy}: one state holds the moments of all '
            'parameters, so include= and exclude= cannot spare some; use "keep"'
        )
    inner = unwrap_optimizer(optimizer)
    keys = {key for state in inner.state.values() for key in state}
    if odd := sorted(keys - _ZERO_AT_START):
        raise TrainingError(
            f'optimizer_state="reset" under {store.strategy}: {type(inner).__name__} keeps '
            f'{odd[0]}, which does not begin as zero; use "keep"'
        )


def reset_moments(store: ParamStore, optimizer: Any) -> None:
    """Let the optimizer forget what it knows of the store's parameters, as before its first
    step. Local.
    """
    inner = unwrap_optimizer(optimizer)
    if _is_flat(store):
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                else:
                    state[key] = type(value)(0)
        return
    chosen = _owners(store)
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


def has_stepped(optimizer: Any) -> bool:
    """Whether the optimizer has taken a step."""
    states = getattr(unwrap_optimizer(optimizer), "state", None) or {}
    # Adagrad has a state before its first step; its "step" is 0 then.
    return any(state.get("step", 1) > 0 for state in states.values() if state)


def _is_flat(store: ParamStore) -> bool:
    """Whether one optimizer state holds many parameters."""
    return any(
        isinstance(weight, (Fragment, Partition)) or weight.copies()
        for weight in store.weights.values()
    )


def _owners(store: ParamStore) -> set[int]:
    """ids of the tensors that the optimizer steps on."""
    return {id(weight.owner) for weight in store.weights.values()}
