"""A family on disk: one base by fingerprint, and its variants, listed in family.json.

    family/family.json          schema, base {path, revision, fingerprint, dtype}, variants {name:
    {path, digest}} family/variants/<name>/     one variant (soupkit.bundle) family/.lock
    held by whoever changes the family

A writer fills a hidden folder without the lock, then, under it, renames the folder and replaces
family.json last: a process that is killed anywhere leaves the old family or the new one. A folder
that family.json may not list yet, or will list no longer, carries the file UNLISTED_NAME; the next
writer removes such folders, and nothing that is not marked. Readers take no lock: a reader whose
variant was replaced under it gets a BundleError and reads family.json again.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint
from soupkit.config import check_variant_name
from soupkit.errors import BundleError
from soupkit.files import (
    PENDING_PREFIX,
    atomic_write_json,
    fsync_path,
    fsync_tree,
    locked,
    make_pending_folder,
    read_json,
    remove_dead_pending,
)
from soupkit.fingerprint import is_digest

SCHEMA = 1
FAMILY_NAME = "family.json"
LOCK_NAME = ".lock"
VARIANTS_NAME = "variants"
UNLISTED_NAME = ".unlisted"


@dataclass(frozen=True, slots=True)
class BaseRef:
    """Which model the variants are deltas to.

    Attributes:
        path: folder or hub id where it was when the family was made. revision: commit of a hub
            snapshot.
        fingerprint: "sha256:<hex>". dtype: "bfloat16" and so on, of most of its entries.
    """

    path: str
    revision: str | None
    fingerprint: str
    dtype: str


@dataclass(frozen=True, slots=True)
class VariantRef:
    """A line of family.json: the variant's name, its folder relative to the family, its content
    digest.
    """

    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Family:
    """family.json as it was read; a snapshot that does not change. variants are sorted by name."""

    path: Path
    base: BaseRef
    variants: Mapping[str, VariantRef]

    def folder(self, name: str) -> Path:
        """The folder of a variant.

        Raises:
            BundleError: the family has no such variant, or the folder leads out of the family.
        """
        if name not in self.variants:
            known = ", ".join(self.variants) or "none"
            raise BundleError(f"{self.path} has no variant {name!r}; it has: {known}")
        root = self.path.resolve()
        folder = (root / self.variants[name].path).resolve()
        if root not in folder.parents:
            raise BundleError(
                f"{self.path}: the folder of {name!r} leads out of the family: {folder}"
            )
        return folder

    def to_json(self) -> dict[str, Any]:
        """The document of family.json."""
        base = self.base
        return {
            "schema": SCHEMA,
            "base": {
                "path": base.path,
                "revision": base.revision,
                "fingerprint": base.fingerprint,
                "dtype": base.dtype,
            },
            "variants": {
                name: {"path": self.variants[name].path, "digest": self.variants[name].digest}
                for name in sorted(self.variants)
            },
        }


def open_family(path: str | Path) -> Family:
    """Read family.json of the family at `path`; hostile content is refused.

    Raises:
        BundleError: no family there, or family.json is damaged or names paths outside of it.
    """
    path = Path(path)
    file = path / FAMILY_NAME
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise BundleError(
            f"{path} is no family: it has no {FAMILY_NAME}; `soupkit export` makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{file}: {error}") from error
    try:
        return _parse(path, document)
    except ValueError as error:
        raise BundleError(f"{file}: {error}") from None


def _need(condition: object, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _parse(path: Path, document: Any) -> Family:
    _need(isinstance(document, dict), "is not a JSON object")
    _need(document.get("schema") == SCHEMA, f"has schema {document.get('schema')!r}, not {SCHEMA}")
    base, listed = document.get("base"), document.get("variants")
    _need(
        isinstance(base, dict) and set(base) == {"path", "revision", "fingerprint", "dtype"},
        "has no base",
    )
    _need(isinstance(base["path"], str) and base["path"], "its base has no path")
    _need(base["revision"] is None or isinstance(base["revision"], str), "its base has no revision")
    _need(is_digest(base["fingerprint"]), "its base has no fingerprint")
    _need(isinstance(base["dtype"], str), "its base has no dtype")
    _need(isinstance(listed, dict), "has no variants")
    variants: dict[str, VariantRef] = {}
    for name in sorted(listed):
        check_variant_name(name)
        item = listed[name]
        _need(
            isinstance(item, dict) and set(item) == {"path", "digest"},
            f"variant {name!r} is malformed",
        )
        _need(is_digest(item["digest"]), f"variant {name!r} has no digest")
        _need(
            _is_inner_path(item["path"]),
            f"variant {name!r} has the path {item['path']!r}",
        )
        variants[name] = VariantRef(name, item["path"], item["digest"])
    return Family(path, BaseRef(**base), variants)


def _is_inner_path(path: Any) -> bool:
    """Whether a path of family.json is `variants/<one visible part>`."""
    if not isinstance(path, str) or not path.startswith(VARIANTS_NAME + "/"):
        return False
    last = path.removeprefix(VARIANTS_NAME + "/")
    return bool(last) and not last.startswith(".") and not set(last) & set("/\\\0")


def create_or_open_family(path: str | Path, base: Checkpoint) -> Family:
    """Open the family at `path`, or make an empty one for `base`.

    Raises:
        BundleError: the family there belongs to another base, or is damaged.
        OSError: the disk refused.
    """
    path = Path(path)
    fingerprint = checkpoint_fingerprint(base)
    (path / VARIANTS_NAME).mkdir(parents=True, exist_ok=True)
    with locked(path / LOCK_NAME):
        if (path / FAMILY_NAME).exists():
            family = open_family(path)
            check_base(family, base, fingerprint)
            return family
        dtype = str(base.main_dtype).removeprefix("torch.")
        family = Family(path, BaseRef(base.source, base.revision, fingerprint, dtype), {})
        atomic_write_json(path / FAMILY_NAME, family.to_json())
    return family


def check_base(family: Family, base: Checkpoint, fingerprint: str) -> None:
    """Raise BundleError unless `base`, of that fingerprint, is the one the family was made for."""
    if fingerprint != family.base.fingerprint:
        raise BundleError(
            f"{base.path} is not the base of {family.path}: it has fingerprint {fingerprint[:19]}..., "
            f"the family was made for {family.base.path} with {family.base.fingerprint[:19]}...; "
            "the shapes may agree, the weights do not: give that base, or another family folder"
        )


@contextlib.contextmanager
def staged_variant(path: Path) -> Iterator[Path]:
    """Yield a hidden empty folder inside the family to fill with a variant; removed unless it was
    added.
    """
    with locked(path / LOCK_NAME):
        _clean(path)
        folder, descriptor = make_pending_folder(path / VARIANTS_NAME)
    try:
        (folder / UNLISTED_NAME).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


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
    return ref, old is not None


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
            # Renamed first: a removal that is killed half-way must not lose the marker and keep the
            # rest.
            dead = folder.with_name(PENDING_PREFIX + folder.name)
            os.rename(folder, dead)
            shutil.rmtree(dead, ignore_errors=True)
