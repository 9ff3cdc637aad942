"""The multi-variant linear against `F.linear` on the base alone.

With CUDA on the GPU (kernel_gpu.py); else CPU time of one thread, here. Rows are named [out]x[in]
dtype M=tokens V=variants and the path: an instruction set, torch or triton. Weights rotate over
copies that together exceed the caches, as the layers of a model do; the two sides are half a turn
apart, so that neither finds what the other has just read. A step's plan is made once for all of its
layers, so it is not in the timed call.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit.bench import kernel_gpu, kernel_static, roofline
from soupkit.bench.kernel_results import is_interpreted
from soupkit.bench.rows import Row, compare
from soupkit_kernels.arena import DeltaArena, arena_of
from soupkit_kernels.bitpack import packed_width
from soupkit_kernels.delta import Delta
from soupkit_kernels.op import delta_linear, path_name
from soupkit_kernels.plan import plan_of

ROTATED_BYTES = 160_000_000
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SHAPES = ((1536, 576), (2048, 2048), (4096, 4096))
# The goals are for layers of this many entries and more, on CPUs with bfloat16 instructions.
JUDGED_ENTRIES = 2048 * 2048
ONE_GOAL = {1: 1.15, 4: 1.15, 8: 1.35, 512: 1.10}
MIXED_GOAL = {4: 1.6, 8: 1.6}
SLOTS = 4


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal layers in memory of their own, each with four variants of one plane."""

    name: str
    weights: list[Tensor]
    arenas: list[DeltaArena]
    is_judged: bool


def run(*, quick: bool) -> list[Row]:
    """Rows for each shape, dtype and number of tokens."""
    if torch.cuda.is_available():
        return list(kernel_gpu.measure(kernel_gpu.gpu(), quick=quick))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for (out, width), dtype in itertools.product(SHAPES[:1] if quick else SHAPES, SHORT):
            layers = _layers(out, width, dtype)
            for tokens in (1, 8, 512) if quick else (1, 4, 8, 64, 512):
                rows.append(_row(layers, tokens, variants=1, quick=quick))
            for tokens in (8,) if quick else (4, 8, 64):
                rows.append(_row(layers, tokens, variants=SLOTS, quick=quick))
        return rows
    finally:
        torch.set_num_threads(threads)


def model(*, quick: bool) -> list[Row]:
    """Without a GPU: what it must take on an H100 and an H200, from bytes and from compiled code.

    The code is compiled only in the long form, and only where triton is, to compile and not to
    interpret.
    """
    if torch.cuda.is_available():
        return []
    rows = roofline.rows()
    if quick:
        return rows[: len(roofline.BANDWIDTH) * len(roofline.VARIANTS)]
    if importlib.util.find_spec("triton") is None or is_interpreted():
        return rows
    return rows + kernel_static.rows(map(kernel_static.measure, kernel_static.cases()))


def _layers(out: int, width: int, dtype: torch.dtype) -> Layers:
    generator = torch.Generator().manual_seed(0)
    copies = max(2, ROTATED_BYTES // (out * width * dtype.itemsize))
    weight = torch.randn(out, width, generator=generator).to(dtype)
    shape = (SLOTS, 1, out, packed_width(width))
    signs = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.full((1, out), 1e-3)
    deltas = [Delta(out, width, packed=packed, scale=scale) for packed in signs]
    best = path_name(arena_of(deltas, dtype=torch.bfloat16))
    return Layers(
        name=f"{out}x{width} {SHORT[dtype]}",
        weights=[weight.clone() for _ in range(copies)],
        arenas=[arena_of(deltas, dtype=dtype) for _ in range(copies)],
        is_judged=best == "native avx512_bf16" and out * width >= JUDGED_ENTRIES,
    )


def _row(layers: Layers, tokens: int, *, variants: int, quick: bool) -> Row:
    weights, arenas = layers.weights, layers.arenas
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, weights[0].shape[1], generator=generator).to(weights[0].dtype)
    step = plan_of(torch.arange(tokens) % variants, slots=SLOTS)
    candidates, baselines = _cycle(len(weights), len(weights) // 2), _cycle(len(weights), 0)

    def candidate() -> Tensor:
        i = next(candidates)
        return delta_linear(x, weights[i], arenas[i], step)

    goals = ONE_GOAL if variants == 1 else MIXED_GOAL
    path = path_name(arenas[0], weights[0]).removeprefix("native ").partition(":")[0]
    return compare(
        f"{layers.name} M={tokens} V={variants} {path}",
        candidate,
        lambda: F.linear(x, weights[next(baselines)]),
        against="F.linear",
        repeats=7 if quick or tokens >= 512 else 25,
        goal=goals.get(tokens) if layers.is_judged else None,
    )


def _cycle(count: int, start: int) -> Iterator[int]:
    return (i % count for i in itertools.count(start))
