"""Faults of the field that need no ranks: rows of the design's faults page, parts A to E."""

import signal

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from soup_runs import (
    AccelerateLoop,
    assert_equal_weights,
    load,
    make_trainer,
    rows,
    saved_base,
    weights_of,
)
from torch import nn
from transformers import BertConfig, BertForMaskedLM, EarlyStoppingCallback, TrainerCallback

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.errors import TrainingError
from soupkit.restore import restore
from soupkit.training import Soup, SoupCallback
from soupkit.verify import verify_family

UNGATED = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
SAVE = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def fresh_accelerate():
    """Accelerate's state is one for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def nudge(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.01)


# A. Sharded parameters


class CannotBeCopied(nn.Linear):
    """As a module under FSDP2, whose deepcopy is an AssertionError."""

    def __deepcopy__(self, memo):
        raise AssertionError("FSDP does not support deepcopy")


@pytest.mark.parametrize("method", ["svd_mean", "ema"])
@pytest.mark.parametrize("undo", ["disk", "memory"])
def test_a_model_that_cannot_be_copied(tmp_path, method, undo):
    """TB08: capture, merge, undo, average and export take weights one by one."""
    model = nn.Sequential(CannotBeCopied(5, 4), nn.ReLU(), CannotBeCopied(4, 3))
    scores = iter([3.0, 2.0, 1.0, 2.0, 3.0, *[1.0] * 10])
    config = SoupConfig(
        merge_every_n_steps=1,
        method=method,
        rank=2 if method == "svd_mean" else None,
        undo=undo,
        feed_back=method != "ema",
    )
    soup = Soup(model, config=config, evaluate=lambda: next(scores), output_dir=tmp_path)
    for _ in range(3):
        nudge(model)
        soup.step()
    assert {report.accepted for report in soup.reports} == {True, False}
    soup.finish(export=ExportConfig(family=tmp_path / "family", name="x"))
    assert verify_family(tmp_path / "family") == []


def test_the_callback_leaves_optimizer_and_scheduler_alone(base, tmp_path):
    """TB18: it may be built before anything else, and is given its parts when training begins."""
    callback = SoupCallback(UNGATED)
    seen = {}

    class After(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **kwargs):
            inner = optimizer.optimizer
            seen["kind"] = type(inner)
            seen["hooks"] = len(inner._optimizer_step_pre_hooks)
            seen["hooks"] += len(inner._optimizer_step_post_hooks)
            seen["state"] = len(inner.state)
            seen["last"] = lr_scheduler.last_epoch

    trainer = make_trainer(base, tmp_path, [callback, After()], max_steps=4)
    assert callback._run is None
    assert trainer.optimizer is None
    trainer.train()
    assert seen == {"kind": torch.optim.AdamW, "hooks": 0, "state": 0, "last": 0}
    assert trainer.lr_scheduler.last_epoch == 4
    assert [report.step for report in callback.reports] == [4]


# B. Checkpoint, resume, rotation


def trained_loop(tmp_path, evaluate):
    """A model captured at step 1; the next step merges."""
    model = nn.Linear(5, 4)
    config = SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True)
    soup = Soup(model, config=config, evaluate=evaluate, output_dir=tmp_path)
    nudge(model)
    soup.step()
    nudge(model)
    return model, soup


@pytest.mark.parametrize("handling", ["notes it", "raises"])
def test_sigterm_in_the_middle_of_a_merge(tmp_path, handling):
    """TB39: a handler that notes it finds the merge done; one that raises, the old weights."""
    noted, calls = [], []

    def handler(number, frame):
        noted.append(number)
        if handling == "raises":
            raise SystemExit(128 + number)

    def evaluate():
        calls.append(1)
        # The third scoring is of merged weights, which stand in the model.
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    model, soup = trained_loop(tmp_path, evaluate)
    before = weights_of(model)
    former = signal.signal(signal.SIGTERM, handler)
    try:
        if handling == "raises":
            with pytest.raises(SystemExit):
                soup.step()
        else:
            assert soup.step().accepted
    finally:
        signal.signal(signal.SIGTERM, former)
    assert noted == [signal.SIGTERM]
    newest = sorted((tmp_path / "soup").glob("state-*.json"))[-1].name
    if handling == "raises":
        assert_equal_weights(before, weights_of(model))
        assert newest == "state-00000001.json"
    else:
        assert not torch.equal(before["weight"], model.weight)
        assert newest == "state-00000002.json"


def test_epochs_with_best_model_rotation_and_early_stopping(base, tmp_path):
    """TB33, TB37: a short last window, two evaluation sets, a gate, and the best is exported."""
    sets = {"near": rows(6, seed=2), "far": rows(4, seed=3)}
    config = SoupConfig(merge_every_n_steps=3, rank=3, gate_batches=1, feed_back=True)
    callback = SoupCallback(config, export=ExportConfig(family=tmp_path / "family", name="best"))
    trainer = make_trainer(
        base,
        tmp_path / "run",
        [callback, EarlyStoppingCallback(early_stopping_patience=2)],
        eval_dataset=sets,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_far_loss",
        learning_rate=0.3,
        max_steps=-1,
        num_train_epochs=12,
    )
    trainer.train()
    # 7 batches, accumulation 2: four steps an epoch, the last of one batch.
    assert trainer.state.max_steps == 48
    best, end = trainer.state.best_global_step, trainer.state.global_step
    assert best % 4 == end % 4 == 0
    assert best < end < 48
    assert [report.step for report in callback.reports] == list(range(6, end + 1, 3))
    left = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert f"checkpoint-{best}" in left
    variant = open_variant(tmp_path / "family" / "variants" / "best").load()
    saved = weights_of(load(tmp_path / "run" / f"checkpoint-{best}"))
    name = "model.norm.weight"
    assert torch.equal(variant.raw[name], saved[name])
    assert_equal_weights(saved, weights_of(trainer.model))
    resumed = make_trainer(base, tmp_path / "run", [SoupCallback(config)], max_steps=best + 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{best}"))
    assert resumed.state.global_step == best + 4


@pytest.mark.parametrize("method", ["svd_mean", "ema"])
def test_metric_file_and_run_of_a_step_are_about_the_same_weights(base, tmp_path, method):
    """TB21, TB22, TB24: whatever is merged or averaged at a step that is evaluated and saved."""
    config = SoupConfig(
        merge_every_n_steps=2, method=method, gate_batches=2, feed_back=method != "ema"
    )
    live = {}

    class Last(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            live[state.global_step] = weights_of(model)

    settings = {"eval_strategy": "steps", "eval_steps": 1, **SAVE, "max_steps": 5}
    trainer = make_trainer(base, tmp_path, [SoupCallback(config), Last()], **settings)
    trainer.train()
    told = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    assert sorted(told) == [1, 2, 3, 4, 5]
    for step, loss in told.items():
        saved = load(tmp_path / f"checkpoint-{step}")
        assert_equal_weights(live[step], weights_of(saved))
        found = make_trainer(base, tmp_path / "again", model=saved).evaluate()
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("method", ["svd_mean", "ema"])
def test_checkpoints_of_the_best_steps_only(base, tmp_path, method):
    """TB33: which steps are saved is known after their evaluation, when the merge is done."""
    config = SoupConfig(
        merge_every_n_steps=2, method=method, gate="none", feed_back=method != "ema"
    )
    settings = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "save_total_limit": 2,
    }
    whole = make_trainer(base, tmp_path / "whole", [SoupCallback(config)], **settings)
    whole.train()
    stopped = make_trainer(base, tmp_path / "run", [SoupCallback(config)], max_steps=5, **settings)
    stopped.train()
    left = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert left
    resumed = make_trainer(base, tmp_path / "run", [SoupCallback(config)], **settings)
    resumed.train(resume_from_checkpoint=str(left[-1]))
    assert_equal_weights(weights_of(whole.model), weights_of(resumed.model))


def test_evaluations_that_are_not_finite_choose_no_partner(base, tmp_path, capfd):
    """TB28: nothing is merged with weights of which nothing is known."""
    values = iter([0.5, float("nan"), 0.4, float("inf"), 0.9, float("nan"), 0.8, 0.7])
    config = SoupConfig(
        merge_every_n_steps=4, rank=3, gate="none", metric_for_best="eval_mine", feed_back=True
    )
    callback = SoupCallback(config)
    trainer = make_trainer(
        base,
        tmp_path,
        [callback],
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.compute_metrics = lambda prediction: {"mine": next(values)}
    trainer.train()
    assert [(report.step, report.partner_step) for report in callback.reports] == [(4, 3), (8, 3)]
    assert "eval_mine is nan, not used" in capfd.readouterr().err


def test_weights_whose_first_score_is_not_finite_are_not_captured(tmp_path, capfd):
    """TB28: two comparable points are needed before anything is merged."""
    scores = iter([float("nan"), 2.0, 1.0, 0.5])
    model = nn.Linear(5, 4)
    config = SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True)
    soup = Soup(model, config=config, evaluate=lambda: next(scores), output_dir=tmp_path)
    found = []
    for _ in range(3):
        nudge(model)
        found.append(soup.step())
    assert found[:2] == [None, None]
    assert (found[2].partner_step, found[2].accepted) == (2, True)
    assert "these weights are not captured" in capfd.readouterr().err


# C. Counting


def test_steps_that_a_loss_scaler_skips_do_not_count(base, tmp_path, monkeypatch, fresh_accelerate):
    """TB44: an overflow under Accelerate leaves the weights, so it is no optimizer step."""
    build = Accelerator.__init__

    def with_scaler(self, **kwargs):
        build(self, **kwargs)
        # As mixed_precision="fp16" does, which Accelerate leaves out on a CPU.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    loop = AccelerateLoop(base, tmp_path, UNGATED)
    counted, moved = [], []
    overflows = {2, 3, 6}
    batches = [batch for _ in range(2) for batch in loop.train_loader][:16]
    for index in range(0, 16, 2):
        before = weights_of(loop.inner)
        for batch in batches[index : index + 2]:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.gradient_state._set_sync_gradients(batch is batches[index + 1])
                loss = loop.model(input_ids=batch, labels=batch).loss
                loop.accelerator.backward(loss * float("inf") if index // 2 in overflows else loss)
                loop.optimizer.step()
                loop.soup.step()
                loop.optimizer.zero_grad()
        counted.append(loop.soup.num_steps)
        moved.append(any(not torch.equal(v, before[n]) for n, v in weights_of(loop.inner).items()))
    assert counted == [1, 2, 2, 2, 3, 4, 4, 5]
    assert [number for number, has_moved in enumerate(moved) if not has_moved] == sorted(overflows)
    assert [report.step for report in loop.soup.reports] == [4]


class DeepSpeedEngine(nn.Module):
    """Counts as DeepSpeed's engine of that name does under fp16, which needs a GPU."""

    has_moe_layers = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.global_steps = self.skipped_steps = 0

    def zero_optimization_stage(self) -> int:
        return 0

    def step(self, *, overflows: bool = False) -> None:
        self.global_steps += 1
        self.skipped_steps += overflows
        if not overflows:
            nudge(self.module)


def test_steps_that_an_engine_skips_do_not_count(tmp_path):
    """TB44: DeepSpeed counts a skipped step among its global ones."""
    engine = DeepSpeedEngine(nn.Linear(5, 4))
    soup = Soup(engine, config=UNGATED, output_dir=tmp_path)
    counted = []
    for overflows in (True, False, False, True, True, False, False):
        engine.step(overflows=overflows)
        soup.step()
        counted.append(soup.num_steps)
    assert counted == [0, 1, 2, 2, 2, 3, 4]
    assert [report.step for report in soup.reports] == [4]
    engine.step()
    engine.step()
    with pytest.raises(TrainingError, match=r"after every engine\.step"):
        soup.step()


# D. Tied weights, architectures


def tiny_bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=31,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=9,
    )
    return BertForMaskedLM(config)


def test_an_encoder_with_tied_weight_and_bias(tmp_path):
    """TB58, TB69: no table of architectures; BERT ties its decoder's weight and bias."""
    model = tiny_bert()
    soup = Soup(model, config=UNGATED, output_dir=tmp_path)
    for _ in range(4):
        nudge(model)
        soup.step()
    (report,) = soup.reports
    assert report.accepted
    names = [matrix.name for matrix in report.matrices]
    assert len(names) == len(set(names))
    assert "bert.embeddings.word_embeddings.weight" in names
    assert not [name for name in names if name.startswith("cls.predictions.decoder")]
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    soup.finish(export=ExportConfig(family=tmp_path / "family", name="bert", encoding="row-x4"))
    assert verify_family(tmp_path / "family") == []
    restore(tmp_path / "family", "bert", out=tmp_path / "dense")
    again = BertForMaskedLM.from_pretrained(tmp_path / "dense").eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted, start, found = (m.eval()(ids).logits for m in (model, tiny_bert(), again))
    assert (found - wanted).norm() < 0.35 * (start - wanted).norm()
