"""A process that ends with the one that started it, whose pipe it has as its stdin.

Linux ends it even while it is stopped or never comes to read: with the thread that started it.
"""

import contextlib
import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1


def start_of(module: str) -> str:
    """The code of a process that runs `main` of a module of soupkit.serving, tied from its start:
    what it imports takes a while, in which it may be stopped.
    """
    return (
        "from soupkit.serving import lifeline; lifeline.tie(); "
        f"from soupkit.serving.{module} import main; main()"
    )


def tie() -> None:
    """On Linux, from now on the end of whoever started this process is its own."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hold() -> None:
    """From now on the end of stdin is the end of this process, whatever it is doing."""
    tie()
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(1)
