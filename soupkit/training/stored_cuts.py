"""Truncated deltas that a merge has found, kept for the next one.

The partner of the next merge is one of three: the partner of this one, the weights before it, or
its result. The truncation of each is known when it ends, so the next merge decomposes one delta
instead of two, and starts that one from a basis that is nearly right. They are files of the state
and not of the process's memory, so a resumed run finds the same bits. Each rank writes what it has
found, in a file of its own; all ranks read all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit.cuts import Cuts, cuts_of_sum
from soupkit.merge import MergeRule
from soupkit.svd import TruncatedSVD
from soupkit.training.snapshot import Snapshot, write_tensors

_FIELDS = ("left", "right", "singular_values", "total_energy")


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What one merge has found of one parameter, in host memory: truncations of the run's delta and
    of the partner's.
    """

    current: Cuts
    partner: Cuts

    def merged(self, rule: MergeRule) -> Cuts:
        """The truncation of the merged delta."""
        cuts = cuts_of_sum((self.current, self.partner), rule.weights_for(2), rule.rank)
        assert cuts is not None, "a rule with a rank"
        return cuts


class _Tensors:
    """A dictionary as a TensorSource."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.names = tuple(sorted(tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def on_host(cuts: Cuts) -> Cuts:
    """The same in host memory."""
    return tuple(cut.to("cpu") for cut in cuts)


def write_cuts(path: Path, cuts: Mapping[str, Cuts]) -> None:
    """Replace the file `path` by the cuts of some parameters, at once; OSError."""
    tensors = {}
    for name, of_name in cuts.items():
        for index, cut in enumerate(of_name):
            energy = torch.tensor(cut.total_energy, dtype=torch.float64)
            values = (cut.left, cut.right, cut.singular_values, energy)
            for field, value in zip(_FIELDS, values, strict=True):
                tensors[f"{name}/{index}/{field}"] = value.contiguous()
    write_tensors(path, _Tensors(tensors), durable=True)


class StoredCuts:
    """The cuts that the ranks of a run have stored at one step."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files of all ranks. Raises TrainingError if one is damaged."""
        self._files = [Snapshot(path) for path in paths]
        self._file_of = {name: file for file in self._files for name in file.names}

    def of(self, name: str) -> Cuts | None:
        """The cuts of one parameter, mapped from the file; None if there are none."""
        found: list[TruncatedSVD] = []
        while f"{name}/{len(found)}/left" in self._file_of:
            left, right, values, energy = (
                self._file_of[key].tensor(key)
                for key in (f"{name}/{len(found)}/{field}" for field in _FIELDS)
            )
            found.append(TruncatedSVD(left, right, values, float(energy), "known"))
        return tuple(found) or None
