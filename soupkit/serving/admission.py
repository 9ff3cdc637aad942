"""Adapters of a folder on their way into a pool: added when they are asked for, off the engine's
thread, one at a time and once however many wait.

What was refused is told again for a while, unless the adapter or the pool's content is another one
by then. What the served model could not take is refused before the pool changes, for a merge would
spoil the slot of others too. Not here: the merge (soupkit.pool).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from soupkit.adapter_config import CONFIG_NAME, WEIGHTS_NAME
from soupkit.adapter_folder import AdapterInfo, open_adapter
from soupkit.bundle import VariantRef
from soupkit.config import check_variant_name
from soupkit.errors import PoolError, ServingError, SoupkitError
from soupkit.pool import AdapterPool, PoolReport

from .states import QueueFull

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0

Refs = Mapping[str, VariantRef]
# Size and time of both files of an adapter, None where one is missing.
Stamp = tuple[tuple[int, int] | None, ...]


class Admissions:
    """The way from one folder into one pool.

    Attributes:
        adder: the thread that writes into the pool. One: its writers wait for each other anyway.
        check: raises SoupkitError for what the served model cannot take; None: nothing is known.
    """

    def __init__(
        self, pool: AdapterPool, adapters: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nobody waits yet. `adapters`: folder with one PEFT adapter a folder."""
        self._pool, self._adapters, self._clock = pool, adapters, clock
        self.adder = ThreadPoolExecutor(1, "soupkit-pool")
        self.check: Callable[[AdapterInfo], None] | None = None
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[float, str, Stamp, Refs]] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def names(self) -> list[str]:
        """Of all adapters that the folder has now, sorted."""
        try:
            found = sorted(path.parent.name for path in self._adapters.glob(f"*/{CONFIG_NAME}"))
        except OSError:
            return []
        return [name for name in found if _is_name(name)]

    def has(self, name: str) -> bool:
        """Whether the folder has an adapter of that name."""
        return _is_name(name) and (self._adapters / name / CONFIG_NAME).is_file()

    def infos(self, names: list[str]) -> dict[str, AdapterInfo]:
        """What these adapters are, without those that cannot be read."""
        found = {}
        for name in names:
            try:
                found[name] = open_adapter(self._adapters / name).info
            except SoupkitError as error:
                logger.warning("adapter %r: %s", name, error)
        return found

    async def admit(self, name: str, refs: Refs, *, most: int | None = None) -> None:
        """Has an adapter added to the pool. A waiter that goes away ends nothing.

        Args:
            refs: what the pool holds, as the caller knows it. most: waiters there may be.
        Raises:
            KeyError: the folder has none of that name. QueueFull: too many wait.
            ServingError: the pool refuses it, or the server stops.
        """
        if not self.has(name):
            raise KeyError(name)
        until, reason, stamp, seen = self._refused.get(name, (0.0, "", (), {}))
        if self._clock() < until and stamp == self._stamp(name) and seen == refs:
            raise ServingError(reason)
        if most is not None and len(self._waiters) >= most:
            raise QueueFull(f"{len(self._waiters)} requests wait for adapters, the limit is {most}")
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = asyncio.create_task(self._admit(name, refs))
            flight.add_done_callback(partial(self._land, name))
        stopped = asyncio.get_running_loop().create_future()
        self._waiters.add(stopped)
        try:
            await asyncio.wait({flight, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiters.discard(stopped)
        if not flight.done():
            raise ServingError("the server is stopping; ask again later")
        flight.result()

    def stop(self) -> None:
        """Those who wait are told that the server stops."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _land(self, name: str, flight: "asyncio.Task[None]") -> None:
        self._flights.pop(name, None)
        if not flight.cancelled():
            flight.exception()  # So that asyncio does not complain where all waiters have gone.

    async def _admit(self, name: str, refs: Refs) -> None:
        stamp = self._stamp(name)
        loop = asyncio.get_running_loop()
        try:
            report = await loop.run_in_executor(self.adder, self._add, name)
        except (SoupkitError, OSError, ValueError) as error:
            logger.warning("adapter %r does not come into the pool: %s", name, error)
            reason = f"adapter {name!r} does not come into the pool: {error}"
            self._refused[name] = self._clock() + AGAIN_SECONDS, reason, stamp, refs
            raise ServingError(reason) from error
        self._refused.pop(name, None)
        if report is not None:
            logger.info("adapter %r: %s, %.2f s", name, report.reason, report.seconds)

    def _add(self, name: str) -> PoolReport | None:
        """In the adder's thread; None if another process was faster."""
        if name in self._pool.tasks:
            return None
        if self._pool.read().rule.gate_quality is not None:
            raise PoolError(GATED)
        if self.check is not None:
            self.check(open_adapter(self._adapters / name).info)
        try:
            return self._pool.add(self._adapters / name, task=name)
        except PoolError:
            if name in self._pool.tasks:
                return None
            raise

    def _stamp(self, name: str) -> Stamp:
        found: list[tuple[int, int] | None] = []
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            try:
                stat = (self._adapters / name / file).stat()
                found.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)


GATED = (
    "its rule has a gate_quality, and a server has nothing to score a merge with: serve it without "
    "--adapters, for the tasks that it has, and let others in with Python, AdapterPool.open(POOL)"
    ".add(ADAPTER, quality=SCORE), which a running server notices"
)


def _is_name(name: str) -> bool:
    try:
        check_variant_name(name)
    except ValueError:
        return False
    return True
