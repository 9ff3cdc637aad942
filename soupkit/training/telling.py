"""What a run says of its merges: lines on the terminal, figures in TensorBoard; on rank 0."""

from __future__ import annotations

from soupkit.tracking import ScalarWriter, say
from soupkit.training.ranks import Ranks
from soupkit.training.report import MergeReport


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
