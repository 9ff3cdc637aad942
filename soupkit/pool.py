"""A pool of LoRA adapters on disk under a budget of bytes (K-Merge; decisions: kmerge.py).

A slot is a PEFT adapter folder that any LoRA server can load; pool.json says which slot serves a
task. A change writes a new folder beside the old ones and replaces pool.json last, so a process
that is killed anywhere leaves the old pool or the new one, and the next writer removes its
leftovers. Writers wait for each other under pool/.lock, as long as a quality gate takes; readers
take no lock. The folder that a slot had before goes at once: files that are open stay readable, and
within `reading` it stays whole, for the next writer to remove. So the disk holds one slot more than
the budget while a change is made. Not here: the arithmetic, and serving.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soupkit.adapter_folder import AdapterFolder, open_adapter
from soupkit.config import check_count, check_variant_name
from soupkit.errors import PoolError
from soupkit.files import atomic_folder, atomic_write_json, fsync_path, fsync_tree, locked
from soupkit.kmerge import PoolRule
from soupkit.pool_admission import (
    check_against_base,
    check_base,
    check_modules,
    check_range,
    with_rule,
)
from soupkit.pool_folders import LOCK_NAME, clean, held, staging_in, write_empty
from soupkit.pool_manifest import (
    POOL_NAME,
    SLOTS_NAME,
    Admission,
    Manifest,
    SlotEntry,
    read_manifest,
)
from soupkit.pool_place import Quality, find_place, score_of
from soupkit.pool_slots import Candidate, Incoming, as_peft_names, damaged, open_slot


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What became of an adapter.

    Args:
        action: "store" or "merge". slot: its number. path: of its folder. tasks: that it serves.
        evicted: tasks that had to go. similarity: to the nearest slot there was; None without one,
            or without a module in common. lost_energy: share that the cut of the merge lost.
        rank: the slot's largest. slot_bytes, pool_bytes: of the slot, of all. reason: for people.
    """

    task: str
    action: str
    slot: int
    path: Path
    tasks: tuple[str, ...]
    evicted: tuple[str, ...]
    similarity: float | None
    lost_energy: float
    rank: int
    slot_bytes: int
    pool_bytes: int
    reason: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {**asdict(self), "path": str(self.path)}


class AdapterPool:
    """A pool at a folder. Every property and method looks at the disk; nothing is kept."""

    def __init__(self, folder: str | Path, *, give_up: threading.Event | None = None) -> None:
        """Of the pool at `folder`; use `open` or `create`. give_up: once it is set, writers that
        wait for others raise InterruptedError.
        """
        self._give_up = give_up
        self.folder = Path(os.path.expanduser(folder)).absolute()

    @classmethod
    def open(cls, folder: str | Path, *, give_up: threading.Event | None = None) -> AdapterPool:
        """The pool at `folder`. Raises PoolError: there is none, or it is damaged."""
        pool = cls(folder, give_up=give_up)
        pool.read()
        return pool

    @classmethod
    def create(cls, folder: str | Path, rule: PoolRule) -> AdapterPool:
        """Make an empty pool.

        Raises:
            FileExistsError: `folder` has content. OSError: the disk refused.
        """
        pool = cls(folder)
        with atomic_folder(pool.folder) as staging:
            write_empty(staging, rule)
        return pool

    @classmethod
    def add_to(
        cls, folder: str | Path, adapter: str | Path, *, rule: Mapping[str, Any], **options: Any
    ) -> PoolReport:
        """`add` to the pool at `folder`; if there is none, it is made, and does not stand if that
        fails.

        Args:
            rule: fields of PoolRule; of a new pool capacity_bytes at least.
            options: as for `add`.
        Raises:
            FileExistsError: `folder` is no pool and has content. Else as `add`.
        """
        pool = cls(folder)
        if (pool.folder / POOL_NAME).exists():
            return pool.add(adapter, rule=rule, **options)
        try:
            with atomic_folder(pool.folder) as staging:
                write_empty(staging, PoolRule(**rule))
                report = cls(staging).add(adapter, **options)
        except OSError as error:
            is_taken = isinstance(error, FileExistsError) or error.errno == errno.ENOTEMPTY
            if not (is_taken and (pool.folder / POOL_NAME).exists()):
                raise
            # Another process has made it since.
            return pool.add(adapter, rule=rule, **options)
        return replace(report, path=pool.folder / report.path.relative_to(staging))

    def read(self) -> Manifest:
        """What pool.json says now. Raises PoolError."""
        return read_manifest(self.folder)

    @property
    def tasks(self) -> dict[str, int]:
        """The slot of each task, sorted by task."""
        return self.read().tasks

    @property
    def slots(self) -> tuple[SlotEntry, ...]:
        """All slots, by number."""
        return self.read().slots

    def resolve(self, task: str) -> Path:
        """The adapter folder that serves a task now; a change of its slot replaces it, see
        `reading`.

        Raises:
            PoolError: no slot serves it.
        """
        return self._path(self.read().slot_of(task))

    @contextlib.contextmanager
    def reading(self, task: str) -> Iterator[Path]:
        """`resolve`, and the folder stays as it is until the block ends, whatever writers do.

        Raises:
            PoolError: no slot serves it, or its folder is gone. OSError: it cannot be opened.
        """
        while True:
            slot = self.read().slot_of(task)
            with held(self._path(slot)) as is_there:
                if is_there:
                    yield self._path(slot)
                    return
            # Replaced meanwhile? Then pool.json names another one by now.
            if self.read().slot_of(task).folder == slot.folder:
                raise damaged(slot, f"{self._path(slot)} is gone")

    def add(
        self,
        adapter: str | Path,
        *,
        task: str | None = None,
        quality: Quality | None = None,
        rule: Mapping[str, Any] | None = None,
    ) -> PoolReport:
        """Let an adapter in: into a slot of its own, or merged into the nearest one.

        Args:
            adapter: a PEFT folder; it is not needed afterwards.
            task: that it serves; None: the folder's name.
            quality: scores a candidate's folder on a task, for the rule's gate_quality; called for
                the new task and for all of the slot, while other writers wait.
            rule: fields of PoolRule that change from now on, if the adapter comes in.
        Raises:
            PoolError: no place for it, the task is there already, or another base.
            CheckpointError, MergeError: the adapter is damaged, more than plain LoRA, not finite.
            ValueError: a name, rule or score that is none. OSError: the disk refused.
            The pool is bit for bit as it was then.
        """
        started = time.perf_counter()
        source = open_adapter(adapter)
        # As the caller spells it, also where that is a link.
        own = os.path.basename(os.path.abspath(source.info.path))
        name = check_variant_name(own if task is None else task, "task")
        with self._writing() as manifest:
            manifest = with_rule(manifest, rule or {})
            with staging_in(self.folder) as staging:
                incoming, opened = self._admitted(manifest, source, name, quality, staging)
                place = find_place(manifest, opened, incoming, staging=staging, quality=quality)
                gone = [slot for slot in manifest.slots if slot.number in place.decision.evicted]
                kept = tuple(slot for slot in manifest.slots if slot not in gone)
                entry = replace(place.made.entry, last_used=manifest.clock + 1)
                after = replace(manifest, base=incoming.base, slots=kept).with_slot(entry)
                self._switch(after, place.made)
        alike = place.decision.similarity
        return PoolReport(
            task=name,
            action=place.decision.action,
            slot=entry.number,
            path=self._path(entry),
            tasks=entry.tasks,
            evicted=tuple(one for slot in gone for one in slot.tasks),
            similarity=alike if alike is not None and math.isfinite(alike) else None,
            lost_energy=entry.history[-1].lost_energy,
            rank=place.made.rank,
            slot_bytes=entry.nbytes,
            pool_bytes=after.nbytes,
            reason=place.decision.reason,
            seconds=time.perf_counter() - started,
        )

    def remove(self, task: str) -> tuple[str, ...]:
        """Let a task go. A slot that serves others goes on as it is, for what was merged cannot be
        taken out again; the slot goes with its last task.

        Returns:
            The tasks that its slot still serves.
        Raises:
            PoolError: no such task. OSError: the disk refused; the pool is as it was.
        """
        with self._writing() as manifest:
            slot = manifest.slot_of(task)
            left = tuple(one for one in slot.tasks if one != task)
            slots = tuple(one for one in manifest.slots if one != slot)
            after = replace(manifest, slots=slots)
            self._switch(after.with_slot(replace(slot, tasks=left)) if left else after)
        return left

    def touch(self, task: str, uses: int = 1) -> None:
        """Count that a task was asked for; what is let go first depends on it.

        Raises:
            PoolError: no such task. ValueError: uses below 1. OSError: the disk refused.
        """
        check_count("uses", uses, least=1)
        with self._writing() as manifest:
            slot = manifest.slot_of(task)
            used = replace(slot, uses=slot.uses + uses, last_used=manifest.clock + 1)
            after = replace(manifest, clock=manifest.clock + 1).with_slot(used)
            atomic_write_json(self.folder / POOL_NAME, after.to_json())

    def to_json(self) -> dict[str, Any]:
        """What the pool is, for people and programs."""
        manifest = self.read()
        document = manifest.to_json()
        for slot, told in zip(manifest.slots, document["slots"], strict=True):
            told["path"] = str(self._path(slot))
        return {
            "kind": "pool",
            "path": str(self.folder),
            "bytes": manifest.nbytes,
            **document,
        }

    def _path(self, slot: SlotEntry) -> Path:
        return self.folder / SLOTS_NAME / slot.folder

    def _admitted(
        self,
        manifest: Manifest,
        source: AdapterFolder,
        task: str,
        quality: Quality | None,
        staging: Path,
    ) -> tuple[Incoming, dict[int, AdapterFolder]]:
        """The adapter, read, and the opened slots, if it may come in."""
        if (quality is None) != (manifest.rule.gate_quality is None):
            raise ValueError(
                f"gate_quality={manifest.rule.gate_quality} with quality={quality}: the gate needs "
                "a function that scores, and such a function the gate"
            )
        if task in manifest.tasks:
            raise PoolError(
                f"{self.folder} has the task {task!r} already: remove it first, or name another "
                "task for the adapter"
            )
        base = check_base(manifest, source.info)
        opened = {slot.number: open_slot(self.folder, slot) for slot in manifest.slots}
        check_modules(source.info, [slot.info for slot in opened.values()])
        check_against_base(source.info)
        origin, source = source.info.path, as_peft_names(source, staging / "renamed")
        modules = source.load()
        check_range(source.info, modules)
        score = None if quality is None else score_of(quality, source.info.path, task)
        return Incoming(origin, source, modules, Admission(task, score=score), base), opened

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Manifest]:
        """Hold the lock, on what writers that died left clean."""
        self.read()  # Where there is no pool, no lock file is made either.
        with locked(self.folder / LOCK_NAME, give_up=self._give_up):
            clean(self.folder, self.slots)
            yield self.read()

    def _switch(self, after: Manifest, made: Candidate | None = None) -> None:
        """Move a slot to its place and replace pool.json."""
        after = replace(after, changes=after.changes + 1, clock=after.clock + 1)
        try:
            if made is not None:
                fsync_tree(made.folder)
                os.rename(made.folder, self._path(made.entry))
                fsync_path(self.folder / SLOTS_NAME)
            atomic_write_json(self.folder / POOL_NAME, after.to_json())
        finally:
            # Removes what the slot was, or what it would have become; else the next writer does.
            with contextlib.suppress(OSError):
                clean(self.folder, self.slots)
