"""What an adapter_config.json says: rank and scale of each module, and that it is plain LoRA.

Ranks and alphas of modules are looked up as PEFT does it (name_patterns.py). All that makes an
adapter more than `base + scale * B A` is refused by name. Read for PEFT 0.21, which is not
imported. Not here: the tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex

from soupkit.errors import CheckpointError
from soupkit.files import fault_text, read_json
from soupkit.lora_kinds import MICA, VARIANTS, scaling
from soupkit.name_patterns import Patience, PatternTable, Value, compiled, does_match, shown
from soupkit.tensorfile import is_count

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# What PEFT takes for a field that the file lacks.
_RANK = _ALPHA = 8
# What a copy of an adapter needs of its config beside its modules.
CARRIED = ("task_type", "fan_in_fan_out", "target_parameters", "auto_mapping")

# What always works.
MERGED = "merge_and_unload() it in PEFT and run `soupkit export` on the result"
# Fields that make an adapter more than factors: what they are, and the remedy.
_MORE = {
    "modules_to_save": ("whole trained modules (modules_to_save)", "train without them"),
    "trainable_token_indices": (
        "trained rows of an embedding (trainable_token_indices)",
        "train without them",
    ),
    "layer_replication": ("another stack of layers (layer_replication)", "train without it"),
    "megatron_config": ("Megatron's parallel layers (megatron_config)", "train without them"),
    "ensure_weight_tying": (
        "factors that two tied layers share (ensure_weight_tying)",
        "target only one of the two",
    ),
}
# Starts of init_lora_weights that take something away from the base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A checked adapter_config.json.

    Attributes:
        base, revision: of the base model, as the file says; None where it does not.
        rank, alpha, is_rslora, rank_pattern, alpha_pattern: see `rank_and_scale`.
        target_modules: ends of the names of adapted modules, or a pattern of whole names.
        target_parameters: ends of the names of adapted bare parameters, sorted.
        carried: the fields of CARRIED that the file has.
        patience: for comparisons with target_modules.
    """

    path: Path
    base: str | None
    revision: str | None
    rank: int
    alpha: float
    is_rslora: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    target_modules: regex.Pattern[str] | tuple[str, ...]
    target_parameters: tuple[str, ...]
    carried: Mapping[str, Any]
    patience: Patience = field(default_factory=Patience, repr=False, compare=False)

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Of the module or bare parameter of this dotted name.

        Raises:
            CheckpointError: its alpha is 0, or a pattern takes too long to look up.
        """
        rank = self._looked_up("rank_pattern", self.rank_pattern, name, self.rank)
        alpha = self._looked_up("alpha_pattern", self.alpha_pattern, name, self.alpha)
        scale = scaling(alpha, rank, is_rslora=self.is_rslora)
        if scale == 0:
            raise CheckpointError(
                f"{self.path}: lora_alpha is 0 for {name}, so the adapter does nothing there: set "
                "it to what it was trained with"
            )
        return rank, scale

    def parameters_of(self, module: str) -> tuple[str, ...]:
        """Full names of the bare parameters of a module that may be adapted, sorted; () where it is
        adapted as a module. A target without a dot may be of any module that is not targeted.
        """
        found = {
            f"{module}.{target.rpartition('.')[2]}"
            for target in self.target_parameters
            if f".{module}".endswith(f".{target.rpartition('.')[0]}") and "." in target
        }
        if not found and not self._is_targeted(module):
            found = {f"{module}.{name}" for name in self.target_parameters if "." not in name}
        return tuple(sorted(found))

    def _looked_up(
        self, field: str, table: PatternTable[Value], name: str, default: Value
    ) -> Value:
        try:
            return table.of(name, default)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {field}: {error}") from None

    def _is_targeted(self, module: str) -> bool:
        """PEFT's match of target_modules."""
        if isinstance(self.target_modules, regex.Pattern):
            try:
                return does_match(self.target_modules.fullmatch, module, self.patience)
            except ValueError as error:
                raise CheckpointError(f"{self.path}: target_modules {error}") from None
        return any(f".{module}".endswith(f".{name}") for name in self.target_modules)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read and check an adapter_config.json.

    Raises:
        CheckpointError: it cannot be read, a value is out of range, or the adapter is not plain
            LoRA.
    """
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(fault_text(error, path)) from error
    try:
        if not isinstance(config, dict):
            raise ValueError("is no JSON object: is it PEFT's?")
        refuse_more(config)
        targets = tuple(sorted(set(_names("target_parameters", config.get("target_parameters")))))
        return AdapterConfig(
            path=path,
            base=_text(config, "base_model_name_or_path"),
            revision=_text(config, "revision"),
            rank=_rank("r", config.get("r", _RANK)),
            alpha=_alpha("lora_alpha", config.get("lora_alpha", _ALPHA)),
            is_rslora=bool(config.get("use_rslora")),
            rank_pattern=_pattern(config, "rank_pattern", _rank),
            alpha_pattern=_pattern(config, "alpha_pattern", _alpha),
            target_modules=_modules(config.get("target_modules")),
            target_parameters=targets,
            # PEFT sorts them too, so that their order means nothing.
            carried={key: config[key] for key in CARRIED if config.get(key)}
            | ({"target_parameters": list(targets)} if targets else {}),
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def plain_config(
    *,
    base: str | None,
    revision: str | None,
    ranks: Mapping[str, int],
    scale: float = 1.0,
    carried: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The adapter_config.json of plain LoRA.

    Args:
        ranks: by module; of the bare parameters of a module by its name and "[]".
        scale: of every module, so that scale * rank is a whole number for each, but for rounding.
        carried: fields of CARRIED.
    """
    largest = max(ranks.values())
    others = {_exactly(name): rank for name, rank in sorted(ranks.items()) if rank != largest}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": round(scale * largest),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(name for name in ranks if not name.endswith("[]")),
        "rank_pattern": others,
        "alpha_pattern": {name: round(scale * rank) for name, rank in others.items()},
        **(carried or {}),
    }


def _exactly(name: str) -> str:
    """A pattern that matches a module alone, or all bare parameters of a module."""
    if name.endswith("[]"):
        return rf"^{re.escape(name[:-2])}\.[^.]+"
    return f"^{re.escape(name)}"


def refuse_more(config: Mapping[str, Any]) -> None:
    """Raise ValueError where the fields of an adapter's config make it more than plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"peft_type is {config.get('peft_type')!r}; only LORA adapters are read: train with "
            f"LoraConfig, or {MERGED}"
        )
    words = [text for field, text in VARIANTS.items() if config.get(field) not in (None, False)]
    init = config.get("init_lora_weights")
    words += [MICA] if init == "mica" else []
    if words:
        raise ValueError(
            f"{words[0]} changes more than scale * B A: train with plain LoRA, or {MERGED}"
        )
    if config.get("bias", "none") != "none":
        raise ValueError(
            f"bias={config['bias']!r}: trained biases are no factors: train with bias='none', or "
            f"{MERGED}"
        )
    for key, (text, remedy) in _MORE.items():
        if config.get(key):
            raise ValueError(f"{text} cannot be merged as factors: {remedy}, or {MERGED}")
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights={init!r} has changed the base weights, so B A alone is not what "
            "the base lacks: save it with path_initial_model_for_weight_conversion=..., or "
            f"{MERGED}"
        )


def _text(config: Mapping[str, Any], field: str) -> str | None:
    value = config.get(field)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{field}={value!r}: needs a text or null")
    return value


def _rank(field: str, value: Any) -> int:
    if not is_count(value) or value == 0:
        raise ValueError(f"{field}={value!r}: a rank is a whole number >= 1; correct it")
    return int(value)


def _alpha(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{field}={value!r}: needs a finite number; correct it")
    return float(value)


def _pattern(config: Mapping[str, Any], field: str, check: Any) -> PatternTable[Any]:
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{field}={pattern!r}: needs an object of names and numbers")
    checked = {key: check(f"{field}[{shown(key)}]", value) for key, value in pattern.items()}
    try:
        return PatternTable(checked)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _names(field: str, value: Any) -> tuple[str, ...]:
    names = value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}={value!r}: needs a list of names")
    return tuple(names)


def _modules(value: Any) -> regex.Pattern[str] | tuple[str, ...]:
    if not isinstance(value, str):
        return _names("target_modules", value)
    try:
        return compiled(value, value)
    except ValueError as error:
        raise ValueError(f"target_modules={error}") from None
