"""Encoding the difference of two tensors in blocks of rows, so that memory does not grow with a
matrix.

What soupkit.bitdelta does to a delta in memory, done to a pair of (mapped) tensors. Row scales are
the same to the bit; a matrix scale over several blocks is the float64 mean of theirs and takes a
pass for each plane. No files here.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from soupkit.bitdelta import SignDelta, decode, encode
from soupkit.config import Scale
from soupkit.delta import layout, subtract
from soupkit.manifest import matrix_shape
from soupkit.numeric import squared_norm

# Entries of a block of rows: its float32 copies (16 MB each) are the largest temporaries of an
# export, a plain mean or a restore. Any size from 2^17 to 2^24 took the same CPU time (SmolLM2-135M
# shapes, one thread of a 2-core AMD EPYC, 0.60 to 0.72 s an export).
BLOCK_ENTRIES = 2**22


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis whose blocks hold about BLOCK_ENTRIES entries; one for a scalar."""
    if not shape:
        yield slice(None)
        return
    step = max(1, BLOCK_ENTRIES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def encode_pair(
    name: str, ours: Tensor, theirs: Tensor, *, scale: Scale, planes: int
) -> tuple[SignDelta, float, float]:
    """Encode ours - theirs in blocks of rows.

    Args:
        ours, theirs: floating, the same shape, a matrix by soupkit.delta.layout.

    Returns:
        The signs of the [batch * out, in] matrix; ||delta||^2; ||delta - decoded||^2, both float64.

    Raises:
        MergeError: an entry of the delta is not finite.
    """
    rows, columns = matrix_shape(name, ours.shape)
    pair = ours.reshape(rows, columns), theirs.reshape(rows, columns)
    is_one_each = layout(name, ours.shape) == "experts" and scale == "matrix"
    group = ours.shape[1] if is_one_each else rows
    parts: list[SignDelta] = []
    energy = 0.0
    for start in range(0, rows, group):
        blocks = _Blocks(name, pair, start, start + group, whole=ours.shape)
        one = _encode_rows(blocks, planes) if scale == "row" else _encode_matrix(blocks, planes)
        if is_one_each:
            one = SignDelta(one.signs, one.scale.expand(planes, group).contiguous(), columns)
        parts.append(one)
        energy += blocks.energy
    encoded = parts[0] if len(parts) == 1 else _join(parts)
    # Each plane removes exactly in * scale^2 a row: its scale is the mean of |residual| (algorithms
    # 1.8, 1).
    per_row = encoded.scale.double().expand(planes, rows)
    kept = columns * float(per_row.square().sum())
    return encoded, energy, max(0.0, energy - kept)


class _Blocks:
    """The delta of rows [start, stop) of a pair of matrices, block by block; adds up its energy."""

    def __init__(
        self,
        name: str,
        pair: tuple[Tensor, Tensor],
        start: int,
        stop: int,
        *,
        whole: Sequence[int],
    ) -> None:
        self.name = name
        self.pair = pair
        self.whole = whole
        self.columns = pair[0].shape[1]
        self.energy = 0.0
        self.start, self.rows = start, stop - start
        self.slices = list(row_blocks((self.rows, self.columns)))

    def delta(self, rows: slice, *, count: bool) -> Tensor:
        """float32 [rows, in]; `count` adds its energy."""
        place = slice(self.start + rows.start, self.start + rows.stop)
        ours, theirs = (one[place] for one in self.pair)
        before = place.start * self.columns
        delta = subtract(ours, theirs, name=self.name, whole=self.whole, start=before)
        if count:
            self.energy += squared_norm(delta)
        return delta


def _encode_rows(blocks: _Blocks, planes: int) -> SignDelta:
    parts = [
        encode(blocks.delta(rows, count=True), scale="row", planes=planes) for rows in blocks.slices
    ]
    return parts[0] if len(parts) == 1 else _join(parts)


def _encode_matrix(blocks: _Blocks, planes: int) -> SignDelta:
    """One scale over all blocks: a pass over them for each plane, as its mean needs them all."""
    if len(blocks.slices) == 1:
        return encode(blocks.delta(blocks.slices[0], count=True), scale="matrix", planes=planes)
    signs = torch.empty(planes, blocks.rows, -(-blocks.columns // 8), dtype=torch.uint8)
    scale = torch.zeros(planes, 1)
    for plane in range(planes):
        mean = 0.0
        for rows in blocks.slices:
            residual = blocks.delta(rows, count=plane == 0)
            if plane:
                residual -= decode(SignDelta(signs[:plane, rows], scale[:plane], blocks.columns))
            one = encode(residual, scale="matrix")
            signs[plane, rows] = one.signs[0]
            mean += float(one.scale) * (rows.stop - rows.start) / blocks.rows
        scale[plane] = mean
    return SignDelta(signs, scale, blocks.columns)


def _join(parts: Sequence[SignDelta]) -> SignDelta:
    signs = torch.cat([part.signs for part in parts], dim=1)
    return SignDelta(signs, torch.cat([part.scale for part in parts], dim=1), parts[0].in_features)
