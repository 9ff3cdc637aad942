"""What the offline benchmarks share: models to work on, and rows against `cp` and others.

Every tool is a command in a process of its own, as a user runs it, in turn with its baselines; what
it reads is in the page cache. `cp` copies the bytes that the tool reads. soupkit syncs what it
writes, cp and mergekit do not: the rows "synced" add an fsync to either side. "less start-up" takes
off what the same command takes on a model of 0.1 MB: an interpreter, imports, and no work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from soupkit.bench.offline_models import LLAMA, SMOL, TINY, Shapes, check_space, write_model
from soupkit.bench.processes import Spent, Way
from soupkit.bench.rows import Row

Progress = Callable[[str, int, int], None]
"""Called before each run with its name, runs done, runs in all of that size of model."""

ANONYMOUS_GOAL = 1_500_000_000
QUICK = ((SMOL, 100_000_000),)
USUAL = ((SMOL, 1_000_000_000), (LLAMA, 2_000_000_000))
LARGE = ((LLAMA, 8_000_000_000),)
REPEATS = 3
TIMED_BYTES = 900_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """Models of one size.

    Attributes:
        repeats: of each command. warms_up: whether each runs once before.
    """

    shapes: Shapes
    num_layers: int
    repeats: int
    warms_up: bool

    @property
    def num_bytes(self) -> int:
        """Of one model."""
        return self.shapes.num_bytes(self.num_layers)

    @property
    def label(self) -> str:
        """Size and width."""
        return f"{_size(self.num_bytes)}, {self.shapes.hidden} wide"

    @property
    def is_timed(self) -> bool:
        """Whether a command takes much longer than its start-up."""
        return self.num_bytes >= TIMED_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A scratch folder; models[0] is the base of the others, tiny[0] that of tiny[1]."""

    folder: Path
    models: tuple[Path, ...]
    tiny: tuple[Path, Path]

    @property
    def cache(self) -> Path:
        """Where soupkit remembers fingerprints."""
        return self.folder / "cache"

    @property
    def environment(self) -> dict[str, str]:
        """Of the commands."""
        return {"XDG_CACHE_HOME": str(self.cache), "HF_HUB_OFFLINE": "1"}

    def copy(self, *sources: Path) -> Way:
        """`cp` of folders, all bytes."""
        links = Path(tempfile.mkdtemp(dir=self.folder))
        for number, source in enumerate(sources):
            (links / str(number)).symlink_to(source)
        out = self.folder / "copy"
        # A file system that can would share the blocks, and copy nothing.
        shared = ("--reflink=never",) if sys.platform == "linux" else ()
        return Way(("cp", "-RL", *shared, str(links), str(out)), out)


def cases(*, quick: bool, large: bool) -> list[Case]:
    """The sizes to measure."""
    chosen = LARGE if large else QUICK if quick else USUAL
    repeats = 1 if large or quick else REPEATS
    return [
        Case(shapes, shapes.layers_for(num_bytes), repeats, repeats > 1)
        for shapes, num_bytes in chosen
    ]


@contextmanager
def place(case: Case, *, num_models: int) -> Iterator[Place]:
    """A folder with a base and fine-tunes, removed in the end.

    Raises:
        OSError: the disk is too small, or refused.
    """
    with tempfile.TemporaryDirectory(prefix="soupkit-bench-") as name:
        folder = Path(name)
        # A copy of two models lies beside them.
        check_space(folder, int((num_models + 2) * case.num_bytes * 1.05))
        models = tuple(
            write_model(folder / f"model-{tuned}", case.shapes, case.num_layers, tuned=tuned)
            for tuned in range(num_models)
        )
        tiny = tuple(
            write_model(folder / f"tiny-{tuned}", TINY, 1, tuned=tuned) for tuned in (0, 1)
        )
        yield Place(folder, models, (tiny[0], tiny[1]))


def silent(what: str, done: int, total: int) -> None:
    """A Progress that nobody watches."""


def against_cp(
    name: str,
    ours: Sequence[Spent],
    start: Sequence[Spent],
    copies: Sequence[Spent],
    *,
    case: Case,
    goal: float | None = None,
) -> list[Row]:
    """Rows of a command against a copy of what it reads.

    Args:
        start: of the same command on tiny models. goal: of the first two rows.
    """
    cp = ("cp", copies, ())
    return [*_times(name, (ours, start), cp, case=case, goal=goal), memory(name, ours, case=case)]


def against_tool(
    name: str,
    ours: Sequence[Spent],
    start: Sequence[Spent],
    *,
    tool: tuple[str, Sequence[Spent], Sequence[Spent]],
    case: Case,
    goal: float,
) -> list[Row]:
    """Rows of a command against another that does the same.

    Args:
        start: of the same command on tiny models. tool: the other's name, runs, runs on tiny
            models. goal: of the first two rows.
    """
    cpu = [[one.cpu_seconds for one in side] for side in (ours, tool[1])]
    return [
        *_times(name, (ours, start), tool, case=case, goal=goal),
        _row(f"{name}, {case.label}, CPU time", *cpu, against=tool[0]),
    ]


def _times(
    name: str,
    mine: tuple[Sequence[Spent], Sequence[Spent]],
    tool: tuple[str, Sequence[Spent], Sequence[Spent]],
    *,
    case: Case,
    goal: float | None,
) -> list[Row]:
    """Rows of wall times; of small models, where start-up is most of it, fewer and without goal."""
    name = f"{name}, {case.label}"
    (ours, start), (against, theirs, their_start) = mine, tool
    walls = [[one.seconds for one in side] for side in (ours, theirs)]
    synced = [[one.synced_seconds for one in side] for side in (ours, theirs)]
    found = [
        _row(name, *walls, against=against, goal=goal if case.is_timed else None),
        _row(f"{name}, synced", *synced, against=f"{against} + fsync"),
    ]
    if case.is_timed:
        for side, its_start in zip(walls, (start, their_start), strict=True):
            started = statistics.median(one.seconds for one in its_start) if its_start else 0.0
            side[:] = [one - started for one in side]
        found.insert(1, _row(f"{name}, less start-up", *walls, against=against, goal=goal))
    return found


def memory(name: str, spent: Sequence[Spent], *, case: Case, goal: float | None = 1.0) -> Row:
    """The most anonymous memory of a command, start-up and all."""
    shares = [one.anonymous_bytes / ANONYMOUS_GOAL for one in spent]
    middle = statistics.median(shares)
    return Row(
        f"{name}, {case.label}, RssAnon",
        middle * ANONYMOUS_GOAL / 1e6,
        "MB",
        _size(ANONYMOUS_GOAL),
        middle,
        min(shares),
        max(shares),
        goal,
    )


def _row(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    against: str,
    goal: float | None = None,
) -> Row:
    ratios = [one / max(other, 1e-3) for one, other in zip(ours, theirs, strict=True)]
    return Row(
        name,
        statistics.median(ours),
        "s",
        against,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        goal,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 950_000_000 else f"{num_bytes / 1e6:.0f} MB"
