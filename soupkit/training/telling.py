"""What a run says of its merges: lines on the terminal, figures in TensorBoard; on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from soupkit.config import SoupConfig
from soupkit.tracking import ScalarWriter, say
from soupkit.training.ranks import Ranks
from soupkit.training.report import MergeReport

REFUSALS_BEFORE_ADVICE = 3
# Share of the energy above which truncation lost nothing worth a higher rank.
_ALL = 0.999


def refusals_at_the_end(verdicts: Sequence[bool]) -> int:
    """How many of the last verdicts in a row were no."""
    return len(verdicts) - max((n + 1 for n, yes in enumerate(verdicts) if yes), default=0)


def advice(config: SoupConfig, *, kept_energy: float) -> str:
    """What to do about merges that the gate keeps refusing, in one line.

    Args:
        kept_energy: of the last one.
    """
    times = REFUSALS_BEFORE_ADVICE
    if config.method == "ema":
        return (
            f"the average scored worse than the weights {times} times in a row: it is of weights "
            "that training has left behind; lower ema_decay, or leave it to a rate that stays high"
        )
    # What this run could do otherwise: a rank that keeps all cannot be too low.
    last_resort = "a smaller weight" if config.method == "mean" else 'method="mean"'
    if config.method == "svd_mean" and kept_energy < _ALL:
        last_resort += " or a higher rank"
    return (
        f"{times} merges in a row were refused, which cost the run no more than time: set "
        "stop_after_step to end merging before the learning rate decays, keep the rate constant "
        f"for longer, or try {last_resort}"
    )


class Teller:
    """The voice of one run."""

    def __init__(self, ranks: Ranks, *, writer: ScalarWriter | None, metric_name: str) -> None:
        """Args: writer: on rank 0, where figures are wanted. metric_name: of the score."""
        self._ranks = ranks
        self._writer = writer
        self.metric_name = metric_name

    def say(self, text: str) -> None:
        """One line."""
        if self._ranks.is_zero:
            say(text)

    def tell(self, report: MergeReport, *, kind: str = "") -> None:
        """A line and the figures of a merge. Args: kind: words before the line."""
        self.say(kind + report.line(self.metric_name))
        if self._writer is None:
            return
        matrices = report.matrices
        try:
            self._writer.add(report.step, report.scalars())
            self._writer.add_kept_energy(
                report.step, [matrix.kept_energy for matrix in matrices if matrix.rank]
            )
            self._writer.add_spectra(
                report.step, {matrix.name: matrix.spectrum for matrix in matrices}
            )
        except OSError as error:
            # The merge is done and the other ranks have gone on: figures are not worth the run.
            self.say(f"no more scalars for TensorBoard: {error}")
            self._writer = None

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
