"""The tensors of the checkpoint that a model would make, with adapters in them.

For a PEFT model these are the base model's names and the weights that the adapter makes of them,
which is what a variant is exported from; for all others the model's own. Some of them may be
replaced, by a side soup, say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soupkit.delta import TensorSource, canonical_name
from soupkit.training.peft import MergedWeights, is_peft, root
from soupkit.training.served import ShardedSource
from soupkit.training.weights import ModelTensors, unwrap


def checkpoint_model(model: nn.Module) -> nn.Module:
    """The model that the checkpoint is of: inside all wrappers, and inside PEFT's."""
    return unwrap(root(unwrap(model))[0])


def own_tensors(model: nn.Module, *, instead: TensorSource | None = None) -> ShardedSource:
    """All tensors by the model's own names, LoRA factors among them; as `checkpoint_tensors`."""
    own = ModelTensors(model)
    return own if instead is None else _Replaced(own, instead)


def checkpoint_tensors(model: nn.Module, *, instead: TensorSource | None = None) -> ShardedSource:
    """All tensors by the names of the checkpoint. Reading one is collective unless it `is_whole`.

    Args:
        instead: values of some parameters, by their own names, that stand in for the live ones.

    Raises:
        TrainingError: an adapter's base is quantised, so there is no dense weight to speak of.
    """
    live = own_tensors(model, instead=instead)
    return _WithAdapter(model, live) if is_peft(model) else live


class _Replaced:
    """The model's tensors, with others in place of some."""

    def __init__(self, own: ModelTensors, instead: TensorSource) -> None:
        self._own, self._instead = own, instead
        self._replaced = frozenset(instead.names)
        self.names = own.names
        self.is_whole = own.is_whole

    def _source(self, name: str) -> TensorSource:
        return self._instead if name in self._replaced else self._own

    def shape(self, name: str) -> tuple[int, ...]:
        return self._own.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source(name).dtype(name)

    def tensor(self, name: str) -> Tensor:
        return self._source(name).tensor(name)


class _WithAdapter(MergedWeights):
    """The base model's tensors with the adapter in them, read from a source of own names."""

    def __init__(self, model: nn.Module, live: ShardedSource) -> None:
        super().__init__(model, lambda name: live.tensor(canonical_name(name)))
        self._live = live
        self.is_whole = live.is_whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._live.shape(canonical_name(self.own_name(name)))

    def dtype(self, name: str) -> torch.dtype:
        # Of the optimizer's master, where a copy of modules_to_save has one.
        dtype = self._live.dtype(canonical_name(self.own_name(name)))
        return torch.promote_types(dtype, torch.float32) if self.is_adapted(name) else dtype
