"""The end of a process that shared a process group with others."""

import atexit
import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """End this process, whose work is done, with status 0 and without Python's own end.

    A thread of gloo lives while anything holds its group, and much does after
    `destroy_process_group`: DDP's reducer, a DeviceMesh, DeepSpeed's engine. One that lets go of a
    tensor while Python ends wants the lock that is no more, and aborts the process now and then
    (pytorch/pytorch#190489). Exit handlers run: loggers write what they hold.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
