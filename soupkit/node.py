"""What lies on each GPU of a node: base, 1-bit variants, key-value cache, room to work in.

    GPUs = replicas x tensor x pipeline                               every replica has the whole
    q k v gate up   [N / T, K] on each of T tensor-parallel ranks     scales cut with the rows
    o down          [N, K / T]                                        every rank has all scales
    embedding, head [V / T, K]; norms whole
    1 bit           N x 16 ceil(K / 128) + 4 N                        LANE order, float32 scales

Pipeline stages have layers / P each; the first has the embedding, the last the head. Memory beside
the base is shared as headroom.py says. Of unequal GPUs the fullest is counted. Not here: what the
GPUs say to each other, and how long anything takes (node_times.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from soupkit import headroom
from soupkit.checks import check_choice, check_count
from soupkit.placement import Item, ModelShape

Heads = Literal["sign", "raw", "same"]

_BY_COLUMNS = ("o_proj", "down_proj")
# Whole words of signs on every rank.
_SIGNS = 32
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """How the GPUs share the work."""

    replicas: int
    tensor: int
    pipeline: int

    def __str__(self) -> str:
        stages = f" x PP {self.pipeline}" if self.pipeline > 1 else ""
        return f"{self.replicas} x TP {self.tensor}{stages}"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be served by all replicas together.

    Args:
        heads: what a variant has for embedding and head: "sign", 1 bit each; "raw", its own in
            bf16; "same", the base's. context: tokens of each of `requests` at a time.
    """

    variants: int
    heads: Heads = "sign"
    context: int = 8192
    requests: int = 32

    def __post_init__(self) -> None:
        check_count("variants", self.variants, least=0)
        check_choice("heads", self.heads, ("sign", "raw", "same"))
        check_count("context", self.context, least=1)
        check_count("requests", self.requests, least=1)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """One GPU of a layout.

    Args:
        items: all that lies on it. slot_bytes: of one variant's part. slots: it has room for.
        kv_tokens: that its replica has room for. refusal: why the layout cannot be; "" if it can.
    """

    layout: Layout
    wish: Wish
    gpu_bytes: int
    items: tuple[Item, ...] = ()
    slot_bytes: int = 0
    slots: int = 0
    kv_tokens: int = 0
    refusal: str = ""

    @property
    def resident(self) -> int:
        """Variants that stay on the device; the others are loaded when they are asked for."""
        return min(self.wish.variants, self.slots)

    @property
    def kv_tokens_wanted(self) -> int:
        """Tokens of the requests of one replica."""
        return -(-self.wish.requests // self.layout.replicas) * self.wish.context

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(item.total for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether the base, every variant and every request have their place."""
        is_whole = self.resident == self.wish.variants and self.kv_tokens >= self.kv_tokens_wanted
        return not self.refusal and is_whole

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "replicas": self.layout.replicas,
            "tensor_parallel": self.layout.tensor,
            "pipeline_parallel": self.layout.pipeline,
            "refusal": self.refusal or None,
            "fits": self.fits,
            "items": [item.to_json() for item in self.items],
            "bytes": self.total,
            "gpu_bytes": self.gpu_bytes,
            "slot_bytes": self.slot_bytes,
            "cache_bytes": self.slots * self.slot_bytes,
            "resident": self.resident,
            "cold": self.wish.variants - self.resident,
            "kv_tokens": self.kv_tokens,
            "kv_tokens_wanted": self.kv_tokens_wanted,
        }


def layouts(gpus: int) -> list[Layout]:
    """Every layout of so many GPUs, the most replicas first, tensor before pipeline."""
    check_count("gpus", gpus, least=1)
    found = [
        Layout(gpus // (tensor * pipeline), tensor, pipeline)
        for tensor in range(1, gpus + 1)
        for pipeline in range(1, gpus // tensor + 1)
        if gpus % (tensor * pipeline) == 0
    ]
    return sorted(found, key=lambda one: (-one.replicas, one.pipeline))


def advised(plans: list[GpuPlan]) -> GpuPlan | None:
    """Of those that fit, the one with fewest pipeline stages, then most replicas: the least is said
    between GPUs. If none fits, the one that holds most variants, then most tokens; None if the base
    alone is too large for all.
    """
    able = [one for one in plans if one.slots or (one.kv_tokens and not one.wish.variants)]
    fitting = [one for one in able if one.fits]
    if fitting:
        return min(fitting, key=lambda one: (one.layout.pipeline, -one.layout.replicas))
    return max(able, key=lambda one: (one.resident, one.kv_tokens), default=None)


def plan_gpu(shape: ModelShape, layout: Layout, wish: Wish, *, gpu_bytes: int) -> GpuPlan:
    """What one GPU of a layout holds; the plan says why if it cannot be."""
    refusal = _refusal(shape, layout)
    base = () if refusal else base_items(shape, layout)
    free = gpu_bytes - sum(item.total for item in base)
    if not refusal and free <= 0:
        refusal = f"the base alone takes {gpu_bytes - free:,} bytes of {gpu_bytes:,}"
    if refusal:
        return GpuPlan(layout, wish, gpu_bytes, items=base, refusal=refusal)
    variant = variant_items(shape, layout, heads=wish.heads)
    slot = sum(item.total for item in variant)
    token, mask = _token_bytes(shape, layout)
    empty = GpuPlan(layout, wish, gpu_bytes)
    wanted = empty.kv_tokens_wanted
    slots = 0
    if wish.variants:
        cache = headroom.share_of_variants(
            free, slot_bytes=slot, num_variants=wish.variants, kv_bytes=wanted * (token + mask)
        )
        slots = cache // slot
    room = headroom.share_of_tokens(free, slots * slot)
    tokens = min(wanted, room // (token + mask))
    # One of each variant's items, times the variants that are there.
    held = min(slots, wish.variants)
    items = [Item(i.what, held * i.count, i.nbytes, i.formula) for i in variant if held]
    if slots > held:
        items.append(Item("free slots", slots - held, slot, f"{slot:,} a slot"))
    context = f"{token:,} a token: 2 x layers x kv heads x width x 2"
    items += [
        Item("key-value cache", tokens, token, context),
        Item("masks and expanded heads", tokens, mask, f"{mask:,} a token"),
        Item("room to work in", 1, (free - slots * slot) - room, "1/5 of what the rest leaves"),
    ]
    return GpuPlan(layout, wish, gpu_bytes, (*base, *items), slot, slots, tokens)


def base_items(shape: ModelShape, layout: Layout) -> tuple[Item, ...]:
    """The base's part on one GPU, in bf16."""
    layers, tables = _stage(shape, layout)
    numbers = sum(rows * columns for rows, columns in _cut(shape, layout.tensor).values())
    rows, norms = -(-shape.vocab // layout.tensor), _norms(shape, layers)
    return (
        Item(
            "base linears", 1, 2 * layers * numbers, f"2 x {layers} layers x {numbers:,}"
        ),
        Item(
            "base embedding, head", tables, 2 * rows * shape.hidden, f"2 x {rows} x {shape.hidden}"
        ),
        Item("base norms", 1, 2 * norms, f"2 x {norms:,}"),
    )  # fmt: skip


def variant_items(
    shape: ModelShape, layout: Layout, *, heads: Heads, is_lane: bool = True
) -> tuple[Item, ...]:
    """A variant's part on one GPU. is_lane: as on a GPU; else as on disk."""
    layers, tables = _stage(shape, layout)
    cut = _cut(shape, layout.tensor).values()
    bits = layers * sum(rows * _row_bytes(columns, is_lane) for rows, columns in cut)
    scales = layers * sum(rows for rows, _ in cut)
    row = "16 ceil(K / 128)" if is_lane else "ceil(K / 8)"
    found = [
        Item("bits of linears", 1, bits, f"{layers} layers x sum of N x {row}"),
        Item("scales of linears", 1, 4 * scales, f"float32 of {scales:,} rows"),
    ]
    words = -(-shape.vocab // layout.tensor)
    if heads == "sign":
        nbytes = words * _row_bytes(shape.hidden, is_lane)
        found += [
            Item("bits of embedding, head", tables, nbytes, f"{words} x {nbytes // words}"),
            Item("scales of embedding, head", tables, 4 * words, f"float32 of {words:,} rows"),
        ]
    if heads == "raw":
        nbytes = 2 * words * shape.hidden
        found.append(
            Item("own embedding, head, bf16", tables, nbytes, f"2 x {words} x {shape.hidden}")
        )
    norms = _norms(shape, layers)
    return (*found, Item("own norms", 1, 2 * norms, f"2 x {norms:,}"))


def variant_bytes(shape: ModelShape, *, heads: Heads) -> int:
    """Bytes of a variant's file."""
    whole = variant_items(shape, Layout(1, 1, 1), heads=heads, is_lane=False)
    return sum(item.total for item in whole)


def _refusal(shape: ModelShape, layout: Layout) -> str:
    """Why a model cannot be shared like this; "" if it can."""
    ranks, kv_heads = layout.tensor, shape.kv_heads
    if shape.heads % ranks:
        return f"{shape.heads} heads do not divide by TP {ranks}"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} key-value heads and TP {ranks}: neither divides the other"
    for name in _BY_COLUMNS:
        columns = shape.linears()[name][1]
        if columns % (ranks * _SIGNS):
            return f"{name}: {columns} columns / TP {ranks} is no multiple of {_SIGNS} signs"
    if shape.layers % layout.pipeline:
        return f"{shape.layers} layers do not divide by PP {layout.pipeline}"
    return ""


def kv_copies(shape: ModelShape, layout: Layout) -> int:
    """On how many GPUs of a replica each key-value head lies: more than one if there are fewer
    heads than ranks.
    """
    return max(1, layout.tensor // shape.kv_heads)


def _cut(shape: ModelShape, ranks: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of one layer's linears on one rank."""
    found = {}
    for name, (rows, columns) in shape.linears().items():
        if name in ("k_proj", "v_proj"):
            found[name] = (-(-shape.kv_heads // ranks) * shape.head_width, columns)
        elif name in _BY_COLUMNS:
            found[name] = (rows, columns // ranks)
        else:
            found[name] = (rows // ranks, columns)
    return found


def _stage(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Layers, and matrices of the vocabulary's size, of the fullest stage."""
    is_split = layout.pipeline > 1
    return shape.layers // layout.pipeline, 1 if is_split else shape.tables


def _norms(shape: ModelShape, layers: int) -> int:
    return (2 * layers + 1) * shape.hidden


def _row_bytes(columns: int, is_lane: bool) -> int:
    return 16 * -(-columns // _BLOCK) if is_lane else -(-columns // 8)


def _token_bytes(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Of the key-value cache, and of what goes with it."""
    ranks, size = layout.tensor, {"head_width": shape.head_width, "itemsize": 2}
    layers, kv_heads = shape.layers // layout.pipeline, -(-shape.kv_heads // ranks)
    mask = headroom.mask_token_bytes(
        shape.heads // ranks, **size, batch_tokens=headroom.BATCH_TOKENS["cuda"]
    )
    return headroom.kv_token_bytes(layers, kv_heads, **size), mask
