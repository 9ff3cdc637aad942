"""What a merge costs a run under each strategy: merge seconds over training-step seconds.

Each strategy is a launch of its own (strategy.py), two ranks where it has ranks; a strategy whose
package is not installed is left out, and said so. Every row is divided by what the same launch
measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from soupkit.bench.rows import Row
from soupkit.tracking import say

STRATEGIES = ("one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
RANKS = 2


def rows(*, quick: bool) -> list[Row]:
    """Rows of every strategy; `quick`: two layers, one process and DDP only."""
    if importlib.util.find_spec("transformers") is None:
        say("no figures of training: transformers is not installed (pip install soupkit[train])")
        return []
    wanted: tuple[str, ...] = STRATEGIES[:2] if quick else STRATEGIES
    if importlib.util.find_spec("deepspeed") is None:
        wanted = tuple(name for name in wanted if not name.startswith("ZeRO"))
        say("no figures of ZeRO: deepspeed is not installed (pip install soupkit[deepspeed])")
    found = []
    for strategy in wanted:
        # The whole of SmolLM2-135M where the goal is stated, a part of it for the others.
        layers = 2 if quick else (30 if strategy == "one process" else 6)
        found += strategy_rows(launch(strategy, layers=layers, merges=2 if quick else 3))
    return found


def launch(strategy: str, *, layers: int, merges: int) -> dict[str, Any]:
    """The figures of one launch.

    Raises:
        RuntimeError: it failed; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="soupkit-bench-") as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m"]
        if strategy != "one process":
            command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", "-m"]
        command += ["soupkit.bench.strategy", strategy, f"--layers={layers}", f"--merges={merges}"]
        threads = os.cpu_count() or 1
        threads = threads if strategy == "one process" else max(1, threads // RANKS)
        done = subprocess.run(
            [*command, f"--out={out}"],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE",
                # A cache of its own: a lock that a killed build left elsewhere would hang this one.
                "TORCH_EXTENSIONS_DIR": str(Path(folder) / "extensions"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the {strategy} launch failed:\n{done.stderr[-4000:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def strategy_rows(figures: dict[str, Any]) -> list[Row]:
    """The rows of one launch."""
    name, step = figures["strategy"], figures["step_seconds"]
    steps = figures["steps"]
    goals = {"first merge": 5.0, "next merge": 2.0, "gate's two scorings": None}
    merges = figures["merges"]
    series = {
        "first merge": merges[:1],
        "next merge": merges[1:],
        "gate's two scorings": figures["scores"],
    }
    found = []
    for what, seconds in series.items():
        middle = sorted(seconds)[len(seconds) // 2]
        found.append(
            Row(
                name=f"{name}: {what}",
                value=middle,
                unit="s",
                baseline="training step",
                ratio=middle / step,
                low=min(seconds) / max(steps),
                high=max(seconds) / min(steps),
                goal=goals[what],
            )
        )
    # On a GPU the factors are in host memory, here they are in the same.
    factors = 0 if figures["device"] == "cuda" else figures["factor_bytes"]
    beyond = max(0, figures["extra_bytes"] - factors)
    ratio = beyond / figures["largest_bytes"]
    memory = Row(
        name=f"{name}: memory of a merge beyond factors",
        value=beyond / 1e6,
        unit="MB",
        baseline="largest matrix",
        ratio=ratio,
        low=ratio,
        high=ratio,
        goal=4.0,
    )
    return [*found, memory]
