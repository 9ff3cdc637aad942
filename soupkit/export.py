"""Export: a fine-tune becomes a variant of its base in a family.

    W_ft ~ W_base + delta      (soupkit.encoding has the forms; signs: BitDelta, arXiv 2402.10193)

Matrices are stored as encoded deltas where they changed, or whole where that takes no more bytes;
what is no matrix, not floating, or resized along the vocabulary is stored whole; what is equal to
the base is not stored. Tensors are asked for once each, in the order of the fine-tune's names, and
handled in blocks of rows (a low-rank part: a matrix at a time), so that memory does not grow with
the model. Everything that can be known without reading a weight is checked first. Scales are not
trained here, and which encoding pays where is decided in soupkit.budget.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from soupkit.blocks import encode_pair, row_blocks
from soupkit.checkpoint import Checkpoint
from soupkit.companions import copy_companions
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource, layout
from soupkit.family_write import add_variant, create_or_open_family, staged_variant
from soupkit.files import atomic_write_json, plain_json
from soupkit.fingerprint import Entry, digest_of, sha256_of
from soupkit.forms import Encoding, parse_encoding
from soupkit.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    TensorEntry,
    itemise,
    matrix_shape,
    model_bf16_bytes,
)
from soupkit.numeric import check_finite
from soupkit.pairs import naming_the_culprit, pair_names
from soupkit.shards import SpooledFile
from soupkit.tensorfile import TensorSpec, dtype_name
from soupkit.version import __version__
from soupkit_kernels import Delta

Progress = Callable[[str, int, int], None]


@runtime_checkable
class EncodedSource(Protocol):
    """A TensorSource that has some deltas encoded already; they are stored as they are."""

    def encoded(self, name: str) -> tuple[Encoding, Delta] | None:
        """The encoding and the delta of a matrix, or None: its tensor is to be encoded."""
        ...


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        name: of the variant. path: its folder. digest: content digest. replaced: whether the name
            stood for another variant before. bytes: on disk, by "signs", "scales", "factors" (of
            low-rank parts), "raw", "other" (header, manifest, companion files) and "total";
            "weights" is variant.safetensors alone.
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
    encoding: str | Encoding = "row",
    encodings: Mapping[str, str | Encoding] | None = None,
    companions: Path | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    metrics: Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the difference between a fine-tune and its base into a family; the family is made if
    absent.

    Args:
        base: the base; its fingerprint must be the family's.
        finetuned: same parameter names as the base; tied embeddings may have been untied. May be
            an EncodedSource.
        family: folder of the family.
        name: of the variant; an older variant of that name is replaced in one step.
        encoding: of every changed matrix, or its text form, or "raw": see soupkit.encoding.
        encodings: by parameter name, of those that get another one.
        companions: a folder whose tokenizer, generation and configuration files are stored where
            they differ from the base's, byte for byte.
        history: merges of the run, for the manifest. metrics: of the run's end, for the manifest.
        budget: that the encodings keep, for the manifest; see soupkit.budget.
        progress: called after each tensor with its name, entries done, entries in all.

    Raises:
        BundleError: the family belongs to another base, or is damaged.
        CheckpointError: the two models do not fit. MergeError: a weight is NaN or infinite.
        OSError: the disk refused. ValueError: a wrong argument. The family is unchanged in every
            case.
    """
    check_variant_name(name)
    choose = _Choice(encoding, encodings or {})
    history = tuple(plain_json(event) for event in history)
    metrics = plain_json(metrics or {})
    pairs = pair_names(base, finetuned)
    choose.check_names({ours for ours, _ in pairs})
    found = create_or_open_family(family, base)
    with staged_variant(found.path) as folder:
        writer = _VariantWriter(folder / WEIGHTS_NAME, choose)
        try:
            done, total = 0, sum(math.prod(finetuned.shape(ours)) for ours, _ in pairs)
            for ours, theirs in pairs:
                with naming_the_culprit(ours, base, finetuned):
                    if ready := _ready_delta(finetuned, ours):
                        writer.add_encoded(ours, base.spec(theirs), *ready)
                    else:
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
            budget=plain_json(budget or {}),
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


class _Choice:
    """The encoding of each parameter; None: stored whole."""

    def __init__(self, encoding: str | Encoding, encodings: Mapping[str, str | Encoding]) -> None:
        self._default = parse_encoding(encoding)
        self._others = {name: _parsed(name, one) for name, one in encodings.items()}

    def __call__(self, name: str) -> Encoding | None:
        return self._others.get(name, self._default)

    def check_names(self, names: set[str]) -> None:
        """Raise ValueError for an encoding of a parameter that is not there."""
        odd = sorted(self._others.keys() - names)
        if odd:
            raise ValueError(
                f"encodings for {odd[0]!r} ({len(odd)} such names): the fine-tune has no such "
                "parameter of its own"
            )


def _ready_delta(finetuned: TensorSource, name: str) -> tuple[Encoding, Delta] | None:
    return finetuned.encoded(name) if isinstance(finetuned, EncodedSource) else None


def _parsed(name: str, encoding: str | Encoding) -> Encoding | None:
    try:
        return parse_encoding(encoding)
    except ValueError as error:
        raise ValueError(f"encodings[{name!r}]: {error}") from None


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

    def __init__(self, path: Path, choose: _Choice) -> None:
        self._file = SpooledFile(path)
        self._choose = choose
        self._entries: list[TensorEntry] = []
        self._hashes: list[Entry] = []

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Store one parameter of the fine-tune against the base's."""
        shape, dtype = tuple(ours.shape), dtype_name(ours.dtype)
        is_matrix = ours.is_floating_point() and layout(name, shape) != "vector"
        is_equal = ours.shape == theirs.shape and are_equal(ours, theirs, is_matrix=is_matrix)
        if is_matrix and ours.shape == theirs.shape and not is_equal:
            entry = _entry_for(name, ours, self._choose(name))
            if entry is not None:
                # Refuses what is not finite while it subtracts.
                self._add_delta(entry, ours, theirs)
                return
            # Two dtypes may hold the same values.
            is_equal = are_equal(ours, theirs, is_matrix=False)
        if ours.is_floating_point():
            check_finite(name, ours)
        if is_equal:
            self._entries.append(TensorEntry(name, "same", shape, dtype))
        else:
            self._spool(f"{name}.raw", ours)
            self._entries.append(TensorEntry(name, "raw", shape, dtype, bytes=ours.nbytes))

    def add_encoded(self, name: str, spec: TensorSpec, encoding: Encoding, delta: Delta) -> None:
        """Store a ready delta; `spec` is that of the parameter."""
        entry = delta_entry(name, spec.shape, spec.dtype, encoding)
        self._spool_delta(entry, delta)

    def _add_delta(self, entry: TensorEntry, ours: Tensor, theirs: Tensor) -> None:
        name, encoding = entry.name, self._choose(entry.name)
        assert encoding is not None
        encoded, energy, lost = encode_pair(name, ours, theirs, encoding)
        if energy == 0.0:
            self._entries.append(TensorEntry(name, "same", entry.shape, entry.dtype))
            return
        self._spool_delta(replace(entry, residual_energy=min(1.0, lost / energy)), encoded)

    def _spool_delta(self, entry: TensorEntry, encoded: Delta) -> None:
        parts = {
            "sign": encoded.packed,
            "scale": encoded.scale,
            "column": encoded.column_scale,
            "up": encoded.up,
            "down": encoded.down,
        }
        for part, tensor in parts.items():
            if tensor is not None:
                self._spool(f"{entry.name}.{part}", tensor)
        self._entries.append(entry)

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


def _entry_for(name: str, ours: Tensor, encoding: Encoding | None) -> TensorEntry | None:
    """How a changed matrix will be stored, its error not yet known; None: whole, as that was asked
    for or takes no more bytes.
    """
    if encoding is None:
        return None
    entry = delta_entry(name, tuple(ours.shape), ours.dtype, encoding)
    return entry if entry.bytes < ours.nbytes else None


def delta_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, encoding: Encoding
) -> TensorEntry:
    """How a matrix is stored by an encoding, without an error."""
    planes = encoding.stored_planes
    entry = TensorEntry(
        name,
        "delta",
        shape,
        dtype_name(dtype),
        planes=planes,
        scale_axis=encoding.scale if planes else None,
        rank=min(encoding.rank, *matrix_shape(name, shape)),
        encoding=encoding.name,
    )
    return replace(entry, bytes=sum(spec.nbytes for spec in entry.stored_specs().values()))


def are_equal(ours: Tensor, theirs: Tensor, *, is_matrix: bool) -> bool:
    """Whether two tensors hold the same values; of a matrix in another dtype it is seen later."""
    if ours.dtype == theirs.dtype:
        return torch.equal(ours, theirs)
    return not is_matrix and all(
        torch.equal(ours[rows].double(), theirs[rows].double())
        if ours.ndim
        else bool(ours.double() == theirs.double())
        for rows in row_blocks(tuple(ours.shape))
    )
