"""method="ema" in whole runs: what is exported, reported, stored and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from soup_runs import AccelerateLoop, load, make_trainer, saved_base, weights_of
from torch import nn
from transformers import TrainerCallback

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.restore import restore
from soupkit.training import Soup, SoupCallback
from soupkit.training.ema import decay_of_update
from soupkit.training.state import AverageRecord, SoupFolder

CONFIG = SoupConfig(method="ema", ema_decay=0.8, merge_every_n_steps=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return saved_base(tmp_path_factory.mktemp("base") / "base")


class Noting(TrainerCallback):
    """The live weights after each optimizer step, as float64."""

    def __init__(self) -> None:
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append({name: value.double() for name, value in weights_of(model).items()})


def expected_average(seen, *, most: float, every: int = 1):
    average, count = None, 0
    for step, weights in enumerate(seen, start=1):
        if step % every:
            continue
        decay = decay_of_update(most, count)
        average = weights if average is None else {
            name: decay * value + (1 - decay) * weights[name] for name, value in average.items()
        }  # fmt: skip
        count += 1
    return average


@pytest.mark.parametrize("every", [1, 2])
def test_the_average_is_exported_and_training_never_sees_it(base, tmp_path, every):
    """TB26: merging never depends on what is saved, and here training not on merging."""
    noting = Noting()
    make_trainer(base, tmp_path / "plain", [noting]).train()
    config = SoupConfig(method="ema", ema_decay=0.8, ema_every_n_steps=every, gate="none")
    callback = SoupCallback(
        config, export=ExportConfig(family=tmp_path / "f", name="x", encoding="row-x4")
    )
    watched = Noting()
    run = make_trainer(base, tmp_path / "run", [callback, watched])
    averages = {}
    original = callback.on_train_end

    def on_train_end(*args, **kwargs):
        average = callback._run.average
        averages.update({name: average.tensor(name).clone() for name in average.names})
        original(*args, **kwargs)

    callback.on_train_end = on_train_end
    run.train()
    for one, two in zip(noting.seen, watched.seen, strict=True):
        assert all(torch.equal(value, two[name]) for name, value in one.items())
    expected = expected_average(noting.seen, most=0.8, every=every)
    for name, value in averages.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    restore(tmp_path / "f", "x", out=tmp_path / "dense", base=base)
    dense, start = (weights_of(load(path)) for path in (tmp_path / "dense", base))
    name = "model.norm.weight"  # stored as it is, whatever the bits of the others
    assert torch.equal(dense[name], averages[name])
    assert not torch.equal(dense[name].double(), watched.seen[-1][name])
    assert not torch.equal(dense[name], start[name])
    # Saving the model saves the average, too.
    assert torch.equal(weights_of(run.model)[name], averages[name])


def test_merge_points_compare_and_the_better_one_is_exported(base, tmp_path, capfd):
    callback = SoupCallback(CONFIG, export=ExportConfig(family=tmp_path / "f", name="x"))
    make_trainer(base, tmp_path / "run", [callback]).train()
    assert [report.step for report in callback.reports] == [3, 6]
    for report in callback.reports:
        assert report.accepted == (report.metric_merged <= report.metric_current)
        assert report.matrices == ()
        assert set(report.scalars()) == {
            "soup/seconds", "soup/accepted", "soup/metric_current", "soup/metric_merged"
        }  # fmt: skip
    said = capfd.readouterr().err
    assert "moving average" in said
    assert "exported" in said


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_resumed_run_goes_on_with_the_average_bit_for_bit(base, tmp_path, place):
    """TB21, TB23, TB24, TB25: the counter and the average come back, the raw weights stay raw."""
    config = SoupConfig(method="ema", ema_decay=0.9, merge_every_n_steps=3, ema_place=place)
    settings = {"save_strategy": "steps", "save_steps": 2}

    def ended(callback, trainer, **kwargs):
        kept = {}

        class Last(TrainerCallback):
            def on_step_end(self, args, state, control, **unused):
                average = callback._run.average
                kept.update({name: average.tensor(name).clone() for name in average.names})
                kept["updates"] = average.num_updates

        trainer.add_callback(Last())
        trainer.train(**kwargs)
        return kept, weights_of(trainer.model)

    one = SoupCallback(config)
    whole = ended(one, make_trainer(base, tmp_path / "whole", [one], **settings))
    two = SoupCallback(config)
    ended(two, make_trainer(base, tmp_path / "run", [two], max_steps=5, **settings))
    three = SoupCallback(config)
    resumed = ended(
        three, make_trainer(base, tmp_path / "run", [three], **settings),
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"),
    )  # fmt: skip
    assert whole[0].pop("updates") == resumed[0].pop("updates") == 8
    for first, second in zip(whole, resumed, strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    kept = sorted(path.name for path in (tmp_path / "run" / "soup").glob("average-*"))
    assert kept == [f"average-{step:08d}.safetensors" for step in (2, 4, 6, 8)]


@pytest.mark.parametrize(
    ("averages", "lines"), [("worse worse worse worse", 1), ("worse worse better worse worse", 0)]
)
def test_an_average_that_keeps_losing_gives_one_line_of_advice(
    base, tmp_path, capfd, averages, lines
):
    verdicts = averages.split()
    scores = iter([score for one in verdicts for score in (1.0, 2.0 if one == "worse" else 0.5)])
    model = load(base)
    config = SoupConfig(method="ema", merge_every_n_steps=2)
    soup = Soup(model, config=config, evaluate=lambda: next(scores), output_dir=tmp_path)
    for _ in range(2 * len(verdicts)):
        soup.step()
    said = [line for line in capfd.readouterr().err.splitlines() if "lower ema_decay" in line]
    assert len(said) == lines
    assert all("3 times in a row" in line for line in said)


def test_rotated_checkpoints_take_their_averages_along(base, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    make_trainer(base, tmp_path, [SoupCallback(CONFIG)], **settings).train()
    assert [p.name for p in (tmp_path / "soup").glob("average-*")] == [
        "average-00000008.safetensors"
    ]


def test_an_accelerate_loop_saves_and_loads_its_average(base, tmp_path):
    whole = AccelerateLoop(base, tmp_path / "whole", CONFIG)
    whole.train(7)
    first = AccelerateLoop(base, tmp_path / "run", CONFIG)
    first.train(6, save_at=(3, 5))
    second = AccelerateLoop(base, tmp_path / "run", CONFIG)
    second.accelerator.load_state(str(tmp_path / "run" / "checkpoints" / "checkpoint_0"))
    second.train(7, start=3)
    one, two = (loop.soup._run.average for loop in (whole, second))
    assert one.num_updates == two.num_updates == 7
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.names)


def test_a_resume_without_its_average_is_refused(tmp_path):
    """TB25, TB41: never restart an average silently."""
    config = SoupConfig(method="ema", gate="none")
    model = nn.Linear(3, 2)

    def soup():
        return Soup(model, config=config, output_dir=tmp_path)

    first = soup()
    for _ in range(3):
        first.step()
    first.save(tmp_path / "checkpoint")
    first.step()
    first.finish()
    with pytest.raises(TrainingError, match=r"no moving average of step 4.*step 3"):
        soup().resume(4)
    again = soup()
    again.resume(3)
    assert again._run.average.num_updates == 3


def test_a_run_that_knew_no_soup_begins_its_average_where_it_is(base, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(base, tmp_path, [], max_steps=4, **settings).train()
    callback = SoupCallback(CONFIG, base=base)
    run = make_trainer(base, tmp_path, [callback], **settings)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [report.step for report in callback.reports] == [3, 6]


def test_a_run_may_change_its_method_when_it_is_resumed(base, tmp_path):
    merging = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)

    def go_on(config, stop, checkpoint):
        callback = SoupCallback(config)
        trainer = make_trainer(
            base, tmp_path, [callback], max_steps=stop, save_strategy="steps", save_steps=1
        )
        place = str(tmp_path / f"checkpoint-{checkpoint}") if checkpoint else None
        trainer.train(resume_from_checkpoint=place)
        return [report.step for report in callback.reports]

    assert go_on(merging, 5, None) == [4]
    for step in (4, 5):
        with pytest.raises(TrainingError, match=f"another method .* set start_after_step={step},"):
            go_on(CONFIG, 6, step)
    assert go_on(replace(CONFIG, start_after_step=5), 6, 5) == [6]
    state = SoupFolder(tmp_path / "soup").newest(at_most=6)
    assert state is not None
    assert (state.partner, state.average) == (None, AverageRecord(6, 1))
    # Back again: the first merge point captures, the average is of no use any more.
    assert go_on(merging, 10, 6) == [10]
    state = SoupFolder(tmp_path / "soup").newest(at_most=10)
    assert state is not None
    assert state.average is None


def test_a_comparison_claims_no_figures_of_a_merge(base, tmp_path):
    callback = SoupCallback(CONFIG)
    make_trainer(base, tmp_path, [callback], max_steps=3).train()
    (report,) = callback.reports
    told = report.to_json(matrices=False)
    assert [told[name] for name in ("kept_energy", "delta_norm_before", "cosine")] == [None] * 3
    assert set(report.scalars()) == {
        "soup/seconds", "soup/accepted", "soup/metric_current", "soup/metric_merged"
    }  # fmt: skip
