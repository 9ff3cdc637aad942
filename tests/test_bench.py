"""The benchmarks: what a row says, and that each one runs on small shapes. Never a time."""

import itertools
from pathlib import Path

import pytest
import serving_kit

from soupkit.bench import export, kernel, merge, rows, serve
from soupkit.bench.rows import Row, compare, document


def row(**changes: object) -> Row:
    fields = {"name": "n", "value": 2.0, "unit": "ms", "baseline": "b", "ratio": 2.0}
    return Row(**{**fields, "low": 1.0, "high": 3.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("goal", "better", "ok"),
    [(None, "lower", None), (2.0, "lower", True), (1.9, "lower", False), (1.9, "higher", True)],
)
def test_a_row_says_whether_its_goal_is_met(goal: float | None, better: str, ok: bool) -> None:
    assert row(goal=goal, better=better).ok is ok


def test_compare_takes_the_median_ratio_of_alternating_pairs() -> None:
    calls: list[str] = []
    # Warm-up reads no clock. Each pair: start, after the baseline, after the candidate.
    times = itertools.chain.from_iterable([(0, 1, 4), (10, 12, 14), (20, 21, 23)])
    found = compare(
        "x",
        lambda: calls.append("candidate"),
        lambda: calls.append("baseline"),
        against="b",
        repeats=3,
        clock=lambda: float(next(times)),
    )
    assert calls == ["candidate", "baseline"] + ["baseline", "candidate"] * 3
    assert (found.ratio, found.low, found.high) == (2.0, 1.0, 3.0)
    assert found.value == 2000.0


def test_the_document_has_the_fields_that_the_readme_promises() -> None:
    done = document("kernel", [row(goal=3.0)])
    assert set(done) == {"bench", "machine", "rows"}
    wanted = {"name", "value", "unit", "baseline", "ratio", "goal", "better", "ok"}
    assert wanted <= set(done["rows"][0])
    assert done["rows"][0]["ok"] is True


def test_rows_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows.show("kernel", [row(name="1536x576 bf16 M=512 V=1", goal=1.5)])
    printed = capsys.readouterr().out
    assert "1536x576 bf16 M=512 V=1" in printed
    assert "missed" in printed


def test_the_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SHAPES", ((9, 17), (11, 13)))
    monkeypatch.setattr(kernel, "ROTATED_BYTES", 1000)
    names = [found.name for found in kernel.run(quick=True)]
    assert "11x13 bf16 M=8 V=4" in names
    assert len(names) == len(set(names)) == 8


def test_merges_keep_the_energy_that_full_svd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SHAPES", ((70, 90), (90, 70)))
    energies = [found for found in merge.run(quick=True) if found.name.endswith("energy")]
    assert len(energies) == 4
    assert all(found.ok for found in energies)


def test_export_and_restore_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LAYERS", {True: 1, False: 1})
    monkeypatch.setattr(export, "HIDDEN", 24)
    assert [found.baseline for found in export.run(quick=True)] == ["cp", "cp"]


def test_serving_is_measured(tmp_path: Path) -> None:
    family = serving_kit.make_family(tmp_path, names=("linear", "norms")) / "family"
    one, mixed = serve.run(family, quick=True)
    assert one.name == "8 requests, linear"
    assert mixed.name == "8 requests, 2 variants + base"
    assert min(one.value, mixed.value) > 0
