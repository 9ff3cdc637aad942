"""Checks of settings that several modules share; no torch. A refusal names value and limit."""

from __future__ import annotations

from typing import Any

# Bytes: what other languages that read a manifest can hold.
MAX_BUDGET = 2**63 - 1


def check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field}={value!r}: use one of {', '.join(map(repr, choices))}")


def check_count(field: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise ValueError unless `value` is an int (not a bool) in [least, most]."""
    limit = f">= {least}" if most is None else f"in {least}..{most}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: needs a whole number {limit}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{field}={value}: must be {limit}")


def is_budget(value: Any) -> bool:
    """Whether a parsed JSON value is what soupkit.budget.Plan.to_json gives, or empty."""
    if not isinstance(value, dict) or not value:
        return value == {}
    if set(value) != {"budget_bytes", "row", "frontier"} or not isinstance(value["frontier"], list):
        return False
    points = [value["row"], *value["frontier"]]
    return _is_bytes(value["budget_bytes"]) and all(
        isinstance(point, dict)
        and set(point) == {"budget_bytes", "bytes", "lost_energy"}
        and _is_bytes(point["budget_bytes"])
        and _is_bytes(point["bytes"])
        and type(point["lost_energy"]) in (int, float)
        and 0 <= point["lost_energy"] <= 2
        for point in points
    )


def _is_bytes(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BUDGET
