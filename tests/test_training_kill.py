"""kill -9 and SIGTERM at random points of a run, merges included: the resumed run ends bit for bit
like a whole one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def kill_and_resume(
    work: Path, *, seed: int, count: int, method: str = "svd_mean", number: str = "SIGKILL"
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(work / "cache"),
    }
    command = [
        sys.executable,
        str(ROOT / "tests" / "kill_runs.py"),
        str(work),
        str(seed),
        str(count),
        method,
        number,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"point"')]
    assert len(reports) == count, done.stdout
    for report in reports:
        print(report)
        assert report["died"], report
        assert report["status"] == 0, done.stderr[-3000:]
        assert report["differs"] == [], report
        assert report["faults"] == [], report
        assert report["left"] == [], report
        assert report["family"] in ([], ["x"]), report


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    kill_and_resume(tmp_path, seed=11, count=3)


def test_a_killed_run_with_a_moving_average_resumes_bit_for_bit(tmp_path):
    """TB21, TB23: the average is that of the uninterrupted run, too."""
    kill_and_resume(tmp_path, seed=12, count=2, method="ema")


def test_a_terminated_run_ends_at_once_or_after_its_merge(tmp_path):
    """TB39."""
    kill_and_resume(tmp_path, seed=13, count=1, number="SIGTERM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "method", "number"),
    [
        (1, "svd_mean", "SIGKILL"),
        (2, "svd_mean", "SIGKILL"),
        (3, "ema", "SIGKILL"),
        (4, "svd_mean", "SIGTERM"),
        (5, "ema", "SIGTERM"),
    ],
)
def test_a_killed_run_resumes_bit_for_bit_at_many_points(tmp_path, seed, method, number):
    """TB39."""
    kill_and_resume(tmp_path, seed=seed, count=20, method=method, number=number)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "number"), [("svd_mean", "SIGTERM"), ("ema", "SIGKILL")])
def test_slice_of_killed_runs(tmp_path, method, number):
    """TB39."""
    kill_and_resume(tmp_path, seed=6, count=1, method=method, number=number)
