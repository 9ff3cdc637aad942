"""The multi-variant linear against `F.linear` on the base alone: CPU time of one thread.

Rows are named [out]x[in] dtype M=tokens V=variants. Weights rotate over copies that together
exceed the caches, as the layers of a model do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit.bench.rows import Row, compare
from soupkit_kernels import delta_linear, pack

ROTATED_BYTES = 60_000_000
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SHAPES = ((576, 576), (1536, 576), (2048, 2048))
# Goals of one variant by tokens, and of four mixed; for bfloat16 on machines with its instructions.
ONE_GOAL = {1: 1.15, 4: 1.15, 8: 1.35, 512: 1.10}
MIXED_GOAL = {4: 1.6, 8: 1.6}


def run(*, quick: bool) -> list[Row]:
    """Rows for each shape, dtype and number of tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = []
        for (out, width), dtype in itertools.product(SHAPES[1:2] if quick else SHAPES, SHORT):
            for tokens in (1, 8, 512) if quick else (1, 4, 8, 64, 512):
                rows.append(_row(out, width, dtype, tokens, variants=1, quick=quick))
            for tokens in (8,) if quick else (4, 8, 64, 512):
                rows.append(_row(out, width, dtype, tokens, variants=4, quick=quick))
        return rows
    finally:
        torch.set_num_threads(threads)


def _row(
    out: int, width: int, dtype: torch.dtype, tokens: int, *, variants: int, quick: bool
) -> Row:
    generator = torch.Generator().manual_seed(0)
    copies = max(2, ROTATED_BYTES // (out * width * dtype.itemsize))
    weights = [torch.randn(out, width, generator=generator).to(dtype) for _ in range(copies)]
    signs = [
        [pack(torch.randn(1, out, width, generator=generator)) for _ in range(variants)]
        for _ in range(copies)
    ]
    scales = [torch.full((1, out), 1e-3) for _ in range(variants)]
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    index = torch.arange(tokens) % variants
    candidates, baselines = _cycle(copies), _cycle(copies)

    def candidate() -> Tensor:
        i = next(candidates)
        return delta_linear(x, weights[i], signs[i], scales, index)

    goals = ONE_GOAL if variants == 1 else MIXED_GOAL
    return compare(
        f"{out}x{width} {SHORT[dtype]} M={tokens} V={variants}",
        candidate,
        lambda: F.linear(x, weights[next(baselines)]),
        against="F.linear",
        repeats=7 if quick else 25,
        goal=goals.get(tokens) if dtype == torch.bfloat16 else None,
    )


def _cycle(count: int) -> Iterator[int]:
    return itertools.cycle(range(count))
