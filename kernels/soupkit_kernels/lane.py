"""LANE order: the signs of a row as the tensor cores of a GPU want them, from the order of files.

    word t of the 128 inputs from 128 i on, bit 16 p + j  <->  input 128 i + 8 j + 2 t + p
    (t 0..3, p 0..1, j 0..15; words are int32, 1 means +1)

In a matrix product of 16-bit values a thread holds, of every eight inputs, the pair 2 t, 2 t + 1 of
its rows: one word has all its signs of 128 inputs, and a shift and one logical operation make the
two signs of a pair. Sixteen bytes of a file (16 j x 8 inputs) become four words (8 x 16): a
transpose of bits. Only what is on a GPU has this order; files, shards and CPUs keep that of
bitpack.py.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from soupkit_kernels.bitpack import check_packed, packed_width

BLOCK_SIGNS = 128
BLOCK_WORDS = 4
_BLOCK_BYTES = BLOCK_SIGNS // 8

# Transpose of 8 x 8 bits in an integer, row i in byte i: swap blocks of 1, 2, 4 across the diagonal
# (Warren, Hacker's Delight, 7-3). The masks keep no bit that an arithmetic shift has filled.
_SWAPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
# Bytes converted at a time: bounds the temporaries of a large head.
_CHUNK_BYTES = 1 << 24


def lane_words(num_signs: int) -> int:
    """Words of a row of `num_signs` signs; a row is a multiple of 16 bytes."""
    return BLOCK_WORDS * -(-num_signs // BLOCK_SIGNS)


def to_lane(packed: Tensor, num_signs: int) -> Tensor:
    """Packed rows in LANE order.

    Args:
        packed: uint8 [..., ceil(K / 8)] in the order of bitpack.py.
        num_signs: K.
    Returns:
        int32 [..., 4 ceil(K / 128)] on the same device; what lies beyond K is 0.
    Raises:
        ValueError: packed is not uint8, or its last axis does not hold K signs.
    """
    check_packed(packed, num_signs)
    assert sys.byteorder == "little", "words are read as bytes"
    lead, width = packed.shape[:-1], lane_words(num_signs)
    out = torch.empty(*lead, width, dtype=torch.int32, device=packed.device)
    if not out.numel():
        return out
    source, target = packed.reshape(-1, packed.shape[-1]), out.view(-1, width)
    step = max(1, _CHUNK_BYTES // (4 * width))
    for at in range(0, target.shape[0], step):
        rows = source[at : at + step]
        if num_signs % 8:
            rows = rows.clone()
            rows[:, -1] &= (1 << num_signs % 8) - 1
        rows = F.pad(rows, (0, 4 * width - rows.shape[1])).contiguous()
        turned = _transpose(rows.view(torch.int64)).view(torch.uint8)
        # Two integers a block: their bytes b are bits 0..7 and 8..15 of a half word.
        halves = turned.view(-1, width // BLOCK_WORDS, 2, 8).transpose(2, 3).contiguous()
        target[at : at + step] = halves.view(-1).view(torch.int32).view(-1, width)
    return out


def from_lane(words: Tensor, num_signs: int) -> Tensor:
    """The inverse of `to_lane`: int32 [..., 4 ceil(K / 128)] -> uint8 [..., ceil(K / 8)].

    Raises:
        ValueError: words are not int32, or their last axis does not hold K signs.
    """
    if words.dtype != torch.int32 or words.ndim == 0 or words.shape[-1] != lane_words(num_signs):
        raise ValueError(
            f"words {words.dtype} {tuple(words.shape)}: K={num_signs} needs int32 "
            f"[..., {lane_words(num_signs)}]"
        )
    lead, num_bytes = words.shape[:-1], _BLOCK_BYTES * (words.shape[-1] // BLOCK_WORDS)
    halves = words.contiguous().view(torch.uint8).view(-1, 8, 2).transpose(1, 2).contiguous()
    turned = _transpose(halves.view(-1).view(torch.int64)).view(torch.uint8)
    return turned.view(*lead, num_bytes)[..., : packed_width(num_signs)].contiguous()


def _transpose(integers: Tensor) -> Tensor:
    """Each int64 as 8 x 8 bits, transposed; its own inverse."""
    for shift, mask in _SWAPS:
        differs = (integers ^ (integers >> shift)) & mask
        integers = integers ^ differs ^ (differs << shift)
    return integers
