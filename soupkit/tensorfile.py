"""safetensors files: a header that is checked before it is used, lazy reading, and writing that
streams.

    file = u64 header length | JSON header, padded with spaces to 8 bytes | data

Format: https://github.com/huggingface/safetensors#format. The header of an untrusted file is parsed
here so that every fault is one ValueError; tensors of checkpoints are mapped by the safetensors
package (file-backed memory), tensors of variants are read into memory of their own (a variant may
be replaced while it is read). The writer knows all shapes first, so that it writes each byte once
and holds none. It knows nothing of models.
"""

import contextlib
import errno
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from soupkit.files import open_regular, parse_json

MAX_HEADER_BYTES = 100_000_000
MAX_ENTRIES = 2**48
# The largest piece handed to one write call, and the unit of progress of hashing and copying.
PIECE_BYTES = 16 * 2**20

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The format's word for `dtype`. Raises ValueError for one it has no word for."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{dtype} cannot be stored: use one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in its file: bytes [start, stop) counted from the file's first."""

    spec: TensorSpec
    start: int
    stop: int


def is_count(value: Any, most: int = MAX_ENTRIES) -> bool:
    """Whether a parsed JSON value is a whole number in [0, most] (true and false are not)."""
    return type(value) is int and 0 <= value <= most


def is_shape(value: Any) -> bool:
    """Whether a parsed JSON value is a list of axis lengths whose product can be addressed."""
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(map(is_count, value))
        and math.prod(value) <= MAX_ENTRIES
    )


def _parse_slot(name: str, entry: Any, data_start: int) -> Slot:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"header entry of {name!r} is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not is_shape(shape):
        raise ValueError(f"{name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise ValueError(f"{name!r} has the data_offsets {offsets!r}")
    spec = TensorSpec(DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(
            f"{name!r} has {offsets[1] - offsets[0]} bytes, its shape needs {spec.nbytes}"
        )
    return Slot(spec, data_start + offsets[0], data_start + offsets[1])


def read_header(path: Path) -> dict[str, Slot]:
    """The tensors of a safetensors file, checked against the size of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: truncated, or a header that is not sound: unknown dtype, sizes that do not add
            up, holes, overlaps.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise ValueError(f"truncated: {size} bytes do not hold the header")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes is over the {MAX_HEADER_BYTES} allowed")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header.pop("__metadata__", None)
    slots = {name: _parse_slot(name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].stop)):
        if slot.start != end:
            raise ValueError(f"{name!r} starts at byte {slot.start}, the one before ends at {end}")
        end = slot.stop
    if end != size:
        kind = "truncated" if size < end else "too long"
        raise ValueError(f"{kind}: the header describes {end} bytes, the file has {size}")
    return slots


def stamp_of(path: Path) -> tuple[str, int, int, int]:
    """What tells one content of a file from another: resolved path, size, mtime_ns, ctime_ns."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class MappedFile:
    """Lazy tensors of a trusted safetensors file, backed by the file's pages.

    The tensors stay valid after the object is gone. The file must not be truncated meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Open and check `path`. Raises OSError or ValueError as read_header does."""
        # Taken first: if the file is replaced meanwhile, the stamp fits no content and is not found
        # again.
        self.stamp = stamp_of(path)
        self.slots = read_header(path)
        try:
            self._handle = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise ValueError(str(error)) from None

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` on the CPU, in its own dtype, without a copy."""
        tensor: Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]  # Rust
        return tensor

    def prefetch(self, name: str) -> None:
        """Have the system begin to read the tensor `name`; returns before it has."""
        slot = self.slots[name]
        # A hint alone: what is wrong with the file is told by whoever reads it.
        with contextlib.suppress(OSError):
            descriptor = os.open(self.stamp[0], os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = slot.stop - slot.start
                os.posix_fadvise(descriptor, slot.start, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def _view(buffer: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor."""
    array: Any = buffer.numpy()
    return memoryview(array)


def read_into(descriptor: int, buffer: Tensor, offset: int) -> None:
    """Fill the uint8 `buffer` [bytes] with the file's bytes from `offset` on.

    Raises:
        ValueError: the file ends before the buffer is full.
    """
    view = _view(buffer)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + PIECE_BYTES]], offset + done)
        if count == 0:
            raise ValueError(f"truncated: ends at byte {offset + done}")
        done += count


def typed(buffer: Tensor, spec: TensorSpec) -> Tensor:
    """See the uint8 `buffer` [bytes] as a tensor of `spec`; copied where it is not aligned."""
    if buffer.data_ptr() % spec.dtype.itemsize or buffer.storage_offset() % spec.dtype.itemsize:
        buffer = buffer.clone()
    return buffer.view(spec.dtype).reshape(spec.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a contiguous copy (or view) of `tensor` on the CPU."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return _view(flat.view(torch.uint8))


def file_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Bytes of the file that TensorFileWriter makes of these tensors, without metadata."""
    return len(_layout(specs, {})[0]) + sum(spec.nbytes for spec in specs.values())


def most_bytes(name: str, spec: TensorSpec, most: int) -> int:
    """Bytes of a tensor in a file whose data are at most `most` bytes, its share of the header
    included; those of all tensors and 16 more are never less than the file's.
    """
    entry = json.dumps({name: _entry(spec, most, most)}, separators=(",", ":"), ensure_ascii=False)
    return len(entry.encode()) + spec.nbytes


def _entry(spec: TensorSpec, start: int, stop: int) -> dict[str, Any]:
    return {
        "dtype": dtype_name(spec.dtype),
        "shape": list(spec.shape),
        "data_offsets": [start, stop],
    }


def _layout(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """What a file begins with, and where the data of each tensor begin behind that."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    order = sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    for name, spec in order:
        starts[name] = end
        end += spec.nbytes
        header[name] = _entry(spec, starts[name], end)
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, starts


class TensorFileWriter:
    """Writes one safetensors file, tensor by tensor or piece by piece, in any order and from any
    thread.

    The layout is the safetensors package's own: larger items first, then by name. Not atomic and
    not synced: use it inside soupkit.files.atomic_folder or a pending folder.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header of `specs` to the new file `path`. Raises OSError, ValueError."""
        raw, self._starts = _layout(specs, metadata or {})
        self._specs = dict(specs)
        self._missing = {name: spec.nbytes for name, spec in specs.items()}
        self._data_start = len(raw)
        self._lock = threading.Lock()
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._write(raw, 0)
        except BaseException:
            self._file.close()
            raise

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done : done + PIECE_BYTES], offset + done)

    def write(self, name: str, tensor: Tensor, *, first_entry: int = 0) -> None:
        """Write `tensor` as the entries of `name` from `first_entry` on; the whole tensor by
        default.

        Raises:
            OSError: the disk refused.
            ValueError: the dtype is not the announced one, or the entries do not fit.
        """
        spec = self._specs[name]
        if tensor.dtype != spec.dtype:
            raise ValueError(f"{name}: {tensor.dtype} was announced as {spec.dtype}")
        data = as_bytes(tensor)
        offset = first_entry * spec.dtype.itemsize
        if offset + len(data) > spec.nbytes:
            raise ValueError(f"{name}: {offset + len(data)} bytes do not fit into {spec.nbytes}")
        self._write(data, self._data_start + self._starts[name] + offset)
        with self._lock:
            self._missing[name] -= len(data)

    def copy(self, name: str, descriptor: int, offset: int) -> None:
        """Write `name` in full from the bytes of another open file that start at `offset`. Raises
        OSError.
        """
        left = self._missing[name]
        start = self._data_start + self._starts[name]
        while left:
            try:
                count = os.copy_file_range(
                    descriptor, self._file.fileno(), left, offset_src=offset, offset_dst=start
                )
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                piece = os.pread(descriptor, min(left, PIECE_BYTES), offset)
                self._write(piece, start)
                count = len(piece)
            if count == 0:
                raise OSError(errno.EIO, f"{name}: the file that is copied from ends too early")
            left, offset, start = left - count, offset + count, start + count
        self._missing[name] = 0

    def check_complete(self) -> None:
        """Raise ValueError if an announced tensor was not written in full."""
        for name, count in self._missing.items():
            if count:
                raise ValueError(f"{name}: {count} announced bytes were not written")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
