"""`soupkit bench kernel --check`: all that only a GPU can say about the kernel, at once.

Under ten minutes in all: results against float64, compute-sanitizer, CUDA graphs and streams,
torch.compile, times, and a tuning pass whose table is ready for configs.py. On a CPU with
TRITON_INTERPRET=1 the results, at tiny shapes, and what torch.compile traces. A report is whole at
any moment: who interrupts sees what there is. On a machine that is lent for some minutes, with
torch for CUDA (it brings triton), rich and typer, in a checkout, with nothing installed:

    PYTHONPATH=.:kernels timeout -s TERM 585 \\
        python3 -m soupkit bench kernel --check --json > $OUT/check.json

The document goes to the file, the tables to stderr; the exit code is 1 if anything failed. Without
Triton's cache the first run of a machine compiles some hundred kernels: TRITON_CACHE_DIR on a disk
that stays saves that in the next.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from soupkit.bench import (
    findings,
    kernel_cases,
    kernel_gpu,
    kernel_graphs,
    kernel_results,
    kernel_sanitizer,
    rows,
    workers,
)
from soupkit.bench.findings import Finding, Part, Progress
from soupkit.bench.kernel_tune import Tuner
from soupkit.bench.rows import Row

# Seconds of each part; nine minutes, and compilers may outlast a budget by a case.
SECONDS = {
    "results": 110, "sanitizer": 90, "graphs": 40, "streams": 15, "torch.compile": 30,
    "times": 110, "tuning": 150,
}  # fmt: skip
NEEDS_GPU = "needs a GPU"


@dataclass(slots=True)
class Check:
    """What there is so far. configs: the tuned table as Python, "" before."""

    report: findings.Report = field(default_factory=findings.Report)
    rows: list[Row] = field(default_factory=list)
    configs: str = ""
    is_complete: bool = False


def run(check: Check, *, progress: Progress | None = None) -> None:
    """Fill a check, which is good to be shown whatever happens.

    Raises:
        ValueError: there is neither CUDA nor the interpreter, or no triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError("--check needs triton, which is not installed: pip install triton")
    if not torch.cuda.is_available() and not kernel_results.is_interpreted():
        raise ValueError(
            "--check needs a GPU with CUDA (it is written for Hopper), or, for results alone, "
            "Triton's interpreter: set TRITON_INTERPRET=1"
        )
    findings.collect(check.report, _parts(check), progress=progress)
    check.is_complete = True


def document(check: Check) -> dict[str, Any]:
    """The machine-readable form."""
    return {
        **rows.document("kernel --check", check.rows),
        "findings": check.report.to_json(),
        "configs": check.configs,
        "complete": check.is_complete,
    }


def show(check: Check, *, on_stderr: bool) -> None:
    """Print the findings, the times and the tuned table."""
    found = [finding.status for _, finding in check.report.found]
    counts = ", ".join(f"{found.count(status)} {status}" for status in ("ok", "FAILED", "not run"))
    end = "" if check.is_complete else "; interrupted"
    title = f"soupkit bench kernel --check: {counts}{end}"
    findings.show(check.report, title=title, on_stderr=on_stderr)
    if check.rows:
        rows.show("kernel --quick", check.rows, on_stderr=on_stderr)
    if check.configs:
        (sys.stderr if on_stderr else sys.stdout).write(check.configs)


def _parts(check: Check) -> list[Part]:
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        parts = {
            "results": lambda: kernel_results.check_all(kernel_cases.tiny_cases(), cpu),
            "torch.compile": lambda: kernel_graphs.check_compile(cpu, out=24, width=32),
        }
        others = {name: _needs_gpu for name in SECONDS if name not in parts}
        return [Part(name, {**parts, **others}[name], SECONDS[name]) for name in SECONDS]
    device = torch.device("cuda", torch.cuda.current_device())
    parts = {
        "results": _results,
        "sanitizer": lambda: kernel_sanitizer.check_sanitizer(SECONDS["sanitizer"]),
        "graphs": lambda: kernel_graphs.check_graphs(device),
        "streams": lambda: kernel_graphs.check_streams(device),
        "torch.compile": lambda: kernel_graphs.check_compile(device),
        "times": lambda: _times(check),
        "tuning": lambda: _tuning(check),
    }
    apart = ("results", "sanitizer")
    return [Part(name, parts[name], SECONDS[name], name in apart) for name in SECONDS]


def _results() -> Iterator[Finding]:
    """The cases in several processes, for they wait for compilers; none goes untold."""
    seconds = SECONDS["results"]
    missing = dict.fromkeys(case.name for case in kernel_cases.gpu_cases())
    share = kernel_results.check_share
    for finding in workers.run_parallel(share, workers=workers.num_workers(), seconds=seconds):
        missing.pop(finding.name, None)
        yield finding
    for name in missing:
        yield Finding(name, "not run", f"{seconds:g} s are over, or its process ended")


def _needs_gpu() -> Iterator[Finding]:
    yield Finding("all", "not run", NEEDS_GPU)


def _times(check: Check) -> Iterator[Finding]:
    """The rows of `bench kernel --quick`, into the check too. A missed goal is no failure."""
    for row in kernel_gpu.measure(kernel_gpu.gpu(), quick=True):
        check.rows.append(row)
        yield Finding(row.name, "info", f"{row.ratio:.2f} of {row.baseline}")


def _tuning(check: Check) -> Iterator[Finding]:
    tuner = Tuner(kernel_gpu.gpu())
    versions = f"triton {importlib.metadata.version('triton')}, torch {torch.__version__}"
    for finding in tuner.run():
        check.configs = tuner.text(versions, datetime.date.today().isoformat())
        yield finding
