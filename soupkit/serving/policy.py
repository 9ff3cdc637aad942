"""Which variant is worth its memory: the one of lowest value goes first.

    value_v   = share_v * reload_seconds_v / bytes_v
    share_v   = sum over memories h of weight_h * share_hv
    share_hv  = sum over requests i for v of (1 - 2^(-1/h)) * 2^(-(now - i) / h)    [now, i: counts]
    weight_h ~= exp(sum over requests j of 2^(-(now - j) / FORESIGHT) * ln share_h(v_j | not v_j-1))

the waiting that keeping v saves, per byte, if its share of the requests stays. How long the past
tells the future differs: a memory of many requests is best while popularity stands still, a short
one when it shifts or comes in bursts. So several run side by side, and each counts as much as it
foretold whose turn came next. Requests are the clock, so that a busy hour and a quiet night weigh
the same. LRU and LFU stand beside it for `soupkit bench cache`, which holds the three to the same
traces.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

HALF_LIFE_SECONDS = 600.0
# Half-lives in requests; `soupkit bench cache` shows what one alone would lose.
MEMORIES = (16, 64, 256, 1024, 4096)
FORESIGHT = 500
# Of a share, in case a memory has forgotten all about a variant.
LEAST_SHARE = 0.002
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
        """Worth of a byte of a variant that takes so many and so long to bring back."""

    def admits(self, gained: float, lost: float) -> bool:
        """Whether host memory should keep a variant of that value * bytes for others of theirs."""

    def forget(self, digest: str) -> None:
        """The variant is no more."""


class RateWeighted:
    """The most waiting saved per byte stays; see the module."""

    def __init__(self, memories: Sequence[int] = MEMORIES) -> None:
        self._keep = [2 ** (-1 / half_life) for half_life in memories]
        self._seen: dict[str, tuple[list[float], int]] = {}  # digest -> (shares, at which request)
        self._now = 0
        self._last = ""
        self._foretold = [0.0] * len(memories)  # decayed log-likelihood
        self._weights = [1 / len(memories)] * len(memories)

    def touch(self, digest: str) -> None:
        shares = self._shares(digest)
        if digest in self._seen and digest != self._last:
            self._judge(shares)
        self._now += 1
        self._last = digest
        learned = [s * keep + 1 - keep for s, keep in zip(shares, self._keep, strict=True)]
        self._seen[digest] = (learned, self._now)

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        shares = zip(self._weights, self._shares(digest), strict=True)
        # One that is the base in all has no bytes, and none is cheaper to keep.
        worth = sum(weight * share for weight, share in shares) * reload_seconds
        return worth / max(1, num_bytes)

    def admits(self, gained: float, lost: float) -> bool:
        return gained >= lost

    def forget(self, digest: str) -> None:
        self._seen.pop(digest, None)

    def _shares(self, digest: str) -> list[float]:
        """Of the requests so far, by each memory."""
        shares, then = self._seen.get(digest, ([0.0] * len(self._keep), 0))
        age = self._now - then
        return [share * keep**age for share, keep in zip(shares, self._keep, strict=True)]

    def _judge(self, shares: list[float]) -> None:
        """Weighs the memories by what share each gave the variant that is asked for now.

        Among those other than the last one, as every policy keeps that; else a flood of requests
        for one variant would speak for the memory that forgets all others.
        """
        last, least = self._shares(self._last), LEAST_SHARE / len(self._seen)
        for i, (share, keep) in enumerate(zip(shares, self._keep, strict=True)):
            others = max(1 - keep**self._now - last[i], share, 1e-9)
            told = math.log(least + (1 - LEAST_SHARE) * share / others)
            self._foretold[i] = self._foretold[i] * 2 ** (-1 / FORESIGHT) + told
        best = max(self._foretold)
        odds = [math.exp(told - best) for told in self._foretold]
        self._weights = [odd / sum(odds) for odd in odds]


class LRU:
    """The most recently used stays, whatever its size."""

    def __init__(self) -> None:
        self._uses = itertools.count(1)
        self._last: dict[str, int] = {}

    def touch(self, digest: str) -> None:
        self._last[digest] = next(self._uses)

    def value(self, digest: str, num_bytes: int, reload_seconds: float) -> float:
        return self._last.get(digest, 0)

    def admits(self, gained: float, lost: float) -> bool:
        return True  # whatever comes is kept

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

    def admits(self, gained: float, lost: float) -> bool:
        return True  # whatever comes is kept

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
