"""Plain means of model folders against mergekit's linear merge of them, and a copy of its bytes.

merge of two        the same config and the same folders as mergekit's
merge with a base   of two fine-tunes, as deltas: it reads a third model, mergekit's does not
"""

from __future__ import annotations

import sys

from soupkit.bench import mergekit
from soupkit.bench.offline import (
    Case,
    Place,
    Progress,
    against_cp,
    against_tool,
    cases,
    memory,
    place,
)
from soupkit.bench.processes import Way, alternate, soupkit
from soupkit.bench.rows import Row

GOAL = 1.0  # of mergekit
TWO, WITH_BASE = "merge of two", "merge with a base"


def rows(*, quick: bool, large: bool, program: str | None, progress: Progress) -> list[Row]:
    """Rows of both merges for each size of model; without mergekit, against the copy only.

    Args:
        program: of mergekit; see soupkit.bench.mergekit.

    Raises:
        ValueError: no such program. OSError: the disk is too small. SoupkitError: a command
            failed.
    """
    other = mergekit.find(program)
    if other is None:
        sys.stderr.write(f"{mergekit.HOW}\n")
    found = []
    for case in cases(quick=quick, large=large):
        progress(f"making models of {case.label}", 0, 1)
        # Three models and a merge of 8 GB would leave nothing in the page cache.
        with place(case, num_models=2 if large else 3) as at:
            found += _rows(case, at, other, progress)
    return found


def _rows(case: Case, at: Place, other: mergekit.Mergekit | None, progress: Progress) -> list[Row]:
    out, pair = at.folder / "out", at.models[-2:]
    config = mergekit.write_config(at.folder / "linear.yml", pair)
    tiny = mergekit.write_config(at.folder / "tiny.yml", at.tiny)
    ways = {
        "cp of two": at.copy(*pair),
        TWO: Way(soupkit("merge", "--config", config, "--out", out), out),
        "start-up": Way(soupkit("merge", "--config", tiny, "--out", out), out),
    }
    if len(at.models) > 2:
        command = soupkit("merge", *at.models, "--method", "mean", "--out", out)
        ways[WITH_BASE] = Way(command, out)
    if other is not None:
        ways["mergekit"] = Way(other.command(config, out), out)
        ways["mergekit, start-up"] = Way(other.command(tiny, out), out)
    spent = alternate(
        ways,
        environment=at.environment,
        repeats=case.repeats,
        warms_up=case.warms_up,
        progress=progress,
    )
    start = spent["start-up"]
    found = against_cp(TWO, spent[TWO], start, spent["cp of two"], case=case)
    if WITH_BASE in spent:
        found.append(memory(WITH_BASE, spent[WITH_BASE], case=case))
    if other is None:
        return found
    tool = (other.label, spent["mergekit"], spent["mergekit, start-up"])
    for name in (TWO, WITH_BASE):
        if name in spent:
            found += against_tool(name, spent[name], start, tool=tool, case=case, goal=GOAL)
    return [*found, memory(other.label, spent["mergekit"], case=case, goal=None)]
