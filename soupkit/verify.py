"""Verify: is every byte of a family still what was written, and does it belong to its base?

Looks on after a fault, so that one run lists them all. Nothing is cached: the base's fingerprint is
computed anew.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from soupkit.bundle import Variant, open_variant
from soupkit.checkpoint import Checkpoint, fingerprint, open_checkpoint
from soupkit.errors import SoupkitError
from soupkit.family import Family, check_base, open_family
from soupkit.files import file_digest
from soupkit.restore import check_covers


def verify_family(
    path: str | Path,
    *,
    base: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[str]:
    """Check a family and its base.

    Args:
        base: folder or hub id of the base; None: where the family says it is.
        progress: called before each part with its name, parts done, parts in all.

    Returns:
        One line for each fault, empty if all is well.

    Raises:
        BundleError: there is no family, or family.json itself is damaged.
    """
    family = open_family(path)
    total = 1 + len(family.variants)
    report = progress or (lambda name, done, total: None)
    faults: list[str] = []
    report("base", 0, total)
    checkpoint = _check_base(family, base, faults)
    for done, name in enumerate(family.variants, start=1):
        report(name, done, total)
        found = _variant_faults(family, name, checkpoint)
        # The digest and the look at each tensor may tell the same fault.
        faults += dict.fromkeys(f"{name}: {fault}" for fault in found)
    report("done", total, total)
    return faults


def _check_base(family: Family, base: str | Path | None, faults: list[str]) -> Checkpoint | None:
    """Open the base and compare its fingerprint; None, and a fault, if it is not the family's."""
    try:
        revision = family.base.revision if base is None else None
        checkpoint = open_checkpoint(family.base.path if base is None else base, revision)
        check_base(family, checkpoint, fingerprint(checkpoint))
    except SoupkitError as error:
        faults.append(f"base: {error}")
        return None
    return checkpoint


def _variant_faults(family: Family, name: str, base: Checkpoint | None) -> Iterator[str]:
    """Every fault of one variant."""
    try:
        variant = open_variant(family.folder(name))
    except SoupkitError as error:
        yield str(error)
        return
    manifest = variant.manifest
    if manifest.base_fingerprint != family.base.fingerprint:
        yield f"was made for another base than the family's: {manifest.base_fingerprint}"
    if manifest.digest != family.variants[name].digest:
        yield f"manifest.json has digest {manifest.digest}, family.json another"
    try:
        variant.check_digest()
    except SoupkitError as error:
        yield str(error)
    try:
        if base is not None:
            check_covers(variant, base)
    except SoupkitError as error:
        yield str(error)
    yield from _not_finite(variant)
    yield from _companion_faults(variant)


def _not_finite(variant: Variant) -> Iterator[str]:
    """Parameters that hold NaN or infinity, each named, also where the digest fits."""
    for entry in variant.manifest.tensors:
        try:
            if entry.kind == "delta":
                variant.delta(entry.name)
            elif entry.kind == "raw":
                variant.raw(entry.name)
        except SoupkitError as error:
            yield str(error)


def _companion_faults(variant: Variant) -> Iterator[str]:
    for name, digest in variant.manifest.companions.items():
        path = variant.path / name
        try:
            found = file_digest(path)
        except OSError as error:
            yield f"{path}: {error.strerror or error}"
            continue
        if found != digest:
            yield f"{path}: has digest {found}, the manifest says {digest}"
