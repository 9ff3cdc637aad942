"""The state of a distillation on disk: one safetensors file, replaced in one step.

Its metadata say of which run it is; a state of another run is refused. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from soupkit.errors import TrainingError
from soupkit.files import PENDING_PREFIX, fsync_path, make_folder, parse_json

STATE_NAME = "distill-state.safetensors"


def save_state(
    folder: Path, tensors: Mapping[str, Tensor], counters: Mapping[str, Any], run: Mapping[str, Any]
) -> None:
    """Replace the state in `folder`, which is made if absent. Raises OSError; the old one stands.

    Args:
        counters: what is no tensor, JSON types. run: what the run depends on, JSON types.
    """
    make_folder(folder)
    pending = folder / f"{PENDING_PREFIX}{STATE_NAME}"
    metadata = {"counters": json.dumps(dict(counters)), "run": json.dumps(dict(run))}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, pending, metadata=metadata)
        fsync_path(pending)
        os.replace(pending, folder / STATE_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            pending.unlink()
        raise
    fsync_path(folder)


def load_state(
    folder: Path, run: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(tensors, counters) of the state in `folder`; None if there is none.

    Raises:
        TrainingError: it is of another run, or damaged.
    """
    path = folder / STATE_NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        counters = parse_json(metadata["counters"].encode(), allow_nan=True)
        theirs = parse_json(metadata["run"].encode())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TrainingError(f"{path}: damaged ({error}); remove it to start over") from error
    for key in run:
        if theirs.get(key) != run[key]:
            raise TrainingError(
                f"{path} is the state of another run: {key} was {theirs.get(key)!r}, now "
                f"{run[key]!r}; remove it to start over, or give another folder"
            )
    return tensors, counters


def remove_state(folder: Path) -> None:
    """Remove the state, once its result is in the family."""
    (folder / STATE_NAME).unlink(missing_ok=True)
