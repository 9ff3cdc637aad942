"""Which modules of a model act on every token alone, and along which axis their tokens lie.

A variant can act per token only inside such modules. Shapes alone cannot tell, so the model is
asked: two short forwards of different lengths show the axis that follows the length (no other axis
does), and a module that is neither Linear nor Embedding must also give the same rows when it is fed
only some rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .whole import takes_vectors_per_token

# The axis whose size follows these lengths is the token axis, whatever the model's own sizes are.
LENGTHS = (11, 13)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one module was given and gave back in one forward."""

    inputs: Tensor  # the first tensor argument
    output: Tensor | None
    num_tensors: int  # how many tensors came in, positional and named
    calls: int


class TokenWise(NamedTuple):
    """A module that acts on every token alone."""

    axis: int  # of its input, that holds the tokens
    takes_vectors: bool = False  # its parameters may be vectors of each token (whole.py)


def token_wise(model: nn.Module, *, vocab_size: int) -> dict[str, TokenWise]:
    """Maps the name of every token-wise leaf module to how it can be used.

    Args:
        model: a causal language model in eval mode; it runs twice on a dozen tokens and is left as
            it was.
        vocab_size: token ids below it are valid.

    Returns:
        Names as in `named_modules`; a module absent from the result must not carry a variant's
        weights.
    """
    short, long = (_watch(model, length, vocab_size) for length in LENGTHS)
    modules = dict(model.named_modules())
    found: dict[str, TokenWise] = {}
    for name, first in short.items():
        second = long.get(name)
        if second is None or first.calls != 1 or second.calls != 1:
            continue
        axis = _following_axis(first.inputs, second.inputs)
        if axis is None or first.output is None or second.output is None:
            continue
        if _following_axis(first.output, second.output) != axis:
            continue
        module = modules[name]
        if isinstance(module, nn.Linear | nn.Embedding):
            found[name] = TokenWise(axis)
        elif _rows_are_independent(module, second, axis):
            found[name] = TokenWise(axis, takes_vectors_per_token(module, second.inputs, axis))
    return found


@torch.no_grad()
def _watch(model: nn.Module, length: int, vocab_size: int) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    hooks = []

    def watcher(name: str) -> Callable[[nn.Module, Any, dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if tensors:
                kept = output.detach().clone() if isinstance(output, Tensor) else None
                calls = seen[name].calls + 1 if name in seen else 1
                seen[name] = Seen(tensors[0].detach().clone(), kept, len(tensors), calls)

        return hook

    for name, module in model.named_modules():
        if not any(True for _ in module.children()) and any(True for _ in module.parameters()):
            hooks.append(module.register_forward_hook(watcher(name), with_kwargs=True))
    try:
        device = next(model.parameters()).device
        ids = torch.arange(length, device=device).remainder(vocab_size).unsqueeze(0)
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _following_axis(short: Tensor, long: Tensor) -> int | None:
    """The only axis whose size went from LENGTHS[0] to LENGTHS[1], if the others stayed."""
    if short.ndim != long.ndim:
        return None
    changed = [axis for axis in range(short.ndim) if short.shape[axis] != long.shape[axis]]
    if len(changed) != 1:
        return None
    axis = changed[0]
    return axis if (short.shape[axis], long.shape[axis]) == LENGTHS else None


@torch.no_grad()
def _rows_are_independent(module: nn.Module, seen: Seen, axis: int) -> bool:
    if seen.num_tensors != 1 or seen.output is None:
        return False
    rows = torch.arange(LENGTHS[1] - 1, -1, -2, device=seen.inputs.device)
    alone = module(seen.inputs.index_select(axis, rows))
    expected = seen.output.index_select(axis, rows)
    tolerance = 4 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    return bool(torch.allclose(alone, expected, rtol=tolerance, atol=tolerance))
