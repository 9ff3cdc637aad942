"""A variant with some of its numbers changed: written anew, under its own name or another.

Packed signs, low-rank parts and companion files are those of the old variant; scales or whole
tensors are given. Streams a tensor at a time and appears in the family in one step, or not at all.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from soupkit.blocks import row_blocks
from soupkit.bundle import Variant
from soupkit.companions import is_companion
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource, subtract
from soupkit.encoding import decode_rows
from soupkit.errors import BundleError
from soupkit.family import Family, VariantRef, open_family
from soupkit.family_write import add_variant, staged_variant
from soupkit.files import atomic_write_json, file_digest, plain_json
from soupkit.fingerprint import Entry, digest_of, sha256_of
from soupkit.manifest import MANIFEST_NAME, WEIGHTS_NAME, TensorEntry, matrix_shape
from soupkit.numeric import check_finite, squared_norm
from soupkit.shards import SpooledFile
from soupkit.tensorfile import dtype_name
from soupkit.version import __version__
from soupkit_kernels import Delta


def rewrite_variant(
    family: Family,
    variant: Variant,
    *,
    source: str,
    name: str,
    deltas: Mapping[str, Delta],
    raw: Mapping[str, Tensor],
    residual_energy: Mapping[str, float],
    event: Mapping[str, Any],
) -> VariantRef:
    """Write `variant` with some tensors replaced and one more event in its history.

    Args:
        source: the name that the family lists `variant` under.
        name: of the result; an older variant of that name is replaced in one step.
        deltas, raw: what is replaced, by parameter name, in the shapes and dtypes of the old.
        residual_energy: of the replaced deltas.
    Raises:
        BundleError: the variant is damaged, or was replaced meanwhile. MergeError: a new number is
            not finite. OSError: the disk refused. The family is unchanged in every case.
    """
    check_variant_name(name)
    manifest = variant.manifest
    _check_unchanged(family, source, manifest.digest)
    with staged_variant(family.path) as folder:
        file = SpooledFile(folder / WEIGHTS_NAME)
        hashes: list[Entry] = []
        try:
            for entry in manifest.tensors:
                for part, tensor in _parts(variant, entry, deltas, raw).items():
                    file.add(part, tensor)
                    sha = sha256_of(tensor, dtype=tensor.dtype)
                    hashes.append((part, dtype_name(tensor.dtype), tuple(tensor.shape), sha))
            file.finish()
        finally:
            file.close()
        for companion, digest in manifest.companions.items():
            path = variant.path / companion
            if not is_companion(companion) or path.is_symlink() or file_digest(path) != digest:
                raise BundleError(f"{path}: damaged, or no file of a model: see {MANIFEST_NAME}")
            shutil.copyfile(path, folder / companion)
        new = replace(
            manifest,
            name=name,
            digest=digest_of(hashes),
            tensors=tuple(
                replace(one, residual_energy=residual_energy.get(one.name, one.residual_energy))
                for one in manifest.tensors
            ),
            history=(*manifest.history, plain_json(event)),
            versions={"soupkit": __version__, "torch": torch.__version__},
        )
        atomic_write_json(folder / MANIFEST_NAME, new.to_json())
        _check_unchanged(family, source, manifest.digest)
        return add_variant(family.path, name, folder, digest=new.digest)[0]


def _check_unchanged(family: Family, name: str, digest: str) -> None:
    """Raise BundleError if what is listed under `name` is no longer of this digest."""
    listed = open_family(family.path).variants.get(name)
    if listed is None or listed.digest != digest:
        raise BundleError(f"{family.path}: {name!r} was replaced or removed meanwhile: start again")


def energies(
    deltas: Mapping[str, Delta], base: TensorSource, finetuned: TensorSource
) -> dict[str, float]:
    """||delta - decoded||^2 / ||delta||^2 of each delta, at most 1, in blocks of rows.

    Raises:
        MergeError: the two models do not fit, or a weight is not finite.
    """
    return {name: _energy(name, delta, base, finetuned) for name, delta in deltas.items()}


def _energy(name: str, delta: Delta, base: TensorSource, finetuned: TensorSource) -> float:
    shape = matrix_shape(name, base.shape(name))
    ours, theirs = finetuned.tensor(name).reshape(shape), base.tensor(name).reshape(shape)
    total = lost = 0.0
    for rows in row_blocks(shape):
        true = subtract(ours[rows], theirs[rows], name=name)
        total += squared_norm(true)
        lost += squared_norm(true - decode_rows(delta, rows))
    return min(1.0, lost / total) if total else float(lost > 0.0)


def _parts(
    variant: Variant, entry: TensorEntry, deltas: Mapping[str, Delta], raw: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The stored tensors of one parameter by name, replaced ones checked to be finite."""
    name = entry.name
    if entry.kind == "raw":
        whole = {f"{name}.raw": raw[name] if name in raw else variant.raw(name)}
        if whole[f"{name}.raw"].is_floating_point():
            check_finite(name, whole[f"{name}.raw"])
        return whole
    if entry.kind != "delta":
        return {}
    delta = deltas[name] if name in deltas else variant.delta(name)
    values = {
        "sign": delta.packed,
        "scale": delta.scale,
        "column": delta.column_scale,
        "up": delta.up,
        "down": delta.down,
    }
    parts = {f"{name}.{part}": tensor for part, tensor in values.items() if tensor is not None}
    for part, tensor in parts.items():
        if tensor.is_floating_point():
            check_finite(part, tensor)
    return parts
