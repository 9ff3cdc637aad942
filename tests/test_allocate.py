"""Promises of soupkit.allocate, candidates and budget: never over it, no worse for more."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from soupkit import budget, candidates, survey
from soupkit.allocate import Candidate, allocate, error_of, least_bytes
from soupkit.budget import Plan, export_within, plan_export
from soupkit.bundle import open_family, open_variant
from soupkit.candidates import measure
from soupkit.checkpoint import open_checkpoint
from soupkit.encoding import Encoding, encode, residual_energy
from soupkit.errors import BundleError, MergeError
from soupkit.export import export_variant
from soupkit.manifest import Manifest
from soupkit.restore import restore
from soupkit.verify import verify_family

GATE = "model.layers.0.mlp.gate_proj.weight"

Table = dict[str, list[Candidate]]


def table_of(pairs: list[list[tuple[int, int]]]) -> Table:
    return {
        f"t{i}": [Candidate(f"f{j}", size, float(lost)) for j, (size, lost) in enumerate(one)]
        for i, one in enumerate(pairs)
    }


# Whole numbers, so that sums of errors are exact.
tables = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
).map(table_of)


def bytes_of(choice: dict[str, Candidate]) -> int:
    return sum(one.nbytes for one in choice.values())


def optimum(table: Table, budget_bytes: int) -> float:
    """The least error of every choice that fits."""
    return min(
        sum(one.error for one in every)
        for every in itertools.product(*table.values())
        if sum(one.nbytes for one in every) <= budget_bytes
    )


def largest_step(table: Table) -> float:
    """The most error that one step along the hull of one tensor can win."""
    most = 0.0
    for every in table.values():
        hull = [min(every, key=lambda one: (one.nbytes, one.error))]
        while better := [
            one for one in every if one.nbytes > hull[-1].nbytes and one.error < hull[-1].error
        ]:
            at = hull[-1]
            hull.append(
                min(better, key=lambda one: (one.error - at.error) / (one.nbytes - at.nbytes))
            )
            most = max(most, at.error - hull[-1].error)
    return most


@settings(deadline=None)
@given(table=tables, extra=st.integers(0, 130))
def test_choice_fits_and_is_within_a_step_of_brute_force(table: Table, extra: int) -> None:
    budget_bytes = least_bytes(table) + extra
    choice = allocate(table, budget_bytes)
    assert choice.keys() == table.keys()
    assert all(one in table[name] for name, one in choice.items())
    assert bytes_of(choice) <= budget_bytes
    best = optimum(table, budget_bytes)
    assert best <= error_of(choice) <= best + largest_step(table)


@settings(deadline=None)
@given(table=tables)
def test_more_bytes_never_lose_more_and_enough_lose_least(table: Table) -> None:
    least = least_bytes(table)
    most = sum(max(one.nbytes for one in every) for every in table.values())
    errors = [error_of(allocate(table, one)) for one in range(least, most + 1)]
    assert all(after <= before for before, after in itertools.pairwise(errors))
    assert errors[-1] == sum(min(one.error for one in every) for every in table.values())


@settings(deadline=None)
@given(table=tables)
def test_corners_of_the_hull_are_optima(table: Table) -> None:
    least = least_bytes(table)
    most = sum(max(one.nbytes for one in every) for every in table.values())
    # A Lagrangian solution is the optimum of the bytes that it uses.
    for price in (0.1, 0.7, 1.3, 3.1, 9.7):
        chosen = {
            name: min(every, key=lambda one: (one.error + price * one.nbytes, one.nbytes))
            for name, every in table.items()
        }
        used = bytes_of(chosen)
        assert least <= used <= most
        assert error_of(allocate(table, used)) == error_of(chosen) == optimum(table, used)


def test_the_order_of_a_table_does_not_matter() -> None:
    table = table_of([[(1, 9), (4, 6), (7, 3)], [(1, 9), (4, 6), (7, 3)], [(0, 5), (3, 2)]])
    turned = {name: every[::-1] for name, every in reversed(table.items())}
    for extra in range(20):
        assert allocate(table, 2 + extra) == allocate(turned, 2 + extra)


def test_a_step_that_does_not_fit_leaves_its_bytes_to_others() -> None:
    table = {
        "large": [Candidate("a", 10, 1000.0), Candidate("b", 110, 0.0)],
        "middle": [Candidate("a", 1, 90.0), Candidate("b", 30, 50.0), Candidate("c", 60, 0.0)],
        "small": [Candidate("a", 1, 9.0), Candidate("b", 6, 0.0)],
    }
    choice = allocate(table, 12 + 40)
    assert {name: one.form for name, one in choice.items()} == {
        "large": "a", "middle": "b", "small": "b",
    }  # fmt: skip


def test_a_budget_that_is_too_small_is_told_with_the_least() -> None:
    table = table_of([[(7, 1), (5, 2)], [(4, 0)]])
    assert allocate(table, 9)["t0"].nbytes == 5
    with pytest.raises(ValueError, match=r"budget_bytes=8: .* 9"):
        allocate(table, 8)
    assert allocate({}, 0) == {}


def delta_of(rows: int, columns: int, *, spike: int = 2) -> torch.Tensor:
    """Unlike rows, some zeros, and a low-rank part."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    noise = torch.randn(rows, columns, generator=draw) * torch.rand(rows, 1, generator=draw)
    noise *= torch.rand(rows, columns, generator=draw) > 0.2
    low = torch.randn(rows, spike, generator=draw) @ torch.randn(spike, columns, generator=draw)
    return noise + low / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (33, 123), (123, 7), (70, 129)])
def test_measured_errors_are_those_of_the_encoded_delta(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    delta = delta_of(*shape)
    energy, errors = measure(delta.__getitem__, shape, factor_dtype=dtype)
    assert energy == pytest.approx(float(delta.double().square().sum()), rel=1e-12)
    for name, error in errors.items():
        # All rows are in the sample, so that the fitted planes are exact, too.
        encoded = encode(delta, Encoding.parse(name), factor_dtype=dtype)
        true = residual_energy(delta, encoded)
        assert error / energy == pytest.approx(true, rel=1e-4, abs=1e-5), name
    ranks = [name for name in errors if name.startswith("lowrank") and name.endswith("+row")]
    assert len(ranks) == sum(one <= min(shape) for one in candidates.RANKS)


def test_fitted_planes_are_estimated_from_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_SAMPLE_ENTRIES", 64 * 96)
    delta = delta_of(700, 96)
    # Rows that did not change say nothing of those that did.
    delta[:600] = 0.0
    energy, errors = measure(delta.__getitem__, (700, 96), factor_dtype=torch.float32)
    for name in ("row-x2-refit", "row-x3-refit", "row-x4-refit"):
        true = residual_energy(delta, encode(delta, Encoding.parse(name)))
        assert errors[name] / energy == pytest.approx(true, rel=0.1), name


def test_deltas_with_nothing_to_choose() -> None:
    zero = torch.zeros(5, 6)
    assert measure(zero.__getitem__, (5, 6), factor_dtype=torch.float32) == (0.0, {})
    flat = torch.full((5, 16), 0.5)
    _, errors = measure(flat.__getitem__, (5, 16), factor_dtype=torch.float32)
    assert all(error == pytest.approx(0.0, abs=1e-9) for error in errors.values())


def test_what_has_no_low_rank_form_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = delta_of(20, 30) * 1e12
    _, errors = measure(huge.__getitem__, (20, 30), factor_dtype=torch.float16)
    assert "row" in errors
    assert not [name for name in errors if "lowrank" in name]
    monkeypatch.setattr(candidates, "LOW_RANK_ENTRIES", 599)
    _, errors = measure(delta_of(20, 30).__getitem__, (20, 30), factor_dtype=torch.float32)
    assert not [name for name in errors if "lowrank" in name]


def within(base: Path, finetuned: Path, family: Path, budget_bytes: int | None = None):
    return export_within(
        open_checkpoint(base), open_checkpoint(finetuned),
        family=family, name="v", budget_bytes=budget_bytes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(make_llama, make_finetune, tmp_path_factory) -> tuple[Path, Path]:
    """A bfloat16 base and its fine-tune: one matrix of low rank, one sparse, one as it was."""
    folder = tmp_path_factory.mktemp("budget")
    base = make_llama(folder / "base", dtype=torch.bfloat16, hidden=48)
    before = load_file(base / "model.safetensors")

    def edit(tensors):
        low, sparse, same = (
            f"model.layers.1.mlp.{one}_proj.weight" for one in ("up", "gate", "down")
        )
        shift = torch.ones(len(before[low]), 1) @ torch.linspace(-1, 1, 48).unsqueeze(0)
        tensors[low] = (before[low].float() + shift / 10).bfloat16()
        delta = tensors[sparse].float() - before[sparse].float()
        delta[:, ::5] *= 20
        tensors[sparse] = before[sparse].clone()
        tensors[sparse][:, ::5] += delta[:, ::5].bfloat16()
        tensors[same] = before[same].clone()

    return base, make_finetune(folder / "finetuned", base, edit=edit)


@pytest.fixture(scope="module")
def plan(models: tuple[Path, Path]) -> Plan:
    """Of `models`, with the bytes of row scales."""
    return plan_export(*map(open_checkpoint, models))


def true_error(models: tuple[Path, Path], dense: Path) -> float:
    """Share of the deltas' energy that a restored model lacks, by float64, matrices alone."""
    base, wanted, found = (load_file(one / "model.safetensors") for one in (*models, dense))
    lost = total = 0.0
    for name, tensor in wanted.items():
        if tensor.ndim == 2:
            lost += float((found[name].double() - tensor.double()).square().sum())
            total += float((tensor.double() - base[name].double()).square().sum())
    return lost / total


def test_auto_loses_less_than_row_scales_for_their_bytes(models, tmp_path) -> None:
    report = within(*models, tmp_path / "f")
    row = report.plan.row
    written = report.export.path / "variant.safetensors"
    assert written.stat().st_size == report.export.bytes["weights"] <= row.bytes
    assert report.plan.budget_bytes == row.bytes
    assert report.lost_energy < row.lost_energy
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert true_error(models, tmp_path / "dense") == pytest.approx(report.lost_energy, rel=1e-3)
    assert verify_family(tmp_path / "f") == []


def test_row_figures_are_those_of_a_row_export(models, plan, tmp_path) -> None:
    report = export_variant(*map(open_checkpoint, models), family=tmp_path / "f", name="row")
    assert report.bytes["weights"] == plan.row.bytes
    restore(tmp_path / "f", "row", out=tmp_path / "dense")
    assert true_error(models, tmp_path / "dense") == pytest.approx(plan.row.lost_energy, rel=1e-3)


def test_no_budget_is_exceeded_and_a_larger_one_loses_no_more(models, plan, tmp_path) -> None:
    survey = plan.survey
    row = survey.bytes_of(survey.row)
    least = survey.frontier([])[0].budget_bytes
    points = survey.frontier(range(least, 8 * row, 997))
    assert all(one.bytes <= one.budget_bytes for one in points)
    assert all(b.lost_energy <= a.lost_energy for a, b in itertools.pairwise(points))
    at_row = survey.point(row)
    assert at_row.lost_energy <= math.fsum(one.error for one in survey.row.values()) / survey.energy
    for budget_bytes in (3 * row // 4, 2 * row, 100 * row):
        report = within(*models, tmp_path / "f", budget_bytes)
        assert report.export.bytes["weights"] == survey.point(budget_bytes).bytes <= budget_bytes
    # Everything whole, at last.
    assert report.lost_energy == 0.0
    assert [group.encoding for group in report.groups] == ["raw"]


def test_each_tensor_gets_what_suits_it(models, plan) -> None:
    assert plan.encodings["model.layers.1.mlp.up_proj.weight"].startswith("lowrank-")
    assert "model.layers.1.mlp.down_proj.weight" not in plan.encodings
    assert plan == plan_export(*map(open_checkpoint, models))


def test_manifest_holds_budget_and_frontier(models, tmp_path) -> None:
    report = within(*models, tmp_path / "f", 30_000)
    manifest = open_variant(open_family(tmp_path / "f").folder("v")).manifest
    assert manifest.budget == report.plan.to_json()
    assert manifest.budget["budget_bytes"] == 30_000
    assert 30_000 in [point["budget_bytes"] for point in manifest.budget["frontier"]]
    stored = {entry.name: entry.encoding or "raw" for entry in manifest.tensors if entry.bytes}
    assert {name: stored[name] for name in report.plan.encodings} == report.plan.encodings
    assert sum(group.tensors for group in report.groups) == len(report.plan.encodings)
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda budget: budget.update(more=1),
        lambda budget: budget.pop("row"),
        lambda budget: budget.update(budget_bytes=10**400),
        lambda budget: budget.update(budget_bytes=True),
        lambda budget: budget.update(frontier={}),
        lambda budget: budget["frontier"].append([]),
        lambda budget: budget["frontier"][0].update(lost_energy="x"),
        lambda budget: budget["frontier"][0].update(lost_energy=-1.0),
        lambda budget: budget["row"].update(bytes=None),
    ],
)
def test_a_hostile_budget_is_a_bundle_error(plan, change) -> None:
    whole = Manifest("v", "sha256:" + "0" * 64, "sha256:" + "0" * 64, (), budget=plan.to_json())
    assert Manifest.from_json(whole.to_json()) == whole
    odd = json.loads(json.dumps(plan.to_json()))
    change(odd)
    with pytest.raises(BundleError, match="has a budget of another form"):
        Manifest.from_json(replace(whole, budget=odd).to_json())


def test_a_budget_that_holds_nothing_is_refused_before_a_family_is_made(
    models, plan, tmp_path
) -> None:
    least = plan.frontier[0].budget_bytes
    with pytest.raises(ValueError, match=f"at least budget_bytes={least}$"):
        plan.survey.choose(least - 1)
    with pytest.raises(ValueError, match=r"budget_bytes=100: .*at least budget_bytes=\d+"):
        within(*models, tmp_path / "f", 100)
    assert not (tmp_path / "f").exists()
    assert within(*models, tmp_path / "f", least).export.bytes["weights"] <= least


def test_an_export_without_a_budget_tells_where_auto_is(models, tmp_path) -> None:
    for options in ({"encoding": "auto"}, {"encodings": {GATE: "auto"}}):
        with pytest.raises(ValueError, match=r"call soupkit\.budget\.export_within"):
            export_variant(
                *map(open_checkpoint, models), family=tmp_path / "f", name="v", **options
            )
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("budget_bytes", [2**63, 1e6, True, -1])
def test_a_budget_that_no_manifest_could_hold_is_refused(models, tmp_path, budget_bytes) -> None:
    with pytest.raises(ValueError, match="budget_bytes="):
        within(*models, tmp_path / "f", budget_bytes)
    assert not (tmp_path / "f").exists()


def test_the_largest_budget_gives_a_variant_that_opens(models, tmp_path) -> None:
    report = within(*models, tmp_path / "f", 2**63 - 1)
    assert open_variant(report.export.path).manifest.budget["budget_bytes"] == 2**63 - 1


def test_estimates_that_do_not_come_true_give_row_scales(
    base_folder, finetuned_folder, tmp_path, monkeypatch
) -> None:
    measured = survey.measure_pair

    def too_good(*pair):
        energy, errors = measured(*pair)
        return energy, {**errors, "lowrank-1": 0.0}

    monkeypatch.setattr(survey, "measure_pair", too_good)
    report = within(base_folder, finetuned_folder, tmp_path / "f")
    assert {"row"} == {one.encoding for one in report.groups if one.encoding != "raw"}
    assert report.lost_energy == pytest.approx(report.plan.row.lost_energy, rel=1e-6)
    # The first try is no variant that was there before.
    assert not report.export.replaced
    assert within(base_folder, finetuned_folder, tmp_path / "f").export.replaced


def test_row_scales_as_the_choice_are_written_once(
    base_folder, finetuned_folder, tmp_path, monkeypatch
) -> None:
    measured, runs = survey.measure_pair, []

    def row_alone(*pair):
        energy, errors = measured(*pair)
        return energy, {"row": errors["row"]}

    def counted(*pair, **options):
        runs.append(options["name"])
        return export_variant(*pair, **options)

    monkeypatch.setattr(survey, "measure_pair", row_alone)
    monkeypatch.setattr(budget, "export_variant", counted)
    report = within(base_folder, finetuned_folder, tmp_path / "f")
    # Also that the default budget holds them, where nothing is smaller.
    assert report.export.bytes["weights"] == report.plan.budget_bytes
    assert len(runs) == 1


def test_a_fine_tune_of_norms_alone_is_exported(models, make_finetune, tmp_path) -> None:
    before = load_file(models[0] / "model.safetensors")

    def edit(tensors):
        for name, tensor in before.items():
            tensors[name] = tensor + 1 if tensor.ndim == 1 else tensor.clone()

    finetuned = make_finetune(tmp_path / "norms", models[0], edit=edit)
    report = within(models[0], finetuned, tmp_path / "f")
    assert report.export.bytes["weights"] == report.plan.budget_bytes == report.plan.row.bytes
    with pytest.raises(ValueError, match=f"at least budget_bytes={report.plan.budget_bytes}$"):
        within(models[0], finetuned, tmp_path / "f", report.plan.budget_bytes - 1)


def test_a_fine_tune_that_is_the_base_takes_no_bytes(models, tmp_path) -> None:
    report = within(models[0], models[0], tmp_path / "f")
    assert (report.groups, report.lost_energy) == ((), 0.0)
    assert report.export.bytes["weights"] == report.plan.row.bytes


def test_other_layouts_and_resized_tensors_are_counted(models, tmp_path) -> None:
    shapes = {
        "conv.weight": (6, 5, 3, 3), "experts.up": (3, 7, 9), "bias": (7,), "one.weight": (1, 40),
        "model.embed_tokens.weight": (31, 12), "table.weight": (40, 24),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    finetuned = {name: one + torch.randn(one.shape, generator=draw) for name, one in base.items()}
    finetuned["model.embed_tokens.weight"] = torch.randn(33, 12, generator=draw)
    for folder, tensors in (("base", base), ("ft", finetuned)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    plan = plan_export(open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "ft"))
    for share in (1.0, 1.5, 3.0):
        budget_bytes = int(plan.row.bytes * share)
        report = within(tmp_path / "base", tmp_path / "ft", tmp_path / "f", budget_bytes)
        found = report.export.bytes["weights"]
        assert found == plan.survey.point(budget_bytes).bytes <= budget_bytes


def test_progress_counts_both_passes(models, tmp_path) -> None:
    seen = []
    export_within(
        *map(open_checkpoint, models), family=tmp_path / "f", name="v",
        progress=lambda *one: seen.append(one[1:]),
    )  # fmt: skip
    assert seen[-1][0] == seen[-1][1]
    assert all(before[0] < after[0] for before, after in itertools.pairwise(seen))
    assert len({total for _, total in seen}) == 1


def test_what_is_not_finite_is_refused_by_name(models, make_finetune, tmp_path) -> None:
    def edit(tensors):
        tensors[GATE][1, 2] = math.nan

    broken = make_finetune(tmp_path / "broken", models[0], edit=edit)
    with pytest.raises(MergeError, match=GATE):
        within(models[0], broken, tmp_path / "f")
    assert not (tmp_path / "f").exists()
