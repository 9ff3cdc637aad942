"""SoupCallback in Trainer: exact resume, gate, rotation, export, and a run that is otherwise
untouched.
"""

import json
import re
import shutil

import pytest
import torch
from accelerate.state import GradientState
from soup_runs import (
    assert_equal_weights,
    load,
    losses_of,
    make_trainer,
    optimizer_state,
    random_states,
    rows,
    saved_base,
    tiny_llama,
    weights_of,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import TrainingError
from soupkit.export import export_variant
from soupkit.restore import restore
from soupkit.tracking import SCALAR_NAMES
from soupkit.training import SoupCallback
from soupkit.verify import verify_family

EVERY_2 = SoupConfig(merge_every_n_steps=2, rank=3, gate_batches=2, feed_back=True)
UNGATED = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
SAVE = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base") / "base", dropout=0.1)


def soup_steps(folder):
    return sorted(int(path.stem[-8:]) for path in (folder / "soup").glob("state-*.json"))


def newest_state(folder):
    return json.loads(sorted((folder / "soup").glob("state-*.json"))[-1].read_text())


class StopAt(TrainerCallback):
    """Ends training at a step, as a crash between two steps would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("config", [EVERY_2, UNGATED], ids=["gate", "no gate"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(base, tmp_path, config):
    """TB21, TB23, TB25, TB31, TB44: accumulation 2, a short last window, dropout, 2 epochs."""
    whole = make_trainer(base, tmp_path / "whole", [SoupCallback(config)], **SAVE)
    whole.train()
    for stop in (3, 4, 5):
        folder = tmp_path / f"stop-{stop}"
        make_trainer(base, folder, [SoupCallback(config), StopAt(stop)], **SAVE).train()
        resumed = make_trainer(base, folder, [SoupCallback(config)], **SAVE)
        resumed.train(resume_from_checkpoint=True)
        assert_equal_weights(weights_of(whole.model), weights_of(resumed.model))
        pairs = zip(
            optimizer_state(whole.optimizer), optimizer_state(resumed.optimizer), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)
        assert losses_of(resumed) == losses_of(whole)
        first, second = newest_state(tmp_path / "whole"), newest_state(folder)
        for state in (first, second):
            for merge in state["history"]:
                merge.pop("seconds"), merge.pop("score_seconds")
        assert first == second
        assert [merge["step"] for merge in first["history"]] == [4, 6, 8]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("stop", [6, 8])
@pytest.mark.parametrize(
    "config", [EVERY_2, SoupConfig(merge_every_n_steps=3, method="ema")], ids=["merges", "average"]
)
def test_a_run_that_is_resumed_at_its_end_trains_no_more(base, tmp_path, config, stop, strategy):
    """Step 6 is in the middle of an epoch, where the Trainer trains one step more; 8 is its end."""

    def run():
        export = ExportConfig(family=tmp_path / "family", name="x", encoding="raw")
        settings = {"max_steps": stop, **SAVE, "save_strategy": strategy}
        callbacks = [SoupCallback(config, export=export)]
        return make_trainer(base, tmp_path / "run", callbacks, **settings)

    def left():
        return {
            path: path.read_bytes()
            for path in sorted((tmp_path / "run").glob("*/*"))
            if "runs" not in str(path) and path.suffix in (".safetensors", ".pt", ".json")
        }

    whole = run()
    whole.train()
    before = left()
    for _ in range(2):
        again = run()
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == stop
        assert_equal_weights(weights_of(whole.model), weights_of(again.model))
        assert left() == before
    assert open_variant(tmp_path / "family" / "variants" / "x").manifest.metrics["step"] == stop


@pytest.mark.parametrize("is_adopted", [False, True])
def test_what_a_resumed_run_has_learned_is_no_difference_to_a_named_base(
    base, tmp_path, capfd, is_adopted
):
    folder = tmp_path / "run"
    callbacks = [] if is_adopted else [SoupCallback(EVERY_2, base=base)]
    make_trainer(base, folder, callbacks, max_steps=3, **SAVE).train()
    trainer = make_trainer(base, folder, [SoupCallback(EVERY_2, base=base)], max_steps=4, **SAVE)
    trainer.train(resume_from_checkpoint=True)
    assert "step-0 weights" not in capfd.readouterr().err
    other = tiny_llama(seed=4)
    make_trainer(base, folder, [SoupCallback(EVERY_2, base=base)], model=other, max_steps=1).train()
    assert "the step-0 weights are not those of" in capfd.readouterr().err


def test_resuming_an_older_checkpoint_forgets_what_came_later(base, tmp_path):
    folder = tmp_path / "run"
    first = SoupCallback(EVERY_2)
    make_trainer(base, folder, [first], **SAVE).train()
    assert soup_steps(folder) == [0, 2, 4, 6, 8]
    # A checkpoint at a merge point holds the merged weights: the merge at 4 is not done again.
    again = SoupCallback(EVERY_2)
    trainer = make_trainer(base, folder, [again], max_steps=6, **SAVE)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert [report.step for report in again.reports] == [6]
    old, new = first.reports[1].to_json(), again.reports[0].to_json()
    assert old["metric_merged"] == new["metric_merged"]
    assert soup_steps(folder)[-1] == 6


class Interrupted(TrainerCallback):
    """Ctrl-C before a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_resume_of_the_wrong_checkpoint_can_be_taken_back(base, tmp_path):
    """Later states go when the resumed run writes its own, not when it starts."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    trainer = make_trainer(base, whole, [SoupCallback(UNGATED)], **SAVE)
    trainer.train()
    shutil.copytree(whole, folder)
    for path in folder.glob("checkpoint-[678]"):
        shutil.rmtree(path)
    mistaken = make_trainer(base, folder, [SoupCallback(UNGATED), Interrupted(1)], **SAVE)
    with pytest.raises(KeyboardInterrupt):
        mistaken.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    resumed = make_trainer(base, folder, [SoupCallback(UNGATED)], **SAVE)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    assert_equal_weights(weights_of(trainer.model), weights_of(resumed.model))


def test_a_callback_that_is_added_too_late_says_so(base, tmp_path):
    class Adds(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.add_callback(SoupCallback(EVERY_2))

    trainer = make_trainer(base, tmp_path, [Adds()])
    with pytest.raises(TrainingError, match=r"before trainer\.train"):
        trainer.train()


def test_a_resumed_checkpoint_must_be_the_one_of_the_state(base, tmp_path):
    """TB43: the state remembers which weights it is about."""
    folder, other = tmp_path / "run", tmp_path / "other"
    make_trainer(base, folder, [SoupCallback(EVERY_2)], max_steps=4, **SAVE).train()
    make_trainer(base, other, max_steps=4, learning_rate=1e-3, **SAVE).train()
    shutil.rmtree(folder / "checkpoint-4")
    shutil.copytree(other / "checkpoint-4", folder / "checkpoint-4")
    trainer = make_trainer(base, folder, [SoupCallback(EVERY_2)], **SAVE)
    with pytest.raises(TrainingError, match=r"are not those of .*state-00000004\.json"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))


def test_a_run_whose_merges_are_all_undone_is_the_run_without_soupkit(base, tmp_path):
    """TB26: same data order, dropout, losses, logs and weights."""
    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"}
    plain = make_trainer(base, tmp_path / "plain", **settings)
    plain.train()
    after_plain = random_states()
    config = SoupConfig(merge_every_n_steps=1, rank=3, gate_batches=2, feed_back=False)
    souped = make_trainer(base, tmp_path / "souped", [SoupCallback(config)], **settings)
    souped.train()
    assert random_states() == after_plain
    assert_equal_weights(weights_of(plain.model), weights_of(souped.model))

    def lasting(trainer):
        timed = ("runtime", "per_second")
        return [
            {key: value for key, value in row.items() if not any(t in key for t in timed)}
            for row in trainer.state.log_history
        ]

    assert lasting(plain) == lasting(souped)


class Witness(TrainerCallback):
    """Looks at accelerate's idea of the loader in use when training is about to begin."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.loader_in_use = GradientState().in_dataloader


def test_the_gate_scores_the_first_batches_of_the_evaluation_set(base, tmp_path):
    callback = SoupCallback(EVERY_2)
    held_out = rows(13, seed=2)
    witness = Witness()
    trainer = make_trainer(
        base,
        tmp_path,
        [callback, witness],
        eval_dataset=held_out,
        per_device_eval_batch_size=3,
        max_steps=4,
    )
    trainer.train()
    # The evaluation loader was left after two batches of five, and is signed out all the same.
    assert not witness.loader_in_use
    model = trainer.model.eval()
    ids = torch.tensor([row["input_ids"] for row in held_out[:6]])
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    report = callback.reports[-1]
    live = report.metric_merged if report.accepted else report.metric_current
    assert live == pytest.approx(expected, rel=1e-5)


def test_the_run_never_ends_worse_at_a_merge_than_the_gate_saw(base, tmp_path):
    callback = SoupCallback(
        SoupConfig(merge_every_n_steps=1, rank=6, gate_batches=6, feed_back=True)
    )
    make_trainer(base, tmp_path, [callback], max_steps=16, learning_rate=5e-2).train()
    assert {report.accepted for report in callback.reports} == {True, False}
    for report in callback.reports:
        assert report.accepted == (report.metric_merged <= report.metric_current)


def test_several_evaluation_sets(base, tmp_path):
    sets = {"near": rows(6, seed=2), "far": rows(4, seed=3)}
    for metric in ("eval_loss", "eval_far_loss"):
        config = SoupConfig(
            merge_every_n_steps=2, rank=3, gate_batches=1, metric_for_best=metric, feed_back=True
        )
        callback = SoupCallback(config)
        make_trainer(base, tmp_path / metric, [callback], eval_dataset=sets, max_steps=4).train()
        assert callback.reports[0].metric_current > 0
    config = SoupConfig(metric_for_best="eval_accuracy", feed_back=True)
    trainer = make_trainer(base, tmp_path, [SoupCallback(config)], eval_dataset=sets)
    with pytest.raises(ValueError, match=r"eval_far_loss.*gate=\"none\""):
        trainer.train()


def test_without_a_gate_evaluations_choose_the_partner(base, tmp_path):
    callback = SoupCallback(
        SoupConfig(
            merge_every_n_steps=4, rank=3, gate="none", metric_for_best="eval_loss", feed_back=True
        )
    )
    trainer = make_trainer(
        base, tmp_path, [callback], eval_strategy="steps", eval_steps=1, max_steps=8
    )
    trainer.train()
    scores = {
        row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row
    }
    for report in callback.reports:
        earlier = {step: score for step, score in scores.items() if step < report.step}
        assert report.partner_step == min(earlier, key=earlier.get)
    assert len(callback.reports) == 2


def test_the_run_is_exported_and_the_family_is_sound(base, tmp_path):
    family = tmp_path / "family"
    export = ExportConfig(family=family, name="coder")
    trainer = make_trainer(base, tmp_path / "run", [SoupCallback(EVERY_2, export=export)])
    trainer.train()
    assert verify_family(family) == []
    variant = open_variant(family / "variants" / "coder").load()
    final = weights_of(trainer.model)
    assert torch.equal(variant.raw["model.norm.weight"], final["model.norm.weight"])
    history = variant.manifest.history
    assert [merge["step"] for merge in history] == [4, 6, 8]
    restore(family, "coder", out=tmp_path / "dense")
    logits = load(tmp_path / "dense")(input_ids=torch.arange(5)[None]).logits
    assert torch.isfinite(logits).all()
    # No checkpoint needs an older state.
    assert soup_steps(tmp_path / "run") == [8]
    # Nothing had to be saved as a base: the folder the model came from holds the step-0 weights.
    assert not (tmp_path / "run" / "soup" / "base").exists()


def test_the_run_is_exported_within_a_budget(base, tmp_path):
    export = ExportConfig(tmp_path / "family", "coder", encoding="auto", budget_bytes=10**9)
    make_trainer(base, tmp_path / "run", [SoupCallback(EVERY_2, export=export)]).train()
    manifest = open_variant(tmp_path / "family" / "variants" / "coder").manifest
    # Everything fits, so that everything is whole.
    assert {entry.kind for entry in manifest.tensors} <= {"raw", "same", "tied"}
    assert manifest.budget["budget_bytes"] == 10**9
    assert [merge["step"] for merge in manifest.history] == [4, 6, 8]
    assert verify_family(tmp_path / "family") == []


@pytest.mark.parametrize(("rate", "exported"), [(1e-2, "live weights"), (1.0, "side soup")])
def test_a_side_soup_is_exported_only_if_it_beats_the_end_of_the_run(
    base, tmp_path, capfd, rate, exported
):
    """Between the last merge point and the end of training lies a lot of training. By default the
    model holds what is exported, so it is never worse than a run without soupkit, by the gate.
    """
    plain = make_trainer(base, tmp_path / "plain", learning_rate=rate)
    plain.train()
    config = SoupConfig(merge_every_n_steps=2, stop_after_step=4, rank=3)
    export = ExportConfig(family=tmp_path / "family", name="x", encoding="row-x4")
    trainer = make_trainer(
        base, tmp_path / "run", [SoupCallback(config, export=export)], learning_rate=rate
    )
    trainer.train()
    assert f"the {exported}" in capfd.readouterr().err.splitlines()[-2]
    restore(tmp_path / "family", "x", out=tmp_path / "dense", base=base)
    dense, held = weights_of(load(tmp_path / "dense")), weights_of(trainer.model)
    norm = "model.norm.weight"  # a vector, which is exported without loss
    assert torch.equal(dense[norm], held[norm])
    is_plain = torch.equal(held[norm], weights_of(plain.model)[norm])
    assert is_plain == (exported == "live weights")
    assert trainer.evaluate()["eval_loss"] <= plain.evaluate()["eval_loss"] * (1 + 1e-6)


def test_a_model_without_a_folder_gets_its_step_0_weights_saved(tmp_path):
    model = tiny_llama(seed=4)
    start = weights_of(model)
    family = tmp_path / "family"
    callback = SoupCallback(EVERY_2, export=ExportConfig(family=family, name="x"))
    trainer = make_trainer(tmp_path, tmp_path / "run", [callback], model=model, max_steps=3, **SAVE)
    trainer.train()
    saved = weights_of(load(tmp_path / "run" / "soup" / "base"))
    assert_equal_weights(start, saved)
    # A resumed run keeps that base, whatever the weights in memory are.
    resumed = make_trainer(
        tmp_path, tmp_path / "run", [SoupCallback(EVERY_2)], model=tiny_llama(seed=9), **SAVE
    )
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(start, weights_of(load(tmp_path / "run" / "soup" / "base")))
    assert verify_family(family) == []


def test_the_best_checkpoint_is_loaded_and_exported(base, tmp_path):
    """TB33, TB37: load_best_model_at_end with save_total_limit=1 and early stopping."""
    family = tmp_path / "family"
    config = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
    callback = SoupCallback(config, export=ExportConfig(family=family, name="best"))
    trainer = make_trainer(
        base,
        tmp_path / "run",
        [callback, EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.3,
        max_steps=20,
    )
    trainer.train()
    best = trainer.state.best_global_step
    assert best < trainer.state.global_step < 20
    left = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert left == [f"checkpoint-{best}"]
    variant = open_variant(family / "variants" / "best").load()
    saved = weights_of(load(tmp_path / "run" / left[0]))
    assert torch.equal(variant.raw["model.norm.weight"], saved["model.norm.weight"])
    # The state that belongs to the surviving checkpoint survives as well: it can be resumed.
    resumed = make_trainer(base, tmp_path / "run", [SoupCallback(config)], max_steps=best + 3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / left[0]))
    assert resumed.state.global_step == best + 3


def test_states_follow_the_rotation_of_checkpoints(base, tmp_path):
    """TB33: nothing that a surviving checkpoint needs is deleted, and nothing else is kept."""
    config = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
    trainer = make_trainer(
        base, tmp_path, [SoupCallback(config)], save_total_limit=2, max_steps=9, **SAVE
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-8",
        "checkpoint-9",
    ]
    assert soup_steps(tmp_path) == [8]
    assert [path.name for path in (tmp_path / "soup").glob("partner-*")] == [
        "partner-00000008.safetensors"
    ]


def test_a_checkpoint_made_without_the_callback(base, tmp_path):
    """TB30: with the base named it goes on, with nothing known of the base it is refused."""
    make_trainer(base, tmp_path, max_steps=3, **SAVE).train()
    trainer = make_trainer(base, tmp_path, [SoupCallback(EVERY_2)], **SAVE)
    with pytest.raises(TrainingError, match="base="):
        trainer.train(resume_from_checkpoint=True)
    callback = SoupCallback(EVERY_2, base=base)
    trainer = make_trainer(base, tmp_path, [callback], **SAVE)
    trainer.train(resume_from_checkpoint=True)
    # 4 captures.
    assert [report.step for report in callback.reports] == [6, 8]


@pytest.mark.parametrize("flag", [True, False])
def test_the_frameworks_restore_flag_does_not_matter(base, tmp_path, flag):
    """TB31."""
    settings = {**SAVE, "restore_callback_states_from_checkpoint": flag}
    make_trainer(base, tmp_path, [SoupCallback(EVERY_2), StopAt(3)], **settings).train()
    callback = SoupCallback(EVERY_2)
    make_trainer(base, tmp_path, [callback], **settings).train(resume_from_checkpoint=True)
    assert [report.step for report in callback.reports] == [4, 6, 8]


def test_a_just_in_time_checkpoint_at_a_merge_point_merges_at_resume(base, tmp_path):
    whole = make_trainer(base, tmp_path / "whole", [SoupCallback(EVERY_2)])
    whole.train()

    class Preempt(TrainerCallback):
        """Stands for SIGTERM: requests the checkpoint while step 4 is taken."""

        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 3:
                jit.jit_manager.is_checkpoint_requested = True

    callback = SoupCallback(EVERY_2, export=ExportConfig(family=tmp_path / "family", name="x"))
    folder = tmp_path / "run"
    trainer = make_trainer(base, folder, [callback, Preempt()], enable_jit_checkpoint=True)
    jit = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
    trainer.train()
    assert trainer.state.global_step == 4
    assert callback.reports == []
    assert not (tmp_path / "family").exists()
    resumed = make_trainer(base, folder, [callback])
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert [report.step for report in callback.reports] == [4, 6, 8]
    assert_equal_weights(weights_of(whole.model), weights_of(resumed.model))


def test_scalars_are_written_and_not_doubled_by_a_resume(base, tmp_path):
    make_trainer(base, tmp_path, [SoupCallback(EVERY_2)], max_steps=6, **SAVE).train()
    make_trainer(base, tmp_path, [SoupCallback(EVERY_2)], **SAVE).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-5")
    )
    events = EventAccumulator(str(tmp_path / "runs" / "soup")).Reload()
    assert set(events.Tags()["scalars"]) == set(SCALAR_NAMES)
    for name in SCALAR_NAMES:
        assert [event.step for event in events.Scalars(name)] == [4, 6, 8]


def test_trainers_that_override_the_loss_keep_theirs(base, tmp_path):
    """As TRL's trainers do: the gate's score is the subclass's loss, and its own logs stay
    clean.
    """

    class Derived(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._metrics = {"train": {}, "eval": {"seen": []}}

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if not model.training:
                self._metrics["eval"]["seen"].append(float(loss))
            loss = loss + 100
            return (loss, outputs) if return_outputs else loss

    callback = SoupCallback(EVERY_2)
    trainer = make_trainer(base, tmp_path, [callback], trainer_class=Derived, max_steps=4)
    trainer.train()
    assert callback.reports[0].metric_current > 100
    assert trainer._metrics["eval"]["seen"] == []


def test_everything_is_checked_before_step_1(base, tmp_path):
    """TB61, TB65."""

    def refused(error, match, callbacks, **changes):
        trainer = make_trainer(base, tmp_path / "run", callbacks, **changes)
        with pytest.raises(error, match=match):
            trainer.train()
        assert trainer.state.global_step == 0

    refused(TrainingError, "eval_dataset", [SoupCallback(EVERY_2)], eval_dataset=None)
    refused(TrainingError, "2 SoupCallbacks", [SoupCallback(EVERY_2), SoupCallback(EVERY_2)])
    refused(
        ValueError,
        "greater_is_better",
        [SoupCallback(SoupConfig(greater_is_better=True, feed_back=True))],
    )
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(4, seed=2)]
    refused(TrainingError, "no labels", [SoupCallback(EVERY_2)], eval_dataset=unlabelled)
    other = saved_base(tmp_path / "other", seed=8)
    family = tmp_path / "family"
    export_variant(open_checkpoint(other), open_checkpoint(other), family=family, name="y")
    export = ExportConfig(family=family, name="x")
    refused(TrainingError, "another base", [SoupCallback(EVERY_2, export=export)])
    (tmp_path / "file").write_text("")
    export = ExportConfig(family=tmp_path / "file" / "family", name="x")
    refused(TrainingError, "cannot be written|no folder", [SoupCallback(EVERY_2, export=export)])
    refused(TrainingError, "shape", [SoupCallback(EVERY_2, base=saved_wide(tmp_path))])


def test_a_set_without_labels_is_found_before_step_1_wherever_it_stands(base, tmp_path):
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows(4, seed=2)]
    sets = {"a": rows(4, seed=2), "b": unlabelled}
    trainer = make_trainer(base, tmp_path, [SoupCallback(EVERY_2)], eval_dataset=sets)
    with pytest.raises(TrainingError, match="no labels"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("refused", ["family", "base"])
def test_a_start_that_is_refused_deletes_nothing_of_the_run_before(base, tmp_path, refused):
    """A second train() goes on from other weights, which fit neither the family nor that base."""
    family = ExportConfig(family=tmp_path / "family", name="x")
    trainer = make_trainer(base, tmp_path / "run", [SoupCallback(EVERY_2, export=family)], **SAVE)
    trainer.train()
    soup = tmp_path / "run" / "soup"
    kept = {path.name: path.read_bytes() for path in soup.glob("*.*")}
    if refused == "base":
        callback = SoupCallback(EVERY_2, base=saved_wide(tmp_path))
        trainer = make_trainer(base, tmp_path / "run", [callback], **SAVE)
    with pytest.raises(TrainingError, match=r"another base|has shape"):
        trainer.train()
    found = {path.name: path.read_bytes() for path in soup.glob("*.*") if path.is_file()}
    assert kept.items() <= found.items()
    assert not (soup / "base").exists()
    again = SoupCallback(EVERY_2)
    make_trainer(base, tmp_path / "run", [again], **SAVE, max_steps=10).train(
        resume_from_checkpoint=True
    )
    assert [(report.step, report.partner_step) for report in again.reports] == [(10, 8)]


def saved_wide(tmp_path):
    model = tiny_llama()
    model.resize_token_embeddings(29)
    model.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def test_the_trainer_is_found_or_attached(base, tmp_path):
    callback = SoupCallback(EVERY_2)
    with pytest.raises(TrainingError, match="attach"):
        callback.on_train_begin(None, None, None)
    trainer = make_trainer(base, tmp_path, [callback], max_steps=4)
    assert callback.attach(trainer) is callback
    trainer.train()
    assert len(callback.reports) == 1


@pytest.mark.parametrize(("every", "says"), [(8, True), (5, True), (4, False)])
def test_a_run_too_short_to_merge_is_told_so_at_once(base, tmp_path, capfd, every, says):
    make_trainer(
        base, tmp_path, [SoupCallback(SoupConfig(merge_every_n_steps=every, feed_back=True))]
    ).train()
    assert ("nothing will be merged" in capfd.readouterr().err) is says


def test_a_resumed_run_that_has_nothing_left_to_train_exports_without_advice(base, tmp_path, capfd):
    """No steps are left or taken: how recipes/trainer_sft.py repeats an export that failed."""
    make_trainer(base, tmp_path / "run", [SoupCallback(UNGATED)], **SAVE).train()
    trained = weights_of(load(tmp_path / "run" / "checkpoint-8"))
    capfd.readouterr()
    export = ExportConfig(family=tmp_path / "family", name="again", encoding="raw")
    again = make_trainer(
        base, tmp_path / "run", [SoupCallback(UNGATED, export=export)], max_steps=-1,
        num_train_epochs=0, **SAVE,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))
    assert "nothing will be merged" not in capfd.readouterr().err
    restore(tmp_path / "family", "again", out=tmp_path / "dense")
    assert_equal_weights(weights_of(load(tmp_path / "dense")), trained)


def test_a_metric_that_no_evaluation_gives_is_named_once(base, tmp_path, capfd):
    config = SoupConfig(
        merge_every_n_steps=2, gate="none", metric_for_best="eval_acuracy", feed_back=True
    )
    settings = {"eval_strategy": "steps", "eval_steps": 1}
    make_trainer(base, tmp_path, [SoupCallback(config)], **settings).train()
    said = capfd.readouterr().err
    assert said.count("eval_acuracy") == 1
    assert "eval_loss" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"merge_every_n_steps": 5, "gate": "none"}, ": 1 of this run's 8 "),
        ({"merge_every_n_steps": 2, "start_after_step": 20}, ": none of this run's 8 .* lower it"),
    ],
)
def test_the_line_for_a_run_too_short_says_why(base, tmp_path, capfd, settings, says):
    make_trainer(base, tmp_path, [SoupCallback(SoupConfig(**settings))]).train()
    assert re.search("nothing will be merged" + says, capfd.readouterr().err)


class Shrinking(TrainerCallback):
    """A user's own constraint on the weights, after soupkit has seen them."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)


@pytest.mark.parametrize("method", ["mean", "ema"])
@pytest.mark.parametrize("at", [3, 4])
def test_a_checkpoint_whose_weights_a_later_callback_changed_resumes(base, tmp_path, method, at):
    def trained(steps, **kwargs):
        config = SoupConfig(merge_every_n_steps=2, method=method, gate="none", load_at_end=False)
        callbacks = [SoupCallback(config), Shrinking()]
        trainer = make_trainer(
            base, tmp_path, callbacks, max_steps=steps, save_strategy="steps", save_steps=1
        )
        trainer.train(**kwargs)
        return weights_of(trainer.model)

    whole = trained(6)
    assert_equal_weights(
        whole, trained(6, resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    )
