"""Throughput of a running server: one variant, and all of them mixed, against the base alone.

The same prompts, eight at a time, through HTTP, in the same engine and run.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soupkit.bench.rows import Row
from soupkit.family import open_family
from soupkit.serving.local import running

CONCURRENT = 8
MIXED_GOAL = 0.6  # of the base's throughput, 14 variants in one batch


def run(family: Path, *, quick: bool) -> list[Row]:
    """Rows for the family's first variant and for all variants with the base mixed in a batch.

    Raises:
        BundleError: no family. ServingError: it cannot be served.
        ValueError: the family has no variant.
    """
    names = sorted(open_family(family).variants)
    if not names:
        raise ValueError(f"{family} has no variant to measure; `soupkit export` adds one")
    tokens, repeats = (16, 2) if quick else (48, 5)
    mixes = {
        f"{CONCURRENT} requests, {names[0]}": [names[0]] * CONCURRENT,
        f"{CONCURRENT} requests, {len(names)} variants + base": [
            ["base", *names][i % (len(names) + 1)] for i in range(CONCURRENT)
        ],
    }
    speeds: dict[str, list[float]] = {name: [] for name in mixes}
    ratios: dict[str, list[float]] = {name: [] for name in mixes}
    with running(family) as url:
        for models in (["base"] * CONCURRENT, *mixes.values()):
            _throughput(url, models, tokens)
        for _ in range(repeats):
            for name, models in mixes.items():
                base = _throughput(url, ["base"] * CONCURRENT, tokens)
                speeds[name].append(_throughput(url, models, tokens))
                ratios[name].append(speeds[name][-1] / base)
    return [
        Row(
            name=name,
            value=statistics.median(speeds[name]),
            unit="tok/s",
            baseline="base alone",
            ratio=statistics.median(found),
            low=min(found),
            high=max(found),
            goal=MIXED_GOAL if name.endswith("+ base") else None,
            better="higher",
        )
        for name, found in ratios.items()
    ]


def _throughput(url: str, models: Sequence[str], tokens: int) -> float:
    """Generated tokens per second of wall time over one request for each of `models`."""

    def ask(model: str) -> int:
        body = {"model": model, "prompt": [2, 3, 5, 7], "max_tokens": tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=json.dumps({**body, "temperature": 0}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    started = time.perf_counter()
    with ThreadPoolExecutor(len(models)) as pool:
        total = sum(pool.map(ask, models))
    return total / (time.perf_counter() - started)
