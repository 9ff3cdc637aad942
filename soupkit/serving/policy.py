"""Which variant is worth its memory: the one of lowest value goes first.

    rate_v(now) = sum over requests i of v:  ln 2 / h * 2^-((now - t_i) / h)   [requests / second]
    value_v     = rate_v * reload_seconds_v / bytes_v

the waiting time that keeping v saves, per second and byte, if its requests go on as of late. LRU
and LFU stand beside it for `soupkit bench cache`, which holds the three to the same traces.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

HALF_LIFE_SECONDS = 600.0
# A newcomer must have this many times the traffic of an automatic pin to take its place.
PIN_MARGIN = 1.5


class Rates:
    """Requests per second of each variant, the past forgotten by half every half-life."""

    def __init__(
        self, clock: Callable[[], float], *, half_life_seconds: float = HALF_LIFE_SECONDS
    ) -> None:
        self._clock, self._decay = clock, math.log(2) / half_life_seconds
        self._seen: dict[str, tuple[float, float]] = {}  # digest -> (rate, when it was that)

    def touch(self, digest: str) -> None:
        """Counts one request now."""
        self._seen[digest] = (self.rate(digest) + self._decay, self._clock())

    def rate(self, digest: str) -> float:
        """Requests per second now; 0 for one that was never asked for."""
        rate, then = self._seen.get(digest, (0.0, 0.0))
        return rate * math.exp(-self._decay * (self._clock() - then))

    def forget(self, digest: str) -> None:
        """Of a variant that is no more."""
        self._seen.pop(digest, None)


class Policy(Protocol):
    """What the cache asks when something has to go."""

    def touch(self, digest: str) -> None:
        """Somebody asks for the variant now."""

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        """Worth of keeping a variant that takes so many bytes and so long to bring back."""

    def forget(self, digest: str) -> None:
        """The variant is no more."""


class RateWeighted:
    """The most waiting saved per byte stays."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def touch(self, digest: str) -> None:
        self.rates.touch(digest)

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        return self.rates.rate(digest) * reload_seconds / num_bytes

    def forget(self, digest: str) -> None:
        self.rates.forget(digest)


class LRU:
    """The most recently used stays, whatever its size."""

    def __init__(self) -> None:
        self._uses = itertools.count(1)
        self._last: dict[str, int] = {}

    def touch(self, digest: str) -> None:
        self._last[digest] = next(self._uses)

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        return self._last.get(digest, 0)

    def forget(self, digest: str) -> None:
        self._last.pop(digest, None)


class LFU:
    """The most often used stays, whatever its size and however long ago."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def touch(self, digest: str) -> None:
        self._count[digest] += 1

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        return self._count[digest]

    def forget(self, digest: str) -> None:
        del self._count[digest]


def choose_pins(
    rates: Mapping[str, float], current: Collection[str], *, count: int, margin: float = PIN_MARGIN
) -> frozenset[str]:
    """The `count` variants of most traffic, changed only where the difference is clear.

    Args:
        rates: of every variant that may be pinned.
        current: what is pinned now.
        margin: one of `current` stays unless another's rate is more than this many times its own.
    """
    weighted = {d: rate * (margin if d in current else 1.0) for d, rate in rates.items()}
    best = sorted((d for d in weighted if weighted[d] > 0), key=lambda d: (-weighted[d], d))
    return frozenset(best[:count])
