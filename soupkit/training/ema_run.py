"""method="ema": a run with a moving average beside it, which training never sees.

    every ema_every_n_steps     the average moves towards the live weights
    every merge_every_n_steps   with a gate, both are scored on the same batches and reported
    at a checkpoint             the average is stored, so that a resume goes on with its bits
    at the end                  the average is exported, or the live weights if they score better

An average moves at every step, so the state of a step says nothing of the next one: it is written
at checkpoints only, before the framework's own is complete.
"""

from __future__ import annotations

import time
from dataclasses import replace

from soupkit.checkpoint import Checkpoint
from soupkit.config import SoupConfig
from soupkit.training.average import Average
from soupkit.training.ema import decay_of_update
from soupkit.training.final import Final
from soupkit.training.guards import preserved_rng
from soupkit.training.journal import Journal
from soupkit.training.judge import Judge
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.report import MergeReport
from soupkit.training.scoring import Score, Scorer
from soupkit.training.state import AverageRecord, SoupState
from soupkit.training.telling import (
    REFUSALS_BEFORE_ADVICE,
    Teller,
    advice,
    refusals_at_the_end,
)


class EmaRun:
    """The moving average of one run, on all its ranks; every public method is collective."""

    def __init__(
        self,
        config: SoupConfig,
        *,
        store: ParamStore,
        base: Checkpoint | None,
        journal: Journal,
        ranks: Ranks,
        state: SoupState,
        scorer: Scorer,
        teller: Teller,
        average: Average,
    ) -> None:
        """Go on from `state`, whose average `average` holds."""
        self.config = config
        self.store = store
        self.base = base
        self.journal = journal
        self.ranks = ranks
        self.state = state
        self.average = average
        self._scorer = scorer
        self._teller = teller
        self._judge = Judge(
            feed_back=False, is_gated=True, greater_is_better=config.greater_is_better
        )

    def is_due(self, step: int) -> bool:
        """Whether live weights and average are compared at `step`."""
        return self.config.is_merge_point(step)

    def at_step(self, step: int, metric: float | None = None) -> MergeReport | None:
        """After optimizer step `step`: move the average; compare it if it is time. Collective.

        Returns:
            The report of a comparison; None where there was none.
        """
        self._update(step)
        if not self.is_due(step) or not self._scorer.is_gate or not self.average.num_updates:
            return None
        with preserved_rng(self.store.devices):
            report = self._compare(step)
        self.journal.report(report)
        self.state = replace(
            self.state, history=(*self.state.history, report.to_json(matrices=False))
        )
        self._teller.tell(report)
        verdicts = [bool(entry["accepted"]) for entry in self.state.history]
        if refusals_at_the_end(verdicts) == REFUSALS_BEFORE_ADVICE:
            self._teller.say(advice(self.config, kept_energy=1.0))
        return report

    def on_metric(self, step: int, metric: float) -> None:
        """A metric of the caller's chooses no partner here."""

    def before_checkpoint(self, step: int) -> None:
        """Store the average as it is after `step`, once. Collective."""
        record = AverageRecord(step, self.average.num_updates) if self.average.num_updates else None
        if self.state.step == step and self.state.average == record:
            return
        if record is not None:
            self.journal.store_average(self.average, step)
        self.state = self.journal.commit(replace(self.state, step=step, average=record))
        self.journal.clean()

    def at_preemption(self, step: int) -> None:
        """The process is about to be taken away, after `step`, whose checkpoint is written."""
        self._update(step)
        self.before_checkpoint(step)

    def final(self) -> Final:
        """What the run ends with: the average, or with a gate the live weights if they score
        better. Collective.
        """
        average = self.average
        if not average.num_updates:
            self._teller.say("the average has seen no step: the run ends with the live weights")
            return Final()
        name = f"moving average of {average.num_updates} updates, decay {self.config.ema_decay:g}"
        if self._scorer.is_gate:
            with preserved_rng(self.store.devices):
                current, merged = self._scores()
            is_better, remark = self._judge.ends_with(current, merged)
            self._teller.say(
                f"{self._teller.metric_name} of the live weights {current.value:.6g}, of the "
                f"average {merged.value:.6g}{remark}: the run ends with the "
                f"{'average' if is_better else 'live weights'}"
            )
            if not is_better:
                return Final()
        return Final(average.rounded(), name)

    def close(self) -> None:
        """Close the figures."""
        self._teller.close()

    def _update(self, step: int) -> None:
        config = self.config
        is_in_time = config.stop_after_step is None or step <= config.stop_after_step
        if step > config.start_after_step and step % config.ema_every_n_steps == 0 and is_in_time:
            self.average.update(decay_of_update(config.ema_decay, self.average.num_updates))

    def _scores(self) -> tuple[Score, Score]:
        """Scores of the live weights and of the average; with a gate only."""
        current = self._scorer.score()
        with self.average.swapped():
            merged = self._scorer.score()
        assert current is not None
        assert merged is not None
        return current, merged

    def _compare(self, step: int) -> MergeReport:
        started = time.perf_counter()
        current, merged = self._scores()
        seconds = max(self.ranks.gather(time.perf_counter() - started))
        return MergeReport(
            step=step,
            partner_step=step,
            accepted=self._judge.accepts(current.value, merged.value),
            method="ema",
            weight=1.0,
            metric_current=current.value,
            metric_merged=merged.value,
            reason="",
            seconds=seconds,
            score_seconds=self._scorer.take_seconds(),
            matrices=(),
        )
