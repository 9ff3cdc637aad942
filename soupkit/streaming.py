"""One pass over the bytes of a stored tensor: read into new memory, hashed, checked to be finite.

A piece is hashed and checked while the cache still has it, and the disk is told what is read next,
so that it works meanwhile. Reading, hashing and checking let other threads run, on purpose
also those of a server that generates: nothing here starts threads of its own.

A float is finite unless its exponent bits are all ones (of float8_e4m3fn, which has no infinity:
all bits but the sign).
"""

import contextlib
import hashlib
import mmap
import os

import numpy as np
import torch
from torch import Tensor

from soupkit.tensorfile import Slot, as_bytes, read_into

# Small enough for a cache, and large enough that a busy interpreter is asked for seldom.
PIECE_BYTES = 4 << 20
AHEAD_BYTES = 4 * PIECE_BYTES

# Unsigned integers of a float's size, and the bits that are all ones if it is not finite.
_EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.float64: (np.uint64, 0x7FF0000000000000),
    torch.float32: (np.uint32, 0x7F800000),
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float8_e5m2: (np.uint8, 0x7C),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
}


def host_buffer(num_bytes: int, *, pin_memory: bool = False) -> Tensor:
    """Uint8 [num_bytes] of new memory in large pages, which are four times as fast to fill at first
    as the allocator's; or page-locked, from where a GPU takes copies by itself.
    """
    if pin_memory or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def is_finite(data: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bytes (uint8 [n], contiguous, on the CPU) are finite numbers of `dtype`."""
    if dtype not in _EXPONENTS:
        return True
    word, mask = _EXPONENTS[dtype]
    exponents = np.frombuffer(as_bytes(data), dtype=word) & word(mask)
    return exponents.size == 0 or int(exponents.max()) < mask


def read_checked(
    descriptor: int, slot: Slot, buffer: Tensor | None = None, *, check: bool = True
) -> tuple[str, bool]:
    """Reads a tensor of a file, each byte once.

    Args:
        buffer: uint8 [bytes], to be filled with it; None: it is looked at only, a piece at a time.
        check: whether to hash it.

    Returns:
        The hex sha256 of its bytes ("" without `check`), and whether all its numbers are finite.

    Raises:
        OSError: it cannot be read. ValueError: the file ends too early.
    """
    digest, finite = hashlib.sha256(), True
    size = slot.spec.nbytes
    room = torch.empty(min(PIECE_BYTES, size), dtype=torch.uint8) if buffer is None else buffer
    for start in range(0, size, PIECE_BYTES):
        offset = slot.start + start
        if start % AHEAD_BYTES == 0:
            ahead = min(2 * AHEAD_BYTES, slot.stop - offset)
            os.posix_fadvise(descriptor, offset, ahead, os.POSIX_FADV_WILLNEED)
        at = 0 if buffer is None else start
        piece = room[at : at + min(PIECE_BYTES, size - start)]
        read_into(descriptor, piece, offset)
        if check:
            digest.update(as_bytes(piece))
        finite = finite and is_finite(piece, slot.spec.dtype)
    return digest.hexdigest() if check else "", finite
