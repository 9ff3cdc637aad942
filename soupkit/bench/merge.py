"""svd_mean of two deltas at rank 64 against full SVDs: CPU time of one thread, and energy kept.

The deltas have a decaying spectrum (what fine-tuning gives) or a flat one (the worst case).
"""

from __future__ import annotations

import torch
from torch import Tensor

from soupkit.bench.rows import Row, compare
from soupkit.merge import MergeRule, merge_deltas

RANK = 64
SHAPES = ((576, 576), (576, 1536), (2048, 2048))


def run(*, quick: bool) -> list[Row]:
    """Rows for each shape and spectrum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            row
            for shape in (SHAPES[:2] if quick else SHAPES)
            for spectrum in ("decaying", "flat")
            for row in _rows(shape, spectrum, quick=quick)
        ]
    finally:
        torch.set_num_threads(threads)


def _deltas(shape: tuple[int, int], spectrum: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(shape, generator=generator) for _ in range(2)]
    if spectrum == "flat":
        return noise
    short = min(shape)
    powers = torch.arange(1, short + 1).pow(-0.7)
    left = torch.randn(shape[0], short, generator=generator)
    right = torch.randn(short, shape[1], generator=generator)
    return [(left * powers) @ right + 0.1 * one for one in noise]


def _full(deltas: list[Tensor]) -> list[Tensor]:
    """Singular values of both deltas, after the merge that LAPACK's full SVD gives."""
    values = []
    merged = torch.zeros_like(deltas[0])
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        merged += 0.5 * (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
        values.append(s)
    return values


def _rows(shape: tuple[int, int], spectrum: str, *, quick: bool) -> list[Row]:
    deltas = _deltas(shape, spectrum)
    rule = MergeRule("svd_mean", rank=RANK)
    name = f"{shape[0]}x{shape[1]} {spectrum}"
    timed = compare(
        name,
        lambda: merge_deltas("w", deltas, rule),
        lambda: _full(deltas),
        against="full SVD",
        repeats=2 if quick else 5,
    )
    kept = merge_deltas("w", deltas, rule)[1].kept_energy
    squares = [values.double().square() for values in _full(deltas)]
    best = sum(float(s[:RANK].sum()) for s in squares) / sum(float(s.sum()) for s in squares)
    ratio = kept / best
    energy = Row(f"{name}, energy", kept, "", "best", ratio, ratio, ratio, 0.9999, "higher")
    return [timed, energy]
