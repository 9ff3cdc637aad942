"""What a merge point writes, and in which order, so that the folder is of one step or the next.

    set aside the weights before the merge; capture the partner to be; report; state; delete what no
    checkpoint needs

The state names files that are on the disk already, so a process that dies anywhere leaves one that
holds. Only rank 0 writes; every public method is collective, and a fault of one rank is raised on
all. What is captured, and why, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from soupkit.cuts import Cuts
from soupkit.delta import TensorSource
from soupkit.errors import TrainingError
from soupkit.tracking import say
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.report import MergeReport
from soupkit.training.served import ShardedSource, on_zero_reading
from soupkit.training.snapshot import Snapshot, write_tensors
from soupkit.training.state import Partner, SoupFolder, SoupState
from soupkit.training.stored_cuts import StoredCuts, write_cuts
from soupkit.training.undo import InMemory, OnDisk, SetAside


class Journal:
    """The writes of one run into its soup folder."""

    def __init__(
        self,
        folder: SoupFolder,
        store: ParamStore,
        ranks: Ranks,
        *,
        checkpoint_steps: Callable[[], Iterable[int] | None],
        resumed_at: int | None,
        undo_in_memory: bool = False,
    ) -> None:
        """Nothing is written yet.

        Args:
            checkpoint_steps: steps of the checkpoints that exist; None: unknown, keep every state.
            resumed_at: step of the checkpoint this run goes on from; what the folder holds of later
                steps is deleted when this run writes there, no sooner. None: a new run.
            undo_in_memory: whether weights are set aside in host memory instead of on disk.
        """
        self.folder = folder
        self._store = store
        self._ranks = ranks
        self._checkpoint_steps = checkpoint_steps
        self._resumed_at = resumed_at
        self.began_at = resumed_at or 0
        self._undo_in_memory = undo_in_memory

    def set_aside(self) -> SetAside:
        """Copy the live weights, to the undo file, which the next commit deletes, or to memory."""
        if self._undo_in_memory:
            return self._ranks.on_each(lambda: InMemory(self._store))

        def write(source: TensorSource) -> None:
            self._forget_later_steps()
            write_tensors(self.folder.undo_path, source, durable=False)

        on_zero_reading(self._ranks, self._store, write)
        return self._ranks.on_each(lambda: OnDisk(Snapshot(self.folder.undo_path)))

    def captured(self, step: int) -> Snapshot:
        """The weights captured at `step`. Raises TrainingError if they are gone or damaged."""
        return self._ranks.on_each(lambda: Snapshot(self.folder.partner_path(step)))

    def capture(self, step: int) -> None:
        """Write the live weights as those captured at `step`; a commit at `step` must follow."""

        def write(source: TensorSource) -> None:
            self._forget_later_steps()
            write_tensors(self.folder.partner_path(step), source, durable=True)

        on_zero_reading(self._ranks, self._store, write)

    def capture_set_aside(self, step: int) -> None:
        """The weights that were set aside, and are live again, become those captured at `step`."""
        if self._undo_in_memory:
            self.capture(step)
        else:
            self._ranks.on_zero(lambda: self.folder.keep_undo_as_partner(step))

    def commit(self, state: SoupState, *, report: MergeReport | None = None) -> SoupState:
        """Make `state` the newest; returns it with the live weights' checksum.

        Raises:
            TrainingError: ranks hold different weights.
        """
        weights = agreed_checksum(self._store, self._ranks)
        state = replace(
            state,
            weights=weights,
            dtypes=self._store.dtypes,
            parameters=self._store.names_digest,
        )

        def write() -> None:
            self._forget_later_steps()
            if report is not None:
                self.folder.write_report(report.step, report.to_json())
            # The state says more of the weights of this step than a mark from before it.
            self.folder.mark_path(state.step).unlink(missing_ok=True)
            self.folder.write_state(state)

        self._ranks.on_zero(write)
        return state

    def store_cuts(self, step: int, cuts: Mapping[str, Cuts]) -> None:
        """Write what this rank found; a commit at `step` must follow."""

        def make_room() -> None:
            self._forget_later_steps()
            # Of an attempt with another number of ranks that was killed before its commit.
            for path in self.folder.cuts_paths(step):
                path.unlink()

        # Before any rank writes what this would delete.
        self._ranks.on_zero(make_room)
        path = self.folder.cuts_path(step, self._ranks.rank, self._ranks.world_size)
        self._ranks.on_each(lambda: write_cuts(path, cuts))

    def cuts(self, partner: Partner) -> StoredCuts | None:
        """What is known of a partner. Raises TrainingError if its files are gone or damaged."""
        step = partner.cuts
        if step is None:
            return None
        return self._ranks.on_each(lambda: StoredCuts(self.folder.all_cuts_paths(step)))

    def report(self, report: MergeReport) -> None:
        """Keep the report of a comparison that changes no state."""

        def write() -> None:
            self._forget_later_steps()
            self.folder.write_report(report.step, report.to_json())

        self._ranks.on_zero(write)

    def mark(self, step: int) -> None:
        """Note the checksum of the live weights as that of the checkpoint of `step`."""
        weights, dtypes = agreed_checksum(self._store, self._ranks), self._store.dtypes

        def write() -> None:
            self._forget_later_steps()
            self.folder.write_mark(step, weights, dtypes)

        self._ranks.on_zero(write)

    def mark_changed(self, step: int, state: SoupState) -> None:
        """After the checkpoint of `step`: note its weights anew, if they are not those noted before
        it (a later callback changed them, or the optimizer, for an evaluation). Collective.
        """
        mark = self._ranks.on_zero(lambda: self.folder.read_mark(step))
        noted = mark[0] if mark else state.weights
        # Agreed on: of replicas each rank sums its own, and all have to take the same way.
        if noted != agreed_checksum(self._store, self._ranks):
            self.mark(step)

    def store_average(self, average: ShardedSource, step: int) -> None:
        """Write a moving average as that of `step`; a commit at `step` must follow."""

        def write(source: TensorSource) -> None:
            self._forget_later_steps()
            write_tensors(self.folder.average_path(step), source, durable=True)

        on_zero_reading(self._ranks, average, write)

    def clean(self) -> None:
        """Delete what belongs to no checkpoint any more, and the weights that were set aside."""

        def delete() -> None:
            self._forget_later_steps()
            steps = self._checkpoint_steps()
            if steps is not None:
                self.folder.clean(steps)
            self.folder.drop_undo()

        self._ranks.on_zero(delete)

    def _forget_later_steps(self) -> None:
        step, self._resumed_at = self._resumed_at, None
        gone = [] if step is None else self.folder.forget_after(step)
        if gone:
            say(f"resumed at step {step}: the state of later steps up to {gone[-1]} is deleted")


def agreed_checksum(store: ParamStore, ranks: Ranks) -> str:
    """The checksum of the parameters, which must be the same on all ranks. Collective.

    Raises:
        TrainingError: ranks hold different weights.
    """
    checksums = ranks.gather(store.checksum())
    if len(set(checksums)) > 1:
        raise TrainingError(
            f"the {ranks.world_size} ranks hold different weights; soupkit needs the same on each: "
            "wrap the model in DistributedDataParallel (accelerator.prepare does) before Soup"
        )
    seen: dict[tuple[Any, ...], int] = {}
    for sums in ranks.gather(store.replica_sums()):
        for place, value in sums.items():
            if seen.setdefault(place, value) != value:
                raise TrainingError(
                    f"{place[0]} is held by several ranks, which have different values of it: sum "
                    "its gradients over them, or leave it out of the merges with exclude="
                )
    return checksums[0]
