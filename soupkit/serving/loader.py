"""Variants on their way from the disk to their slots and out again: the router's Mover.

Loader threads read and check bundles; one installer thread moves them into slots and out again, in
the order the router decided. Results come back on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from soupkit.bundle import LoadedVariant, VariantRef
from soupkit.errors import BundleError

from .cache import Evicted
from .catalog import Catalog
from .engine import Engine
from .metrics import Metrics
from .reasons import Reasons
from .router import Router
from .shape import SlotShape

logger = logging.getLogger(__name__)

After = Callable[["asyncio.Future[Any]"], None]


class Loader:
    """What was read of variants, and the threads that move it. `router` must be set before use."""

    router: Router

    def __init__(
        self,
        catalog: Catalog,
        engine: Engine,
        metrics: Metrics,
        reasons: Reasons,
        *,
        max_loads: int,
    ) -> None:
        self._catalog, self._engine = catalog, engine
        self._metrics, self._reasons = metrics, reasons
        self._refs: dict[str, list[VariantRef]] = {}  # digest -> the variants that have it
        self._loaded: dict[str, LoadedVariant] = {}  # from load to drop
        self._shape = self._reserved = SlotShape()  # of a slot: asked for, and in place
        self._began: dict[str, float] = {}
        self._is_closed = False
        self._readers = ThreadPoolExecutor(max_loads, "soupkit-load")
        self._installer = ThreadPoolExecutor(1, "soupkit-install")

    def close(self) -> None:
        """Nothing more is begun, and what is under way is not told of."""
        self._is_closed = True
        for pool in (self._readers, self._installer):
            pool.shutdown(wait=False, cancel_futures=True)

    def follow(self, refs: Iterable[VariantRef]) -> None:
        """The variants that may be loaded from now on."""
        found: dict[str, list[VariantRef]] = {}
        for ref in refs:
            found.setdefault(ref.digest, []).append(ref)
        # Of digests that left, those in use keep their last names: loads may still tell of them.
        used = {d: names for d, names in self._refs.items() if self.router.knows(d)}
        self._refs = used | found

    def reserve(self) -> None:
        """Has slots made that take any variant there is now, if one fits in the budget."""
        shape = self._engine.slot_shape(self._catalog.manifests().values())
        if 0 < shape.nbytes <= self.router.cache.budget_bytes:
            self._shape = shape
            self.router.reserve(shape.nbytes)

    def load(self, digest: str) -> None:
        self._began[digest] = time.monotonic()

        def work() -> LoadedVariant:
            loaded = self._read_any(digest)
            # Here and not when it is installed: nothing is evicted for one that cannot be served.
            self._engine.check(loaded)
            return loaded

        self._run(self._readers, work, partial(self._after_load, digest))

    def _read_any(self, digest: str) -> LoadedVariant:
        """The first of the variants of a content that can be read; BundleError if none can."""
        tried: dict[VariantRef, BundleError] = {}
        # Looked up anew each time: a name may have gone, and another come, while one was read.
        while left := [ref for ref in self._refs[digest] if ref not in tried]:
            try:
                return self._catalog.load(left[0])
            except BundleError as error:
                tried[left[0]] = error
        raise list(tried.values())[-1]

    def drop(self, digest: str) -> None:
        del self._loaded[digest]
        self._began.pop(digest, None)

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        loaded = self._loaded[digest]
        self._began.setdefault(digest, time.monotonic())
        self._metrics.evictions.inc(len(evicted))

        def work() -> None:
            if slot in self._engine.occupied:
                self._engine.free(slot)
            self._engine.load(slot, loaded)

        self._run(self._installer, work, partial(self._after_install, digest))

    def evict(self, evicted: Evicted) -> None:
        self._metrics.evictions.inc()
        self._run(self._installer, partial(self._engine.free, evicted.slot), self._after_evict)

    def grow(self, num_slots: int, slot_bytes: int) -> None:
        shape = self._shape
        assert _slot_bytes(shape) == slot_bytes
        cache = self.router.cache
        kept = {cache.slot(digest) for digest in cache.digests}

        def work() -> SlotShape:
            for slot in self._engine.occupied - kept:  # an eviction failed
                self._engine.free(slot)
            self._engine.reserve(num_slots, shape)
            return shape

        self._run(self._installer, work, self._after_grow)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[], Any], after: After) -> None:
        if not self._is_closed:
            run_in(pool, work, lambda done: None if self._is_closed else after(done))

    def _after_load(self, digest: str, loaded: "asyncio.Future[LoadedVariant]") -> None:
        error = loaded.exception()
        if error is not None:
            del self._began[digest]
            self._load_failed(digest, error)
            return
        variant = self._loaded[digest] = loaded.result()
        shape = self._shape.merged(self._engine.slot_shape([variant.manifest]))
        if shape.nbytes <= self.router.cache.budget_bytes:
            self._shape = shape
        self.router.loaded(digest, variant.nbytes, slot_bytes=_slot_bytes(shape))

    def _after_install(self, digest: str, installed: "asyncio.Future[None]") -> None:
        seconds = time.monotonic() - self._began.pop(digest)
        error = installed.exception()
        if error is not None:
            self._load_failed(digest, error)
            return
        self._metrics.loads.inc()
        self._metrics.load_seconds.observe(seconds)
        self.router.installed(digest)

    def _after_grow(self, reserved: "asyncio.Future[SlotShape]") -> None:
        error = reserved.exception()
        if error is None:
            self._reserved = reserved.result()
            self.router.grown()
            return
        self._shape = self._reserved
        self.router.grow_failed(f"no room for larger slots: {self._reasons.of(error)}")

    def _after_evict(self, evicted: "asyncio.Future[None]") -> None:
        error = evicted.exception()
        if error is not None:
            logger.error("a slot could not be emptied: %s", error, exc_info=error)

    def _load_failed(self, digest: str, error: BaseException) -> None:
        self._metrics.load_failures.inc()
        names = ", ".join(repr(ref.name) for ref in self._refs[digest])
        logger.warning("variant %s cannot be loaded: %s", names, error)
        reason = self._reasons.of(error)
        self.router.load_failed(digest, f"variant {names} cannot be loaded: {reason}")


def _slot_bytes(shape: SlotShape) -> int:
    """What the budget counts: a slot for variants that are the base in all takes a byte too."""
    return max(1, shape.nbytes)


def run_in(pool: ThreadPoolExecutor, work: Callable[[], Any], after: After) -> None:
    """Runs `work` on a pool, then `after` on the event loop that this is called on."""

    def done(future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            after(future)

    asyncio.get_running_loop().run_in_executor(pool, work).add_done_callback(done)
