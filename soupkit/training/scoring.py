"""The score of the live weights on held-out data: the same for every rank, and without traces.

Held-out data is a sample. Where its parts are scored one by one, two candidates are compared part
by part, and the spread of the differences says how much of their mean may be chance.

Scored in eval mode without gradients, the random generators set to the same state each time and put
back afterwards, so a model or a loss that draws draws the same for both candidates, and the run
goes on as if nothing had been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from soupkit.delta import TensorSource
from soupkit.errors import TrainingError
from soupkit.training.guards import evaluation_mode, preserved_rng
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.undo import SetAside

# Of each rank: of each part of its held-out data.
ByRank = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Batches:
    """Scores of batches of different sizes. Args: examples: the weight of each score."""

    scores: tuple[float, ...]
    examples: tuple[int, ...]


# The score of the live weights, or that of each part of the held-out data.
Evaluate = Callable[[], float | Sequence[float] | Tensor | Batches]


@dataclass(frozen=True, slots=True)
class Score:
    """A score and those of the parts of the held-out data that it is the mean of.

    Args:
        value: the weighted mean of the parts.
        parts: by rank.
        shares: the weight of each part in the mean; their sum is 1. Ranks count alike, and in each
            its parts do, unless the caller knows their sizes.
    """

    value: float
    parts: ByRank = ()
    shares: ByRank = ()

    @classmethod
    def of(cls, ranks: Sequence[Batches | Sequence[float]]) -> Score:
        """Of what each rank's evaluation returned."""
        scores = [rank.scores if isinstance(rank, Batches) else rank for rank in ranks]
        sizes = [rank.examples if isinstance(rank, Batches) else [1] * len(rank) for rank in ranks]
        votes = [sum(rank.examples) if isinstance(rank, Batches) else 1 for rank in ranks]
        # In the order of ranks, so the same bits; fsum would refuse infinities of both signs.
        means = [
            sum(score * size for score, size in zip(*rank, strict=True)) / sum(rank[1])
            for rank in zip(scores, sizes, strict=True)
        ]
        value = sum(mean * vote for mean, vote in zip(means, votes, strict=True)) / sum(votes)
        shares = tuple(
            tuple(size / sum(rank) * vote / sum(votes) for size in rank)
            for rank, vote in zip(sizes, votes, strict=True)
        )
        return cls(value, tuple(map(tuple, scores)), shares)

    def less(self, other: Score) -> tuple[float, float | None]:
        """(self - other, its standard error); None for the latter where there is but one part, or
        parts cannot be paired.

        The error is that of a weighted mean of paired differences: part sizes that differ, and
        ranks that all score the same data, tell nothing of chance.
        """
        difference = self.value - other.value
        lengths = [[len(rank) for rank in score.parts] for score in (self, other)]
        if lengths[0] != lengths[1] or not math.isfinite(difference):
            return difference, None
        by_rank = zip(self.parts, other.parts, self.shares, strict=True)
        distinct = dict.fromkeys(tuple(zip(*rank, strict=True)) for rank in by_rank)
        pairs = [(ours - theirs, share) for rank in distinct for ours, theirs, share in rank]
        if len(pairs) < 2:
            return difference, None
        total = sum(share for _, share in pairs)
        mean = sum(gap * share for gap, share in pairs) / total
        squares = math.fsum(((gap - mean) * share / total) ** 2 for gap, share in pairs)
        return difference, math.sqrt(squares * len(pairs) / (len(pairs) - 1))


def _numbers(evaluate: Evaluate) -> Batches | list[float]:
    found: Any = evaluate()
    if isinstance(found, Batches):
        return found
    try:
        values = found.tolist() if hasattr(found, "tolist") else found
        parts = [float(part) for part in values] if _is_many(values) else [float(values)]
    # RuntimeError: torch's, of a tensor with many numbers in the list.
    except (TypeError, ValueError, RuntimeError) as error:
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
        return Score.of(self._ranks.gather(own))

    def score_of(self, source: TensorSource, *, aside: SetAside) -> Score | None:
        """The score of other weights, in place of the live ones, which `aside` brings back."""
        try:
            for name in self._store.names:
                self._store.write(name, source.tensor(name).to(self._store.dtype(name)))
            return self.score()
        finally:
            aside.restore(self._store)

    def take_seconds(self) -> float:
        """Wall time spent since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent
