"""The words of the router: requests, phases of a variant, limits, refusals, and its driver."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from soupkit.errors import ServingError

from .cache import Evicted

BASE_DIGEST = "base"


class QueueFull(ServingError):
    """Too many requests wait already."""


class VariantUnavailable(ServingError):
    """A variant could not be loaded; others are not affected."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Phase(Enum):
    """Where a variant is between the disk and the device."""

    COLD = "cold"
    QUEUED = "queued"
    LOADING = "loading"
    LOADED = "loaded"  # read and checked, waiting for room
    INSTALLING = "installing"
    RESIDENT = "resident"
    DRAINING = "draining"  # resident, but new requests wait until it was evicted and loaded again
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way; the server derives its own kind."""

    digest: str


class Driver(Protocol):
    """What the router makes happen; results come back through the router's methods."""

    def load(self, digest: str) -> None:
        """Reads and checks a variant; then `loaded` or `load_failed`."""

    def drop(self, digest: str) -> None:
        """Forgets what `load` read: it will not be installed."""

    def install(self, digest: str, slot: int, evicted: list[Evicted]) -> None:
        """Empties the evicted slots, then fills the slot; then `installed` or `load_failed`."""

    def evict(self, evicted: Evicted) -> None:
        """Empties a slot."""

    def run(self, ticket: Ticket, slot: int | None) -> None:
        """Runs a request (slot None = base); then `finished`."""

    def fail(self, ticket: Ticket, error: ServingError) -> None:
        """Answers a request that will not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the router: counts of requests and loads, seconds of waiting."""

    max_running: int
    max_queue: int  # requests that wait, for a load or for their turn
    max_loads: int = 2
    starve_seconds: float = 2.0
    first_backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_queue, self.max_loads) < 1:
            raise ValueError(f"{self}: max_running, max_queue and max_loads must be at least 1")
