"""The training loop: scales against the fine-tune's logits, the best of held-out KL kept.

    minimise over the steps  mean KL(softmax(z_ft) || softmax(z_variant))  over answer tokens

Adam, no decay, constant learning rate; every `evaluate_every` steps the held-out rows are scored.
Step 0, the start, is scored first and only less KL replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from soupkit.checks import check_choice, check_count
from soupkit.distill.batches import batch_at, num_scored
from soupkit.distill.models import Student, Teacher
from soupkit.distill.state import load_state, save_state
from soupkit.errors import CheckpointError
from soupkit.quality import Row

Progress = Callable[[str, int, int], None]
Method = Literal["kl", "gram"]


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """How to distil.

    Args:
        method: "kl" trains on the logits; "gram" solves each linear's scales from its inputs, which
            takes little data and a layer at a time in memory, and only batch, held_out, seed and
            gram_bytes matter.
        steps: of the optimiser at most. learning_rate: of Adam, relative to each scale. batch: rows
            a step. held_out: share of the rows that score and are not trained on. evaluate_every:
            steps. patience: evaluations without a gain that end the run. norms: train raw vectors
            (norms, biases) too. teacher_bytes: of the fine-tune's logits kept in memory; where they
            take more, the fine-tune stays in memory and is run again for every batch. gram_bytes:
            of the Grams kept in memory, K x K in float64 each; one is always kept. seed: of the
            split and the order.
    Raises:
        ValueError: a value out of range.
    """

    method: Method = "kl"
    steps: int = 40
    learning_rate: float = 0.02
    batch: int = 8
    held_out: float = 0.2
    evaluate_every: int = 5
    patience: int = 3
    norms: bool = False
    teacher_bytes: int = 2 * 2**30
    gram_bytes: int = 2**30
    seed: int = 0

    def __post_init__(self) -> None:
        """Check each value."""
        for field in ("steps", "batch", "evaluate_every", "patience"):
            check_count(field, getattr(self, field), least=1)
        for field in ("teacher_bytes", "gram_bytes", "seed"):
            check_count(field, getattr(self, field), least=0)
        check_choice("method", self.method, get_args(Method))
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate}: needs a number above 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: needs a share above 0 and below 1")

    def identity(self) -> dict[str, Any]:
        """What a resumed run may not change; more steps or patience are welcome."""
        kept = asdict(self)
        for free in ("steps", "patience"):
            del kept[free]
        return kept


@dataclass(slots=True)
class Counters:
    """Where a run is. KL in nats a held-out answer token; step 0 is the start."""

    step: int = 0
    best_step: int = 0
    start_kl: float = math.inf
    best_kl: float = math.inf
    without_gain: int = 0


def checked_start(kl: float) -> float:
    """The KL of the start. Raises CheckpointError if it is not finite: nothing can be better."""
    if not math.isfinite(kl):
        raise CheckpointError(
            f"held-out KL {kl}: the logits of the fine-tune or the variant are not finite; "
            "`soupkit verify` finds damaged weights"
        )
    return kl


class Run:
    """One distillation in memory."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        rows: Sequence[Row],
        parts: tuple[Sequence[int], Sequence[int]],
        config: DistillConfig,
    ) -> None:
        """Args: parts: the rows to train on, the rows held out."""
        self._student, self._teacher, self._rows, self._config = student, teacher, rows, config
        self._train, self._held_out = parts
        self._steps = student.parameters()
        self._best = [step.detach().clone() for step in self._steps]
        self._optimizer = torch.optim.Adam(self._steps, lr=config.learning_rate, foreach=False)
        self.at = Counters()

    def train(
        self, *, folder: Path | None, run: dict[str, Any], progress: Progress | None
    ) -> Counters:
        """Train, or go on from the state in `folder`; the student ends with the best scales.

        Args:
            run: what the state in the folder must belong to.
            progress: called after each step with the held-out KL so far, steps done, steps in all.
        Raises:
            TrainingError: the state is of another run. CheckpointError: the start's KL is not
                finite. OSError: the state cannot be written.
        """
        config, at = self._config, self.at
        if folder is None or not self._resume(folder, run):
            at.start_kl = at.best_kl = checked_start(self.held_out_kl())
            if folder is not None:
                self._save(folder, run)
        while at.step < config.steps and at.without_gain < config.patience:
            self._step()
            at.step += 1
            if at.step % config.evaluate_every == 0 or at.step == config.steps:
                self._judge(self.held_out_kl())
                if folder is not None:
                    self._save(folder, run)
            if progress:
                told = f"KL {at.start_kl:.4g} to {at.best_kl:.4g}"
                progress(told, at.step, config.steps)
        self._set(self._best)
        return at

    @torch.no_grad()
    def held_out_kl(self) -> float:
        """Mean KL of the held-out answer tokens, summed in float64; NaN where logits are not
        finite.
        """
        total, size = 0.0, self._config.batch
        for start in range(0, len(self._held_out), size):
            total += float(self._divergence(self._held_out[start : start + size]).double().sum())
        return total / sum(num_scored(self._rows[index]) for index in self._held_out)

    def _divergence(self, indices: Sequence[int]) -> Tensor:
        """KL at each scored position, float32."""
        theirs = self._teacher.logits(indices).log_softmax(-1)
        ours = self._student.logits([self._rows[index] for index in indices]).log_softmax(-1)
        return (theirs.exp() * (theirs - ours)).sum(-1)

    def _step(self) -> None:
        config = self._config
        indices = batch_at(self.at.step, self._train, size=config.batch, seed=config.seed)
        self._optimizer.zero_grad()
        self._divergence(indices).mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def _judge(self, kl: float) -> None:
        at = self.at
        # NaN is no gain either.
        if kl < at.best_kl:
            at.best_kl, at.best_step, at.without_gain = kl, at.step, 0
            self._best = [step.detach().clone() for step in self._steps]
        else:
            at.without_gain += 1

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for step, value in zip(self._steps, values, strict=True):
            step.copy_(value)

    def _save(self, folder: Path, run: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        for number, (step, best) in enumerate(zip(self._steps, self._best, strict=True)):
            tensors |= {f"{number}.now": step, f"{number}.best": best}
            moments = self._optimizer.state.get(step, {})
            tensors |= {f"{number}.adam.{key}": value for key, value in moments.items()}
        save_state(folder, tensors, asdict(self.at), run)

    def _resume(self, folder: Path, run: dict[str, Any]) -> bool:
        found = load_state(folder, run)
        if found is None:
            return False
        tensors, counters = found
        for key, value in counters.items():
            setattr(self.at, key, value)
        self._set([tensors[f"{number}.now"] for number in range(len(self._steps))])
        for number, step in enumerate(self._steps):
            self._best[number].copy_(tensors[f"{number}.best"])
            prefix = f"{number}.adam."
            for key in [key for key in tensors if key.startswith(prefix)]:
                value = tensors[key]
                # Adam keeps its count of steps on the CPU.
                place = value if key.endswith(".step") else value.to(step.device)
                self._optimizer.state[step][key.removeprefix(prefix)] = place
        return True
