"""OPCM of model folders: the merge in memory, on disk; its norms; what the command line takes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_opcm import in_turn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.errors import MergeError
from soupkit.offline import REPORT_NAME, merge_checkpoints
from soupkit.opcm import OpcmRule, is_projected, norm_of, rescaling

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def fine_tunes(base_folder, make_finetune, tmp_path_factory):
    root = tmp_path_factory.mktemp("fine_tunes")
    return [make_finetune(root / f"ft{seed}", base_folder, seed=seed) for seed in (1, 2, 3)]


def weights(folder):
    return load_file(folder / "model.safetensors")


def merge(base, checkpoints, out, rule, **options):
    opened = [open_checkpoint(one) for one in checkpoints]
    return merge_checkpoints(open_checkpoint(base), opened, out=out, rule=rule, **options)


def in_memory(base, checkpoints, rule):
    """Every parameter at once, float64."""
    start = {name: value.double() for name, value in weights(base).items()}
    deltas = {
        name: [weights(one)[name].double() - value for one in checkpoints]
        for name, value in start.items()
    }
    found = {name: in_turn(name, each, rule) for name, each in deltas.items()}
    norms = [norm_of([found[name][1][i] for name in start]) for i in range(len(checkpoints))]
    energy = math.fsum(float(total.square().sum()) for total, _ in found.values())
    scale = rescaling(norms, energy)
    return {name: value + scale * found[name][0] for name, value in start.items()}, norms


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rule", [OpcmRule(), OpcmRule(0.8, "two_sided")])
def test_result_is_the_merge_in_memory(base_folder, fine_tunes, tmp_path, rule, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report = merge(base_folder, fine_tunes, tmp_path / "out", rule)
    finally:
        torch.set_num_threads(before)
    expected, norms = in_memory(base_folder, fine_tunes, rule)
    found = weights(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)
    # ||W - W_base|| is the mean of the tasks' norms, whatever was projected away.
    total = norm_of([one.merged_norm**2 for one in report.matrices])
    assert math.isclose(total, math.fsum(norms) / len(norms), rel_tol=1e-6)
    start = weights(base_folder)
    written = norm_of([float((found[name] - start[name]).square().sum()) for name in start])
    assert math.isclose(written, total, rel_tol=1e-4)


def test_the_folder_is_a_model_with_its_report_and_nothing_else(base_folder, fine_tunes, tmp_path):
    report = merge(base_folder, fine_tunes, tmp_path / "out", OpcmRule(0.3))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    told = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert told["rule"] == {"method": "opcm", "alpha": 0.3, "cut": "block"}
    for one in report.matrices:
        assert one.method == ("opcm" if is_projected(one.name, one.shape) else "sum")
        assert 0 < one.kept_energy <= 1
        assert (one.kept_energy < 1) == (one.method == "opcm")


def test_order_matters_and_one_checkpoint_is_itself(base_folder, fine_tunes, tmp_path):
    merge(base_folder, fine_tunes[:2], tmp_path / "ab", OpcmRule())
    merge(base_folder, fine_tunes[1::-1], tmp_path / "ba", OpcmRule())
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.allclose(weights(tmp_path / "ab")[name], weights(tmp_path / "ba")[name])
    merge(base_folder, fine_tunes[:1], tmp_path / "a", OpcmRule())
    for key, value in weights(fine_tunes[0]).items():
        torch.testing.assert_close(weights(tmp_path / "a")[key], value)


def test_the_base_itself_changes_nothing(base_folder, tmp_path):
    merge(base_folder, [base_folder, base_folder], tmp_path / "out", OpcmRule())
    for name, value in weights(base_folder).items():
        assert torch.equal(weights(tmp_path / "out")[name], value)


def test_scalars_experts_and_whole_numbers(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def tensors(size: float):
        shapes = {"scale": (), "experts.up_proj": (3, 5, 4), "a.weight": (5, 4), "none": (0, 4)}
        found = {k: torch.randn(v, generator=generator) * size for k, v in shapes.items()}
        return {**found, "count": torch.tensor([3])}

    start = tensors(1.0)
    sources = {"base": start}
    for name in ("one", "two"):
        moved = tensors(0.1)
        sources[name] = {k: v if k == "count" else start[k] + v for k, v in moved.items()}
        sources[name]["count"] = start["count"]
    for name, each in sources.items():
        (tmp_path / name).mkdir()
        save_file(each, tmp_path / name / "model.safetensors")
    folders = [tmp_path / name for name in ("one", "two")]
    merge(tmp_path / "base", folders, tmp_path / "out", OpcmRule())
    found = weights(tmp_path / "out")
    floats = [name for name in start if name not in ("count", "none")]
    totals = {
        name: in_turn(
            name, [sources[key][name] - start[name] for key in ("one", "two")], OpcmRule()
        )
        for name in floats
    }
    norms = [norm_of([totals[name][1][i] for name in floats]) for i in range(2)]
    scale = rescaling(norms, sum(float(one.square().sum()) for one, _ in totals.values()))
    for name in floats:
        torch.testing.assert_close(found[name], start[name] + scale * totals[name][0])
    assert found["none"].shape == (0, 4)
    assert torch.equal(found["count"], torch.tensor([3]))


def test_rows_beyond_the_bases_vocabulary_are_averaged(base_folder, make_finetune, tmp_path):
    def resize(fill):
        def edit(tensors):
            old = tensors[EMBEDDING]
            tensors[EMBEDDING] = torch.cat([old, torch.full((2, old.shape[1]), fill)])

        return edit

    two = [
        make_finetune(tmp_path / f"ft{i}", base_folder, seed=i, edit=resize(float(i)))
        for i in (1, 3)
    ]
    merge(base_folder, two, tmp_path / "out", OpcmRule())
    found = weights(tmp_path / "out")[EMBEDDING]
    assert torch.equal(found[99:], torch.full((2, 24), 2.0))
    base = weights(base_folder)[EMBEDDING]
    merged, summed = found[:99] - base, sum(weights(one)[EMBEDDING][:99] - base for one in two)
    ratio = float((merged * summed).sum() / summed.square().sum())
    torch.testing.assert_close(merged, ratio * summed, rtol=1e-4, atol=1e-6)


def test_faults_leave_nothing_behind(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"][3] = float("nan")

    bad = make_finetune(tmp_path / "bad", base_folder, edit=edit)
    with pytest.raises(MergeError, match=rf"{bad}: model\.norm\.weight: nan at index \(3,\)"):
        merge(base_folder, [base_folder, bad], tmp_path / "out", OpcmRule())
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_the_command_line_takes_its_options_and_refuses_a_means(base_folder, fine_tunes, tmp_path):
    def run(*args):
        return CliRunner().invoke(app, ["merge", *map(str, args)])

    models = (base_folder, *fine_tunes[:2], "--method")
    done = run(*models, "opcm", "--alpha", "0.8", "--cut", "two_sided", "--out", tmp_path / "cli")
    assert done.exit_code == 0, done.stderr
    assert "opcm of 2 checkpoints" in done.stdout
    merge(base_folder, fine_tunes[:2], tmp_path / "api", OpcmRule(0.8, "two_sided"))
    for name, value in weights(tmp_path / "api").items():
        assert torch.equal(weights(tmp_path / "cli")[name], value)
    for wrong in (["--rank", "3"], ["--energy", "0.5"], ["--weights", "1,2"]):
        assert run(*models, "opcm", *wrong, "--out", tmp_path / "x").exit_code == 2
    assert run(*models, "mean", "--alpha", "0.5", "--out", tmp_path / "x").exit_code == 2
    bad = run(*models, "opcm", "--alpha", "2", "--out", tmp_path / "x")
    assert (bad.exit_code, "alpha=2.0" in bad.stderr) == (1, True)
