"""The multi-variant linear against `F.linear` on the base alone: CPU time of one thread.

Rows are named [out]x[in] dtype M=tokens V=variants and the path: an instruction set or torch.
Weights rotate over copies that together exceed the caches, as the layers of a model do; the two
sides are half a turn apart, so that neither finds what the other has just read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit.bench.rows import Row, compare
from soupkit_kernels import delta_linear, path_name
from soupkit_kernels.bitpack import packed_width

ROTATED_BYTES = 160_000_000
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SHAPES = ((1536, 576), (2048, 2048), (4096, 4096))
# The goals are for layers of this many entries and more, on CPUs with bfloat16 instructions.
JUDGED_ENTRIES = 2048 * 2048
ONE_GOAL = {1: 1.15, 4: 1.15, 8: 1.35, 512: 1.10}
MIXED_GOAL = {4: 1.6, 8: 1.6}


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal layers in memory of their own, each with the signs of four variants."""

    name: str
    weights: list[Tensor]
    signs: list[list[Tensor]]
    scales: list[Tensor]
    is_judged: bool


def run(*, quick: bool) -> list[Row]:
    """Rows for each shape, dtype and number of tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for (out, width), dtype in itertools.product(SHAPES[:1] if quick else SHAPES, SHORT):
            layers = _layers(out, width, dtype)
            for tokens in (1, 8, 512) if quick else (1, 4, 8, 64, 512):
                rows.append(_row(layers, tokens, variants=1, quick=quick))
            for tokens in (8,) if quick else (4, 8, 64):
                rows.append(_row(layers, tokens, variants=4, quick=quick))
        return rows
    finally:
        torch.set_num_threads(threads)


def _layers(out: int, width: int, dtype: torch.dtype) -> Layers:
    generator = torch.Generator().manual_seed(0)
    copies = max(2, ROTATED_BYTES // (out * width * dtype.itemsize))
    weight = torch.randn(out, width, generator=generator).to(dtype)
    shape = (4, 1, out, packed_width(width))
    signs = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    best = path_name(torch.empty(1, 1, dtype=torch.bfloat16))
    return Layers(
        name=f"{out}x{width} {SHORT[dtype]}",
        weights=[weight.clone() for _ in range(copies)],
        signs=[list(signs.clone()) for _ in range(copies)],
        scales=[torch.full((1, out), 1e-3)] * 4,
        is_judged=best == "native avx512_bf16" and out * width >= JUDGED_ENTRIES,
    )


def _row(layers: Layers, tokens: int, *, variants: int, quick: bool) -> Row:
    weights, signs = layers.weights, [some[:variants] for some in layers.signs]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, weights[0].shape[1], generator=generator).to(weights[0].dtype)
    index = torch.arange(tokens) % variants
    candidates, baselines = _cycle(len(weights), len(weights) // 2), _cycle(len(weights), 0)

    def candidate() -> Tensor:
        i = next(candidates)
        return delta_linear(x, weights[i], signs[i], layers.scales[:variants], index)

    goals = ONE_GOAL if variants == 1 else MIXED_GOAL
    path = path_name(weights[0]).removeprefix("native ").partition(":")[0]
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
