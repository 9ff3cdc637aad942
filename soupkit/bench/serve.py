"""What a variant costs when it is served: the base alone, one variant, and many in one batch.

The same prompts in one engine and one run, the base and the others in turn. Without HTTP, see
streams.py. A family of fewer than 14 variants is measured with copies of them that differ in their
scales: other content, and the same work.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from soupkit.bench.rows import Better, Row
from soupkit.bench.streams import Stream, ask_all, serving
from soupkit.bundle import open_variant
from soupkit.family import FAMILY_NAME, Family, open_family
from soupkit.files import atomic_write_json
from soupkit.rewrite import rewrite_variant

CONCURRENT = 8
MIXED = 14
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
    """Rows for the base, for the family's first variant, and for 14 variants in a batch.

    Raises:
        BundleError: no family. ServingError: it cannot be served.
        ValueError: the family has no variant.
    """
    names = sorted(open_family(family).variants)
    if not names:
        raise ValueError(f"{family} has no variant to measure; `soupkit export` adds one")
    with tempfile.TemporaryDirectory() as scratch:
        measured = filled(open_family(family), Path(scratch), count=MIXED)
        # The family's own before their copies.
        order = sorted(measured.variants, key=lambda name: (name not in names, name))
        tokens, repeats = (16, 2) if quick else (32, 9)
        return asyncio.run(_run(measured.path, order, tokens=tokens, repeats=repeats))


def filled(family: Family, scratch: Path, *, count: int) -> Family:
    """A family in `scratch` with `count` variants, no two of one content: the first ones of
    `family`, then copies of them with other scales.

    Raises:
        BundleError: a variant is damaged. ValueError: too few have scales, and so other content.
    """
    sources: dict[str, str] = {}  # digest -> name
    for name, ref in sorted(family.variants.items()):
        if len(sources) < count:
            sources.setdefault(ref.digest, name)
    names = list(sources.values())
    variants = {name: family.variants[name] for name in names}
    copy = Family(scratch, family.base, variants)
    for name in names:
        shutil.copytree(family.folder(name), copy.folder(name))
    atomic_write_json(scratch / FAMILY_NAME, copy.to_json())
    for i in range(count - len(names)):
        source, factor = names[i % len(names)], 1.0 + (i // len(names) + 1) / 64
        variant = open_variant(copy.folder(source))
        deltas = {
            entry.name: replace(delta, scale=delta.scale * factor)
            for entry in variant.manifest.tensors
            if entry.kind == "delta" and (delta := variant.delta(entry.name)).scale is not None
        }
        rewrite_variant(
            copy, variant, source=source, name=f"copy-{i:02}-of-{source}", deltas=deltas, raw={},
            residual_energy={}, event={"by": "soupkit bench serve"},
        )  # fmt: skip
    result = open_family(scratch)
    found = len({ref.digest for ref in result.variants.values()})
    if found < count:
        raise ValueError(
            f"{family.path} gives {found} variants of different content, {count} are measured: "
            "only what has packed signs can be varied"
        )
    return result


async def _run(family: Path, names: list[str], *, tokens: int, repeats: int) -> list[Row]:
    batches = {
        f"1 variant, {CONCURRENT} requests": [names[0]] * CONCURRENT,
        f"{len(names)} variants mixed, {len(names)} requests": names,
    }
    rows: list[Row] = []
    async with serving(family) as service:
        for title, models in batches.items():
            base = ["base"] * len(models)
            for warmed in (models, base):
                await ask_all(service, warmed, tokens=tokens)
            found: list[list[float]] = []
            bases: list[list[float]] = []
            for i in range(repeats):
                # New prompts each time: of old ones the beginning is in the prefix cache.
                salt = (i + 1) * len(models)
                bases.append(_figures(await ask_all(service, base, tokens=tokens, salt=salt)))
                found.append(_figures(await ask_all(service, models, tokens=tokens, salt=salt)))
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
