"""The folders of a pool's slots: an adapter copied as it is, or merged with what a slot holds.

Nothing here decides or changes a pool: folders are made where the caller says, and stand as
Candidates until pool.py moves them. A merged slot has the wider dtype of the two sides, and its
ranks are cut until all its files fit. A slot is read module by module, so that beside the adapter
that comes and the one that is made no third is in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from soupkit.adapter_config import CONFIG_NAME, WEIGHTS_NAME, plain_config
from soupkit.adapter_folder import AdapterFolder, AdapterInfo, Module, open_adapter, write_adapter
from soupkit.adapter_layout import PREFIX
from soupkit.errors import CheckpointError, PoolError
from soupkit.factored import Pair
from soupkit.files import atomic_write_json
from soupkit.kmerge import PoolRule
from soupkit.pool_manifest import PROVENANCE_NAME, SLOTS_NAME, Admission, PoolBase, SlotEntry
from soupkit.slot_merge import first_state, fitting_rank, merge_modules
from soupkit.tensorfile import TensorSpec, file_bytes

_METADATA = '"__metadata__":{"format":"pt"},'


class LazyPairs(Mapping[str, Pair]):
    """The deltas of an adapter folder; each is read when it is asked for, and not kept."""

    def __init__(self, adapter: AdapterFolder) -> None:
        """Of an opened folder."""
        self._adapter = adapter

    def __getitem__(self, name: str) -> Pair:
        """Read one. Raises KeyError, or as AdapterFolder.module does."""
        if name not in self._adapter.info.modules:
            raise KeyError(name)
        return self._adapter.module(name).pair

    def __iter__(self) -> Iterator[str]:
        """Names, sorted."""
        return iter(self._adapter.info.modules)

    def __len__(self) -> int:
        """How many modules there are."""
        return len(self._adapter.info.modules)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """An adapter that comes, and its modules in memory; `origin`: the folder the caller gave."""

    origin: Path
    source: AdapterFolder
    modules: Mapping[str, Module]
    admission: Admission
    base: PoolBase

    @property
    def pairs(self) -> dict[str, Pair]:
        """Its deltas."""
        return {name: module.pair for name, module in self.modules.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A slot in the making: its folder, not in its place yet, and what pool.json would say."""

    folder: Path
    entry: SlotEntry
    rank: int


def as_peft_names(source: AdapterFolder, out: Path) -> AdapterFolder:
    """The adapter, or one like it in the new folder `out` if PEFT would not find its tensors: a
    slot is a folder that PEFT loads. Raises as `load` and write_adapter do.
    """
    info = source.info
    if info.is_named:
        return source
    carried = dict(info.carried)
    write_adapter(out, source.load(), base=info.base, revision=info.revision, carried=carried)
    return open_adapter(out)


def open_slot(pool: Path, entry: SlotEntry) -> AdapterFolder:
    """Open the folder of a slot.

    Raises:
        PoolError: it is gone or damaged.
    """
    try:
        return open_adapter(pool / SLOTS_NAME / entry.folder)
    except CheckpointError as error:
        raise damaged(entry, error) from error


def check_slot(entry: SlotEntry, slot: AdapterFolder) -> None:
    """Raise PoolError unless the slot's files are byte for byte what was written."""
    try:
        digest = slot.info.digest()
    except CheckpointError as error:
        raise damaged(entry, error) from error
    if digest != entry.digest:
        raise damaged(entry, f"{slot.info.path} is not what was written there")


def damaged(entry: SlotEntry, error: object) -> PoolError:
    """The error that a slot's files are not what pool.json says."""
    return PoolError(
        f"slot {entry.number} is damaged: {error}; remove its tasks ({', '.join(entry.tasks)}) and "
        "add them again"
    )


def copied_bytes(incoming: Incoming, rule: PoolRule) -> int:
    """Bytes of the slot that `copied` would make."""
    folder = incoming.source.info.path
    text = json.dumps(_provenance(incoming.base, rule, (incoming.admission,)), indent=2) + "\n"
    return len(text.encode()) + sum(
        (folder / name).stat().st_size for name in (CONFIG_NAME, WEIGHTS_NAME)
    )


def copied(out: Path, incoming: Incoming, rule: PoolRule, *, number: int, change: int) -> Candidate:
    """A slot of one task: the two files of its adapter, byte for byte.

    Raises:
        PoolError, CheckpointError: the adapter has changed since it was opened.
        OSError: the disk refused.
    """
    info = incoming.source.info
    out.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        shutil.copyfile(info.path / name, out / name)
    made = open_adapter(out).info
    incoming.source.module(incoming.source.names[0])  # Raises if the weights are others by now.
    if (made.modules, made.base, made.carried) != (info.modules, info.base, info.carried):
        raise PoolError(f"{info.path} changed while it was read: add it again")
    state = first_state(incoming.pairs)
    entry = SlotEntry(
        number=number,
        folder=f"slot-{number}.{change}",
        tasks=(incoming.admission.task,),
        history=(incoming.admission,),
        nbytes=0,
        digest=made.digest(),
        norms=state.norms,
        rescaling=state.rescaling,
    )
    return _finished(out, entry, incoming.base, rule, _rank(info))


def merged(
    out: Path,
    incoming: Incoming,
    rule: PoolRule,
    *,
    entry: SlotEntry,
    slot: AdapterFolder,
    room: int,
    change: int,
) -> Candidate | None:
    """A slot with one task more, in at most `room` bytes; None if not even rank 1 fits.

    Raises:
        PoolError: the slot's files are damaged. MergeError: as merge_modules.
        OSError: the disk refused.
    """
    check_slot(entry, slot)
    infos = (slot.info, incoming.source.info)
    sides = [
        {name: (module.rank, *module.shape) for name, module in info.modules.items()}
        for info in infos
    ]
    dtype = _dtype(*infos)
    beside = _bytes_beside_factors(incoming, rule, entry, slot)
    while True:
        rank = fitting_rank(
            sides[0], sides[1], nbytes=room - beside, itemsize=dtype.itemsize, rank=rule.rank
        )
        if rank is None:
            return None
        found = _merged(out, incoming, rule, entry, slot, rank, dtype, change)
        if found.entry.nbytes <= room:
            return found
        beside += found.entry.nbytes - room
        shutil.rmtree(out)


def _bytes_beside_factors(
    incoming: Incoming, rule: PoolRule, entry: SlotEntry, slot: AdapterFolder
) -> int:
    """Bytes of a merged slot's files beside its factors, nearly: digits of lengths differ."""
    infos = {**incoming.source.info.modules, **slot.info.modules}
    # Experts of one parameter are stored together.
    names = {name.partition("[")[0]: infos[name] for name in infos}
    specs = {
        f"{PREFIX}{name}.lora_{side}.weight": TensorSpec(info.dtype, info.shape)
        for name, info in names.items()
        for side in "AB"
    }
    header = file_bytes(specs) - sum(spec.nbytes for spec in specs.values()) + len(_METADATA)
    base = incoming.base
    config = plain_config(
        base=base.name,
        revision=base.revision,
        ranks=dict.fromkeys(names, 1),
        carried={**incoming.source.info.carried, **slot.info.carried},
    )
    told = _provenance(base, rule, (*entry.history, incoming.admission))
    return header + sum(len(json.dumps(one, indent=2).encode()) + 1 for one in (config, told))


def _merged(
    out: Path,
    incoming: Incoming,
    rule: PoolRule,
    entry: SlotEntry,
    slot: AdapterFolder,
    rank: int,
    dtype: torch.dtype,
    change: int,
) -> Candidate:
    pairs, state, report = merge_modules(
        LazyPairs(slot), incoming.pairs, rule, entry.state, rank=rank
    )
    infos = {**incoming.source.info.modules, **slot.info.modules}
    modules = {
        name: Module(infos[name].kind, pair, infos[name].kernel) for name, pair in pairs.items()
    }
    write_adapter(
        out,
        modules,
        base=incoming.base.name,
        revision=incoming.base.revision,
        dtype=dtype,
        carried={**incoming.source.info.carried, **slot.info.carried},
    )
    done = replace(
        entry,
        folder=f"slot-{entry.number}.{change}",
        tasks=(*entry.tasks, incoming.admission.task),
        history=(*entry.history, replace(incoming.admission, lost_energy=report.lost_energy)),
        digest=open_adapter(out).info.digest(),
        norms=state.norms,
        rescaling=state.rescaling,
    )
    return _finished(out, done, incoming.base, rule, max(report.ranks.values()))


def _finished(out: Path, entry: SlotEntry, base: PoolBase, rule: PoolRule, rank: int) -> Candidate:
    """Write what a folder alone should tell of its slot, and count its bytes."""
    atomic_write_json(out / PROVENANCE_NAME, _provenance(base, rule, entry.history))
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    return Candidate(out, replace(entry, nbytes=nbytes), rank)


def _provenance(base: PoolBase, rule: PoolRule, history: tuple[Admission, ...]) -> dict[str, Any]:
    told = [asdict(item) for item in history]
    return {"schema": 1, "base": asdict(base), "merge": rule.merge, "history": told}


def _rank(info: AdapterInfo) -> int:
    return max(module.rank for module in info.modules.values())


def _dtype(*infos: AdapterInfo) -> torch.dtype:
    """The widest of the factors', but no more than float32."""
    found = {module.dtype for info in infos for module in info.modules.values()}
    wide = reduce(torch.promote_types, found)
    return torch.float32 if wide.itemsize > 4 else wide
