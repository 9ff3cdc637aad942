"""The simulator beside the server: the same requests, in the same order and at the same times.

One engine of this process serves a family with slots for a third of its variants; reading one takes
LOAD_SECONDS more than it does, as from a disk of that speed. What a prompt and a step take is
measured first, alone; the simulator gets these, the trace and the room, and nothing of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from soupkit.bench.fleet_cost import Measured
from soupkit.bench.fleet_sim import Arrival, Outcome, Room, simulate
from soupkit.bench.rows import Row
from soupkit.bench.streams import PROMPT_TOKENS, Stream, ask, ask_all
from soupkit.bundle import LoadedVariant, VariantRef, open_family
from soupkit.family import open_base
from soupkit.serving.catalog import Catalog
from soupkit.serving.engine import bank_of
from soupkit.serving.pretrained import load_model
from soupkit.serving.server import build_service
from soupkit.serving.service import Service
from soupkit.serving.slots import slot_shape

LOAD_SECONDS = 0.25
MAX_RUNNING, MAX_QUEUE = 8, 512
RATE = 8.0  # requests a second
TOKENS = 12
SEED = 1


def check(family: Path, *, quick: bool) -> list[Row]:
    """Rows of the server's run over the simulated one.

    Raises:
        ValueError: fewer than three variants.
    """
    return asyncio.run(_check(family, count=60 if quick else 400))


async def _check(family: Path, *, count: int) -> list[Row]:
    # Two servers: what is asked to measure costs is no part of the trace.
    async with _serving(family) as service:
        costs = await _costs(service, sorted(service.residents()))
    async with _serving(family) as service:
        trace = _trace(sorted(service.residents()), count)
        real = await _play(service, trace)
        cache, limits = service.router.cache, service.router.limits
        # What the disk takes is slept here, by each reader for itself.
        room = Room(cache.num_slots, cache.slot_bytes, cache.slot_bytes, disks=limits.max_loads)
    return _rows(real, simulate(trace, replicas=1, costs=costs, room=room, limits=limits))


@asynccontextmanager
async def _serving(family: Path) -> AsyncIterator[Service]:
    """A server whose slots take a third of the variants, none loaded, with a slow disk."""
    manifests = Catalog(family).manifests()
    if len(manifests) < 3:
        raise ValueError(f"{family} has {len(manifests)} variants: the check needs at least 3")
    base = load_model(open_base(open_family(family)).path, device="cpu", dtype=torch.float32)
    slot_bytes = slot_shape(bank_of(base), manifests.values()).nbytes
    del base
    service = build_service(
        family,
        device="cpu",
        cache_bytes=max(2, len(manifests) // 3) * slot_bytes,
        max_running=MAX_RUNNING,
        max_queue=MAX_QUEUE,
    )
    load = service.catalog.load

    def slowly(ref: VariantRef) -> LoadedVariant:
        found = load(ref)
        time.sleep(LOAD_SECONDS)
        return found

    catalog: Any = service.catalog
    catalog.load = slowly
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def _costs(service: Service, names: Sequence[str]) -> Measured:
    """What the engine takes for variants, alone; the slots are as full as they will be."""
    slots = service.router.cache.num_slots
    for salt, name in enumerate(names[:slots]):
        await ask(service, name, tokens=TOKENS, salt=salt)
    held = list(names[:slots])
    alone: list[Stream] = []
    together: list[Stream] = []
    for salt in range(100, 140, 4):
        # An engine that has rested takes longer to begin, as most requests of the trace find it.
        await asyncio.sleep(1 / RATE)
        alone.append(await ask(service, held[0], tokens=TOKENS, salt=salt))
        several = [held[i % len(held)] for i in range(4)]
        together += await ask_all(service, several, tokens=TOKENS, salt=1000 + salt)
    one = median(gap for stream in alone for gap in stream.gaps)
    four = median(gap for stream in together for gap in stream.gaps)
    slope = max(0.0, (four - one) / 3)
    loads = [service.router.cache.costs(service.catalog.variants[name].digest) for name in held]
    return Measured(
        load_seconds=median(cost.load_seconds for cost in loads),
        install_seconds=median(cost.install_seconds for cost in loads),
        prompt_seconds=median(stream.first for stream in alone),
        step_seconds=max(0.0, one - slope),
        sequence_seconds=slope,
    )


def _trace(names: Sequence[str], count: int) -> list[Arrival]:
    rng = np.random.default_rng(SEED)
    shares = 1.0 / np.arange(1, len(names) + 1)
    times = np.cumsum(rng.exponential(1 / RATE, size=count))
    order = rng.choice(len(names), size=count, p=shares / shares.sum())
    models = [names[int(i)] for i in order]
    pairs = zip(times.tolist(), models, strict=True)
    return [Arrival(at, model, PROMPT_TOKENS, TOKENS) for at, model in pairs]


async def _play(service: Service, trace: Sequence[Arrival]) -> Outcome:
    """The trace on the server, in real time."""
    before = service.residents()
    began = time.perf_counter()

    async def one(number: int, arrival: Arrival) -> Stream:
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        return await ask(service, arrival.model, tokens=arrival.tokens, salt=5000 + number)

    streams = await asyncio.gather(*(one(i, arrival) for i, arrival in enumerate(trace)))
    after, found = service.residents(), Outcome()
    found.first = [stream.first for stream in streams]
    found.whole = [stream.times[-1] - stream.asked for stream in streams]
    found.hits = sum(after[name].hits - before[name].hits for name in after)
    found.misses = sum(after[name].misses - before[name].misses for name in after)
    found.loads = sum(after[name].loads - before[name].loads for name in after)
    return found


def _rows(real: Outcome, said: Outcome) -> list[Row]:
    def row(what: str, value: float, unit: str, simulated: float) -> Row:
        ratio = value / simulated
        told = f"simulated, {simulated:.3g} {unit}"
        return Row(f"server: {what}", value, unit, told, ratio, ratio, ratio)

    first = [(np.percentile(one.first, [50, 99]) * 1e3).tolist() for one in (real, said)]
    mean = [float(np.mean(one.first)) * 1e3 for one in (real, said)]
    return [
        row("requests whose variant was resident", 100 * real.hit_rate, "%", 100 * said.hit_rate),
        row("loads", real.loads, "loads", said.loads),
        row("first token, mean", mean[0], "ms", mean[1]),
        row("first token, P50", first[0][0], "ms", first[1][0]),
        row("first token, P99", first[0][1], "ms", first[1][1]),
    ]
