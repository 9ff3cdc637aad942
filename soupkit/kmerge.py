"""K-Merge: which adapters share a slot of a pool that may hold only so many bytes.

An adapter that comes gets a slot of its own while one is free and its bytes fit; else it is merged
into the slot nearest to it by cosine, if that passes the gates; else slots of little use are let
go, or it is refused. arXiv 2510.13537; K-Merge++ opens a free slot only for an adapter that is like
none of the slots. Ties go to the lowest slot.

    utility of a slot = (tasks + uses) / bytes;  of equal ones the least recently used goes first

Pure decisions. Not here: how two adapters become one (slot_merge.py), and files (pool.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from soupkit.alike import Weighting
from soupkit.checks import MAX_BUDGET, check_choice, check_count
from soupkit.config import check_share
from soupkit.opcm import Cut, OpcmRule

SlotMethod = Literal["history_mean", "opcm", "ties", "dare"]
WhenFull = Literal["evict", "refuse"]
Action = Literal["store", "merge", "refuse"]

# What "ties" and "dare" make of two thin deltas has full rank.
_NEED_RANK = ("ties", "dare")


@dataclass(frozen=True, slots=True)
class PoolRule:
    """How a pool decides and merges.

    Args:
        capacity_bytes: of all files of all slots together.
        slots: how many there may be; None: as many as fit.
        similarity: cosines as their mean over the modules that both sides have ("module", as in the
            paper), or one cosine over all of them ("norm": modules count by their norms).
        merge: "history_mean": every task of a slot counts the same; "opcm": each is projected
            beside the ones before (opcm.py); "ties", "dare": see slot_merge.py.
        rank: to which a merged slot is cut; None: ranks add up. Either way it is cut to what still
            fits into the bytes. "ties" and "dare" need one.
        open_below: K-Merge++: a free slot is opened only for an adapter whose similarity to every
            slot is below it; None: for any.
        gate_similarity: the least similarity of a merge; None: no such gate.
        gate_quality: the share of its score at admission that each task, old and new, must keep
            after a merge; needs a function that scores. None: no such gate.
        when_full: what happens to an adapter that neither fits nor passes: "evict" slots of least
            utility until it fits, or "refuse" it.
        alpha, cut: of opcm. density: share of entries that ties and dare keep. seed: of dare.
    Raises:
        ValueError: a value out of range.
    """

    capacity_bytes: int
    slots: int | None = None
    similarity: Weighting = "module"
    merge: SlotMethod = "history_mean"
    rank: int | None = None
    open_below: float | None = None
    gate_similarity: float | None = None
    gate_quality: float | None = None
    when_full: WhenFull = "refuse"
    alpha: float = 0.5
    cut: Cut = "block"
    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        check_count("capacity_bytes", self.capacity_bytes, least=1, most=MAX_BUDGET)
        for field in ("slots", "rank"):
            if getattr(self, field) is not None:
                check_count(field, getattr(self, field), least=1)
        check_choice("similarity", self.similarity, get_args(Weighting))
        check_choice("merge", self.merge, get_args(SlotMethod))
        check_choice("when_full", self.when_full, get_args(WhenFull))
        for field in ("open_below", "gate_similarity"):
            _check_number(field, getattr(self, field))
        if self.gate_quality is not None:
            check_share("gate_quality", self.gate_quality, one_allowed=True)
        check_share("density", self.density, one_allowed=True)
        check_count("seed", self.seed, least=0)
        _ = self.opcm
        if self.merge in _NEED_RANK and self.rank is None:
            raise ValueError(
                f'merge="{self.merge}" needs rank=, as in rank=32: what it makes has full rank'
            )

    @property
    def opcm(self) -> OpcmRule:
        """alpha and cut, as opcm.py takes them."""
        return OpcmRule(self.alpha, self.cut)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def _check_number(field: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{field}={value!r}: needs a finite number; cosines are in -1..1")


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a decision looks at of one slot.

    Args:
        number: of the slot. nbytes: of its files. num_tasks: that it serves. uses: since it was
            made. last_used: any number that grows with time.
        similarity: to the adapter that comes; -inf where they have no module in common.
    """

    number: int
    nbytes: int
    num_tasks: int
    uses: int
    last_used: int
    similarity: float

    @property
    def utility(self) -> float:
        """Tasks served and uses, a byte."""
        return (self.num_tasks + self.uses) / max(1, self.nbytes)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with an adapter.

    Args:
        action: "store" in a slot of its own, "merge" into one, or "refuse".
        slot: that is merged into; None otherwise. evicted: slots to let go first.
        similarity: to the nearest slot; None if there is none.
        reason: why, for people.
    """

    action: Action
    reason: str
    slot: int | None = None
    evicted: tuple[int, ...] = ()
    similarity: float | None = None


def decide(
    rule: PoolRule, slots: Sequence[SlotView], nbytes: int, *, rejected: str | None = None
) -> Decision:
    """What to do with an adapter of `nbytes` bytes.

    Args:
        rejected: why the merge that was decided before came to nothing; None: none was tried.
    """
    if nbytes > rule.capacity_bytes:
        return Decision(
            "refuse",
            f"the adapter takes {nbytes} bytes, the whole pool may take {rule.capacity_bytes}: "
            "raise the budget, or cut the adapter's rank",
        )
    if not slots:
        return Decision("store", "the first")
    best = max(slots, key=lambda slot: (slot.similarity, -slot.number))
    fits = _fits(rule, slots, nbytes)
    is_new = rule.open_below is None or best.similarity < rule.open_below
    if fits and is_new:
        return Decision("store", "fits", similarity=best.similarity)
    least = -math.inf if rule.gate_similarity is None else rule.gate_similarity
    if rejected is None and best.similarity < least:
        rejected = (
            f"its similarity to the nearest slot is {best.similarity:.4g}, the gate asks for "
            f"{least:.4g}"
        )
    if rejected is None:
        why = "like an open slot" if fits else "full"
        return Decision("merge", why, slot=best.number, similarity=best.similarity)
    if fits:
        return Decision("store", f"fits, and {rejected}", similarity=best.similarity)
    if rule.when_full == "refuse":
        return Decision("refuse", f"the pool is full, and {rejected}", similarity=best.similarity)
    going = _evicted(rule, slots, nbytes)
    return Decision("store", rejected, evicted=going, similarity=best.similarity)


def _fits(rule: PoolRule, slots: Sequence[SlotView], nbytes: int) -> bool:
    """Whether one more slot of `nbytes` bytes may stand beside these."""
    is_free = rule.slots is None or len(slots) < rule.slots
    return is_free and sum(slot.nbytes for slot in slots) + nbytes <= rule.capacity_bytes


def _evicted(rule: PoolRule, slots: Sequence[SlotView], nbytes: int) -> tuple[int, ...]:
    """The slots of least utility without which `nbytes` bytes fit."""
    left = sorted(slots, key=lambda slot: (-slot.utility, -slot.last_used, -slot.number))
    going = []
    while not _fits(rule, left, nbytes):
        going.append(left.pop().number)
    return tuple(going)
