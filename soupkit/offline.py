"""Merging model folders on disk, tensor by tensor, into a new folder that transformers loads.

    W = W_base + merge(W_1 - W_base, ..., W_k - W_base)      (soupkit.merge, in float32, rounded
    once)

Plain means run in blocks of rows; svd_mean and monosoup need a whole matrix of each checkpoint at a
time. Where all checkpoints resized the vocabulary alike, common rows are merged as deltas and the
extra rows averaged. It decides nothing: methods and weights come from the caller.
"""

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.blocks import row_blocks
from soupkit.checkpoint import Checkpoint
from soupkit.delta import layout, subtract
from soupkit.dense import write_config
from soupkit.errors import CheckpointError
from soupkit.export import Progress
from soupkit.files import atomic_folder, atomic_write_json, plain_json
from soupkit.merge import MatrixReport, MergeRule, merge_deltas
from soupkit.numeric import check_finite, rounded
from soupkit.pairs import naming_the_culprit, pair_names
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
        matrices: one report for each floating parameter. companions: file name -> the folder that
            it was copied from. seconds: wall time.
    """

    path: Path
    rule: MergeRule
    matrices: tuple[MatrixReport, ...]
    companions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        document: dict[str, Any] = plain_json(
            {
                "soupkit": __version__,
                "rule": asdict(self.rule),
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
    rule: MergeRule,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> OfflineReport:
    """Merge fine-tunes of one base into the new folder `out`.

    Args:
        checkpoints: at least one. rule: method, rank or energy, weights in the order of
            checkpoints.
        dtype: of all floating weights; None: each as in the base.
        progress: called after each tensor with its name, entries done, entries in all.

    Raises:
        CheckpointError: the models do not fit. MergeError: a weight is NaN or infinite.
        ValueError: weights of another number. FileExistsError, OSError: `out` has content, or the
            disk refused. Nothing stands at `out` then.
    """
    started = time.monotonic()
    if not checkpoints:
        raise ValueError("no checkpoints to merge: give at least one")
    rule.weights_for(len(checkpoints))
    shapes = _merged_shapes(base, checkpoints)
    merger = _Merger(base, checkpoints, rule)
    with atomic_folder(Path(out)) as folder:
        writer = ShardWriter(folder)
        try:
            merger.write(writer, shapes, dtype=dtype, progress=progress)
            writer.close()
        finally:
            writer.abort()
        origins = _copy_companions(base, checkpoints, folder)
        if "config.json" in origins:
            config = Path(origins["config.json"]) / "config.json"
            write_config(folder, config, dtype=dtype or base.main_dtype, base=base, shapes=shapes)
        report = OfflineReport(
            Path(out), rule, tuple(merger.reports), origins, time.monotonic() - started
        )
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


class _Merger:
    """Produces the merged parameters one after the other and collects their reports."""

    def __init__(
        self, base: Checkpoint, checkpoints: Sequence[Checkpoint], rule: MergeRule
    ) -> None:
        self._base = base
        self._checkpoints = checkpoints
        self._rule = rule
        self._weights = rule.weights_for(len(checkpoints))
        self.reports: list[MatrixReport] = []

    def write(
        self,
        writer: ShardWriter,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype | None,
        progress: Progress | None,
    ) -> None:
        """Add every parameter to `writer`."""
        done, total = 0, sum(math.prod(shape) for shape in shapes.values())
        for name, shape in shapes.items():
            # Whole numbers are the checkpoints', and the base's dtype may not hold them.
            stored = self._base.dtype(name)
            if not stored.is_floating_point:
                stored = self._checkpoints[0].dtype(name)
            spec = TensorSpec(dtype if dtype and stored.is_floating_point else stored, shape)
            writer.add_pieces(name, spec, self.pieces(name, spec))
            done += math.prod(shape)
            if progress:
                progress(name, done, total)

    def pieces(self, name: str, spec: TensorSpec) -> Iterator[Tensor]:
        """The merged parameter as consecutive pieces of `spec`."""
        theirs = self._base.tensor(name)
        ours = [one.tensor(name) for one in self._checkpoints]
        if not theirs.is_floating_point():
            yield self._agreed(name, ours)
            return
        common = min(theirs.shape[0], spec.shape[0]) if spec.shape else 0
        if spec.shape and common < max(theirs.shape[0], spec.shape[0]):
            extra = [one[common:] for one in ours]
            theirs, ours = theirs[:common], [one[:common] for one in ours]
        else:
            extra = []
        is_mean = self._rule.method == "mean" or layout(name, tuple(theirs.shape)) == "vector"
        merge = self._merge_blocks if is_mean else self._merge_whole
        with naming_the_culprit(name, self._base, *self._checkpoints):
            for piece in merge(name, theirs, ours):
                yield rounded(name, piece, spec.dtype)
            for rows in row_blocks(tuple(extra[0].shape)) if extra else ():
                piece = self._average([one[rows] for one in extra])
                before = (common + rows.start) * math.prod(spec.shape[1:])
                check_finite(name, piece, whole=spec.shape, start=before)
                yield rounded(name, piece, spec.dtype)

    def _agreed(self, name: str, ours: Sequence[Tensor]) -> Tensor:
        if any(not torch.equal(one, ours[0]) for one in ours[1:]):
            raise CheckpointError(
                f"{name}: {ours[0].dtype} cannot be averaged, and the checkpoints differ"
            )
        return ours[0]

    def _average(self, tensors: Sequence[Tensor]) -> Tensor:
        total = tensors[0].float() * self._weights[0]
        for tensor, weight in zip(tensors[1:], self._weights[1:], strict=True):
            total.add_(tensor.float(), alpha=weight)
        return total

    def _merge_whole(self, name: str, theirs: Tensor, ours: Sequence[Tensor]) -> Iterator[Tensor]:
        deltas = [subtract(one, theirs, name=name) for one in ours]
        merged, report = merge_deltas(name, deltas, self._rule)
        del deltas
        self.reports.append(report)
        yield _sum(theirs, merged)

    def _merge_blocks(self, name: str, theirs: Tensor, ours: Sequence[Tensor]) -> Iterator[Tensor]:
        parts: list[MatrixReport] = []
        for rows in row_blocks(tuple(theirs.shape)):
            block = theirs[rows] if theirs.ndim else theirs
            before = rows.start * math.prod(theirs.shape[1:]) if theirs.ndim else 0
            deltas = [
                subtract(
                    one[rows] if one.ndim else one,
                    block,
                    name=name,
                    whole=theirs.shape,
                    start=before,
                )
                for one in ours
            ]
            merged, report = merge_deltas(name, deltas, self._rule)
            parts.append(report)
            yield _sum(block, merged)
        if parts:
            self.reports.append(_join_reports(parts, tuple(theirs.shape)))


def _sum(theirs: Tensor, merged: Tensor) -> Tensor:
    """The base plus a merged delta, which may be overwritten; float64 where the base is."""
    if theirs.dtype == torch.float64:
        return theirs + merged
    # float8 promotes with nothing.
    return merged.add_(theirs.float() if theirs.dtype.itemsize == 1 else theirs)


def _join_reports(parts: Sequence[MatrixReport], shape: tuple[int, ...]) -> MatrixReport:
    """The report of a parameter from those of its blocks of rows, for a plain mean."""
    first = parts[0]
    norms = tuple(
        math.sqrt(math.fsum(part.delta_norms[index] ** 2 for part in parts))
        for index in range(len(first.delta_norms))
    )
    cosine = 1.0
    if len(norms) > 1:
        product = math.fsum(part.cosine * math.prod(part.delta_norms[:2]) for part in parts)
        cosine = product / math.prod(norms[:2]) if all(norms[:2]) else 0.0
    return MatrixReport(
        name=first.name,
        shape=shape,
        method=first.method,
        rank=0,
        kept_energy=1.0,
        delta_norms=norms,
        merged_norm=math.sqrt(math.fsum(part.merged_norm**2 for part in parts)),
        cosine=cosine,
        solver=first.solver,
        seconds=math.fsum(part.seconds for part in parts),
    )


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
