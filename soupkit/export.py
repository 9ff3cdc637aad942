"""Export: a fine-tune becomes a variant of its base in a family.

    W_ft ~ W_base + sum_p scale_p * sign_p      (soupkit.bitdelta, arXiv 2402.10193)

Matrices are stored as packed signs where they changed; what is no matrix, not floating, or resized
along the vocabulary is stored whole; what is equal to the base is not stored. Tensors are asked for
once each, in the order of the fine-tune's names, and handled in blocks of rows, so that memory does
not grow with the model. Everything that can be known without reading a weight is checked first.
Scales are not trained here.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.blocks import encode_pair
from soupkit.checkpoint import INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS, Checkpoint
from soupkit.companions import copy_companions
from soupkit.config import MAX_PLANES, Scale, check_choice, check_count, check_variant_name
from soupkit.delta import TensorSource, layout
from soupkit.errors import CheckpointError, MergeError
from soupkit.family_write import add_variant, create_or_open_family, staged_variant
from soupkit.files import atomic_write_json, plain_json
from soupkit.fingerprint import Entry, digest_of, sha256_of
from soupkit.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    TensorEntry,
    itemise,
    model_bf16_bytes,
)
from soupkit.numeric import check_finite
from soupkit.shards import SpooledFile
from soupkit.tensorfile import dtype_name
from soupkit.version import __version__

# Entries of a block of rows: its float32 copies (64 MB each) are the largest temporaries of an
# export.
BLOCK_ENTRIES = 2**24

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        name: of the variant. path: its folder. digest: content digest. replaced: whether the name
            stood for another variant before. bytes: on disk, by "signs", "scales", "raw", "other"
            (header, manifest, companion files) and "total"; "weights" is variant.safetensors alone.
        model_bf16_bytes: bytes that all unique parameters of the fine-tune take in bfloat16.
        entries: one for each parameter.
    """

    name: str
    path: Path
    digest: str
    replaced: bool
    bytes: dict[str, int]
    model_bf16_bytes: int
    entries: tuple[TensorEntry, ...]

    def line(self) -> str:
        """The report in one line, for a person."""
        weights = self.bytes["weights"]
        share = self.model_bf16_bytes / max(1, weights)
        told = f"{self.name}: {weights:,} bytes, 1/{share:.1f} of the model in bfloat16"
        return told + ("; it replaced the variant of that name" if self.replaced else "")


def export_variant(
    base: Checkpoint,
    finetuned: TensorSource,
    *,
    family: str | Path,
    name: str,
    scale: Scale = "row",
    planes: int = 1,
    companions: Path | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    metrics: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the difference between a fine-tune and its base into a family; the family is made if
    absent.

    Args:
        base: the base; its fingerprint must be the family's.
        finetuned: same parameter names as the base; tied embeddings may have been untied.
        family: folder of the family.
        name: of the variant; an older variant of that name is replaced in one step.
        scale: "row" or "matrix". planes: 1 to 4.
        companions: a folder whose tokenizer, generation and configuration files are stored where
            they differ from the base's, byte for byte.
        history: merges of the run, for the manifest. metrics: of the run's end, for the manifest.
        progress: called after each tensor with its name, entries done, entries in all.

    Raises:
        BundleError: the family belongs to another base, or is damaged.
        CheckpointError: the two models do not fit. MergeError: a weight is NaN or infinite.
        OSError: the disk refused. ValueError: a wrong argument. The family is unchanged in every
            case.
    """
    check_variant_name(name)
    check_choice("scale", scale, ("row", "matrix"))
    check_count("planes", planes, least=1, most=MAX_PLANES)
    history = tuple(plain_json(event) for event in history)
    metrics = plain_json(metrics or {})
    pairs = pair_names(base, finetuned)
    found = create_or_open_family(family, base)
    with staged_variant(found.path) as folder:
        writer = _VariantWriter(folder / WEIGHTS_NAME, scale=scale, planes=planes)
        try:
            done, total = 0, sum(math.prod(finetuned.shape(ours)) for ours, _ in pairs)
            for ours, theirs in pairs:
                with naming_the_culprit(ours, base, finetuned):
                    writer.add(ours, finetuned.tensor(ours), base.tensor(theirs))
                done += math.prod(finetuned.shape(ours))
                if progress:
                    progress(ours, done, total)
            entries, digest = writer.finish(_tied_entries(base, finetuned))
        finally:
            writer.close()
        manifest = Manifest(
            name=name,
            base_fingerprint=found.base.fingerprint,
            digest=digest,
            tensors=entries,
            companions=copy_companions(companions, base.files(), folder) if companions else {},
            history=history,
            metrics=metrics,
            versions={"soupkit": __version__, "torch": torch.__version__},
        )
        atomic_write_json(folder / MANIFEST_NAME, manifest.to_json())
        sizes = itemise(folder, entries)
        ref, replaced = add_variant(found.path, name, folder, digest=digest)
    return ExportReport(
        name=name,
        path=found.path / ref.path,
        digest=digest,
        replaced=replaced,
        bytes=sizes,
        model_bf16_bytes=model_bf16_bytes(entries),
        entries=entries,
    )


def pair_names(base: Checkpoint, finetuned: TensorSource) -> list[tuple[str, str]]:
    """(name in the fine-tune, name in the base) of every parameter that the variant describes.

    Raises:
        CheckpointError: a parameter is missing, unknown, or of a shape or dtype that has no delta.
    """
    tied = getattr(finetuned, "tied", {})
    missing = [name for name in base.names if name not in finetuned.names and name not in tied]
    if missing:
        raise CheckpointError(
            f"{_told(finetuned)} lacks {missing[0]!r} ({len(missing)} in all) that the base has; "
            "is it a fine-tune of this base?"
        )
    unknown = [name for name in finetuned.names if name not in base.names and name not in base.tied]
    if unknown:
        raise CheckpointError(
            f"{_told(finetuned)} has {unknown[0]!r} ({len(unknown)} in all), which the base lacks; "
            "a variant can only change parameters of its base"
        )
    # A head that the fine-tune tied to its input but the base did not is told by its own delta.
    names = sorted({*finetuned.names, *(name for name in tied if name in base.names)})
    for name in names:
        _check_pair(name, base, finetuned)
    return [(name, name) for name in names]


@contextmanager
def naming_the_culprit(name: str, *sources: TensorSource) -> Iterator[None]:
    """Let a MergeError about the parameter `name` tell where which checkpoint is not finite."""
    try:
        yield
    except MergeError:
        for source in sources:
            # Other sources are a run's own weights: only one is told apart, and a gather is dear.
            if isinstance(source, Checkpoint):
                check_finite(name, source.tensor(name), file=source.path)
        raise


def _told(finetuned: TensorSource) -> str:
    return str(finetuned.path) if isinstance(finetuned, Checkpoint) else "the fine-tune"


def _check_pair(name: str, base: Checkpoint, finetuned: TensorSource) -> None:
    ours, theirs = finetuned.shape(name), base.shape(name)
    floats = finetuned.dtype(name).is_floating_point, base.dtype(name).is_floating_point
    if floats[0] != floats[1]:
        raise CheckpointError(
            f"{_told(finetuned)}: {name}: {finetuned.dtype(name)} against {base.dtype(name)} in "
            "the base"
        )
    dtype_name(finetuned.dtype(name))
    is_resized = len(ours) == len(theirs) and len(ours) in (1, 2) and ours[1:] == theirs[1:]
    if ours != theirs and not (is_resized and _is_vocabulary(name, theirs[0], base)):
        raise CheckpointError(
            f"{_told(finetuned)}: {name}: shape {ours} against {theirs} in the base; only "
            "the vocabulary (the first axis of an embedding or head) may differ"
        )


def _is_vocabulary(name: str, rows: int, base: Checkpoint) -> bool:
    """Whether the first axis of a parameter, of that length in the base, is the vocabulary."""
    configs = (base.config, base.config.get("text_config"))
    sizes = [one.get("vocab_size") for one in configs if isinstance(one, dict)]
    return rows in sizes or name.endswith(INPUT_EMBEDDINGS + OUTPUT_EMBEDDINGS)


def _tied_entries(base: Checkpoint, finetuned: TensorSource) -> list[TensorEntry]:
    """Entries of the aliases that are tied in the base and still are in the fine-tune."""
    return [
        TensorEntry(
            alias,
            "tied",
            finetuned.shape(source),
            dtype_name(finetuned.dtype(source)),
            source=source,
        )
        for alias, source in base.tied.items()
        if alias not in finetuned.names
    ]


class _VariantWriter:
    """Turns pairs of tensors into entries and spooled bytes."""

    def __init__(self, path: Path, *, scale: Scale, planes: int) -> None:
        self._file = SpooledFile(path)
        self._scale: Scale = scale
        self._planes = planes
        self._entries: list[TensorEntry] = []
        self._hashes: list[Entry] = []

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Store one parameter of the fine-tune against the base's."""
        shape, dtype = tuple(ours.shape), dtype_name(ours.dtype)
        is_matrix = ours.is_floating_point() and layout(name, shape) != "vector"
        is_equal = ours.shape == theirs.shape and _are_equal(ours, theirs, is_matrix=is_matrix)
        if is_matrix and ours.shape == theirs.shape and not is_equal:
            # Refuses what is not finite while it subtracts.
            self._add_signs(name, ours, theirs)
            return
        if ours.is_floating_point():
            check_finite(name, ours)
        if is_equal:
            self._entries.append(TensorEntry(name, "same", shape, dtype))
        else:
            self._spool(f"{name}.raw", ours)
            self._entries.append(TensorEntry(name, "raw", shape, dtype, bytes=ours.nbytes))

    def _add_signs(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        encoded, energy, lost = encode_pair(
            name, ours, theirs, scale=self._scale, planes=self._planes
        )
        shape, dtype = tuple(ours.shape), dtype_name(ours.dtype)
        if energy == 0.0:
            self._entries.append(TensorEntry(name, "same", shape, dtype))
            return
        self._spool(f"{name}.sign", encoded.signs)
        self._spool(f"{name}.scale", encoded.scale)
        self._entries.append(
            TensorEntry(
                name,
                "sign",
                shape,
                dtype,
                planes=self._planes,
                scale_axis=self._scale,
                bytes=encoded.nbytes,
                residual_energy=min(1.0, lost / energy),
            )
        )

    def _spool(self, name: str, tensor: Tensor) -> None:
        self._file.add(name, tensor)
        sha = sha256_of(tensor, dtype=tensor.dtype)
        self._hashes.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), sha))

    def finish(self, more: Sequence[TensorEntry]) -> tuple[tuple[TensorEntry, ...], str]:
        """Write variant.safetensors; returns all entries, sorted, and the content digest."""
        self._file.finish()
        entries = sorted([*self._entries, *more], key=lambda entry: entry.name)
        return tuple(entries), digest_of(self._hashes)

    def close(self) -> None:
        """Drop what is unfinished."""
        self._file.close()


def _are_equal(ours: Tensor, theirs: Tensor, *, is_matrix: bool) -> bool:
    """Whether two tensors hold the same values; of a matrix in another dtype it is seen later."""
    if ours.dtype == theirs.dtype:
        return torch.equal(ours, theirs)
    return not is_matrix and torch.equal(ours.double(), theirs.double())
