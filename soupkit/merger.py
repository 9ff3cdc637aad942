"""Merging the parameters of checkpoints side by side, each written to its place as it is done.

All shapes are known before a weight is read, so threads of one core each write what they have
merged straight into the files; the bits do not depend on how many threads there are. Plain means
run in blocks (soupkit.mean), 5 MB a thread. svd_mean and monosoup need the whole matrix of each
checkpoint: as many are in work as threads and 4 GiB allow, a larger one alone.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from soupkit.checkpoint import Checkpoint
from soupkit.delta import layout, subtract
from soupkit.errors import CheckpointError
from soupkit.export import Progress
from soupkit.mean import BLOCK_ENTRIES, Sums, joined, mean_blocks
from soupkit.merge import MatrixReport, MergeRule, merge_deltas
from soupkit.numeric import full_precision, rounded
from soupkit.pairs import naming_the_culprit
from soupkit.shards import ShardWriter
from soupkit.tensorfile import TensorSpec
from soupkit.window import Job, as_they_end
from soupkit.workers import Workers

# Entries of a job: 6 ms or more, so that handing it over costs nothing, and few enough to keep all
# threads busy to the end.
_JOB_ENTRIES = 2**21
# Of the jobs under way; a whole matrix takes a float32 copy for each checkpoint and some more:
# the merged delta, and factors and products of the decomposition.
_MOST_BYTES = 2**32
_MORE_COPIES = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What a job wrote: bytes of the checkpoints that it read, and its share of the report."""

    name: str
    nbytes: int
    start: int = 0
    sums: Sums | None = None
    report: MatrixReport | None = None
    seconds: float = 0.0


class Merger:
    """Merges parameters side by side and collects their reports.

    Attributes: reports: one for each floating parameter that has entries, in the order of `specs`.
    """

    def __init__(
        self,
        base: Checkpoint,
        checkpoints: Sequence[Checkpoint],
        rule: MergeRule,
        specs: Mapping[str, TensorSpec],
    ) -> None:
        """Args: specs: of the result, by parameter; shapes are the checkpoints'."""
        self._base = base
        self._checkpoints = checkpoints
        self._rule = rule
        self._weights = rule.weights_for(len(checkpoints))
        self._specs = specs
        self.reports: tuple[MatrixReport, ...] = ()

    def write(self, writer: ShardWriter, progress: Progress | None) -> None:
        """Write every parameter and keep their reports.

        Args:
            progress: as of soupkit.offline.merge_checkpoints.

        Raises:
            CheckpointError: whole numbers on which the checkpoints differ. MergeError: a weight is
                not finite, or beyond the range of its dtype. OSError: the disk refused.
        """
        found: dict[str, list[Written]] = {name: [] for name in self._specs}
        done, total = 0, sum(self._read_bytes(name) for name in self._specs)
        # Its settings are the process's: threads of their own would undo each other's.
        with full_precision(torch.empty(0)), Workers() as workers:
            for part in as_they_end(workers, self._jobs(writer), most_bytes=_MOST_BYTES):
                found[part.name].append(part)
                done += part.nbytes
                if progress:
                    progress(part.name, done, total)
        reports = (self._report(name, parts) for name, parts in found.items())
        self.reports = tuple(one for one in reports if one is not None)

    def _read_bytes(self, name: str, entries: int | None = None) -> int:
        """Bytes of some entries of a parameter, or of all, in the checkpoints."""
        shape = self._specs[name].shape
        entries = math.prod(shape) if entries is None else entries
        return sum(entries * one.dtype(name).itemsize for one in self._checkpoints)

    def _jobs(self, writer: ShardWriter) -> Iterator[Job[Written]]:
        """What makes the result, whole matrices first and the largest of them before: two of them
        at the end would leave threads idle.
        """
        whole = [name for name in self._specs if self._is_whole(name)]
        for name in sorted(whole, key=lambda name: -self._specs[name].nbytes):
            ours, theirs = self._specs[name].shape, self._base.shape(name)
            # A scalar has no rows.
            entries = math.prod((*map(min, ours[:1], theirs[:1]), *theirs[1:]))
            need = 4 * entries * (len(self._checkpoints) + _MORE_COPIES)
            yield Job(need, partial(self._begin, name, partial(self._merge_whole, writer, name)))
            # Rows that the base has not are averaged.
            yield from self._mean_jobs(writer, name, entries)
        for name in self._specs:
            if not self._base.dtype(name).is_floating_point:
                yield Job(0, partial(self._begin, name, partial(self._copy, writer, name)))
            elif not self._is_whole(name):
                yield from self._mean_jobs(writer, name, 0)

    def _is_whole(self, name: str) -> bool:
        """Whether a parameter is merged as a matrix."""
        return (
            self._rule.method != "mean"
            and self._base.dtype(name).is_floating_point
            and layout(name, self._base.shape(name)) != "vector"
            and 0 not in self._specs[name].shape
        )

    def _mean_jobs(self, writer: ShardWriter, name: str, first: int) -> Iterator[Job[Written]]:
        """The mean of a parameter's entries from `first` on."""
        entries = math.prod(self._specs[name].shape)
        common = min(entries, math.prod(self._base.shape(name)))
        for is_common, low, high in ((True, first, common), (False, max(first, common), entries)):
            for start in range(low, high, _JOB_ENTRIES):
                part = slice(start, min(start + _JOB_ENTRIES, high))
                act = partial(self._mean, writer, name, part, is_common=is_common)
                yield Job(16 * BLOCK_ENTRIES, partial(self._begin, name, act))

    def _begin(self, name: str, act: Callable[[], Written]) -> Callable[[], Written]:
        # Nothing is told the disk before: from a cold cache that took 1.1 to 1.5 times as long (two
        # 0.5 GB models, five pairs of runs).
        def run() -> Written:
            started = time.perf_counter()
            with naming_the_culprit(name, self._base, *self._checkpoints):
                return replace(act(), seconds=time.perf_counter() - started)

        return run

    def _copy(self, writer: ShardWriter, name: str) -> Written:
        """Whole numbers, on which the checkpoints must agree."""
        ours = [one.tensor(name) for one in self._checkpoints]
        if any(not torch.equal(one, ours[0]) for one in ours[1:]):
            raise CheckpointError(
                f"{name}: {ours[0].dtype} cannot be averaged, and the checkpoints differ"
            )
        writer.write(name, ours[0])
        return Written(name, self._read_bytes(name))

    def _mean(self, writer: ShardWriter, name: str, part: slice, *, is_common: bool) -> Written:
        spec = self._specs[name]
        theirs = self._base.tensor(name).reshape(-1)[part] if is_common else None
        ours = [one.tensor(name).reshape(-1)[part] for one in self._checkpoints]
        blocks = mean_blocks(name, theirs, ours, self._weights, whole=spec.shape, start=part.start)
        at, found = part.start, []
        for mean, sums in blocks:
            writer.write(name, rounded(name, mean, spec.dtype), first_entry=at)
            at += len(mean)
            found.append(sums)
        nbytes = self._read_bytes(name, part.stop - part.start)
        return Written(name, nbytes, part.start, joined(found) if is_common else None)

    def _merge_whole(self, writer: ShardWriter, name: str) -> Written:
        """svd_mean or monosoup of the rows that the base has, too."""
        spec = self._specs[name]
        theirs = self._base.tensor(name)
        rows = min(theirs.shape[0], spec.shape[0])
        theirs = theirs[:rows]
        ours = (one.tensor(name)[:rows] for one in self._checkpoints)
        deltas = [subtract(one, theirs, name=name) for one in ours]
        merged, report = merge_deltas(name, deltas, self._rule)
        del deltas
        flat, base = merged.reshape(-1), theirs.reshape(-1)
        for at in range(0, len(flat), BLOCK_ENTRIES):
            block = slice(at, at + BLOCK_ENTRIES)
            writer.write(
                name, rounded(name, added(base[block], flat[block]), spec.dtype), first_entry=at
            )
        return Written(name, self._read_bytes(name, theirs.numel()), report=report)

    def _report(self, name: str, parts: Sequence[Written]) -> MatrixReport | None:
        """The report of a parameter; None of whole numbers and where there are no entries."""
        for part in parts:
            if part.report is not None:
                return part.report
        # In the order of the entries, whoever came first.
        means = sorted((part for part in parts if part.sums), key=lambda part: part.start)
        if not means:
            return None
        sums = joined([part.sums for part in means if part.sums])
        norms = tuple(map(math.sqrt, sums.squares))
        scale = math.prod(norms[:2])
        cosine = max(-1.0, min(1.0, sums.product / scale)) if scale else 0.0
        rows = min(self._base.shape(name)[:1], self._specs[name].shape[:1])
        return MatrixReport(
            name=name,
            shape=(*rows, *self._specs[name].shape[1:]),
            method="mean",
            rank=0,
            kept_energy=1.0,
            delta_norms=norms,
            merged_norm=math.sqrt(sums.merged),
            cosine=cosine if len(norms) > 1 else 1.0,
            solver="none",
            seconds=math.fsum(part.seconds for part in parts),
        )


def added(theirs: Tensor, merged: Tensor) -> Tensor:
    """The base plus a merged delta, which may be overwritten; float64 where the base is."""
    if theirs.dtype == torch.float64:
        return theirs + merged
    # float8 promotes with nothing.
    return merged.add_(theirs.float() if theirs.dtype.itemsize == 1 else theirs)
