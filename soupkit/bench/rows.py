"""One figure of a benchmark: a ratio to a baseline of the same run, and the goal it is held to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 1000

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Row:
    """What one measurement said.

    Args:
        name: what was measured. value, unit: its median. baseline: what it is divided by.
        ratio, low, high: median, least and greatest value / baseline over the repetitions.
        goal: limit of the ratio; None where there is none. better: the good direction.
    """

    name: str
    value: float
    unit: str
    baseline: str
    ratio: float
    low: float
    high: float
    goal: float | None = None
    better: Better = "lower"

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.ratio <= self.goal if self.better == "lower" else self.ratio >= self.goal

    def to_json(self) -> dict[str, Any]:
        """The fields and the verdict as JSON types."""
        return {**asdict(self), "ok": self.ok}


def compare(
    name: str,
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    *,
    against: str,
    repeats: int,
    clock: Callable[[], float] = time.thread_time,
    goal: float | None = None,
) -> Row:
    """Time two calls in turn, after one of each to warm up.

    Args:
        against: what the baseline is, in words.
        repeats: pairs that are timed, >= 1.
        clock: seconds; the thread's CPU time unless told, because others share the machine.
    """
    candidate()
    baseline()
    times, ratios = [], []
    for _ in range(repeats):
        start = clock()
        baseline()
        middle = clock()
        candidate()
        times.append(clock() - middle)
        ratios.append(times[-1] / max(middle - start, 1e-9))
    return Row(
        name=name,
        value=statistics.median(times) * 1e3,
        unit="ms",
        baseline=against,
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        goal=goal,
    )


def document(bench: str, rows: Sequence[Row], model: Sequence[Row] = ()) -> dict[str, Any]:
    """The machine-readable form: {"bench", "machine", "rows"}, "model" if some was not timed."""
    found = {"bench": bench, "machine": machine(), "rows": [row.to_json() for row in rows]}
    return {**found, "model": [row.to_json() for row in model]} if model else found


def machine() -> dict[str, Any]:
    """What the figures were measured on; gpu and triton are None where there is none."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "triton": _version("triton"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def console(*, on_stderr: bool = False) -> Console:
    """Of a table: a terminal bounds it, a pipe does not."""
    found = Console(stderr=on_stderr)
    return found if found.is_terminal else Console(stderr=on_stderr, width=PIPE_COLUMNS)


def show(
    bench: str, rows: Sequence[Row], *, title: str | None = None, on_stderr: bool = False
) -> None:
    """Print the rows as a table, on stdout unless told.

    Args:
        title: over the table; by default the benchmark and the machine.
    """
    facts = machine()
    if title is None:
        title = f"soupkit bench {bench} on {facts['gpu'] or facts['cpu']}, torch {facts['torch']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("what", "median", "baseline", "ratio", "range", "goal"):
        left = column in ("what", "baseline")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "baseline")
    for row in rows:
        sign = "<=" if row.better == "lower" else ">="
        goal = "" if row.goal is None else f"{sign} {row.goal:g} {'met' if row.ok else 'missed'}"
        table.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            row.baseline,
            f"{row.ratio:.2f}",
            f"{row.low:.2f}-{row.high:.2f}",
            goal,
        )
    console(on_stderr=on_stderr).print(table)
