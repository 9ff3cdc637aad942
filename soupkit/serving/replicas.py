"""Which of several replicas answers a request: by what each holds, and by how much it has to do.

    held, and a place in a batch free    the replica that holds it, loaded before being loaded
    held, but every batch is full        one more replica loads it, if it has room for that
    held nowhere                         where a copy is in host memory, else where there is room
    base                                 where there is least to do

Room is a free slot, or one whose variant another replica holds too and nobody uses here: a copy
puts no other variant out of the fleet, unless twice a batch is open for the replica that it is to
relieve. While a variant is being loaded anywhere no other load of it begins, so that followers go
where it loads. A replica that failed to load a variant, or is late with it, is asked last.

A function of what is known, without clock or I/O: several routers that know the same choose the
same. Where cold variants go on equal terms is a hash of the two (rendezvous hashing), so that one
comes back to where its file is still in the page cache. So it is with a conversation among replicas
that have about as much to do: its next turn comes where keys and values of the last one are still
in the prefix cache.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .states import Phase

_HELD = frozenset({Phase.QUEUED, Phase.LOADING, Phase.INSTALLING, Phase.RESIDENT})
# Open sequences of a replica, in batches, from which on a copy may put others out.
PATIENCE = 2
# Loads that are in the same part of a batch are about equal.
PARTS = 4


@dataclass(frozen=True)
class Replica:
    """What is known of one at a time; what follows from it is worked out once.

    Args:
        is_up: whether it can generate. open: sequences it has, running and waiting.
        slots: variants that its device has room for. phases: of variants; others are on disk.
        pinned: variants that stay. open_for: sequences by variant. late: variants whose load takes
            longer than anyone should wait for.
    """

    is_up: bool
    open: int
    max_running: int
    max_queue: int
    slots: int
    phases: Mapping[str, Phase] = field(default_factory=dict)
    pinned: Collection[str] = ()
    open_for: Mapping[str, int] = field(default_factory=dict)
    late: Collection[str] = ()

    @property
    def is_busy(self) -> bool:
        """Whether one more would wait for its turn."""
        return self.open >= self.max_running

    @property
    def is_full(self) -> bool:
        """Whether one more would be refused."""
        return self.open >= self.max_running + self.max_queue

    @property
    def load(self) -> float:
        """What it has to do, in batches."""
        return self.open / self.max_running

    def holds(self, variant: str) -> bool:
        """Whether it is resident or on its way, and not late."""
        return variant in self.held and variant not in self.late

    def loads(self, variant: str) -> bool:
        """Whether it is on its way, and not late."""
        return variant in self.loading and variant not in self.late

    def has_failed(self, variant: str) -> bool:
        """Whether it could not load it, or has not for too long."""
        return self.phases.get(variant) is Phase.FAILED or variant in self.late

    @cached_property
    def held(self) -> frozenset[str]:
        """All that are resident or on their way: who has asked for one, has begun its load."""
        asked = {variant for variant, count in self.open_for.items() if count > 0}
        return frozenset(asked.union(v for v, phase in self.phases.items() if phase in _HELD))

    @cached_property
    def resident(self) -> frozenset[str]:
        """All that are ready."""
        return frozenset(v for v, phase in self.phases.items() if phase is Phase.RESIDENT)

    @cached_property
    def loading(self) -> frozenset[str]:
        """All that are on their way."""
        return self.held - self.resident

    @cached_property
    def free_slots(self) -> int:
        return max(0, self.slots - len(self.held))

    @cached_property
    def idle(self) -> frozenset[str]:
        """Variants that may be evicted now."""
        return frozenset(
            v for v in self.resident if v not in self.pinned and not self.open_for.get(v)
        )


def choose(
    replicas: Sequence[Replica],
    variant: str | None,
    *,
    excluded: Collection[int] = (),
    beginning: bytes = b"",
) -> int | None:
    """The replica that a request goes to, None if none is up.

    Args:
        variant: what it asks for; None: the base. excluded: those that have refused it already.
        beginning: of what it asks, the same for all turns of a conversation; empty: of none.
    """
    up = [i for i, one in enumerate(replicas) if one.is_up and i not in excluded]
    able = [i for i in up if not replicas[i].is_full] or up
    if not able:
        return None
    if variant is None:
        return min(able, key=lambda i: _wait(replicas[i], i, "", beginning))
    holders = [i for i in able if replicas[i].holds(variant)]
    if not holders:
        return min(able, key=lambda i: _cost_of_load(replicas, i, variant))
    best = min(holders, key=lambda i: _wait(replicas[i], i, variant, beginning))
    if not replicas[best].is_busy or any(one.is_up and one.loads(variant) for one in replicas):
        return best
    may_put_out = replicas[best].open >= PATIENCE * replicas[best].max_running
    others = [
        i
        for i in able
        if i not in holders
        and not replicas[i].is_busy
        and not replicas[i].has_failed(variant)
        and (_has_room(replicas, i) or (may_put_out and replicas[i].idle))
    ]
    return min(others, key=lambda i: _cost_of_load(replicas, i, variant), default=best)


def _wait(
    replica: Replica, index: int, variant: str, beginning: bytes
) -> tuple[bool, bool, float, bytes]:
    """Holders, the one that answers soonest first."""
    if not beginning:
        return replica.is_busy, replica.loads(variant), replica.load, index.to_bytes(8, "big")
    parts, place = int(PARTS * replica.load), _place(index, variant, beginning)
    return replica.is_busy, replica.loads(variant), parts, place


def _cost_of_load(
    replicas: Sequence[Replica], index: int, variant: str
) -> tuple[bool, bool, bool, bool, int, int, int, bytes]:
    """Replicas that could load a variant, the one that does it best first."""
    one = replicas[index]
    phase = one.phases.get(variant, Phase.DISK)
    return (
        one.has_failed(variant) or phase is Phase.DRAINING,
        one.is_busy,
        phase is not Phase.HOST,
        not _has_room(replicas, index),
        len(one.loading),
        int(PARTS * one.load),
        -one.free_slots,
        _place(index, variant),
    )


def _place(index: int, variant: str, beginning: bytes = b"") -> bytes:
    """Rendezvous hashing: the least of all replicas is the one for what is hashed."""
    what = f"{index}\0{variant}".encode()
    return hashlib.blake2b(what + (b"\0" + beginning if beginning else b""), digest_size=8).digest()


def _has_room(replicas: Sequence[Replica], index: int) -> bool:
    """Whether a load there puts no variant out of the fleet."""
    one = replicas[index]
    if one.free_slots:
        return True
    others = (other for i, other in enumerate(replicas) if i != index and other.is_up)
    return any(not one.idle.isdisjoint(other.resident) for other in others)
