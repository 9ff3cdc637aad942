"""Changes of a pool that are killed, or fail, before each of their calls that change the disk.

python pool_kill_runs.py FOLDER EVENT STRIDE: kills a child before the first such call, before the
one STRIDE later and so on; after each the pool must be the old one or the new one, and the next
writer must leave nothing behind. Prints how many points there were.
"""

import contextlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pool_kit import check_pool, make_adapter

from soupkit.kmerge import PoolRule
from soupkit.pool import AdapterPool

# What changes a disk, whether soupkit calls it or the standard library for it.
CALLS = [
    *((os, name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "fchmod")),
    *((os, name) for name in ("pwrite", "copy_file_range", "ftruncate", "write")),
    (shutil, "copyfile"),
    (Path, "touch"),
]
POOL, KEPT = "pool", "kept"


def prepare(root: Path) -> None:
    """Adapters, and a pool of two slots of which the first serves two tasks."""
    for seed in range(1, 6):
        make_adapter(root / f"t{seed}", seed)
    pool = AdapterPool.create(root / KEPT, PoolRule(2**40, slots=2))
    for task in ("t1", "t2"):
        pool.add(root / task)
    pool.add(root / "t1", task="twin")


def merge(root: Path) -> None:
    AdapterPool.open(root / POOL).add(root / "t3")


def evict(root: Path) -> None:
    rule = {"gate_similarity": 0.9, "when_full": "evict"}
    AdapterPool.open(root / POOL).add(root / "t4", rule=rule)


def store(root: Path) -> None:
    AdapterPool.open(root / POOL).add(root / "t5", rule={"slots": 3})


def leave(root: Path) -> None:
    AdapterPool.open(root / POOL).remove("twin")


def remove(root: Path) -> None:
    AdapterPool.open(root / POOL).remove("t2")


def touch(root: Path) -> None:
    AdapterPool.open(root / POOL).touch("t1")


def create(root: Path) -> None:
    AdapterPool.add_to(root / POOL, root / "t1", rule={"capacity_bytes": 2**40})


EVENTS: dict[str, Callable[[Path], None]] = {
    event.__name__: event for event in (merge, evict, store, leave, remove, touch, create)
}


def reset(root: Path, event: str) -> None:
    """The pool as it is before the event; none before `create`."""
    shutil.rmtree(root / POOL, ignore_errors=True)
    if event != "create":
        shutil.copytree(root / KEPT, root / POOL)


def state(root: Path) -> str:
    """pool.json, or nothing where there is no pool; whatever it lists is whole."""
    if not (root / POOL / "pool.json").exists():
        assert not (root / POOL).exists() or not any((root / POOL).iterdir())
        return ""
    check_pool(root / POOL, is_clean=False)
    return (root / POOL / "pool.json").read_text()


@contextlib.contextmanager
def before_call(number: int, action: Callable[[], Any]) -> Iterator[list[int]]:
    """Run `action` before the `number`-th call that changes the disk; yields their count."""
    count = [0]
    with contextlib.ExitStack() as stack:
        for owner, name in CALLS:
            original = getattr(owner, name)

            def counted(*args: Any, _original: Any = original, **options: Any) -> Any:
                count[0] += 1
                if count[0] == number + 1:
                    action()
                return _original(*args, **options)

            stack.enter_context(mock.patch.object(owner, name, counted))
        yield count


def check_next_writer(root: Path, event: str, old: str, new: str) -> str:
    """Assert that the pool is old or new and goes on from there; returns which."""
    found = state(root)
    assert found in (old, new), found
    if found == old:
        EVENTS[event](root)
        assert state(root) == new
    else:
        AdapterPool.open(root / POOL).touch("t1")
    check_pool(root / POOL)
    # Between making a hidden folder and giving it its name it has none yet; it is empty.
    for left in root.glob(".pending*"):
        assert event == "create"
        assert list(left.iterdir()) == []
        left.rmdir()
    return "old" if found == old else "new"


def in_child(function: Callable[[], None]) -> int:
    """The wait status of a child that runs it."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - told, and the child must end here
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]


def main(root: Path, event: str, stride: int) -> None:
    """Kill the event before every `stride`-th call."""
    prepare(root)
    reset(root, event)
    old = state(root)
    EVENTS[event](root)
    new = state(root)
    assert old != new

    def killed(number: int) -> None:
        with before_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            EVENTS[event](root)

    found = []
    for number in range(0, 300, stride):
        reset(root, event)
        status = in_child(lambda number=number: killed(number))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, (number, status)
        found.append(check_next_writer(root, event, old, new))
    assert found == sorted(found, reverse=True)  # Old, and from one point on new.
    assert set(found) == {"old", "new"}
    print(len(found), "points")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
