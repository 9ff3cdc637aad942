"""Every row of the design's pages of faults that others met is named by a test, or CONTRIBUTING
says why none can be: TB.. of training, SV.. of serving, and the rules R.. that follow for a server.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
GUIDE = TESTS.parent / "CONTRIBUTING.md"

# Scheme -> numbers of its rows and the tests that may name one; the pages are no part of a clone.
SCHEMES = {
    "TB": (
        "01 02 03 04 06 07 08 10 11 12 14 15 16 18 19 "
        "21 22 23 24 25 26 27 28 30 31 33 36 37 39 41 42 43 "
        "44 46 47 48 49 51 54 55 57 "
        "58 61 63 64 65 67 68 69 "
        "70 72 74 75 77 78",
        "*.py",
    ),
    "SV": (
        "01 02 03 04 06 07 09 10 11 12 13 14 15 16 17 18 19 20 21 22 24 26 28 30 31 32 34 35 37 "
        "38 39",
        "*.py",
    ),
    # In the tests of kernels R1 is a register.
    "R": ("1 2 3 4 5 6 7 8 9 10 11 12 13 14", "test_serving_*.py"),
}


def numbers(scheme: str, text: str) -> set[str]:
    """Of the rows that a text names; names of functions are written small: test_r4_sv12_..."""
    return set(re.findall(rf"(?i)(?<![a-z0-9]){scheme}(\d{{1,2}})(?![a-z0-9])", text))


def named_by_tests(scheme: str) -> set[str]:
    sources = set(TESTS.glob(SCHEMES[scheme][1])) - {Path(__file__).resolve()}
    return set().union(*(numbers(scheme, path.read_text()) for path in sources))


def excused(scheme: str) -> set[str]:
    """By a point of the list: `- SV07: why`."""
    _, found, section = GUIDE.read_text().partition("## Faults of the field\n")
    assert found
    points = re.findall(r"(?m)^- ([^:]+):", section.split("\n## ")[0])
    return set().union(*(numbers(scheme, point) for point in points))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_row_is_named(scheme: str) -> None:
    missing = set(SCHEMES[scheme][0].split()) - named_by_tests(scheme) - excused(scheme)
    assert not missing


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_else_is_named(scheme: str) -> None:
    """A number with a slip of the pen would leave a row without its test."""
    assert named_by_tests(scheme) | excused(scheme) <= set(SCHEMES[scheme][0].split())
