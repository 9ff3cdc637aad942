"""The quality report of a family: for each variant the base, the full fine-tune, the variant as it
is stored, and other encodings of the same fine-tune, on one file of held-out data.

Each is measured as the dense model that `soupkit restore` writes, in float32 (soupkit.quality), and
compared with the full fine-tune: KL by answer token, and exact match as a paired difference
(soupkit.paired). One model is in memory at a time; the full fine-tune's logits and the families of
other encodings lie beside the report and are gone when it is done. No times and no dates are
written: the same input gives the same report.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soupkit.budget import export_within
from soupkit.bundle import open_variant
from soupkit.checkpoint import Checkpoint, open_checkpoint
from soupkit.errors import BundleError
from soupkit.exact_match import exact_matches
from soupkit.export import Progress, export_variant
from soupkit.family import Family, open_base, open_family
from soupkit.files import atomic_folder, atomic_write_json, file_digest
from soupkit.forms import AUTO, parse_encoding
from soupkit.manifest import model_bf16_bytes
from soupkit.paired import METHOD, paired_interval, verdict
from soupkit.pairs import pair_names
from soupkit.quality import (
    Example,
    Reference,
    Row,
    Score,
    encode,
    open_model,
    open_tokenizer,
    read_examples,
    score,
)
from soupkit.report_figures import kl_limit, spectra, stored_facts
from soupkit.report_page import render
from soupkit.restore import restore
from soupkit.version import __version__

SCHEMA = 1
DOCUMENT_NAME = "report.json"
PAGE_NAME = "index.html"
LOGITS_NAME = "logits"

# The goal: exact match at most half a point below the full fine-tune's, on so many prompts.
GOAL_LIMIT = -0.005
GOAL_PROMPTS = 1000
BASE, FULL, STORED = "base", "full", "stored"


def make_report(
    family: str | Path,
    *,
    data: str | Path,
    out: str | Path,
    variants: Mapping[str, str | None] | None = None,
    encodings: Sequence[str] = (),
    base: str | Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure variants on held-out data; writes report.json and index.html to the new folder `out`.

    Args:
        data: JSON lines of {"prompt", "answer"} or {"text"}.
        variants: which variants, each with its full fine-tune's folder or hub id, or None; None:
            all of them, without fine-tunes.
        encodings: text forms, each tried on every variant whose fine-tune is given; "auto" with
            the bytes of plain row scales.
        base: where the base is, if not where the family says. device: to compute on.
        progress: called with what was measured, examples done, examples in all.
    Returns:
        The document of report.json.
    Raises:
        ValueError: a wrong argument, or a bad line in `data`. BundleError, CheckpointError: a model
            cannot be read or does not fit. FileExistsError, OSError: `out` has content, or the disk
            refused. Nothing stands at `out` then.
    """
    examples = read_examples(data)
    found = open_family(family)
    chosen = _chosen(found, variants, encodings)
    root = open_base(found, base)
    prompts = sum(not example.is_text for example in examples)
    with atomic_folder(Path(out)) as folder:
        scratch = folder / "scratch"
        scratch.mkdir()
        count = sum(2 + (full is not None) * (1 + len(encodings)) for full in chosen.values())
        ticker = _Ticker(progress, count * (len(examples) + prompts))
        told = [
            _Variant(found, root, name, full, scratch, ticker).report(examples, encodings, device)
            for name, full in chosen.items()
        ]
        shutil.rmtree(scratch)
        document = {
            "schema": SCHEMA,
            "soupkit": __version__,
            "torch": torch.__version__,
            "family": str(family),
            "base": found.base.path if base is None else str(base),
            "data": {
                "path": str(data),
                "digest": file_digest(Path(data)),
                "examples": len(examples),
                "prompts": prompts,
            },
            "interval": METHOD,
            "goal": {"difference": GOAL_LIMIT, "prompts": GOAL_PROMPTS},
            "variants": told,
        }
        atomic_write_json(folder / DOCUMENT_NAME, document)
        (folder / PAGE_NAME).write_text(render(document), encoding="utf-8")
    return document


def _chosen(
    family: Family, variants: Mapping[str, str | None] | None, encodings: Sequence[str]
) -> dict[str, str | None]:
    """The variants with their fine-tunes, after all checks that need no model."""
    chosen: dict[str, str | None] = dict(variants or dict.fromkeys(family.variants))
    if not chosen:
        raise BundleError(f"{family.path} has no variant to report on: export one")
    for name in chosen:
        family.folder(name)
    if len(set(encodings)) != len(encodings):
        raise ValueError(f"encodings {list(encodings)}: give each once")
    for encoding in encodings:
        if encoding != AUTO:
            parse_encoding(encoding)
    if encodings and not any(chosen.values()):
        raise ValueError(
            f"encodings {list(encodings)} are made from a full fine-tune: give one, as in "
            f"--variant {next(iter(chosen))}=FOLDER"
        )
    return chosen


class _Ticker:
    """Adds up finished examples for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self.what = ""

    def __call__(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self.what, self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Full:
    """The full fine-tune: its logits, and which prompts it answers rightly."""

    logits: Reference
    right: list[bool]


@dataclass(frozen=True, slots=True)
class _Held:
    """The held-out data of one variant, in its tokens; where they are computed on."""

    rows: list[Row]
    tokenizer: Any
    device: str


class _Variant:
    """Measures one variant and what it is compared with."""

    def __init__(
        self,
        family: Family,
        base: Checkpoint,
        name: str,
        full: str | None,
        scratch: Path,
        ticker: _Ticker,
    ) -> None:
        self._family, self._base, self._name = family, base, name
        self._full = None if full is None else open_checkpoint(full)
        if self._full is not None:
            pair_names(base, self._full)
        self._scratch, self._ticker = scratch, ticker

    def report(
        self, examples: Sequence[Example], encodings: Sequence[str], device: str
    ) -> dict[str, Any]:
        """One entry of the document's "variants"."""
        variant = open_variant(self._family.folder(self._name))
        stored = self._restored(self._family.path, self._name)
        tokenizer = open_tokenizer(stored)
        rows = encode(examples, tokenizer, most=self._context())
        held = _Held(rows, tokenizer, device)
        results, reference = [], None
        if self._full is not None:
            result, reference = self._full_result(self._full.path, held)
            results.append(result)
        shapes = {entry.name: entry.shape for entry in variant.manifest.tensors}
        # A base of another vocabulary has no logits for the same tokens.
        if all(shape == self._base.shape(name) for name, shape in shapes.items()):
            results.insert(0, self._measured(BASE, self._base.path, held, reference))
        else:
            self._ticker(sum(1 + bool(example.prompt) for example in examples))
        told = self._measured(STORED, stored, held, reference)
        shutil.rmtree(stored)
        results.append(told | stored_facts(variant))
        if self._full is not None:
            for encoding in encodings:
                results.append(self._tried(encoding, self._full, held, reference))
        (self._scratch / LOGITS_NAME).unlink(missing_ok=True)
        _tell_ratios(results)
        entries = variant.manifest.tensors
        return {
            "name": self._name,
            "full": None if self._full is None else str(self._full.path),
            "model_bf16_bytes": model_bf16_bytes(entries),
            "answer_tokens": sum(len(row.ids) - row.start for row in rows),
            "results": results,
            "spectra": {} if self._full is None else spectra(entries, self._full, self._base),
        }

    def _context(self) -> int | None:
        config = self._base.config
        text = config.get("text_config")
        most = (text if isinstance(text, dict) else config).get("max_position_embeddings")
        return most if isinstance(most, int) else None

    def _restored(self, family: Path, name: str) -> Path:
        """The dense model of a variant, in a new folder; the caller removes it."""
        folder = self._scratch / "dense"
        restore(family, name, out=folder, base=self._base.path)
        return folder

    def _tried(
        self, encoding: str, full: Checkpoint, held: _Held, reference: _Full | None
    ) -> dict[str, Any]:
        """The result of another encoding of the fine-tune."""
        family = self._scratch / "family"
        place: dict[str, Any] = {"family": family, "name": "tried", "companions": full.path}
        if encoding == AUTO:
            export_within(self._base, full, **place)
        else:
            export_variant(self._base, full, encoding=encoding, **place)
        variant = open_variant(open_family(family).folder("tried"))
        folder = self._restored(family, "tried")
        told = self._measured(encoding, folder, held, reference) | stored_facts(variant)
        shutil.rmtree(folder)
        shutil.rmtree(family)
        return told

    def _full_result(self, folder: Path, held: _Held) -> tuple[dict[str, Any], _Full]:
        """The result of the full fine-tune, and what others are compared with."""
        tokens = sum(len(row.ids) - row.start for row in held.rows)
        logits = Reference(self._scratch / LOGITS_NAME, tokens)
        scored, right = self._scored(FULL, folder, held, keep=logits)
        return _result(FULL, scored, right, None), _Full(logits, right)

    def _measured(
        self, label: str, folder: Path, held: _Held, reference: _Full | None
    ) -> dict[str, Any]:
        """The result of the model in a folder."""
        logits = None if reference is None else reference.logits
        scored, right = self._scored(label, folder, held, reference=logits)
        return _result(label, scored, right, reference)

    def _scored(
        self, label: str, folder: Path, held: _Held, **logits: Reference | None
    ) -> tuple[Score, list[bool]]:
        """What is measured of a model, which is in memory only meanwhile."""
        self._ticker.what = f"{self._name}: {label}"
        model = open_model(folder, device=held.device)
        scored = score(model, held.rows, **logits, step=self._ticker)
        right = exact_matches(model, held.rows, scored.likeliest, held.tokenizer, step=self._ticker)
        del model
        # Models hold references to themselves; the next one comes at once.
        gc.collect()
        return scored, right


def _result(
    label: str, scored: Score, right: list[bool], reference: _Full | None
) -> dict[str, Any]:
    """What was measured of one model; what does not apply is None."""
    result: dict[str, Any] = {
        "model": label,
        "encoding": None,
        "bytes": None,
        "share": None,
        "loss": scored.loss,
        "kl": scored.kl,
        "kl_of_row": None,
        "kl_verdict": None,
        "right": sum(right) if right else None,
        "exact_match": sum(right) / len(right) if right else None,
        "only_here": None,
        "only_full": None,
        "difference": None,
        "interval": None,
        "verdict": None,
        "layers": {},
        "frontier": [],
    }
    if reference is None or not right:
        return result
    pairs = list(zip(right, reference.right, strict=True))
    here, there = pairs.count((True, False)), pairs.count((False, True))
    difference, low, high = paired_interval(here, there, len(pairs))
    result |= {
        "only_here": here,
        "only_full": there,
        "difference": difference,
        "interval": [low, high],
        "verdict": None if label == BASE else verdict(low, high, limit=GOAL_LIMIT),
    }
    return result


def _tell_ratios(results: list[dict[str, Any]]) -> None:
    """Set kl_of_row, KL over that of plain row scales, and its verdict, where these were
    measured.
    """
    plain = [one["kl"] for one in results if one["encoding"] == "row" and one["kl"]]
    for one in results:
        if plain and one["encoding"] is not None and one["kl"] is not None:
            one["kl_of_row"] = one["kl"] / plain[-1]
            limit = kl_limit(one["encoding"])
            if limit is not None:
                one["kl_verdict"] = "met" if one["kl_of_row"] <= limit else "not met"
