"""What each form of a delta would lose, measured in few passes and without making most of them.

    error(form) = ||delta - decoded||_F^2

Scales of signs are means, so that planes lose ||delta||^2 - sum over groups of size * scale^2
(algorithms 1.8, oracle 1): rows, columns, the matrix and a sparse delta's rows cost one pass. One
SVD of the largest rank tells every smaller one, and one pass over what those leave tells the signs
after them. Planes that are fitted together are dear (refit.py): they are fitted for some rows, and
lose of the others what they lose of those, relative to one plane. Not here: bytes, and which form
to take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soupkit.encoding import decode_rows, encode, encode_blocks, residual_energy
from soupkit.errors import MergeError
from soupkit.forms import Encoding
from soupkit.numeric import full_precision, squared_norm
from soupkit.signs import Read, row_blocks
from soupkit_kernels import Delta

# Each rank costs a pass over the delta and a product; twice the bytes a step is fine enough.
RANKS = (1, 2, 4, 8, 16, 32, 64)
# Entries of the largest delta whose low-rank forms are measured: the SVD holds it, at its peak with
# two copies (14336 x 4096: 712 MB, 10 CPU seconds).
LOW_RANK_ENTRIES = 1 << 26
_REFITS = ("row-x2-refit", "row-x3-refit", "row-x4-refit")
# Of the fitted rows: 3 planes of 57 rows of 576 take 15 ms (one thread of a 2-core AMD EPYC).
_SAMPLE_ENTRIES = 1 << 15
_SAMPLE_ROWS = 16


def measure(
    read: Read, shape: tuple[int, int], *, factor_dtype: torch.dtype
) -> tuple[float, dict[str, float]]:
    """What a delta's forms would lose.

    Args:
        read: rows of the delta, float32 and finite, on the CPU; every time the same.
        shape: [N, K] of the delta, neither 0.
        factor_dtype: of a low-rank part as it is stored.
    Returns:
        ||delta||^2, and the error by name of an Encoding, in float64. Those of "...-refit" are
        estimates; those with a low-rank part are as exact as the SVD. No low-rank forms of a
        delta over LOW_RANK_ENTRIES entries, or where a factor is beyond `factor_dtype`; nothing
        at all of a delta that is 0.
    """
    energy, errors, by_row = _measure_scales(read, shape)
    if energy == 0.0:
        return 0.0, {}
    rank1 = encode_blocks(read, shape, Encoding(scale="rank1"))
    errors["rank1"] = sum(
        squared_norm(read(rows) - decode_rows(rank1, rows)) for rows in row_blocks(shape)
    )
    sample = _sample(read, shape, by_row)
    one_plane = residual_energy(sample, encode(sample, Encoding()))
    for name in _REFITS:
        fitted = residual_energy(sample, encode(sample, Encoding.parse(name)))
        errors[name] = errors["row"] * (fitted / one_plane if one_plane > 0.0 else 1.0)
    if shape[0] * shape[1] <= LOW_RANK_ENTRIES:
        errors |= _measure_low_rank(read, shape, factor_dtype)
    # Where a form is exact, rounding may have left less than nothing.
    return energy, {name: max(0.0, error) for name, error in errors.items()}


def _measure_scales(read: Read, shape: tuple[int, int]) -> tuple[float, dict[str, float], Tensor]:
    """||delta||^2, the errors of one plane by its scales, and the sum of |delta| of each row."""
    energy, by_support = 0.0, 0.0
    by_row = torch.zeros(shape[0], dtype=torch.float64)
    by_column = torch.zeros(shape[1], dtype=torch.float64)
    for rows in row_blocks(shape):
        block = read(rows)
        energy += squared_norm(block)
        magnitude = block.abs()
        by_row[rows] = magnitude.sum(dim=1, dtype=torch.float64)
        by_column += magnitude.sum(dim=0, dtype=torch.float64)
        support = magnitude.count_nonzero(dim=1).clamp(min=1)
        by_support += float((by_row[rows].square() / support).sum())
    kept = {
        "matrix": float(by_row.sum()) ** 2 / (shape[0] * shape[1]),
        "row": float(by_row.square().sum()) / shape[1],
        "column": float(by_column.square().sum()) / shape[0],
        "sparse": by_support,
    }
    return energy, {name: energy - one for name, one in kept.items()}, by_row


def _sample(read: Read, shape: tuple[int, int], by_row: Tensor) -> Tensor:
    """Some rows of the delta, evenly spaced among those that are not 0."""
    changed = by_row.nonzero().flatten()
    wanted = max(_SAMPLE_ROWS, _SAMPLE_ENTRIES // shape[1])
    places = torch.linspace(0, len(changed) - 1, min(wanted, len(changed)), dtype=torch.float64)
    rows = changed[places.round().long()].tolist()
    return torch.cat([read(slice(row, row + 1)) for row in rows])


def _measure_low_rank(
    read: Read, shape: tuple[int, int], factor_dtype: torch.dtype
) -> dict[str, float]:
    """The errors of low rank alone and before signs, for every rank that is one."""
    most = min(RANKS[-1], *shape)
    try:
        low = encode_blocks(read, shape, Encoding(planes=0, rank=most), factor_dtype=factor_dtype)
    except MergeError:
        # The delta is finite: a factor is beyond its dtype, or no solver converged.
        return {}
    ranks = [one for one in RANKS if one <= most]
    lost, by_row = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    sums = dict.fromkeys(ranks, 0.0)
    for rows in row_blocks(shape):
        left, start = read(rows), 0
        for rank in ranks:
            # Not in place: the first is the caller's.
            left, start = left - _product(low, rows, start, rank), rank
            lost[rank] += squared_norm(left)
            magnitude = left.abs().sum(dim=1, dtype=torch.float64)
            by_row[rank] += float(magnitude.square().sum())
            sums[rank] += float(magnitude.sum())
    errors: dict[str, float] = {}
    for rank in ranks:
        errors[f"lowrank-{rank}"] = lost[rank]
        errors[f"lowrank-{rank}+row"] = lost[rank] - by_row[rank] / shape[1]
        errors[f"lowrank-{rank}+matrix"] = lost[rank] - sums[rank] ** 2 / (shape[0] * shape[1])
    return errors


def _product(low: Delta, rows: slice, start: int, stop: int) -> Tensor:
    """Some rows of the part that ranks start to stop have in up down, float32."""
    assert low.up is not None
    assert low.down is not None
    with full_precision(low.up):
        part: Tensor = low.up[rows, start:stop].float() @ low.down[start:stop].float()
        return part
