"""`soupkit bench fleet`: nodes of 8 x H100 that serve up to 10,000 variants of a 70B model.

    requests    Poisson, 8 a second and node; Zipf over variants (1 / k for the k-th most popular);
                512 tokens of prompt, 128 of answer
    a node      one replica, TP 8, with the slots that `soupkit plan` finds; 1 TB of host memory for
                variants, four disks as one; speeds of node_times.py
    start       warm: as many requests again before those that count find a disk that takes no time

A simulation on a model of H100s, not a measurement. Of a fleet's GPUs the baseline is a deployment
for each variant: at least the GPUs that its base needs beside the keys and values of one request.
Given a family, the simulator is held against the server instead (fleet_check.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soupkit.bench.fleet_cost import roofline
from soupkit.bench.fleet_sim import Arrival, Outcome, Room, simulate
from soupkit.bench.rows import Row
from soupkit.node import GpuPlan, Wish, layouts, plan_gpu, variant_bytes
from soupkit.node_plan import plan_node
from soupkit.node_times import Speeds
from soupkit.placement import ModelShape, shape_for
from soupkit.serving.states import Limits

GPUS, GPU_BYTES, HOST_BYTES = 8, 80 * 10**9, 10**12
SPEEDS = Speeds(disk=4 * Speeds().disk)
RATE = 8.0  # requests a second and node
PROMPT, TOKENS = 512, 128
REQUESTS = 32  # at a time on a node
SEED = 0
# Nodes and variants; a second of requests that count, and one before.
QUICK = ((1, 14, 60.0), (2, 100, 30.0))
FULL = (
    (1, 14, 300.0),
    (1, 100, 300.0),
    (4, 100, 120.0),
    (4, 1000, 120.0),
    (16, 1000, 60.0),
    (16, 10000, 60.0),
    (64, 10000, 40.0),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet and what is asked of it."""

    nodes: int
    variants: int
    seconds: float

    @property
    def name(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes}, {self.variants:,} variants"


def run(family: Path | None = None, *, quick: bool) -> list[Row]:
    """Rows of each case; of a family, rows of the simulator beside the server."""
    if family is not None:
        from soupkit.bench.fleet_check import check

        return check(family, quick=quick)
    cases = [Case(*case) for case in (QUICK if quick else FULL)]
    return list(itertools.chain.from_iterable(map(_rows, cases)))


def arrivals(case: Case, *, seed: int = SEED) -> Iterator[Arrival]:
    """Requests of twice the case's seconds."""
    rng = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, case.variants + 1)
    count = round(2 * case.seconds * RATE * case.nodes)
    times = np.cumsum(rng.exponential(1 / (RATE * case.nodes), size=count))
    names = rng.choice(case.variants, size=count, p=shares / shares.sum())
    for at, name in zip(times.tolist(), names.tolist(), strict=True):
        yield Arrival(at, f"v{name}", PROMPT, TOKENS)


def plan_of(shape: ModelShape, variants: int) -> GpuPlan:
    """A GPU of the node, TP over all of its GPUs."""
    found = plan_node(
        shape,
        Wish(variants, requests=REQUESTS),
        gpus=GPUS,
        gpu_bytes=GPU_BYTES,
        speeds=SPEEDS,
        prompt=PROMPT,
        parameters=float(shape.parameters),
    )
    return next(plan for plan in found.plans if plan.layout.tensor == GPUS)


def gpus_alone(shape: ModelShape) -> int:
    """The fewest GPUs that one deployment of one variant's dense weights runs on."""
    alone = Wish(0, requests=1)
    for gpus in range(1, GPUS + 1):
        plans = [plan_gpu(shape, one, alone, gpu_bytes=GPU_BYTES) for one in layouts(gpus)]
        if any(plan.fits for plan in plans):
            return gpus
    raise ValueError(f"{shape.name} does not fit on {GPUS} GPUs of {GPU_BYTES} bytes")


def play(case: Case, shape: ModelShape, *, has_all: bool = False) -> Outcome:
    """Runs a case. has_all: with slots for every variant on every node, all there at the start."""
    plan = plan_of(shape, case.variants)
    slots = max(case.variants, plan.slots) if has_all else plan.slots
    costs = roofline(shape, plan, SPEEDS)
    found = simulate(
        arrivals(case),
        replicas=case.nodes,
        costs=costs,
        room=Room(
            slots=slots,
            slot_bytes=plan.slot_bytes,
            file_bytes=variant_bytes(shape, heads="sign"),
            host_bytes=HOST_BYTES,
        ),
        limits=Limits(max_running=REQUESTS, max_queue=512),
        warm_until=case.seconds,
    )
    return found


def _rows(case: Case) -> list[Row]:
    shape = shape_for(70e9)
    found, ideal = play(case, shape), play(case, shape, has_all=True)
    alone = case.variants * gpus_alone(shape)
    first, best = np.percentile(found.first, [50, 99]), np.percentile(ideal.first, [50, 99])

    def row(what: str, value: float, unit: str, baseline: str, against: float) -> Row:
        ratio = value / against
        return Row(f"{case.name}: {what}", value, unit, baseline, ratio, ratio, ratio)

    told = f"room for all on every node, {best[0] * 1e3:.0f} / {best[1] * 1e3:.0f} ms"
    return [
        row("requests whose variant was resident", 100 * found.hit_rate, "%", "all", 100.0),
        row("first token, P50", first[0] * 1e3, "ms", told, best[0] * 1e3),
        row("first token, P99", first[1] * 1e3, "ms", told, best[1] * 1e3),
        row("GPUs", case.nodes * GPUS, "GPUs", f"a deployment a variant, {alone}", alone),
    ]
