"""Soup in an Accelerate loop, one process: accumulation, save_state and load_state, exact
resume.
"""

import json

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from soup_runs import (
    AccelerateLoop,
    assert_equal_weights,
    optimizer_state,
    saved_base,
    weights_of,
)

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.errors import TrainingError
from soupkit.training.finish import finish_run
from soupkit.verify import verify_family

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate's state is one for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base") / "base", dropout=0.1)


def steps_of(folder, kind):
    return sorted(int(path.stem[-8:]) for path in (folder / "soup").glob(f"{kind}-*"))


def test_a_loop_that_is_loaded_goes_on_bit_for_bit(base, tmp_path):
    """TB42, TB44: the step travels in a file of our own, and micro-batches do not count."""
    whole = AccelerateLoop(base, tmp_path / "whole", CONFIG)
    whole.train(9)
    assert whole.soup.num_steps == 9
    assert [report.step for report in whole.soup.reports] == [4, 6, 8]
    first = AccelerateLoop(base, tmp_path / "run", CONFIG)
    first.train(8, save_at=(3, 5, 8))
    # total_limit=2: the first checkpoint is gone, and what only it needed.
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    marks = [json.loads((path / "soupkit.json").read_text())["step"] for path in checkpoints]
    assert marks == [5, 8]
    assert steps_of(tmp_path / "run", "state") == [4, 8]
    second = AccelerateLoop(base, tmp_path / "run", CONFIG)
    second.accelerator.load_state(str(checkpoints[0]))
    assert second.soup.num_steps == 5
    second.train(9, start=5)
    assert [report.step for report in second.soup.reports] == [6, 8]
    assert_equal_weights(weights_of(whole.inner), weights_of(second.inner))
    pairs = zip(optimizer_state(whole.optimizer), optimizer_state(second.optimizer), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    family = tmp_path / "family"
    report = second.soup.finish(export=ExportConfig(family=family, name="loop"))
    assert report.name == "loop"
    assert verify_family(family) == []


def test_a_run_ends_as_the_best_variant_that_a_budget_buys(base, tmp_path):
    loop = AccelerateLoop(base, tmp_path, CONFIG)
    loop.train(4)
    family = tmp_path / "family"
    small = ExportConfig(family=family, name="best", encoding="auto", budget_bytes=100)
    step = loop.soup.num_steps
    with pytest.raises(ValueError, match=r"budget_bytes=100: .*at least budget_bytes=\d+"):
        finish_run(loop.soup._run, small, step=step, save_companions=lambda _: None)
    assert not (family / "variants" / "best").exists()
    report = loop.soup.finish(ExportConfig(family=family, name="best", encoding="auto"))
    manifest = open_variant(report.path).manifest
    assert report.bytes["weights"] <= manifest.budget["budget_bytes"]
    assert manifest.budget["budget_bytes"] == manifest.budget["row"]["bytes"]
    assert [event["step"] for event in manifest.history] == [4]
    assert manifest.metrics["step"] == 4
    assert verify_family(family) == []


def test_a_checkpoint_that_is_loaded_at_the_end_is_what_is_exported(base, tmp_path):
    loop = AccelerateLoop(base, tmp_path, CONFIG)
    loop.train(4, save_at=(3,))
    loop.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    family = tmp_path / "family"
    loop.soup.finish(export=ExportConfig(family=family, name="best"))
    variant = open_variant(family / "variants" / "best").load()
    name = "model.norm.weight"
    assert torch.equal(variant.raw[name], weights_of(loop.inner)[name])
    # Nothing was trained on from there, so nothing is forgotten.
    assert steps_of(tmp_path, "state") == [2, 4]


def test_a_run_may_go_back_to_a_checkpoint(base, tmp_path):
    loop = AccelerateLoop(base, tmp_path, CONFIG)
    loop.train(5, save_at=(3,))
    assert [report.step for report in loop.soup.reports] == [4]
    loop.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert loop.soup.num_steps == 3
    loop.soup.step()
    assert [report.step for report in loop.soup.reports] == [4]
    assert steps_of(tmp_path, "state") == [2, 4]


def test_a_checkpoint_without_our_mark_asks_for_the_step(base, tmp_path):
    """TB42: adding soupkit does not break older checkpoints."""
    without = AccelerateLoop(base, tmp_path, CONFIG, with_soup=False)
    without.train(3, save_at=(3,))
    souped = AccelerateLoop(base, tmp_path, CONFIG)
    souped.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    with pytest.raises(TrainingError, match=r"resume\(step\)"):
        souped.soup.step()
    with pytest.raises(TrainingError, match="base="):
        souped.soup.resume(3)
