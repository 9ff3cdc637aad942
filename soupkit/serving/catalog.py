"""The family on disk as the server sees it: names, digests, bundles.

family.json is looked at whenever names are asked for and read again when its stamp changed, so a
variant that was just exported appears without a restart. If it turns unreadable the last good
reading stands.
"""

import logging
from pathlib import Path

from soupkit.bundle import Family, LoadedVariant, VariantRef, open_family, open_variant
from soupkit.errors import BundleError

logger = logging.getLogger(__name__)


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
        """Reads and checks a variant. Raises BundleError, also where another has its name now."""
        variant = open_variant(self.family.folder(ref.name))
        if variant.manifest.base_fingerprint != self.family.base.fingerprint:
            raise BundleError(f"variant {ref.name!r} was made for another base; export it again")
        loaded = variant.load(check=True)
        if loaded.digest != ref.digest:
            raise BundleError(
                f"variant {ref.name!r} has digest {loaded.digest}, family.json says "
                f"{ref.digest}; try again"
            )
        return loaded

    def total_bytes(self) -> int:
        """Bytes of all variants; unreadable ones count nothing and are refused when loaded."""
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
