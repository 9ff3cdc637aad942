"""A value by patterns of names, as PEFT looks it up in rank_pattern and alpha_pattern.

The first key that matches the end of a dotted name from a dot on; "^...": the whole name. Keys
come from files of others, and a regular expression may take for ever: `regex` ends one that does,
and lets other threads run meanwhile, as `re` cannot.
"""

import re
import time
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import regex

Value = TypeVar("Value")

# Of one comparison, in CPU seconds of all threads: `regex` counts so. It takes microseconds.
MATCH_SECONDS = 5.0
# Of all lookups of a table. A thousand keys and the 7,680 modules of a mixture take about 30.
SECONDS = 60.0


class Patience:
    """How much time is left, in CPU seconds of the thread, for the comparisons that share it."""

    def __init__(self) -> None:
        self.seconds = SECONDS


def compiled(text: str, pattern: str) -> "regex.Pattern[str]":
    """The pattern that a key or field `text` stands for.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(pattern)  # what PEFT would take: `regex` knows more
        return regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{shown(text)} is no pattern ({error}); correct it") from None


def does_match(match: Any, name: str, patience: Patience) -> bool:
    """What a compiled pattern's `match` or `fullmatch` says of a name.

    Raises:
        ValueError: it takes longer than is left.
    """
    begun = time.thread_time()
    try:
        found = match(name, timeout=MATCH_SECONDS, concurrent=True) is not None
    except TimeoutError:
        patience.seconds = 0.0
    patience.seconds -= time.thread_time() - begun
    if patience.seconds < 0:
        raise ValueError("takes too long to compare with names; write plain names")
    return found


class PatternTable(Generic[Value]):
    """Values by pattern."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Raises ValueError for a key that is no pattern; it names the key."""
        self._values, self._patience = values, Patience()
        # What adapter_write.py writes, a key for each module, needs no comparison with each.
        self._whole: dict[str, int] = {}
        self._patterns: list[tuple[int, str, regex.Pattern[str]]] = []
        for index, key in enumerate(values):
            if (name := _whole_name(key)) is not None:
                self._whole.setdefault(name, index)
            else:
                self._patterns.append((index, key, compiled(key, rf"(.*\.)?({key})$")))
        self._in_order = list(values.values())

    def of(self, name: str, default: Value) -> Value:
        """The value for a name.

        Raises:
            ValueError: the comparisons take too long; it names the key.
        """
        first = self._whole.get(name, len(self._in_order))
        for index, key, pattern in self._patterns:
            if index > first:
                break
            try:
                if does_match(pattern.match, name, self._patience):
                    first = index
                    break
            except ValueError as error:
                raise ValueError(f"{shown(key)} {error}") from None
        if first == len(self._in_order):
            return self._values.get(name, default)  # PEFT's own last resort
        return self._in_order[first]


def _whole_name(key: str) -> str | None:
    """The one name that an anchored and escaped key matches; None of another key."""
    name = re.sub(r"\\(.)", r"\1", key[1:])
    return name if key == f"^{re.escape(name)}" and "\n" not in name else None


def shown(text: str) -> str:
    """The text, or its beginning, on one line."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
