"""LoRA adapters that are served beside a family: the tasks of a pool, and a folder of adapters that
come into it when they are asked for.

A task is a model id, its slot's digest the content behind it, so tasks that share a slot share its
place in memory. An adapter of the folder that has no slot yet is added to the pool by the first
request for it, off the engine's thread and once however many wait (K-Merge: it gets a slot, or is
merged into the nearest one); what was refused is tried again after a while. pool.json is looked at
like family.json. Not here: merging (soupkit.pool) and what a variant does in the model.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soupkit.adapter_config import CONFIG_NAME
from soupkit.adapter_folder import open_adapter
from soupkit.adapter_variant import adapter_manifest, load_adapter
from soupkit.bundle import LoadedVariant, VariantRef
from soupkit.config import check_variant_name
from soupkit.errors import BundleError, ServingError, SoupkitError
from soupkit.manifest import Manifest
from soupkit.pool import AdapterPool, PoolReport
from soupkit.pool_manifest import POOL_NAME, SLOTS_NAME

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 30.0
USES_SECONDS = 10.0


class Shelf:
    """The adapters beside one family; `refresh` looks whether the pool changed."""

    def __init__(
        self,
        pool: Path,
        *,
        adapters: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open it.

        Args:
            pool: of AdapterPool. adapters: folder with one PEFT adapter a folder; None: there is
                none.
        Raises:
            PoolError: there is no pool, or it is damaged.
            ServingError: no folder of adapters, or the pool wants a quality that nobody here tells.
        """
        self._pool, self._adapters, self._clock = AdapterPool.open(pool), adapters, clock
        if adapters is not None and not adapters.is_dir():
            raise ServingError(f"--adapters {adapters}: no such folder")
        if adapters is not None and self._pool.read().rule.gate_quality is not None:
            raise ServingError(
                f"{pool}: its gate asks for the quality of merges, which a server cannot score: "
                "add adapters in Python, or make a pool without that gate"
            )
        self._stamp = self._read_stamp()
        self.refs = self._read()
        self._admissions: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # until when, and why
        self._uses: Counter[str] = Counter()
        self._told = clock()
        # One: the pool's writers wait for each other anyway.
        self._adder = ThreadPoolExecutor(1, "soupkit-pool")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where it lies; no client is told."""
        return (self._pool.folder, *(() if self._adapters is None else (self._adapters,)))

    def close(self) -> None:
        self._adder.shutdown(wait=False, cancel_futures=True)

    def refresh(self) -> bool:
        """Reads pool.json again if it changed; True if tasks or contents are others now."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        try:
            refs = self._read()
        except SoupkitError as error:
            logger.warning("the pool cannot be read, serving what it said: %s", error)
            self._stamp = stamp
            return False
        changed = refs != self.refs
        self.refs, self._stamp = refs, stamp
        return changed

    def waiting(self) -> list[str]:
        """Names of adapters that have no slot yet, sorted."""
        if self._adapters is None:
            return []
        try:
            found = sorted(path.parent.name for path in self._adapters.glob(f"*/{CONFIG_NAME}"))
        except OSError:
            return []
        return [name for name in found if name not in self.refs and _is_name(name)]

    def manifests(self, base_fingerprint: str) -> dict[str, Manifest]:
        """By task, without those that cannot be served; loading them says why."""
        found = {}
        for name, ref in self.refs.items():
            try:
                with self._pool.reading(name) as path:
                    info = open_adapter(path).info
                    found[name] = adapter_manifest(
                        info, name=name, base_fingerprint=base_fingerprint, digest=ref.digest
                    )
            except SoupkitError as error:
                logger.warning("adapter %r cannot be served: %s", name, error)
        return found

    def load(self, ref: VariantRef, base_fingerprint: str) -> LoadedVariant:
        """Reads and checks the slot of a task.

        Raises:
            BundleError: it cannot be served, or has other content by now.
        """
        try:
            with self._pool.reading(ref.name) as path:
                adapter = open_adapter(path)
                digest = adapter.info.digest()
                if digest != ref.digest:
                    raise BundleError(
                        f"adapter {ref.name!r} has digest {digest}, the pool said {ref.digest}; "
                        "try again"
                    )
                manifest = adapter_manifest(
                    adapter.info, name=ref.name, base_fingerprint=base_fingerprint, digest=digest
                )
                return load_adapter(adapter, manifest)
        except BundleError:
            raise
        except (SoupkitError, OSError) as error:
            raise BundleError(f"adapter {ref.name!r}: {error}") from error

    async def admit(self, name: str) -> None:
        """Has an adapter of the folder added to the pool, for `refresh` to find. A waiter that goes
        away ends nothing.

        Raises:
            KeyError: the folder has none of that name. ServingError: the pool refuses it.
        """
        if name not in self.waiting():
            raise KeyError(name)
        until, reason = self._refused.get(name, (0.0, ""))
        if self._clock() < until:
            raise ServingError(reason)
        task = self._admissions.get(name)
        if task is None:
            task = self._admissions[name] = asyncio.create_task(self._admit(name))
            task.add_done_callback(lambda _: self._admissions.pop(name, None))
        await asyncio.shield(task)

    async def _admit(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            report = await loop.run_in_executor(self._adder, self._add, name)
        except (SoupkitError, OSError, ValueError) as error:
            logger.warning("adapter %r does not come into the pool: %s", name, error)
            reason = f"adapter {name!r} does not come into the pool: {error}"
            self._refused[name] = (self._clock() + AGAIN_SECONDS, reason)
            raise ServingError(reason) from error
        self._refused.pop(name, None)
        if report is not None:
            logger.info("adapter %r: %s, %.2f s", name, report.reason, report.seconds)

    def _add(self, name: str) -> PoolReport | None:
        """In the adder's thread; None if another process was faster."""
        assert self._adapters is not None
        if name in self._pool.tasks:
            return None
        return self._pool.add(self._adapters / name, task=name)

    def count(self, name: str) -> None:
        """Counts a request for a task; what the pool lets go first depends on them."""
        if name in self.refs:
            self._uses[name] += 1

    def tell_uses(self) -> None:
        """Now and then writes what was counted into the pool, in a thread."""
        now = self._clock()
        if now - self._told < USES_SECONDS or not self._uses:
            return
        self._told = now
        uses, self._uses = self._uses, Counter()
        self._adder.submit(self._touch, uses)

    def _touch(self, uses: Counter[str]) -> None:
        for name, count in uses.items():
            try:
                self._pool.touch(name, count)
            except (SoupkitError, OSError) as error:
                logger.warning("uses of adapter %r are lost: %s", name, error)

    def _read(self) -> dict[str, VariantRef]:
        manifest = self._pool.read()
        found = {}
        for slot in manifest.slots:
            for task in slot.tasks:
                found[task] = VariantRef(task, f"{SLOTS_NAME}/{slot.folder}", slot.digest)
        return dict(sorted(found.items()))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = (self._pool.folder / POOL_NAME).stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _is_name(name: str) -> bool:
    try:
        check_variant_name(name)
    except ValueError:
        return False
    return True
