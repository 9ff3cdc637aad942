"""Packed signs, eight to a byte, least significant bit first: the only place that knows the order.

    bit b of byte j of a row  <->  input 8 j + b;   1 means +1, 0 means -1

A sign is +1 where a value is >= 0 (so zero and minus zero are +1). Where the last axis is no
multiple of 8, the bits beyond it are 0 and never read. `pack` equals numpy.packbits(values >= 0,
axis=-1, bitorder="little").
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor
from torch.nn import functional as F

SIGNS_PER_BYTE = 8

# Multiplying eight 0/1 bytes, read as one little-endian integer, by this moves byte i to bit 56 +
# i; no two products meet in a bit, so nothing carries.
_GATHER_BITS = 0x0102040810204080


def packed_width(num_signs: int) -> int:
    """Bytes of a row of `num_signs` signs."""
    return -(-num_signs // SIGNS_PER_BYTE)


def pack(values: Tensor) -> Tensor:
    """Pack the signs of `values` along the last axis.

    Args:
        values: [..., K], bool (True is +1) or real (>= 0 is +1; NaN is -1), at least one axis.
    Returns:
        uint8 [..., ceil(K / 8)] on the same device.
    Raises:
        ValueError: no axis.
    """
    if values.ndim == 0:
        raise ValueError("pack needs at least one axis, got a scalar; unsqueeze it")
    positive = values if values.dtype == torch.bool else values >= 0
    pad = -values.shape[-1] % SIGNS_PER_BYTE
    ones = positive.view(torch.uint8)
    ones = F.pad(ones, (0, pad)) if pad else ones.contiguous()
    width = packed_width(values.shape[-1])
    if sys.byteorder == "big":
        ones = ones.reshape(*ones.shape[:-1], width, SIGNS_PER_BYTE).flip(-1).flatten(-2)
    if ones.numel() == 0:
        return torch.empty((*values.shape[:-1], width), dtype=torch.uint8, device=values.device)
    # The view needs a start at a multiple of 8 bytes; a slice of a bool tensor may have another.
    if ones.storage_offset() % SIGNS_PER_BYTE:
        ones = ones.clone()
    words = ones.view(torch.int64)
    return ((words * _GATHER_BITS) >> 56).to(torch.uint8)


@functools.lru_cache(maxsize=32)
def _sign_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8] of +-1: row b holds the eight signs of byte b. Shared: nobody writes to it."""
    # A table made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        byte = torch.arange(256, device=device).unsqueeze(1)
        bit = torch.arange(SIGNS_PER_BYTE, device=device)
        return (((byte >> bit) & 1) * 2 - 1).to(dtype)


def _look_up(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., B] bytes -> [..., 8 B] of +-1 in int8 or a 2-byte dtype.

    The eight signs of a byte are gathered as one element of 8 or 16 bytes, which costs half of
    gathering rows of eight (F.embedding); torch_path.py has the figures.
    """
    whole = torch.int64 if dtype.itemsize == 1 else torch.complex128
    table = _sign_table(dtype, packed.device).view(whole).flatten()
    index = packed.reshape(-1).to(torch.int32)
    signs = torch.index_select(table, 0, index).view(dtype)
    return signs.view(*packed.shape[:-1], packed.shape[-1] * SIGNS_PER_BYTE)


def unpack(packed: Tensor, num_signs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The signs of packed rows.

    Args:
        packed: uint8 [..., ceil(K / 8)].
        num_signs: K.
        dtype: of the result.
    Returns:
        [..., K] of +1 and -1 on the same device, not always contiguous.
    Raises:
        ValueError: packed is not uint8, or its last axis does not hold K signs.
    """
    check_packed(packed, num_signs)
    direct = dtype.itemsize == 2 and dtype.is_floating_point
    signs = _look_up(packed, dtype) if direct else _look_up(packed, torch.int8).to(dtype)
    return signs[..., :num_signs]


def unpack_into(packed: Tensor, out: Tensor) -> Tensor:
    """Write the signs of packed uint8 [..., ceil(K / 8)] into `out` [..., K] and return it.

    Raises:
        ValueError: packed is not uint8, or its last axis does not hold K signs.
    """
    check_packed(packed, out.shape[-1])
    return out.copy_(_look_up(packed, torch.int8)[..., : out.shape[-1]])


def check_packed(packed: Tensor, num_signs: int) -> None:
    """Raise ValueError unless `packed` holds `num_signs` signs a row."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed signs are uint8, got {packed.dtype}; pack them first")
    if packed.ndim == 0 or packed.shape[-1] != packed_width(num_signs):
        raise ValueError(
            f"packed signs of shape {tuple(packed.shape)} do not hold K={num_signs} a row: "
            f"the last axis must be {packed_width(num_signs)}"
        )
