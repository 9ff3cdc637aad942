"""The forms that a delta can be stored in, by name: what a user chooses; no torch.

soupkit.encoding says what each of them means and makes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from soupkit.checks import check_choice, check_count

SignScale = Literal["matrix", "row", "column", "rank1"]

MAX_PLANES = 4
# Instead of an encoding: the fine-tune's whole tensor.
RAW = "raw"
# Nor this: the form of each tensor is chosen within a budget (soupkit.budget).
AUTO = "auto"
_SPARSE = "sparse"
_SIGNS = re.compile(r"(matrix|row|column|rank1)(?:-x([2-4]))?(-refit)?")
_LOW_RANK = re.compile(r"lowrank-([1-9][0-9]*)")
_FORMS = (
    "use row, matrix, column, rank1 (with -x2, -x3 or -x4 for planes, then -refit), lowrank-R, "
    "lowrank-R+row, row+lowrank-R, or sparse"
)


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a delta; see the table of soupkit.encoding.

    Args:
        planes: of signs, 0 to 4; 0 only with a rank.
        scale: of a plane.
        rank: of the low-rank part, 0 for none; cut to min(N, K) where a delta has less.
        low_rank_first: whether the low-rank part is of the delta and the signs are of what it
            leaves, or the other way round.
        refit: whether planes and scales are fitted together; with at least two planes whose scale
            is not "rank1".
        is_sparse: support and sign: exact zeros where the delta is 0; alone.
    Raises:
        ValueError: a value is out of range, or two do not go together.
    """

    planes: int = 1
    scale: SignScale = "row"
    rank: int = 0
    low_rank_first: bool = True
    refit: bool = False
    is_sparse: bool = False

    def __post_init__(self) -> None:
        """Check each value, then that they go together."""
        check_count("planes", self.planes, least=0, most=MAX_PLANES)
        check_choice("scale", self.scale, get_args(SignScale))
        check_count("rank", self.rank, least=0)
        if not self.planes and not self.rank:
            raise ValueError("planes=0 and rank=0 store nothing: give one of the two")
        rest = (self.scale, self.low_rank_first, self.refit, self.is_sparse)
        if not self.planes and rest != ("row", True, False, False):
            raise ValueError(f"planes=0 with {self}: without signs leave all but rank out")
        if not self.rank and not self.low_rank_first:
            raise ValueError("low_rank_first=False with rank=0: there is no order without a rank")
        if self.refit and (self.planes < 2 or self.scale == "rank1"):
            raise ValueError(
                f"refit=True with planes={self.planes}, scale={self.scale!r}: needs at least two "
                "planes, and a scale of row, matrix or column"
            )
        if self.is_sparse and (self.planes, self.scale, self.rank) != (1, "row", 0):
            raise ValueError(f"is_sparse=True with {self}: support and sign go with nothing else")

    @property
    def stored_planes(self) -> int:
        """Planes of packed signs in a file: a sparse delta has two, which cancel where it is 0."""
        return 2 if self.is_sparse else self.planes

    @property
    def name(self) -> str:
        """The text form; `parse` reads it."""
        if self.is_sparse:
            return _SPARSE
        signs = f"{self.scale}{f'-x{self.planes}' if self.planes > 1 else ''}"
        parts = [signs + "-refit" * self.refit] if self.planes else []
        if self.rank:
            parts.insert(0 if self.low_rank_first else 1, f"lowrank-{self.rank}")
        return "+".join(parts)

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """The encoding of this name.

        Raises:
            ValueError: no encoding has it.
        """
        if not isinstance(text, str):
            raise ValueError(f"encoding {text!r}: {_FORMS}")
        if text == _SPARSE:
            return cls(is_sparse=True)
        parts = text.split("+")
        signs = [match for part in parts if (match := _SIGNS.fullmatch(part))]
        ranks = [match for part in parts if (match := _LOW_RANK.fullmatch(part))]
        if len(signs) > 1 or len(ranks) > 1 or len(signs) + len(ranks) != len(parts):
            raise ValueError(f"encoding {text!r}: {_FORMS}")
        rank = int(ranks[0][1]) if ranks else 0
        if not signs:
            return cls(planes=0, rank=rank)
        scale: SignScale = signs[0][1]  # type: ignore[assignment]  # the pattern has no others
        return cls(
            planes=int(signs[0][2] or 1),
            scale=scale,
            rank=rank,
            low_rank_first=not ranks or parts[0] == ranks[0][0],
            refit=signs[0][3] is not None,
        )


def parse_encoding(encoding: str | Encoding) -> Encoding | None:
    """The encoding of this name; None for "raw". Raises ValueError for any other."""
    if isinstance(encoding, Encoding):
        return encoding
    if encoding == AUTO:
        raise ValueError(
            f"encoding {AUTO!r} is no form but a choice among them within a budget of bytes: call "
            "soupkit.budget.export_within"
        )
    try:
        return None if encoding == RAW else Encoding.parse(encoding)
    except ValueError as error:
        raise ValueError(f"{error}; or {RAW} for whole tensors") from None
