"""What `soupkit inspect` tells of a run: the state of its merges, as one JSON document."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from soupkit.errors import TrainingError
from soupkit.files import read_json
from soupkit.training.state import SoupFolder


def describe_soup(path: str | Path) -> dict[str, Any] | None:
    """Describe `<output_dir>/soup`, given itself or, where no model lies in it, as its output_dir.

    Reads only, so the run may be alive.

    Returns:
        {"kind": "soup", "step", "base", "partner", "average", "merges", "matrices", "bytes", ...},
        JSON types only: the newest state, every merge of the run, the matrices of the last one, and
        the bytes of the folder; None if there is no state.

    Raises:
        TrainingError: the state or the report is damaged.
    """
    path = Path(path)
    folder = SoupFolder(path)
    if not folder.steps() and not (path / "config.json").exists():
        folder = SoupFolder(path / "soup")
    steps = folder.steps()
    if not steps:
        return None
    state = folder.newest(at_most=steps[-1])
    if state is None:
        return None  # the run has deleted it meanwhile
    base = asdict(state.base)
    return {
        "kind": "soup",
        "path": str(folder.root),
        "step": state.step,
        "base": {**base, "path": base["path"] or str(folder.base_path)},
        "partner": None if state.partner is None else asdict(state.partner),
        "average": None if state.average is None else asdict(state.average),
        "refused_in_a_row": state.refused_in_a_row,
        "merges": [dict(merge) for merge in state.history],
        "matrices": _matrices(folder, state.history[-1]["step"]) if state.history else [],
        "bytes": _bytes(folder.root),
    }


def _bytes(root: Path) -> int:
    """Of the files in it that a living run leaves there meanwhile."""
    total = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _matrices(folder: SoupFolder, step: int) -> list[Any]:
    """Of the merge at `step`; empty if its report is gone."""
    path = folder.report_path(step)
    try:
        return list(read_json(path).get("matrices", []))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise TrainingError(f"{path}: {error}; delete it to see the rest") from error
