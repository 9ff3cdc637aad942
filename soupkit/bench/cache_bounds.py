"""What hindsight would have paid for a trace: the best set that never changes, and a lower bound.

Static: on the device all slots but one hold the set, as pins would, and the last one whoever came
last; in host memory the set of most seconds saved within the bytes (a knapsack, in units of 10 MB).

Clairvoyant: with equal bytes and seconds Belady's rule (evict what is asked for last of all), which
is what no policy can beat. Otherwise a bound that none reaches: to save the reload at request j of
a variant asked for before at i takes its bytes for the j - i - 1 requests in between; of all such
intervals take those of most seconds saved per byte and request until the tier's bytes at all
requests are spent (PFOO-L, Berger, Beckmann, Harchol-Balter, arXiv 1711.03709).
"""

from collections.abc import Sequence

import numpy as np

from soupkit.bench.cache_traces import MB, Trace

UNIT_BYTES = 10 * MB


def best_static(trace: Trace, seconds: Sequence[float]) -> float:
    """Seconds of reloads with the best set that never changes; `seconds` of each variant."""
    counts: list[int] = np.bincount(trace.order, minlength=len(seconds)).tolist()
    saved = [count * second for count, second in zip(counts, seconds, strict=True)]
    if trace.tier == "host":
        return sum(saved) - _knapsack(counts, seconds, trace)
    asked = [variant for variant, count in enumerate(counts) if count]
    pinned = sorted(asked, key=lambda v: -saved[v])[: trace.room - 1]
    paid, floating = 0.0, -1
    for variant in trace.order.tolist():
        if variant not in pinned and variant != floating:
            paid += seconds[variant]
            floating = variant
    return paid + sum(seconds[variant] for variant in pinned)


def _knapsack(counts: Sequence[int], seconds: Sequence[float], trace: Trace) -> float:
    """Most seconds that a set within the bytes saves after its first requests."""
    best = np.zeros(trace.budget_bytes // UNIT_BYTES + 1)
    for count, second, size in zip(counts, seconds, trace.sizes, strict=True):
        units = -(-size // UNIT_BYTES)
        if count > 1 and units < len(best):
            best[units:] = np.maximum(best[units:], best[:-units] + (count - 1) * second)
    return float(best[-1])


def clairvoyant(trace: Trace, seconds: Sequence[float]) -> float:
    """Seconds of reloads that no policy goes below."""
    if trace.tier == "device" and len(set(seconds)) == 1:
        return _belady(trace.order.tolist(), trace.room) * seconds[0]
    return _interval_bound(trace, seconds)


def _belady(order: Sequence[int], room: int) -> int:
    """Fewest misses of `room` slots."""
    later, following = dict[int, int](), [0] * len(order)
    for i in range(len(order) - 1, -1, -1):
        following[i] = later.get(order[i], len(order))
        later[order[i]] = i
    held, misses = dict[int, int](), 0  # variant -> when it is asked for next
    for i, variant in enumerate(order):
        if variant not in held:
            misses += 1
            if len(held) == room:
                del held[max(held, key=held.__getitem__)]
        held[variant] = following[i]
    return misses


def _interval_bound(trace: Trace, seconds: Sequence[float]) -> float:
    is_host = trace.tier == "host"
    sizes = trace.sizes if is_host else [1] * len(trace.sizes)
    budget = trace.budget_bytes if is_host else trace.room
    last, paid, spare = dict[int, int](), 0.0, 0
    intervals: list[tuple[float, int]] = []  # seconds saved, bytes * requests
    for i, variant in enumerate(trace.order.tolist()):
        paid += seconds[variant]
        spare += budget if is_host else budget - 1  # a slot is taken whether or not it is kept
        if variant in last:
            intervals.append((seconds[variant], sizes[variant] * (i - last[variant] - 1)))
        last[variant] = i
    for saved, use in sorted(intervals, key=lambda item: item[1] / item[0]):
        part = min(1.0, spare / use) if use else 1.0
        paid -= part * saved
        spare -= int(part * use)
        if part < 1.0:
            break
    return paid
