"""Nodes of 8 GPUs that serve variants of a 70B model, simulated: first tokens, hits, GPU-hours.

A model, not a measurement: the router, cache and choice of replica that serve, by a virtual clock
(fleet_sim.py) and least times (fleet_costs.py), on nodes laid out as `soupkit plan` advises. How
near that comes to a server is what `soupkit bench fleet FAMILY` measures (fleet_check.py).

Requests come at random at a steady mean rate, their variants by Zipf's law. Everything is cold when
a trace begins; figures are of its last two thirds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from soupkit.bench.cache_traces import zipf
from soupkit.bench.fleet_costs import Roofline
from soupkit.bench.fleet_sim import Ask, Clock, Fleet, Line, SimReplica, Sizes
from soupkit.bench.rows import Better, Row
from soupkit.headroom import BATCH_TOKENS, MAX_RUNNING
from soupkit.node import GpuPlan, Layout, Wish, advised, layouts, plan_gpu
from soupkit.node_times import Speeds
from soupkit.placement import ModelShape, shape_for
from soupkit.serving.states import Limits

GPUS = 8
PARAMETERS = 70e9
PROMPT, ANSWER, CONTEXT = 512, 128, 1024
REQUESTS = 64  # at a time, that a node's key-value cache has room for
RATE = 2.0  # requests a second and node
HOST_BYTES = 10**12  # of a node, for variants
MAX_QUEUE = 512
WARM = 1 / 3  # of a trace, not counted
_AT_ONCE = 1e30  # bytes a second


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU by its data sheet."""

    name: str
    gpu_bytes: int
    speeds: Speeds


H100 = Chip("H100", 80 * 10**9, Speeds())
H200 = Chip("H200", 141 * 10**9, Speeds(hbm=4.8e12))


@dataclass(frozen=True, slots=True)
class Case:
    """Nodes, variants of the family, seconds of the trace."""

    chip: Chip
    nodes: int
    variants: int
    seconds: float

    @property
    def title(self) -> str:
        """For people."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{nodes} of {GPUS} {self.chip.name}, {self.variants:,} variants"


QUICK = (Case(H100, 1, 14, 60.0), Case(H100, 2, 100, 60.0))
CASES = (
    Case(H100, 1, 14, 600.0),
    Case(H100, 1, 100, 600.0),
    Case(H100, 8, 1000, 600.0),
    Case(H200, 8, 1000, 600.0),
    Case(H100, 64, 10_000, 300.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one trace: share that found its variant resident, seconds to first tokens, refusals."""

    resident: float
    mean: float
    p50: float
    p99: float
    refused: float


def run(*, quick: bool, progress: Callable[[str, int, int], None]) -> list[Row]:
    """Five rows a case; the spread is over seeds of the trace.

    Args:
        progress: called with (case, requests done, requests of all cases).
    """
    rows: list[Row] = []
    cases = {
        case: range(1 if quick or case.nodes > 8 else 3) for case in (QUICK if quick else CASES)
    }
    sizes = [len(seeds) * round(case.nodes * RATE * case.seconds) for case, seeds in cases.items()]
    for i, (case, seeds) in enumerate(cases.items()):
        progress(case.title, sum(sizes[:i]), sum(sizes))
        rows += _rows(case, [simulate(case, seed=seed) for seed in seeds], seeds)
    return rows


def layout_of(case: Case) -> tuple[ModelShape, GpuPlan]:
    """The model, and what `soupkit plan` advises for a node.

    Raises:
        ValueError: the base fits on no such node.
    """
    shape = shape_for(PARAMETERS)
    wish = Wish(variants=case.variants, context=CONTEXT, requests=REQUESTS)
    plans = [plan_gpu(shape, one, wish, gpu_bytes=case.chip.gpu_bytes) for one in layouts(GPUS)]
    # Stages of a pipeline make no first token shorter.
    best = advised([plan for plan in plans if plan.layout.pipeline == 1])
    if best is None:
        raise ValueError(f"{shape.name} fits on no node of {GPUS} {case.chip.name}")
    return shape, best


def dedicated_gpus(case: Case) -> int:
    """GPUs of the smallest engine that has one variant, merged, for itself."""
    shape = shape_for(PARAMETERS)
    alone = Wish(variants=0, context=CONTEXT, requests=1)
    return next(
        ranks
        for ranks in range(1, GPUS + 1)
        if plan_gpu(shape, Layout(1, ranks, 1), alone, gpu_bytes=case.chip.gpu_bytes).fits
    )


def trace(case: Case, *, seed: int) -> list[Ask]:
    """Its requests, the same for the same seed."""
    rng = np.random.default_rng(seed)
    count = round(case.nodes * RATE * case.seconds)
    order = zipf(rng, count, case.variants).tolist()
    times = np.sort(rng.uniform(0.0, case.seconds, count)).tolist()
    return [
        Ask(f"variant-{variant}", at, PROMPT, ANSWER)
        for variant, at in zip(order, times, strict=True)
    ]


def simulate(case: Case, *, seed: int, with_loads: bool = True) -> Outcome:
    """One trace through the fleet of a case."""
    shape, plan = layout_of(case)
    speeds = case.chip.speeds
    if not with_loads:
        speeds = replace(speeds, disk=_AT_ONCE, link=_AT_ONCE)
    costs = Roofline(shape, plan, speeds, PROMPT + ANSWER // 2)
    sizes = Sizes(
        slots=plan.slots,
        slot_bytes=plan.slot_bytes,
        host_bytes=HOST_BYTES // plan.layout.replicas,
        batch_tokens=BATCH_TOKENS["cuda"],
        file_bytes=costs.file_bytes,
    )
    limits = Limits(max_running=MAX_RUNNING["cuda"], max_queue=MAX_QUEUE)
    clock, replicas = Clock(), list[SimReplica]()
    for _ in range(case.nodes):
        disk = Line()
        for _ in range(plan.layout.replicas):
            replicas.append(SimReplica(clock, costs, sizes, limits=limits, disk=disk))
    for replica in replicas:
        replica.begin([f"variant-{i}" for i in range(case.variants)])
    asks = trace(case, seed=seed)
    Fleet(clock, replicas).ask(asks)
    return outcome([ask for ask in asks if ask.at >= WARM * case.seconds])


def outcome(asks: Sequence[Ask]) -> Outcome:
    """What became of requests."""
    first = [ask.first - ask.at for ask in asks if not ask.refused]
    return Outcome(
        resident=sum(ask.was_resident for ask in asks) / len(asks),
        mean=float(np.mean(first)),
        p50=float(np.percentile(first, 50)),
        p99=float(np.percentile(first, 99)),
        refused=sum(bool(ask.refused) for ask in asks) / len(asks),
    )


def _rows(case: Case, found: Sequence[Outcome], seeds: Sequence[int]) -> list[Row]:
    ideal = [simulate(case, seed=seed, with_loads=False) for seed in seeds]
    resident = [(100 * one.resident, 100.0) for one in found]
    refused = [(100 * one.refused, 100.0) for one in found]
    rows = [
        _row(case, "found resident", "%", "all requests", resident, better="higher"),
        _row(case, "refused", "%", "all requests", refused),
    ]
    for name in ("p50", "p99"):
        pairs = [
            (1e3 * getattr(one, name), 1e3 * getattr(other, name))
            for one, other in zip(found, ideal, strict=True)
        ]
        rows.append(_row(case, f"first token {name.upper()}", "ms", "loads take no time", pairs))
    ours, each = case.nodes * GPUS, dedicated_gpus(case)
    rows.append(
        _row(
            case,
            "GPU-hours an hour",
            "h",
            f"a deployment of {each} GPUs for each variant",
            [(float(ours), float(each * case.variants))],
        )
    )
    return rows


def _row(
    case: Case,
    what: str,
    unit: str,
    baseline: str,
    pairs: Sequence[tuple[float, float]],
    better: Better = "lower",
) -> Row:
    ratios = [value / other for value, other in pairs]
    return Row(
        name=f"{case.title}: {what}",
        value=median(value for value, _ in pairs),
        unit=unit,
        baseline=baseline,
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        better=better,
    )
