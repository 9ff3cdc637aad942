"""Whether work goes on, told apart from work that takes long.

A clock cannot tell a process that is stopped, or waits for one that never answers, from a prefill
of minutes on a CPU, a compilation or a base on a slow disk. CPU time can: whoever computes,
compiles, reads or waits for a GPU (CUDA spins) uses some, whoever hangs uses none. So what counts
as still is time in which nothing was finished and less than EFFORT_SECONDS of CPU time was used:
over a minute a sixth of a percent of a core, which copies files at 5 MB/s, and which an engine gets
on a machine with a hundred times too much to do.

CPU time is Linux's to tell (/proc); elsewhere nothing counts as still. Not seen: a GPU's collective
that never ends, for which its thread spins; NCCL has a limit of its own.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

EFFORT_SECONDS = 0.1
# All processes are looked at, which takes milliseconds, only for an engine that seems still.
CLOSER_SECONDS = 1.0


class Stillness:
    """For how long a number has not changed, by whoever looks at it now and then."""

    def __init__(self, *, step: float, longest_gap: float = 5.0) -> None:
        """What counts as a change; of the seconds between two looks no more count than the gap, as
        whoever looks may have been stopped itself.
        """
        self._step, self._longest_gap = step, longest_gap
        self._mark, self._looked = 0.0, time.monotonic()
        self.seconds = 0.0

    def look(self, number: float | None) -> float:
        """Seconds without a change; none if nobody can tell the number."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if number is None or abs(number - self._mark) >= self._step:
            self._mark, self.seconds = number or 0.0, 0.0
        else:
            self.seconds += min(gap, self._longest_gap)
        return self.seconds


class Pulse:
    """Of an engine: `beat` is called by the thread that has the model, whenever it takes it and at
    each turn of its loop, busy or not. What processes do that this one has started, such as a
    compiler or another rank, is its work, too.
    """

    def __init__(self) -> None:
        self._beats, self._thread, self._helpers = 0, 0, 0.0
        self._still = Stillness(step=EFFORT_SECONDS)

    def beat(self) -> None:
        self._thread = threading.get_native_id()
        self._beats += 1

    def still_seconds(self) -> float:
        """For how long it has neither come round nor computed; for one thread, which asks often."""
        try:
            spent = _seconds(_fields(Path(f"/proc/self/task/{self._thread}/stat")))
        except (OSError, IndexError):
            return self._still.look(None)
        if self._still.seconds > CLOSER_SECONDS:
            self._helpers = effort_of(os.getpid(), itself=False) or 0.0
        return self._still.look(spent + self._beats + self._helpers)


def effort_of(pid: int, *, itself: bool = True) -> float | None:
    """Seconds of CPU time of a process and of all that it has started, None if nobody tells."""
    spent: dict[int, float] = {}
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it has ended
            number, fields = int(stat.parent.name), _fields(stat)
            spent[number], parents[number] = _seconds(fields), int(fields[1])
    if pid not in spent:
        return None
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(spent[one] for one in tree if itself or one != pid)


def _seconds(fields: list[str]) -> float:
    """CPU seconds of a process or thread, with those of children that have ended."""
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str]:
    """proc(5): what follows the name, which may hold anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
