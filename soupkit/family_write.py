"""Changing a family: making one, adding a variant, cleaning up after writers that died.

A writer fills a hidden folder without the lock `family/.lock`, then, under it, renames the folder
and replaces family.json last: a process that is killed anywhere leaves the old family or the new
one. A folder that family.json may not list yet, or will list no longer, carries the file
UNLISTED_NAME; the next writer removes such folders, and nothing that is not marked. What is done of
a large variant lies in a hidden folder of its name (soupkit.partial) until one of that name is in.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint
from soupkit.config import check_variant_name
from soupkit.errors import BundleError, SoupkitError
from soupkit.family import (
    FAMILY_NAME,
    VARIANTS_NAME,
    BaseRef,
    Family,
    VariantRef,
    check_base,
    open_family,
)
from soupkit.files import (
    PENDING_PREFIX,
    atomic_write_json,
    fsync_path,
    fsync_tree,
    hold_folder,
    is_in_work,
    locked,
    make_folder,
    make_pending_folder,
    naming,
    remove_dead_pending,
)

LOCK_NAME = ".lock"
UNLISTED_NAME = ".unlisted"
PARTIAL_PREFIX = ".partial-"


def create_or_open_family(path: str | Path, base: Checkpoint) -> Family:
    """Open the family at `path`, or make an empty one for `base`.

    Raises:
        BundleError: the family there belongs to another base, or is damaged; or it is a model's
            folder.
        OSError: the disk refused.
    """
    path = Path(path)
    is_model = (path / "config.json").exists() or any(path.glob("*.safetensors"))
    if is_model and not (path / FAMILY_NAME).exists():
        raise BundleError(f"{path} is a model folder: give the family a folder of its own")
    fingerprint = checkpoint_fingerprint(base)
    make_folder(path / VARIANTS_NAME)
    with locked(path / LOCK_NAME):
        if (path / FAMILY_NAME).exists():
            family = open_family(path)
            check_base(family, base, fingerprint)
            return family
        dtype = str(base.main_dtype).removeprefix("torch.")
        family = Family(path, BaseRef(base.source, base.revision, fingerprint, dtype), {})
        atomic_write_json(path / FAMILY_NAME, family.to_json())
    return family


@contextlib.contextmanager
def staged_variant(path: Path) -> Iterator[Path]:
    """Yield a hidden empty folder inside the family to fill with a variant; removed unless it was
    added.
    """
    with locked(path / LOCK_NAME):
        _clean(path)
        folder, descriptor = make_pending_folder(path / VARIANTS_NAME)
    try:
        with naming(path):
            (folder / UNLISTED_NAME).touch()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextlib.contextmanager
def kept_folder(path: Path, name: str) -> Iterator[Path | None]:
    """Yield the hidden folder for what is done of the variant `name`, as it was left; None if
    another process is at it.

    It is removed when the block ends well, or with an error that another try would meet again.
    """
    folder = path / VARIANTS_NAME / (PARTIAL_PREFIX + name)
    with locked(path / LOCK_NAME):
        folder.mkdir(exist_ok=True)
        descriptor = hold_folder(folder)
    if descriptor is None:
        yield None
        return
    try:
        is_done = False
        try:
            yield folder
            is_done = True
        except (SoupkitError, ValueError):
            is_done = True
            raise
        finally:
            if is_done:
                with contextlib.suppress(OSError), locked(path / LOCK_NAME):
                    _remove(folder)
    finally:
        os.close(descriptor)


def has_partial(path: Path, name: str) -> bool:
    """Whether an export under `name` was interrupted and would go on, or is under way."""
    # Compared, not joined: `name` may be anything that a person typed.
    there = {folder.name for folder in (path / VARIANTS_NAME).glob(PARTIAL_PREFIX + "*")}
    return PARTIAL_PREFIX + name in there


def add_variant(path: Path, name: str, staged: Path, *, digest: str) -> tuple[VariantRef, bool]:
    """Move a filled staged folder into the family and list it under `name`, in place of what had
    that name.

    Args:
        path: of the family. staged: from staged_variant. digest: content digest of the staged
            variant.

    Returns:
        The new line of family.json, and whether it replaced one.

    Raises:
        BundleError, OSError: nothing was changed.
    """
    check_variant_name(name)
    fsync_tree(staged)
    with locked(path / LOCK_NAME):
        family = open_family(path)
        old = family.folder(name) if name in family.variants else None
        ref = VariantRef(name, f"{VARIANTS_NAME}/{_free_name(path, name, digest)}", digest)
        try:
            if old is not None and old.is_dir():
                (old / UNLISTED_NAME).touch()
            os.rename(staged, path / ref.path)
            fsync_path(path / VARIANTS_NAME)
            listed = Family(path, family.base, {**family.variants, name: ref})
            atomic_write_json(path / FAMILY_NAME, listed.to_json())
        finally:
            # Removes the old folder, or the new one if family.json was not replaced; else the next
            # writer does.
            with contextlib.suppress(OSError):
                _clean(path)
        _remove_partial(path, name)
    return ref, old is not None


def remove_variant(path: Path, name: str) -> None:
    """Take the variant `name` out of family.json, then delete its folder, and what an export under
    that name left which was interrupted; or that alone.

    Raises:
        BundleError: no family, or no variant of that name; nothing was changed.
        OSError: family.json cannot be written; nothing was changed.
    """
    if name not in open_family(path).variants and not has_partial(path, name):
        open_family(path).folder(name)
    with locked(path / LOCK_NAME):
        family = open_family(path)
        if name not in family.variants and has_partial(path, name) and _remove_partial(path, name):
            return
        folder = family.folder(name)
        if folder.is_dir():
            (folder / UNLISTED_NAME).touch()
        rest = {key: ref for key, ref in family.variants.items() if key != name}
        try:
            atomic_write_json(path / FAMILY_NAME, Family(path, family.base, rest).to_json())
        finally:
            # Removes the folder, or only its mark if family.json still lists it.
            with contextlib.suppress(OSError):
                _clean(path)
        _remove_partial(path, name)


def _free_name(path: Path, name: str, digest: str) -> str:
    """A folder name for the variant that nothing has yet: `name`, `name@<digest>`,
    `name@<digest>-2` ...
    """
    versioned = f"{name}@{digest.removeprefix('sha256:')[:8]}"
    numbered = (f"{versioned}-{number}" for number in itertools.count(2))
    for candidate in itertools.chain([name, versioned], numbered):
        if not os.path.lexists(path / VARIANTS_NAME / candidate):
            return candidate
    raise AssertionError("there is no end of numbers")


def _clean(path: Path) -> None:
    """Remove what writers that died left behind. The caller holds the lock; an OSError leaves it
    for later.
    """
    remove_dead_pending(path)
    remove_dead_pending(path / VARIANTS_NAME)
    family = open_family(path)
    listed = {(path / ref.path).resolve() for ref in family.variants.values()}
    for marker in (path / VARIANTS_NAME).glob(f"*/{UNLISTED_NAME}"):
        folder = marker.parent
        if folder.name.startswith("."):
            continue
        if folder.resolve() in listed:
            marker.unlink(missing_ok=True)
        elif not folder.is_symlink():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder of the family. The caller holds the lock."""
    # Renamed first: a removal that is killed half-way must not lose the marker and keep the rest.
    dead = folder.with_name(f"{PENDING_PREFIX}{folder.name.lstrip('.')}")
    os.rename(folder, dead)
    shutil.rmtree(dead, ignore_errors=True)


def _remove_partial(path: Path, name: str) -> bool:
    """Remove what an older export under `name` left that was interrupted, unless one is at it;
    returns whether there was any. The caller holds the lock.
    """
    folder = path / VARIANTS_NAME / (PARTIAL_PREFIX + name)
    with contextlib.suppress(OSError):
        if folder.is_dir() and not is_in_work(folder):
            _remove(folder)
            return True
    return False
