"""Which examples are held out, which a step trains on, and how they are padded.

All of it follows from the seed and the step alone, so that a resumed run sees what the whole one
would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soupkit.quality import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right to one length.

    Attributes:
        ids: int64 [B, T]. mask: int64 [B, T], 1 on tokens. scored: bool [B, T], true where the
            logits predict a token of an answer.
    """

    ids: Tensor
    mask: Tensor
    scored: Tensor

    def to(self, device: torch.device) -> Batch:
        """On a device."""
        return Batch(self.ids.to(device), self.mask.to(device), self.scored.to(device))


def check_tokens(batch: Batch, model: Any) -> None:
    """Raise ValueError if a token is beyond the embeddings of the model."""
    words, most = model.get_input_embeddings().weight.shape[0], int(batch.ids.max())
    if most >= words:
        raise ValueError(f"token {most}: the tokenizer exceeds the model's {words}")


def num_scored(row: Row) -> int:
    """Tokens of the answer."""
    return len(row.ids) - row.start


def split(num_rows: int, *, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and those held out, at least one each.

    Raises:
        ValueError: fewer than two rows.
    """
    if num_rows < 2:
        raise ValueError(f"{num_rows} examples: needs at least two, as one is held out")
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    count = min(num_rows - 1, max(1, round(held_out * num_rows)))
    return sorted(order[count:]), sorted(order[:count])


def batch_at(step: int, indices: Sequence[int], *, size: int, seed: int) -> list[int]:
    """The rows of a training step; each epoch has an order of its own."""
    size = min(size, len(indices))
    epoch, place = divmod(step, len(indices) // size)
    order = list(indices)
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order[place * size : (place + 1) * size]


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to one length with 0, which no token before sees."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask, scored = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = torch.tensor(row.ids)
        mask[place, : len(row.ids)] = 1
        scored[place, row.start - 1 : len(row.ids) - 1] = True
    return Batch(ids, mask, scored)
