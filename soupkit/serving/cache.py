"""The variants that are resident, under a budget in bytes: least recently used goes first.

A variant is known by its content digest. It holds a slot from `admit` to `evict`; while anyone has
acquired it, it stays; while it is pinned, it stays. Its bytes are those of its tensors as they are
stored; the slots that hold them are of equal size and may take more (`VariantBank.arena_bytes`, a
metric beside these). Bookkeeping only: no tensors, no threads, no clock.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Resident:
    slot: int
    num_bytes: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class Evicted:
    """A variant that left the cache, and the slot that it left free."""

    digest: str
    slot: int


class DeltaCache:
    """Which variants are in device memory, in which slot, and who uses them."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes={budget_bytes}: use at least 1")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        # Insertion order is the order of last use, oldest first.
        self._residents: dict[str, _Resident] = {}
        self._pinned: frozenset[str] = frozenset()

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def digests(self) -> tuple[str, ...]:
        """Residents, the least recently used first."""
        return tuple(self._residents)

    def slot(self, digest: str) -> int:
        return self._residents[digest].slot

    def num_bytes(self, digest: str) -> int:
        return self._residents[digest].num_bytes

    def users(self, digest: str) -> int:
        return self._residents[digest].users

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def pin(self, digests: frozenset[str]) -> None:
        """Sets which variants, resident or yet to come, are never evicted."""
        self._pinned = digests

    @property
    def evictable_bytes(self) -> int:
        """Bytes that can go now: neither used nor pinned."""
        return sum(r.num_bytes for d, r in self._residents.items() if self._can_go(d))

    def pinned_bytes_besides(self, digest: str) -> int:
        """Bytes of resident pinned variants other than this one."""
        pinned = self._pinned - {digest}
        return sum(r.num_bytes for d, r in self._residents.items() if d in pinned)

    def has_room(self, num_bytes: int) -> bool:
        """Whether `admit` would succeed now."""
        return self.used_bytes - self.evictable_bytes + num_bytes <= self.budget_bytes

    def admit(self, digest: str, num_bytes: int) -> tuple[int, list[Evicted]]:
        """Takes a variant in; as few as needed of the least recently used idle ones go.

        Returns:
            The slot it holds from now on, and what had to go; the caller empties those slots first.

        Raises:
            ValueError: it is resident already, or there is no room (ask `has_room` first).
        """
        if digest in self._residents:
            raise ValueError(f"{digest} is resident already")
        if not self.has_room(num_bytes):
            raise ValueError(f"no room for {num_bytes} bytes within {self.budget_bytes}")
        gone: list[Evicted] = []
        for candidate in self.digests:
            if self.used_bytes + num_bytes <= self.budget_bytes:
                break
            if self._can_go(candidate):
                gone.append(self.evict(candidate))
        taken = {resident.slot for resident in self._residents.values()}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        self._residents[digest] = _Resident(slot, num_bytes)
        self.used_bytes += num_bytes
        return slot, gone

    def evict(self, digest: str) -> Evicted:
        """Lets an unused variant go. Raises ValueError while it is used."""
        resident = self._residents[digest]
        if resident.users:
            raise ValueError(f"{digest} is used by {resident.users} requests")
        del self._residents[digest]
        self.used_bytes -= resident.num_bytes
        return Evicted(digest, resident.slot)

    def acquire(self, digest: str) -> int:
        """Marks one more user; returns the slot, valid until the matching `release`."""
        resident = self._residents.pop(digest)
        self._residents[digest] = resident
        resident.users += 1
        return resident.slot

    def release(self, digest: str) -> None:
        resident = self._residents[digest]
        if resident.users < 1:
            raise ValueError(f"{digest} is released more often than acquired")
        resident.users -= 1

    def _can_go(self, digest: str) -> bool:
        return self._residents[digest].users == 0 and digest not in self._pinned
