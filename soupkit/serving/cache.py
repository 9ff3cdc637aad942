"""Which variants are in memory, in two tiers above the disk, each under a budget in bytes.

Device tier: slots of equal bytes, budget_bytes // slot_bytes of them, so that a swap changes no
shape and the budget is exact. A variant holds a slot from `admit` to `evict`; while anyone has
acquired it or it is pinned it stays, and one slot is never pinned (R8). A variant that needs larger
slots makes them grow: fewer are given out from `plan_growth` on, and `grow` follows once those
beyond are empty.

Host tier: what was read and checked, in its exact bytes, so that a return to the device needs no
read; budget 0 where host and device are the same memory.

In both tiers what the policy values least goes first, and only once what takes its place has been
loaded (R7). Variants are known by content digest (R1). Bookkeeping only: no tensors, no threads.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from .policy import Policy


@dataclass(slots=True)
class _Resident:
    slot: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class Evicted:
    """A variant that left the device, and the slot that it left free."""

    digest: str
    slot: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds to bring a variant from the disk to the host, and from there to its slot."""

    load_seconds: float = 0.0
    install_seconds: float = 0.0


class DeltaCache:
    """Who is in which slot and in host memory, and who uses it."""

    def __init__(self, budget_bytes: int, policy: Policy, *, host_bytes: int = 0) -> None:
        if budget_bytes < 1 or host_bytes < 0:
            raise ValueError(
                f"budget_bytes={budget_bytes}, host_bytes={host_bytes}: use at least 1 and 0"
            )
        self.budget_bytes, self.host_bytes, self.policy = budget_bytes, host_bytes, policy
        self.slot_bytes = 0  # none yet
        self.planned_bytes = 0  # what a slot will have once it has grown
        # Insertion order is the order of last use, oldest first: it decides between equal values.
        self._residents: dict[str, _Resident] = {}
        self._hosted: dict[str, int] = {}  # digest -> bytes
        self._pins: tuple[str, ...] = ()
        self._costs: dict[str, Costs] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def digests(self) -> tuple[str, ...]:
        """Residents, the least recently used first."""
        return tuple(self._residents)

    @property
    def num_slots(self) -> int:
        """Slots that may be given out; fewer than there are while growth is planned."""
        return self.budget_bytes // self.planned_bytes if self.planned_bytes else 0

    @property
    def used_bytes(self) -> int:
        return len(self._residents) * self.slot_bytes

    @property
    def host_used_bytes(self) -> int:
        return sum(self._hosted.values())

    def slot(self, digest: str) -> int:
        return self._residents[digest].slot

    def users(self, digest: str) -> int:
        return self._residents[digest].users

    def costs(self, digest: str) -> Costs:
        """What was noted, zeros if nothing."""
        return self._costs.get(digest, Costs())

    def note_costs(self, digest: str, costs: Costs) -> None:
        self._costs[digest] = costs

    def forget(self, digest: str) -> None:
        """Of a variant that is in no tier and will not come back."""
        self._costs.pop(digest, None)
        self.policy.forget(digest)

    # Pins.

    def pin(self, digests: Sequence[str]) -> None:
        """Sets which variants are never evicted, the most important first, there or yet to come."""
        self._pins = tuple(dict.fromkeys(digests))

    @property
    def pinned(self) -> tuple[str, ...]:
        """The pins that hold: one slot always floats."""
        return self._pins[: self.num_slots - 1] if self.planned_bytes else self._pins

    def can_go(self, digest: str) -> bool:
        """Whether a resident may be evicted now."""
        return not self._residents[digest].users and digest not in self.pinned

    # The device tier.

    def plan_growth(self, slot_bytes: int) -> None:
        """From now on only as many slots are given out as there will be of that size."""
        if not self.planned_bytes <= slot_bytes <= self.budget_bytes:
            raise ValueError(
                f"slot_bytes={slot_bytes}: at least {self.planned_bytes}, as slots never shrink, "
                f"and at most the budget, {self.budget_bytes}"
            )
        self.planned_bytes = slot_bytes

    @property
    def beyond(self) -> tuple[str, ...]:
        """Residents of slots that the planned growth takes away."""
        return tuple(d for d, r in self._residents.items() if r.slot >= self.num_slots)

    def grow(self, slot_bytes: int) -> None:
        """The slots have that size now. Raises ValueError while a resident is in the way."""
        count = self.budget_bytes // slot_bytes
        beyond = sum(resident.slot >= count for resident in self._residents.values())
        if beyond:
            raise ValueError(f"{beyond} residents are in slots that go; evict them first")
        self.slot_bytes = slot_bytes

    def drop_plan(self) -> None:
        """The slots stay as they are."""
        self.planned_bytes = self.slot_bytes

    def has_room(self) -> bool:
        """Whether `admit` would succeed now."""
        return self._free_slot() is not None or self._victim() is not None

    def admit(self, digest: str) -> tuple[int, list[Evicted]]:
        """Takes a variant into a slot; if none is free, the least valued idle one goes.

        Returns:
            The slot it holds from now on, and what had to go; the caller empties that slot first.

        Raises:
            ValueError: it is resident already, or there is no room (ask `has_room` first).
        """
        if digest in self._residents:
            raise ValueError(f"{digest} is resident already")
        slot, gone = self._free_slot(), list[Evicted]()
        if slot is None:
            victim = self._victim()
            if victim is None:
                raise ValueError(f"no room: all {self.num_slots} slots are used or pinned")
            gone.append(self.evict(victim))
            slot = gone[0].slot
        self._residents[digest] = _Resident(slot)
        return slot, gone

    def evict(self, digest: str) -> Evicted:
        """Lets an unused variant go. Raises ValueError while it is used."""
        resident = self._residents[digest]
        if resident.users:
            raise ValueError(f"{digest} is used by {resident.users} requests")
        del self._residents[digest]
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

    def value(self, digest: str) -> float:
        """Of a slot's worth: what it costs to bring the variant back to the device."""
        costs = self.costs(digest)
        seconds = costs.install_seconds
        if digest not in self._hosted:
            seconds += costs.load_seconds
        return self.policy.value(digest, self.slot_bytes, seconds)

    def _free_slot(self) -> int | None:
        taken = {resident.slot for resident in self._residents.values()}
        return next((slot for slot in range(self.num_slots) if slot not in taken), None)

    def _victim(self) -> str | None:
        idle = [d for d, r in self._residents.items() if r.slot < self.num_slots]
        return min(filter(self.can_go, idle), key=self.value, default=None)

    # The host tier.

    def is_hosted(self, digest: str) -> bool:
        return digest in self._hosted

    def hosted_bytes(self, digest: str) -> int:
        """What a variant takes there, 0 if it is not."""
        return self._hosted.get(digest, 0)

    def host(self, digest: str, num_bytes: int, *, busy: Set[str]) -> list[str] | None:
        """Keeps a variant in host memory, if that is worth what has to go for it.

        Args:
            busy: digests that may not go.

        Returns:
            What had to go, the least valued; None if it is not kept, and nothing has changed.
        """
        missing = self.host_used_bytes + num_bytes - self.host_bytes
        lost, gone = 0.0, list[str]()
        for candidate in sorted(self._hosted.keys() - busy, key=lambda d: (self._host_value(d), d)):
            if missing <= 0:
                break
            missing -= self._hosted[candidate]
            lost += self._host_value(candidate) * self._hosted[candidate]
            gone.append(candidate)
        self._hosted[digest] = num_bytes
        gained = self._host_value(digest) * num_bytes
        if missing > 0 or (gone and not self.policy.admits(gained, lost)):
            del self._hosted[digest]
            return None
        for candidate in gone:
            del self._hosted[candidate]
        return gone

    def unhost(self, digest: str) -> None:
        del self._hosted[digest]

    def _host_value(self, digest: str) -> float:
        load_seconds = self.costs(digest).load_seconds
        return self.policy.value(digest, self._hosted[digest], load_seconds)
