"""What the engine is asked for and what it answers with: jobs, tokens, ends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .sampling import Chooser, Sampling, Token


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate; the slot must stay loaded until its end was delivered."""

    tokens: tuple[int, ...]
    slot: int
    max_tokens: int  # >= 1
    stop_tokens: frozenset[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class End:
    """The last event of every job."""

    reason: Literal["stop", "length", "cancelled", "error"]
    error: str | None = None


Deliver = Callable[[Token | End], None]


class Record:
    """A job the engine thread works on."""

    __slots__ = ("chooser", "deliver", "fate", "fresh", "job", "num_sent")

    def __init__(self, job: Job, deliver: Deliver) -> None:
        self.job, self.deliver = job, deliver
        self.chooser = Chooser(job.sampling)
        self.fresh: list[Token] = []  # chosen, not yet delivered
        self.num_sent = 0
        self.fate: End | None = None  # how it ends early

    def fail(self, reason: str) -> None:
        """Ends it with an error, unless it is ending early already."""
        self.fate = self.fate or End("error", reason)
