"""How long a layer must take, from the bytes that it moves: a model, not a measurement.

    bytes = (2 + V / 8) N K + 4 V N + 2 M (N + K)          time >= bytes / bandwidth of memory

of M tokens and V one-plane variants of a 16-bit linear [N, K]. That a program loads each weight
and each sign once is checked on compiled code (kernel_static.py). Sums of split K stay in L2; more
terms than a group takes are more groups, which find the weights there.
"""

from __future__ import annotations

from soupkit.bench.rows import Row

# Memory bandwidth, bytes a second (data sheets).
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
# Linears of Llama 8B and 70B; a square one to compare with.
SHAPES = ((4096, 4096), (14336, 4096), (8192, 28672))
VARIANTS = (0, 1, 2, 4, 8, 16)


def layer_bytes(out: int, width: int, *, variants: int, tokens: int) -> int:
    """Bytes that a 16-bit layer [out, width] moves to and from HBM (LANE rows: whole 128s)."""
    rows_bytes = 2 * width + variants * 16 * -(-width // 128) + 4 * variants
    return out * rows_bytes + 2 * tokens * (width + out)


def rows(*, tokens: int = 1) -> list[Row]:
    """The least time of each shape, chip and number of variants; the ratio is to the base alone."""
    found = []
    for (out, width), chip in ((s, c) for s in SHAPES for c in BANDWIDTH):
        base = layer_bytes(out, width, variants=0, tokens=tokens)
        for variants in VARIANTS:
            total = layer_bytes(out, width, variants=variants, tokens=tokens)
            found.append(
                Row(
                    name=f"{out}x{width} bf16 M={tokens} V={variants} {chip} (model)",
                    value=total / BANDWIDTH[chip] * 1e6,
                    unit="us",
                    baseline="base alone (model)",
                    ratio=total / base,
                    low=total / base,
                    high=total / base,
                )
            )
    return found
