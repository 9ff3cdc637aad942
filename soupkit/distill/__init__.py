"""Scale distillation: the scales of a variant, trained until it answers as its fine-tune does.

    alpha = alpha_0 (1 + s),   min over s of KL(fine-tune || variant) on held-in text

Signs, low-rank parts and whole tensors stay as they are (norms may be trained too). Never worse
than the start on held-out text: if nothing was better, the start is kept, bit for bit. The family
changes in one step at the end, or not at all. Source: BitDelta, arXiv 2402.10193, section 3.1 (its
squared error of logits is a KL here, and Adam's step is relative to each scale). Training holds the
base in float32, and the fine-tune before or beside it; models larger than memory have the method
"gram" (grams.py), layer by layer and without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.bundle import Variant
from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from soupkit.config import check_variant_name
from soupkit.delta import subtract
from soupkit.distill.batches import split
from soupkit.distill.grams import GramFit
from soupkit.distill.models import Student, Teacher
from soupkit.distill.run import Counters, DistillConfig, Progress, Run, checked_start
from soupkit.distill.state import remove_state
from soupkit.errors import CheckpointError
from soupkit.family import Family, open_base, open_family
from soupkit.files import file_digest
from soupkit.numeric import squared_norm
from soupkit.pairs import pair_names
from soupkit.quality import Row, encode, open_tokenizer, read_examples
from soupkit.restore import check_covers, open_intact
from soupkit.rewrite import energies, rewrite_variant
from soupkit_kernels import Delta

__all__ = ["DistillConfig", "DistillReport", "distill"]

_NOTHING = "no scale to train: distillation is for signs in linear layers or embeddings"


@dataclass(frozen=True, slots=True)
class DistillReport:
    """What a distillation did.

    Attributes:
        name: of the variant with the result. digest: of its content. start_kl, kl: held-out KL to
            the fine-tune, in nats an answer token, before and after. steps: done. best_step: whose
            scales were kept; 0: the start's.
    """

    name: str
    digest: str
    start_kl: float
    kl: float
    steps: int
    best_step: int

    def line(self) -> str:
        """The report in one line, for a person."""
        if not self.best_step:
            return f"{self.name}: no step of {self.steps} was better; the start is kept"
        gain = 1 - self.kl / self.start_kl
        return (
            f"{self.name}: held-out KL {self.start_kl:.4g} to {self.kl:.4g} (-{gain:.0%}), step "
            f"{self.best_step} of {self.steps}"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def distill(
    family: str | Path,
    name: str,
    *,
    finetuned: str | Path,
    data: str | Path,
    config: DistillConfig | None = None,
    out_name: str | None = None,
    base: str | Path | None = None,
    state: str | Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> DistillReport:
    """Train the scales of a variant to match the logits of the fine-tune that it was exported from.

    Args:
        finetuned: folder or hub id of the fine-tune.
        data: JSON lines of {"prompt", "answer"} or {"text"}; see soupkit.quality.
        out_name: of the result; None: it replaces the variant.
        base: folder or hub id of the base; None: where the family says it is.
        state: a folder to keep the run's state in, and to go on from; on the CPU an interrupted and
            resumed run ends with the bits of an uninterrupted one. Removed with the result written.
        device: of the models, as torch writes it.
        progress: called after each step with a text, steps done, steps in all.

    Raises:
        BundleError: no such variant, damaged, of another base, or replaced meanwhile.
        CheckpointError: a model cannot be read, or the two do not fit. TrainingError: `state` is of
            another run. ValueError: a wrong argument or bad data. OSError: the disk refused. The
            family is unchanged in every case.
    """
    config = config or DistillConfig()
    out_name = check_variant_name(name if out_name is None else out_name)
    folder = None if state is None else Path(state)
    place = _device(device)
    if config.method == "gram" and (folder is not None or config.norms or place.type != "cpu"):
        raise ValueError("method 'gram' takes no state, no norms and no device but the CPU")
    found = open_family(family)
    variant = open_intact(found, name)
    checkpoint, theirs = open_base(found, base), open_checkpoint(finetuned)
    check_covers(variant, checkpoint)
    pair_names(checkpoint, theirs)
    _check_near(variant, checkpoint, theirs)
    context = theirs.config.get("max_position_embeddings")
    rows = encode(read_examples(data), open_tokenizer(theirs.path), most=context)
    run = {
        "variant": variant.manifest.digest,
        "finetuned": checkpoint_fingerprint(theirs),
        "data": file_digest(Path(data)),
        "config": config.identity(),
    }
    models = _Models(variant, checkpoint, theirs, place)
    if config.method == "gram":
        result = _solve(models, rows, config, progress)
    else:
        result = _train(models, rows, config, run=run, folder=folder, progress=progress)
    at, digest = result.at, variant.manifest.digest
    if at.best_step or out_name != name:
        digest = _write(models, found, (name, out_name), result, run)
    if folder is not None:
        remove_state(folder)
    return DistillReport(out_name, digest, at.start_kl, at.best_kl, at.step, at.best_step)


def _check_near(variant: Variant, base: Checkpoint, finetuned: Checkpoint) -> None:
    """Raise CheckpointError unless some delta is nearer to the fine-tune's than none at all is.

    Of its own fine-tune an encoding keeps energy; the first tensor that shows it ends the check.
    """
    names = [entry.name for entry in variant.manifest.tensors if entry.kind == "delta"]
    for name in names:
        if finetuned.shape(name) != base.shape(name):
            raise CheckpointError(
                f"{finetuned.path}: {name} has shape {finetuned.shape(name)}, in the base and in "
                f"{variant.path} {base.shape(name)}: give the fine-tune that it was exported from"
            )
    if names and all(
        energies({name: variant.delta(name)}, base, finetuned)[name] >= 1.0 for name in names
    ):
        raise CheckpointError(
            f"{finetuned.path}: the base is nearer to it than {variant.path} is, in every delta: "
            "give the fine-tune that the variant was exported from"
        )


def _device(text: str) -> torch.device:
    """The device of that name. Raises ValueError if there is none."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {text!r}: {reason}; use cpu, cuda or cuda:N") from None


@dataclass(frozen=True, slots=True)
class _Models:
    """Everything that is read from disk, and where it is put."""

    variant: Variant
    base: Checkpoint
    finetuned: Checkpoint
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Result:
    """The numbers to store, the start's if nothing was better, and how they came about."""

    deltas: Mapping[str, Delta]
    raw: Mapping[str, Tensor]
    at: Counters


def _solve(
    models: _Models, rows: Sequence[Row], config: DistillConfig, progress: Progress | None
) -> _Result:
    """Scales by least squares, if they are better."""
    train, held_out = split(len(rows), held_out=config.held_out, seed=config.seed)
    fit = GramFit(models.base, models.finetuned, models.variant, rows, batch=config.batch)
    at = Counters(start_kl=checked_start(fit.held_out_kl(held_out, {})))
    deltas = fit.fit(train, gram_bytes=config.gram_bytes, progress=progress)
    if not deltas:
        raise ValueError(f"{models.variant.path}: {_NOTHING}")
    kl = fit.held_out_kl(held_out, deltas)
    at.step, at.best_kl = 1, at.start_kl
    if kl < at.start_kl:
        at.best_kl, at.best_step = kl, 1
    return _Result(deltas if at.best_step else {}, {}, at)


def _train(
    models: _Models,
    rows: Sequence[Row],
    config: DistillConfig,
    *,
    run: dict[str, Any],
    folder: Path | None,
    progress: Progress | None,
) -> _Result:
    """Scales, and norms if asked for, by training."""
    parts = split(len(rows), held_out=config.held_out, seed=config.seed)
    # The teacher first: where its logits fit, it is gone before the student is loaded.
    teacher = Teacher(
        models.finetuned.path,
        rows,
        batch=config.batch,
        max_bytes=config.teacher_bytes,
        device=models.device,
    )
    student = Student(
        models.base.path,
        models.variant,
        norm_units=_norm_units(models) if config.norms else {},
        device=models.device,
    )
    if not student.parameters():
        raise ValueError(f"{models.variant.path}: {_NOTHING}")
    at = Run(student, teacher, rows, parts, config).train(folder=folder, run=run, progress=progress)
    return _Result(student.deltas(), student.raw(), at) if at.best_step else _Result({}, {}, at)


def _norm_units(models: _Models) -> dict[str, float]:
    """Of each raw vector the root mean square of its delta: what a step of 1 is."""
    units = {}
    for entry in models.variant.manifest.tensors:
        is_vector = entry.kind == "raw" and len(entry.shape) == 1
        if is_vector and entry.shape == models.base.shape(entry.name):
            ours, theirs = models.finetuned.tensor(entry.name), models.base.tensor(entry.name)
            if ours.is_floating_point():
                delta = subtract(ours, theirs, name=entry.name)
                units[entry.name] = math.sqrt(squared_norm(delta) / max(1, delta.numel()))
    return units


def _write(
    models: _Models,
    family: Family,
    names: tuple[str, str],
    result: _Result,
    run: dict[str, Any],
) -> str:
    """Put the new numbers into the family; returns the digest. names: old and new."""
    at = result.at
    event = {
        "event": "distill",
        "start_kl": at.start_kl,
        "kl": at.best_kl,
        "steps": at.step,
        "best_step": at.best_step,
        **run,
    }
    ref = rewrite_variant(
        family,
        models.variant,
        source=names[0],
        name=names[1],
        deltas=result.deltas,
        raw=result.raw,
        residual_energy=energies(result.deltas, models.base, models.finetuned),
        event=event,
    )
    return ref.digest
