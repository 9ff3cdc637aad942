"""What the check of the Triton layers is run on: layers and batches, on a GPU or interpreted.

Shapes of Llama and odd ones, every encoding of a variant and mixtures, each of the plan's ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


class Encoding(NamedTuple):
    """How a variant is stored; planes 0 and rank 0: an empty slot."""

    planes: int = 1
    has_columns: bool = False
    rank: int = 0


ONE, TWO, FOUR, EMPTY = Encoding(), Encoding(2), Encoding(4), Encoding(0)
COLUMNS, LOW_RANK, ALL = Encoding(1, True), Encoding(0, rank=8), Encoding(2, True, 5)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and a batch.

    Args:
        slots: the encoding of each variant.
        of: the distinct variants in the batch: "mixed" the base and all slots in turn, "one" the
            first, "base", "outside" also numbers that no slot has (NaN, on a GPU).
        is_lane: False: what the Triton kernels do not take, and torch (on a CPU, C) does.
    """

    out_features: int
    in_features: int
    tokens: int
    slots: tuple[Encoding, ...] = (ONE,)
    of: Literal["mixed", "one", "base", "outside"] = "mixed"
    dtype: torch.dtype = BF16
    what: Literal["linear", "add", "embedding"] = "linear"
    has_bias: bool = False
    is_lane: bool = True

    @property
    def name(self) -> str:
        """As in "linear 4096x4096 bf16 M=16 mixed of 4 bias"."""
        kinds = "+".join(
            f"{one.planes}{'c' * one.has_columns}{f'r{one.rank}' * (one.rank > 0)}"
            for one in dict.fromkeys(self.slots)
        )
        shape = f"{self.out_features}x{self.in_features} {SHORT[self.dtype]} M={self.tokens}"
        bias = " bias" if self.has_bias else ""
        path = "" if self.is_lane else " without triton"
        return f"{self.what} {shape} {self.of} of {len(self.slots)}: {kinds}{bias}{path}"


def gpu_cases() -> list[Case]:
    """Of every path, the likeliest to break first: a budget may end before the list."""
    four, llama = (ONE,) * 4, (4096, 4096)
    decode = [Case(*llama, tokens, four) for tokens in (1, 2, 5, 16, 17, 33, 64)]
    prefill = [Case(*llama, tokens, (ONE,) * 3) for tokens in (65, 130, 200, 1300)]
    encodings = [
        Case(1000, 2048, 24, slots, dtype=dtype, has_bias=True)
        for dtype in (BF16, FP16, FP32)
        for slots in ((TWO,), (COLUMNS, ONE), (LOW_RANK,), (ALL, FOUR, EMPTY, LOW_RANK))
    ]
    odd = [
        Case(out, width, tokens, four, dtype=dtype)
        for out, width, tokens in ((77, 272, 3), (129, 4112, 40), (1, 16, 1), (33, 1003, 9))
        for dtype in (BF16, FP32)
    ]
    return [
        *decode,
        Case(*llama, 16, four, "base"),
        Case(*llama, 24, four, "outside"),
        *prefill,
        Case(28672, 4096, 16, (ONE,) * 16),
        Case(4096, 14336, 8, (ONE,) * 8, has_bias=True),
        Case(*llama, 16, four, what="add"),
        Case(1000, 2048, 500, (ONE,), "one", what="add"),
        Case(152064, 4096, 24, (ONE, COLUMNS, EMPTY), what="embedding"),
        Case(152064, 4096, 5, (ONE, ONE)),
        *encodings,
        Case(1000, 2048, 24, (ALL, ONE), what="add"),
        Case(1000, 2048, 24, (ALL, LOW_RANK, FOUR), what="embedding"),
        *odd,
        Case(33, 1003, 9, four, is_lane=False),
        Case(1000, 2048, 70, (ALL, EMPTY, LOW_RANK), has_bias=True, is_lane=False),
        Case(14336, 4096, 500, (ONE,), "one"),
        Case(1000, 2048, 500, (ALL,), "one"),
        Case(*llama, 300, four, "base"),
        Case(*llama, 900, (ONE, TWO, ALL), dtype=FP16),
        Case(1000, 2048, 200, (ONE, ALL), dtype=FP32),
    ]


def tiny_cases() -> list[Case]:
    """For the interpreter, which is slow, and computes wrongly in bfloat16 by itself."""
    return [
        Case(40, 144, 3, (ONE, ONE), dtype=FP16, has_bias=True),
        Case(9, 256, 11, (ALL, EMPTY, LOW_RANK), dtype=FP32),
        Case(17, 32, 4, (COLUMNS, TWO), dtype=FP16, what="add"),
        Case(17, 48, 6, (ALL, ONE), dtype=FP32, what="embedding"),
        Case(5, 16, 2, (ONE,), "base", dtype=FP16),
        Case(24, 128, 70, (ONE, ONE), dtype=FP16),
        Case(24, 128, 400, (ONE,), "one", dtype=FP32),
        Case(9, 20, 5, (ALL, ONE), dtype=FP32, is_lane=False),
    ]
