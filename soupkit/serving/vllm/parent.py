"""The processes that vLLM starts end with the one that started them, as if it had told them so:
one that is killed tells nobody, and an engine that lives on keeps its device's memory.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

GRACE_SECONDS = 20


def follow() -> None:
    """From now on the end of the parent process is the end of this one, if Python started it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's way to end
    threading.Event().wait(GRACE_SECONDS)
    os._exit(1)
