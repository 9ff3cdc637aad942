"""How long a node takes, from the bytes that it moves: least times of a model, not measured.

    P numbers of the linears and the head, S bytes of a variant's signs, T tensor-parallel ranks

    load from disk   bytes of a variant / disk              one disk for the whole node
    host to GPU      bytes of its part / link               all GPUs of a replica at once
    token            (2 P + V S) / (T x HBM)                V variants in the batch; weights only
    first token      2 P n / (T x flops), at least 2 P / (T x HBM)       n tokens of prompt, base
                     for a variant the lesser of twice the products and of base + (4 P + S) / HBM,
                     its weights built once and read once

Not here: what GPUs say to each other, attention, starting kernels, queues, hashing what was read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from soupkit.checks import check_count
from soupkit.node import GpuPlan, variant_bytes
from soupkit.placement import ModelShape


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second of the disk, of each GPU's link to host memory and of its own memory, and its
    operations a second in bf16. Defaults: a good NVMe disk, PCIe 5 x16, the data sheet of an H100.
    """

    disk: float = 7e9
    link: float = 50e9
    hbm: float = 3.35e12
    flops: float = 989e12

    def __post_init__(self) -> None:
        for name in ("disk", "link", "hbm", "flops"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: needs a finite number above 0")


@dataclass(frozen=True, slots=True)
class Figure:
    """One time, in seconds, and how it comes about."""

    what: str
    seconds: float
    formula: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"what": self.what, "seconds": self.seconds, "formula": self.formula}


@dataclass(frozen=True, slots=True)
class Times:
    """Of one layout."""

    disk: Figure
    link: Figure
    first_base: Figure
    first_variant: Figure
    token_base: Figure
    token_one: Figure
    token_all: Figure

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All of them, and the first tokens of variants that are not resident."""
        first, link, disk = self.first_variant, self.link, self.disk
        from_host = Figure(
            "first token, variant in host memory", first.seconds + link.seconds, "host + resident"
        )
        cold = Figure(
            "first token, variant on disk",
            first.seconds + link.seconds + disk.seconds,
            "disk + host + resident",
        )
        tokens = (self.token_base, self.token_one, self.token_all)
        return (disk, link, self.first_base, first, from_host, cold, *tokens)


def times(shape: ModelShape, plan: GpuPlan, speeds: Speeds, *, prompt: int) -> Times:
    """Of a layout that can be. prompt: tokens before the first one that is generated."""
    check_count("prompt", prompt, least=1)
    ranks, wish = plan.layout.tensor, plan.wish
    file_bytes = variant_bytes(shape, heads=wish.heads)
    num_linear, num_head = linear_numbers(shape), shape.vocab * shape.hidden
    weights = 2 * (num_linear + num_head)
    signs = num_linear / 8 + {"sign": num_head / 8, "raw": 2 * num_head, "same": 0}[wish.heads]
    hbm, flops = ranks * speeds.hbm, ranks * speeds.flops
    products = 2 * num_linear * prompt / flops
    base = max(products, weights / hbm)
    twice = max(2 * products, (weights + signs) / hbm)
    built = base + (4 * num_linear + signs) / hbm
    way = f"2 x 2 x {_g(num_linear)} x {prompt} / (TP x flops)"
    if 2 * products < (weights + signs) / hbm:
        way = f"({_g(weights)} + {_g(signs)}) / (TP x HBM)"
    if built < twice:
        way = f"base + (4 x {_g(num_linear)} + {_g(signs)}) / (TP x HBM)"
    most = max(1, wish.variants)
    return Times(
        Figure("disk to host memory", file_bytes / speeds.disk, f"{_g(file_bytes)} / disk"),
        Figure(
            "host memory to the GPUs",
            plan.slot_bytes / speeds.link,
            f"{_g(plan.slot_bytes)} / link",
        ),
        Figure(
            f"first token, base, {prompt} tokens of prompt",
            base,
            f"2 x {_g(num_linear)} x {prompt} / (TP x flops)"
            if products >= weights / hbm
            else f"{_g(weights)} / (TP x HBM)",
        ),
        Figure("first token, variant resident", min(twice, built), way),
        Figure("token, base", weights / hbm, f"{_g(weights)} / (TP x HBM)"),
        Figure(
            "token, 1 variant in the batch",
            (weights + signs) / hbm,
            f"({_g(weights)} + {_g(signs)}) / (TP x HBM)",
        ),
        Figure(
            f"token, {most} variants in the batch",
            (weights + most * signs) / hbm,
            f"({_g(weights)} + {most} x {_g(signs)}) / (TP x HBM)",
        ),
    )  # fmt: skip


def linear_numbers(shape: ModelShape) -> int:
    """Numbers of all linears of the layers."""
    return shape.layers * sum(rows * columns for rows, columns in shape.linears().values())


def _g(value: float) -> str:
    return f"{value / 1e9:.2f}e9" if value >= 1e7 else f"{value:.3g}"
