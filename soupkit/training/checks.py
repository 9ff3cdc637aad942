"""What has to hold before a run goes on: its folder, the room in it, and the weights it resumes."""

from __future__ import annotations

import math
import shutil

from soupkit.config import SoupConfig
from soupkit.errors import TrainingError
from soupkit.files import PENDING_PREFIX
from soupkit.training.claim import claim
from soupkit.training.journal import agreed_checksum
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.snapshot import Snapshot
from soupkit.training.state import SoupFolder, SoupState
from soupkit.training.stored_cuts import StoredCuts


def check_folder(folder: SoupFolder, config: SoupConfig, store: ParamStore, ranks: Ranks) -> None:
    """Make the folder, hold it for this run, and see that all ranks see it. Collective.

    Raises:
        TrainingError: another living run holds it, it has no room, or not all ranks see it.
    """
    probe = folder.root / f"{PENDING_PREFIX}probe"

    def write() -> None:
        folder.root.mkdir(parents=True, exist_ok=True)
        claim(folder.root)
        folder.remove_leftovers()
        probe.touch()
        _check_space(folder, config, store)

    ranks.on_zero(write)
    seen = ranks.gather(probe.exists())
    ranks.on_zero(lambda: probe.unlink(missing_ok=True))
    if not all(seen):
        raise TrainingError(
            f"rank {seen.index(False)} does not see {folder.root} as rank 0 wrote it: put "
            "output_dir on a file system that all ranks share"
        )


def _check_space(folder: SoupFolder, config: SoupConfig, store: ParamStore) -> None:
    """Raise TrainingError if a merge point could not write the undo file and a capture."""
    needed, free = 2 * store.nbytes, shutil.disk_usage(folder.root).free
    if config.method == "ema":
        needed = sum(4 * math.prod(store.shape(name)) for name in store.names)
        needed *= 2 if config.ema_place == "disk" else 1
    if free < needed:
        raise TrainingError(
            f"{folder.root} has {free / 1e9:.3g} GB free, a merge needs {needed / 1e9:.3g} GB "
            "beside the checkpoints: make room, or choose another output_dir"
        )


def check_resumed(
    state: SoupState, step: int, *, folder: SoupFolder, store: ParamStore, ranks: Ranks
) -> None:
    """Raise TrainingError unless the live weights are those that the run had after `step`, as far
    as that was noted. Collective.
    """
    if state.parameters and state.parameters != store.names_digest:
        raise TrainingError(
            f"resumed at step {step} with other parameters than the run began with: set include= "
            "and exclude= as they were, and train the same weights, or start a new run"
        )
    expected, dtypes = state.weights, state.dtypes
    place = folder.state_path(state.step)
    mark = ranks.on_zero(lambda: folder.read_mark(step))
    if mark is not None:
        (expected, dtypes), place = mark, folder.mark_path(step)
    elif state.step != step:
        return
    # A checksum means something in the same dtypes only.
    if dtypes == store.dtypes and expected != agreed_checksum(store, ranks):
        raise TrainingError(
            f"the weights resumed at step {step} are not those of {place}; resume from the "
            "checkpoint of this run, or another one of it, or delete that file to resume from "
            "the state before"
        )


def check_partner(state: SoupState, *, folder: SoupFolder, store: ParamStore, ranks: Ranks) -> None:
    """Raise TrainingError if a merge would not find what the state says is captured."""
    if state.partner is None:
        return
    path = folder.partner_path(state.partner.step)
    partner = ranks.on_each(lambda: Snapshot(path))
    for name in store.names:
        if name not in partner.names or partner.shape(name) != store.shape(name):
            raise TrainingError(
                f"{partner.path} was captured without {name}, or in another shape: resume with "
                "the include= and exclude= that the run began with, or start a new run"
            )
    cuts = state.partner.cuts
    if cuts is not None:
        # Opened for their faults: a merge would find them after steps in vain.
        ranks.on_each(lambda: StoredCuts(folder.all_cuts_paths(cuts)))
