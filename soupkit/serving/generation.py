"""One sequence on its way through the server, and the events it answers with."""

import asyncio
import time
from dataclasses import dataclass, field

from soupkit.errors import ServingError

from .jobs import End
from .patches import BASE_SLOT
from .sampling import Sampling, Token
from .states import Ticket


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of the prompt, before any generated token."""

    tokens: list[Token]


Event = Token | Scored | End | ServingError


@dataclass(slots=True, eq=False)
class Generation(Ticket):
    """One sequence on its way through the server; its events end with End or an error."""

    model: str
    tokens: tuple[int, ...]
    max_tokens: int  # 0: nothing but the prompt's log-probabilities
    sampling: Sampling
    stop_tokens: frozenset[int]
    score_prompt: bool
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    created: float = field(default_factory=time.monotonic)
    job: str | None = None
    slot: int = BASE_SLOT
    started: bool = False
    cancelled: bool = False
    over: bool = False
    first_token: bool = True
