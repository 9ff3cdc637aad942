"""When a run is merged, with whom, and what is kept of it. Knows no framework.

    merge point at step N: score the run's weights; merge them with the best captured ones; score
    the result on the same batches; keep it if it is at least as good, else put the old weights back
    bit for bit; capture the weights the run goes on with, if they are the best so far.

Unless merges are fed back, the run goes on with its old weights either way; what is captured is a
soup beside it, and the run ends with that if it is better by more than chance.

The state on disk is written last and at once, so a process that dies anywhere leaves the state
before step N or after it; a fault that is caught leaves the weights that belong to the state. The
same seed, data and state give the same bits, whether or not the run was stopped in between.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from soupkit.checkpoint import Checkpoint
from soupkit.config import SoupConfig
from soupkit.cuts import Cuts
from soupkit.errors import MergeError, TrainingError
from soupkit.merge import MatrixReport, MergeRule
from soupkit.numeric import full_precision
from soupkit.training.base import check_untouched, file_stamp
from soupkit.training.final import Final, score_of
from soupkit.training.guards import held_interrupts, preserved_rng
from soupkit.training.journal import Journal
from soupkit.training.judge import Judge
from soupkit.training.merging import merge_into
from soupkit.training.moments import reset_moments
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.report import MergeReport
from soupkit.training.scoring import Score, Scorer
from soupkit.training.state import Partner, SoupState
from soupkit.training.stored_cuts import Found
from soupkit.training.telling import REFUSALS_BEFORE_ADVICE, Teller, advice
from soupkit.training.undo import SetAside
from soupkit.workers import Workers


@dataclass(frozen=True, slots=True)
class _Trial:
    """A merge that stands in the live weights and waits for its verdict."""

    matrices: tuple[MatrixReport, ...]
    found: dict[str, Found]
    current: Score | None
    merged: Score | None
    reason: str


def _value(score: Score | None) -> float | None:
    return None if score is None else score.value


class SoupRun:
    """The merges of one run, on all its ranks; every public method is collective."""

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
        optimizer: Any = None,
    ) -> None:
        """Go on from `state`.

        Args:
            base: what deltas are taken against; None: only LoRA factors are merged.
            scorer: of the live weights, for gate "metric".
        """
        self.config = config
        self.store = store
        self.base = base
        self.journal = journal
        self.ranks = ranks
        self.state = state
        self._scorer = scorer
        self._teller = teller
        self._optimizer = optimizer
        self._base_stamp = None if base is None else file_stamp(base)
        self._marked: int | None = None
        self._judge = Judge(
            feed_back=config.feed_back,
            is_gated=scorer.is_gate,
            greater_is_better=config.greater_is_better,
        )
        assert config.method != "ema", "a moving average is an EmaRun"
        self._rule = MergeRule(
            method=config.method,
            rank=config.rank,
            energy=config.energy,
            weights=(1.0 - config.weight, config.weight),
            seed=config.seed,
        )

    def is_due(self, step: int) -> bool:
        """Whether `step` is a merge point."""
        return self.config.is_merge_point(step)

    def at_step(self, step: int, metric: float | None = None) -> MergeReport | None:
        """After optimizer step `step`: merge if it is a merge point. Collective.

        Args:
            metric: score of the live weights, if the caller has one and gate is "none".

        Returns:
            The report of a merge; None where there was none, or weights were captured for the first
            time.
        """
        if not self.is_due(step):
            if metric is not None:
                self.on_metric(step, metric)
            return None
        with preserved_rng(self.store.devices):
            if self.state.partner is None:
                self._capture_first(step, metric)
                return None
            return self._merge(step, self.state.partner, metric)

    def on_metric(self, step: int, metric: float) -> None:
        """A metric of the live weights by the caller's own evaluation: without a gate it chooses
        the partner. Collective.
        """
        if self.config.gate != "none" or not self.config.feed_back or step == 0:
            return
        metric = self.ranks.mean(metric)
        if not math.isfinite(metric):
            self._teller.say(f"step {step}: {self.config.metric_for_best} is {metric}, not used")
            return
        state = replace(self.state, step=step, metric_seen=True)
        partner = self.state.partner
        if self._judge.is_better(metric, partner.score if partner else None):
            self.journal.capture(step)
            self._commit(replace(state, partner=Partner(step, metric)))
        elif not self.state.metric_seen:
            self._commit(state)

    def before_checkpoint(self, step: int) -> None:
        """Note which weights the checkpoint of `step` holds, once. Collective.

        The state of the last merge point is all that a merge needs of it.
        """
        if self.state.step != step and self._marked != step:
            self.journal.mark(step)
            self._marked = step

    def at_preemption(self, step: int) -> None:
        """A merge that is due is done by the run that resumes."""

    def final(self) -> Final:
        """What the run ends with: its live weights, or its side soup if training sees no merges;
        with a gate the side soup only if it scores better by more than chance. Collective.
        """
        partner = self.state.partner
        if self.config.feed_back or partner is None:
            return Final()
        merges = [entry["step"] for entry in self.state.history if entry["accepted"]]
        soup = f"{'side soup' if partner.step in merges else 'weights'} of step {partner.step}"
        # Training went on after the last merge point, or the best checkpoint was loaded.
        with preserved_rng(self.store.devices):
            current = self._scorer.score()
            beside = current and score_of(partner, scorer=self._scorer, journal=self.journal)
        if current is not None and beside is not None:
            is_better, remark = self._judge.ends_with(current, beside)
            self._teller.say(
                f"{self._teller.metric_name} of the live weights {current.value:.6g}, of the "
                f"{soup} {beside.value:.6g}{remark}"
            )
        else:
            # A capture that was never merged is just an old step.
            is_better = bool(merges)
        self._teller.say(f"the run ends with the {soup if is_better else 'live weights'}")
        return Final(self.journal.captured(partner.step), soup) if is_better else Final()

    def close(self) -> None:
        """Close the figures."""
        self._teller.close()

    def _capture_first(self, step: int, metric: float | None) -> None:
        found = self._scorer.score() if metric is None else Score(self.ranks.mean(metric))
        score = None if found is None else found.value
        if score is not None and not math.isfinite(score):
            name = self._teller.metric_name
            self._teller.say(f"step {step}: {name} is {score}; these weights are not captured")
            return
        self.journal.capture(step)
        seen = self.state.metric_seen or metric is not None
        partner = Partner(step, score, parts=() if found is None else found.parts)
        self._commit(replace(self.state, step=step, partner=partner, metric_seen=seen))
        known = "" if score is None else f" ({self._teller.metric_name} {score:.6g})"
        self._teller.say(
            f"step {step}: first merge point, weights captured{known}; the next one merges"
        )

    def _merge(self, step: int, partner: Partner, metric: float | None) -> MergeReport:
        started = time.perf_counter()
        former = self.state
        saved = self.journal.set_aside()
        before = self.store.checksum()
        try:
            trial = self._try(partner)
            with held_interrupts():
                report = self._report(step, partner, trial, started=started)
                self._conclude(report, partner, metric, trial=trial, saved=saved, before=before)
        except BaseException:
            # Ctrl-C, an evaluation that failed, a full disk: whoever catches it finds the old
            # weights, not half of new ones, nor new ones that the state knows nothing of.
            if self.state is former:
                with held_interrupts():
                    saved.restore(self.store)
            raise
        self._tell(report)
        return report

    def _report(self, step: int, partner: Partner, trial: _Trial, *, started: float) -> MergeReport:
        # Of the slowest rank, so that every rank has the same report.
        current, merged = _value(trial.current), _value(trial.merged)
        spent = self.ranks.gather((time.perf_counter() - started, self._scorer.take_seconds()))
        return MergeReport(
            step=step,
            partner_step=partner.step,
            accepted=not trial.reason and self._judge.accepts(current, merged),
            method=self.config.method,
            weight=self.config.weight,
            metric_current=current,
            metric_merged=merged,
            reason=trial.reason,
            seconds=max(seconds for seconds, _ in spent),
            score_seconds=max(seconds for _, seconds in spent),
            matrices=trial.matrices,
        )

    def _try(self, partner: Partner) -> _Trial:
        """Score, merge into the live weights, score again."""
        current = self._scorer.score()
        try:
            self.ranks.on_zero(self._check_base)
            matrices, found = merge_into(
                self.store,
                base=self.base,
                partner=self.journal.captured(partner.step),
                rule=self._rule,
                ranks=self.ranks,
                known=self.journal.cuts(partner),
            )
        except MergeError as error:
            return _Trial((), {}, current, None, str(error))
        return _Trial(matrices, found, current, self._scorer.score(), "")

    def _check_base(self) -> None:
        if self.base is not None and self._base_stamp is not None:
            check_untouched(self.base, self._base_stamp)

    def _conclude(
        self,
        report: MergeReport,
        partner: Partner,
        metric: float | None,
        *,
        trial: _Trial,
        saved: SetAside,
        before: str,
    ) -> None:
        """Keep or undo the merge that stands in the live weights; capture the best; commit."""
        # A metric that came with the step is of the weights before the merge.
        metric = None if metric is None else self.ranks.mean(metric)
        chosen, from_undo, metric_seen = self._judge.choose(report, self.state, metric)
        stays = report.accepted and self.config.feed_back
        scored = trial.current if from_undo else trial.merged
        if chosen is not None and scored is not None:
            chosen = replace(chosen, parts=scored.parts)
        if chosen is not None and not from_undo:
            self.journal.capture(chosen.step)
        if not stays:
            self._undo(saved, before)
        if chosen is not None and from_undo:
            self.journal.capture_set_aside(chosen.step)
        partner = self._with_cuts(report.step, trial, chosen, from_undo, partner)
        refused = 0 if report.accepted else self.state.refused_in_a_row + 1
        state = replace(
            self.state,
            step=report.step,
            partner=partner,
            metric_seen=metric_seen,
            refused_in_a_row=refused,
            history=(*self.state.history, report.to_json(matrices=False)),
        )
        self._commit(state, report=report)
        if stays and self.config.optimizer_state == "reset":
            reset_moments(self.store, self._optimizer)

    def _with_cuts(
        self, step: int, trial: _Trial, chosen: Partner | None, from_undo: bool, partner: Partner
    ) -> Partner:
        """The partner of the next merge, with what this one has found of it stored."""
        next_partner = chosen or partner
        has_cuts = self._rule.method == "svd_mean" and self._rule.rank is not None
        # Of another rank, after a resume with other settings, they are known and of no use.
        were_used = any("known" in matrix.solver for matrix in trial.matrices)
        if not has_cuts or not trial.matrices or self.store.is_lora:
            return next_partner
        if next_partner.cuts is not None and were_used:
            return next_partner

        def kept(found: Found) -> Cuts:
            if chosen is None:
                return found.partner
            return found.current if from_undo else found.merged(self._rule)

        # Around all threads: each puts the process's precision back to what it found.
        precise = full_precision(torch.empty(0, device=self.store.device))
        with precise, Workers(self.store.device) as workers:
            cuts = self.ranks.on_each(lambda: workers.map(kept, list(trial.found.values())))
        self.journal.store_cuts(step, dict(zip(trial.found, cuts, strict=True)))
        return replace(next_partner, cuts=step)

    def _undo(self, saved: SetAside, before: str) -> None:
        self.ranks.on_each(lambda: saved.restore(self.store))
        if any(self.ranks.gather(self.store.checksum() != before)):
            raise TrainingError(
                "the weights after the undo are not those before the merge: what was set aside in "
                f"{saved.place} was changed meanwhile; resume from a checkpoint"
            )

    def _commit(self, state: SoupState, *, report: MergeReport | None = None) -> None:
        """Write the state, the run goes on with it; then forget what no checkpoint needs."""
        self.state = self.journal.commit(state, report=report)
        self.journal.clean()

    def _tell(self, report: MergeReport) -> None:
        self._teller.tell(report, kind="" if self.config.feed_back else "side soup, ")
        if self.state.refused_in_a_row == REFUSALS_BEFORE_ADVICE:
            self._teller.say(advice(self.config, kept_energy=report.kept_energy))
