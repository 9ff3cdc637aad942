"""The score of the live weights on held-out data: the same for every rank, and without traces.

Held-out data is a sample. Where its parts are scored one by one, two candidates are compared part
by part, and the spread of the differences says how much of their mean may be chance.

Scored in eval mode without gradients, the random generators set to the same state each time and put
back afterwards, so a model or a loss that draws draws the same for both candidates, and the run
goes on as if nothing had been.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from soupkit.errors import TrainingError
from soupkit.training.guards import evaluation_mode, preserved_rng
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks

# The score of the live weights, or that of each part of the held-out data.
Evaluate = Callable[[], float | Sequence[float] | Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """A score and, where they are known, those of the parts of the held-out data.

    Args:
        value: the mean over ranks of the mean over their parts.
        parts: of all ranks, in their order, two or more; () where there is but one, or ranks have
            different numbers of them.
    """

    value: float
    parts: tuple[float, ...] = ()

    def less(self, other: Score) -> tuple[float, float | None]:
        """(self - other, its standard error); None for the latter where parts cannot be paired."""
        difference = self.value - other.value
        number = len(self.parts)
        if not number or len(other.parts) != number or not math.isfinite(difference):
            return difference, None
        pairs = zip(self.parts, other.parts, strict=True)
        spread = statistics.stdev([ours - theirs for ours, theirs in pairs])
        return difference, spread / math.sqrt(number)


def _numbers(evaluate: Evaluate) -> list[float]:
    found: Any = evaluate()
    try:
        values = found.tolist() if hasattr(found, "tolist") else found
        parts = [float(part) for part in values] if _is_many(values) else [float(values)]
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"evaluate= returned a {type(found).__name__}, which is no number ({error}): return "
            "the held-out score, or a list with that of each batch"
        ) from error
    if not parts:
        raise TrainingError("evaluate= returned no score: is the held-out set of a rank empty?")
    return parts


def _is_many(values: Any) -> bool:
    return isinstance(values, (list, tuple))


class Scorer:
    """Calls the caller's evaluation; every method is collective."""

    def __init__(
        self,
        evaluate: Evaluate | None,
        *,
        store: ParamStore,
        ranks: Ranks,
        seed: int,
    ) -> None:
        """Args: evaluate: score of the live weights, or those of its parts; None: no gate."""
        self._evaluate = evaluate
        self._store = store
        self._ranks = ranks
        self._seed = seed
        self.seconds = 0.0

    @property
    def is_gate(self) -> bool:
        """Whether there is anything to score with."""
        return self._evaluate is not None

    def score(self) -> Score | None:
        """The score of the live weights, the same bits on every rank; None without a gate. Adds
        its wall time to `seconds`.
        """
        if self._evaluate is None:
            return None
        evaluate, started = partial(_numbers, self._evaluate), time.perf_counter()
        seeded = preserved_rng(self._store.devices, seed=self._seed)
        with seeded, evaluation_mode(self._store.model):
            own = self._ranks.on_each(evaluate)
        self.seconds += time.perf_counter() - started
        ranks = self._ranks.gather(own)
        # In the order of ranks, so the same bits; fsum would refuse infinities of both signs.
        value = sum(sum(parts) / len(parts) for parts in ranks) / len(ranks)
        every = tuple(part for parts in ranks for part in parts)
        is_even = len({len(parts) for parts in ranks}) == 1
        return Score(value, every if is_even and len(every) > 1 else ())

    def take_seconds(self) -> float:
        """Wall time spent since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent
