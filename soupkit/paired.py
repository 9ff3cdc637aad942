"""The difference of two shares of right answers to the same questions, with its 95 % interval.

    d = (b - c) / n     b: only the variant is right, c: only the reference, n: questions
    T(d) = (b - c - n d) / sqrt(n (2 q + d (1 - d))),    interval = {d : |T(d)| <= 1.96}

q is the likeliest probability of "only the reference is right" among the tables whose difference
is d: the greater root of 2 n q^2 + ((2 n - b + c) d - b - c) q - c d (1 - d) = 0. This is Tango's
score interval (Statistics in Medicine 17, 1998, 891-908). Unlike Wald's it has a width where no
answer differs (up to 1.96^2 / (n + 1.96^2)), so that a handful of questions proves nothing.
"""

from __future__ import annotations

import math
from typing import Literal

from soupkit.checks import check_count

# The 97.5 % quantile of the normal distribution.
Z = 1.959963984540054
METHOD = "Tango's score interval of the paired difference, 95 %"

Verdict = Literal["met", "not met", "undecided"]


def paired_interval(only_here: int, only_there: int, questions: int) -> tuple[float, float, float]:
    """(difference, low, high) of the share of right answers here minus there, in [-1, 1].

    Args:
        only_here: questions that are answered rightly here and wrongly there. only_there: the other
            way round. questions: all of them.

    Raises:
        ValueError: a count is negative, no question, or more differ than there are.
    """
    check_count("questions", questions, least=1)
    check_count("only_here", only_here, least=0, most=questions)
    check_count("only_there", only_there, least=0, most=questions - only_here)
    difference = (only_here - only_there) / questions
    high = _limit(only_here, only_there, questions)
    # Swapped, the difference and its interval change their sign.
    low = -_limit(only_there, only_here, questions)
    return difference, low, high


def _limit(here: int, there: int, questions: int) -> float:
    """The difference in [(here - there) / questions, 1] at which T falls to -Z, by bisection."""
    inside, outside = (here - there) / questions, 1.0
    # Sixty halvings of at most 2 leave less than a double's spacing.
    for _ in range(60):
        middle = (inside + outside) / 2
        if _score(middle, here, there, questions) >= -Z:
            inside = middle
        else:
            outside = middle
    return inside


def _score(d: float, here: int, there: int, n: int) -> float:
    linear = (2 * n - here + there) * d - here - there
    root = math.sqrt(linear * linear + 8 * n * there * d * (1 - d))
    q = (root - linear) / (4 * n)
    variance = n * (2 * q + d * (1 - d))
    distance = here - there - n * d
    if variance <= 0.0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def verdict(low: float, high: float, *, limit: float) -> Verdict:
    """Whether a difference is at least `limit`: "undecided" where its interval spans the limit."""
    if low >= limit:
        return "met"
    return "not met" if high < limit else "undecided"
