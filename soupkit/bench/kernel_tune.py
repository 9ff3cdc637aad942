"""Tile shapes tried on the GPU at hand, told as the table of soupkit_kernels/configs.py.

For each (tokens of a group, terms, bytes of an element) a batch that fills such a group is timed as
in kernel_gpu.py, in two layers of Llama 8B; the score is the geometric mean of its ratios to the
present shape. A candidate must give the present one's result. The order is breadth first: when
the time is over, each entry has been given as many candidates as any other, those that keep the
present shape or change least of it first. An entry changes only for a gain of 2 % and more.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soupkit.bench import kernel_gpu
from soupkit.bench.findings import Finding, failure
from soupkit.bench.kernel_gpu import SLOTS, Gpu, Layers, copies_of, make_layers
from soupkit.bench.workers import num_workers, run_parallel
from soupkit_kernels import configs
from soupkit_kernels.configs import Config
from soupkit_kernels.op import delta_linear
from soupkit_kernels.plan import Plan, groups_of

Key = tuple[int, int, int]

SHAPES = ((4096, 4096), (28672, 4096))
COMMAND = "soupkit bench kernel --check"
# What a program may hold: registers of a thread for sums (of 255), bytes of shared memory.
SUM_REGISTERS = 200
SHARED_BYTES = 227 << 10
LEAST_GAIN = 0.98
REPEATS = 7
AHEAD_SECONDS = 45.0


@dataclass(slots=True)
class Tuner:
    """A tuning pass. best: the table so far; gains: time of an entry over that of the old one."""

    on: Gpu
    dtype: torch.dtype = torch.bfloat16
    best: dict[Key, Config] = field(default_factory=dict)
    gains: dict[Key, float] = field(default_factory=dict)
    tried: int = 0

    def run(self) -> Iterator[Finding]:
        """A finding of each candidate, and of each entry that no batch comes to."""
        self.best = present_of(self.on.device)
        trials = trials_of(self.on, self.dtype, is_timed=True)
        for key in self.best:
            if key[2] == self.dtype.itemsize and key not in trials:
                yield Finding(_name(key), "info", "not tuned: no batch of this kind")
        # What does not compile is told when it is tried.
        ahead = run_parallel(compile_share, workers=num_workers(), seconds=AHEAD_SECONDS)
        count = sum(finding.status == "info" for finding in ahead)
        yield Finding("compiled ahead", "info", f"{count} candidates, {AHEAD_SECONDS:g} s at most")
        for key, chosen in breadth_first(trials):
            yield self._try(trials[key], chosen)

    def text(self, versions: str, day: str) -> str:
        """The table that this GPU reads first, as Python, ready to be put into configs.py."""
        name, table = table_of(self.on.device)
        lines = [
            f"# Tuned on {self.on.name}, {versions}, {day}, {self.tried} candidates:",
            f"# {COMMAND}",
            "# By (block_m, terms, bytes of an element).",
            f"{name} = {{",
        ]
        for key, one in self.best.items():
            # Of other chips only what differs.
            if table is not configs._TABLE and one == configs._TABLE[key]:
                continue
            gain = f"  # {self.gains[key]:.2f} of before" if key in self.gains else ""
            lines.append(f"    {key}: Config{_values(one)},{gain}")
        return "\n".join([*lines, "}"]) + "\n"

    def _try(self, trial: Trial, chosen: Config) -> Finding:
        """Time a candidate, and keep it if it is the best so far."""
        key, name = trial.key, f"{_name(trial.key)} {_values(chosen)}"
        self.tried += 1
        try:
            with using(self.on.device, key, chosen):
                ratio = trial.ratio()
        except Exception as error:  # noqa: BLE001  # it may not compile, or not fit: no candidate
            if "CUDA error" in str(error):
                return failure(name, error)
            return Finding(name, "info", f"{type(error).__name__}: {str(error)[:100]}")
        if math.isnan(ratio):
            return Finding(name, "FAILED", "gives another result than the present shape")
        if ratio <= min(LEAST_GAIN, self.gains.get(key, 1.0)):
            self.best[key], self.gains[key] = chosen, ratio
        return Finding(name, "info", f"{ratio:.3f} of {_values(trial.present)}")


class Trial:
    """One kind of batch in all layers, and its results and times with the present shape."""

    def __init__(
        self, key: Key, tokens: int, variants: int, layers: Sequence[Layers], *, is_timed: bool
    ) -> None:
        weight = layers[0].weights[0]
        index = torch.arange(tokens, device=weight.device) % variants
        groups = groups_of(index, num_variants=variants, planes=1)
        self.key, self.present = key, present_of(weight.device)[key]
        self._layers, self._step = layers, Plan(index.int(), None, SLOTS, 1, groups, ())
        self._inputs = [
            torch.randn(tokens, one.weights[0].shape[1], device=weight.device).to(weight.dtype)
            for one in layers
        ]
        self._wants = [self.call(i) for i in range(len(layers))] if is_timed else []
        self._baselines = [self._capture(i) for i in range(len(layers))] if is_timed else []

    def ratio(self) -> float:
        """Geometric mean of times now over those of the present shape; NaN: another result."""
        logs = []
        for i, want in enumerate(self._wants):
            got, wide = self.call(i).float(), want.float()
            if not float((got - wide).norm()) <= 0.01 * float(wide.norm()):
                return math.nan
            replay, baseline = self._capture(i), self._baselines[i]
            pairs = [(baseline(), replay()) for _ in range(REPEATS)]
            logs.append(math.log(statistics.median(mine / max(was, 1e-9) for was, mine in pairs)))
        return math.exp(statistics.mean(logs))

    def call(self, i: int, turn: int = 0) -> Tensor:
        """The i-th shape's layers in turn."""
        layers = self._layers[i]
        at = turn % len(layers.weights)
        return delta_linear(self._inputs[i], layers.weights[at], layers.arenas[at], self._step)

    def _capture(self, i: int) -> Callable[[], float]:
        copies = len(self._layers[i].weights)
        count = copies * -(-kernel_gpu.CALLS // copies)
        return kernel_gpu.capture(lambda turn: self.call(i, turn), count)


def trials_of(on: Gpu, dtype: torch.dtype, *, is_timed: bool) -> dict[Key, Trial]:
    """A trial of each entry of the table that a batch of this dtype can come to."""
    layers = [
        make_layers(*shape, dtype, on.device, copies_of(*shape, dtype, on) if is_timed else 1)
        for shape in SHAPES
    ]
    batches = {key: batch_of(key) for key in configs._TABLE if key[2] == dtype.itemsize}
    return {
        key: Trial(key, *batch, layers, is_timed=is_timed)
        for key, batch in batches.items()
        if batch is not None
    }


def breadth_first(trials: Mapping[Key, Trial]) -> Iterator[tuple[Key, Config]]:
    """Each entry's next candidate in turn."""
    queues = {key: list(candidates(key, trial.present)) for key, trial in trials.items()}
    for turn in range(max(map(len, queues.values()), default=0)):
        yield from ((key, queue[turn]) for key, queue in queues.items() if turn < len(queue))


def compile_share(
    first: int, step: int, *, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Finding]:
    """Launch every step-th candidate from `first` on, so that Triton's cache on disk has it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on = Gpu("", device, l2_bytes=0, memory_bytes=0, bandwidth=1.0, is_hopper=False)
    trials = trials_of(on, dtype, is_timed=False)
    for key, chosen in itertools.islice(breadth_first(trials), first, None, step):
        with using(device, key, chosen), suppress(Exception):
            for i in range(len(SHAPES)):
                trials[key].call(i)
            yield Finding(f"{_name(key)} {_values(chosen)}", "info", "compiled")


def candidates(key: Key, present: Config) -> Iterator[Config]:
    """Shapes that fit a Hopper SM, the nearest to the present one first, and without it.

    How often K is split (`per_sm`) comes before the rest: nothing is compiled for it.
    """
    block_m, terms, size = key
    near = []
    for block_n, block_k, warps, stages, per_sm in itertools.product(
        (64, 128, 256), (128, 256), (4, 8), (2, 3, 4, 5, 6), (1, 2, 3, 4)
    ):
        sums = block_n * block_m * (1 + terms) / (32 * warps)
        weights = block_n * block_k
        step = size * (weights + block_m * block_k) + terms * weights // 8
        # A warp group multiplies 64 rows at a time.
        is_possible = block_n >= 16 * warps and sums <= SUM_REGISTERS
        one = Config(block_n, block_k, warps, stages, per_sm)
        if not is_possible or (stages - 1) * step > SHARED_BYTES or one == present:
            continue
        distance = (
            abs(math.log2(block_n / present.block_n))
            + abs(math.log2(block_k / present.block_k))
            + abs(math.log2(warps / present.num_warps))
            + abs(stages - present.num_stages) / 2
            + abs(per_sm - present.per_sm) / 5
        )
        near.append((distance, block_n, block_k, warps, stages, per_sm))
    for _, *values in sorted(near):
        yield Config(*values)


def batch_of(key: Key) -> tuple[int, int] | None:
    """Tokens and variants of a batch whose groups are of this kind; None if there is none."""
    block_m, terms, _ = key
    for tokens in (block_m, 2 * block_m):
        for variants in range(1, min(tokens, SLOTS) + 1):
            if configs.shape(tokens, variants, 1) == (block_m, terms):
                return tokens, variants
    return None


def table_of(device: torch.device) -> tuple[str, dict[Key, Config]]:
    """Name and entries of the table of configs.py that this device reads first."""
    from soupkit_kernels.gpu import chip  # needs triton

    name = "_TABLE" if chip(device)[1] == configs._HOPPER else "_NOT_HOPPER"
    return name, getattr(configs, name)


def present_of(device: torch.device) -> dict[Key, Config]:
    """The shape that a launch on this device takes, for each kind of group."""
    return {**configs._TABLE, **table_of(device)[1]}


@contextmanager
def using(device: torch.device, key: Key, chosen: Config) -> Iterator[None]:
    """Launches of this kind on this device take this shape."""
    _, table = table_of(device)
    was = table.get(key)
    table[key] = chosen
    try:
        yield
    finally:
        if was is None:
            del table[key]
        else:
            table[key] = was


def _name(key: Key) -> str:
    return f"M={key[0]} terms={key[1]}"


def _values(one: Config) -> str:
    per_sm = f", {one.per_sm}" if one.per_sm != 2 else ""
    return f"({one.block_n}, {one.block_k}, {one.num_warps}, {one.num_stages}{per_sm})"
