"""The latest times of each model, for the status page: what a person looks at, exactly.

Prometheus gets histograms of the same times (metrics.py), which add up over servers and time.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

# Enough for a P99 that is not the maximum.
KEPT = 512


class Latencies:
    """The last times to the first token and between tokens, in seconds, by model."""

    def __init__(self) -> None:
        self._first: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._next: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))

    def note(self, model: str, seconds: float, *, first: bool) -> None:
        """One token came `seconds` after its request, or after the token before it."""
        (self._first if first else self._next)[model].append(seconds)

    def keep(self, models: Iterable[str]) -> None:
        """Forgets all other models."""
        kept = frozenset(models)
        for times in (self._first, self._next):
            for model in times.keys() - kept:
                del times[model]

    def summary(self, model: str) -> dict[str, float | None]:
        """P50 and P99 of both, None where nothing was generated."""
        return {
            f"{name}_p{percent}": _percentile(times.get(model, ()), percent)
            for name, times in (("first_token", self._first), ("next_token", self._next))
            for percent in (50, 99)
        }


def _percentile(times: Iterable[float], percent: int) -> float | None:
    """The least of the times that `percent` of them do not exceed."""
    ordered = sorted(times)
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
