"""Requests to a service of this process, with the time of each of their tokens.

HTTP is left out: it costs the base and a variant the same, which would bring their ratio nearer to
one than the engine's is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from soupkit.errors import ServingError
from soupkit.serving.jobs import End, Generation, Job
from soupkit.serving.sampling import Sampling
from soupkit.serving.server import build_service
from soupkit.serving.service import Service
from soupkit.serving.states import BASE_DIGEST

PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Stream:
    """One request: when it was asked, and when each of its tokens came, in seconds."""

    asked: float
    times: tuple[float, ...]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [after - before for before, after in pairwise(self.times)]


@asynccontextmanager
async def serving(family: Path, *, cache_bytes: int | None = None) -> AsyncIterator[Service]:
    """A service of the family that runs; BundleError or ServingError if it cannot."""
    service = build_service(family, cache_bytes=cache_bytes)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def ask(service: Service, model: str, *, tokens: int, salt: int = 0) -> Stream:
    """One greedy request of `tokens` tokens, each noted when it comes.

    Args:
        salt: requests of different ones share no beginning that could be computed once.
    Raises:
        ServingError: it was not answered in full.
    """
    ref = service.resolve(model)
    vocabulary = service.engine.vocab_size
    prompt = tuple((7 + 131 * salt + 3 * i) % vocabulary for i in range(PROMPT_TOKENS))
    generation = Generation(
        digest=BASE_DIGEST if ref is None else ref.digest,
        model=model,
        job=Job(prompt, tokens, frozenset(), Sampling(temperature=0.0)),
        score_prompt=False,
    )
    asked, times = time.perf_counter(), []
    service.submit([generation])
    while not isinstance(event := await generation.events.get(), End):
        if isinstance(event, ServingError):
            raise event
        times.append(time.perf_counter())
    if len(times) != tokens:
        raise ServingError(f"{model!r} gave {len(times)} of {tokens} tokens: {event.error}")
    return Stream(asked, tuple(times))


async def ask_all(
    service: Service, models: Sequence[str], *, tokens: int, salt: int = 0
) -> list[Stream]:
    """A request for each of the models, all at a time; the prompts are those from `salt` on."""
    asks = [ask(service, model, tokens=tokens, salt=salt + i) for i, model in enumerate(models)]
    return list(await asyncio.gather(*asks))
