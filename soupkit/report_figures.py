"""Figures of a variant that need no forward pass: bytes, errors by layer, spectra of deltas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from soupkit.bundle import Variant
from soupkit.checkpoint import Checkpoint
from soupkit.delta import layout, subtract
from soupkit.forms import Encoding
from soupkit.manifest import WEIGHTS_NAME, TensorEntry, model_bf16_bytes
from soupkit.svd import truncated_svd

# Matrices whose spectrum is shown, and how many of its values.
SPECTRA = 4
SPECTRUM_RANK = 64
DISTILLED = ", distilled"


def stored_facts(variant: Variant) -> dict[str, Any]:
    """What a variant's manifest tells, as keys of a report's result.

    Returns:
        encoding: its names, with commas, and whether scales were distilled. bytes: of
        variant.safetensors. share: of the model's bf16 bytes. layers: mean relative residual energy
        of a layer's deltas, by its number or "other". frontier: of an export under a budget, see
        soupkit.budget.Plan.
    """
    entries = variant.manifest.tensors
    size = (variant.path / WEIGHTS_NAME).stat().st_size
    kinds = sorted({entry.encoding for entry in entries if entry.encoding is not None})
    layers: dict[str, list[float]] = {}
    for entry in sorted(entries, key=lambda entry: _layer_of(entry.name)):
        if entry.kind == "delta":
            layer = _layer_of(entry.name)
            layers.setdefault(str(layer) if layer >= 0 else "other", []).append(
                entry.residual_energy
            )
    # A step of 0 is the start: it was kept.
    is_distilled = any(
        event.get("event") == "distill" and event.get("best_step") != 0
        for event in variant.manifest.history
    )
    return {
        "encoding": (", ".join(kinds) or "none") + DISTILLED * is_distilled,
        "bytes": size,
        "share": size / max(1, model_bf16_bytes(entries)),
        "layers": {label: sum(lost) / len(lost) for label, lost in layers.items()},
        "frontier": list(variant.manifest.budget.get("frontier", [])),
    }


def kl_limit(encoding: str) -> float | None:
    """The goal for KL over that of plain row scales: 1/2 for a distilled plane of signs, 1/4 for
    two planes; None for the rest.
    """
    name = encoding.removesuffix(DISTILLED)
    try:
        form = Encoding.parse(name)
    except ValueError:
        return None
    if form.rank or form.is_sparse:
        return None
    return {(1, True): 0.5, (2, False): 0.25}.get((form.planes, name != encoding))


def _layer_of(name: str) -> int:
    """The number of a parameter's layer; -1 if it is in none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def spectra(
    entries: Sequence[TensorEntry], full: Checkpoint, base: Checkpoint
) -> dict[str, list[float]]:
    """The largest singular values of a few deltas, evenly chosen among the layers' matrices."""
    names = [
        entry.name
        for entry in sorted(entries, key=lambda entry: (_layer_of(entry.name), entry.name))
        if entry.kind == "delta" and layout(entry.name, entry.shape) == "matrix"
    ]
    count = min(SPECTRA, len(names))
    chosen = [names[i * (len(names) - 1) // max(1, count - 1)] for i in range(count)]
    found = {}
    for name in chosen:
        delta = subtract(full.tensor(name), base.tensor(name), name=name)
        values = truncated_svd(delta, rank=SPECTRUM_RANK).singular_values
        found[name] = [float(value) for value in values]
    return found
