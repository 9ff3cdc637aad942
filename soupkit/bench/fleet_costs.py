"""Seconds of a simulated replica's acts, from the bytes and operations of the plan of its node.

    iteration = max((2 P + V S + R C kv) / (T HBM), 2 P_linear (R + n) / (T flops)) + own
    own       = for prompts of variants the lesser of their products again and of
                (4 P_linear + S) / (T HBM) for each such variant     its weights built and read once

R sequences that get their next token, of C tokens each; n tokens of prompt; V variants in the
batch; P, S and T as in node_times.py, whose figures these are. Least times: what GPUs say to each
other, attention's products and starting kernels are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from soupkit import headroom
from soupkit.node import GpuPlan, variant_bytes
from soupkit.node_times import Speeds, linear_numbers
from soupkit.placement import ModelShape


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one prompt in a batch: its tokens, and whose they are (None: the base's)."""

    tokens: int
    variant: str | None


class Costs(Protocol):
    """What takes how long."""

    def iteration(self, decoding: int, variants: int, prompts: Sequence[Piece]) -> float:
        """Of a batch: one more token for `decoding` sequences, and pieces of prompts."""

    def load(self, num_bytes: int) -> float:
        """From disk, of a variant's file."""

    def install(self, num_bytes: int) -> float:
        """From host memory to its slot."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A replica of a node; see the module. context: tokens of a sequence in the mean."""

    shape: ModelShape
    plan: GpuPlan
    speeds: Speeds
    context: int

    @property
    def file_bytes(self) -> int:
        return variant_bytes(self.shape, heads=self.plan.wish.heads)

    def iteration(self, decoding: int, variants: int, prompts: Sequence[Piece]) -> float:
        shape, ranks = self.shape, self.plan.layout.tensor
        hbm, flops = ranks * self.speeds.hbm, ranks * self.speeds.flops
        linear, head = linear_numbers(shape), shape.vocab * shape.hidden
        heads = {"sign": head / 8, "raw": 2 * head, "same": 0}[self.plan.wish.heads]
        signs = linear / 8 + heads
        kv = headroom.kv_token_bytes(
            shape.layers, shape.kv_heads, head_width=shape.head_width, itemsize=2
        )
        read = 2 * (linear + head) + variants * signs + decoding * self.context * kv
        tokens = sum(piece.tokens for piece in prompts)
        seconds = max(read / hbm, 2 * linear * (decoding + tokens) / flops)
        own: dict[str, int] = {}
        for piece in prompts:
            if piece.variant is not None:
                own[piece.variant] = own.get(piece.variant, 0) + piece.tokens
        built = (4 * linear + signs) / hbm
        return seconds + sum(min(2 * linear * n / flops, built) for n in own.values())

    def load(self, num_bytes: int) -> float:
        return num_bytes / self.speeds.disk

    def install(self, num_bytes: int) -> float:
        # Every GPU of the replica takes its part at once.
        return self.plan.slot_bytes / self.speeds.link
