"""What a check found: a line each, in parts that have a budget of seconds.

A part is a generator of findings. It is cut when its budget is over: what it had not come to is
told as not run, which is neither good nor bad, and never silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table

from soupkit.bench.rows import console

Status = Literal["ok", "FAILED", "not run", "info"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked; detail: a figure, or why it failed or did not run."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A name, what yields its findings, and the seconds that it may take.

    Args:
        is_apart: it runs in processes of its own, where an error of CUDA is none in this one.
    """

    name: str
    run: Callable[[], Iterator[Finding]]
    seconds: float
    is_apart: bool = False


@dataclass(slots=True)
class Report:
    """Findings in the order in which they came, with the name of their part."""

    found: list[tuple[str, Finding]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return any(finding.status == "FAILED" for _, finding in self.found)

    def to_json(self) -> list[dict[str, Any]]:
        """The findings as JSON types."""
        return [{"part": part, **asdict(finding)} for part, finding in self.found]


def collect(
    report: Report,
    parts: Sequence[Part],
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run parts one after another into a report.

    An exception in a part is a failure of it; an interrupt ends all, and the report has what came
    before. After an error of CUDA nothing runs in this process any more: the rest is not run.

    Args:
        progress: told of each finding: its name, seconds of budgets used up, all seconds.
        clock: seconds.
    """
    total = sum(part.seconds for part in parts)
    lost, before = "", 0.0
    for part in parts:
        start = clock()
        if lost:
            report.found.append((part.name, Finding("all", "not run", lost)))
            continue
        try:
            for finding in part.run():
                report.found.append((part.name, finding))
                spent = clock() - start
                if progress is not None:
                    done = before + min(spent, part.seconds)
                    progress(f"{part.name}: {finding.name}", int(done), int(total))
                has_failed = finding.status == "FAILED" and "CUDA error" in finding.detail
                if has_failed and not part.is_apart:
                    lost = "an error of CUDA before it"
                    break
                if spent > part.seconds:
                    said = f"{part.seconds:g} s are over"
                    report.found.append((part.name, Finding("the rest", "not run", said)))
                    break
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told, and others go on
            report.found.append((part.name, failure("the part itself", error)))
            lost = "an error of CUDA before it" if "CUDA error" in str(error) else ""
        before += part.seconds


def failure(name: str, error: BaseException) -> Finding:
    """A finding of an exception."""
    said = " ".join(str(error).split())[:300]
    return Finding(name, "FAILED", f"{type(error).__name__}: {said}")


def show(report: Report, *, title: str, on_stderr: bool) -> None:
    """Print a line a finding; an "info" has no verdict."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("part", "what", "verdict"):
        table.add_column(column, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for part, finding in report.found:
        verdict = "" if finding.status == "info" else finding.status
        table.add_row(part, finding.name, verdict, finding.detail)
    console(on_stderr=on_stderr).print(table)
