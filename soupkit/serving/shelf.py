"""LoRA adapters that are served beside a family: the tasks of a pool, and a folder of adapters that
come into it when they are asked for.

A task is a model id, its slot's digest the content behind it, so tasks that share a slot share its
place in memory. An adapter of the folder that has no slot yet is added to the pool by the first
request for it (admission.py; K-Merge: it gets a slot, or is merged into the nearest one). pool.json
is looked at like family.json. A pool of another base is refused where anything here tells that it
is. Not here: merging (soupkit.pool) and what a variant does in the model.
"""

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from soupkit.adapter_folder import AdapterInfo, ModuleInfo, open_adapter
from soupkit.adapter_variant import adapter_manifest, load_adapter
from soupkit.bundle import LoadedVariant, VariantRef
from soupkit.checkpoint import Checkpoint
from soupkit.errors import BundleError, ServingError, SoupkitError
from soupkit.family import BaseRef
from soupkit.manifest import Manifest
from soupkit.pool import AdapterPool
from soupkit.pool_admission import base_of, is_of_base
from soupkit.pool_manifest import POOL_NAME, SLOTS_NAME, PoolBase
from soupkit.slot_merge import fitting_rank

from .admission import GATED, Admissions

logger = logging.getLogger(__name__)

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
        self._closing = threading.Event()
        self._pool = AdapterPool.open(pool, give_up=self._closing)
        self._adapters, self._clock = adapters, clock
        self._coming: Admissions | None = None
        if adapters is not None:
            if not adapters.is_dir():
                raise ServingError(f"--adapters {adapters}: no such folder")
            if self._pool.read().rule.gate_quality is not None:
                raise ServingError(f"{pool}: {GATED}")
            self._coming = Admissions(self._pool, adapters, clock=clock)
        self._stamp = self._read_stamp()
        self.refs = self._read()
        self._uses: Counter[str] = Counter()
        self._told = clock()
        self._served: tuple[Checkpoint, BaseRef] | None = None
        self._is_ours: dict[PoolBase, bool | None] = {}
        self._toucher = ThreadPoolExecutor(1, "soupkit-pool-uses")

    def serve_with(self, base: Checkpoint, ref: BaseRef) -> None:
        """Say which base the adapters are served with, and what the family says of it; before that
        none is compared with it.

        Raises:
            ServingError: the pool is of another base.
        """
        self._served = base, ref
        ours = self._pool.read().base
        if ours is None:
            return
        self._check_base(ours)
        if self._is_ours[ours] is None:
            logger.warning(
                "%s has adapters of %s; nothing here tells whether that is %s, which is served",
                self._pool.folder,
                ours.name,
                ref.path,
            )

    def check_by(self, check: Callable[[Manifest], None]) -> None:
        """Have adapters that come checked first; it raises SoupkitError for what has no place."""
        if self._coming is not None:
            self._coming.check = partial(self._check_coming, check)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where it lies; no client is told."""
        return (self._pool.folder, *(() if self._adapters is None else (self._adapters,)))

    def close(self) -> None:
        """Waits for nothing, nor does the process then; the last uses are told if nobody has the
        pool.
        """
        self.stop()
        self._closing.set()
        self._told = -math.inf
        self.tell_uses()
        self._toucher.shutdown(wait=False)
        if self._coming is not None:
            self._coming.adder.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Those who wait for an adapter are told that the server stops."""
        if self._coming is not None:
            self._coming.stop()

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
        return (
            [] if self._coming is None else [n for n in self._coming.names() if n not in self.refs]
        )

    def has(self, name: str) -> bool:
        """Whether an adapter of that name is served, or would be if it were asked for."""
        return name in self.refs or (self._coming is not None and self._coming.has(name))

    async def admit(self, name: str, *, most: int | None = None) -> None:
        """Has an adapter of the folder added to the pool, for `refresh` to find; as
        Admissions.admit.
        """
        if self._coming is None or name in self.refs:
            raise KeyError(name)
        await self._coming.admit(name, self.refs, most=most)

    def to_come(self, base_fingerprint: str) -> list[Manifest]:
        """What may have to be served beside `manifests`: the adapters without a slot, and the
        largest slot that merging all of them could make.
        """
        if self._coming is None:
            return []
        coming, told = [], []
        for name, info in self._coming.infos(self.waiting()).items():
            with contextlib.suppress(BundleError):  # told when it is asked for
                told.append(_manifest(info, name, base_fingerprint))
                coming.append(info)
        manifest = self._pool.read()
        rule, count = manifest.rule, len(manifest.slots) + len(coming)
        nbytes = manifest.nbytes + sum(info.nbytes for info in coming)
        is_roomy = nbytes <= rule.capacity_bytes and count <= (rule.slots or count)
        if coming and not (is_roomy and rule.open_below is None):
            held = filter(None, map(self._info, self.refs))
            merged = _merged([*coming, *held], rule.capacity_bytes, rule.rank)
            told += [] if merged is None else [_manifest(merged, "merged", base_fingerprint)]
        return told

    def _info(self, task: str) -> AdapterInfo | None:
        try:
            with self._pool.reading(task) as path:
                return open_adapter(path).info
        except (SoupkitError, OSError):
            return None

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
            except (SoupkitError, OSError) as error:
                logger.warning("adapter %r cannot be served: %s", name, error)
        return found

    def load(self, ref: VariantRef, base_fingerprint: str) -> LoadedVariant:
        """Reads and checks the slot of a task.

        Raises:
            BundleError: it cannot be served, or has other content by now.
        """
        try:
            if (base := self._pool.read().base) is not None:
                self._check_base(base)
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

    def _check_base(self, base: PoolBase) -> None:
        """Raise ServingError if adapters of `base` are not of the one that is served."""
        if self._served is None:
            return
        served, ref = self._served
        if base not in self._is_ours:
            self._is_ours[base] = is_of_base(
                base, served, name=ref.path, fingerprint=ref.fingerprint
            )
        if self._is_ours[base] is False:
            raise ServingError(
                f"{self._pool.folder}: adapters of {base.name}, whose weights are not those of the "
                f"base that is served, {served.source}: serve them with a family of their own base"
            )

    def _check_coming(self, check: Callable[[Manifest], None], info: AdapterInfo) -> None:
        """Raise SoupkitError if the served model could not take an adapter."""
        self._check_base(base_of(info))
        check(_manifest(info, "", ""))

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
        self._toucher.submit(self._touch, uses)

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


def _manifest(info: AdapterInfo, name: str, base_fingerprint: str) -> Manifest:
    return adapter_manifest(info, name=name, base_fingerprint=base_fingerprint, digest="")


def _merged(infos: Iterable[AdapterInfo], capacity: int, most: int | None) -> AdapterInfo | None:
    """The largest adapter that merges of these can give within so many bytes."""
    infos = list(infos)
    modules: dict[str, ModuleInfo] = {}
    ranks: Counter[str] = Counter()
    for info in infos:
        modules |= info.modules
        ranks.update({name: module.rank for name, module in info.modules.items()})
    sides = {name: (ranks[name], *module.shape) for name, module in modules.items()}
    itemsize = min(module.dtype.itemsize for module in modules.values())
    rank = fitting_rank(sides, {}, nbytes=capacity, itemsize=itemsize, rank=most)
    if rank is None:
        return None
    grown = {
        name: replace(module, rank=min(rank, ranks[name], *module.shape))
        for name, module in modules.items()
    }
    return replace(infos[0], modules=grown)
