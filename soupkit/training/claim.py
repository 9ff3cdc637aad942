"""One living run a soup folder: a second one would merge with the first one's captured weights.

A record lock on `soup/lock`, held until the process ends: unlike flock, no child inherits it, so
data loader workers that outlive a killed run do not keep the next one out. A process may start one
run after another in its folder. Where the file system has no locks, nothing is checked.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from soupkit.errors import TrainingError

# (process, path) -> open descriptor: closing any descriptor of the file would drop the lock.
_held: dict[tuple[int, str], int] = {}


def claim(root: Path) -> None:
    """Hold the folder `root` for this process. On one rank.

    Raises:
        TrainingError: another living process holds it. OSError: it cannot be written.
    """
    path = root / "lock"
    key = (os.getpid(), str(path))
    if key in _held and path.exists() and os.path.samestat(os.fstat(_held[key]), path.stat()):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            raise TrainingError(
                f"{root} is in use by another run that is alive: two would merge with each other's "
                "weights; stop it, or give this run another output_dir"
            ) from None
    _held[key] = descriptor
