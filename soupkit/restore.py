"""Restore: base + variant as a dense model folder that transformers loads.

    W = W_base + delta    in float32, rounded once to the dtype asked for; see soupkit.manifest

A narrow dtype rounds part of a small delta away (algorithms 1.7); the report says how much. The
fused path of soupkit.serving has no such loss. Blocks of rows are worked on side by side by threads
of one core each, some MB a thread, and written straight to their place; the bits do not depend on
how many threads there are.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from soupkit.bundle import Variant, open_variant
from soupkit.checkpoint import Checkpoint
from soupkit.companions import is_companion
from soupkit.dense import write_config
from soupkit.encoding import decode_rows
from soupkit.errors import BundleError
from soupkit.export import Progress
from soupkit.family import Family, open_base, open_family
from soupkit.files import atomic_folder, file_digest
from soupkit.manifest import MANIFEST_NAME, TensorEntry, matrix_shape
from soupkit.mean import BLOCK_ENTRIES
from soupkit.numeric import full_precision, is_finite, rounded, squared_norm
from soupkit.shards import ShardWriter
from soupkit.signs import row_blocks
from soupkit.tensorfile import DTYPES, TensorSpec
from soupkit.window import Job, as_they_end
from soupkit.workers import Workers

# Entries of a job, in whole rows: some milliseconds, so that handing it over costs nothing. What it
# takes beside the packed rows and the blocks is a row wider than that.
_JOB_ENTRIES = 2**21
_JOB_BYTES = 2**24
_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore wrote.

    Attributes:
        path: the model folder. dtype: of its floating weights. rounding_loss: ||round(W) - W|| /
            ||W - W_base|| over all matrices stored as deltas; 0.0 in float32 terms of the sum
            itself.
    """

    path: Path
    dtype: torch.dtype
    rounding_loss: float


def restore(
    family: str | Path,
    name: str,
    *,
    out: str | Path,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> RestoreReport:
    """Write the dense model of a variant to the new folder `out`.

    Args:
        base: folder or hub id of the base; None: where the family says it is.
        dtype: of all floating weights; None: float32.
        progress: called with the name of the tensor just worked on, bytes of weights that were
            written, and these bytes in all.

    Raises:
        BundleError: no such variant, damaged, or another base. CheckpointError: the base is
            unreadable. MergeError: a weight is beyond the range of `dtype`.
        FileExistsError, OSError: `out` has content, or the disk refused. Nothing stands at `out`
            then.
    """
    found = open_family(family)
    variant = open_intact(found, name)
    checkpoint = open_base(found, base)
    check_covers(variant, checkpoint)
    with atomic_folder(Path(out)) as folder:
        writer = _Restorer(variant, checkpoint, dtype or torch.float32)
        loss = writer.write(folder, progress)
    return RestoreReport(Path(out), dtype or torch.float32, loss)


def open_intact(family: Family, name: str) -> Variant:
    """Open a variant whose bytes are those that family.json lists, made for the family's base.

    Raises:
        BundleError: no such variant, damaged, replaced, or of another base.
    """
    variant = open_variant(family.folder(name))
    manifest = variant.manifest
    if manifest.digest != family.variants[name].digest:
        raise BundleError(
            f"{variant.path}: its manifest has digest {manifest.digest}, family.json lists "
            f"{family.variants[name].digest}: it was replaced; export the variant again"
        )
    if manifest.base_fingerprint != family.base.fingerprint:
        raise BundleError(f"{variant.path}: made for another base than the family's: export again")
    variant.check_digest()
    return variant


def check_covers(variant: Variant, base: Checkpoint) -> None:
    """Raise BundleError unless the variant describes every parameter of `base` and no other, in
    fitting shapes and kinds of numbers, and ties only what the base ties.
    """
    entries = variant.manifest.entries()
    missing = [name for name in base.names if name not in entries]
    if missing:
        raise BundleError(f"{variant.path}: the manifest lacks {missing[0]!r}, which the base has")
    for name, entry in entries.items():
        if name not in base.names and name not in base.tied:
            raise BundleError(f"{variant.path}: the base has no parameter {name!r}")
        if entry.kind == "tied":
            if base.tied.get(name) != entry.source:
                raise BundleError(
                    f"{variant.path}: {name!r} is tied to {entry.source!r}, not so in the base"
                )
            continue
        shape, dtype = base.shape(name), base.dtype(name)
        # A vocabulary may have grown or shrunk.
        is_resized = entry.kind == "raw" and len(entry.shape) == len(shape) in (1, 2)
        if entry.shape != shape and not (is_resized and entry.shape[1:] == shape[1:]):
            raise BundleError(f"{variant.path}: {name!r} has shape {entry.shape}, the base {shape}")
        is_float = DTYPES[entry.dtype].is_floating_point
        if is_float != dtype.is_floating_point or (entry.kind == "delta" and not is_float):
            raise BundleError(
                f"{variant.path}: {name!r} is a {entry.kind} of {entry.dtype}, the base has {dtype}"
            )


def _as_rows(entry: TensorEntry) -> tuple[int, int]:
    """How many rows a parameter is worked on in, and the entries of each."""
    if entry.kind == "delta":
        return matrix_shape(entry.name, entry.shape)
    return (entry.shape[0] if entry.shape else 1), math.prod(entry.shape[1:])


@dataclass(frozen=True, slots=True)
class _Done:
    """What a job wrote, and ||delta||^2 and ||round(W) - W||^2 of its rows."""

    name: str
    nbytes: int
    start: int
    energy: float = 0.0
    lost: float = 0.0


class _Restorer:
    """Writes W = W_base + decoded delta of one variant, rows of many matrices side by side."""

    def __init__(self, variant: Variant, base: Checkpoint, dtype: torch.dtype) -> None:
        self._variant = variant
        self._base = base
        self._dtype = dtype
        entries = (entry for entry in variant.manifest.tensors if entry.kind != "tied")
        self._entries = {entry.name: entry for entry in entries}
        self._specs = {name: self._spec(entry) for name, entry in self._entries.items()}

    def _spec(self, entry: TensorEntry) -> TensorSpec:
        # Whole numbers are the fine-tune's, and the base's dtype may not hold them.
        is_float = self._base.dtype(entry.name).is_floating_point
        return TensorSpec(self._dtype if is_float else DTYPES[entry.dtype], entry.shape)

    def write(self, folder: Path, progress: Progress | None) -> float:
        """Fill `folder`; returns the share of the delta that rounding lost."""
        writer = ShardWriter(folder, self._specs)
        try:
            done = self._write_weights(writer, progress)
            writer.finish()
        finally:
            writer.close()
        self._write_companions(folder, {name: spec.shape for name, spec in self._specs.items()})
        energy = math.fsum(part.energy for part in done)
        return math.sqrt(math.fsum(part.lost for part in done) / energy) if energy else 0.0

    def _write_weights(self, writer: ShardWriter, progress: Progress | None) -> list[_Done]:
        done, total = 0, sum(spec.nbytes for spec in self._specs.values())
        parts: list[_Done] = []
        # Its settings are the process's: threads of their own would undo each other's.
        with full_precision(torch.empty(0)), Workers() as workers:
            for part in as_they_end(workers, self._jobs(writer), most_bytes=_MOST_BYTES):
                parts.append(part)
                done += part.nbytes
                if progress:
                    progress(part.name, done, total)
        return parts

    def _jobs(self, writer: ShardWriter) -> Iterator[Job[_Done]]:
        for entry in self._entries.values():
            rows, columns = _as_rows(entry)
            step = max(1, _JOB_ENTRIES // max(1, columns))
            for start in range(0, rows, step):
                some = slice(start, min(start + step, rows))
                yield Job(_JOB_BYTES, partial(self._begin, writer, entry, some))

    def _begin(self, writer: ShardWriter, entry: TensorEntry, rows: slice) -> Callable[[], _Done]:
        act = self._add if entry.kind == "delta" else self._copy
        return partial(act, writer, entry, rows)

    def _copy(self, writer: ShardWriter, entry: TensorEntry, rows: slice) -> _Done:
        """Rows that are stored whole, or the base's."""
        name, dtype = entry.name, self._specs[entry.name].dtype
        some = rows if entry.shape else None
        if entry.kind == "raw":
            whole = self._variant.raw(name, some)
        else:
            whole = self._base.tensor(name) if some is None else self._base.tensor(name)[some]
        start = rows.start * _as_rows(entry)[1]
        flat = whole.reshape(-1)
        for at in range(0, len(flat), BLOCK_ENTRIES):
            piece = flat[at : at + BLOCK_ENTRIES]
            piece = rounded(name, piece, dtype) if piece.is_floating_point() else piece.to(dtype)
            writer.write(name, piece, first_entry=start + at)
        return _Done(name, len(flat) * dtype.itemsize, start)

    def _add(self, writer: ShardWriter, entry: TensorEntry, rows: slice) -> _Done:
        """Rows of the base with their delta."""
        name, dtype = entry.name, self._specs[entry.name].dtype
        shape = matrix_shape(name, entry.shape)
        encoded = self._variant.delta(name, rows)
        theirs = self._base.tensor(name).reshape(shape)[rows]
        wide = torch.float64 if theirs.dtype == torch.float64 else torch.float32
        energy = lost = 0.0
        for block in row_blocks((rows.stop - rows.start, shape[1])):
            delta = decode_rows(encoded, block)
            exact = theirs[block].to(wide, copy=True).add_(delta)
            sums = self._rounded(name, exact, dtype)
            first = (rows.start + block.start) * shape[1]
            writer.write(name, sums, first_entry=first)
            if dtype != torch.float32:
                energy += squared_norm(delta)
                lost += squared_norm(exact.sub_(sums.to(wide)))
        count = (rows.stop - rows.start) * shape[1]
        return _Done(name, count * dtype.itemsize, rows.start, energy, lost)

    def _rounded(self, name: str, exact: Tensor, dtype: torch.dtype) -> Tensor:
        flat = exact.reshape(-1)
        # No entry is larger than the norm; only where that overflows each is looked at.
        if not math.isfinite(float(torch.dot(flat, flat))) and not is_finite(exact):
            # Finite factors may have such a product: a hostile file, as no export makes it.
            raise BundleError(f"{self._variant.path}: {name!r} is beyond float32; export it again")
        return rounded(name, exact, dtype)

    def _write_companions(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        """The base's companion files, the variant's over them, and config.json for the weights."""
        sources = self._base.files()
        for name, digest in self._variant.manifest.companions.items():
            path = self._variant.path / name
            if not is_companion(name) or path.is_symlink() or file_digest(path) != digest:
                raise BundleError(f"{path}: damaged, or no file of a model: see {MANIFEST_NAME}")
            sources[name] = path
        config = sources.pop("config.json", None)
        for name, path in sources.items():
            shutil.copyfile(path, folder / name)
        if config is not None:
            write_config(folder, config, dtype=self._dtype, base=self._base, shapes=shapes)
