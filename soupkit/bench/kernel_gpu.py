"""The fused linear on a GPU: time in CUDA graphs, against cuBLAS on the base and against memory.

    least time = bytes / bandwidth        bytes: roofline.py; each is moved once

A graph holds many calls on layers in turn, which together are at least four times the L2 cache: no
call finds its weight there, as in a model, and launches cost what they cost in a served step. The
graphs of the two sides are replayed in turn, events take the time, and the bandwidth is that of a
large copy in the same run. The goals are for Hopper and bfloat16; a batch of up to 64 tokens counts
as decoding. No operand is zero or constant: a GPU multiplies zeros faster.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit.bench import roofline
from soupkit.bench.rows import Row
from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.delta import Delta
from soupkit_kernels.lane import lane_words
from soupkit_kernels.op import delta_linear, path_name
from soupkit_kernels.plan import plan_of

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Attention output, qkv, gate and up, down: of Llama 3 8B, then 70B.
SHAPES_8B = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
SHAPES_70B = ((8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
VARIANTS = (0, 1, 2, 4, 8, 16)
QUICK_SHAPES = ((4096, 4096), (28672, 4096))
QUICK_TOKENS = (1, 8, 16, 64, 256, 1024, 4096)
QUICK_VARIANTS = (0, 1, 4, 16)

SLOTS = max(VARIANTS)
CACHES = 4
# Calls of a graph, so that its launch is little beside them.
CALLS = 40
REPEATS = 15
DECODE_TOKENS = 64
SLACK = 1.15
# Tokens of one variant from which a limit holds.
PREFILL_GOALS = ((4096, 1.10), (1024, 1.40), (0, 2.0))
# Bytes per second that NVIDIA's datasheets name, by what is in the device's name; first match.
DATASHEETS = (("H200", 4.8e12), ("H100 NVL", 3.9e12), ("H100 PCIe", 2.0e12), ("H100", 3.35e12))
COPIED_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is measured on. bandwidth: bytes read and written per second by a large copy."""

    name: str
    device: torch.device
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    is_hopper: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal layers in memory of their own, each with SLOTS variants of one plane."""

    name: str
    weights: list[Tensor]
    arenas: list[DeltaArena]


def gpu() -> Gpu:
    """The current CUDA device, with its bandwidth measured."""
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    source = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    replay = capture(lambda _: target.copy_(source), 4)
    seconds = statistics.median(replay() for _ in range(REPEATS))
    return Gpu(
        name=facts.name,
        device=device,
        l2_bytes=facts.L2_cache_size,
        memory_bytes=facts.total_memory,
        bandwidth=2 * COPIED_BYTES / seconds,
        is_hopper=facts.major == 9,
    )


def measure(on: Gpu, *, quick: bool) -> Iterator[Row]:
    """Rows one by one. A shape whose layers take more than half of the memory is left out."""
    datasheet = next((speed for part, speed in DATASHEETS if part in on.name), None)
    if datasheet is not None:
        ratio = on.bandwidth / datasheet
        against = f"datasheet {datasheet / 1e12:g} TB/s"
        yield Row("copy", on.bandwidth / 1e12, "TB/s", against, ratio, ratio, ratio, None, "higher")
    shapes: Sequence[tuple[tuple[int, int], torch.dtype]]
    if quick:
        shapes = [(shape, torch.bfloat16) for shape in QUICK_SHAPES]
    else:
        shapes = [
            *itertools.product((*SHAPES_8B, *SHAPES_70B), (torch.bfloat16,)),
            *itertools.product(SHAPES_8B, (torch.float16,)),
        ]
    for (out, width), dtype in shapes:
        copies = copies_of(out, width, dtype, on)
        if 2 * copies * layer_bytes(out, width, dtype) > on.memory_bytes:
            continue
        layers = make_layers(out, width, dtype, on.device, copies)
        for tokens in QUICK_TOKENS if quick else TOKENS:
            yield from _rows(on, layers, tokens, QUICK_VARIANTS if quick else VARIANTS)
        del layers


def capture(call: Callable[[int], object], count: int) -> Callable[[], float]:
    """A CUDA graph of call(0) to call(count - 1).

    Returns:
        a function that replays it and returns the GPU's seconds per call.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Compiles kernels and makes cuBLAS choose; both are forbidden in a capture.
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)

    def replay() -> float:
        start, end = events
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    ]

    # The first replay uploads the graph.
    replay()
    return replay


def goal(tokens: int, variants: int) -> float | None:
    """Limit of the ratio to F.linear: of decoding with any variants, of a prompt with one."""
    if tokens <= DECODE_TOKENS:
        return (1 + variants / 16) * SLACK
    if variants != 1:
        return None
    return next(limit for least, limit in PREFILL_GOALS if tokens >= least)


def _rows(on: Gpu, layers: Layers, tokens: int, some_variants: Sequence[int]) -> Iterator[Row]:
    """Each number of variants against the one graph of F.linear, and against the bandwidth."""
    weights, arenas = layers.weights, layers.arenas
    out, width = weights[0].shape
    x = torch.randn(tokens, width, device=on.device).to(weights[0].dtype)
    turns = 1 if tokens > DECODE_TOKENS else -(-CALLS // len(weights))
    count = turns * len(weights)
    baseline = capture(lambda i: F.linear(x, weights[i % len(weights)]), count)
    for variants in some_variants:
        if variants > tokens:
            continue
        index = torch.arange(tokens) % variants if variants else torch.full((tokens,), -1)
        step = plan_of(index, slots=SLOTS, device=on.device)

        def candidate(i: int, step=step) -> Tensor:  # type: ignore[no-untyped-def]
            return delta_linear(x, weights[i % len(weights)], arenas[i % len(weights)], step)

        replay = capture(candidate, count)
        pairs = [(baseline(), replay()) for _ in range(REPEATS)]
        name = f"{layers.name} M={tokens} V={variants} {path_name(arenas[0], weights[0])}"
        is_judged = on.is_hopper and x.dtype == torch.bfloat16
        yield _row(
            name, [mine for _, mine in pairs], [theirs for theirs, _ in pairs], "F.linear",
            goal(tokens, variants) if is_judged else None,
        )  # fmt: skip
        if tokens <= DECODE_TOKENS:
            moved = roofline.layer_bytes(out, width, variants=variants, tokens=tokens)
            yield _row(
                name, [mine for _, mine in pairs], [moved / on.bandwidth] * REPEATS,
                f"bytes at {on.bandwidth / 1e12:.2f} TB/s", None,
            )  # fmt: skip


def _row(
    name: str, times: list[float], against: list[float], baseline: str, limit: float | None
) -> Row:
    ratios = [mine / max(theirs, 1e-9) for mine, theirs in zip(times, against, strict=True)]
    return Row(
        name=name,
        value=statistics.median(times) * 1e6,
        unit="us",
        baseline=baseline,
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        goal=limit,
    )


def layer_bytes(out: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of a layer with its variants."""
    return out * width * dtype.itemsize + SLOTS * out * 4 * lane_words(width)


def copies_of(out: int, width: int, dtype: torch.dtype, on: Gpu) -> int:
    """Layers whose weights are CACHES times the L2 cache; two at least."""
    return max(2, -(-CACHES * on.l2_bytes // (out * width * dtype.itemsize)))


def make_layers(
    out: int, width: int, dtype: torch.dtype, device: torch.device, copies: int
) -> Layers:
    """Equal layers with random weights and signs."""
    generator = torch.Generator(device=device).manual_seed(0)
    weight = torch.randn(out, width, generator=generator, device=device).to(dtype)
    scale = torch.full((1, out), 1e-3, device=device)
    shape = (1, out, packed_width(width))
    deltas = [
        Delta(
            out, width,
            packed=torch.randint(
                0, 256, shape, generator=generator, device=device, dtype=torch.uint8
            ),
            scale=scale,
        )
        for _ in range(SLOTS)
    ]  # fmt: skip
    return Layers(
        name=f"{out}x{width} {SHORT[dtype]}",
        weights=[weight.clone() for _ in range(copies)],
        arenas=[arena_of(deltas, dtype=dtype, device=device) for _ in range(copies)],
    )
