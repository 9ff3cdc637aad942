"""Every row of the design's page of faults that others met is named by a test, or CONTRIBUTING says
why none can be.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Numbers of the rows TB.., by part; the page itself is no part of a clone.
ROWS = {
    "A": "01 02 03 04 06 07 08 10 11 12 14 15 16 18 19",
    "B": "21 22 23 24 25 26 27 28 30 31 33 36 37 39 41 42 43",
    "C": "44 46 47 48 49 51 54 55 57",
    "D": "58 61 63 64 65 67 68 69",
    "E": "70 72 74 75 77 78",
}  # fmt: skip


def named_by_tests() -> set[str]:
    sources = [path for path in (ROOT / "tests").glob("*.py") if path != Path(__file__).resolve()]
    # Names of functions are written small.
    found = (re.findall(r"(?i)TB(\d\d)", path.read_text()) for path in sources)
    return set().union(*found)


def excused() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, found, section = text.partition("## Faults of the field\n")
    assert found
    return set(re.findall(r"TB(\d\d)", section.split("\n## ")[0]))


@pytest.mark.parametrize("part", ROWS)
def test_every_row_is_named(part):
    missing = set(ROWS[part].split()) - named_by_tests() - excused()
    assert not missing


def test_nothing_else_is_named():
    """A number with a slip of the pen would leave a row without its test."""
    known = set(" ".join(ROWS.values()).split())
    assert named_by_tests() | excused() <= known
