"""The study of merging: what it counts, that it goes on where it was, and what its results say."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from soupkit import SoupConfig

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
RESULTS = RECIPES / "soup_study.json"


@pytest.fixture(scope="module")
def modules():
    """The recipe's modules, which import each other by their bare names."""
    names = ("soup_study", "soup_study_tasks", "soup_study_runs", "soup_study_table")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        study, *others = (importlib.import_module(name) for name in names)
        yield SimpleNamespace(study=study, tasks=others[0], runs=others[1], table=others[2])
    for name in (*names, "demo"):
        sys.modules.pop(name, None)


def test_differences_are_paired_and_spreads_are_of_them(modules):
    """By hand: plain 1.0 and 3.0; an arm at 0.9 and 2.7 is better by 0.2 +- sqrt(0.02)."""
    runs = {
        f"text/ample/linear/{seed}": {
            "no merging": {"loss": plain},
            "one": {"loss": one, "merges": 3, "refused": 1},
            "two": {"loss": plain + 0.5, "merges": 3, "refused": 3},
        }
        for seed, plain, one in ((0, 1.0, 0.9), (1, 3.0, 2.7))
    }
    found = modules.table.cells(runs)["text/ample/linear"]
    assert found["no merging"].loss == 2.0
    assert found["one"].difference == pytest.approx(-0.2)
    assert found["one"].spread == pytest.approx(math.sqrt(0.02))
    assert (found["one"].merges, found["one"].refused) == (6, 2)
    assert modules.table.worse(runs, "text", "one") == []
    assert modules.table.worse(runs, "text", "two") == ["text/ample/linear"]
    assert modules.table.worse(runs, "demo", "two") == []
    lines = modules.table.table(runs, "text", default="one").splitlines()
    assert lines[0] == "| text | ample, linear | refused |"
    assert lines[2] == "| no merging | 2.0000 +- 1.4142 |  |"
    assert "| **one** (default) | -0.2000 +- 0.1414 | 2 of 6 |" in lines
    assert "| two | ! +0.5000 +- 0.0000 | 6 of 6 |" in lines


def test_a_worse_mean_within_the_spread_is_not_called_worse(modules):
    cell = modules.table.Cell(losses=(1, 1, 1), differences=(0.3, 0.0, -0.1), merges=0, refused=0)
    assert cell.difference > 0
    assert not cell.is_worse
    alone = modules.table.Cell(losses=(1,), differences=(0.01,), merges=0, refused=0)
    assert alone.is_worse


def test_docstrings_and_code_are_taken_apart(modules):
    source = '"""Top."""\nimport os\n\ndef f():\n    """One.\n\n    Two."""\n    return "kept"\n'
    docs, code = modules.tasks.split_source(source)
    assert docs == "Top.\n\nOne.\n\nTwo."
    assert code == 'import os\ndef f():\n    return "kept"'


def test_the_loss_is_a_mean_over_learned_tokens(modules):
    """Batches of other sizes, and prompts that are not learned, against log_softmax."""
    torch.manual_seed(0)
    model = modules.tasks.make_model(seed=0)
    batches = []
    for rows, length, hidden in ((2, 9, 3), (5, 6, 1)):
        ids = torch.randint(1, 128, (rows, length))
        labels = ids.clone()
        labels[:, :hidden] = -100
        batches.append({"input_ids": ids, "labels": labels})
    expected = []
    with torch.no_grad():
        for batch in batches:
            logits = model(input_ids=batch["input_ids"]).logits.double().log_softmax(-1)
            for row, labels in zip(logits, batch["labels"], strict=True):
                expected += [
                    -row[place - 1, token].item()
                    for place, token in enumerate(labels.tolist())
                    if token != -100
                ]
    found = modules.tasks.losses(model, batches)
    assert len(found) == 7
    assert fmean(found) == pytest.approx(fmean(expected), rel=1e-5)
    assert model.training


def test_equal_weights_are_scored_once(modules, monkeypatch):
    scored = []
    monkeypatch.setattr(
        modules.runs, "losses", lambda model, batches: scored.append(1) or [len(scored)]
    )
    model = torch.nn.Linear(2, 3)
    scores = modules.runs.Scores(model, [])
    before = model.weight.detach().clone()
    assert [scores(), scores()] == [[1], [1]]
    with torch.no_grad():
        model.weight[2, 1] += 1e-6
    assert scores() == [2]
    with torch.no_grad():
        model.weight.copy_(before)
    assert scores() == [1]


def test_every_way_is_there_and_the_default_is_one_of_them(modules):
    setting = SimpleNamespace(steps=150, merge_every=25)
    found = modules.runs.arms(setting, few=False)
    for rank in (16, 64, 256):
        assert found[f"svd_mean {rank}, side"].rank == rank
    assert {config.method for config in found.values()} == {"svd_mean", "monosoup", "mean", "ema"}
    for feed_back in (True, False):
        gates = {config.gate for config in found.values() if config.feed_back is feed_back}
        assert gates == {"metric", "none"}
    assert found.keys() >= modules.runs.arms(setting, few=True).keys()
    name = modules.runs.default_arm(setting)
    assert found[name] == SoupConfig(merge_every_n_steps=25)


class Stopped(Exception):
    """A study that is killed."""


class FakeRun:
    """Counts trainings; is killed in the one that `dies_in` names."""

    def __init__(self, dies_in=None):
        self.setting = SimpleNamespace(steps=30, merge_every=6)
        self.trained, self.dies_in = [], dies_in

    def shared(self, configs):
        self.trained.append("shared")
        return {"no merging": {"loss": 1.0}, **{name: {"loss": 1.0} for name in configs}}

    def fed_back(self, name, config):
        self.trained.append(name)
        if name == self.dies_in:
            raise Stopped
        return {"loss": 2.0, "merges": 1, "refused": 0}


def test_a_study_that_was_killed_goes_on_with_what_is_missing(modules, tmp_path):
    path, key = tmp_path / "study.json", "text/ample/constant/0"

    def go_on(run):
        study = modules.study.Study(path, quick=False)
        list(modules.study.one_case(study, key, run, few=True))
        return study.runs[key]

    first, second, third = FakeRun("svd_mean 64, fed back"), FakeRun(), FakeRun()
    with pytest.raises(Stopped):
        go_on(first)
    assert first.trained == ["shared", "mean, fed back", "svd_mean 64, fed back"]
    whole = go_on(second)
    assert second.trained == ["svd_mean 64, fed back"]
    assert whole.keys() == {"no merging", *modules.runs.arms(first.setting, few=True)}
    assert go_on(third) == whole
    assert third.trained == []
    with pytest.raises(SystemExit, match="quick=False"):
        modules.study.Study(path, quick=True)


def quick_study(out):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(RECIPES / "soup_study.py"), "--out", str(out), "--quick"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_slice_a_quick_study_ends_with_a_table_and_a_plot_and_is_not_done_twice(tmp_path):
    said = quick_study(tmp_path)
    results = json.loads((tmp_path / "study.json").read_text())
    assert results["quick"] is True
    cases = {"demo/scarce/constant/0", "text/scarce/constant/0"}
    assert results["runs"].keys() == cases
    for case in cases:
        arms = results["runs"][case]
        assert all(math.isfinite(result["loss"]) for result in arms.values())
        # No merge that training sees, so either the run's own weights or a soup.
        for name, result in arms.items():
            if "is_soup" in result:
                assert result["is_soup"] == (result["loss"] != arms["no merging"]["loss"]), name
        assert arms["svd_mean 64, side"]["merges"] == 2
        assert arms["ema"]["merges"] == 3
        assert f"| no merging | {arms['no merging']['loss']:.4f} |" in said
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("run-*")), "the runs' own files stay"
    before = (tmp_path / "study.json").read_bytes()
    again = quick_study(tmp_path)
    assert "fed back\n" not in again.split("Test loss", 1)[0]
    assert (tmp_path / "study.json").read_bytes() == before


@pytest.fixture(scope="module")
def published():
    return json.loads(RESULTS.read_text())["runs"]


def test_with_the_defaults_no_case_ends_worse_by_more_than_the_spread(modules, published):
    default = modules.runs.default_arm(SimpleNamespace(steps=150, merge_every=25))
    cases = modules.table.cells(published)
    assert {case.split("/")[0] for case in cases} == {"demo", "text", "smollm2"}
    for task in ("demo", "text", "smollm2"):
        assert modules.table.worse(published, task, default) == []
    for case, arms in cases.items():
        assert default in arms, case


def test_the_page_shows_the_published_results(modules, published):
    page = (RECIPES / "soup_study.md").read_text()
    default = modules.runs.default_arm(SimpleNamespace(steps=150, merge_every=25))
    for task in {key.split("/")[0] for key in published}:
        assert modules.table.table(published, task, default=default) in page, task
    readme = (RECIPES.parent / "README.md").read_text()
    rows = [line for line in readme.splitlines() if " +- 0." in line and "(default)" in line]
    assert all(line in page for line in rows)
