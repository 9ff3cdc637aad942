"""The words of the router: requests, phases of a variant, limits, refusals, and who acts for it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from soupkit.errors import ServingError

from .cache import Evicted

BASE_DIGEST = "base"


class QueueFull(ServingError):
    """Too many requests wait already."""


class TooMany(ServingError):
    """More sequences at once than the queues ever take."""


class NotServed(ServingError):
    """The variant left the family or was unloaded."""


class VariantUnavailable(ServingError):
    """A variant could not be loaded; others are not affected."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class WaitedTooLong(VariantUnavailable):
    """A request's turn did not come within the limit."""


class Phase(Enum):
    """Where a variant is between the disk and the device."""

    DISK = "disk"
    QUEUED = "queued"  # wanted; its load waits for others
    LOADING = "loading"
    HOST = "host"  # read and checked; wanted ones wait for room on the device
    INSTALLING = "installing"
    RESIDENT = "resident"
    DRAINING = "draining"  # resident, but new requests wait until it was evicted and is back
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way; the server derives its own kind."""

    digest: str
    arrived: float = field(default=0.0, init=False)  # set by the router


class Mover(Protocol):
    """Moves variants between disk, host and device when the router says so.

    Results come back through the router's methods, later: neither this nor Runner may call it.
    """

    def load(self, digest: str) -> None:
        """Reads and checks a variant; then `loaded` or `load_failed`."""

    def drop(self, digest: str) -> None:
        """Forgets what `load` read; once for every `loaded`."""

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        """Empties the evicted slots, then fills the slot; then `installed` or `load_failed`."""

    def evict(self, evicted: Evicted) -> None:
        """Empties a slot."""

    def grow(self, num_slots: int, slot_bytes: int) -> None:
        """Gives the slots another size, residents as they were; then `grown` or `grow_failed`."""


class Runner(Protocol):
    """Runs requests and answers them when the router says so."""

    def run(self, ticket: Ticket, slot: int | None) -> None:
        """Runs a request (slot None = base); then `finished`."""

    def halt(self, ticket: Ticket, error: ServingError) -> None:
        """Ends a running request early with an error; `finished` still follows."""

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        """Answers a request that will not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the router: counts of requests and loads, seconds of waiting."""

    max_running: int
    max_queue: int  # requests that wait, for a load or for their turn
    max_variant_queue: int | None = None  # those of one variant; by default all may be of one
    max_wait_seconds: float = float("inf")
    max_loads: int = 2
    starve_seconds: float = 2.0
    first_backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    auto_pin: int = 0  # so many of the most asked for are pinned

    def __post_init__(self) -> None:
        most = self.max_queue if self.max_variant_queue is None else self.max_variant_queue
        if min(self.max_running, self.max_queue, self.max_loads, most) < 1:
            raise ValueError(f"{self}: max_running, queues and max_loads must be at least 1")
        if self.auto_pin < 0 or self.max_wait_seconds <= 0:
            raise ValueError(f"{self}: auto_pin must be at least 0, max_wait_seconds above 0")


@dataclass(frozen=True, slots=True)
class VariantStats:
    """One variant as it is now, and what happened to it so far."""

    phase: Phase
    pinned: bool
    users: int  # requests that run or whose turn comes next
    waiting: int  # requests that have not started
    device_bytes: int
    host_bytes: int
    hits: int  # requests that found it resident
    misses: int
    loads: int
    failures: int
    evictions: int
    load_seconds: float  # of late, from the disk
    install_seconds: float  # of late, from host memory to its slot
    rate: float  # requests per second of late
