"""The simulated fleet against a server: the same requests at the same times through both.

The server is one replica on this machine, its engine real, its loads slowed down to a time that is
known; HTTP is left out. What an iteration costs it is fitted to what it takes alone, eight at a
time, and for several variants; then the simulator is asked what the server will do.

    iteration = a + b sequences + c variants + d tokens of prompt
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from soupkit.bench.cache_traces import zipf
from soupkit.bench.fleet import Outcome, outcome
from soupkit.bench.fleet_costs import Piece
from soupkit.bench.fleet_sim import Ask, Clock, Fleet, Line, SimReplica, Sizes
from soupkit.bench.rows import Row
from soupkit.bench.serve import filled
from soupkit.bench.streams import PROMPT_TOKENS, ask, ask_all, serving
from soupkit.bundle import LoadedVariant, VariantRef
from soupkit.family import open_family
from soupkit.headroom import BATCH_TOKENS
from soupkit.serving.service import Service
from soupkit.serving.states import Limits, Phase

VARIANTS, SLOTS = 12, 4
LOAD_SECONDS = 0.25
ANSWER = 16
REST_SECONDS = 0.2
BUSY = 0.4  # of what the engine could do, in the mean
TOGETHER, FITS = 8, 5  # sequences of the fit, and repetitions
# One is the same as the server.
HITS_GOAL, TIME_GOAL = 1.15, 1.5


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a server's iterations cost; see the module. Loads and installs as they were."""

    alone: float
    sequence: float
    variant: float
    token: float
    load_seconds: float
    install_seconds: float

    def iteration(self, decoding: int, variants: int, prompts: Sequence[Piece]) -> float:
        tokens = sum(piece.tokens for piece in prompts)
        return (
            self.alone
            + self.sequence * (decoding + len(prompts))
            + self.variant * variants
            + self.token * tokens
        )

    def load(self, num_bytes: int) -> float:
        return self.load_seconds

    def install(self, num_bytes: int) -> float:
        return self.install_seconds


def run(family: Path, *, quick: bool) -> list[Row]:
    """Rows of what the server did beside what was foretold; the ratio is the larger by the smaller.

    Raises:
        BundleError: no family. ServingError: it cannot be served.
        ValueError: the family has no variant to be varied.
    """
    found = open_family(family)
    if not found.variants:
        raise ValueError(f"{family} has no variant to ask for; `soupkit export` adds one")
    with tempfile.TemporaryDirectory() as scratch:
        measured = filled(found, Path(scratch), count=VARIANTS)
        return asyncio.run(_run(measured.path, sorted(measured.variants), quick=quick))


async def _run(family: Path, names: list[str], *, quick: bool) -> list[Row]:
    requests, seeds = (40, 1) if quick else (200, 3)
    async with serving(family) as service:
        costs = await _fit(service, names)
        slot_bytes = service.engine.slot_bytes(list(service.catalog.manifests().values()))
    pairs = []
    for seed in range(seeds):
        asks = _trace(names, costs, requests=requests, seed=seed)
        # A new server each time: everything is cold when a trace begins.
        async with serving(family, cache_bytes=SLOTS * slot_bytes) as service:
            served = await _serve(service, asks)
            limits = service.router.limits
        pairs.append((outcome(served), _simulate(names, costs, asks, limits)))
    return _rows(pairs)


async def _fit(service: Service, names: list[str]) -> Fitted:
    """What this server's iterations cost."""
    few = names[:SLOTS]
    await ask_all(service, few, tokens=ANSWER)
    rounds: list[list[float]] = []
    for i in range(FITS):
        salt = (i + 1) * 3 * TOGETHER
        one = await ask(service, "base", tokens=ANSWER, salt=salt)
        # An engine that has rested takes longer to a first token, and most requests find one.
        await asyncio.sleep(REST_SECONDS)
        own = await ask(service, few[0], tokens=ANSWER, salt=salt + 1)
        many = await ask_all(service, ["base"] * TOGETHER, tokens=ANSWER, salt=salt + 2)
        mixed = await ask_all(service, few, tokens=ANSWER, salt=salt + 2 + TOGETHER)
        sets = ([one], [own], many, mixed)
        rounds.append([own.first, *(median(gap for s in set_ for gap in s.gaps) for set_ in sets)])
    first, one_gap, own_gap, many_gap, mixed_gap = map(median, zip(*rounds, strict=True))
    sequence = max(0.0, (many_gap - one_gap) / (TOGETHER - 1))
    alone = max(0.0, one_gap - sequence)
    stats = service.router.stats().values()
    return Fitted(
        alone=alone,
        sequence=sequence,
        variant=max(0.0, (mixed_gap - alone - SLOTS * sequence) / SLOTS),
        token=max(0.0, (first - own_gap) / PROMPT_TOKENS),
        load_seconds=LOAD_SECONDS + median(one.load_seconds for one in stats if one.loads),
        install_seconds=median(one.install_seconds for one in stats if one.loads),
    )


def _trace(names: list[str], costs: Fitted, *, requests: int, seed: int) -> list[Ask]:
    """Requests by Zipf's law, as often as neither engine nor loads are too busy for."""
    rng = np.random.default_rng(seed)
    tokens = SLOTS / costs.iteration(SLOTS, SLOTS, [])  # a second
    rate = min(BUSY * tokens / ANSWER, BUSY / LOAD_SECONDS * 2)
    times = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    order = zipf(rng, requests, len(names)).tolist()
    return [
        Ask(names[variant], at, PROMPT_TOKENS, ANSWER)
        for variant, at in zip(order, times, strict=True)
    ]


async def _serve(service: Service, asks: Sequence[Ask]) -> list[Ask]:
    """The requests as the server answered them."""
    original = service.catalog.load

    def load(ref: VariantRef) -> LoadedVariant:
        time.sleep(LOAD_SECONDS)
        return original(ref)

    setattr(service.catalog, "load", load)  # noqa: B010 - of this instance
    began = time.perf_counter()

    async def serve(number: int, planned: Ask) -> Ask:
        await asyncio.sleep(planned.at - (time.perf_counter() - began))
        ref = service.resolve(planned.digest)
        assert ref is not None
        is_resident = service.router.phase(ref.digest) is Phase.RESIDENT
        stream = await ask(service, planned.digest, tokens=planned.tokens, salt=number)
        found = Ask(planned.digest, stream.asked - began, planned.prompt, planned.tokens)
        found.was_resident, found.first = is_resident, stream.times[0] - began
        return found

    return list(await asyncio.gather(*(serve(i, one) for i, one in enumerate(asks))))


def _simulate(names: list[str], costs: Fitted, asks: Sequence[Ask], limits: Limits) -> Outcome:
    """The same requests through one simulated replica."""
    sizes = Sizes(SLOTS, 1, 0, batch_tokens=BATCH_TOKENS["cpu"], file_bytes=1)
    clock = Clock()
    replica = SimReplica(clock, costs, sizes, limits=limits, disk=Line(limits.max_loads))
    replica.begin(names)
    told = [Ask(one.digest, one.at, one.prompt, one.tokens) for one in asks]
    Fleet(clock, [replica]).ask(told)
    return outcome(told)


def _rows(pairs: Sequence[tuple[Outcome, Outcome]]) -> list[Row]:
    """Of (served, simulated)."""
    figures = (
        ("found resident", "%", "resident", 1e2, HITS_GOAL),
        # Not the median: about half of the requests wait for a load.
        ("first token, mean", "ms", "mean", 1e3, TIME_GOAL),
        ("first token P99", "ms", "p99", 1e3, TIME_GOAL),
    )
    rows = []
    for what, unit, name, scale, goal in figures:
        both = [(scale * getattr(a, name), scale * getattr(b, name)) for a, b in pairs]
        apart = [max(a, b) / min(a, b) for a, b in both]
        simulated = median(b for _, b in both)
        rows.append(
            Row(
                name=f"{VARIANTS} variants in {SLOTS} slots, served: {what}",
                value=median(a for a, _ in both),
                unit=unit,
                baseline=f"simulated {simulated:.4g} {unit}, the larger by the smaller",
                ratio=median(apart),
                low=min(apart),
                high=max(apart),
                goal=goal,
            )
        )
    return rows
