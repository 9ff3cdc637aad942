"""What a variant costs when it is served: the base alone, one variant, and many in one batch.

The same prompts in one engine and one run, the base and the others in turn. Without HTTP, see
streams.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from soupkit.bench.rows import Better, Row
from soupkit.bench.streams import Stream, ask_all, serving
from soupkit.family import open_family

CONCURRENT = 8
MOST_MIXED = 14
LATENCY_GOAL = 1.10  # of the base's, one variant
MIXED_GOAL = 0.6  # of the base's throughput, 14 variants in one batch

# Of the streams of one measurement: (what, unit, is better).
_FIGURES: tuple[tuple[str, str, Better], ...] = (
    ("first token P50", "ms", "lower"),
    ("first token P99", "ms", "lower"),
    ("time per token P50", "ms", "lower"),
    ("time per token P99", "ms", "lower"),
    ("throughput", "tok/s", "higher"),
)


def run(family: Path, *, quick: bool) -> list[Row]:
    """Rows for the base, for the family's first variant, and for up to 14 variants in a batch.

    Raises:
        BundleError: no family. ServingError: it cannot be served.
        ValueError: the family has no variant.
    """
    names = sorted(open_family(family).variants)
    if not names:
        raise ValueError(f"{family} has no variant to measure; `soupkit export` adds one")
    return asyncio.run(_run(family, names, tokens=16 if quick else 32, repeats=2 if quick else 9))


async def _run(family: Path, names: list[str], *, tokens: int, repeats: int) -> list[Row]:
    mixed = names[:MOST_MIXED]
    batches = {
        f"1 variant, {CONCURRENT} requests": [names[0]] * CONCURRENT,
        f"{len(mixed)} variants mixed, {MOST_MIXED} requests": [
            mixed[i % len(mixed)] for i in range(MOST_MIXED)
        ],
    }
    rows: list[Row] = []
    async with serving(family) as service:
        for title, models in batches.items():
            base = ["base"] * len(models)
            for warmed in (models, base):
                await ask_all(service, warmed, tokens=tokens)
            found: list[list[float]] = []
            bases: list[list[float]] = []
            for _ in range(repeats):
                bases.append(_figures(await ask_all(service, base, tokens=tokens)))
                found.append(_figures(await ask_all(service, models, tokens=tokens)))
            rows += _rows(f"base, {len(models)} requests", bases, bases)
            rows += _rows(title, found, bases)
    return rows


def _figures(streams: Sequence[Stream]) -> list[float]:
    """The values of _FIGURES."""
    first = [1e3 * stream.first for stream in streams]
    gaps = [1e3 * gap for stream in streams for gap in stream.gaps]
    seconds = max(s.times[-1] for s in streams) - min(s.asked for s in streams)
    tokens = sum(len(stream.times) for stream in streams)
    return [
        *(_percentile(values, p) for values in (first, gaps) for p in (0.5, 0.99)),
        tokens / seconds,
    ]


def _percentile(values: Sequence[float], p: float) -> float:
    """The value that a share `p` of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(p * len(values)))]


def _rows(title: str, found: list[list[float]], bases: list[list[float]]) -> list[Row]:
    """One row a figure, of the repetitions."""
    rows = []
    for i, (what, unit, better) in enumerate(_FIGURES):
        ratios = [mine[i] / theirs[i] for mine, theirs in zip(found, bases, strict=True)]
        goal = None
        if title.startswith("1 variant,") and what.endswith("P50"):
            goal = LATENCY_GOAL
        elif "mixed" in title and what == "throughput":
            goal = MIXED_GOAL
        rows.append(
            Row(
                name=f"{title}: {what}",
                value=median(mine[i] for mine in found),
                unit=unit,
                baseline="itself" if found is bases else "base alone",
                ratio=median(ratios),
                low=min(ratios),
                high=max(ratios),
                goal=goal,
                better=better,
            )
        )
    return rows
