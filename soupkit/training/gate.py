"""The gate of a Trainer run: the mean loss of the live weights on the first evaluation batches.

The batches are taken once, when training begins, so that every merge is scored on the same ones and
the training loader is never disturbed; the loss is the Trainer's own (`prediction_step`), so that
derived trainers keep theirs. Batches are weighted by their examples, as Trainer's own evaluation
does, and summed over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from soupkit.errors import TrainingError
from soupkit.training.guards import evaluation_mode, preserved_rng
from soupkit.training.ranks import Ranks
from soupkit.training.scoring import Batches

# Where trainers of TRL gather what they log of evaluation; scoring must not add to it.
_METRIC_STORES = ("_metrics", "_stored_metrics")


def wanted_sets(eval_dataset: Any, metric: str) -> list[str | None]:
    """Keys of the evaluation sets that `metric` speaks of; [None] for the only set.

    Raises:
        TrainingError: there is no evaluation set.
        ValueError: the metric is not the loss of one of them.
    """
    if eval_dataset is None:
        raise TrainingError(
            'gate="metric" scores merges on the evaluation set, and the Trainer has none: pass '
            'eval_dataset= to it, or SoupConfig(gate="none")'
        )
    keys: list[str] = list(eval_dataset) if isinstance(eval_dataset, dict) else []
    if metric == "eval_loss":
        return [*keys] or [None]
    for key in keys:
        if metric == f"eval_{key}_loss":
            return [key]
    losses = ["eval_loss", *(f"eval_{key}_loss" for key in keys)]
    raise ValueError(
        f'metric_for_best={metric!r}: with gate="metric" SoupCallback scores the evaluation loss '
        f'only ({", ".join(losses)}); use SoupConfig(gate="none", feed_back=True), which lets '
        "this metric choose the partner, or Soup with evaluate= in your own loop"
    )


class EvaluationLoss:
    """Mean loss of a Trainer's live weights on its first evaluation batches, when called."""

    def __init__(
        self,
        trainer: Any,
        *,
        ranks: Ranks,
        devices: Collection[torch.device],
        num_batches: int,
        metric: str,
        seed: int,
    ) -> None:
        """Take the batches. Collective; leaves the global generators as they were.

        Args:
            trainer: a transformers Trainer. num_batches: of every evaluation set, on every rank.
            seed: for loaders and collators that draw.

        Raises:
            TrainingError: no evaluation set, or an empty one.
            ValueError: a metric that is no evaluation loss.
        """
        self._trainer = trainer
        self._ranks = ranks
        self._batches: list[Any] = []
        with preserved_rng(devices, seed=seed):
            for key in wanted_sets(trainer.eval_dataset, metric):
                found = ranks.on_each(partial(_first_batches, trainer, key, num_batches))
                # A forward may be collective (a loss averaged over ranks), so every rank runs the
                # same number.
                common = min(ranks.gather(len(found)))
                if common == 0:
                    raise TrainingError(
                        f"the evaluation set{'' if key is None else f' {key!r}'} gives no batch "
                        "on some rank: enlarge it, or drop dataloader_drop_last"
                    )
                self._batches += found[:common]
                with evaluation_mode(trainer.model):
                    # A set without labels is found now, not at the first merge point.
                    ranks.on_each(partial(self._loss, found[0]))

    def __call__(self) -> Batches:
        """The live weights' loss on each of this rank's batches, and its examples. Collective;
        model in eval mode.
        """
        # One batch at a time: a rank that fails must not leave the others in the next collective.
        losses = [self._ranks.on_each(partial(self._loss, batch)) for batch in self._batches]
        return Batches(tuple(losses), tuple(map(num_examples, self._batches)))

    def _loss(self, batch: Any) -> float:
        """The Trainer's loss on one batch; what it notes of evaluations stays as it was."""
        trainer = self._trainer
        kept = {
            name: copy.deepcopy(getattr(trainer, name))
            for name in _METRIC_STORES
            if getattr(trainer, name, None) is not None
        }
        inputs = dict(batch) if isinstance(batch, dict) else batch
        loss, _, _ = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=True)
        for name, value in kept.items():
            setattr(trainer, name, value)
        if loss is None:
            raise TrainingError(
                "the Trainer computes no loss on evaluation batches (no labels in them); give the "
                'evaluation set labels, or use SoupConfig(gate="none")'
            )
        return float(loss)


def _first_batches(trainer: Any, key: str | None, count: int) -> list[Any]:
    loader = trainer.get_eval_dataloader(key)
    iterator = iter(loader)
    batches = [to_host(batch) for batch in islice(iterator, count)]
    # accelerate's loaders sign in when they are iterated and out at their end, which is not reached
    # here.
    if hasattr(iterator, "close"):
        iterator.close()
    if hasattr(loader, "end"):
        loader.end()
    return batches


def to_host(value: Any) -> Any:
    """A batch with all its tensors in host memory."""
    if hasattr(value, "to"):
        return value.to("cpu")
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_host, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_host, value))
    return value


def num_examples(batch: Any) -> int:
    """Length of the first axis of a batch's first tensor; 1 where it has none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    items = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(items, (str, bytes)) or not hasattr(items, "__iter__"):
        return 1
    for item in items:
        if isinstance(item, (Tensor, Mapping, list, tuple)):
            return num_examples(item)
    return 1
