"""Restore: base + variant as a dense model folder that transformers loads.

    W = W_base + delta    in float32, rounded once to the dtype asked for; see soupkit.manifest

A narrow dtype rounds part of a small delta away (algorithms 1.7); the report says how much. The
fused path of soupkit.serving has no such loss.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit.blocks import row_blocks
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
from soupkit.numeric import rounded, squared_norm
from soupkit.shards import ShardWriter
from soupkit.tensorfile import DTYPES, TensorSpec


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
        progress: called after each tensor with its name, entries done, entries in all.

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


class _Restorer:
    """Streams W = W_base + decoded delta of one variant."""

    def __init__(self, variant: Variant, base: Checkpoint, dtype: torch.dtype) -> None:
        self._variant = variant
        self._base = base
        self._dtype = dtype
        self._lost = 0.0
        self._energy = 0.0

    def write(self, folder: Path, progress: Progress | None) -> float:
        """Fill `folder`; returns the share of the delta that rounding lost."""
        entries = [entry for entry in self._variant.manifest.tensors if entry.kind != "tied"]
        writer = ShardWriter(folder)
        try:
            self._write_weights(writer, entries, progress)
            writer.close()
        finally:
            writer.abort()
        self._write_companions(folder, {entry.name: entry.shape for entry in entries})
        return math.sqrt(self._lost / self._energy) if self._energy else 0.0

    def _write_weights(
        self, writer: ShardWriter, entries: Sequence[TensorEntry], progress: Progress | None
    ) -> None:
        done, total = 0, sum(math.prod(entry.shape) for entry in entries)
        for entry in entries:
            # Whole numbers are the fine-tune's, and the base's dtype may not hold them.
            is_float = self._base.dtype(entry.name).is_floating_point
            dtype = self._dtype if is_float else DTYPES[entry.dtype]
            writer.add_pieces(
                entry.name, TensorSpec(dtype, entry.shape), self._pieces(entry, dtype)
            )
            done += math.prod(entry.shape)
            if progress:
                progress(entry.name, done, total)

    def _pieces(self, entry: TensorEntry, dtype: torch.dtype) -> Iterator[Tensor]:
        """The restored parameter as consecutive pieces in `dtype`."""
        if entry.kind == "delta":
            yield from self._sums(entry, dtype)
            return
        whole = (
            self._variant.raw(entry.name) if entry.kind == "raw" else self._base.tensor(entry.name)
        )
        for rows in row_blocks(entry.shape):
            piece = whole[rows] if entry.shape else whole
            is_float = piece.is_floating_point()
            yield rounded(entry.name, piece, dtype) if is_float else piece.to(dtype)

    def _sums(self, entry: TensorEntry, dtype: torch.dtype) -> Iterator[Tensor]:
        encoded = self._variant.delta(entry.name)
        theirs = self._base.tensor(entry.name).reshape(matrix_shape(entry.name, entry.shape))
        for rows in row_blocks(tuple(theirs.shape)):
            delta = decode_rows(encoded, rows)
            exact = (
                theirs[rows].float().add_(delta)
                if theirs.dtype != torch.float32
                else theirs[rows] + delta
            )
            if not bool(torch.isfinite(exact).all()):
                # Finite factors may have such a product: a hostile file, as no export makes it.
                raise BundleError(
                    f"{self._variant.path}: {entry.name!r} is beyond float32; export it again"
                )
            sums = rounded(entry.name, exact, dtype)
            if dtype != torch.float32:
                self._energy += squared_norm(delta)
                self._lost += squared_norm(sums.float() - exact)
            yield sums

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
