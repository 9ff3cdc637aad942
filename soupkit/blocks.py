"""Encoding the difference of two tensors in blocks of rows, so that memory does not grow with a
matrix.

What soupkit.encoding does to a delta, done to a pair of (mapped) tensors: only a low-rank part has
the whole delta in memory. Experts lie below each other in one matrix; only "matrix" scales are one
for each. No files here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soupkit.candidates import measure
from soupkit.delta import layout, subtract
from soupkit.encoding import decode_rows, encode_blocks
from soupkit.forms import Encoding
from soupkit.manifest import factor_dtype, matrix_shape
from soupkit.numeric import squared_norm
from soupkit_kernels import Delta

# Entries of a block of rows: its float32 copies (16 MB each) are the largest temporaries of a plain
# mean or a restore. Any size from 2^17 to 2^24 took the same CPU time (SmolLM2-135M shapes, one
# thread of a 2-core AMD EPYC, 0.60 to 0.72 s an export).
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
    name: str, ours: Tensor, theirs: Tensor, encoding: Encoding
) -> tuple[Delta, float, float]:
    """Encode ours - theirs in blocks of rows.

    Args:
        ours, theirs: floating, the same shape, a matrix by soupkit.delta.layout.

    Returns:
        The delta of the [batch * out, in] matrix; ||delta||^2; ||delta - decoded||^2, both float64.

    Raises:
        MergeError: an entry of the delta is not finite, or a factor is beyond its dtype's range.
    """
    pair = _Pair(name, ours, theirs)
    dtype = factor_dtype(ours.dtype)
    if layout(name, ours.shape) == "experts" and encoding.scale == "matrix":
        encoded = _encode_experts(pair, encoding, dtype, ours.shape[1])
    else:
        encoded = encode_blocks(pair.read, pair.shape, encoding, factor_dtype=dtype)
    return encoded, pair.energy, _lost(pair, encoded, encoding)


def measure_pair(name: str, ours: Tensor, theirs: Tensor) -> tuple[float, dict[str, float]]:
    """||delta||^2 of ours - theirs, and what its forms would lose; see candidates.measure.

    Args, Raises: as encode_pair.
    """
    pair = _Pair(name, ours, theirs)
    energy, errors = measure(pair.read, pair.shape, factor_dtype=factor_dtype(ours.dtype))
    if layout(name, ours.shape) == "experts":
        # Each expert would have a scale of its own, which is not what was measured.
        errors = {form: one for form, one in errors.items() if not form.endswith("matrix")}
    return energy, errors


class _Pair:
    """ours - theirs as a matrix of rows; adds up its energy while all rows are read once."""

    def __init__(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        self.shape = matrix_shape(name, ours.shape)
        self.energy = 0.0
        self._name, self._whole = name, ours.shape
        self._ours, self._theirs = ours.reshape(self.shape), theirs.reshape(self.shape)
        self._counted = 0

    def read(self, rows: slice) -> Tensor:
        """float32 [rows, in], in fresh memory."""
        delta = subtract(
            self._ours[rows],
            self._theirs[rows],
            name=self._name,
            whole=self._whole,
            start=rows.start * self.shape[1],
        )
        if rows.start == self._counted:
            self.energy += squared_norm(delta)
            self._counted = rows.stop
        return delta


def _encode_experts(pair: _Pair, encoding: Encoding, dtype: torch.dtype, out: int) -> Delta:
    """A matrix scale for each expert, repeated on its `out` rows; one low-rank part for all."""
    low: Delta | None = None
    if encoding.rank and encoding.low_rank_first:
        only = Encoding(planes=0, rank=encoding.rank)
        low = encode_blocks(pair.read, pair.shape, only, factor_dtype=dtype)
    parts = []
    for start in range(0, pair.shape[0], out):

        def read(rows: slice, start: int = start) -> Tensor:
            place = slice(start + rows.start, start + rows.stop)
            return pair.read(place) if low is None else pair.read(place) - decode_rows(low, place)

        signs = replace(encoding, rank=0, low_rank_first=True)
        parts.append(encode_blocks(read, (out, pair.shape[1]), signs))
    encoded = _join(parts)
    if encoding.rank and not encoding.low_rank_first:
        only = Encoding(planes=0, rank=encoding.rank)
        low = encode_blocks(
            lambda rows: pair.read(rows) - decode_rows(encoded, rows),
            pair.shape,
            only,
            factor_dtype=dtype,
        )
    return encoded if low is None else replace(encoded, up=low.up, down=low.down)


def _lost(pair: _Pair, encoded: Delta, encoding: Encoding) -> float:
    """||delta - decoded||^2 in float64."""
    rows, columns = pair.shape
    is_greedy = not (encoding.rank or encoding.refit or encoding.is_sparse)
    if is_greedy and encoding.scale in ("row", "matrix"):
        # Each plane removes exactly in * scale^2 a row: its scale is the mean of |residual|
        # (algorithms 1.8, 1).
        assert encoded.scale is not None
        per_row = encoded.scale.double().expand(encoded.planes, rows)
        return max(0.0, pair.energy - columns * float(per_row.square().sum()))
    return sum(
        squared_norm(pair.read(block).sub_(decode_rows(encoded, block)))
        for block in row_blocks(pair.shape)
    )


def _join(parts: Sequence[Delta]) -> Delta:
    """Matrices below each other, each with one scale a plane."""
    packed = [part.packed for part in parts if part.packed is not None]
    scales = [part.scale.expand(-1, part.out_features) for part in parts if part.scale is not None]
    return Delta(
        sum(part.out_features for part in parts),
        parts[0].in_features,
        torch.cat(packed, dim=1),
        torch.cat(scales, dim=1),
    )
