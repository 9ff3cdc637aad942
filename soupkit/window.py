"""Jobs under way side by side, as many as their memory allows; results come as the jobs end.

    sum of nbytes of the jobs under way <= most_bytes,  or one job alone

Largest jobs first keep all threads busy to the end: whoever lists them may order them so. It does
not know what a job does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from soupkit.workers import Workers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Something to do in a thread.

    Args:
        nbytes: memory that it takes until its result has been used.
        begin: called in the caller's thread when its turn comes; what it returns runs in another.
    """

    nbytes: int
    begin: Callable[[], Callable[[], T]]


def as_they_end(workers: Workers, jobs: Iterable[Job[T]], *, most_bytes: int) -> Iterator[T]:
    """The results of jobs in the order in which they end; that of one thread is the jobs' own.

    Jobs are drawn and begun from this thread, where there are several threads one more than those.
    An error of a job is raised when it ends; jobs under way are left to the workers.
    """
    running: dict[Future[T], int] = {}
    most = workers.count + 1 if workers.count > 1 else 1

    def ended() -> Iterator[T]:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield future.result()
            # Not before: the result was in use until now.
            del running[future]

    for job in jobs:
        while running and (len(running) >= most or sum(running.values()) + job.nbytes > most_bytes):
            yield from ended()
        running[workers.submit(job.begin())] = job.nbytes
    while running:
        yield from ended()
