"""Which form each tensor is stored in, so that all together lose least under a budget of bytes.

    minimize  sum_t error(t, c_t)   with   sum_t bytes(t, c_t) <= budget,   c_t a candidate of t

Each tensor starts at its cheapest candidate. The step that wins most error per byte is taken, again
and again: a step leads to the next corner of the convex hull of a tensor's (bytes, error), so that
what is reached along the way is the optimum for its own bytes (Everett's Lagrangian, 1963). A step
that does not fit is refused, and its tensor goes on with the hull of what is smaller than that
step: that fills the rest. The result is never over the budget; it loses at most what the first
refused step would win more than the optimum; and a larger budget never loses more, because what
fits below a refused step wins less than that step. Numbers in, numbers out: candidates are measured
in candidates.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store one tensor.

    Args:
        form: its name: of an Encoding, or "raw".
        nbytes: that it takes of the budget.
        error: that it leaves, >= 0; of all tensors in one unit.
    """

    form: str
    nbytes: int
    error: float


def least_bytes(table: Mapping[str, Sequence[Candidate]]) -> int:
    """The smallest budget that holds a candidate of every tensor."""
    return sum(min(one.nbytes for one in candidates) for candidates in table.values())


def error_of(choice: Mapping[str, Candidate]) -> float:
    """Error of all tensors of a choice."""
    return sum(one.error for one in choice.values())


def allocate(table: Mapping[str, Sequence[Candidate]], budget_bytes: int) -> dict[str, Candidate]:
    """Choose one candidate for each tensor.

    Args:
        table: by tensor, at least one candidate each, in any order.
        budget_bytes: of all of them together.
    Returns:
        A candidate by tensor; the same for the same table, whatever its order.
    Raises:
        ValueError: not even the cheapest candidates fit.
    """
    least = least_bytes(table)
    if budget_bytes < least:
        raise ValueError(f"budget_bytes={budget_bytes}: the least that holds it is {least}")
    choice = {name: min(table[name], key=_by_bytes) for name in sorted(table)}
    left = budget_bytes - least
    rest = {name: _better(table[name], choice[name]) for name in choice}
    steps = [step for name in choice for step in _next_step(name, choice[name], rest[name])]
    heapq.heapify(steps)
    while steps:
        _, name, target = heapq.heappop(steps)
        price = target.nbytes - choice[name].nbytes
        if price <= left:
            left -= price
            choice[name] = target
            rest[name] = _better(rest[name], target)
        else:
            rest[name] = [one for one in rest[name] if one.nbytes < target.nbytes]
        for step in _next_step(name, choice[name], rest[name]):
            heapq.heappush(steps, step)
    return choice


# Ordered as it is taken: by error won per byte, downwards; then by name.
_Step = tuple[float, str, Candidate]


def _by_bytes(one: Candidate) -> tuple[int, float, str]:
    return one.nbytes, one.error, one.form


def _better(candidates: Iterable[Candidate], than: Candidate) -> list[Candidate]:
    """The candidates that lose less than `than` for more bytes."""
    return [one for one in candidates if one.nbytes > than.nbytes and one.error < than.error]


def _next_step(name: str, at: Candidate, rest: Sequence[Candidate]) -> list[_Step]:
    """The step to the next corner of the hull from `at`; none where there is nothing better."""
    if not rest:
        return []
    slopes = {one: (at.error - one.error) / (one.nbytes - at.nbytes) for one in rest}
    best = min(rest, key=lambda one: (-slopes[one], *_by_bytes(one)))
    return [(-slopes[best], name, best)]
