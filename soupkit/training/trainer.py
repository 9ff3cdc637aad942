"""SoupCallback: merges inside Hugging Face's Trainer, and in every trainer that derives from it.

It acts at on_step_end only: there the metric, the file and the live weights of a step are about the
same weights (a merge in on_evaluate or on_save makes them disagree), no autograd graph is alive and
the optimizer step is done. Its state lies in <output_dir>/soup and depends on no flag of the
framework.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from soupkit.checkpoint import Checkpoint
from soupkit.config import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.tracking import say
from soupkit.training.checkpoint_tensors import checkpoint_tensors
from soupkit.training.ema_run import EmaRun
from soupkit.training.final import Final
from soupkit.training.finish import check_export, finish_run
from soupkit.training.gate import EvaluationLoss
from soupkit.training.report import MergeReport
from soupkit.training.soup import SoupRun
from soupkit.training.start import Preparation
from soupkit.training.undo import SetAside

_EVALUATIONS_BEFORE_ADVICE = 5
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def find_trainer(callback: TrainerCallback) -> Trainer:
    """The Trainer that is calling `callback`, found among the callers' frames.

    Trainer hands callbacks its parts but not itself, and the gate needs its own loss and loader.
    Its event methods run below `Trainer.train`, whose frames hold it as `self`.

    Raises:
        TrainingError: no caller is a Trainer that holds this callback.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
        frame = frame.f_back
    raise TrainingError(
        f"{type(callback).__name__} does not find the Trainer that calls it; call "
        "callback.attach(trainer) before trainer.train()"
    )


def is_preempted(args: Any, state: Any, control: Any) -> bool:
    """Whether the process is about to be taken away at this step, its checkpoint written."""
    is_last = state.global_step >= state.max_steps
    is_asked = getattr(args, "enable_jit_checkpoint", False) and control.should_training_stop
    return bool(is_asked and not is_last)


class SoupCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Merges a run with its best previous weights every N steps, and exports it at the end."""

    def __init__(
        self,
        config: SoupConfig | None = None,
        *,
        export: ExportConfig | None = None,
        base: str | Path | None = None,
    ) -> None:
        """Nothing happens before training begins.

        Args:
            config: when and how to merge; SoupConfig() unless given.
            export: the variant that is written when training ends; None: none.
            base: folder or hub id of the model that deltas are taken against. Default: what the
                model was loaded from, if its weights are those of step 0; else the step-0 weights,
                saved to <output_dir>/soup/base.
        """
        self.config = config or SoupConfig()
        self.export = export
        self.base = base
        self.reports: list[MergeReport] = []
        # What else a run leaves of the weights that it ends with, of callbacks beside this one.
        self.at_end: list[Callable[[Final], None]] = []
        self._attached: Trainer | None = None
        self._run: SoupRun | EmaRun | None = None
        self._companions: Callable[[Path], None] = _no_companions
        self._is_preempted = False
        self._ended: SetAside | None = None
        self._evaluations = 0
        self._has_seen_metric = False

    def attach(self, trainer: Trainer) -> SoupCallback:
        """Name the Trainer, where it cannot be found by itself. Returns the callback."""
        self._attached = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check everything, then start afresh or resume at `state.global_step`. Collective.

        Raises:
            TrainingError, ValueError: this run cannot be souped or exported; nothing was trained
                yet.
        """
        trainer = self._attached or find_trainer(self)
        _refuse_trainer(trainer, self.config)
        self.reports = []
        self._is_preempted = False
        self._evaluations, self._has_seen_metric = 0, False
        self._companions = _companions_of(kwargs.get("processing_class"))
        step, output_dir = int(state.global_step), Path(args.output_dir)
        preparation = Preparation(
            trainer.model_wrapped,
            self.config,
            output_dir=output_dir,
            base=self.base,
            save_companions=self._companions,
        )
        logdir = os.environ.get("TENSORBOARD_LOGGING_DIR")
        run = preparation.start(
            step,
            evaluate=self._gate(trainer, preparation),
            optimizer=kwargs.get("optimizer"),
            logdir=Path(logdir) if logdir else output_dir / "runs",
            checkpoint_steps=lambda: checkpoint_steps(output_dir),
            metric_name=self.config.metric_for_best,
            check=self._export_check(trainer),
        )
        self._run = run
        has_steps_left = state.max_steps > step
        advice = _advice(self.config, int(state.max_steps)) if has_steps_left else None
        if run.ranks.is_zero and advice:
            say(advice)
        if step > 0 and run.is_due(step) and run.state.step < step:
            # The checkpoint was written at a merge point before the merge (just-in-time checkpoints
            # do so).
            self._merge_at(step)
        # Resumed where nothing is left to train, in the middle of an epoch, the Trainer trains one
        # step more, which the run that was not interrupted has not seen.
        self._ended = None if has_steps_left else run.journal.set_aside()

    def _export_check(self, trainer: Trainer) -> Callable[[Checkpoint | None], None]:
        export = self.export
        if export is None:
            return lambda base: None
        # An adapter on a quantised model is refused here, on every rank.
        tensors = checkpoint_tensors(trainer.model_wrapped)
        return lambda base: check_export(export, base, tensors)

    def _gate(self, trainer: Trainer, preparation: Preparation) -> EvaluationLoss | None:
        if self.config.gate == "none":
            return None
        return EvaluationLoss(
            trainer,
            ranks=preparation.ranks,
            devices=preparation.store.devices,
            num_batches=self.config.gate_batches,
            metric=self.config.metric_for_best,
            seed=self.config.seed,
        )

    def _merge_at(self, step: int) -> None:
        if self._run is None:
            raise TrainingError(
                "SoupCallback was added to a run that had begun: add it before trainer.train()"
            )
        report = self._run.at_step(step)
        if report is not None:
            self.reports.append(report)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge, if this optimizer step is a merge point. Collective."""
        if self._ended is not None and self._run is not None:
            ended, store = self._ended, self._run.store
            self._run.ranks.on_each(lambda: ended.restore(store))
            state.global_step -= 1
            control.should_save = control.should_evaluate = control.should_log = False
            return
        if is_preempted(args, state, control):
            # A merge now would not be in the checkpoint.
            self._is_preempted = True
            if self._run is not None:
                self._run.at_preemption(int(state.global_step))
            return
        self._merge_at(int(state.global_step))
        if control.should_save:
            self._before_checkpoint(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make ready for a checkpoint, if one follows. Collective."""
        if self._ended is not None:
            # It has its checkpoint, and the optimizer is one step further.
            control.should_save = control.should_evaluate = False
        if control.should_save:
            self._before_checkpoint(state)

    def _before_checkpoint(self, state: Any) -> None:
        # Before the Trainer's own is complete: none may be without what belongs to it.
        if self._run is not None:
            self._run.before_checkpoint(int(state.global_step))

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """With gate "none": let the metric choose the partner. Collective."""
        value = (metrics or {}).get(self.config.metric_for_best)
        self._note_missing(metrics or {})
        if self._run is not None and value is not None:
            self._run.on_metric(int(state.global_step), float(value))
        if args.save_strategy == "best":
            self._before_checkpoint(state)

    def _note_missing(self, metrics: dict[str, float]) -> None:
        """Say once that evaluations do not give the metric that is to choose the partner."""
        name, run = self.config.metric_for_best, self._run
        is_asked = self.config.gate == "none" and self.config.feed_back
        if self._has_seen_metric or run is None or not is_asked:
            return
        # With several evaluation sets each comes with an event of its own.
        self._evaluations += 1
        self._has_seen_metric = name in metrics
        if not self._has_seen_metric and self._evaluations == _EVALUATIONS_BEFORE_ADVICE:
            if run.ranks.is_zero:
                say(
                    f"no evaluation gave metric_for_best={name!r}, so the last merge point is the "
                    f"partner; the last one gave {', '.join(sorted(metrics))}"
                )
            self._has_seen_metric = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the checkpoint holds, forget what rotated ones held. Collective."""
        self._before_checkpoint(state)
        if (run := self._run) is not None:
            run.journal.mark_changed(int(state.global_step), run.state)
            run.journal.clean()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Export the weights that the run ends with. Collective."""
        run = self._run
        if run is None:
            return
        try:
            if self._ended is not None:
                self._ended = None
                run.journal.clean()
            if not self._is_preempted:
                finish_run(
                    run,
                    self.export,
                    step=int(state.global_step),
                    save_companions=self._companions,
                    first=self.at_end,
                )
            elif self.export is not None and run.ranks.is_zero:
                say(f"stopped at step {state.global_step} to be resumed; nothing is exported yet")
        finally:
            run.close()
            self._run = None


def _advice(config: SoupConfig, max_steps: int) -> str | None:
    """A line for a run that is too short for what it is to do; None if it is not."""
    last = max_steps if config.stop_after_step is None else min(max_steps, config.stop_after_step)
    every = config.merge_every_n_steps
    points = max(last // every - config.start_after_step // every, 0)
    # The first only captures; where metrics choose the partner, an evaluation may have before.
    has_captured = config.gate == "none" and config.feed_back
    if config.method == "ema" or points >= 2 or (points == 1 and has_captured):
        return None
    if points == 0 and config.start_after_step > 0:
        return (
            f"nothing will be merged: none of this run's {max_steps} steps is a merge point after "
            f"start_after_step={config.start_after_step}; lower it, or merge_every_n_steps={every}"
        )
    return (
        f"nothing will be merged: {points} of this run's {max_steps} steps are merge points, and "
        f"the first only captures; set merge_every_n_steps={every} to a third of the steps or less"
    )


def checkpoint_steps(output_dir: Path) -> list[int]:
    """Steps of the Trainer checkpoints that exist in `output_dir`."""
    found = (_CHECKPOINT.fullmatch(path.name) for path in output_dir.glob("checkpoint-*"))
    return [int(match[1]) for match in found if match]


def _refuse_trainer(trainer: Trainer, config: SoupConfig) -> None:
    others = [c for c in trainer.callback_handler.callbacks if isinstance(c, SoupCallback)]
    if len(others) > 1:
        raise TrainingError(
            f"the Trainer has {len(others)} SoupCallbacks, which would merge and write over each "
            "other: keep one"
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        raise TrainingError(
            "this run uses FSDP on XLA, whose sharded weights are not merged; use FSDP2 on GPUs, "
            "or train without SoupCallback"
        )
    if config.gate == "metric" and config.greater_is_better:
        raise ValueError(
            'greater_is_better=True with gate="metric": SoupCallback scores a loss, where less '
            'is better; set it to False, or use SoupConfig(gate="none")'
        )


def _companions_of(processing_class: Any) -> Callable[[Path], None]:
    if processing_class is None or not hasattr(processing_class, "save_pretrained"):
        return _no_companions
    return lambda folder: processing_class.save_pretrained(str(folder)) and None


def _no_companions(folder: Path) -> None:
    """For runs without a tokenizer."""
