"""pool.json: what an adapter pool on disk holds, read as hostile input and written.

    pool/pool.json                  schema; rule; base {name, revision}; changes; clock;
                                    tasks {task: slot}; slots [...]
    pool/slots/slot-N.C/            slot N as change C left it: a PEFT adapter folder, and
                                    provenance.json

Any fault is a PoolError, and no path in it leads out of the pool. Not here: changing a pool
(pool.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from soupkit.checks import MAX_BUDGET
from soupkit.config import check_variant_name
from soupkit.errors import PoolError
from soupkit.files import fault_text, read_json
from soupkit.fingerprint import is_digest
from soupkit.kmerge import PoolRule
from soupkit.slot_merge import SlotState
from soupkit.tensorfile import is_count

SCHEMA = 1
POOL_NAME = "pool.json"
SLOTS_NAME = "slots"
PROVENANCE_NAME = "provenance.json"

SLOT_FOLDER = re.compile(r"slot-(0|[1-9][0-9]{0,8})\.([1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Admission:
    """One task that came into a slot.

    Args:
        similarity: to the slot as it was; None of the first, and where they had no module in
            common. lost_energy: of the merge's cut. score: of the task's own adapter, where the
            pool has a quality gate.
    """

    task: str
    similarity: float | None = None
    lost_energy: float = 0.0
    score: float | None = None


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A slot as pool.json lists it.

    Args:
        number: of the slot. folder: its name in slots/.
        tasks: that it serves, in order. history: all that were merged into it, in order; those that
            were removed since stay in its deltas.
        nbytes: of all its files. digest: of the adapter (AdapterInfo.digest).
        norms, rescaling: opcm's state, see SlotState.
        uses: how often its tasks were asked for. last_used: the pool's clock then.
    """

    number: int
    folder: str
    tasks: tuple[str, ...]
    history: tuple[Admission, ...]
    nbytes: int
    digest: str
    norms: float
    rescaling: float
    uses: int = 0
    last_used: int = 0

    @property
    def state(self) -> SlotState:
        """What a merge goes on from."""
        return SlotState(len(self.history), self.norms, self.rescaling)


@dataclass(frozen=True, slots=True)
class PoolBase:
    """The base model of all adapters of a pool, as their configs name it."""

    name: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """pool.json as it was read; a snapshot. slots are sorted by number."""

    rule: PoolRule
    base: PoolBase | None = None
    slots: tuple[SlotEntry, ...] = ()
    changes: int = 0
    clock: int = 0

    @property
    def tasks(self) -> dict[str, int]:
        """The slot of each task, sorted by task."""
        return dict(sorted((task, slot.number) for slot in self.slots for task in slot.tasks))

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(slot.nbytes for slot in self.slots)

    def slot_of(self, task: str) -> SlotEntry:
        """The slot that serves a task. Raises PoolError if none does."""
        for slot in self.slots:
            if task in slot.tasks:
                return slot
        raise PoolError(f"the pool has no task {task!r}; it has: {', '.join(self.tasks) or 'none'}")

    def with_slot(self, entry: SlotEntry) -> Manifest:
        """With this slot in place of the one of its number."""
        others = [slot for slot in self.slots if slot.number != entry.number]
        slots = sorted([*others, entry], key=lambda slot: slot.number)
        return replace(self, slots=tuple(slots))

    def to_json(self) -> dict[str, Any]:
        """The document of pool.json."""
        return {
            "schema": SCHEMA,
            "rule": self.rule.to_json(),
            "base": None if self.base is None else asdict(self.base),
            "changes": self.changes,
            "clock": self.clock,
            "tasks": self.tasks,
            "slots": [asdict(slot) for slot in self.slots],
        }


def read_manifest(pool: Path) -> Manifest:
    """Read pool.json of the pool at `pool`.

    Raises:
        PoolError: no pool there, or pool.json is damaged.
    """
    file = pool / POOL_NAME
    try:
        return _parsed(read_json(file))
    except (FileNotFoundError, NotADirectoryError):
        raise PoolError(
            f"{pool} is no pool: it has no {POOL_NAME}; `soupkit pool add` makes one"
        ) from None
    except (OSError, ValueError) as error:
        raise PoolError(fault_text(error, file)) from error


def _need(condition: object, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _fields(value: Any, kind: Any, what: str) -> dict[str, Any]:
    """`value` if it is an object with the fields of the dataclass `kind`."""
    names = {field.name for field in fields(kind)}
    _need(isinstance(value, dict) and set(value) == names, f"{what} is malformed")
    return dict(value)


def _parsed(document: Any) -> Manifest:
    _need(isinstance(document, dict), "is not a JSON object")
    _need(document.get("schema") == SCHEMA, f"has schema {document.get('schema')!r}, not {SCHEMA}")
    _need(isinstance(document.get("slots"), list), "has no slots")
    for field in ("changes", "clock"):
        _need(is_count(document.get(field), MAX_BUDGET), f"has no {field}")
    try:
        rule = PoolRule(**_fields(document.get("rule"), PoolRule, "its rule"))
    except TypeError:
        raise ValueError("its rule is malformed") from None
    slots = tuple(_slot(value) for value in document["slots"])
    numbers = [slot.number for slot in slots]
    _need(numbers == sorted(set(numbers)), "its slots are not in order")
    manifest = Manifest(
        rule, _base(document.get("base")), slots, document["changes"], document["clock"]
    )
    tasks = sum(len(slot.tasks) for slot in slots)
    is_map = document.get("tasks") == manifest.tasks and len(manifest.tasks) == tasks
    _need(is_map, "its map of tasks is not that of its slots")
    _need(manifest.base is not None or not slots, "has slots but no base")
    return manifest


def _base(value: Any) -> PoolBase | None:
    if value is None:
        return None
    base = _fields(value, PoolBase, "its base")
    _need(isinstance(base["name"], str) and base["name"], "its base has no name")
    _need(base["revision"] is None or isinstance(base["revision"], str), "its base is malformed")
    return PoolBase(**base)


def _slot(value: Any) -> SlotEntry:
    slot = _fields(value, SlotEntry, "a slot")
    match = SLOT_FOLDER.fullmatch(slot["folder"]) if isinstance(slot["folder"], str) else None
    _need(match is not None, f"a slot has the folder {slot['folder']!r}")
    assert match is not None
    what = f"slot {match[1]}"
    _need(type(slot["number"]) is int and str(slot["number"]) == match[1], f"{what} is another's")
    for field in ("nbytes", "uses", "last_used"):
        _need(is_count(slot[field], MAX_BUDGET), f"{what} has {field} {slot[field]!r}")
    _need(is_digest(slot["digest"]), f"{what} has no digest")
    _need(_is_number(slot["norms"]) and slot["norms"] >= 0, f"{what} has no norms")
    _need(_is_number(slot["rescaling"]) and slot["rescaling"] > 0, f"{what} has no rescaling")
    _need(isinstance(slot["history"], list) and slot["history"], f"{what} has no history")
    history = tuple(_admission(item, what) for item in slot["history"])
    _need(isinstance(slot["tasks"], list) and slot["tasks"], f"{what} has no tasks")
    known = {item.task for item in history}
    _need(all(isinstance(task, str) for task in slot["tasks"]), f"{what} has odd tasks")
    _need(known.issuperset(slot["tasks"]), f"{what} serves what never came into it")
    return SlotEntry(**{**slot, "tasks": tuple(slot["tasks"]), "history": history})


def _admission(value: Any, what: str) -> Admission:
    item = _fields(value, Admission, f"the history of {what}")
    check_variant_name(item["task"], "task")
    for field in ("similarity", "score"):
        _need(item[field] is None or _is_number(item[field]), f"{what} has an odd {field}")
    _need(_is_number(item["lost_energy"]), f"{what} has an odd lost_energy")
    return Admission(**item)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
