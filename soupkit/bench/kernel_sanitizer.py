"""The split sums under NVIDIA's compute-sanitizer, in a process of their own.

racecheck sees hazards in shared memory, memcheck what is read or written out of bounds of global
memory (torch's caching allocator is turned off for it: it would hand out one large piece). No tool
sees a missing order of global memory between programs: for that there are the equal runs on
poisoned memory of kernel_results.py, and the streams of kernel_graphs.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from soupkit.bench.findings import Finding
from soupkit.bench.kernel_cases import ALL, ONE, Case
from soupkit.bench.kernel_results import call, compare, make, reference

TOOLS = ("racecheck", "memcheck")
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
ERRORS_FOUND = 77
# memcheck: "ERROR SUMMARY: 0 errors"; racecheck: "RACECHECK SUMMARY: 0 hazards displayed (..)".
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
# racecheck slows each kernel it watches a hundredfold: only the fused one, by a part of its name.
KERNEL = "delta_linear_kernel"
# Small; the linear ones split K.
CASES = (
    Case(256, 4096, 5, (ONE,) * 4),
    Case(200, 4112, 16, (ONE, ALL), has_bias=True),
    Case(256, 2048, 40, (ONE,) * 4, what="add"),
    Case(99, 2048, 7, (ALL, ONE), what="embedding"),
)


def find_sanitizer() -> str | None:
    """The program, on PATH or where CUDA puts it."""
    return shutil.which("compute-sanitizer") or next(
        (found for place in PLACES if (found := shutil.which("compute-sanitizer", path=place))),
        None,
    )


def check_sanitizer(seconds: float) -> Iterator[Finding]:
    """A finding of each tool; `seconds`: for all of them."""
    program = find_sanitizer()
    if program is None:
        said = f"compute-sanitizer is neither on PATH nor in {' or '.join(PLACES)}"
        for tool in TOOLS:
            yield Finding(tool, "not run", said)
        return
    end = time.monotonic() + seconds
    for tool in TOOLS:
        yield run_tool(program, tool, max(1.0, end - time.monotonic()))


def run_tool(program: str, tool: str, seconds: float) -> Finding:
    """Run `small` in a new process under one tool."""
    only = ["--kernel-name", f"kns={KERNEL}"] if tool == "racecheck" else []
    command = [
        program, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), *only,
        sys.executable, "-c", f"from {__name__} import small; small()",
    ]  # fmt: skip
    extra = source_path()
    if tool == "memcheck":
        extra["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **extra}
        )
    except subprocess.TimeoutExpired:
        return Finding(tool, "not run", f"not done in {seconds:.0f} s")
    return judge(tool, done.returncode, done.stdout + done.stderr)


def source_path() -> dict[str, str]:
    """PYTHONPATH of a child that imports this checkout."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def judge(tool: str, code: int, output: str) -> Finding:
    """What a tool's exit code and output mean: only a summary without errors is ok."""
    summary = _SUMMARY.search(output)
    lines = [line.strip(" =") for line in output.splitlines() if line.strip(" =")]
    if summary is not None and code == 0 and summary.group(1) == "0":
        return Finding(tool, "ok", summary.group(0))
    if summary is not None and summary.group(1) != "0":
        first = next((line for line in lines if "rror" in line or "azard" in line), "")
        return Finding(tool, "FAILED", f"{summary.group(0)}; {first}"[:300])
    if "wrong result" in output:
        return Finding(tool, "FAILED", next(line for line in lines if "wrong result" in line))
    # As where the tool does not support the machine.
    return Finding(tool, "not run", f"exit code {code}: {' | '.join(lines[-3:])}"[:300])


def small() -> None:
    """What runs under the tools.

    Raises:
        SystemExit: a result is wrong.
    """
    for seed, case in enumerate(CASES):
        layer = make(case, torch.device("cuda"), seed)
        found = call(case, layer, layer.index.cuda())
        wrong = compare(found, reference(case, layer, layer.index))
        if wrong:
            raise SystemExit(f"wrong result: {case.name}: {wrong}")
