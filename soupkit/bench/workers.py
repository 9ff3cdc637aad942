"""Findings from several processes at a time: for what waits for a compiler, and may crash.

Each process is a fresh one, with a GPU context of its own: an error of CUDA in one is none in
another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait

from soupkit.bench.findings import Finding

Share = Callable[[int, int], Iterator[Finding]]

MOST = 12


def num_workers() -> int:
    """Processes for this machine: one core is left to the caller."""
    return max(1, min(MOST, (os.cpu_count() or 1) - 1))


def run_parallel(share: Share, *, workers: int, seconds: float) -> Iterator[Finding]:
    """The findings of share(i, workers) for each i, as they come.

    After `seconds`, and when the iterator is closed, the processes are killed. One that ends by
    itself with an error is a finding too.

    Args:
        share: a function at the top of a module.
    """
    context = multiprocessing.get_context("spawn")
    processes, pipes = {}, []
    for i in range(workers):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, share, i, workers), daemon=True)
        process.start()
        theirs.close()
        processes[mine] = process
        pipes.append(mine)
    end = time.monotonic() + seconds
    try:
        while pipes:
            ready = wait(pipes, max(0.0, end - time.monotonic()))
            if not ready:
                return
            for pipe in pipes.copy():
                if pipe not in ready:
                    continue
                try:
                    found = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    processes[pipe].join()
                    code = processes[pipe].exitcode
                    if code:
                        yield Finding("a process", "FAILED", f"ended with exit code {code}")
                    continue
                yield found
    finally:
        for pipe, process in processes.items():
            process.kill()
            process.join()
            pipe.close()


def _work(pipe: Connection, share: Share, first: int, step: int) -> None:
    # An interrupt is for the caller, who ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for finding in share(first, step):
        pipe.send(finding)
