"""What the runs say: means and spreads over seeds, as a table, and as a plot.

Against no merging, differences are paired: run for run of the same seed. A spread is a standard
deviation over seeds (n - 1).
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from soup_study_runs import BEST, LAST, PLAIN, Result

Runs = dict[str, dict[str, Result]]  # "task/amount/schedule/seed" -> arm -> result


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm in one case, over seeds. `difference` is that to no merging; negative is better."""

    losses: tuple[float, ...]
    differences: tuple[float, ...]
    merges: int
    refused: int

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)

    @property
    def difference(self) -> float:
        return statistics.mean(self.differences)

    @property
    def spread(self) -> float:
        return spread(self.differences)

    @property
    def is_worse(self) -> bool:
        """Worse than no merging by more than the spread; of a single run, at all."""
        return self.difference > (self.spread if len(self.differences) > 1 else 0.0)


def spread(values: tuple[float, ...]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def cells(runs: Runs) -> dict[str, dict[str, Cell]]:
    """Case ("task/amount/schedule") -> arm -> cell, of the seeds that have that arm."""
    cases: dict[str, list[dict[str, Result]]] = {}
    for key, found in runs.items():
        if PLAIN in found:
            cases.setdefault(key.rpartition("/")[0], []).append(found)
    return {
        case: {arm: _cell(seeds, arm) for arm in _ordered(seeds)} for case, seeds in cases.items()
    }


def _ordered(seeds: list[dict[str, Result]]) -> list[str]:
    names = dict.fromkeys(name for found in seeds for name in found)
    first = [name for name in (PLAIN, BEST, LAST) if name in names]
    return [*first, *(name for name in names if name not in first)]


def _cell(seeds: list[dict[str, Result]], arm: str) -> Cell:
    pairs = [(found[arm], found[PLAIN]["loss"]) for found in seeds if arm in found]
    return Cell(
        losses=tuple(result["loss"] for result, _ in pairs),
        differences=tuple(result["loss"] - plain for result, plain in pairs),
        merges=sum(result.get("merges", 0) for result, _ in pairs),
        refused=sum(result.get("refused", 0) for result, _ in pairs),
    )


def table(runs: Runs, task: str, *, default: str | None = None) -> str:
    """Markdown: a row an arm, a column a case of `task`; a worse cell is marked with "!"."""
    found = {case: arms for case, arms in cells(runs).items() if case.startswith(f"{task}/")}
    heads = [case.split("/", 1)[1].replace("/", ", ") for case in found]
    lines = [f"| {task} | {' | '.join(heads)} | refused |", "|---" * (len(heads) + 2) + "|"]
    for arm in dict.fromkeys(arm for arms in found.values() for arm in arms):
        row = [arms.get(arm) for arms in found.values()]
        known = [cell for cell in row if cell]
        merges, refused = sum(c.merges for c in known), sum(c.refused for c in known)
        name = f"**{arm}** (default)" if arm == default else arm
        shown = [_shown(cell, arm) if cell else "" for cell in row]
        counts = f"{refused} of {merges}" if merges else ""
        lines.append(f"| {name} | {' | '.join(shown)} | {counts} |")
    return "\n".join(lines)


def _shown(cell: Cell, arm: str) -> str:
    if arm == PLAIN:
        return f"{cell.loss:.4f}{_spread(spread(cell.losses))}"
    mark = "! " if cell.is_worse else ""
    return f"{mark}{cell.difference:+.4f}{_spread(cell.spread)}"


def _spread(value: float) -> str:
    return f" +- {value:.4f}" if math.isfinite(value) else ""


def worse(runs: Runs, task: str, arm: str) -> list[str]:
    """Cases of `task` in which `arm` ends worse than no merging by more than the spread."""
    found = {case: arms for case, arms in cells(runs).items() if case.startswith(f"{task}/")}
    return [case for case, arms in found.items() if arm in arms and arms[arm].is_worse]


def plot(runs: Runs, path: Path) -> None:
    """A panel a case: each arm's difference to no merging with its spread, and each seed's.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = cells(runs)
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4.2 * columns + 2, 3.4 * rows), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row").flatten()
    for panel, (case, arms) in zip(panels, found.items(), strict=False):
        names = [name for name in arms if name != PLAIN]
        for place, name in enumerate(names):
            cell = arms[name]
            colour = "tab:red" if cell.is_worse else "tab:blue"
            _dots(panel, place, cell.differences)
            panel.errorbar(
                cell.difference, place, xerr=_finite(cell.spread), fmt="o", color=colour, ms=4
            )
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_yticks(range(len(names)), names, fontsize="x-small")
        panel.tick_params(axis="x", labelsize="x-small")
        panel.set_title(f"{case.replace('/', ', ')} ({arms[PLAIN].loss:.3f})", fontsize="small")
    for panel in panels[: columns * rows : columns]:
        panel.invert_yaxis()
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel(
        "test loss minus that of no merging (in brackets), nats a token", fontsize="small"
    )
    figure.savefig(path)


def _dots(panel: object, place: int, values: Iterable[float]) -> None:
    many = list(values)
    panel.plot(many, [place] * len(many), ".", color="lightgray", ms=3)  # type: ignore[attr-defined]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
