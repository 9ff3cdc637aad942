"""How the command line reads values and shows results: progress and errors on stderr, tables on
stdout.
"""

import functools
import io
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import metadata
from typing import Any, ParamSpec

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from soupkit.errors import SoupkitError

P = ParamSpec("P")

# Of tables that no terminal bounds: whoever reads a file or a pipe wants whole names.
PIPE_COLUMNS = 1000


class Method(str, Enum):
    """Merge methods."""

    svd_mean = "svd_mean"
    monosoup = "monosoup"
    mean = "mean"
    opcm = "opcm"


class Cut(str, Enum):
    """What OPCM takes from a task."""

    block = "block"
    two_sided = "two_sided"


class Dtype(str, Enum):
    """Floating dtypes of dense models."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def error_line(error: BaseException | str) -> None:
    """Print one line on stderr that says what went wrong."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError) and (extras := _extras_with(error.name or "")):
        commands = " or ".join(f'pip install "soupkit[{extra}]"' for extra in extras)
        text = f"{error.name} is not installed: {commands}"
    sys.stderr.write("soupkit: " + " ".join(text.split()) + "\n")


def _extras_with(module: str) -> list[str]:
    """Extras of soupkit that name a module's distribution; none where soupkit is not installed."""
    try:
        requirements = metadata.requires("soupkit") or []
    except metadata.PackageNotFoundError:
        return []
    name = re.escape(module.partition(".")[0].replace("_", "-"))
    found = (re.match(rf'{name}\b(?!-)[^;]*;.*\bextra == "(\w+)"', line) for line in requirements)
    return [match[1] for match in found if match and match[1] != "dev"]


def guarded(function: Callable[P, None]) -> Callable[P, None]:
    """A subcommand whose errors become one line on stderr and exit code 1."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (SoupkitError, ValueError, OSError, ImportError) as error:
            error_line(error)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            error_line("interrupted; nothing was left half-written")
            raise SystemExit(128 + signal.SIGINT) from None

    return run


def prepare_process() -> None:
    """Let a command that is told to end leave as on an error, and print names in any encoding."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup has a hang-up ignored, and that stays.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def leave_signals() -> None:
    """Undo prepare_process for a server, which answers what is under way before it ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> None:
    error_line("ended by a signal; nothing was left half-written")
    raise SystemExit(128 + number)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, default=str) + "\n")


def say(text: str) -> None:
    """Print one line of a result on stdout."""
    sys.stdout.write(text + "\n")


def parse_weights(text: str | None) -> tuple[float, ...] | None:
    """ "0.7,0.3" as numbers; ValueError for anything else."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--weights {text!r}: give numbers with commas, as in 0.7,0.3") from None


def parse_bytes(text: str | None) -> int | None:
    """ "20GB", "512MiB" or "1000" as a number of bytes; ValueError for anything else."""
    if text is None:
        return None
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1000**power, f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    digits = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        if unit in units and float(digits) >= 0:
            return int(float(digits) * units[unit])
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r} is no number of bytes: give one as in 20GB, 512MiB or 1000000")


def export_document(report: Any) -> dict[str, Any]:
    """An ExportReport as JSON types."""
    return {
        "name": report.name,
        "path": str(report.path),
        "digest": report.digest,
        "replaced": report.replaced,
        "bytes": report.bytes,
        "model_bf16_bytes": report.model_bf16_bytes,
        "resumed": report.resumed,
    }


def adapter_document(report: Any) -> dict[str, Any]:
    """An AdapterReport as JSON types."""
    return {
        "path": str(report.path),
        "exact": report.is_exact,
        "ranks": report.ranks,
        "lost": report.lost,
        "lost_energy": report.lost_energy,
        "left_out": report.left_out,
        "left_out_energy": report.left_out_energy,
    }


@contextmanager
def show_progress(
    title: str, *, is_bytes: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, total) that draws a bar on stderr if that is a terminal.

    Args:
        is_bytes: done and total are bytes: both are shown, and the speed.
    """
    console = Console(stderr=True)
    amount: list[ProgressColumn] = [TaskProgressColumn()]
    if is_bytes:
        amount += [DownloadColumn(), TransferSpeedColumn()]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(title, total=None, what="")
        is_first = True

        def report(what: str, done: int, total: int) -> None:
            nonlocal is_first
            if is_first:
                # What was done before counts neither for the speed nor for the time that is left.
                progress.reset(task, completed=done, total=total, what=what)
                is_first = False
            progress.update(task, completed=done, total=total, what=what)

        yield report


def table_console() -> Console:
    """Standard output; wide enough for whole names where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def size_of(num_bytes: int) -> str:
    """Decimal units, short enough for a table: 999 B, 1.0 kB, 17.8 MB."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
