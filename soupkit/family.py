"""A family on disk, read: one base by fingerprint, and its variants, listed in family.json.

    family/family.json         schema; base {path, revision, fingerprint, dtype};
                               variants {name: {path, digest}}
    family/variants/<name>/    one variant (soupkit.bundle)

family.json is read as hostile input: any fault is a BundleError, and no path in it leads out of the
family. Readers take no lock: whoever finds that a variant was replaced while it was read gets a
BundleError and reads family.json again. soupkit.family_write changes families.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from soupkit.config import check_variant_name
from soupkit.errors import BundleError, CheckpointError
from soupkit.files import fault_text, read_json
from soupkit.fingerprint import is_digest

SCHEMA = 1
FAMILY_NAME = "family.json"
VARIANTS_NAME = "variants"


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
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{path} is no family: it has no {FAMILY_NAME}; `soupkit export` makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(fault_text(error, file)) from error
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


def check_base(family: Family, base: Checkpoint, fingerprint: str) -> None:
    """Raise BundleError unless `base`, of that fingerprint, is the one the family was made for."""
    if fingerprint != family.base.fingerprint:
        remedy = "give that base, or another family folder"
        if not family.variants:
            remedy += "; it has no variant yet, so its folder can also be removed"
        raise BundleError(
            f"{base.path} is not the base of {family.path}: it has {fingerprint[:19]}..., "
            f"the family was made for {family.base.path} with {family.base.fingerprint[:19]}...; "
            f"the shapes may agree, the weights do not: {remedy}"
        )


def open_base(family: Family, base: str | Path | None = None) -> Checkpoint:
    """Open the base of a family and check that it is the one the variants were made for.

    Args:
        base: folder or hub id; None: where family.json says it is.

    Raises:
        BundleError: it has another fingerprint.
        CheckpointError: it cannot be opened.
    """
    revision = family.base.revision if base is None else None
    try:
        checkpoint = open_checkpoint(family.base.path if base is None else base, revision)
    except CheckpointError as error:
        if base is not None:
            raise
        raise CheckpointError(
            f"the base of {family.path} cannot be opened: {error}; say where it is with --base"
        ) from error
    check_base(family, checkpoint, checkpoint_fingerprint(checkpoint))
    return checkpoint
