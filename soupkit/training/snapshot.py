"""Tensors in one file of a soup folder: written at once, read by mapping them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from soupkit.delta import TensorSource
from soupkit.errors import TrainingError
from soupkit.files import PENDING_PREFIX, fsync_path
from soupkit.tensorfile import MappedFile, TensorFileWriter, TensorSpec


class Snapshot:
    """Captured weights on disk; a TensorSource whose tensors are mapped from the file."""

    def __init__(self, path: Path) -> None:
        """Open `path` and check its header. Raises TrainingError if it is missing or damaged."""
        try:
            self._file = MappedFile(path)
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path}: {error}; resume from an older checkpoint") from error
        self.path = path
        self.names: tuple[str, ...] = tuple(sorted(self._file.slots))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._file.slots[name].spec.shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor."""
        return self._file.slots[name].spec.dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its own dtype: do not write to it."""
        return self._file.tensor(name)


def write_tensors(path: Path, source: TensorSource, *, durable: bool) -> None:
    """Replace the file `path` by all tensors of `source` at once, held one by one; OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = path.with_name(PENDING_PREFIX + path.name)
    pending.unlink(missing_ok=True)
    specs = {name: TensorSpec(source.dtype(name), source.shape(name)) for name in source.names}
    writer = TensorFileWriter(pending, specs, metadata={"format": "pt"})
    try:
        for name in source.names:
            writer.write(name, source.tensor(name))
        writer.check_complete()
    except BaseException:
        pending.unlink(missing_ok=True)
        raise
    finally:
        writer.close()
    if durable:
        fsync_path(pending)
    os.replace(pending, path)
    if durable:
        fsync_path(path.parent)
