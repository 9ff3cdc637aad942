"""What fits into a memory: the bytes of a Llama-like base, its 1-bit variants and LoRA adapters.

    base      2 P                                         bf16
    variant   sum over matrices of N ceil(K / 8) + 4 N    bits, float32 scales; norms 2 an entry
    adapter   sum over targets of b r (N + K)             b bytes a number

N x K are a matrix's rows and columns, P counts every unique parameter. Not here: several GPUs, and
what an engine holds beside the weights (node.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from soupkit.checks import check_count

Targets = Literal["attention", "all-linear"]

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of equal layers. kv_heads: of keys and values. head_width: of all heads."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    is_tied: bool

    def linears(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of one layer's linear weights."""
        hidden, inner = self.hidden, self.intermediate
        width, kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q_proj": (width, hidden),
            "k_proj": (kv_width, hidden),
            "v_proj": (kv_width, hidden),
            "o_proj": (hidden, width),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    @property
    def tables(self) -> int:
        """Matrices of the vocabulary's size: the embedding, and the head unless it is the same."""
        return 1 if self.is_tied else 2

    def matrices(self) -> list[tuple[int, int, int]]:
        """(count, rows, columns) of every unique matrix of the model."""
        layers = [(self.layers, *shape) for shape in self.linears().values()]
        return [*layers, (self.tables, self.vocab, self.hidden)]

    @property
    def norms(self) -> int:
        """Entries of all norms."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All unique parameters."""
        return sum(count * rows * columns for count, rows, columns in self.matrices()) + self.norms


# Llama's published configurations, one a size.
KNOWN = (
    ModelShape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256, is_tied=True),
    ModelShape("Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128, 128256, is_tied=True),
    ModelShape("Llama-2-7B", 4096, 11008, 32, 32, 32, 128, 32000, is_tied=False),
    ModelShape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, is_tied=False),
    ModelShape("Llama-2-13B", 5120, 13824, 40, 40, 40, 128, 32000, is_tied=False),
    ModelShape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, is_tied=False),
)


def shape_for(parameters: float) -> ModelShape:
    """The known shape whose number of parameters is nearest, by ratio.

    Raises:
        ValueError: no positive finite number.
    """
    if not (math.isfinite(parameters) and parameters > 0):
        raise ValueError(f"params={parameters}: give a number of parameters, as in 7e9")
    return min(KNOWN, key=lambda shape: abs(math.log(shape.parameters / parameters)))


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a model's config.json describes.

    Raises:
        ValueError: it lacks what a Llama-like config has, or a count in it is none.
    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        shape = ModelShape(
            name=name,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )
        for one in fields(shape):
            if one.name not in ("name", "is_tied"):
                check_count(one.name, getattr(shape, one.name), least=1)
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"{shape.heads} heads do not divide by {shape.kv_heads} key-value heads"
            )
        return shape
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{name}: its config is no Llama-like one ({error}); use --params"
        ) from None


@dataclass(frozen=True, slots=True)
class Item:
    """Things of one kind. nbytes: of one of them. formula: how that comes about."""

    what: str
    count: int
    nbytes: int
    formula: str

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.nbytes

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "what": self.what,
            "count": self.count,
            "bytes_each": self.nbytes,
            "bytes": self.total,
            "formula": self.formula,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to lie in one memory.

    Args:
        budget_bytes: of it; None: not given.
        more: how many of each kind that is asked for fit beside the base, if nothing else did.
    """

    shape: ModelShape
    items: tuple[Item, ...]
    budget_bytes: int | None
    more: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(item.total for item in self.items)

    @property
    def fits(self) -> bool | None:
        """Whether everything lies within the budget; None without one."""
        return None if self.budget_bytes is None else self.total <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "shape": self.shape.name,
            "parameters": self.shape.parameters,
            "items": [item.to_json() for item in self.items],
            "bytes": self.total,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "most": dict(self.more),
        }


def plan(
    shape: ModelShape,
    *,
    variants: int = 0,
    adapters: int = 0,
    rank: int = 32,
    targets: Targets = "attention",
    itemsize: int = 2,
    budget_bytes: int | None = None,
) -> Plan:
    """What a base, its variants and adapters take.

    Args:
        variants: 1-bit variants, every matrix of which changed. adapters: LoRA adapters of one slot
            each, of this rank, on these targets, itemsize bytes a number.
    Raises:
        ValueError: a count that is none.
    """
    check_count("variants", variants, least=0)
    check_count("adapters", adapters, least=0)
    check_count("rank", rank, least=1)
    items = [Item("base, bf16", 1, 2 * shape.parameters, f"2 x {shape.parameters:,}")]
    if variants:
        items.append(_variant(shape, variants))
    if adapters:
        items.append(_adapter(shape, adapters, rank, targets, itemsize))
    room = 0 if budget_bytes is None else max(0, budget_bytes - items[0].total)
    more = {} if budget_bytes is None else {one.what: room // one.nbytes for one in items[1:]}
    return Plan(shape, tuple(items), budget_bytes, more)


def _variant(shape: ModelShape, count: int) -> Item:
    signs = sum(n * rows * -(-columns // 8) for n, rows, columns in shape.matrices())
    scales = sum(4 * n * rows for n, rows, _ in shape.matrices())
    norms = 2 * shape.norms
    return Item(
        "1-bit variant", count, signs + scales + norms,
        f"signs {signs:,} + scales {scales:,} + norms {norms:,}",
    )  # fmt: skip


def _adapter(shape: ModelShape, count: int, rank: int, targets: Targets, itemsize: int) -> Item:
    linears = shape.linears()
    names = _ATTENTION if targets == "attention" else tuple(linears)
    sides = sum(sum(linears[name]) for name in names)
    return Item(
        f"LoRA adapter, rank {rank}, {targets}", count, itemsize * rank * sides * shape.layers,
        f"{itemsize} x {rank} x {sides:,} x {shape.layers} layers",
    )  # fmt: skip
