"""Durable writing: whole folders and small JSON files that appear at once or not at all, and file
locks.

The order is always: write into a hidden sibling, fsync the files and the folder, rename, fsync the
parent. A process that dies at any point (kill -9, full disk, power) leaves the old content; its
hidden sibling is recognised by `PENDING_PREFIX` and is removed by the next writer. Locks are
flock(2) on local files; they vanish with the process that holds them. It does not know what is
inside the files.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from soupkit.errors import CheckpointError

PENDING_PREFIX = ".pending-"
_LOOK_SECONDS = 0.1  # how often a lock is looked at that may be given up
MAX_JSON_BYTES = 256 * 2**20


def fault_text(error: Exception, path: Path) -> str:
    """ "<file>: <reason>" for a fault met at `path`, with the file named once."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return f"{path}: {error}"


@contextlib.contextmanager
def refusing_in_one_line(what: str) -> Iterator[None]:
    """Make a CheckpointError of one line, "<what>: <reason>", of any error of a reader."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        # Files may hold anything. Of a KeyError the text alone would say nothing.
        text = " ".join(str(error).split())
        is_sentence = isinstance(error, (OSError, ValueError)) and text
        raise CheckpointError(
            f"{what}: {text if is_sentence else f'{type(error).__name__}: {text}'}"
        ) from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that names no file (a full disk) the name of what was written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Make the folder `path` and its parents where they are missing.

    Raises:
        NotADirectoryError: a part of the path, which is named, is something else.
        OSError: the disk refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        part = next(one for one in (path, *path.parents) if os.path.lexists(one))
        raise NotADirectoryError(
            errno.ENOTDIR, "is no folder, so none can be made there", str(part)
        ) from None


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file of `folder`, then its folders, deepest first. Raises OSError."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(root, name))
        fsync_path(Path(root))


def canonical_json(value: Any) -> str:
    """The one spelling of `value` that digests are taken over: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def atomic_write_json(path: Path, value: Any, *, allow_nan: bool = False) -> None:
    """Replace the JSON file `path` in one step; a reader sees the old or the new text, never a
    part.

    Raises:
        OSError: the disk refused; the old file stands.
        ValueError: `value` holds NaN or infinity, which JSON has no word for, unless `allow_nan`.
    """
    text = json.dumps(value, indent=2, allow_nan=allow_nan) + "\n"
    descriptor, name = tempfile.mkstemp(prefix=PENDING_PREFIX, dir=path.parent)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    fsync_path(path.parent)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def parse_json(raw: bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON that may be hostile: no duplicate keys, no depth that ends the interpreter, and no
    NaN or Infinity unless `allow_nan`.

    Raises:
        ValueError: anything at all is wrong with it.
    """
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=float if allow_nan else _no_constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from None


def read_json(path: Path, *, allow_nan: bool = False) -> Any:
    """Read and parse a small, possibly hostile JSON file; `allow_nan` as in parse_json.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is larger than MAX_JSON_BYTES or is not JSON.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes are more than the {MAX_JSON_BYTES} allowed for JSON")
        return parse_json(file.read(), allow_nan=allow_nan)


def open_regular(path: Path) -> Any:
    """Open a regular file for reading bytes; a pipe or a device in its place is refused, not waited
    for.

    Raises:
        OSError: it cannot be opened or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def locked(path: Path, *, give_up: threading.Event | None = None) -> Iterator[None]:
    """Hold an exclusive flock on the lock file `path` (made if absent); waits for other holders.

    Raises:
        InterruptedError: `give_up` was set while it waited. OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if give_up is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            while not _try_lock(descriptor):
                if give_up.wait(_LOOK_SECONDS):
                    raise InterruptedError(errno.EINTR, "given up waiting for the lock", str(path))
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_pending_folder(parent: Path) -> tuple[Path, int]:
    """Make a hidden folder that is known to be in work as long as its returned lock descriptor is
    open.
    """
    folder = Path(tempfile.mkdtemp(prefix=PENDING_PREFIX, dir=parent))
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # mkdtemp gives 0700: a server that runs as another user must be able to read the result.
        os.fchmod(descriptor, 0o755)
    except BaseException:
        os.rmdir(folder)
        if descriptor >= 0:
            os.close(descriptor)
        raise
    return folder, descriptor


def hold_folder(folder: Path) -> int | None:
    """Take the lock of a folder, which is held as long as the returned descriptor is open; None if
    a living process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def is_in_work(folder: Path) -> bool:
    """Whether a living process holds the lock that make_pending_folder or hold_folder took."""
    descriptor = hold_folder(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def remove_dead_pending(parent: Path) -> None:
    """Remove what writers that died left in `parent`. Call it under the lock that the writers start
    under.
    """
    for path in parent.glob(PENDING_PREFIX + "*"):
        if path.is_dir() and not path.is_symlink():
            if not is_in_work(path):
                shutil.rmtree(path, ignore_errors=True)
        else:
            # Only the lock's holder writes plain pending files here, so this one's writer is dead.
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well and vanishes when it
    does not.

    Args:
        target: must not exist yet, or be an empty folder.

    Raises:
        FileExistsError: `target` has content already.
        OSError: the disk refused; nothing stands at `target`.
    """
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise FileExistsError(f"{target} exists already: remove it or choose another folder")
    make_folder(target.parent)
    prefix = f"{PENDING_PREFIX}{target.name}-"
    for left in target.parent.glob(glob.escape(prefix) + "*"):
        if left.is_dir() and not left.is_symlink() and not is_in_work(left):
            shutil.rmtree(left, ignore_errors=True)
    folder, descriptor = make_pending_folder(target.parent)
    pending = folder.with_name(prefix + folder.name.removeprefix(PENDING_PREFIX))
    try:
        with naming(target):
            os.rename(folder, pending)
            yield pending
            fsync_tree(pending)
            os.rename(pending, target)
            fsync_path(target.parent)
    finally:
        for leftover in (folder, pending):
            shutil.rmtree(leftover, ignore_errors=True)
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """ "sha256:<hex>" of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinity become null, tuples lists.

    Raises:
        ValueError: it holds something that JSON has no form for.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    raise ValueError(f"{value!r} of type {type(value).__name__} has no form in JSON")
