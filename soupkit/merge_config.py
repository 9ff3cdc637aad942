"""Merge configs of mergekit, of the methods whose meaning merge_checkpoints has.

    linear            W = sum_i w_i W_i / sum_i w_i
    task_arithmetic   W = W_base + lambda sum_i w_i (W_i - W_base)    (normalize: over sum_i w_i)

Both are a plain mean of deltas, W_0 + sum_i c_i (W_i - W_0) with sum_i c_i = 1: of the first model
(or base_model) in the one case, of the base in the other, which enters with what is left of 1.
Computed in float32 and rounded once, where mergekit computes in `dtype`. Whatever would mean
something else here is refused by name. YAML is read without making objects of its tags.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from soupkit.files import fault_text, open_regular
from soupkit.merge import MergeRule
from soupkit.opcm import OpcmRule

_MAX_BYTES = 2**20
_KEYS = {"merge_method", "models", "base_model", "parameters", "dtype", "out_dtype"}
# Without sign consensus mergekit does not use int8_mask, which many configs carry along.
_PARAMETERS = {
    "linear": {"weight", "normalize"},
    "task_arithmetic": {"weight", "normalize", "lambda", "int8_mask"},
}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a config asks for.

    Attributes:
        base: folder or hub id. checkpoints: the same, in the order of the rule's weights.
        rule: a mean, of a config. dtype: of the result, by name; None: the base's.
        method: mergekit's name of it.
    """

    base: str
    checkpoints: tuple[str, ...]
    rule: MergeRule | OpcmRule
    dtype: str | None
    method: str


def read_merge_config(path: str | Path) -> MergePlan:
    """Read a config file.

    Raises:
        ValueError: no such config, or one whose meaning is not that of a mean of whole models.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        return _plan(_parse(path))
    except ValueError as error:
        raise ValueError(fault_text(error, path)) from None


def _parse(path: Path) -> Any:
    with open_regular(path) as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"has over {_MAX_BYTES} bytes: that is no merge config")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is no YAML: {' '.join(str(error).split())}") from None


def _plan(document: Any) -> MergePlan:
    _check_keys("the config", document, _KEYS)
    method = document.get("merge_method")
    if not isinstance(method, str) or method not in _PARAMETERS:
        raise ValueError(
            f"merge_method {_told(method)}: of mergekit's methods only {' and '.join(_PARAMETERS)} "
            "mean the same here; soupkit merge --method has its own"
        )
    shared = document.get("parameters") or {}
    _check_keys("parameters", shared, _PARAMETERS[method])
    base = document.get("base_model")
    base = None if base is None else _model("base_model", base)
    weights = _weights(document.get("models"), shared, base=base, method=method)
    is_normal = _flag(shared, "normalize", default=method == "linear")
    # mergekit does not look at it here, but what is no flag is a mistake.
    _flag(shared, "int8_mask", default=False)
    if method == "linear":
        base = _linear_base(weights, base, is_normal=is_normal)
        shares = _normalised(weights)
    else:
        if base is None:
            raise ValueError("task_arithmetic needs base_model")
        shares = _normalised(weights) if is_normal else dict(weights)
        factor = _number("lambda", shared.get("lambda", 1.0))
        shares = {model: factor * share for model, share in shares.items()}
        # With the base among them, whose delta is 0, all shapes must agree, as here they have to.
        shares[base] = 1.0 - math.fsum(shares.values())
    return MergePlan(
        base,
        tuple(shares),
        MergeRule(method="mean", weights=tuple(shares.values())),
        _dtype(document),
        method,
    )


def _weights(
    models: Any, shared: Mapping[str, Any], *, base: str | None, method: str
) -> dict[str, float]:
    """The weight of each model, by its name in the config; without the base of task_arithmetic."""
    if not isinstance(models, list) or not models:
        raise ValueError("lists no models")
    weights: dict[str, float] = {}
    seen: set[str] = set()
    for item in models:
        _check_keys("a model", item, {"model", "parameters"})
        name = _model("model", item.get("model"))
        if name in seen:
            raise ValueError(f"lists the model {name!r} twice")
        seen.add(name)
        own = item.get("parameters") or {}
        _check_keys(f"parameters of {name}", own, {"weight"})
        if method == "task_arithmetic" and name == base:
            continue
        weight = own.get("weight", shared.get("weight"))
        if weight is None:
            raise ValueError(f"{name} has no weight")
        weights[name] = _number(f"weight of {name}", weight)
    if not weights:
        raise ValueError("lists no model beside base_model")
    return weights


def _linear_base(weights: Mapping[str, float], base: str | None, *, is_normal: bool) -> str:
    if base is not None and base not in weights:
        raise ValueError(
            f"base_model {base!r} is none of the models: a linear merge has no weight for it"
        )
    total = math.fsum(weights.values())
    if not is_normal and abs(total - 1) > 1e-6:
        raise ValueError(
            f"normalize: false with weights that sum to {total:.6g}: a linear merge that changes "
            "the model's size is not done here; give weights that sum to 1"
        )
    return base or next(iter(weights))


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    if abs(total) < 1e-8:
        raise ValueError(f"normalize: true with weights that sum to {total:.3g}")
    return {name: weight / total for name, weight in weights.items()}


def _dtype(document: Mapping[str, Any]) -> str | None:
    chosen = None
    for key in ("dtype", "out_dtype"):
        value = document.get(key)
        if value is not None and value not in _DTYPES:
            raise ValueError(f"{key} {_told(value)}: use one of {', '.join(_DTYPES)}")
        chosen = value or chosen
    return chosen


def _model(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} {_told(value)} is no folder or hub id")
    if not Path(value).exists() and set(value) & set("+@"):
        raise ValueError(
            f"{key} {value!r}: adapters (+) and revisions (@) are not read: give a model's folder"
        )
    return value


def _check_keys(what: str, found: Any, known: set[str]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {_told(found)}, not a mapping")
    odd = [key for key in found if key not in known]
    if odd:
        raise ValueError(
            f"{what} has {_told(odd[0])}, which is not read here; known: {', '.join(sorted(known))}"
        )


def _number(key: str, value: Any) -> float:
    # Gradients (lists) and filters (mappings) give tensors weights of their own.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, as a whole number may be beyond every float.
    if not is_number or not abs(value) < 1e30:
        raise ValueError(f"{key} is {_told(value)}: only one finite number for all tensors is read")
    return float(value)


def _flag(shared: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = shared.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {_told(value)}: use true or false")
    return value


def _told(value: Any) -> str:
    """A value in a message; aliases of YAML may make a nest of them too long to print."""
    is_plain = value is None or isinstance(value, str | int | float)
    return repr(value)[:80] if is_plain else f"a {type(value).__name__}"
