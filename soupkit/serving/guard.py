"""Keeps one sequence's overflow out of its neighbours' attention.

A batch attends over the keys and values of all its sequences at once, those of others masked by
adding the dtype's least number. That cannot undo NaN (0 * NaN = NaN) nor a product that overflows
on the way to the mask, so a variant that overflows would spoil every answer beside it. Such keys
and values are stored as 0, and their tokens are remembered, so that the engine fails their requests
and no others.
"""

from typing import Any

import torch
from torch import Tensor

from .ranks import Ranks


class KeyValueGuard:
    """Stands between the model and the paged cache; used on the engine's thread only."""

    def __init__(self, cache: Any) -> None:
        self._update, cache.update = cache.update, self.update
        self._broken: Tensor | None = None  # [tokens of the batch] bool; None: all are finite

    def begin(self) -> None:
        """Forgets the last batch.

        Puts nothing on the device: the forward runs on another stream and would not wait for it.
        """
        self._broken = None

    def broken_tokens(self, ranks: Ranks, count: int, device: torch.device) -> list[int]:
        """Positions in the batch of `count` tokens whose keys or values overflowed in any layer.

        A collective of the ranks: each has seen its own heads only.
        """
        broken = self._broken
        if broken is None:
            if ranks.alone:
                return []
            broken = torch.zeros(count, dtype=torch.bool, device=device)
        return ranks.any(broken).nonzero().flatten().tolist()

    def update(
        self,
        key_states: Tensor,  # [1, heads, tokens, head_dim]
        value_states: Tensor,  # the same
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> Any:
        """The cache's own update, on keys and values that are finite."""
        # The largest absolute value is NaN or infinite exactly if one of them is.
        keys, values = (states.abs().amax(dim=(0, 1, 3)) for states in (key_states, value_states))
        # A query of any other sequence keeps its room: 2^96 (float32, bfloat16), 2^12 (float16).
        finite = (keys < torch.finfo(keys.dtype).max ** 0.75) & values.isfinite()
        # On a GPU reading the flag would wait for the device at every layer.
        if finite.is_cuda or not bool(finite.all()):
            broken = ~finite
            self._broken = broken if self._broken is None else self._broken | broken
            spoiled = broken.view(1, 1, -1, 1)
            key_states = key_states.masked_fill(spoiled, 0)
            value_states = value_states.masked_fill(spoiled, 0)
        return self._update(key_states, value_states, layer_idx, kwargs=kwargs)
