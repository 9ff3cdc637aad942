"""A value by patterns of names, as PEFT looks it up in rank_pattern and alpha_pattern.

The first key that matches the end of a dotted name from a dot on; "^..." : the whole name. Keys
that are names, a "." in them any character, are looked up by their text; others are programs
(name_program.py), so that no key of an untrusted file takes for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .name_program import Program, Work

Value = TypeVar("Value")

LONGEST_NAME = 512
# Characters of one key, and of all keys of a table that are no names.
LONGEST_KEY = 16_384
# About a second at worst. Ten patterns and the 7,680 modules of a mixture take most of it.
MOST_WORK = 4_000_000
# "^" or nothing, a name with "." and escaped characters, "$" or nothing.
_NAME = re.compile(r"(\^?)((?:[^.^$*+?{}\[\]\\|()]|\.|\\[^\w\s])*)\$?")
_ESCAPED_OR_DOT = re.compile(r"\\(.)|\.")


class PatternTable(Generic[Value]):
    """Values by pattern."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Raises ValueError for a key that is no pattern, or is refused; it names the key."""
        self._values, self._keys = values, list(values)
        self._shapes: dict[_Shape, dict[tuple[str, ...], int]] = {}
        self._programs: list[tuple[int, Program]] = []
        self._work = Work(MOST_WORK)
        length = 0
        for index, key in enumerate(self._keys):
            check_length(key)
            if found := _NAME.fullmatch(key):
                shape, pieces = _Shape.of(*found.groups())
                self._shapes.setdefault(shape, {}).setdefault(pieces, index)
                continue
            length += len(key)
            if length > LONGEST_KEY:
                raise ValueError(
                    f"{shown(key)}: the patterns are together longer than {LONGEST_KEY} "
                    "characters; write plain names"
                )
            try:
                self._programs.append((index, Program(rf"(.*\.)?({key})$", self._work)))
            except ValueError as error:
                raise ValueError(f"{shown(key)} {error}") from None

    def of(self, name: str, default: Value) -> Value:
        """The value for a name. Raises ValueError if looking it up takes too long."""
        if not self._values:
            return default
        check_name(name)
        first = min(self._of_shapes(name), default=len(self._keys))
        for index, program in self._programs:
            if index > first:
                break
            try:
                if program.matches(name):
                    first = index
                    break
            except ValueError as error:
                raise ValueError(f"{shown(self._keys[index])} {error}") from None
        if first == len(self._keys):
            return self._values.get(name, default)  # PEFT's own last resort
        return self._values[self._keys[first]]

    def _of_shapes(self, name: str) -> Iterable[int]:
        for shape, known in self._shapes.items():
            self._work.spend(1)
            index = known.get(shape.pieces(name)) if shape.fits(name) else None
            if index is not None:
                yield index


@dataclass(frozen=True, slots=True)
class _Shape:
    """What keys have in common that differ in their letters only.

    Attributes:
        is_whole: whether they match whole names. length: in characters. any_at: where any fits.
    """

    is_whole: bool
    length: int
    any_at: tuple[int, ...]
    spans: tuple[slice, ...] = field(compare=False)

    @classmethod
    def of(cls, anchor: str, text: str) -> tuple[_Shape, tuple[str, ...]]:
        """The shape of a key, and its letters."""
        pieces = [""]
        at = 0
        for found in _ESCAPED_OR_DOT.finditer(text):
            pieces[-1] += text[at : found.start()] + (found[1] or "")
            at = found.end()
            if found[1] is None:
                pieces.append("")
        pieces[-1] += text[at:]
        ends, begin = [], 0
        for piece in pieces:
            ends.append(begin + len(piece))
            begin = ends[-1] + 1
        begins = [0, *(end + 1 for end in ends[:-1])]
        spans = tuple(slice(*both) for both in zip(begins, ends, strict=True))
        return cls(bool(anchor), ends[-1], tuple(ends[:-1]), spans), tuple(pieces)

    def fits(self, name: str) -> bool:
        """Whether the end of the name that a key would match begins where one may."""
        rest = len(name) - self.length
        return rest == 0 or (rest > 0 and not self.is_whole and name[rest - 1] == ".")

    def pieces(self, name: str) -> tuple[str, ...]:
        """The letters of that end."""
        end = name[len(name) - self.length :]
        return tuple(end[span] for span in self.spans)


def check_length(key: str) -> None:
    """Raises ValueError for a pattern that is too long to be one of names."""
    if len(key) > LONGEST_KEY:
        raise ValueError(
            f"{shown(key)} has {len(key)} characters, {LONGEST_KEY} at most: write plain names"
        )


def check_name(name: str) -> None:
    """Raises ValueError for what patterns are not compared with."""
    if len(name) > LONGEST_NAME or "\n" in name:
        raise ValueError(
            f"module {shown(name)} has a line break or more than {LONGEST_NAME} characters, so "
            "that no pattern is compared with it; rename it"
        )


def shown(text: str) -> str:
    """The text, or its beginning, on one line."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
