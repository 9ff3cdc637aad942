"""The family on disk as the server sees it, and the adapters beside it: names, digests, bundles.

family.json is looked at whenever names are asked for and read again when its stamp changed, so a
variant that was just exported appears without a restart. If it turns unreadable the last good
reading stands. A hidden name is as good as absent until it is shown again; nothing on disk says so,
so a restart shows all.
"""

import logging
import os
from pathlib import Path

from soupkit.bundle import Family, LoadedVariant, VariantRef, open_family, open_variant
from soupkit.errors import BundleError
from soupkit.fingerprint import MAX_THREADS
from soupkit.manifest import Manifest

from .shelf import Shelf

logger = logging.getLogger(__name__)


def load_threads() -> int:
    """Threads that read one variant: two loads at a time leave the engine's thread a core."""
    return max(1, min(MAX_THREADS, (len(os.sched_getaffinity(0)) - 1) // 2))


class Catalog:
    """Names of a family; `refresh` looks whether it changed."""

    def __init__(self, path: Path, *, shelf: Shelf | None = None, pin_memory: bool = False) -> None:
        """Opens the family.

        Args:
            shelf: adapters that are served too; a variant of the same name goes before.
            pin_memory: whether variants are read into page-locked memory, for a GPU.
        """
        self.path, self.shelf = path, shelf
        self._pin_memory = pin_memory
        self.family: Family = open_family(path)
        self._stamp = self._read_stamp()
        self._complained = False
        self._hidden: set[str] = set()

    @property
    def refs(self) -> dict[str, VariantRef]:
        """All variants, by name, the hidden ones too."""
        adapters = {} if self.shelf is None else self.shelf.refs
        return {**adapters, **self.family.variants}

    @property
    def variants(self) -> dict[str, VariantRef]:
        """The variants that are served, by name."""
        return {name: ref for name, ref in self.refs.items() if name not in self._hidden}

    def is_adapter(self, ref: VariantRef) -> bool:
        """Whether it is an adapter rather than a variant of the family."""
        return ref.name not in self.family.variants

    def is_hidden(self, name: str) -> bool:
        """Whether there is a variant of that name that is not served."""
        return name in self._hidden and name in self.refs

    def hide(self, name: str) -> None:
        """Serves the name no more, whatever version of it is exported, until `show`."""
        self._hidden.add(name)

    def show(self, name: str) -> None:
        self._hidden.discard(name)

    def refresh(self) -> bool:
        """Reads again what changed on disk; True if names or digests are others now."""
        adapters = self.shelf is not None and self.shelf.refresh()
        return self._refresh_family() or adapters

    def _refresh_family(self) -> bool:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            # It may be back after a fault, and the next one is to be told again.
            self._complained = False
            return False
        try:
            family = open_family(self.path)
        except BundleError as error:
            return self._complain(f"family.json cannot be read, serving what it said: {error}")
        if family.base.fingerprint != self.family.base.fingerprint:
            return self._complain("family.json names another base now; restart to serve it")
        changed = family.variants != self.family.variants
        self.family, self._stamp, self._complained = family, stamp, False
        return changed

    def _complain(self, message: str) -> bool:
        """Says once what is wrong with family.json; nothing changes."""
        if not self._complained:
            logger.warning("%s", message)
        self._complained = True
        return False

    def load(self, ref: VariantRef) -> LoadedVariant:
        """Reads and checks a variant. Raises BundleError, also where another has its name now."""
        if self.shelf is not None and self.is_adapter(ref):
            return self.shelf.load(ref, self.family.base.fingerprint)
        variant = open_variant(self.family.folder(ref.name))
        if variant.manifest.base_fingerprint != self.family.base.fingerprint:
            raise BundleError(f"variant {ref.name!r} was made for another base; export it again")
        loaded = variant.load(threads=load_threads(), pin_memory=self._pin_memory)
        if loaded.digest != ref.digest:
            raise BundleError(
                f"variant {ref.name!r} has digest {loaded.digest}, family.json says "
                f"{ref.digest}; try again"
            )
        return loaded

    def manifests(self) -> dict[str, Manifest]:
        """What the variants hold, by name. Headers only are read; those that cannot be opened are
        left out, and refused when they are loaded.
        """
        found = {}
        if self.shelf is not None:
            found = self.shelf.manifests(self.family.base.fingerprint)
        for name in self.family.variants:
            try:
                found[name] = open_variant(self.family.folder(name)).manifest
            except BundleError as error:
                logger.warning("variant %r cannot be opened: %s", name, error)
        return found

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = (self.path / "family.json").stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
