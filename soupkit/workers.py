"""Threads that work on matrices side by side, where a matrix alone cannot keep them busy.

LAPACK's eigendecomposition of a 576 x 576 matrix takes 25 ms on one thread and no less on two; two
of them on a thread each take 25 ms together. While one thread waits for the disk, another computes.
Each thread computes alone, so results do not depend on how many there are. An accelerator is kept
busy by one matrix: there is one thread, the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")

# More need more memory: each holds some copies of its matrix.
_MOST = 8


class Workers:
    """A context in which submitted work runs, on a CPU in threads of one core each."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Args: device: that the work is on; None: the CPU."""
        device = torch.device("cpu") if device is None else device
        self._threads = torch.get_num_threads()
        self._count = min(self._threads, _MOST) if device.type == "cpu" else 1
        self._pool: ThreadPoolExecutor | None = None

    @property
    def count(self) -> int:
        """Threads that work side by side."""
        return self._count

    def __enter__(self) -> Workers:
        """Start the threads, where there is more than one."""
        if self._count > 1:
            # New threads take this number over; the caller's own is put back at the end.
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="soupkit")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop what has not begun, wait for what has."""
        if self._pool is not None:
            try:
                self._pool.shutdown(cancel_futures=True)
            finally:
                # After a second Ctrl-C, too.
                torch.set_num_threads(self._threads)

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Run `act` in a thread; at once in the caller's, if that is the only one."""
        if self._pool is not None:
            return self._pool.submit(act)
        future: Future[T] = Future()
        try:
            future.set_result(act())
        except Exception as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)
        return future

    def map(self, act: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """`act` of each item, in order."""
        return [future.result() for future in [self.submit(partial(act, one)) for one in items]]

    def stream(self, act: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """`act` of each item, in order, as they are done.

        Items are drawn from this thread, one more ahead of the results than there are threads, so
        that memory does not grow with their number. An error of `act` is raised in its turn.
        """
        waiting: deque[Future[T]] = deque()
        for item in items:
            if len(waiting) > self._count:
                yield waiting.popleft().result()
            waiting.append(self.submit(partial(act, item)))
        while waiting:
            yield waiting.popleft().result()
