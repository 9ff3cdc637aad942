"""The benchmarks: what a row says, and that each one runs on small shapes. Never a time."""

import itertools
from pathlib import Path
from types import ModuleType

import pytest
import serving_kit
import torch

from soupkit.bench import load, merge, offline_merge, pool, rows, serve, strategies
from soupkit.bench.rows import Row, compare, document
from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.family import open_family
from soupkit.family_write import create_or_open_family
from soupkit.verify import verify_family


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


def test_merges_keep_the_energy_that_full_svd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """TB68: their seconds are measured against those of the full SVD."""
    monkeypatch.setattr(merge, "SHAPES", ((70, 90), (290, 270)))
    monkeypatch.setattr(strategies, "rows", lambda quick: [])
    monkeypatch.setattr(offline_merge, "rows", lambda **_: [])
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = merge.run(quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    names = [one.name for one in found]
    assert len(names) == len(set(names))
    energies = [one for one in found if one.name.endswith("energy")]
    assert len(energies) == 2 * 2 * 4
    assert all(one.ok for one in energies if one.goal is not None)
    assert {one.baseline for one in found} == {"full SVD", "best", "one matrix", "cold merge"}


def test_long_shapes_are_held_against_svd_lowrank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SHAPES", ((90, 100),))
    monkeypatch.setattr(merge, "FULL_MAX", 80)
    monkeypatch.setattr(strategies, "rows", lambda quick: [])
    monkeypatch.setattr(offline_merge, "rows", lambda **_: [])
    found = merge.run(quick=True)
    assert "svd_lowrank niter=2" in {one.baseline for one in found}
    assert not [one for one in found if "flat" in one.name or one.name.endswith("energy")]


def test_the_peak_counts_what_is_held_at_one_time() -> None:
    apart = merge.peak_bytes(lambda: [float(torch.zeros(50_000).sum()) for _ in range(3)])
    together = merge.peak_bytes(lambda: [torch.zeros(50_000) for _ in range(3)])
    assert 200_000 <= apart < 300_000
    assert 600_000 <= together < 700_000


def test_serving_is_measured(tmp_path: Path) -> None:
    family = serving_kit.make_family(tmp_path, names=("linear", "norms")) / "family"
    found = {one.name: one for one in serve.run(family, quick=True)}
    figures = [name for name, *_ in serve._FIGURES]
    batches = ("base, 8 requests", "1 variant, 8 requests", "base, 14 requests")
    mixed = "14 variants mixed, 14 requests"
    assert list(found) == [f"{batch}: {what}" for batch in (*batches, mixed) for what in figures]
    assert min(row.value for row in found.values()) > 0
    goals = {name: row.goal for name, row in found.items() if row.goal is not None}
    assert goals == {
        "1 variant, 8 requests: first token P50": 1.1,
        "1 variant, 8 requests: time per token P50": 1.1,
        f"{mixed}: throughput": 0.6,
    }


def test_a_small_family_is_filled_with_variants_of_other_content(tmp_path: Path) -> None:
    family = open_family(serving_kit.make_family(tmp_path, names=("linear", "norms")) / "family")
    (tmp_path / "scratch").mkdir()
    found = serve.filled(family, tmp_path / "scratch", count=5)
    assert len({ref.digest for ref in found.variants.values()}) == len(found.variants) == 5
    assert verify_family(found.path) == []
    first = open_variant(found.folder("linear")).load()
    assert first.digest == family.variants["linear"].digest
    copy = open_variant(found.folder("copy-00-of-linear")).load()
    for name, delta in first.deltas.items():
        assert torch.equal(copy.deltas[name].packed, delta.packed)
        torch.testing.assert_close(copy.deltas[name].scale, delta.scale * (1 + 1 / 64))


def test_a_family_that_cannot_be_filled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(serving_kit.VARIANTS, "bare", (lambda name: "norm" in name, "row"))
    family = open_family(serving_kit.make_family(tmp_path, names=("bare",)) / "family")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ValueError, match="gives 1 variants of different content, 2 are measured"):
        serve.filled(family, tmp_path / "scratch", count=2)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert serve._percentile(values, 0.5) == 51.0
    assert serve._percentile(values, 0.99) == 100.0
    assert serve._percentile([3.0], 0.99) == 3.0


def test_loading_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SIDE", 64)
    family = serving_kit.make_family(tmp_path, names=("linear",)) / "family"
    cold, few, hashing, gap = load.run(family, quick=True)
    assert (cold.goal, few.goal, hashing.goal) == (0.9, None, None)
    assert cold.better == hashing.better == "higher"
    assert gap.name == "longest gap of other streams, 1 s load"
    assert gap.goal is not None
    assert gap.goal >= 3.0
    assert gap.value > 0


def test_adding_to_a_pool_is_measured_wherever_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving_kit.make_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    found = pool.run(quick=True)
    assert [row.name for row in found] == [
        f"add to a pool of 8, {method}" for method in ("history_mean", "opcm")
    ]
    assert all(row.value > 0 and row.ratio > 0 for row in found)


@pytest.mark.parametrize("bench", [serve, load])
def test_a_family_without_variants_is_refused(bench: ModuleType, tmp_path: Path) -> None:
    base = open_checkpoint(serving_kit.make_base(tmp_path / "base"))
    create_or_open_family(tmp_path / "family", base)
    with pytest.raises(ValueError, match="has no variant"):
        bench.run(tmp_path / "family", quick=True)


FIGURES = {
    "strategy": "DDP", "ranks": 2, "device": "cpu", "step_seconds": 2.0, "steps": [2.0, 1.0, 4.0],
    "merges": [8.0, 3.0, 2.0], "scores": [1.0, 1.0, 1.0], "extra_bytes": 700,
    "largest_bytes": 100, "factor_bytes": 300, "solvers": ["gram"],
}  # fmt: skip


def test_a_merge_is_told_in_training_steps() -> None:
    found = {one.name: one for one in strategies.strategy_rows(FIGURES)}
    first, later = found["DDP: first merge"], found["DDP: next merge"]
    assert (first.ratio, first.goal, first.ok) == (4.0, 5.0, True)
    assert (later.ratio, later.low, later.high, later.ok) == (1.5, 0.5, 3.0, True)
    assert found["DDP: gate's two scorings"].goal is None
    assert found["DDP: memory of a merge beyond factors"].ratio == 4.0
    on_gpu = strategies.strategy_rows({**FIGURES, "device": "cuda"})
    assert on_gpu[-1].ratio == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one process", "FSDP2"])
def test_slice_of_strategies_is_measured(strategy: str) -> None:
    figures = strategies.launch(strategy, layers=1, merges=2)
    assert figures["ranks"] == (1 if strategy == "one process" else 2)
    assert len(figures["merges"]) == 3
    assert any("known" in solver for solver in figures["solvers"])
    assert all(row.ratio > 0 for row in strategies.strategy_rows(figures)[:3])
