"""Which tensors of an adapter's weights file make up which module, checked against its config.

    [base_model.model.]MODULE.lora_A[.ADAPTER].weight,     the same for lora_B
    [base_model.model.]MODULE.lora_embedding_A[.ADAPTER],  the same for lora_embedding_B

Everything else in the file is refused by name: an adapter that is merged without a part of it would
be another one. Works on the header alone. Not here: values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from soupkit.adapter_config import MERGED, AdapterConfig
from soupkit.delta import canonical_name
from soupkit.factored import Pair
from soupkit.tensorfile import TensorSpec

ModuleKind = Literal["linear", "conv", "embedding", "expert"]
PREFIX = "base_model.model."

_LINEAR = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
_EMBEDDING = re.compile(r"(.+)\.lora_embedding_([AB])(?:\.([^.]+))?")
_BASE_LAYER = ".base_layer"
# Bare parameters of one module whose order is tried out.
_MAX_PARAMETERS = 6

# Parts of names of tensors that are no factors: what they are, and the remedy.
_ODD = {
    ".lora_magnitude_vector": ("DoRA's magnitudes", f"train with plain LoRA, or {MERGED}"),
    ".lora_down.": ("a factor in kohya's format", "convert it to a PEFT adapter"),
    ".lora_up.": ("a factor in kohya's format", "convert it to a PEFT adapter"),
    ".base_layer.weight": (
        "a copy of the base's own weight, which PEFT adds for embeddings",
        "save the adapter with save_pretrained(..., save_embedding_layers=False)",
    ),
    ".trainable_tokens": ("trained rows of an embedding", f"train without them, or {MERGED}"),
    ".bias": ("a trained bias", f"train with bias='none', or {MERGED}"),
    ".lora_": ("no factor of plain LoRA", f"train with plain LoRA, or {MERGED}"),
}
_WHOLE = (
    "no LoRA factor but a whole tensor (modules_to_save, or an embedding that was resized)",
    f"train without it, or {MERGED}",
)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One adapted module.

    Args:
        kind, pair: delta = scale * b @ a is
            "linear"     [out, in], also where the base keeps [in, out] (transformers' Conv1D);
            "conv"       [out, in * kernel];
            "embedding"  [rows, columns], as the table itself: b [rows, r], a [r, columns];
            "expert"     [out, in] of one expert of a bare parameter.
        kernel: axes of a convolution's kernel, one to three; () of all else.
    Raises:
        ValueError: a kernel that does not fit.
    """

    kind: ModuleKind
    pair: Pair
    kernel: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the kernel."""
        fits = 1 <= len(self.kernel) <= 3 if self.kind == "conv" else not self.kernel
        if not fits or self.pair.shape[1] % math.prod(self.kernel):
            raise ValueError(
                f"kernel={self.kernel} does not fit a delta {self.pair.shape} of kind "
                f"{self.kind!r}: give one to three axes for 'conv', () for all else"
            )


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two stored factors that pair: their names, the rows of A, and the delta's kind and shape."""

    a: str
    b: str
    rows: int
    kind: ModuleKind
    shape: tuple[int, int]
    kernel: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Two stored factors.

    Args:
        module: name in the base model; of bare parameters with the ".base_layer" that number them.
        a, b: names in the file.
        shape: [out, in] of the delta, of one expert.
        experts: how many; None where it is no bare parameter.
    """

    module: str
    kind: ModuleKind
    a: str
    b: str
    shape: tuple[int, int]
    rank: int
    scale: float
    kernel: tuple[int, ...]
    experts: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the module, or of each expert's."""
        if self.experts is None:
            return (self.module,)
        return tuple(f"{self.module}[{expert}]" for expert in range(self.experts))

    @property
    def is_named(self) -> bool:
        """Whether the file names both as PEFT does."""
        return (self.a, self.b) == stored_names(self.kind, self.module)


def stored_names(kind: ModuleKind, module: str) -> tuple[str, str]:
    """PEFT's names of A and B in the file."""
    part, ending = ("lora_embedding", "") if kind == "embedding" else ("lora", ".weight")
    return f"{PREFIX}{module}.{part}_A{ending}", f"{PREFIX}{module}.{part}_B{ending}"


def owner_of(module: str) -> str:
    """The module that bare parameters belong to, without the ".base_layer" that number them."""
    while module.endswith(_BASE_LAYER):
        module = module.removesuffix(_BASE_LAYER)
    return module


def is_module_name(name: str) -> bool:
    """Whether a module may have this name; experts have numbers of ours, "up[3]", behind theirs."""
    has_parts = all(name.split(".")) and not name.endswith("]")
    return has_parts and ".lora_" not in name and canonical_name(name) == name


def units_of(config: AdapterConfig, specs: Mapping[str, TensorSpec]) -> tuple[Unit, ...]:
    """The adapted modules of a file with these tensors, sorted by name.

    Raises:
        ValueError: a tensor that is no factor, has no partner or does not fit it or the config; no
            tensor at all.
        CheckpointError: as AdapterConfig.rank_and_scale.
    """
    parts: dict[tuple[str, bool], dict[str, str]] = {}
    adapters: dict[str | None, str] = {}
    for stored in specs:
        module, is_embedding, side, adapter = _parsed(stored)
        adapters[adapter] = stored
        if len(adapters) > 1:
            raise ValueError(
                f"{' and '.join(adapters.values())} are of several adapters: save each with "
                "save_pretrained(..., selected_adapters=[NAME])"
            )
        sides = parts.setdefault((module, is_embedding), {})
        if side in sides:
            raise ValueError(f"{sides[side]} and {stored} are one tensor's two names: remove one")
        sides[side] = stored
    for module, is_embedding in parts:
        if not is_module_name(module):
            stored = next(iter(parts[module, is_embedding].values()))
            raise ValueError(f"{stored!r} names no module that a base can have: save it anew")
    if not parts:
        raise ValueError("holds no tensor: an empty adapter cannot be merged; train it first")
    for module, is_embedding in parts:
        if is_embedding and (module, False) in parts:
            raise ValueError(f"{module} is adapted both as a linear layer and as an embedding")
    owners: dict[str, dict[str, _Pair]] = {}
    for (module, _), sides in sorted(parts.items()):
        owners.setdefault(owner_of(module), {})[module] = _checked_pair(specs, sides)
    found: list[Unit] = []
    for owner, levels in owners.items():
        keys = config.parameters_of(owner)
        if keys:
            found += _bare(config, owner, keys, levels)
        else:
            found += [_whole(config, module, pair) for module, pair in levels.items()]
    return tuple(sorted(found, key=lambda unit: unit.module))


def _parsed(stored: str) -> tuple[str, bool, str, str | None]:
    """Module, whether it is an embedding, "A" or "B", and the adapter's name if there is one."""
    name = canonical_name(stored).removeprefix(PREFIX)
    for pattern in (_LINEAR, _EMBEDDING):
        if match := pattern.fullmatch(name):
            module, side, adapter = match.groups()
            return module, pattern is _EMBEDDING, side, adapter
    text, remedy = next((odd for part, odd in _ODD.items() if part in f".{name}"), _WHOLE)
    raise ValueError(f"{stored} is {text}: {remedy}")


def _checked_pair(specs: Mapping[str, TensorSpec], sides: Mapping[str, str]) -> _Pair:
    """Two factors that pair, by themselves."""
    for side, other in ("AB", "BA"):
        if side not in sides:
            raise ValueError(f"{sides[other]} has no lora_{side} beside it: save the adapter anew")
    a, b = specs[sides["A"]], specs[sides["B"]]
    for side, spec in zip("AB", (a, b), strict=True):
        _check_factor(sides[side], spec)
    return _Pair(sides["A"], sides["B"], a.shape[0], *_shaped(sides, a, b))


def _whole(config: AdapterConfig, module: str, pair: _Pair) -> Unit:
    """An adapted module."""
    if _BASE_LAYER in module:
        raise ValueError(_inside(pair))
    rank, scale = config.rank_and_scale(module)
    if pair.rows != rank:
        raise ValueError(_other_rank(pair.a, pair.rows, str(rank)))
    return Unit(
        module, pair.kind, pair.a, pair.b, pair.shape, rank, scale, pair.kernel, experts=None
    )


def _bare(
    config: AdapterConfig, owner: str, keys: Sequence[str], levels: Mapping[str, _Pair]
) -> list[Unit]:
    """The adapted bare parameters of a module.

    The file does not say which level is whose. All parameters of a mixture have one number of
    experts, rows / rank, and that tells it where it matters.
    """
    for pair in levels.values():
        if _BASE_LAYER in owner or len(keys) > _MAX_PARAMETERS or len(levels) > len(keys):
            raise ValueError(_inside(pair))
        if pair.kind != "linear":
            raise ValueError(f"{pair.a} is no factor of a bare parameter: save the adapter anew")
    told = {key: config.rank_and_scale(key) for key in keys}
    fitting: dict[tuple[tuple[int, float], ...], int] = {}
    for order in permutations(keys, len(levels)):
        found = tuple(told[key] for key in order)
        rows = [pair.rows for pair in levels.values()]
        experts = {divmod(row, rank) for row, (rank, _) in zip(rows, found, strict=True)}
        if len(experts) == 1 and (first := experts.pop())[1] == 0 < first[0]:
            fitting[found] = first[0]
    if not fitting:
        ranks = sorted({rank for rank, _ in told.values()})
        one = next(iter(levels.values()))
        words = f"a multiple of {' or '.join(map(str, ranks))}, one multiple for {owner}"
        raise ValueError(_other_rank(one.a, one.rows, words))
    if len(fitting) > 1:
        raise ValueError(
            f"{' and '.join(keys)} have other ranks or alphas, and the file does not say which "
            "tensors are whose: train them with one rank and alpha"
        )
    ((found, count),) = fitting.items()
    return [
        Unit(module, "expert", pair.a, pair.b, pair.shape, rank, scale, (), experts=count)
        for (module, pair), (rank, scale) in zip(levels.items(), found, strict=True)
    ]


def _inside(pair: _Pair) -> str:
    return (
        f"{pair.a} lies inside another adapted layer (nn.MultiheadAttention, or bare parameters "
        "that target_parameters does not name): leave that layer out"
    )


def _check_factor(stored: str, spec: TensorSpec) -> None:
    if not spec.dtype.is_floating_point or spec.dtype.itemsize == 1:
        raise ValueError(
            f"{stored} is {spec.dtype}; factors have 16 bits or more: dequantise them first"
        )
    if math.prod(spec.shape) == 0:
        raise ValueError(
            f"{stored} has the shape {spec.shape}: it was saved under ZeRO-3 or FSDP before its "
            "shards were gathered; gather them and save it again"
        )


def _shaped(
    sides: Mapping[str, str], a: TensorSpec, b: TensorSpec
) -> tuple[ModuleKind, tuple[int, int], tuple[int, ...]]:
    """Kind, [out, in] and kernel of two factors that pair."""
    shapes = f"{sides['A']} {a.shape} and {sides['B']} {b.shape}"
    if len(a.shape) != len(b.shape) or not 2 <= len(a.shape) <= 5:
        raise ValueError(f"{shapes} do not pair: save the adapter anew")
    kernel = a.shape[2:]
    if any(size != 1 for size in b.shape[2:]) or a.shape[0] != b.shape[1]:
        hint = "save the adapter anew"
        if kernel and a.shape[0] % b.shape[1] == 0:
            hint = "LoRA on a convolution with groups is no change of its weight; leave it out"
        raise ValueError(f"{shapes} do not pair: {hint}")
    if "lora_embedding_A" in sides["A"]:
        if kernel:
            raise ValueError(f"{shapes} are no factors of an embedding: save the adapter anew")
        return "embedding", (a.shape[1], b.shape[0]), ()
    return ("conv" if kernel else "linear"), (b.shape[0], math.prod(a.shape[1:])), kernel


def _other_rank(stored: str, found: int, told: str) -> str:
    return (
        f"{stored} has rank {found}, the config says {told}: correct r or rank_pattern in "
        "adapter_config.json"
    )
