"""The folders of a pool on disk: made, held while they are read, and removed; see pool.py for what
they mean and in which order they change. Not here: what is in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from soupkit.files import (
    atomic_write_json,
    hold_folder,
    make_pending_folder,
    naming,
    remove_dead_pending,
)
from soupkit.kmerge import PoolRule
from soupkit.pool_manifest import POOL_NAME, SLOT_FOLDER, SLOTS_NAME, Manifest, SlotEntry

LOCK_NAME = ".lock"


def write_empty(folder: Path, rule: PoolRule) -> None:
    """Make an empty pool of the empty folder. Raises OSError."""
    (folder / SLOTS_NAME).mkdir()
    (folder / LOCK_NAME).touch()
    atomic_write_json(folder / POOL_NAME, Manifest(rule).to_json())


@contextlib.contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether a slot's folder is there; if so, `clean` leaves it alone until the block ends.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # It may have been removed before the lock was had.
        yield folder.exists()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staging_in(pool: Path) -> Iterator[Path]:
    """A hidden folder inside the pool that vanishes in the end."""
    folder, descriptor = make_pending_folder(pool / SLOTS_NAME)
    try:
        with naming(pool):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def clean(pool: Path, slots: Iterable[SlotEntry]) -> None:
    """Remove what has a slot folder's name, is of none of these and is read by nobody. The caller
    has the pool's lock. Raises OSError.
    """
    home = pool / SLOTS_NAME
    # Without it no task could be removed either, should somebody have removed it.
    home.mkdir(exist_ok=True)
    remove_dead_pending(pool)
    remove_dead_pending(home)
    listed = {slot.folder for slot in slots}
    for folder in home.iterdir():
        if not SLOT_FOLDER.fullmatch(folder.name) or folder.name in listed:
            continue
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()  # Not ours, and in the way of a slot to come.
            continue
        descriptor = hold_folder(folder)
        if descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
