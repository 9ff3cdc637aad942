"""Digests of named tensors: which base a variant was made for, and whether its bytes are still the
ones written.

    digest = sha256(canonical JSON of the sorted [[name, dtype, shape, sha256 of the bytes], ...])

The content digest is taken over a tensor's own bytes. The fingerprint of a base is taken over its
unique parameters after an exact cast of every float of at most 32 bits to float32, so that a
bfloat16 file, the same file in shards and float32 memory agree; float64 and integers are taken as
they are. Bytes are little-endian.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from soupkit.delta import TensorSource
from soupkit.files import atomic_write_json, canonical_json, read_json
from soupkit.tensorfile import as_bytes, dtype_name

# Hashed at a time: a piece and its float32 copy stay in the cache of a core.
HASHED_BYTES = 2**20

# sha256 with the CPU's own instructions runs at 1-2 GB/s a thread; more threads than this only add
# memory.
MAX_THREADS = 8

Entry = tuple[str, str, tuple[int, ...], str]


def num_threads() -> int:
    """Threads worth starting for hashing on this machine."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def sha256_of(tensor: Tensor, *, dtype: torch.dtype) -> str:
    """Hex sha256 of the tensor's entries cast to `dtype`, row-major, a piece at a time."""
    digest = hashlib.sha256()
    step = HASHED_BYTES // dtype.itemsize
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), step):
        digest.update(as_bytes(flat[start : start + step].to(dtype)))
    return digest.hexdigest()


def digest_of(entries: Iterable[Entry]) -> str:
    """ "sha256:<hex>" over (name, dtype word, shape, sha256) entries, whatever their order."""
    rows = sorted([name, dtype, list(shape), sha] for name, dtype, shape, sha in entries)
    return "sha256:" + hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """The content digest of named tensors, each over its own bytes."""
    return digest_of(
        (name, dtype_name(tensor.dtype), tuple(tensor.shape), sha256_of(tensor, dtype=tensor.dtype))
        for name, tensor in tensors.items()
    )


def _compared_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else dtype


def _hash_entry(name: str, tensor: Tensor) -> Entry:
    dtype = _compared_dtype(tensor.dtype)
    return name, dtype_name(dtype), tuple(tensor.shape), sha256_of(tensor, dtype=dtype)


def fingerprint(source: TensorSource, *, told: Callable[[int], None] | None = None) -> str:
    """The fingerprint of a model: equal iff all names, shapes and float32 values are equal.

    Tensors are asked for in the order of `source.names` from this thread (a gather may be
    collective) and hashed in others; at most `num_threads()` are held at once.

    Args:
        told: called from this thread with the bytes, as stored, of each tensor that was hashed.

    Returns:
        "sha256:<hex>".
    """
    entries: list[Entry] = []
    limit = num_threads()
    with ThreadPoolExecutor(limit) as pool:
        running: dict[Future[Entry], int] = {}

        def collect() -> None:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                entries.append(future.result())
                nbytes = running.pop(future)
                if told:
                    told(nbytes)

        for name in source.names:
            if len(running) == limit:
                collect()
            tensor = source.tensor(name)
            running[pool.submit(_hash_entry, name, tensor)] = tensor.nbytes
        while running:
            collect()
    return digest_of(entries)


def cache_folder() -> Path:
    """Where fingerprints are remembered: $XDG_CACHE_HOME/soupkit, else ~/.cache/soupkit."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "soupkit" / "fingerprints"


def cached_fingerprint(source: TensorSource, stamps: Iterable[tuple[str, int, int, int]]) -> str:
    """`fingerprint(source)`, remembered by its names and the stamps of the files that hold it.

    Args:
        stamps: (path, size, mtime_ns, ctime_ns) of each file, taken before it was opened.

    A cache that is damaged or cannot be written is passed over: it only saves time.
    """
    key = sorted(stamps)
    asked = canonical_json({"files": key, "names": list(source.names)})
    path = cache_folder() / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        saved = read_json(path)
        if isinstance(saved, dict) and is_digest(saved.get("fingerprint")):
            return str(saved["fingerprint"])
    value = fingerprint(source)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(path, {"fingerprint": value, "files": key})
    return value


def is_digest(value: object) -> bool:
    """Whether `value` is a string spelled like a digest of this module."""
    if not isinstance(value, str):
        return False
    kind, _, digits = value.partition(":")
    return kind == "sha256" and len(digits) == 64 and set(digits) <= set("0123456789abcdef")
