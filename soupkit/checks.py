"""Checks of settings that several modules share; no torch. A refusal names value and limit."""

from __future__ import annotations


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
