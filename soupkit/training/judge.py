"""Which weights stay and which are the partner of the next merge: decisions only, no tensors.

    with a gate       a merge stays if it scores at least as well as the weights before it; what
                      stays becomes the partner if it beats the best so far
    without a gate    a merge stays; the metric of the caller's evaluations chooses the
                      partner; while there is none, the partner is the last merge point
    no feeding back   the side soup is the partner: the best of it, the merge and the run (with a
                      gate), or the last merge (without)

    at the end        what lies beside the run takes its place only if it is better by more than
                      chance: by two standard errors of the gate's batches, where those are known

A score that is not finite never wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from soupkit.training.report import MergeReport
from soupkit.training.scoring import Score
from soupkit.training.state import Partner, SoupState

# Half of that would let one choice in six be chance; of the few candidates of a run, one would be.
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Judge:
    """The rules of one run."""

    feed_back: bool
    is_gated: bool
    greater_is_better: bool

    def is_better(self, score: float, best: float | None) -> bool:
        """Whether a finite score beats the best one; None is beaten by any."""
        if best is None:
            return True
        return score > best if self.greater_is_better else score < best

    def accepts(self, current: float | None, merged: float | None) -> bool:
        """Whether merged weights may stay, by the scores before and after."""
        if current is None or merged is None:
            return not self.is_gated
        if not math.isfinite(merged):
            return False
        return not math.isfinite(current) or not self.is_better(current, merged)

    def ends_with(self, live: Score, beside: Score) -> tuple[bool, str]:
        """Whether a run ends with what lies beside it; a remark on that for people, or ""."""
        if not self.accepts(live.value, beside.value) or live.value == beside.value:
            return False, ""
        difference, error = live.less(beside)
        if error is None:
            return True, ""
        margin = _STANDARD_ERRORS * error
        if abs(difference) >= margin:
            return True, ""
        return False, f" (chance alone may differ by {margin:.2g}: score more held-out batches)"

    def choose(
        self, report: MergeReport, state: SoupState, metric: float | None
    ) -> tuple[Partner | None, bool, bool]:
        """The partner after a merge point.

        Args:
            report: of the merge. state: before it.
            metric: of the weights before the merge, where the caller has one and there is no gate.
        Returns:
            The new partner, or None to keep the old one; whether its weights are those before the
            merge; whether a metric has been seen in this run.
        """
        best = state.partner.score if state.partner else None
        if self.is_gated:
            score = report.metric_merged if report.accepted else report.metric_current
            usable = score is not None and math.isfinite(score) and self.is_better(score, best)
            chosen = Partner(report.step, score) if usable else None
            return chosen, not report.accepted, state.metric_seen
        if not self.feed_back:
            chosen = Partner(report.step, None) if report.accepted else None
            return chosen, False, state.metric_seen
        if metric is not None and math.isfinite(metric):
            chosen = Partner(report.step, metric) if self.is_better(metric, best) else None
            return chosen, True, True
        if state.metric_seen or not report.accepted:
            return None, False, state.metric_seen
        return Partner(report.step, None), False, False
