"""Merging model folders on disk, tensor by tensor, into a new folder that transformers loads.

    W = W_base + merge(W_1 - W_base, ..., W_k - W_base)      in float32, rounded once

Where all checkpoints resized the vocabulary alike, common rows are merged as deltas and the extra
rows averaged. soupkit.merger does the work, soupkit.opcm_merger that of OPCM. It decides nothing:
methods and weights come from the caller.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soupkit.checkpoint import Checkpoint
from soupkit.dense import write_config
from soupkit.errors import CheckpointError
from soupkit.export import Progress
from soupkit.files import atomic_folder, atomic_write_json, plain_json
from soupkit.merge import MatrixReport, MergeRule
from soupkit.merger import Merger
from soupkit.opcm import OpcmRule
from soupkit.opcm_merger import OpcmMerger
from soupkit.pairs import pair_names
from soupkit.shards import ShardWriter
from soupkit.tensorfile import TensorSpec
from soupkit.version import __version__

REPORT_NAME = "soup_report.json"


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """What a merge wrote.

    Attributes:
        path: the model folder; it holds the same report as soup_report.json. rule: with its
            weights.
        matrices: one report for each floating parameter that has entries.
        companions: file name -> the folder that it was copied from. seconds: wall time.
    """

    path: Path
    rule: MergeRule | OpcmRule
    matrices: tuple[MatrixReport, ...]
    companions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        document: dict[str, Any] = plain_json(
            {
                "soupkit": __version__,
                "rule": {"method": self.rule.method, **asdict(self.rule)},
                "seconds": self.seconds,
                "companions": self.companions,
                "matrices": [matrix.to_json() for matrix in self.matrices],
            }
        )
        return document


def merge_checkpoints(
    base: Checkpoint,
    checkpoints: Sequence[Checkpoint],
    *,
    out: str | Path,
    rule: MergeRule | OpcmRule,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> OfflineReport:
    """Merge fine-tunes of one base into the new folder `out`.

    Args:
        checkpoints: at least one. rule: method, rank or energy, weights in the order of
            checkpoints; or OPCM's, which takes them one after the other.
        dtype: of all floating weights; None: each as in the base.
        progress: called with the name of the tensor just worked on, bytes of the checkpoints (not
            the base) that were read, and these bytes in all.

    Raises:
        CheckpointError: the models do not fit. MergeError: a weight is NaN or infinite.
        ValueError: weights of another number. FileExistsError, OSError: `out` has content, or the
            disk refused. Nothing stands at `out` then.
    """
    started = time.monotonic()
    if not checkpoints:
        raise ValueError("no checkpoints to merge: give at least one")
    if isinstance(rule, MergeRule):
        rule.weights_for(len(checkpoints))
    shapes = _merged_shapes(base, checkpoints)
    specs = {
        name: _spec(name, shape, base, checkpoints[0], dtype) for name, shape in shapes.items()
    }
    with atomic_folder(Path(out)) as folder:
        if isinstance(rule, OpcmRule):
            merger: Merger = OpcmMerger(base, checkpoints, rule, specs, scratch=folder / ".held")
        else:
            merger = Merger(base, checkpoints, rule, specs)
        writer = ShardWriter(folder, specs)
        try:
            merger.write(writer, progress)
            writer.finish()
        finally:
            writer.close()
        origins = _copy_companions(base, checkpoints, folder)
        if "config.json" in origins:
            config = Path(origins["config.json"]) / "config.json"
            write_config(folder, config, dtype=dtype or base.main_dtype, base=base, shapes=shapes)
        report = OfflineReport(Path(out), rule, merger.reports, origins, time.monotonic() - started)
        document = {"base": base.source, "checkpoints": [one.source for one in checkpoints]}
        atomic_write_json(folder / REPORT_NAME, {**document, **report.to_json()})
    return report


def _merged_shapes(
    base: Checkpoint, checkpoints: Sequence[Checkpoint]
) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the result, sorted by name; CheckpointError if the models do not
    fit.
    """
    names = sorted({name for one in checkpoints for name, _ in pair_names(base, one)})
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        sizes = {one.shape(name) for one in checkpoints}
        if len(sizes) > 1:
            told = ", ".join(f"{one.path.name} {one.shape(name)}" for one in checkpoints)
            raise CheckpointError(
                f"{name}: the checkpoints disagree on its shape ({told}); the base has "
                f"{base.shape(name)}: merge only checkpoints with the same vocabulary"
            )
        shapes[name] = sizes.pop()
    return shapes


def _spec(
    name: str,
    shape: tuple[int, ...],
    base: Checkpoint,
    first: Checkpoint,
    dtype: torch.dtype | None,
) -> TensorSpec:
    """Dtype and shape of a parameter of the result."""
    stored = base.dtype(name)
    if not stored.is_floating_point:
        # Whole numbers are the checkpoints', and the base's dtype may not hold them.
        return TensorSpec(first.dtype(name), shape)
    return TensorSpec(dtype or stored, shape)


def _copy_companions(
    base: Checkpoint, checkpoints: Sequence[Checkpoint], folder: Path
) -> dict[str, str]:
    """Copy tokenizer and configuration files: the checkpoints' where all of them agree, else the
    base's.

    Returns:
        File name -> the folder that it came from.
    """
    theirs = [one.files() for one in checkpoints]
    origins: dict[str, str] = {}
    for name in sorted({*base.files(), *theirs[0]}):
        sources = [files[name] for files in theirs if name in files]
        agree = len(sources) == len(theirs) and len({path.read_bytes() for path in sources}) == 1
        if not agree and name not in base.files():
            continue
        path = sources[0] if agree else base.files()[name]
        shutil.copyfile(path, folder / name)
        origins[name] = str(path.parent)
    return origins
