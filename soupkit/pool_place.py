"""Where an adapter goes in a pool: kmerge.py's decision carried out in a hidden folder, and gated.

A merge that fails the quality gate, or that no rank makes fit, is thrown away and decided anew.
Nothing of the pool changes here. Not here: moving the folder to its place.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from soupkit.adapter_folder import AdapterFolder
from soupkit.alike import norms_of, similarity
from soupkit.errors import PoolError
from soupkit.kmerge import Decision, PoolRule, SlotView, decide
from soupkit.pool_manifest import Admission, Manifest, SlotEntry
from soupkit.pool_slots import Candidate, Incoming, LazyPairs, copied, copied_bytes, merged

# The score of an adapter folder on a task: larger is better, 0 or more.
Quality = Callable[[Path, str], float]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What was decided, and the slot that came of it."""

    decision: Decision
    made: Candidate


def find_place(
    manifest: Manifest,
    slots: Mapping[int, AdapterFolder],
    incoming: Incoming,
    *,
    staging: Path,
    quality: Quality | None,
) -> Place:
    """Decide, and make the slot in a new folder inside `staging`.

    Args:
        slots: the opened folder of each slot, by number.
        quality: scores a folder on a task; given if and only if the rule has a gate_quality.
    Raises:
        PoolError: there is no place. Else as `merged` and `copied` do.
    """
    rule, pairs = manifest.rule, incoming.pairs
    norms = norms_of(pairs)
    views = [
        SlotView(
            number=slot.number,
            nbytes=slot.nbytes,
            num_tasks=len(slot.tasks),
            uses=slot.uses,
            last_used=slot.last_used,
            similarity=similarity(
                pairs, LazyPairs(slots[slot.number]), weighting=rule.similarity, norms=norms
            ),
        )
        for slot in manifest.slots
    ]
    nbytes = copied_bytes(incoming, rule)
    decision = decide(rule, views, nbytes)
    if decision.action == "merge":
        entry = next(slot for slot in manifest.slots if slot.number == decision.slot)
        found = _merged(manifest, entry, slots[entry.number], incoming, staging, decision, quality)
        if isinstance(found, Candidate):
            return Place(decision, found)
        decision = decide(rule, views, nbytes, rejected=found)
    if decision.action == "refuse":
        raise PoolError(f"{incoming.origin}: {decision.reason}")
    taken = {view.number for view in views} - set(decision.evicted)
    number = min(set(range(len(taken) + 1)) - taken)
    change = manifest.changes + 1
    made = copied(staging / "copied", incoming, rule, number=number, change=change)
    return Place(decision, made)


def _merged(
    manifest: Manifest,
    entry: SlotEntry,
    slot: AdapterFolder,
    incoming: Incoming,
    staging: Path,
    decision: Decision,
    quality: Quality | None,
) -> Candidate | str:
    """The merged slot, or why there is none."""
    room = manifest.rule.capacity_bytes - manifest.nbytes + entry.nbytes
    alike = decision.similarity
    told = replace(
        incoming.admission,
        similarity=alike if alike is not None and math.isfinite(alike) else None,
    )
    found = merged(
        staging / "merged",
        replace(incoming, admission=told),
        manifest.rule,
        entry=entry,
        slot=slot,
        room=room,
        change=manifest.changes + 1,
    )
    if found is None:
        return f"merged into slot {entry.number} it takes more than {room} bytes at any rank"
    complaint = None
    if quality is not None:
        complaint = _complaint(found, entry, slot.info.path, manifest.rule, quality)
    if complaint is None:
        return found
    shutil.rmtree(found.folder)
    return complaint


def _complaint(
    found: Candidate, entry: SlotEntry, before: Path, rule: PoolRule, quality: Quality
) -> str | None:
    """What the quality gate has against a merged slot."""
    assert rule.gate_quality is not None
    admitted: dict[str, Admission] = {item.task: item for item in found.entry.history}
    for task in found.entry.tasks:
        own = admitted[task].score
        if own is None:  # It came before there was a gate.
            own = score_of(quality, before, task)
        score = score_of(quality, found.folder, task)
        if score < rule.gate_quality * own:
            return (
                f"merged into slot {entry.number} the task {task} scores {score:.4g} instead of "
                f"{own:.4g}, the gate asks for {rule.gate_quality:.4g} of it"
            )
    return None


def score_of(quality: Quality, folder: Path, task: str) -> float:
    """The score of a folder on a task.

    Raises:
        ValueError: it is no finite number from 0 up.
    """
    score = quality(folder, task)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"quality gave {score!r} for task {task}: needs a number")
    if not (math.isfinite(score) and score >= 0):
        raise ValueError(
            f"quality gave {score} for task {task}: needs a finite number from 0 up, larger is "
            "better"
        )
    return float(score)
