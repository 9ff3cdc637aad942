"""Tile shapes of the fused linear, and how a step is cut into groups of tokens.

The choices are static: made from compiled code (registers, spills, instructions, shared memory),
never timed on a GPU. Imports nothing, so that a plan can be made without triton.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """How one instance of the kernel is compiled.

    Args:
        block_n, block_k: rows and inputs of a weight tile. 128 inputs or more, so that a packed
            word is loaded once; less loads it again for each part (from L2).
        num_warps, num_stages: as Triton's; see the table for what is on its way.
        per_sm: programs that fit a multiprocessor of an H100.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int = 2


# By (block_m, terms, bytes of an element). Two programs an SM hide each other's start, end and
# waits; 64 tokens of 4 terms and 128 of one need the registers of a whole SM. Less than 16 tokens
# is not worth an instance: the tensor cores take as long, and tokens that are not there are not
# loaded. While a tile is multiplied, weights, signs and tokens of num_stages - 2 more are on their
# way (the next one's loads follow the products): 56 to 112 KB an SM, where 18 KB would do at 3.35
# TB/s and 700 ns. So never two stages.
#
# Beside each: registers and SASS instructions of the main loop per weight on sm_90, with triton
# 3.6.0 and 3.9.0, K split and no column scales or low-rank parts. None spills (64 tokens of 4 terms
# do with such parts: at most 112 bytes, at most two accesses of them in the loop); 16-bit ones use
# HGMMA, not one after the other, load weights by 16 bytes and each packed word once.
_TABLE = {
    (16, 1, 2): Config(64, 128, 4, 4),  # 95, 2.84; 95, 3.19
    (16, 2, 2): Config(64, 128, 4, 4),  # 128, 3.95; 128, 4.39
    (16, 4, 2): Config(64, 128, 4, 4),  # 127, 6.45; 128, 7.08
    (16, 8, 2): Config(64, 128, 4, 3),  # 254, 11.36; 248, 12.36
    (32, 1, 2): Config(64, 128, 4, 4),  # 127, 2.95; 127, 3.30
    (32, 2, 2): Config(64, 128, 4, 4),  # 159, 4.17; 159, 4.61
    (32, 4, 2): Config(64, 128, 4, 4),  # 202, 6.64; 202, 7.28
    (64, 1, 2): Config(64, 128, 4, 3),  # 206, 3.23; 209, 3.56
    (64, 2, 2): Config(64, 128, 4, 3),  # 248, 4.44; 247, 4.88
    (64, 4, 2): Config(128, 128, 8, 3, 1),  # 255, 6.64; 255, 7.31
    (128, 1, 2): Config(128, 128, 8, 3, 1),  # 248, 4.02; 250, 3.89
    # No tensor core keeps float32's precision: small steps of K bound the registers.
    (16, 1, 4): Config(32, 32, 4, 3),  # 164, 50; 166, 51
    (16, 2, 4): Config(32, 32, 4, 3),  # 142, 74; 142, 74
    (16, 4, 4): Config(32, 16, 4, 3),  # 150, 137; 150, 137
    (16, 8, 4): Config(16, 32, 4, 3),  # 194, 262; 148, 257
    (32, 1, 4): Config(32, 16, 4, 3),  # 128, 93; 128, 93
    (32, 2, 4): Config(32, 16, 4, 3),  # 127, 137; 126, 138
    (32, 4, 4): Config(32, 16, 4, 2),  # 144, 225; 128, 225
    (64, 1, 4): Config(32, 16, 4, 3),  # 255, 165; 168, 164
    (64, 2, 4): Config(32, 16, 4, 3),  # 168, 240; 168, 239
    (64, 4, 4): Config(32, 16, 4, 3),  # 255, 389; 254, 388
    (128, 1, 4): Config(32, 16, 8, 3, 1),  # 198, 321; 200, 320
}
# Where another chip needs less: registers of mma.sync (sm_80 to 89, 120), tensor memory (sm_100),
# 99 KB of shared memory (sm_86, 89, 120).
_NOT_HOPPER = {
    (16, 4, 2): Config(64, 128, 4, 3),
    (16, 8, 2): Config(64, 128, 4, 2),
    (32, 4, 2): Config(64, 128, 4, 2),
    (64, 2, 2): Config(32, 128, 4, 3),
    (64, 4, 2): Config(32, 128, 4, 2),
    (128, 1, 2): Config(64, 128, 8, 2, 1),
}
_HOPPER = 90

# Most terms of a group, by its most tokens.
MAX_TERMS = {16: 8, 32: 4, 64: 4, 128: 1}
MAX_PLANES = 4
# Groups of more tokens are tiles of one variant, whose K is seldom split.
DECODE_TOKENS = 64


def bucket(num_terms: int) -> int:
    """The least compiled number of terms that holds `num_terms`: 0, 1, 2, 4 or 8."""
    return 0 if num_terms == 0 else 1 << (num_terms - 1).bit_length()


def config(block_m: int, terms: int, element_size: int, capability: int = _HOPPER) -> Config:
    """The tile shape of an instance of the kernel; without terms it is that of one.

    Args:
        block_m, terms: as the table has them. element_size: bytes of a weight.
        capability: of the GPU, 10 major + minor.
    """
    key = (block_m, max(terms, 1), element_size)
    return _TABLE[key] if capability == _HOPPER else _NOT_HOPPER.get(key, _TABLE[key])


def is_in_turn(block_m: int, capability: int = _HOPPER) -> bool:
    """Whether each term's product is awaited before the next one's signs are made.

    On Hopper, where a term in flight holds its signs in registers. Tiles of one variant have the
    registers, and are bound by the tensor cores: those shall not wait.
    """
    return capability == _HOPPER and block_m <= DECODE_TOKENS


def shape(num_tokens: int, num_variants: int, planes: int) -> tuple[int, int]:
    """How to cut a step into groups: as its groups together cost least, by a model.

    Args:
        num_tokens: T of the step.
        num_variants: the most distinct variants that it may hold.
        planes: the most of any layer.
    Returns:
        block_m, the most tokens of a group, and the most variants of one.
    Raises:
        ValueError: more planes than the kernel takes.
    """
    if planes > MAX_PLANES:
        raise ValueError(f"planes={planes}: the GPU kernel takes at most {MAX_PLANES}")
    planes = max(planes, 1)
    choices = [
        (block_m, min(width, max(num_variants, 1)))
        for block_m, most in MAX_TERMS.items()
        for width in (1, 2, 4, 8)
        if width * planes <= most
    ]

    def cost(choice: tuple[int, int]) -> float:
        block_m, width = choice
        groups = most_groups(num_tokens, num_variants, *choice)
        return groups * _group_cost(block_m, bucket(width * planes))

    return min(choices, key=cost)


def most_groups(num_tokens: int, num_variants: int, block_m: int, width: int) -> int:
    """Upper bound of the groups of tokens that are sorted by variant.

    Each block of `width` variants is cut into runs of block_m tokens, the last of them shorter.
    """
    blocks = max(1, -(-num_variants // width))
    return (num_tokens + blocks * (block_m - 1)) // block_m


def _group_cost(block_m: int, terms: int) -> float:
    """What a group costs per weight, in bytes from L2: the dearest of three (an H100's rates).

    Bytes of weights, signs and tokens; tensor operations, 180 of which take as long as a byte; and
    instructions, about 5 a byte, of which a weight and term take what the table above says.
    """
    # Tiles of 128 rows where the sums take the registers of twice as many warps.
    block_n = 64 if block_m * (1 + terms) < 256 else 128
    loads = 2 + terms / 8 + 2 * block_m / block_n
    return max(loads, 2 * block_m * (1 + terms) / 180, (2 + 1.3 * terms) / 5)
