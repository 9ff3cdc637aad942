"""One parameter of a fine-tune as a variant stores it: its entry, its tensors and their digests.

Not here: which encoding it gets (soupkit.export, soupkit.budget), and files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soupkit.blocks import encode_pair, row_blocks
from soupkit.delta import layout
from soupkit.fingerprint import Entry, sha256_of
from soupkit.forms import RAW, Encoding
from soupkit.manifest import TensorEntry, matrix_shape
from soupkit.numeric import check_finite
from soupkit.tensorfile import TensorSpec, dtype_name
from soupkit_kernels import Delta

# Of an entry of a delta whose truncated SVD is taken: the delta and at its peak two copies
# (candidates.py), float32.
_SVD_BYTES = 12


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A parameter that is ready to be stored: its entry, and its tensors in variant.safetensors."""

    entry: TensorEntry
    parts: tuple[Tensor, ...] = ()
    hashes: tuple[Entry, ...] = ()


def finished(entry: TensorEntry, parts: Mapping[str, Tensor | None]) -> Finished:
    """Hash the parts of a parameter that there are; by name in variant.safetensors."""
    there = {name: part for name, part in parts.items() if part is not None}
    hashes = (
        (name, dtype_name(one.dtype), tuple(one.shape), sha256_of(one, dtype=one.dtype))
        for name, one in there.items()
    )
    return Finished(entry, tuple(there.values()), tuple(hashes))


def store(name: str, ours: Tensor, theirs: Tensor, encoding: Encoding | None) -> Finished:
    """One parameter of the fine-tune against the base's, as it is stored.

    Raises:
        MergeError: a weight is NaN or infinite.
    """
    shape, dtype = tuple(ours.shape), dtype_name(ours.dtype)
    is_matrix = ours.is_floating_point() and layout(name, shape) != "vector"
    is_equal = ours.shape == theirs.shape and are_equal(ours, theirs, is_matrix=is_matrix)
    same = Finished(TensorEntry(name, "same", shape, dtype))
    if is_matrix and ours.shape == theirs.shape and not is_equal:
        entry = _entry_for(name, ours, encoding)
        if entry is not None:
            assert encoding is not None
            # Refuses what is not finite while it subtracts.
            encoded, energy, lost = encode_pair(name, ours, theirs, encoding)
            if energy == 0.0:
                return same
            return parts_of(replace(entry, residual_energy=min(1.0, lost / energy)), encoded)
        # Two dtypes may hold the same values.
        is_equal = are_equal(ours, theirs, is_matrix=False)
    if ours.is_floating_point():
        check_finite(name, ours)
    if is_equal:
        return same
    entry = TensorEntry(name, "raw", shape, dtype, bytes=ours.nbytes)
    return finished(entry, {f"{name}.{RAW}": ours})


def parts_of(entry: TensorEntry, encoded: Delta) -> Finished:
    """A parameter whose delta is encoded."""
    parts = {
        "sign": encoded.packed,
        "scale": encoded.scale,
        "column": encoded.column_scale,
        "up": encoded.up,
        "down": encoded.down,
    }
    return finished(entry, {f"{entry.name}.{part}": one for part, one in parts.items()})


def memory_of(name: str, spec: TensorSpec, encoding: Encoding | None) -> int:
    """Bytes that `store` takes for a parameter, beside blocks of rows; about."""
    if encoding is None or layout(name, spec.shape) == "vector":
        return 0
    # The delta, and what the SVD makes of it.
    whole = _SVD_BYTES * math.prod(spec.shape) if encoding.rank else 0
    # Planes are joined from parts.
    return whole + 2 * delta_entry(name, spec.shape, spec.dtype, encoding).bytes


def _entry_for(name: str, ours: Tensor, encoding: Encoding | None) -> TensorEntry | None:
    """How a changed matrix will be stored, its error not yet known; None: whole, as that was asked
    for or takes no more bytes.
    """
    if encoding is None:
        return None
    entry = delta_entry(name, tuple(ours.shape), ours.dtype, encoding)
    return entry if entry.bytes < ours.nbytes else None


def delta_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, encoding: Encoding
) -> TensorEntry:
    """How a matrix is stored by an encoding, without an error."""
    planes = encoding.stored_planes
    entry = TensorEntry(
        name,
        "delta",
        shape,
        dtype_name(dtype),
        planes=planes,
        scale_axis=encoding.scale if planes else None,
        rank=min(encoding.rank, *matrix_shape(name, shape)),
        encoding=encoding.name,
    )
    return replace(entry, bytes=sum(spec.nbytes for spec in entry.stored_specs().values()))


def are_equal(ours: Tensor, theirs: Tensor, *, is_matrix: bool) -> bool:
    """Whether two tensors hold the same values; of a matrix in another dtype it is seen later."""
    if ours.dtype == theirs.dtype:
        return torch.equal(ours, theirs)
    return not is_matrix and all(
        torch.equal(ours[rows].double(), theirs[rows].double())
        if ours.ndim
        else bool(ours.double() == theirs.double())
        for rows in row_blocks(tuple(ours.shape))
    )
