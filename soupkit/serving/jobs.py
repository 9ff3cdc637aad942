"""One sequence on its way: the job it is for the engine, its answers, its state in the server."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from soupkit.errors import ServingError

from .sampling import Chooser, Sampling, Token
from .states import Ticket


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate."""

    tokens: tuple[int, ...]  # the prompt's
    max_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling


def check_job(job: Job, *, vocab_size: int, max_context: int) -> None:
    """Raise ValueError for a token or a length that the engine does not have."""
    if not job.tokens:
        raise ValueError("the prompt is empty; give at least one token")
    bad = next((t for t in job.tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    total = len(job.tokens) + job.max_tokens
    if job.max_tokens < 1 or total > max_context:
        raise ValueError(
            f"{len(job.tokens)} prompt tokens + max_tokens={job.max_tokens}: at least 1 and "
            f"together at most {max_context}"
        )


@dataclass(frozen=True, slots=True)
class End:
    """The last event of every job."""

    reason: Literal["stop", "length", "cancelled", "error"]
    error: str | None = None


Deliver = Callable[[Token | End], None]


class Record:
    """A job the engine thread works on."""

    __slots__ = (
        "chooser", "deliver", "fate", "fresh", "has_failed", "job", "num_sent", "salt", "slot",
    )  # fmt: skip

    def __init__(self, job: Job, slot: int, salt: bytes, deliver: Deliver) -> None:
        """salt: the content digest of the weights in the slot."""
        self.job, self.slot, self.salt, self.deliver = job, slot, salt, deliver
        self.chooser = Chooser(job.sampling)
        self.fresh: list[Token] = []  # chosen, not yet delivered
        self.num_sent = 0
        self.has_failed = False
        self.fate: End | None = None  # how it ends early

    def fail(self, reason: str) -> None:
        """Ends it with an error, unless it is ending early already; every rank does so at once."""
        self.has_failed = True
        self.fate = self.fate or End("error", reason)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of the prompt, before any generated token."""

    tokens: list[Token]


@dataclass(slots=True, eq=False)
class Generation(Ticket):
    """A job and where it stands in the server; its events end with End or an error."""

    model: str  # the name it was asked under
    job: Job  # max_tokens may be 0: nothing but the prompt
    score_prompt: bool  # its first event is Scored
    events: "asyncio.Queue[Token | Scored | End | ServingError]" = field(
        default_factory=asyncio.Queue
    )
    created: float = field(default_factory=time.monotonic)
    engine_key: str | None = None  # once the engine has it
    cancelled: bool = False
    over: bool = False
    last_token: float | None = None  # when it came
