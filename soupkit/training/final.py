"""What a run ends with: its live weights, or something beside them that is better."""

from __future__ import annotations

from dataclasses import dataclass

from soupkit.delta import TensorSource


@dataclass(frozen=True, slots=True)
class Final:
    """The weights that a run ends with.

    Args:
        instead: values of the parameters that take part, in their dtypes, in place of the live
            ones; reading them may be collective. None: the live weights are meant.
        name: for people and the variant's manifest.
    """

    instead: TensorSource | None = None
    name: str = "live weights"
