"""Soup: merges in a loop of one's own: plain PyTorch, Accelerate, or a DeepSpeed engine.

    soup = Soup(model, optimizer=optimizer, base="path-or-hub-id", evaluate=held_out_loss)
    for batch in loader:
        ...                          # forward, backward, optimizer step
        soup.step()
    soup.finish(export=ExportConfig(family="family", name="coder"))

A DeepSpeed engine is given as the model; soup.step() follows engine.step().

With an accelerator, save_state and load_state carry the step in a small file of our own beside
theirs (an object registered for checkpointing would make older checkpoints unreadable). Other loops
call save and load, or resume.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn

from soupkit.config import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.export import ExportReport
from soupkit.files import atomic_write_json, read_json
from soupkit.training.ema_run import EmaRun
from soupkit.training.finish import finish_run
from soupkit.training.moments import has_stepped
from soupkit.training.report import MergeReport
from soupkit.training.scoring import Evaluate
from soupkit.training.soup import SoupRun
from soupkit.training.start import Preparation
from soupkit.training.zero import is_engine

MARK_NAME = "soupkit.json"
_SCHEMA = 1


class Soup:
    """Merges a run with its best previous weights every N optimizer steps; all is collective."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any = None,
        base: str | Path | None = None,
        config: SoupConfig | None = None,
        accelerator: Any = None,
        evaluate: Evaluate | None = None,
        output_dir: str | Path | None = None,
        processing_class: Any = None,
    ) -> None:
        """Build it before the first step and before a checkpoint is loaded, from step-0 weights.

        Args:
            model: as it is trained, prepared and wrapped or not.
            optimizer: needed by optimizer_state="reset"; also tells a run that has begun from one
                that has not.
            base: folder or hub id that deltas are taken against. Default: what the model was loaded
                from, if its weights are the same; else the present weights, saved to
                <output_dir>/soup/base.
            config: SoupConfig() unless given.
            accelerator: an accelerate.Accelerator, whose save_state and load_state then carry the
                step.
            evaluate: score of the live weights on held-out data, called in eval mode without
                gradients on every rank, which scores its own share; the mean over ranks counts. A
                list of the batches' scores, in the same order each time, also tells how much of a
                difference may be chance when the run ends. Needed by gate="metric".
            output_dir: its folder `soup` holds the state. Default: accelerator.project_dir, else
                ".".
            processing_class: a tokenizer to store with the base and the variant.

        Raises:
            ValueError: the arguments do not fit the config.
            TrainingError: the model cannot be merged (named with the remedy).
        """
        self.config = config or SoupConfig()
        if optimizer is None and is_engine(model):
            optimizer = getattr(model, "optimizer", None)
        _check_arguments(self.config, optimizer, evaluate)
        project_dir = getattr(accelerator, "project_dir", None)
        self.num_steps = 0
        self.reports: list[MergeReport] = []
        self._output_dir = Path(output_dir or project_dir or ".")
        self._processing_class = processing_class
        self._accelerator = accelerator
        self._evaluate = evaluate
        self._optimizer = optimizer
        self._engine = model if is_engine(model) else None
        self._engine_steps = self._steps_of_engine()
        self._run: SoupRun | EmaRun | None = None
        self._unmarked: str | None = None
        self._rewound_to: int | None = None
        self._is_finished = False
        # DeepSpeed's optimizers take an empty step when they are built.
        has_begun = self._engine_steps > 0 if self._engine else has_stepped(optimizer)
        self._has_begun = base is None and has_begun
        self._preparation = Preparation(
            model,
            self.config,
            output_dir=self._output_dir,
            base=base,
            save_companions=self._save_companions,
        )
        if not self._has_begun:
            self._preparation.find_base()
        self._hooks: list[Any] = []
        if accelerator is not None:
            self._hooks = [
                accelerator.register_save_state_pre_hook(self._on_save_state),
                accelerator.register_load_state_pre_hook(self._on_load_state),
            ]

    def step(self, metric: float | None = None) -> MergeReport | None:
        """Count an optimizer step and merge if it is a merge point; call it after optimizer.step().

        With an accelerator or a DeepSpeed engine, calls inside a gradient accumulation and after a
        skipped fp16 step do not count.

        Args:
            metric: with gate="none", your score of the live weights, if you have one; the best is
                the partner.

        Returns:
            The report if weights were merged, accepted or not; else None.
        """
        if metric is not None and self.config.gate == "metric":
            raise ValueError(
                'metric= is for gate="none"; with gate="metric" evaluate= scores the weights'
            )
        if metric is not None and not self.config.feed_back:
            raise ValueError(
                'metric= has no use with gate="none" and feed_back=False: the side soup is always '
                "the last merge; leave metric= out, or pass SoupConfig(feed_back=True)"
            )
        if not self._has_stepped_now():
            return None
        run = self._begun()
        self.num_steps += 1
        report = run.at_step(self.num_steps, metric)
        if report is not None:
            self.reports.append(report)
        return report

    def _has_stepped_now(self) -> bool:
        """Whether the optimizer took a step since the last call."""
        accelerator = self._accelerator
        if accelerator is not None:
            return accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
        if self._engine is None:
            return True
        before, self._engine_steps = self._engine_steps, self._steps_of_engine()
        if self._engine_steps - before > 1:
            raise TrainingError(
                f"the DeepSpeed engine went from step {before} to {self._engine_steps} between two "
                "calls of soup.step(): call it after every engine.step(), and after "
                "engine.load_checkpoint() call soup.load(folder) or soup.resume(step)"
            )
        return self._engine_steps > before

    def _steps_of_engine(self) -> int:
        """Optimizer steps that the engine has taken, skipped ones left out; 0 without one."""
        engine: Any = self._engine
        return 0 if engine is None else int(engine.global_steps) - int(engine.skipped_steps)

    def resume(self, step: int) -> None:
        """Go on after optimizer step `step`, whose weights the model holds; call it before step().

        Raises:
            TrainingError: training went on already, or state and weights do not belong together.
        """
        if self._run is not None:
            raise TrainingError(
                f"soup has counted to step {self.num_steps} already: resume before the first step()"
            )
        self._unmarked = None
        self._run = self._start(step, check_weights=True)
        self.num_steps = step
        self._engine_steps = self._steps_of_engine()

    def save(self, folder: str | Path) -> None:
        """Leave the step in `folder`, beside a checkpoint of yours, so that its state is kept."""
        run = self._begun()
        target = Path(folder).absolute()

        def write() -> None:
            target.mkdir(parents=True, exist_ok=True)
            atomic_write_json(target / MARK_NAME, {"schema": _SCHEMA, "step": self.num_steps})
            known = {*self._checkpoints(), str(target)}
            atomic_write_json(self._list_path, sorted(known))

        run.before_checkpoint(self.num_steps)
        run.ranks.on_zero(write)
        run.journal.clean()

    def load(self, folder: str | Path) -> None:
        """Resume at the step that save left in `folder`, whose weights the model holds now."""
        self.resume(_read_mark(Path(folder)))

    def finish(self, export: ExportConfig | None = None) -> ExportReport | None:
        """End the run, and export the weights it ends with if asked to. The last call.

        Returns:
            The report of the export, or None.
        """
        # A checkpoint that was loaded last, the best say, is what the run ends with.
        loaded_at_end = self._run if self._rewound_to is not None else None
        run = loaded_at_end or self._begun()
        try:
            return finish_run(
                run, export, step=self.num_steps, save_companions=self._save_companions
            )
        finally:
            run.close()
            self._is_finished = True
            for hook in self._hooks:
                hook.remove()

    def _begun(self) -> SoupRun | EmaRun:
        if self._is_finished:
            raise TrainingError("soup.finish() was called: build another Soup to go on")
        if self._unmarked is not None:
            raise TrainingError(
                f"the checkpoint {self._unmarked} was made without soupkit, so its step is not "
                "known: call soup.resume(step) after load_state"
            )
        if self._rewound_to is not None:
            self._run = self._rewind(self._rewound_to)
        elif self._run is None:
            if self._has_begun:
                raise TrainingError(
                    "the optimizer had taken steps when Soup was built, so the weights were not "
                    "those of step 0: build Soup before loading the checkpoint, or pass base= "
                    "and call soup.resume(step)"
                )
            self._run = self._start(0, check_weights=False)
        return self._run

    def _rewind(self, step: int) -> SoupRun | EmaRun:
        """Go on after `step` of a loaded checkpoint; what came later is forgotten only now."""
        if self._run is not None:
            self._run.close()
        self._rewound_to = None
        self.reports = [report for report in self.reports if report.step <= step]
        return self._start(step, check_weights=False)

    def _start(self, step: int, *, check_weights: bool) -> SoupRun | EmaRun:
        return self._preparation.start(
            step,
            evaluate=self._evaluate,
            optimizer=self._optimizer,
            logdir=self._output_dir / "runs",
            checkpoint_steps=self._checkpoint_steps,
            metric_name=self.config.metric_for_best if self.config.gate == "none" else "score",
            check_weights=check_weights,
        )

    def _on_save_state(self, models: Any, weights: Any, output_dir: str) -> None:
        self.save(output_dir)

    def _on_load_state(self, models: Any, input_dir: str) -> None:
        """Note the step; the weights come after this hook, and perhaps to be exported only."""
        if not (Path(input_dir) / MARK_NAME).exists():
            self._unmarked = input_dir
            return
        self._unmarked = None
        self._rewound_to = self.num_steps = _read_mark(Path(input_dir))

    @property
    def _list_path(self) -> Path:
        return self._preparation.folder.root / "checkpoints.json"

    def _checkpoints(self) -> list[str]:
        """Folders that save was called for and that still exist."""
        known: Any = []
        with contextlib.suppress(FileNotFoundError):
            known = read_json(self._list_path)
        return [str(path) for path in known if (Path(path) / MARK_NAME).exists()]

    def _checkpoint_steps(self) -> list[int] | None:
        """Steps of the known checkpoints; None where save was never called."""
        if not self._list_path.exists():
            return None
        return [_read_mark(Path(path)) for path in self._checkpoints()]

    def _save_companions(self, folder: Path) -> None:
        if self._processing_class is not None:
            self._processing_class.save_pretrained(str(folder))


def _check_arguments(config: SoupConfig, optimizer: Any, evaluate: Evaluate | None) -> None:
    if config.gate == "metric" and evaluate is None:
        raise ValueError(
            'gate="metric" needs evaluate=, a function that returns the held-out score of the '
            'live weights; or pass SoupConfig(gate="none")'
        )
    if config.optimizer_state == "reset" and optimizer is None:
        raise ValueError('optimizer_state="reset" needs optimizer=; pass it, or use "keep"')


def _read_mark(folder: Path) -> int:
    path = folder / MARK_NAME
    try:
        step = read_json(path)["step"]
        if type(step) is int and step >= 0:
            return step
        raise ValueError(f"step is {step!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{path}: {error}; this checkpoint was not made with Soup: call soup.resume(step)"
        ) from error
