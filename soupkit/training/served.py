"""Rank 0 reads whole tensors that all ranks hold together.

Writing a file is the work of one rank, and code that writes files (export, capture) knows nothing
of ranks: it asks a TensorSource for one tensor after another. Here each of its questions is told to
the other ranks, which wait for it, and answered by all; so no model is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from soupkit.delta import TensorSource
from soupkit.training.ranks import Ranks

T = TypeVar("T")


class ShardedSource(TensorSource, Protocol):
    """A TensorSource whose `tensor` is collective unless it `is_whole`."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every tensor."""
        ...


class _Asking:
    """On rank 0: a TensorSource whose every `tensor` makes the other ranks gather it, too."""

    def __init__(self, source: ShardedSource, ranks: Ranks) -> None:
        self._source, self._ranks = source, ranks
        self.names = source.names
        self.is_whole = True

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def tensor(self, name: str) -> Tensor:
        self._ranks.tell(name)
        return self._source.tensor(name)


def on_zero_reading(ranks: Ranks, source: ShardedSource, act: Callable[[ShardedSource], T]) -> T:
    """Run `act` on rank 0 with a source that holds all tensors. Collective.

    Args:
        source: on every rank, with the same names.
        act: reads the source it is given, and only that one, wherever it needs weights.

    Returns:
        What `act` returned (picklable), on every rank; its error is raised on every rank.
    """
    if ranks.world_size == 1 or source.is_whole:
        return ranks.on_zero(lambda: act(source))

    def asking() -> T:
        try:
            return act(_Asking(source, ranks))
        finally:
            ranks.tell(None)

    if not ranks.is_zero:
        while (name := ranks.told()) is not None:
            source.tensor(name)
    return ranks.on_zero(asking)
