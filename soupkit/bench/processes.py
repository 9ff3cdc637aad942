"""Commands in processes of their own: wall time, the same with an fsync, CPU time, memory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from soupkit.errors import SoupkitError
from soupkit.files import fsync_tree

SAMPLE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Spent:
    """What one run took.

    Attributes:
        seconds: wall time from the start to the end of the process. synced_seconds: with an fsync
            of what it wrote. cpu_seconds: user and system, of all threads. anonymous_bytes: the
            most of RssAnon, which leaves mapped files out; 0 where there is no /proc.
    """

    seconds: float
    synced_seconds: float
    cpu_seconds: float
    anonymous_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """A command to time.

    Attributes:
        out: the folder that it makes; None: none. forgotten: folders to be removed before it.
    """

    command: tuple[str, ...]
    out: Path | None = None
    forgotten: tuple[Path, ...] = ()


def run(way: Way, environment: Mapping[str, str]) -> Spent:
    """Run a command once, its old output gone and the disk idle.

    Raises:
        SoupkitError: it failed; the message has its last line.
    """
    _forget(way)
    os.sync()
    before = _cpu_seconds()
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(
            way.command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, **environment},
        )
        try:
            most = _watched(process)
            end = time.perf_counter()
        finally:
            # After an interrupt it must not go on to write where all is removed.
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            told = lines[-1] if lines else "it said nothing"
            raise SoupkitError(f"{' '.join(way.command)}: exit code {process.returncode}: {told}")
    spent_cpu = _cpu_seconds() - before
    resumed = time.perf_counter()
    if way.out is not None:
        fsync_tree(way.out)
    synced = end - start + time.perf_counter() - resumed
    return Spent(end - start, synced, spent_cpu, most)


def alternate(
    ways: Mapping[str, Way],
    *,
    environment: Mapping[str, str],
    repeats: int,
    warms_up: bool,
    progress: Callable[[str, int, int], None],
) -> dict[str, list[Spent]]:
    """Run all in turn, `repeats` times, and once before where that `warms_up`.

    Args:
        environment: variables of the processes beside this one's.
        progress: called before each run with its name, runs done, runs in all.
    """
    found: dict[str, list[Spent]] = {name: [] for name in ways}
    rounds = repeats + warms_up
    for number in range(rounds):
        for index, (name, way) in enumerate(ways.items()):
            progress(name, number * len(ways) + index, rounds * len(ways))
            spent = run(way, environment)
            _forget(way)
            if number >= rounds - repeats:
                found[name].append(spent)
    return found


def soupkit(*arguments: str | Path) -> tuple[str, ...]:
    """A command of this soupkit."""
    return (sys.executable, "-m", "soupkit", *map(str, arguments))


def _forget(way: Way) -> None:
    for path in (way.out, *way.forgotten):
        if path is not None and path.exists():
            shutil.rmtree(path)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watched(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; the most of its RssAnon, in bytes."""
    most, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            most.append(max(most.pop(), anonymous_bytes(process.pid)))

    watch = threading.Thread(target=sample, daemon=True)
    watch.start()
    try:
        process.wait()
    finally:
        over.set()
        watch.join()
    return most[0]


def anonymous_bytes(process: int) -> int:
    """RssAnon of a process now; 0 for one that has ended, or without /proc."""
    try:
        with open(f"/proc/{process}/status") as file:
            lines = [line for line in file if line.startswith("RssAnon")]
    except OSError:
        return 0
    return 1024 * int(lines[0].split()[1]) if lines else 0
