"""Traces replayed through the serving cache and its policies: seconds of reloads, no clock needed.

    cost = sum over misses of LATENCY_SECONDS + bytes / BYTES_PER_SECOND

Device traces fill slots of equal size, host traces a budget in exact bytes; both are the code that
serves (`DeltaCache`, `RateWeighted`). The load model is a good NVMe disk, and stated, not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from soupkit.bench.cache_bounds import best_static, clairvoyant
from soupkit.bench.cache_traces import Trace, traces
from soupkit.bench.rows import Row
from soupkit.serving.cache import Costs, DeltaCache
from soupkit.serving.policy import LFU, LRU, MEMORIES, Policy, RateWeighted

LATENCY_SECONDS = 0.05
BYTES_PER_SECOND = 3e9
# Of the better of LRU and LFU on any trace; where the goal is to be below both, that is the limit.
CLOSE, BELOW = 1.02, 1.0
STATIC_GOAL = 1.10


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of reloads of one trace."""

    ours: float
    lru: float
    lfu: float
    static: float
    bound: float


def run(*, quick: bool) -> list[Row]:
    """Three rows a trace: against the better of LRU and LFU, the best static set, the bound."""
    requests, seeds = (2500, 1) if quick else (8000, 3)
    sets = [traces(requests=requests, seed=seed) for seed in range(seeds)]
    rows: list[Row] = []
    for same in zip(*sets, strict=True):
        rows += _rows(same[0], [_outcome(trace) for trace in same])
    return rows if quick else rows + _memory_rows(sets[0])


def replay(trace: Trace, policy: Policy) -> float:
    """Seconds of reloads."""
    seconds = reload_seconds(trace)
    cache = DeltaCache(trace.room * max(trace.sizes), policy, host_bytes=trace.budget_bytes)
    cache.plan_growth(max(trace.sizes))
    cache.grow(cache.planned_bytes)
    for variant, cost in enumerate(seconds):
        cache.note_costs(str(variant), Costs(load_seconds=cost))
    paid = 0.0
    for variant in trace.order.tolist():
        digest = str(variant)
        policy.touch(digest)
        if trace.tier == "host":
            if not cache.is_hosted(digest):
                paid += seconds[variant]
                cache.host(digest, trace.sizes[variant], busy=frozenset())
            continue
        if digest not in cache:
            paid += seconds[variant]
            cache.admit(digest)
        cache.acquire(digest)
        cache.release(digest)
    return paid


def reload_seconds(trace: Trace) -> list[float]:
    """Of each variant, by the load model."""
    return [LATENCY_SECONDS + size / BYTES_PER_SECOND for size in trace.sizes]


def _outcome(trace: Trace) -> Outcome:
    seconds = reload_seconds(trace)
    return Outcome(
        ours=replay(trace, RateWeighted()),
        lru=replay(trace, LRU()),
        lfu=replay(trace, LFU()),
        static=best_static(trace, seconds),
        bound=clairvoyant(trace, seconds),
    )


def _rows(trace: Trace, outcomes: list[Outcome]) -> list[Row]:
    exact = trace.tier == "device" and len(set(trace.sizes)) == 1
    lru, lfu = (statistics.median(getattr(o, name) for o in outcomes) for name in ("lru", "lfu"))
    against: list[tuple[str, Callable[[Outcome], float], float | None]] = [
        (
            f"better of LRU {lru:.0f} s, LFU {lfu:.0f} s",
            lambda o: min(o.lru, o.lfu),
            BELOW if trace.must_win else CLOSE,
        ),
        ("best static set", lambda o: o.static, STATIC_GOAL if trace.stationary else None),
        (f"clairvoyant, {'Belady' if exact else 'interval bound'}", lambda o: o.bound, None),
    ]
    rows = []
    for baseline, cost, goal in against:
        ratios = [outcome.ours / cost(outcome) for outcome in outcomes]
        rows.append(
            Row(
                name=trace.name,
                value=statistics.median(outcome.ours for outcome in outcomes),
                unit="s of reloads",
                baseline=baseline,
                ratio=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
                goal=goal,
            )
        )
    return rows


def _memory_rows(found: list[Trace]) -> list[Row]:
    """What each memory alone would cost beside all of them together, over the traces."""
    together = {trace.name: replay(trace, RateWeighted()) for trace in found}
    rows = []
    for memory in MEMORIES:
        alone = [replay(trace, RateWeighted((memory,))) for trace in found]
        ratios = [cost / together[t.name] for cost, t in zip(alone, found, strict=True)]
        rows.append(
            Row(
                name=f"a memory of {memory} requests alone, all traces",
                value=sum(alone),
                unit="s of reloads",
                baseline="all memories together",
                ratio=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
            )
        )
    return rows
