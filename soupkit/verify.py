"""Verify: is every byte of a family still what was written, and does it belong to its base?

Looks on after a fault, so that one run lists them all. Each byte is read once, tensors side by side
in threads that hold a piece each. Nothing is cached: the base's fingerprint is computed anew.
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
        progress: called with "base" or the variant's name, bytes of weights that were hashed (of
            the base and of all variants, as stored), and these bytes in all.

    Returns:
        One line for each fault, empty if all is well.

    Raises:
        BundleError: there is no family, or family.json itself is damaged.
    """
    family = open_family(path)
    faults: list[str] = []
    checkpoint = _open_base(family, base, faults)
    variants = {name: _opened(family, name) for name in family.variants}
    total = sum(one.nbytes for one in variants.values() if isinstance(one, Variant))
    if checkpoint is not None:
        total += sum(checkpoint.spec(name).nbytes for name in checkpoint.names)
    done = 0

    def counter(what: str) -> Callable[[int], None]:
        def told(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress(what, done, total)

        return told

    if checkpoint is not None:
        checkpoint = _checked_base(family, checkpoint, faults, counter("base"))
    for name, variant in variants.items():
        found = (
            _variant_faults(family, name, variant, checkpoint, counter(name))
            if isinstance(variant, Variant)
            else [variant]
        )
        # Two looks may tell the same fault.
        faults += dict.fromkeys(f"{name}: {fault}" for fault in found)
    return faults


def _open_base(family: Family, base: str | Path | None, faults: list[str]) -> Checkpoint | None:
    """The family's base, or what is given for it; None, and a fault, if it is none."""
    try:
        revision = family.base.revision if base is None else None
        return open_checkpoint(family.base.path if base is None else base, revision)
    except SoupkitError as error:
        faults.append(f"base: {error}")
        return None


def _checked_base(
    family: Family, checkpoint: Checkpoint, faults: list[str], told: Callable[[int], None]
) -> Checkpoint | None:
    """`checkpoint` if its fingerprint is that of the family's base; None, and a fault, if not."""
    try:
        check_base(family, checkpoint, fingerprint(checkpoint, told=told))
    except SoupkitError as error:
        faults.append(f"base: {error}")
        return None
    return checkpoint


def _opened(family: Family, name: str) -> Variant | str:
    """A variant, or why it cannot be opened."""
    try:
        return open_variant(family.folder(name))
    except SoupkitError as error:
        return str(error)


def _variant_faults(
    family: Family,
    name: str,
    variant: Variant,
    base: Checkpoint | None,
    told: Callable[[int], None],
) -> Iterator[str]:
    """Every fault of one variant."""
    manifest = variant.manifest
    if manifest.base_fingerprint != family.base.fingerprint:
        yield f"was made for another base than the family's: {manifest.base_fingerprint}"
    if manifest.digest != family.variants[name].digest:
        yield f"manifest.json has digest {manifest.digest}, family.json another"
    yield from variant.content_faults(told)
    try:
        if base is not None:
            check_covers(variant, base)
    except SoupkitError as error:
        yield str(error)
    yield from _companion_faults(variant)


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
