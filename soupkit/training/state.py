"""What a run's merges need to go on after a stop: the folder `<output_dir>/soup`, versioned by
step.

    soup/state-00000020.json              the state after step 20: base, partner, history; written
                                          last, at once
    soup/partner-00000010.safetensors     the weights captured at step 10, in their own dtypes
    soup/report-00000020.json             the whole report of the merge at step 20
    soup/cuts-00000020-00000-of-00002.safetensors
                                          truncated deltas of the partner, by rank 0 of 2
    soup/average-00000020.safetensors     the moving average at step 20 (method "ema")
    soup/weights-00000015.json            checksum of the weights in the checkpoint of step 15
    soup/undo/weights.safetensors         the weights before the merge in work; of use to the living
                                          process only
    soup/base/                            the step-0 weights as a model folder, where no other
                                          folder holds them
    soup/checkpoints.json                 checkpoints that Soup.save was called for
    soup/lock                             held by the living run

A run that resumes at step N takes the newest state of a step <= N, and deletes the later ones when
it first writes. What belongs to a checkpoint that still exists is kept, and the newest. Only rank 0
writes. It knows nothing of frameworks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soupkit.errors import TrainingError
from soupkit.files import PENDING_PREFIX, atomic_write_json, fsync_path, read_json

SCHEMA = 1
_STATE = re.compile(r"state-(\d+)\.json")
_NUMBERED = re.compile(
    r"(?:state|partner|average|report|weights|cuts)-(\d+)(?:-\d+-of-\d+)?\.(?:json|safetensors)"
)


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """Which model the deltas are taken against.

    Args:
        path: folder or hub id; None: `soup/base`, wherever the soup folder lies now.
        revision: of the hub id.
        fingerprint: of its weights.
    """

    path: str | None
    revision: str | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Partner:
    """Captured weights.

    Args:
        step: that they are of. score: None: captured without one.
        cuts: step of the merge that stored the truncations of their deltas; None: not known yet.
        parts: by rank, the score of each part of the held-out data; () where they are not known.
    """

    step: int
    score: float | None
    cuts: int | None = None
    parts: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Partner:
        """Read back; states of older versions have no parts, or all in one list."""
        parts = [rank for rank in value.get("parts", ()) if isinstance(rank, list)]
        return cls(**{**value, "parts": tuple(map(tuple, parts))})


@dataclass(frozen=True, slots=True)
class AverageRecord:
    """A stored moving average: the step it is of, and the updates it has seen."""

    step: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class SoupState:
    """All that decides how a run's merges go on after `step`.

    Args:
        weights: checksum of the parameters that take part, as the run goes on with them.
        dtypes: of those parameters; the checksum means something in the same ones only.
        metric_seen: an evaluation has given a metric, so metrics choose the partner (gate "none").
        refused_in_a_row: merges refused since the last accepted one.
        history: the sums of every merge so far.
        average: of method "ema", where it has begun.
        parameters: digest of the names of those that take part; "" in states of older versions.
    """

    step: int
    base: BaseRecord
    weights: str
    dtypes: str
    partner: Partner | None = None
    metric_seen: bool = False
    refused_in_a_row: int = 0
    history: tuple[dict[str, Any], ...] = ()
    average: AverageRecord | None = None
    parameters: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SoupState:
        """Read back what to_json gave; KeyError, TypeError or ValueError for anything else."""
        fields = dict(value)
        if fields.pop("schema") != SCHEMA:
            raise ValueError(f"schema {value['schema']!r}, this soupkit reads {SCHEMA}")
        partner, average = fields.pop("partner"), fields.pop("average", None)
        return replace(
            cls(**{**fields, "base": BaseRecord(**fields["base"])}),
            partner=None if partner is None else Partner.from_json(partner),
            history=tuple(fields["history"]),
            average=None if average is None else AverageRecord(**average),
        )


class SoupFolder:
    """The files of one run's merges."""

    def __init__(self, root: Path) -> None:
        """Args: root: `<output_dir>/soup`; made by the first write."""
        self.root = root.resolve()

    @property
    def base_path(self) -> Path:
        """Where step-0 weights are kept if nothing else holds them."""
        return self.root / "base"

    @property
    def pending_base_path(self) -> Path:
        """Where step-0 weights wait until it is known that the run is no resumed one."""
        return self.root / (PENDING_PREFIX + "base")

    @property
    def undo_path(self) -> Path:
        """The weights before the merge in work."""
        return self.root / "undo" / "weights.safetensors"

    def partner_path(self, step: int) -> Path:
        """The weights captured at `step`."""
        return self.root / f"partner-{step:08d}.safetensors"

    def cuts_path(self, step: int, rank: int, world_size: int) -> Path:
        """The truncated deltas that a rank found in the merge at `step`."""
        return self.root / f"cuts-{step:08d}-{rank:05d}-of-{world_size:05d}.safetensors"

    def cuts_paths(self, step: int) -> list[Path]:
        """Those of all ranks that are there."""
        return sorted(self.root.glob(f"cuts-{step:08d}-*.safetensors"))

    def all_cuts_paths(self, step: int) -> list[Path]:
        """Those of all ranks that ran then. Raises TrainingError if one is gone."""
        found = self.cuts_paths(step)
        world_size = int(found[0].stem.rsplit("-", 1)[1]) if found else 1
        expected = [self.cuts_path(step, rank, world_size) for rank in range(world_size)]
        if gone := sorted({*expected} - {*found}):
            raise TrainingError(f"{gone[0]} is gone; resume from an older checkpoint")
        return expected

    def mark_path(self, step: int) -> Path:
        """The checksum of the weights in the checkpoint of `step`, where no state has it."""
        return self.root / f"weights-{step:08d}.json"

    def write_mark(self, step: int, weights: str, dtypes: str) -> None:
        """Note the checksum of the weights at `step` and their dtypes."""
        self.root.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self.mark_path(step), {"weights": weights, "dtypes": dtypes})

    def read_mark(self, step: int) -> tuple[str, str] | None:
        """(checksum, dtypes) noted at `step`, or None. Raises TrainingError if it is damaged."""
        path = self.mark_path(step)
        try:
            value = read_json(path)
            return str(value["weights"]), str(value["dtypes"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{path}: {error}; delete it to resume without comparing the weights"
            ) from error

    def average_path(self, step: int) -> Path:
        """The moving average as it was at `step`."""
        return self.root / f"average-{step:08d}.safetensors"

    def state_path(self, step: int) -> Path:
        """The state after `step`."""
        return self.root / f"state-{step:08d}.json"

    def report_path(self, step: int) -> Path:
        """The report of the merge at `step`."""
        return self.root / f"report-{step:08d}.json"

    def steps(self) -> list[int]:
        """Steps that have a state, ascending."""
        if not self.root.is_dir():
            return []
        found = (_STATE.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self, *, at_most: int) -> SoupState | None:
        """The state of the newest step <= `at_most`, or None.

        Raises:
            TrainingError: that file is no state of this version.
        """
        steps = [step for step in self.steps() if step <= at_most]
        if not steps:
            return None
        path = self.state_path(steps[-1])
        try:
            return SoupState.from_json(read_json(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{path}: not a state of this soupkit ({error}); delete it to resume from an "
                "older one"
            ) from error

    def keep_undo_as_partner(self, step: int) -> None:
        """The weights before the merge become those captured at `step`; nothing is copied."""
        fsync_path(self.undo_path)
        os.replace(self.undo_path, self.partner_path(step))
        fsync_path(self.root)

    def write_report(self, step: int, report: Mapping[str, Any]) -> None:
        """Keep the whole report of the merge at `step`."""
        self.root.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self.report_path(step), report)

    def write_state(self, state: SoupState) -> None:
        """Make `state` the newest; everything it names must be on the disk already."""
        self.root.mkdir(parents=True, exist_ok=True)
        atomic_write_json(self.state_path(state.step), state.to_json())

    def forget_after(self, step: int) -> list[int]:
        """Delete all of later steps than `step`, states first; returns the steps of the states."""
        later = [found for found in self.steps() if found > step]
        for found in later:
            self.state_path(found).unlink()
        if self.root.is_dir():
            for path in self.root.iterdir():
                match = _NUMBERED.fullmatch(path.name)
                if match and int(match[1]) > step:
                    path.unlink(missing_ok=True)
        return later

    def drop_undo(self) -> None:
        """Delete the weights before the last merge."""
        shutil.rmtree(self.undo_path.parent, ignore_errors=True)

    def clean(self, checkpoint_steps: Iterable[int]) -> None:
        """Delete states and captures that none of these checkpoints needs; the newest stays."""
        checkpoint_steps = set(checkpoint_steps)
        marks = sorted(self.root.glob("weights-*.json"))
        for path in marks[:-1]:
            if path not in map(self.mark_path, checkpoint_steps):
                path.unlink(missing_ok=True)
        steps = self.steps()
        if not steps:
            return
        newest_for = (
            max((found for found in steps if found <= step), default=None)
            for step in checkpoint_steps
        )
        kept = {steps[-1], *(step for step in newest_for if step is not None)}
        for step in steps:
            if step not in kept:
                self.state_path(step).unlink(missing_ok=True)
        needed = set()
        for step in kept:
            state = self.newest(at_most=step)
            if state is not None and state.partner is not None:
                needed.add(self.partner_path(state.partner.step))
                if state.partner.cuts is not None:
                    needed.update(self.cuts_paths(state.partner.cuts))
            if state is not None and state.average is not None:
                needed.add(self.average_path(state.average.step))
        for kind in ("partner", "average", "cuts"):
            for path in self.root.glob(f"{kind}-*.safetensors"):
                if path not in needed:
                    path.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete what a killed process left half written. Call it before any write."""
        self.drop_undo()
        for path in self.root.glob(PENDING_PREFIX + "*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
