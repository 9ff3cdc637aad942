"""Requests for the variants of a made-up family, as one after the other: who is asked for next.

zipf        a share of 1/k for the k-th most popular, for ever
shifting    the same shares, given to others every 2000 requests
drifting    two variants change places every 100 requests
bursty      most requests come in runs of about 30 of a variant, several runs mixed
flood       zipf, and now and then 300 requests nine tenths of which are for one variant
sweep       zipf, and now and then one request for each variant in turn
loop        each variant in turn, for ever
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MB = 1_000_000
# Bytes of variants: a fine-tune of a 7B model takes about 1 GB at 1 bit, one of 0.5B about 60 MB.
EQUAL_BYTES = 250 * MB
UNEQUAL_BYTES = [60 * MB, 120 * MB, 250 * MB, 500 * MB, 1000 * MB]

Order = NDArray[np.int64]
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, what the variants weigh, and which tier is asked to hold them.

    Args:
        order: variant of each request. sizes: bytes of each variant.
        tier: "device": room for that many slots; "host": for as many variants of mean size.
        stationary: whether popularity stands still. must_win: whether the goal is to be below the
        better of LRU and LFU, not just close.
    """

    name: str
    order: Order
    sizes: list[int]
    tier: Literal["device", "host"]
    room: int
    stationary: bool = False
    must_win: bool = False

    @property
    def budget_bytes(self) -> int:
        """Of the host tier."""
        return int(self.room * np.mean(self.sizes))


def traces(*, requests: int, seed: int, variants: int = 40) -> list[Trace]:
    """The same for the same arguments."""
    rng = np.random.default_rng(seed)
    equal = [EQUAL_BYTES] * variants
    unequal = [int(size) for size in rng.choice(UNEQUAL_BYTES, size=variants)]

    def draw(order: Callable[[Rng, int, int], Order]) -> Order:
        return order(rng, requests, variants)

    return [
        Trace("zipf", draw(zipf), equal, "device", 8, stationary=True),
        Trace("zipf, half fit", draw(zipf), equal, "device", 20, stationary=True),
        Trace("zipf, unequal, device", draw(zipf), unequal, "device", 8, True, True),
        Trace("zipf, unequal, host", draw(zipf), unequal, "host", 8, True, True),
        Trace("shifting", draw(shifting), equal, "device", 8, must_win=True),
        Trace("shifting, unequal, host", draw(shifting), unequal, "host", 8, must_win=True),
        Trace("drifting", draw(drifting), equal, "device", 8, must_win=True),
        Trace("bursty", draw(bursty), equal, "device", 8, must_win=True),
        Trace("bursty, half fit", draw(bursty), equal, "device", 20, must_win=True),
        Trace("bursty, unequal, host", draw(bursty), unequal, "host", 8, must_win=True),
        Trace("floods", draw(flood), equal, "device", 8),
        Trace("sweeps", draw(sweep), equal, "device", 8),
        Trace("loop", draw(loop), equal, "device", 8),
    ]


def _shares(variants: int, exponent: float = 1.0) -> NDArray[np.float64]:
    weights = 1.0 / np.arange(1, variants + 1) ** exponent
    return np.asarray(weights / weights.sum())


def zipf(rng: Rng, requests: int, variants: int) -> Order:
    return rng.choice(variants, size=requests, p=_shares(variants))


def shifting(rng: Rng, requests: int, variants: int, *, every: int = 2000) -> Order:
    ranks = zipf(rng, requests, variants)
    names = [rng.permutation(variants) for _ in range(0, requests, every)]
    return np.array([names[i // every][rank] for i, rank in enumerate(ranks)])


def drifting(rng: Rng, requests: int, variants: int, *, every: int = 100) -> Order:
    ranks, names = zipf(rng, requests, variants), rng.permutation(variants)
    order = np.empty_like(ranks)
    for start in range(0, requests, every):
        one, other = rng.integers(0, variants, 2)
        names[[one, other]] = names[[other, one]]
        order[start : start + every] = names[ranks[start : start + every]]
    return order


def bursty(rng: Rng, requests: int, variants: int, *, length: int = 30) -> Order:
    shares, active = _shares(variants, 0.6), list[int]()
    order = np.empty(requests, dtype=np.int64)
    for i in range(requests):
        if not active or rng.random() < 0.3:
            order[i] = rng.choice(variants, p=shares)
            if rng.random() < 0.1:
                active.append(int(order[i]))
            continue
        run = int(rng.integers(len(active)))
        order[i] = active[run]
        if rng.random() < 1 / length:
            active.pop(run)
    return order


def flood(rng: Rng, requests: int, variants: int, *, every: int = 700, length: int = 300) -> Order:
    order = zipf(rng, requests, variants)
    for start in range(every, requests - length, every):
        window = order[start : start + length]
        window[rng.random(length) < 0.9] = rng.integers(variants)
    return order


def sweep(rng: Rng, requests: int, variants: int, *, every: int = 600) -> Order:
    order = zipf(rng, requests, variants)
    for start in range(every, requests - variants, every):
        order[start : start + variants] = np.arange(variants)
    return order


def loop(rng: Rng, requests: int, variants: int) -> Order:
    return np.arange(requests) % variants
