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
        num_warps, num_stages: as Triton's; weights of num_stages - 1 tiles are on their way.
        per_sm: programs that fit a multiprocessor of an H100.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int = 2


# By (block_m, terms, bytes of an element). Two programs an SM hide each other's start and end; 128
# tokens need the registers of a whole SM. Smaller than 16 tokens is not worth an instance: the
# tensor cores take as long, and tokens that are not there are not loaded.
#
# Static figures for sm_90, split K, bfloat16: registers, and instructions of the main loop a weight
# (threads x instructions / weights of a tile). None spills, all use HGMMA.
_TABLE = {
    #                                        triton 3.6.0   3.9.0
    (16, 1, 2): Config(64, 128, 4, 4),
    (16, 2, 2): Config(64, 128, 4, 4),
    (16, 4, 2): Config(64, 128, 4, 3),
    (16, 8, 2): Config(64, 256, 4, 2),
    (32, 1, 2): Config(64, 128, 4, 4),
    (32, 2, 2): Config(64, 128, 4, 4),
    (32, 4, 2): Config(64, 256, 4, 2),
    (64, 1, 2): Config(64, 128, 4, 3),
    (64, 2, 2): Config(64, 128, 4, 3),
    (64, 4, 2): Config(128, 128, 8, 2, 1),
    (128, 1, 2): Config(128, 128, 8, 3, 1),
    # float32 has no tensor core that keeps its precision.
    (16, 1, 4): Config(32, 32, 4, 3),
    (16, 2, 4): Config(32, 32, 4, 3),
    (16, 4, 4): Config(32, 32, 4, 3),
    (16, 8, 4): Config(32, 32, 4, 3),
    (32, 1, 4): Config(32, 16, 4, 3),
    (32, 2, 4): Config(32, 16, 4, 3),
    (32, 4, 4): Config(32, 16, 4, 3),
    (64, 1, 4): Config(32, 16, 4, 3),
    (64, 2, 4): Config(32, 16, 4, 3),
    (64, 4, 4): Config(32, 16, 4, 3),
    (128, 1, 4): Config(32, 16, 8, 3),
}

# Most terms of a group, by its most tokens.
MAX_TERMS = {16: 8, 32: 4, 64: 4, 128: 1}
MAX_PLANES = 4
# Steps of more tokens have tiles: groups of one variant.
DECODE_TOKENS = 64


def bucket(num_terms: int) -> int:
    """The least compiled number of terms that holds `num_terms`: 0, 1, 2, 4 or 8."""
    return 0 if num_terms == 0 else 1 << (num_terms - 1).bit_length()


def config(block_m: int, terms: int, element_size: int) -> Config:
    """The tile shape of an instance of the kernel; without terms it is that of one."""
    return _TABLE[block_m, max(terms, 1), element_size]


def shape(num_tokens: int, num_variants: int, planes: int) -> tuple[int, int]:
    """How to cut a step into groups.

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
    if num_tokens > DECODE_TOKENS:
        return (128 if planes == 1 else 64), 1
    block_m = next(size for size in MAX_TERMS if num_tokens <= size)
    return block_m, max(1, min(num_variants, MAX_TERMS[block_m] // planes))
