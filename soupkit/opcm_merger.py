"""OPCM of checkpoints on disk: parameters side by side, as soupkit.merger does it, in two passes.

    1. A of every parameter, float32, into a file beside the result     (soupkit.opcm)
    2. W = W_base + A n / ||A||, rounded once

The factor is known only when all parameters are done: its norms go over the whole model. Whole
numbers, and rows beyond the base's vocabulary, are treated as by a plain mean. Checkpoints are
merged in their order, one after the other.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from soupkit.checkpoint import Checkpoint
from soupkit.delta import subtract
from soupkit.export import Progress
from soupkit.mean import BLOCK_ENTRIES
from soupkit.merge import MatrixReport, MergeRule
from soupkit.merger import Merger, Written, added
from soupkit.numeric import inner_product, rounded, squared_norm
from soupkit.opcm import OpcmRule, fold, is_projected, norm_of, rescaling
from soupkit.shards import ShardWriter
from soupkit.tensorfile import MappedFile, TensorFileWriter, TensorSpec


class OpcmMerger(Merger):
    """A Merger whose rule needs two passes."""

    def __init__(
        self,
        base: Checkpoint,
        checkpoints: Sequence[Checkpoint],
        rule: OpcmRule,
        specs: Mapping[str, TensorSpec],
        *,
        scratch: Path,
    ) -> None:
        """Args: scratch: of a file of float32 entries for all of the result; removed by `write`."""
        super().__init__(base, checkpoints, MergeRule("mean"), specs)
        self._opcm = rule
        self._scratch = scratch
        self._held: TensorFileWriter | None = None

    def write(self, writer: ShardWriter, progress: Progress | None) -> None:
        """As `Merger.write`."""
        specs = {
            name: TensorSpec(torch.float32, self._common(name))
            for name in self._specs
            if self._is_whole(name)
        }
        try:
            self._held = TensorFileWriter(self._scratch, specs)
            try:
                super().write(writer, progress)
            finally:
                self._held.close()
            self._rescale(writer, specs)
        finally:
            self._scratch.unlink(missing_ok=True)

    def _is_whole(self, name: str) -> bool:
        return self._base.dtype(name).is_floating_point and 0 not in self._specs[name].shape

    def _merge_whole(self, writer: ShardWriter, name: str) -> Written:
        """A of the rows that the base has, too; a checkpoint's delta is gone as the next comes."""
        started = time.perf_counter()
        shape = self._common(name)
        theirs = self._rows(self._base, name)
        held, first = torch.zeros(shape), torch.zeros(shape)
        energies: list[float] = []
        cosine = 1.0
        for checkpoint in self._checkpoints:
            delta = subtract(self._rows(checkpoint, name), theirs, name=name)
            energies.append(squared_norm(delta))
            if len(energies) == 1:
                first = delta
            elif len(energies) == 2:
                scale = math.sqrt(energies[0] * energies[1])
                cosine = inner_product(first, delta) / scale if scale else 0.0
            held = fold(name, held, delta, self._opcm)
        assert self._held is not None
        self._held.write(name, held)
        total, kept = math.fsum(energies), squared_norm(held)
        is_cut = is_projected(name, shape)
        report = MatrixReport(
            name=name,
            shape=shape,
            method="opcm" if is_cut else "sum",
            rank=0,
            kept_energy=min(1.0, kept / total) if is_cut and total else 1.0,
            delta_norms=tuple(map(math.sqrt, energies)),
            merged_norm=math.sqrt(kept),
            cosine=max(-1.0, min(1.0, cosine)),
            solver="exact" if is_cut and len(energies) > 1 else "none",
            seconds=time.perf_counter() - started,
        )
        return Written(name, self._read_bytes(name, held.numel()), report=report)

    def _rescale(self, writer: ShardWriter, specs: Mapping[str, TensorSpec]) -> None:
        reports = {one.name: one for one in self.reports if one.name in specs}
        norms = [
            norm_of([one.delta_norms[i] ** 2 for one in reports.values()])
            for i in range(len(self._checkpoints))
        ]
        factor = rescaling(norms, math.fsum(one.merged_norm**2 for one in reports.values()))
        file = MappedFile(self._scratch)
        for name in specs:
            held, theirs = file.tensor(name).reshape(-1), self._rows(self._base, name).reshape(-1)
            for at in range(0, len(held), BLOCK_ENTRIES):
                block = slice(at, at + BLOCK_ENTRIES)
                merged = added(theirs[block], held[block] * factor)
                entries = rounded(name, merged, self._specs[name].dtype)
                writer.write(name, entries, first_entry=at)
        self.reports = tuple(
            replace(one, merged_norm=one.merged_norm * factor) if one.name in specs else one
            for one in self.reports
        )

    def _common(self, name: str) -> tuple[int, ...]:
        """The shape of what the base and the checkpoints both have."""
        ours, theirs = self._specs[name].shape, self._base.shape(name)
        return (*map(min, ours[:1], theirs[:1]), *theirs[1:])

    def _rows(self, checkpoint: Checkpoint, name: str) -> Tensor:
        tensor, shape = checkpoint.tensor(name), self._common(name)
        return tensor[: shape[0]] if shape else tensor
