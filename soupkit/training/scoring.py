"""The score of the live weights on held-out data: the same for every rank, and without traces.

Scored in eval mode without gradients, the random generators set to the same state each time and put
back afterwards, so a model or a loss that draws draws the same for both candidates, and the run
goes on as if nothing had been.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from soupkit.errors import TrainingError
from soupkit.training.guards import evaluation_mode, preserved_rng
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks


def _number(evaluate: Callable[[], Any]) -> float:
    found = evaluate()
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"evaluate= returned a {type(found).__name__}, which is no number ({error}): return "
            "the held-out score alone"
        ) from error


class Scorer:
    """Calls the caller's evaluation; every method is collective."""

    def __init__(
        self,
        evaluate: Callable[[], float] | None,
        *,
        store: ParamStore,
        ranks: Ranks,
        seed: int,
    ) -> None:
        """Args: evaluate: score of the live weights; None: no gate."""
        self._evaluate = evaluate
        self._store = store
        self._ranks = ranks
        self._seed = seed
        self.seconds = 0.0

    @property
    def is_gate(self) -> bool:
        """Whether there is anything to score with."""
        return self._evaluate is not None

    def score(self) -> float | None:
        """The score of the live weights, the same bits on every rank; None without a gate. Adds
        its wall time to `seconds`.
        """
        if self._evaluate is None:
            return None
        evaluate, started = partial(_number, self._evaluate), time.perf_counter()
        seeded = preserved_rng(self._store.devices, seed=self._seed)
        with seeded, evaluation_mode(self._store.model):
            score = self._ranks.on_each(evaluate)
        self.seconds += time.perf_counter() - started
        return self._ranks.mean(score)

    def take_seconds(self) -> float:
        """Wall time spent since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent
