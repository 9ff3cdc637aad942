"""Export: a fine-tune becomes a variant of its base in a family.

    W_ft ~ W_base + delta      (soupkit.encoding has the forms; signs: BitDelta, arXiv 2402.10193)

Matrices are stored as encoded deltas where they changed, or whole where that takes no more bytes;
what is no matrix, not floating, or resized along the vocabulary is stored whole; what is equal to
the base is not stored. Tensors are asked for once each and handled side by side in blocks of rows
(for a low-rank part: whole matrices), so that memory does not grow with the model, and what is
written does not depend on the number of threads. Of a large fine-tune what is done outlives an
interruption (soupkit.partial). Everything that can be known without reading a weight is checked
first. Scales are not trained here, and which encoding pays where is decided in soupkit.budget.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from soupkit.checkpoint import Checkpoint
from soupkit.companions import copy_companions
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource
from soupkit.family_write import (
    add_variant,
    create_or_open_family,
    kept_folder,
    staged_variant,
)
from soupkit.files import atomic_write_json, plain_json
from soupkit.forms import RAW, Encoding, parse_encoding
from soupkit.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    TensorEntry,
    itemise,
    model_bf16_bytes,
)
from soupkit.numeric import full_precision
from soupkit.pairs import most_bytes, pair_jobs, pair_names, spec_of
from soupkit.partial import VariantSpool, is_worth_keeping, key_of
from soupkit.stored import Finished, delta_entry, memory_of, parts_of, store
from soupkit.tensorfile import dtype_name
from soupkit.version import __version__
from soupkit.window import Job, as_they_end
from soupkit.workers import Workers
from soupkit_kernels import Delta

# Called with what is read, bytes of the fine-tune that are done, and its bytes in all.
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
        resumed: share of the fine-tune's bytes that an export which was interrupted had done.
    """

    name: str
    path: Path
    digest: str
    replaced: bool
    bytes: dict[str, int]
    model_bf16_bytes: int
    entries: tuple[TensorEntry, ...]
    resumed: float = 0.0

    def line(self) -> str:
        """The report in one line, for a person."""
        weights = self.bytes["weights"]
        share = self.model_bf16_bytes / max(1, weights)
        told = f"{self.name}: {weights:,} bytes, 1/{share:.1f} of the model in bfloat16"
        if all(entry.kind in ("same", "tied") for entry in self.entries):
            told += "; no weight differs from the base's"
        told += "; it replaced the variant of that name" if self.replaced else ""
        return told + (f"; {self.resumed:.0%} had been done before" if self.resumed else "")


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
    absent. Of a large fine-tune on disk, the same call goes on where one was interrupted.

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
        progress: called after each tensor with its name, the bytes of the fine-tune that are done,
            and its bytes in all.

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
    key = choose.key(found.base.fingerprint, finetuned, pairs)
    with (
        kept_folder(found.path, name) if key else nullcontext() as kept,
        staged_variant(found.path) as folder,
    ):
        spool = VariantSpool(folder / WEIGHTS_NAME, kept=kept, key=key)
        try:
            resumed = _fill(spool, base, finetuned, pairs, choose, progress)
            entries, digest = spool.finish(_tied_entries(base, finetuned))
        finally:
            spool.close()
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
        resumed=resumed,
    )


def _fill(
    spool: VariantSpool,
    base: Checkpoint,
    finetuned: TensorSource,
    pairs: Sequence[tuple[str, str]],
    choose: "_Choice",
    progress: Progress | None,
) -> float:
    """Store every parameter that is not stored yet; returns the share of bytes that were."""
    sizes = {ours: spec_of(finetuned, ours).nbytes for ours, _ in pairs}
    before = set(spool.names)
    done, total = sum(sizes[name] for name in before), sum(sizes.values())
    resumed = done / max(1, total)
    if progress and before:
        progress("done before", done, total)
    left = [pair for pair in pairs if pair[0] not in before]
    has_svd = any(
        chosen is not None and chosen.rank for chosen in (choose(ours) for ours, _ in left)
    )
    # Set here once: threads that each set and put back what the process shares would disturb each
    # other.
    with full_precision(torch.empty(0)), Workers() as workers:
        jobs = _jobs(base, finetuned, left, choose)
        most = most_bytes(finetuned, has_svd=has_svd)
        for one in as_they_end(workers, jobs, most_bytes=most):
            spool.add(one)
            done += sizes[one.entry.name]
            if progress:
                progress(one.entry.name, done, total)
    return resumed


def _jobs(
    base: Checkpoint,
    finetuned: TensorSource,
    pairs: Sequence[tuple[str, str]],
    choose: "_Choice",
) -> Iterator[Job[Finished]]:
    """One job for each parameter."""

    def act(name: str, ours: Tensor, theirs: Tensor) -> Finished:
        return store(name, ours, theirs, choose(name))

    def nbytes(name: str) -> int:
        return memory_of(name, spec_of(finetuned, name), choose(name))

    if not isinstance(finetuned, EncodedSource):
        yield from pair_jobs(base, finetuned, pairs, act, nbytes=nbytes)
        return
    for pair in pairs:
        name, theirs = pair
        if ready := finetuned.encoded(name):
            spec = base.spec(theirs)
            entry = delta_entry(name, spec.shape, spec.dtype, ready[0])
            yield Job(entry.bytes, partial(partial, parts_of, entry, ready[1]))
        else:
            yield from pair_jobs(base, finetuned, [pair], act, nbytes=nbytes)


class _Choice:
    """The encoding of each parameter; None: stored whole."""

    def __init__(self, encoding: str | Encoding, encodings: Mapping[str, str | Encoding]) -> None:
        self._default = parse_encoding(encoding)
        self._others = {name: _parsed(name, one) for name, one in encodings.items()}

    def __call__(self, name: str) -> Encoding | None:
        return self._others.get(name, self._default)

    def key(
        self, fingerprint: str, finetuned: TensorSource, pairs: Sequence[tuple[str, str]]
    ) -> str:
        """See soupkit.partial.key_of; "" if the export is not worth keeping when interrupted."""
        if not (isinstance(finetuned, Checkpoint) and is_worth_keeping(finetuned)):
            return ""
        chosen = {ours: self(ours) for ours, _ in pairs}
        names = {ours: one.name if one else RAW for ours, one in chosen.items()}
        return key_of(fingerprint, finetuned, names)

    def check_names(self, names: set[str]) -> None:
        """Raise ValueError for an encoding of a parameter that is not there."""
        odd = sorted(self._others.keys() - names)
        if odd:
            raise ValueError(
                f"encodings for {odd[0]!r} ({len(odd)} such names): the fine-tune has no such "
                "parameter of its own"
            )


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
