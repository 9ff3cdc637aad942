"""Checked private copies of variants in host memory, which all processes of an engine map.

A variant is copied into a folder that only this user reaches, on /dev/shm where there is one, and
the copy is checked whole: digest, shapes, finite numbers, the base it was made for. What then
happens to the family on disk cannot reach an engine any more: taking a variant from its copy reads
memory, and cannot fail. A copy lies in a folder named by its content digest, so what vLLM keys by
an adapter's path (blocks of the prefix cache) is keyed by content.

A store's folder is locked as long as its process lives: what a killed one left is told by that, and
not by a number, which another process may have by now, or has in another container.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

from soupkit.bundle import LoadedVariant, open_variant
from soupkit.errors import BundleError, ServingError
from soupkit.family import Family, VariantRef, open_family
from soupkit.files import fault_text, hold_folder
from soupkit.manifest import MANIFEST_NAME, WEIGHTS_NAME

from .settings import HOST_BYTES, STORE

logger = logging.getLogger("vllm.soupkit")

PREFIX = "soupkit-"
_STORE_NAME = re.compile(r"soupkit-[0-9]+-[a-z0-9_]{8}")  # as mkdtemp makes them
SHARED_MEMORY = Path("/dev/shm")


class Store:
    """The copies of one process that serves a family; `close` removes them."""

    def __init__(self, family: Path, *, folder: Path | None = None, budget: int | None = None):
        """Opens the family; nothing is copied yet.

        Args:
            folder: where the copies' folder is made; None: /dev/shm, or where temporary files lie
                if there is none or it is too small.
            budget: bytes of all copies; None: half of what is free there.
        """
        self._path, self._making = family, threading.Lock()
        self.family: Family = open_family(family)
        self._stamp = self._read_stamp()
        for place in {SHARED_MEMORY, Path(tempfile.gettempdir()), folder or SHARED_MEMORY}:
            remove_leftovers(place)
        parent = folder or self._roomy_parent()
        try:
            self.folder, self._lock = _make_folder(parent)
        except OSError as error:
            raise ServingError(fault_text(error, parent)) from error
        self.budget = shutil.disk_usage(parent).free // 2 if budget is None else budget

    def _roomy_parent(self) -> Path:
        """Memory, if half of what is free there takes any variant; containers may have little."""
        largest = 0
        for ref in self.family.variants.values():
            with contextlib.suppress(BundleError):  # told when it is asked for
                largest = max(largest, self.size(ref))
        if os.access(SHARED_MEMORY, os.W_OK):
            if shutil.disk_usage(SHARED_MEMORY).free // 2 >= largest:
                return SHARED_MEMORY
            logger.warning("%s is too small for variants of %d bytes", SHARED_MEMORY, largest)
        return Path(tempfile.gettempdir())

    def close(self) -> None:
        """Removes all copies; what is mapped stays readable."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def refresh(self) -> Family:
        """The family as it is now; as it was while family.json is unreadable or of another base."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            with contextlib.suppress(BundleError):
                family = open_family(self._path)
                if family.base.fingerprint == self.family.base.fingerprint:
                    self.family, self._stamp = family, stamp
        return self.family

    def size(self, ref: VariantRef) -> int:
        """Bytes of the copy of a variant. Raises BundleError if it cannot be opened."""
        source = self.family.folder(ref.name)
        try:
            return sum((source / name).stat().st_size for name in (WEIGHTS_NAME, MANIFEST_NAME))
        except OSError as error:
            raise BundleError(fault_text(error, source)) from error

    def copy(self, ref: VariantRef) -> Path:
        """The checked copy of a variant, made if there is none; may run on any thread.

        Raises:
            BundleError: the variant is damaged, not the one that `ref` names, or there is no room.
        """
        self._be_there()
        target = self.folder / ref.digest.rpartition(":")[2]
        if target.exists():
            return target
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            self._fill(scratch, ref)
            with contextlib.suppress(OSError):  # another thread was first
                scratch.rename(target)
            return target
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _be_there(self) -> None:
        """Makes the folder again if somebody tidied it away; what is mapped stays."""
        with self._making:
            if not self.folder.exists():
                logger.warning("%s is gone: who removes what is in use there?", self.folder)
                self._unlock()
                self.folder, self._lock = _make_folder(self.folder.parent)

    def _fill(self, scratch: Path, ref: VariantRef) -> None:
        source = self.family.folder(ref.name)
        open_variant(source)  # before its bytes are moved
        try:
            for name in (WEIGHTS_NAME, MANIFEST_NAME):
                shutil.copyfile(source / name, scratch / name, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise BundleError(
                    f"{self.folder.parent} is full: {STORE} names a larger folder, "
                    f"{HOST_BYTES} allows fewer copies"
                ) from error
            raise BundleError(fault_text(error, source)) from error
        copied = open_variant(scratch)
        if copied.manifest.base_fingerprint != self.family.base.fingerprint:
            raise BundleError(f"variant {ref.name!r} was made for another base; export it again")
        if copied.manifest.digest != ref.digest:
            raise BundleError(
                f"variant {ref.name!r} has digest {copied.manifest.digest}, family.json says "
                f"{ref.digest}; try again"
            )
        for fault in copied.content_faults():
            raise BundleError(f"variant {ref.name!r}: {fault}")

    def drop(self, digest: str) -> None:
        """Removes a copy, if there is one; those who have mapped it keep it."""
        shutil.rmtree(self.folder / digest.rpartition(":")[2], ignore_errors=True)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = (self._path / "family.json").stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_copy(path: Path) -> LoadedVariant:
    """A store's copy, mapped.

    Raises:
        ServingError: it is none: what lies elsewhere was checked by nobody, and may change.
    """
    is_ours = path.parent.name.startswith(PREFIX) and path.parent.stat().st_uid == os.getuid()
    if is_ours:
        found = open_variant(path)
        if found.manifest.digest.rpartition(":")[2] == path.name:
            return found.mapped()
    raise ServingError(
        f"{path} is no checked copy of a variant: ask the server for a variant of its family by "
        "name; adapters from elsewhere are not served beside one"
    )


def remove_leftovers(parent: Path) -> None:
    """Removes the folders of this user's processes that were killed."""
    for path in parent.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):
            is_store = _STORE_NAME.fullmatch(path.name) and not path.is_symlink()
            if not is_store or path.lstat().st_uid != os.getuid():
                continue
            lock = hold_folder(path)
            if lock is not None:
                # Whoever has just made it and not locked it yet makes another.
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _make_folder(parent: Path) -> tuple[Path, int | None]:
    """A folder that only this user reaches, and its lock, if the disk knows locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        try:
            lock = hold_folder(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return folder, None
        if lock is not None and folder.exists():
            return folder, lock
        if lock is not None:
            os.close(lock)
