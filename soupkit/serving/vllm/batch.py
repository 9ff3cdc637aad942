"""The slots of one forward: of each token, and of each row of logits."""

from collections.abc import Sequence
from typing import Protocol

import torch

from soupkit.errors import ServingError
from soupkit.serving.patches import BASE_SLOT, Rows


class Batch:
    """The slots of one forward."""

    def __init__(
        self, tokens: Sequence[int], heads: Sequence[int], device: torch.device, planes: int
    ) -> None:
        self.active = frozenset(tokens) - {BASE_SLOT}
        self._tokens = tuple(tokens)
        self._device, self._planes = device, planes
        self.prompt: range | None = None  # tokens whose logits are asked for, instead of heads
        self._made: dict[tuple[bool, int, range | None], Rows] = {}
        self._heads = tuple(heads)

    def rows(self, count: int, *, is_head: bool) -> Rows:
        """The rows of a module that is given so many."""
        prompt = self.prompt if is_head else None
        key = (is_head, count, prompt)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._rows(count, is_head, prompt)
        return found

    def _rows(self, count: int, is_head: bool, prompt: range | None) -> Rows:
        slots = self._heads if is_head else self._tokens
        if prompt is not None:
            slots = self._tokens[prompt.start : prompt.stop]
        times = count // len(slots) if slots and not is_head else 1
        if times > 1:
            # Attention heads that were folded into the tokens' axis.
            slots = tuple(slot for slot in slots for _ in range(times))
        if count != len(slots):
            raise ServingError(
                f"a module was given {count} rows, the batch has {len(slots)}; this model or "
                "setting of vLLM cannot serve variants"
            )
        active = tuple(sorted(frozenset(slots) - {BASE_SLOT})) or (0,)
        return Rows(torch.tensor(slots), active, self._device, planes=self._planes)


class HoldsBatch(Protocol):
    """Whoever knows the batch of the forward that runs; None = base rows only."""

    batch: Batch | None
