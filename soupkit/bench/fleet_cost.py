"""Seconds of a replica's work: a roofline of GPUs, or what was measured of a server.

    step    (2 P + V S + KV) / (T x HBM), at least 2 P n / (T x flops)     n sequences, V variants
    prompt  as node_times.py has it: products, at least the weights once; a variant's built once

P numbers, S bytes of a variant's signs, KV bytes of the keys and values of n contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

from soupkit import headroom
from soupkit.node import GpuPlan
from soupkit.node_times import Speeds, linear_numbers, times
from soupkit.placement import ModelShape


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of a layout of GPUs (node.py): bytes and operations of one engine, and its speeds."""

    load_seconds: float
    install_seconds: float
    weights: float
    signs: float
    kv: float  # bytes of one sequence's keys and values
    numbers: float
    hbm: float
    flops: float

    def prompt(self, tokens: int, *, is_base: bool) -> float:
        products = 2 * self.numbers * tokens / self.flops
        base = max(products, self.weights / self.hbm)
        if is_base:
            return base
        twice = max(2 * products, (self.weights + self.signs) / self.hbm)
        return min(twice, base + (4 * self.numbers + self.signs) / self.hbm)

    def step(self, sequences: int, variants: int) -> float:
        moved = self.weights + variants * self.signs + sequences * self.kv
        return max(moved / self.hbm, 2 * self.numbers * sequences / self.flops)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a server: straight lines through what was measured."""

    load_seconds: float
    install_seconds: float
    prompt_seconds: float
    step_seconds: float
    sequence_seconds: float  # that a step takes more for each sequence

    def prompt(self, tokens: int, *, is_base: bool) -> float:
        return self.prompt_seconds

    def step(self, sequences: int, variants: int) -> float:
        return self.step_seconds + sequences * self.sequence_seconds


def roofline(shape: ModelShape, plan: GpuPlan, speeds: Speeds) -> Roofline:
    """Of one replica of a plan; sequences have half of their context on average."""
    found = times(shape, plan, speeds, prompt=1)
    ranks = plan.layout.tensor
    hbm, flops = ranks * speeds.hbm, ranks * speeds.flops
    token = headroom.kv_token_bytes(
        shape.layers, shape.kv_heads, head_width=shape.head_width, itemsize=2
    )
    weights = found.token_base.seconds * hbm
    return Roofline(
        load_seconds=found.disk.seconds,
        install_seconds=found.link.seconds,
        weights=weights,
        signs=found.token_one.seconds * hbm - weights,
        kv=token * plan.wish.context / 2,
        numbers=linear_numbers(shape),
        hbm=hbm,
        flops=flops,
    )
