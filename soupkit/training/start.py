"""From a model that is about to be trained to a SoupRun: a fresh start, or a resume at step N.

Whether a run is resumed is not always known when its weights are still those of step 0 (Accelerate
loads a checkpoint after all objects are built), so `Preparation` looks at the model first and
`start` decides later. All faults that can be seen before step 1 are raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from soupkit.checkpoint import Checkpoint, open_checkpoint
from soupkit.config import SoupConfig
from soupkit.errors import TrainingError
from soupkit.tracking import ScalarWriter, say
from soupkit.training.average import Average
from soupkit.training.base import (
    NO_BASE,
    check_base,
    check_fingerprint,
    find_base,
    open_base,
    promote_pending,
)
from soupkit.training.checkpoint_tensors import checkpoint_tensors
from soupkit.training.checks import check_folder, check_partner, check_resumed
from soupkit.training.ema_run import EmaRun
from soupkit.training.journal import Journal, agreed_checksum
from soupkit.training.moments import check_reset
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.scoring import Evaluate, Scorer
from soupkit.training.served import on_zero_reading
from soupkit.training.snapshot import Snapshot
from soupkit.training.soup import SoupRun
from soupkit.training.state import BaseRecord, SoupFolder, SoupState
from soupkit.training.telling import Teller


class Preparation:
    """A model, checked, with its soup folder; every public method is collective."""

    def __init__(
        self,
        model: nn.Module,
        config: SoupConfig,
        *,
        output_dir: Path,
        base: str | Path | None,
        save_companions: Callable[[Path], None],
    ) -> None:
        """Find the ranks and the parameters, and make the folder usable.

        Args:
            model: wrapped or not; its weights may be those of step 0 or not yet loaded.
            save_companions: writes tokenizer files into a folder.

        Raises:
            TrainingError: a strategy that is not supported, ranks that differ, a folder that not
                all ranks see.
        """
        self.ranks = Ranks.current()
        self.config = config
        self.store = ParamStore(model, include=config.include, exclude=config.exclude)
        self.folder = SoupFolder(output_dir / "soup")
        self.given_base = base
        self.save_companions = save_companions
        self._record: BaseRecord | None = None
        self._is_adopted = False
        agreed_checksum(self.store, self.ranks)
        check_folder(self.folder, config, self.store, self.ranks)
        self._say(self.describe())

    def describe(self) -> str:
        """One line: strategy, ranks, tensors, dtype."""
        config = self.config
        kept = f", energy {config.energy:g}" if config.energy is not None else ""
        kept = f", rank {config.rank}" if config.rank is not None else kept
        return (
            f"{self.store.strategy}, ranks: {self.ranks.world_size}, "
            f"{self.store.count}, {self.store.description}; "
            f"{config.method}{kept} every {config.merge_every_n_steps} "
            f"steps, gate {config.gate}"
        )

    def find_base(self, *, is_resumed: bool = False) -> BaseRecord:
        """Decide the base from the present weights, those of step 0 unless the run is resumed."""
        try:
            tensors = checkpoint_tensors(self.store.model)
        except TrainingError:
            if not self.store.is_lora:
                raise
            # Its factors are merged all the same; an export is refused by check_export.
            self._record = NO_BASE
            return self._record
        self._record = on_zero_reading(
            self.ranks,
            tensors,
            lambda tensors: find_base(
                self.store.model,
                tensors,
                self.folder,
                given=self.given_base,
                save_companions=self.save_companions,
                is_resumed=is_resumed,
            ),
        )
        return self._record

    def start(
        self,
        step: int,
        *,
        evaluate: Evaluate | None,
        optimizer: Any,
        logdir: Path | None,
        checkpoint_steps: Callable[[], Iterable[int] | None],
        metric_name: str,
        check_weights: bool = True,
        check: Callable[[Checkpoint | None], None] = lambda base: None,
    ) -> SoupRun | EmaRun:
        """Begin a run at step 0, or go on after `step`.

        Args:
            check_weights: whether the model holds the weights of `step` now, so that they can be
                compared.
            check: raises what speaks against the run's base, on one rank, before anything of an
                earlier run is deleted.
            others: as SoupRun takes them; logdir None: no scalars.

        Raises:
            TrainingError: nothing is known of the base, or state and weights do not belong
                together.
        """
        if self.config.optimizer_state == "reset":
            check_reset(self.store, optimizer)
        state = self._fresh(check) if step == 0 else self._resumed(step, check_weights)
        base = open_base(state.base, self.folder)
        if step > 0:
            self.ranks.on_zero(lambda: check(base))
            if base is not None:
                self.ranks.on_zero(lambda: check_fingerprint(base, state.base))
                check_base(base, self.store)
        journal = Journal(
            self.folder,
            self.store,
            self.ranks,
            checkpoint_steps=checkpoint_steps,
            resumed_at=step if step > 0 else None,
            undo_in_memory=self.config.undo == "memory",
        )
        has_writer = logdir is not None and self.ranks.is_zero
        writer = ScalarWriter(logdir, step=step) if has_writer and logdir else None
        shared: dict[str, Any] = {
            "store": self.store,
            "base": base,
            "journal": journal,
            "ranks": self.ranks,
            "state": state,
            "scorer": Scorer(
                evaluate if self.config.gate == "metric" else None,
                store=self.store,
                ranks=self.ranks,
                seed=self.config.seed,
            ),
            "teller": Teller(self.ranks, writer=writer, metric_name=metric_name),
        }
        if self.config.method == "ema":
            average = self._average(step, state)
            # A run whose method changes leaves what belongs to the former one behind.
            shared["state"] = replace(state, partner=None)
            return EmaRun(self.config, average=average, **shared)
        shared["state"] = replace(state, average=None)
        return SoupRun(self.config, optimizer=optimizer, **shared)

    def _average(self, step: int, state: SoupState) -> Average:
        """The moving average as it was at `step`, or one that has not begun.

        Raises:
            TrainingError: it had begun, and its bits of that step were not stored.
        """
        config, folder, record = self.config, self.folder, state.average
        average = self.ranks.on_each(
            lambda: Average(
                self.store, ranks=self.ranks, place=config.ema_place, folder=folder.root
            )
        )
        first = (config.start_after_step // config.ema_every_n_steps + 1) * config.ema_every_n_steps
        if record is not None and record.step == step:
            self.ranks.on_each(
                lambda: average.load(
                    Snapshot(folder.average_path(step)), num_updates=record.num_updates
                )
            )
        elif step >= first and not self._is_adopted:
            newest = "" if record is None else f", its newest is of step {record.step}"
            raise TrainingError(
                f"{folder.root} has no moving average of step {step}{newest}: the run had another "
                "method then, or a loop of your own did not call soup.save(folder) beside that "
                "checkpoint; resume from a checkpoint that has one, or set start_after_step="
                f"{step}, so that the average begins there"
            )
        return average

    def _fresh(self, check: Callable[[Checkpoint | None], None]) -> SoupState:
        record = self._record or self.find_base()
        pending = self.folder.pending_base_path

        def check_all() -> None:
            is_pending = pending.is_dir()
            base = open_checkpoint(pending) if is_pending else open_base(record, self.folder)
            check(base)
            if base is not None:
                check_base(base, self.store)

        self.ranks.on_zero(check_all)
        checksum = self.store.checksum()
        state = SoupState(
            step=0,
            base=record,
            weights=checksum,
            dtypes=self.store.dtypes,
            parameters=self.store.names_digest,
        )

        def write() -> None:
            gone = self.folder.forget_after(-1)
            if any(gone):
                say(
                    f"a new run starts in {self.folder.root}: the state of an earlier one up to "
                    f"step {gone[-1]} is deleted"
                )
            promote_pending(self.folder)
            self.folder.write_state(state)

        self.ranks.on_zero(write)
        return state

    def _resumed(self, step: int, check_weights: bool) -> SoupState:
        state = self.ranks.on_zero(lambda: self.folder.newest(at_most=step))
        self._record = None
        self._is_adopted = state is None
        if state is None:
            state = self._adopted(step)
        elif self.given_base is not None:
            state = self._with_given_base(state)
        if check_weights:
            check_resumed(state, step, folder=self.folder, store=self.store, ranks=self.ranks)
        check_partner(state, folder=self.folder, store=self.store, ranks=self.ranks)
        # The weights that waited to become the base are not those of step 0.
        self.ranks.on_zero(self.folder.remove_leftovers)
        return state

    def _adopted(self, step: int) -> SoupState:
        """A run without a state here: only a base that the user names is known to be of step 0."""
        if self.given_base is None:
            raise TrainingError(
                f"resumed at step {step}, and {self.folder.root} has no state of that step or "
                "before: the weights that this run started from are not known; name that model "
                "with base="
            )
        record = self.find_base(is_resumed=True)
        self._say(
            f"resumed at step {step} without a state of soupkit: the next merge point captures"
        )
        return SoupState(
            step=step,
            base=record,
            weights=self.store.checksum(),
            dtypes=self.store.dtypes,
            parameters=self.store.names_digest,
        )

    def _with_given_base(self, state: SoupState) -> SoupState:
        record = self.find_base(is_resumed=True)
        if record.fingerprint != state.base.fingerprint:
            raise TrainingError(
                f"base={str(self.given_base)!r} has other weights than the base this run began "
                f"with ({state.base.path or self.folder.base_path}); leave base= out, or start a "
                "new run"
            )
        return replace(state, base=record)

    def _say(self, text: str) -> None:
        if self.ranks.is_zero:
            say(text)
