"""Tile shapes of the fused linear, and how a batch is cut into groups.

The choices are static: made from compiled code (registers, spills, instructions, shared memory),
never timed on a GPU. Depends on nothing, so that the plan can be made without triton.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """How one instance of the kernel is compiled; block_n rows by block_k inputs a step."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (block_m, terms, bytes of an element)
_TABLE = {
    (8, 1, 2): Config(64, 128, 4, 4),
    (8, 2, 2): Config(64, 128, 4, 4),
    (8, 4, 2): Config(64, 128, 4, 3),
    (8, 8, 2): Config(64, 128, 4, 3),
    (16, 1, 2): Config(64, 128, 4, 4),
    (16, 2, 2): Config(64, 128, 4, 4),
    (16, 4, 2): Config(64, 128, 4, 3),
    (32, 1, 2): Config(128, 128, 8, 3),
    (32, 2, 2): Config(128, 128, 8, 3),
    (32, 4, 2): Config(128, 128, 8, 3),
    (64, 1, 2): Config(128, 128, 8, 3),
    (64, 2, 2): Config(128, 128, 8, 3),
    (64, 4, 2): Config(128, 128, 8, 3),
    (128, 1, 2): Config(128, 128, 8, 3),
    (128, 2, 2): Config(128, 128, 8, 3),
}
_WIDE = Config(32, 128, 4, 2)

# Most terms of a group, by block_m.
MAX_TERMS = {8: 8, 16: 4, 32: 4, 64: 4, 128: 2}
# Tokens of a step up to which groups mix variants.
DECODE_TOKENS = 64


def bucket(num_terms: int) -> int:
    """The least compiled number of terms that holds `num_terms`: 0, 1, 2, 4 or 8."""
    return 0 if num_terms == 0 else 1 << (num_terms - 1).bit_length()


def config(block_m: int, terms: int, element_size: int) -> Config:
    """The tile shape of an instance of the kernel."""
    if element_size == 4:
        return _WIDE
    return _TABLE[block_m, max(terms, 1), element_size]


def shape(num_tokens: int, num_variants: int, planes: int) -> tuple[int, int]:
    """How to cut a step into groups.

    Args:
        num_tokens: T of the step.
        num_variants: the most distinct variants that it may hold.
        planes: P of the layer's arena.
    Returns:
        block_m, the most tokens of a group, and the most variants of a group.
    Raises:
        ValueError: more planes than the kernel takes.
    """
    planes = max(planes, 1)
    if planes > 4:
        raise ValueError(f"planes={planes}: the GPU kernel takes at most 4")
    if num_tokens > DECODE_TOKENS:
        return (128 if planes == 1 else 64), 1
    block_m = next(size for size in (8, 16, 32, 64) if num_tokens <= size)
    return block_m, max(1, min(num_variants, MAX_TERMS[block_m] // planes))
