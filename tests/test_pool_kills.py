"""A pool whose writer is killed, or meets a full disk, at any point."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pool_kill_runs
import pytest
from pool_kill_runs import EVENTS, before_call, check_next_writer, prepare, reset, state

ROOT = Path(__file__).resolve().parents[1]
# Calls that change the disk, at least: an event whose calls are not seen would pass unkilled.
LEAST = {"merge": 25, "evict": 15, "store": 12, "leave": 4, "remove": 6, "touch": 4, "create": 18}


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def kill(root: Path, event: str, *, stride: int = 1) -> None:
    places = [ROOT, ROOT / "kernels", ROOT / "tests"]
    done = subprocess.run(
        [sys.executable, pool_kill_runs.__file__, str(root), event, str(stride)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= LEAST[event] // stride, done.stdout


def fill_disk(root: Path, event: str, *, stride: int = 1) -> None:
    prepare(root)
    reset(root, event)
    old = state(root)
    EVENTS[event](root)
    new = state(root)
    found = []
    for number in range(0, 300, stride):
        reset(root, event)
        told = ""
        with before_call(number, full_disk) as count:
            try:
                EVENTS[event](root)
            except OSError as error:
                told = str(error)
        if count[0] <= number:
            break
        after = state(root)
        assert after in (old, new)
        assert after == new or "No space left" in told
        found.append(check_next_writer(root, event, old, new))
    assert len(found) >= LEAST[event] // stride
    assert set(found) == {"old", "new"}


def test_a_killed_merge_leaves_the_old_pool_or_the_new(tmp_path):
    kill(tmp_path, "merge", stride=4)


@pytest.mark.slow
def test_a_killed_creation_leaves_a_pool_or_none_slice(tmp_path):
    kill(tmp_path, "create")


@pytest.mark.slow
@pytest.mark.parametrize("event", [one for one in EVENTS if one != "create"])
def test_any_killed_change_leaves_the_old_pool_or_the_new(tmp_path, event):
    kill(tmp_path, event)


@pytest.mark.parametrize("event", ["merge", "touch"])
def test_a_full_disk_is_told_and_leaves_the_old_pool_or_the_new(tmp_path, event):
    fill_disk(tmp_path, event, stride=4 if event == "merge" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("event", [one for one in EVENTS if one != "touch"])
def test_a_full_disk_at_any_point(tmp_path, event):
    fill_disk(tmp_path, event)
