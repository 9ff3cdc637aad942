"""The rules of thumb of the design document beside what a plan finds: where they are off, and why.

    a delta      P / 8                 all          2 P + V P / 8, against V x 2 P of full copies
    cold start   0.2 s                 kernel       1.5 x the base's bandwidth

The document (an article on one 70B base with 14 variants on 8 x 80 GB) counts P = 70e9; its other
figures of that node are quoted as they are. Not here: its quality figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from soupkit.node import GpuPlan, Layout, variant_bytes, variant_items
from soupkit.node_times import Times
from soupkit.placement import ModelShape

COLD_START_SECONDS = 0.2
BANDWIDTH_RATIO = 1.5
FIRST_TOKEN_RATIO = (1.11, 1.22)
_HEADS = {"sign": "as bits", "raw": "in bf16", "same": "as the base has them"}


@dataclass(frozen=True, slots=True)
class Claim:
    """What the document says, what is so here, and why."""

    what: str
    said: str
    found: str
    why: str
    is_off: bool

    def to_json(self) -> dict[str, str | bool]:
        """As JSON values."""
        return {
            "what": self.what,
            "document": self.said,
            "found": self.found,
            "why": self.why,
            "is_off": self.is_off,
        }


def claims(
    shape: ModelShape, plan: GpuPlan, found: Times, *, parameters: float, prompt: int
) -> list[Claim]:
    """The document's figures for so many parameters beside those of a plan that can be."""
    return [
        *_sizes(shape, plan, parameters),
        _cold_start(shape, plan, found),
        *_speeds(plan, found, prompt),
        _cache(plan),
    ]


def _sizes(shape: ModelShape, plan: GpuPlan, parameters: float) -> list[Claim]:
    wish, base = plan.wish, 2 * shape.parameters
    whole = {
        item.what: item.total
        for item in variant_items(shape, Layout(1, 1, 1), heads="sign", is_lane=False)
    }
    one = variant_bytes(shape, heads=wish.heads)
    raw = 2 * shape.tables * shape.vocab * shape.hidden
    scales = whole["scales of linears"] + whole["scales of embedding, head"]
    total, copies = base + wish.variants * one, max(1, wish.variants) * base
    said = 2 * parameters + wish.variants * parameters / 8
    saved = 1 - said / (max(1, wish.variants) * 2 * parameters)
    return [
        Claim(
            "one delta", _gb(parameters / 8), _gb(one),
            f"linears {_gb(whole['bits of linears'])}, scales {_gb(scales)}, embedding and head "
            f"{_HEADS[wish.heads]}; P / 8 is bits alone, of every parameter",
            _is_off(one, parameters / 8),
        ),
        Claim(
            "scales", "not counted", _gb(scales),
            f"float32 a row: {scales / one:.1%} of a variant; a rank that has some columns of a "
            "matrix has the scales of all its rows",
            is_off=True,
        ),
        Claim(
            "embedding and head", "not named", _gb(raw),
            "a variant whose own are kept in bf16, as BitDelta does, takes that much more: "
            f"{raw / whole['bits of linears']:.0%} of the bits of its linears; "
            "--heads sign|raw|same",
            is_off=wish.heads == "raw",
        ),
        Claim(
            "base and variants", _gb(said), _gb(total),
            f"{_gb(base)} + {wish.variants} x {_gb(one)}; without key-value cache ("
            f"{_gb(_all(plan, 'key-value cache'))}) and room to work in, which the GPUs hold too",
            _is_off(total, said),
        ),
        Claim(
            "saved against full copies", f"{saved:.1%}", f"{1 - total / copies:.1%}",
            f"of {_gb(copies)}; of memory for weights only", _is_off(total / copies, 1 - saved),
        ),
    ]  # fmt: skip


def _cold_start(shape: ModelShape, plan: GpuPlan, found: Times) -> Claim:
    one = variant_bytes(shape, heads=plan.wish.heads)
    seconds = found.disk.seconds + found.link.seconds
    return Claim(
        "cold start", f"{COLD_START_SECONDS * 1e3:.0f} ms", f"{seconds * 1e3:.0f} ms",
        f"{COLD_START_SECONDS:g} s is {_gb(one / COLD_START_SECONDS)}/s: several disks, or host "
        f"memory, from where it is {found.link.seconds * 1e3:.0f} ms",
        seconds > COLD_START_SECONDS,
    )  # fmt: skip


def _speeds(plan: GpuPlan, found: Times, prompt: int) -> list[Claim]:
    base, most = found.token_base.seconds, max(1, plan.wish.variants)
    one, every = found.token_one.seconds / base, found.token_all.seconds / base
    first = found.first_variant.seconds / found.first_base.seconds
    low, high = FIRST_TOKEN_RATIO
    return [
        Claim(
            "bandwidth of the fused kernel", f"{BANDWIDTH_RATIO}x", f"{one:.2f}x to {every:.2f}x",
            f"1 + V / 16 for V variants in a batch: {most} of them at most",
            every > BANDWIDTH_RATIO,
        ),
        Claim(
            "first token over the base's", f"{low}x to {high}x", f"{first:.2f}x",
            f"the least at {prompt} tokens of prompt; 1.06x while they are few, and again from "
            "several thousand on, where building the weights once is small beside the products",
            not first <= high,
        ),
    ]  # fmt: skip


def _cache(plan: GpuPlan) -> Claim:
    wish = plan.wish
    found = f"{plan.resident} of {wish.variants} resident"
    return Claim(
        "what stays resident", "6 pinned, the others in turn", found,
        f"{plan.slots} slots of {_gb(plan.slot_bytes)} on each GPU of {plan.layout}; eviction is "
        "for more variants, smaller GPUs or a larger key-value cache",
        plan.resident == wish.variants,
    )  # fmt: skip


def _all(plan: GpuPlan, what: str) -> int:
    """Bytes of an item on all GPUs."""
    layout = plan.layout
    gpus = layout.replicas * layout.tensor * layout.pipeline
    return gpus * sum(item.total for item in plan.items if item.what == what)


def _is_off(found: float, said: float) -> bool:
    return not abs(found - said) <= 0.005 * said


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.3g} MB"
