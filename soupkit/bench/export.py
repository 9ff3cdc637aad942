"""Export, restore and verify of a fine-tune against a copy of the bytes that they read."""

from __future__ import annotations

from pathlib import Path

from soupkit.bench import processes
from soupkit.bench.offline import Case, Place, Progress, against_cp, cases, place, silent
from soupkit.bench.processes import Way, alternate, soupkit
from soupkit.bench.rows import Row

GOAL = 2.0  # of `cp`


def run(*, quick: bool, large: bool = False, progress: Progress = silent) -> list[Row]:
    """Rows of each tool for each size of model; large: of 8 GB, once, for the memory.

    Raises:
        OSError: the disk is too small. SoupkitError: a command failed.
    """
    found = []
    for case in cases(quick=quick, large=large):
        progress(f"making models of {case.label}", 0, 1)
        with place(case, num_models=2) as at:
            found += _rows(case, at, progress)
    return found


def _rows(case: Case, at: Place, progress: Progress) -> list[Row]:
    family, tiny_family, out = at.folder / "family", at.folder / "tiny-family", at.folder / "out"
    for where, models in ((family, at.models), (tiny_family, at.tiny)):
        # From here on the fingerprints of both bases are remembered.
        processes.run(Way(_export(where, *models)), at.environment)
    again = _export(out, *at.models)
    ways = {
        "cp of base and fine-tune": at.copy(*at.models),
        "export": Way(again, out),
        # The cache of fingerprints is gone, and filled again.
        "export from a new base": Way(again, out, (at.cache,)),
        "export, start-up": Way(_export(out, *at.tiny), out),
        "cp of base and variant": at.copy(at.models[0], family),
        "restore": Way(_restore(family, out), out),
        "restore, start-up": Way(_restore(tiny_family, out), out),
        "verify": Way(soupkit("verify", family)),
        "verify, start-up": Way(soupkit("verify", tiny_family)),
    }
    spent = alternate(
        ways,
        environment=at.environment,
        repeats=case.repeats,
        warms_up=case.warms_up,
        progress=progress,
    )
    found = []
    for tool, start, read, goal in (
        ("export", "export", "fine-tune", GOAL),
        ("export from a new base", "export", "fine-tune", GOAL),
        ("restore", "restore", "variant", None),
        ("verify", "verify", "variant", None),
    ):
        found += against_cp(
            tool,
            spent[tool],
            spent[f"{start}, start-up"],
            spent[f"cp of base and {read}"],
            goal=goal,
            case=case,
        )
    return found


def _export(family: Path, base: Path, finetuned: Path) -> tuple[str, ...]:
    return soupkit("export", base, finetuned, "--family", family, "--name", "ft")


def _restore(family: Path, out: Path) -> tuple[str, ...]:
    return soupkit("restore", family, "ft", "--dtype", "bfloat16", "--out", out)
