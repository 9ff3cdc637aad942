"""A regular expression as a program that takes no longer than its length times the text's.

Python's own engine tries one way after the other, which on `(a+)+b` takes for ever; this one goes
all ways at once, a character a step (Thompson's simulation), and remembers steps that it has taken.
Whether a text of one line matches is what Python's
engine says. What this cannot do is refused: back
references, conditions, look-behind, flags, possessive and atomic groups. Not here: groups' texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser

# Instructions of a program: what a counted repeat is written out to.
_LONGEST = 20_000
# What a step that is taken for the first time counts, for each instruction.
_SLOW = 8
_NO_FLAGS = re.UNICODE.value
_Instruction = tuple[str, Any]
_REFUSED = {
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a condition",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
    "FAILURE": "a group that never matches",
}


class Work:
    """How much may still be done, in steps of the programs that share it."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Raises ValueError if no more may be done."""
        self._left -= steps
        if self._left < 0:
            raise ValueError("takes too many steps to look up; write plain names")


class Program:
    """A compiled pattern."""

    def __init__(self, pattern: str, work: Work) -> None:
        """Raises ValueError if it is none, or is refused."""
        self._work, self._code = work, list[_Instruction]()
        try:
            re.compile(pattern)  # its own checks
            tree = _parser.parse(pattern)
            if tree.state.flags != _NO_FLAGS:
                raise ValueError("uses flags; write it without")
            self._write(tree)
        except (re.error, OverflowError) as error:
            raise ValueError(f"is no pattern ({error}); correct it") from None
        except RecursionError:
            raise ValueError("has too many groups in groups; write plain names") from None
        self._add("end", None)
        self._ends = sum(1 << i for i, (op, _) in enumerate(self._code) if op == "end")
        self._steps: dict[tuple[int, str, str], int] = {}
        # What a look ahead says depends on more than the next character.
        self._may_remember = all(op != "ahead" for op, _ in self._code)

    def matches(self, text: str, *, is_whole: bool = False) -> bool:
        """As re.match, or re.fullmatch if `is_whole`. Raises ValueError after too much work."""
        return self._run(text, 0, 0, is_whole=is_whole)

    # Writing.

    def _add(self, op: str, what: Any) -> int:
        self._work.spend(1)
        if len(self._code) == _LONGEST:
            raise ValueError(f"is longer than {_LONGEST} steps; write plain names")
        self._code.append((op, what))
        return len(self._code) - 1

    def _write(self, tree: Any) -> None:
        for op, what in tree:
            name = op.name
            if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                self._add("char", (name, what))
            elif name == "AT":
                self._add("at", what.name)
            elif name == "SUBPATTERN" and not (what[1] or what[2]):
                self._write(what[3])
            elif name == "BRANCH":
                self._write_branch(what[1])
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):  # greedy or not: a match is a match
                self._write_repeat(*what)
            elif name in ("ASSERT", "ASSERT_NOT") and what[0] > 0:
                ahead = self._add("ahead", None)
                self._write(what[1])
                self._code[ahead] = "ahead", (name == "ASSERT", self._add("end", None) + 1)
            else:
                odd = "flags" if name == "SUBPATTERN" else _REFUSED.get(name, "a look behind")
                raise ValueError(f"uses {odd}; write it without, or plain names")

    def _write_branch(self, branches: Sequence[Any]) -> None:
        fork = self._add("fork", None)
        starts, ends = [], []
        for branch in branches:
            starts.append(len(self._code))
            self._write(branch)
            ends.append(self._add("fork", None))
        self._code[fork] = "fork", starts
        for end in ends:
            self._code[end] = "fork", [len(self._code)]

    def _write_repeat(self, least: int, most: int, tree: Any) -> None:
        for _ in range(least):
            before = len(self._code)
            self._write(tree)
            if len(self._code) == before:
                return  # it repeats nothing
        if most == _parser.MAXREPEAT:
            fork = self._add("fork", None)
            self._write(tree)
            self._add("fork", [fork])
            self._code[fork] = "fork", [fork + 1, len(self._code)]
            return
        forks = []
        for _ in range(least, most):
            forks.append(self._add("fork", None))
            self._write(tree)
            if len(self._code) == forks[-1] + 1:
                break
        for fork in forks:
            self._code[fork] = "fork", [fork + 1, len(self._code)]

    # Running. A set of instructions is a whole number, a bit for each.

    def _run(self, text: str, at: int, start: int, *, is_whole: bool) -> bool:
        key = -1 - start, "", text[at : at + 1]
        if key not in self._steps or not self._may_remember:
            self._steps[key] = self._entered(1 << start, text, at)
        now = self._steps[key]
        while now:
            if now & self._ends and (at == len(text) or not is_whole):
                return True
            if at == len(text):
                break
            now, at = self._after(now, text, at), at + 1
        return False

    def _after(self, now: int, text: str, at: int) -> int:
        """Where those that take the character at `at` are then."""
        key = now, text[at], text[at + 1 : at + 2]
        known = self._steps.get(key)
        if known is not None:
            self._work.spend(1)
            return known
        taken = 0
        for place in self._places(now):
            op, what = self._code[place]
            if op == "char" and _takes(what[0], what[1], text[at]):
                taken |= 2 << place
        found = self._entered(taken, text, at + 1)
        if self._may_remember:
            self._steps[key] = found
        return found

    def _entered(self, places: int, text: str, at: int) -> int:
        """Places and all that follow from them without a character."""
        found, left = 0, list(self._places(places))
        while left:
            place = left.pop()
            if found >> place & 1:
                continue
            self._work.spend(_SLOW)
            found |= 1 << place
            op, what = self._code[place]
            if op == "fork":
                left += what
            elif op == "at" and _is_at(what, text, at):
                left.append(place + 1)
            elif op == "ahead":
                is_wanted, after = what
                if self._run(text, at, place + 1, is_whole=False) == is_wanted:
                    left.append(after)
        return found

    def _places(self, now: int) -> Iterator[int]:
        while now:
            lowest = now & -now
            self._work.spend(_SLOW)
            yield lowest.bit_length() - 1
            now ^= lowest


def _takes(op: str, what: Any, character: str) -> bool:
    code = ord(character)
    if op == "ANY":
        return character != "\n"
    if op == "LITERAL":
        return bool(code == what)
    if op == "NOT_LITERAL":
        return bool(code != what)
    if op == "RANGE":
        return bool(what[0] <= code <= what[1])
    if op == "CATEGORY":
        kind = what.name.removeprefix("CATEGORY_")
        is_other: bool = kind.startswith("NOT_")
        return _is_of(kind.removeprefix("NOT_"), character) != is_other
    is_negated: bool = what[0][0].name == "NEGATE"
    found = any(_takes(one.name, value, character) for one, value in what[is_negated:])
    return found != is_negated


def _is_of(kind: str, character: str) -> bool:
    if kind == "DIGIT":
        return character.isdecimal()
    return character.isspace() if kind == "SPACE" else character.isalnum() or character == "_"


def _is_at(kind: str, text: str, at: int) -> bool:
    if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return at == 0
    if kind in ("AT_END", "AT_END_STRING"):
        return at == len(text)
    sides = [
        bool(side) and _is_of("WORD", side)
        for side in (text[max(0, at - 1) : at], text[at : at + 1])
    ]
    return (sides[0] != sides[1]) == (kind == "AT_BOUNDARY")
