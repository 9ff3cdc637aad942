"""Which model a run's deltas are taken against: the folder it came from, or its step-0 weights.

The base must be the weights of step 0, never those of a resumed run: a delta against half-trained
weights looks right and is useless. So a folder counts only if its weights equal the model's at step
0 exactly (as float32); if none does, the step-0 weights are saved to `soup/base` as a model folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from soupkit.delta import TensorSource
from soupkit.errors import CheckpointError, MergeError, TrainingError
from soupkit.files import atomic_write_json, fsync_path, fsync_tree, read_json
from soupkit.tracking import say
from soupkit.training.checkpoint_tensors import checkpoint_model
from soupkit.training.params import ParamStore
from soupkit.training.snapshot import write_tensors
from soupkit.training.state import BaseRecord, SoupFolder
from soupkit.training.weights import ModelTensors

# Of a run that has no dense base and needs none: LoRA factors are merged without.
NO_BASE = BaseRecord(path=None, revision=None, fingerprint="")


def equal_weights(checkpoint: TensorSource, model: TensorSource) -> bool:
    """Whether two sources hold the same tensors, as float32 (float64 where one side has it)."""
    if set(checkpoint.names) != set(model.names):
        return False
    if any(checkpoint.shape(name) != model.shape(name) for name in model.names):
        return False
    for name in model.names:
        first, second = checkpoint.tensor(name), model.tensor(name)
        if first.dtype != second.dtype:
            wide = torch.promote_types(
                torch.promote_types(first.dtype, second.dtype), torch.float32
            )
            first, second = first.to(wide), second.to(wide)
        if not torch.equal(first, second):
            return False
    return True


def relative_difference(checkpoint: TensorSource, model: TensorSource) -> float | None:
    """Norm of the difference of two sources over that of the first, in float64; None where their
    tensors have other names or shapes.
    """
    if set(checkpoint.names) != set(model.names):
        return None
    squares = torch.zeros(2, dtype=torch.float64)
    for name in model.names:
        first, second = checkpoint.tensor(name), model.tensor(name)
        if first.shape != second.shape:
            return None
        first, second = first.double(), second.to(first.device).double()
        squares += torch.stack([(first - second).square().sum(), first.square().sum()]).cpu()
    return float((squares[0] / squares[1]).sqrt()) if squares[0] > 0 else 0.0


def find_base(
    model: nn.Module,
    tensors: TensorSource,
    folder: SoupFolder,
    *,
    given: str | Path | None,
    save_companions: Callable[[Path], None],
    is_resumed: bool = False,
) -> BaseRecord:
    """The base of a run, from the model's present weights, those of step 0. On one rank.

    Args:
        tensors: all of the model's, by its checkpoint's names.
        given: what the user named; taken as it is, and a difference is told.
        save_companions: writes tokenizer files into a folder, where the step-0 weights have to be
            saved.
        is_resumed: the present weights are of a later step, and `given` is there.

    Returns:
        The record; where its path is None the weights lie in `folder.pending_base_path` or
        `folder.base_path`.

    Raises:
        CheckpointError: the named base cannot be read.
    """
    if given is not None:
        named = open_checkpoint(_absolute(given))
        difference = None if is_resumed else relative_difference(named, tensors)
        if difference:
            say(
                f"the step-0 weights are not those of base={str(given)!r} but differ by "
                f"{difference:.2%} of their norm, which is part of every delta, and of the variant"
            )
        return _record(named, revision=None)
    loaded_from, revision = _loaded_from(model)
    checkpoint = _holding(tensors, loaded_from, revision) if loaded_from else None
    if checkpoint is not None:
        return _record(checkpoint, revision=revision)
    kept = _holding(tensors, folder.base_path, None)
    if kept is not None:
        return BaseRecord(None, None, checkpoint_fingerprint(kept))
    saved = _save_model(model, tensors, folder.pending_base_path, save_companions)
    return BaseRecord(None, None, checkpoint_fingerprint(saved))


def _holding(tensors: TensorSource, path: str | Path, revision: str | None) -> Checkpoint | None:
    """The checkpoint at `path` if it can be read here and holds exactly `tensors`; else None."""
    try:
        checkpoint = open_checkpoint(path, revision)
        return checkpoint if equal_weights(checkpoint, tensors) else None
    except CheckpointError:
        # What a model says of its origin need not be readable; the weights in memory are.
        return None


def _absolute(path: str | Path) -> str:
    return os.path.abspath(path) if Path(path).is_dir() else str(path)


def _loaded_from(model: nn.Module) -> tuple[str, str | None]:
    """(folder or hub id, commit) that the model's config names; ("", None) where it names none."""
    config: Any = getattr(checkpoint_model(model), "config", None)
    name = str(getattr(config, "_name_or_path", None) or "")
    if not name or Path(name).is_dir():
        return (_absolute(name) if name else ""), None
    return name, getattr(config, "_commit_hash", None)


def _record(checkpoint: Checkpoint, *, revision: str | None) -> BaseRecord:
    return BaseRecord(checkpoint.source, revision, checkpoint_fingerprint(checkpoint))


def _save_model(
    model: nn.Module, tensors: TensorSource, target: Path, save_companions: Callable[[Path], None]
) -> Checkpoint:
    """Save the present weights as a model folder and open it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    inner: Any = checkpoint_model(model)
    is_whole = isinstance(tensors, ModelTensors) and tensors.is_whole
    if hasattr(inner, "save_pretrained") and is_whole:
        inner.save_pretrained(str(target))
    else:
        write_tensors(target / "model.safetensors", tensors, durable=True)
        save_configs(inner, target)
        _name_architecture(inner, target)
    save_companions(target)
    fsync_tree(target)
    checkpoint = open_checkpoint(target)
    if not equal_weights(checkpoint, tensors):
        raise TrainingError(
            f"{type(inner).__name__}.save_pretrained writes other tensors than the model holds "
            "(renamed or converted), so its deltas have no names in a base; soupkit cannot train "
            "this architecture yet"
        )
    return checkpoint


def save_configs(inner: Any, folder: Path) -> None:
    """Write a model's config.json and generation_config.json, where it has them."""
    for part in ("config", "generation_config"):
        held = getattr(inner, part, None)
        if held is not None and hasattr(held, "save_pretrained"):
            held.save_pretrained(str(folder))


def _name_architecture(inner: nn.Module, folder: Path) -> None:
    """See to it that config.json names the model's class, as save_pretrained does."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    # fully_shard puts a class of its own in front.
    kinds = [kind for kind in type(inner).__mro__ if not kind.__name__.startswith("FSDP")]
    if not config.get("architectures"):
        atomic_write_json(path, {**config, "architectures": [kinds[0].__name__]})


def promote_pending(folder: SoupFolder) -> None:
    """Make the waiting step-0 weights `soup/base`. On one rank."""
    if folder.pending_base_path.is_dir():
        shutil.rmtree(folder.base_path, ignore_errors=True)
        os.rename(folder.pending_base_path, folder.base_path)
        fsync_path(folder.root)
        say(f"no folder holds the step-0 weights; they are saved as the base in {folder.base_path}")


def open_base(record: BaseRecord, folder: SoupFolder) -> Checkpoint | None:
    """Open the recorded base. On every rank.

    Returns:
        None where the run has none: an adapter on a quantised model.

    Raises:
        TrainingError: it is gone or cannot be read.
    """
    if record == NO_BASE:
        return None
    path = folder.base_path if record.path is None else record.path
    try:
        return open_checkpoint(path, record.revision)
    except CheckpointError as error:
        raise TrainingError(
            f"the base of this run cannot be read: {error}; bring it back, or name it with base="
        ) from error


def check_fingerprint(base: Checkpoint, record: BaseRecord) -> None:
    """Raise TrainingError unless `base` has the weights that the run began with. On one rank."""
    if checkpoint_fingerprint(base) != record.fingerprint:
        raise TrainingError(
            f"the base {base.path} has other weights than when this run began: deltas against it "
            "would be useless; bring the old weights back, or name their folder with base="
        )


Stamp = tuple[tuple[int, int, int], ...]


def file_stamp(base: Checkpoint) -> Stamp:
    """Inode, bytes and time of change of the base's weight files. Raises OSError."""
    stats = [path.stat() for path in base.weight_files]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def check_untouched(base: Checkpoint, stamp: Stamp) -> None:
    """Raise MergeError if the base's files are not those that `stamp` was taken of. On one rank."""
    try:
        found = file_stamp(base)
    except OSError as error:
        raise MergeError(f"the base cannot be read any more: {error}") from error
    if found != stamp:
        raise MergeError(
            f"the base {base.path} was written to since this run began: its deltas would be "
            "against other weights"
        )


def check_base(base: Checkpoint, store: ParamStore) -> None:
    """Raise TrainingError unless the base has every parameter that is merged against it, in its
    shape.
    """
    names = set(base.names)
    for name in (unit.name for unit in store.units if unit.has_base and unit.lora is None):
        if name not in names:
            raise TrainingError(
                f"the base {base.path} has no tensor {name}: name the model that this run started "
                "from with base=, or leave base= out"
            )
        if base.shape(name) != store.shape(name):
            raise TrainingError(
                f"{name} has shape {store.shape(name)}, in the base {base.path} "
                f"{base.shape(name)}; leave base= out so that the step-0 weights become the base, "
                "or exclude the parameter"
            )
