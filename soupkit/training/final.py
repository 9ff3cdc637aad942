"""What a run ends with: its live weights, or something beside them that is better."""

from __future__ import annotations

from dataclasses import dataclass

from soupkit.delta import TensorSource
from soupkit.training.journal import Journal
from soupkit.training.scoring import Score, Scorer
from soupkit.training.state import Partner


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


def score_of(partner: Partner, *, scorer: Scorer, journal: Journal) -> Score | None:
    """A partner's score on the held-out data of this process. Collective."""
    if partner.score is not None and partner.step > journal.began_at:
        return Score(partner.score, partner.parts)
    # What it was scored on before a resume may have been other batches, or nothing.
    aside = journal.set_aside()
    score = scorer.score_of(journal.captured(partner.step), aside=aside)
    journal.clean()
    return score
