"""The family on disk as the server sees it: names, digests, folders, and the files beside the
weights.

family.json is looked at whenever names are asked for and read again when its stamp changed, so a
variant that was just exported appears without a restart. If it turns unreadable the last good
reading stands.
"""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soupkit.bundle import Family, LoadedVariant, VariantRef, open_family, open_variant
from soupkit.checkpoint import Checkpoint
from soupkit.errors import BundleError, ServingError

logger = logging.getLogger(__name__)

# Settings of config.json that do not change what a forward pass computes.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class Catalog:
    """Names of a family; `refresh` looks whether it changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.family: Family = open_family(path)
        self._stamp = self._read_stamp()
        self._complained = False

    @property
    def variants(self) -> dict[str, VariantRef]:
        return dict(self.family.variants)

    def refresh(self) -> bool:
        """Reads family.json again if it changed; True if names or digests are others now."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        try:
            family = open_family(self.path)
        except BundleError as error:
            if not self._complained:
                logger.warning("family.json cannot be read, serving what it said before: %s", error)
            self._complained = True
            return False
        if family.base.fingerprint != self.family.base.fingerprint:
            logger.warning("family.json names another base now; restart the server to serve it")
            return False
        changed = family.variants != self.family.variants
        self.family, self._stamp, self._complained = family, stamp, False
        return changed

    def load(self, ref: VariantRef) -> LoadedVariant:
        """Reads and checks a variant. Raises BundleError, also if it is no longer the one that was
        meant.
        """
        variant = open_variant(self.family.folder(ref.name))
        if variant.manifest.base_fingerprint != self.family.base.fingerprint:
            raise BundleError(f"variant {ref.name!r} was made for another base; export it again")
        loaded = variant.load(check=True)
        if loaded.digest != ref.digest:
            raise BundleError(
                f"variant {ref.name!r} has digest {loaded.digest}, family.json says {ref.digest}; "
                "try again"
            )
        return loaded

    def total_bytes(self) -> int:
        """Bytes of all variants; unreadable ones count nothing here and are refused when they are
        loaded.
        """
        total = 0
        for name in self.family.variants:
            try:
                total += open_variant(self.family.folder(name)).nbytes
            except BundleError as error:
                logger.warning("variant %r cannot be opened: %s", name, error)
        return total

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = (self.path / "family.json").stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def with_companions(base: Checkpoint, folder: Path, read: Callable[[Path], Any]) -> Any:
    """Calls `read` on a folder that holds the base's companion files, those of a variant in their
    place.
    """
    files = dict(base.files())
    for name in open_variant(folder).manifest.companions:
        files[name] = folder / name
    with tempfile.TemporaryDirectory(prefix="soupkit-text-") as overlay:
        for name, path in files.items():
            (Path(overlay) / name).symlink_to(path.resolve())
        return read(Path(overlay))


def check_config(variant: dict[str, Any], base: dict[str, Any], *, name: str) -> None:
    """Refuses a variant whose configuration makes the model compute something else.

    Raises:
        ServingError: naming the first setting that differs.
    """
    for key in sorted(variant.keys() | base.keys()):
        if key in HARMLESS or "dropout" in key or variant.get(key) == base.get(key):
            continue
        raise ServingError(
            f"variant {name!r}: config.json sets {key}={variant.get(key)!r}, the base "
            f"{base.get(key)!r}; it cannot share a batch with the base: serve the restored model"
        )
