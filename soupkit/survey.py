"""What every changed tensor of a fine-tune could be stored as: bytes against error, measured.

One pass over both models, tensors side by side, in blocks of rows (a low-rank part: whole
matrices). candidates.py measures one delta, allocate.py chooses under a budget. Not here: errors of
outputs on data, and the export (soupkit.budget).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soupkit.allocate import Candidate, allocate, error_of, least_bytes
from soupkit.blocks import measure_pair
from soupkit.candidates import LOW_RANK_ENTRIES
from soupkit.checkpoint import Checkpoint
from soupkit.delta import TensorSource, layout
from soupkit.forms import RAW, Encoding
from soupkit.numeric import full_precision
from soupkit.pairs import most_bytes as most_memory
from soupkit.pairs import pair_jobs, pair_names, spec_of
from soupkit.stored import are_equal, delta_entry, memory_of
from soupkit.tensorfile import TensorSpec, file_bytes, most_bytes
from soupkit.window import as_they_end
from soupkit.workers import Workers

_ROW = Encoding().name
# Of a safetensors file beside what most_bytes counts.
_FILE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Point:
    """What a budget buys: bytes of variant.safetensors, and the share of all deltas' energy that
    they lose.
    """

    budget_bytes: int
    bytes: int
    lost_energy: float


@dataclass(frozen=True, slots=True)
class Survey:
    """What every changed tensor could be stored as.

    Args:
        specs: of the fine-tune's tensors that have a choice.
        energies: ||delta||^2 of each of them.
        table: its candidates; bytes are with its share of the header.
        whole: what is stored whole under every budget, by name in variant.safetensors.
        most: no variant's data take more bytes.
    """

    specs: dict[str, TensorSpec]
    energies: dict[str, float]
    table: dict[str, tuple[Candidate, ...]]
    whole: dict[str, TensorSpec]
    most: int

    @property
    def energy(self) -> float:
        """||delta||^2 of all tensors that have a choice; 1.0 where nothing has changed."""
        return sum(self.energies.values()) or 1.0

    @property
    def row(self) -> dict[str, Candidate]:
        """Plain row scales; whole tensors where those take no more bytes, as in every export."""
        return {
            name: next((one for one in candidates if one.form == _ROW), candidates[0])
            for name, candidates in self.table.items()
        }

    @property
    def fixed_bytes(self) -> int:
        """Bytes of every variant beside those of the table's."""
        whole = sum(most_bytes(name, spec, self.most) for name, spec in self.whole.items())
        return whole + _FILE_BYTES

    @property
    def least_bytes(self) -> int:
        """The smallest budget there is a choice for: of the smallest forms, or of `row`."""
        smallest = allocate(self.table, least_bytes(self.table))
        return min(self.bytes_of(smallest), self.bytes_of(self.row))

    def bytes_of(self, choice: Mapping[str, Candidate]) -> int:
        """Bytes of variant.safetensors with this choice."""
        specs = dict(self.whole)
        for name, one in choice.items():
            specs |= _stored(name, self.specs[name], one.form)
        return file_bytes(specs)

    def choose(self, budget_bytes: int) -> dict[str, Candidate]:
        """The candidates that lose least under a budget.

        Raises:
            ValueError: not even the smallest forms fit.
        """
        if budget_bytes < self.least_bytes:
            raise ValueError(
                f"budget_bytes={budget_bytes:,}: variant.safetensors takes {self.least_bytes:,} "
                "with the smallest form of every tensor; give at least "
                f"budget_bytes={self.least_bytes}"
            )
        # Prices are upper bounds, so the smallest forms may fit though their prices do not.
        room = max(least_bytes(self.table), budget_bytes - self.fixed_bytes)
        choice, row = allocate(self.table, room), self.row
        if self.bytes_of(row) > budget_bytes:
            return choice
        is_worse = error_of(row) <= error_of(choice)
        return row if is_worse or self.bytes_of(choice) > budget_bytes else choice

    def point(self, budget_bytes: int) -> Point:
        """What a budget buys; see choose."""
        choice = self.choose(budget_bytes)
        return Point(budget_bytes, self.bytes_of(choice), error_of(choice) / self.energy)

    def frontier(self, budgets: Iterable[int]) -> tuple[Point, ...]:
        """What each budget that holds the smallest forms buys, and what those themselves do."""
        least = self.least_bytes
        return tuple(self.point(one) for one in sorted({least, *budgets}) if one >= least)


def survey(
    base: Checkpoint,
    finetuned: TensorSource,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Survey:
    """Measure every changed tensor, side by side, in one pass over both models.

    Args, Raises: as soupkit.budget.plan_export; ValueError never.
    """
    pairs = pair_names(base, finetuned)
    specs = {name: spec_of(finetuned, name) for name, _ in pairs}
    most = sum(spec.nbytes for spec in specs.values())
    found: dict[str, _Measured] = {}
    done = 0
    with full_precision(torch.empty(0)), Workers() as workers:
        jobs = pair_jobs(
            base, finetuned, pairs, _measure, nbytes=lambda name: _memory(name, specs[name])
        )
        for one in as_they_end(workers, jobs, most_bytes=most_memory(finetuned, has_svd=True)):
            found[one.name] = one
            done += specs[one.name].nbytes
            if progress:
                progress(one.name, done, most)
    told = Survey({}, {}, {}, {}, most)
    # In the order of the names, so that sums over all are the same whatever ended first.
    for name, spec in specs.items():
        one = found[name]
        if one.energy > 0.0:
            told.specs[name], told.energies[name] = spec, one.energy
            told.table[name] = _candidates(name, spec, one.errors, most)
        elif one.is_whole:
            told.whole[f"{name}.{RAW}"] = spec
    return told


@dataclass(frozen=True, slots=True)
class _Measured:
    """||delta||^2 of a matrix and what its forms lose; or whether a tensor is stored whole."""

    name: str
    energy: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    is_whole: bool = False


def _measure(name: str, ours: Tensor, theirs: Tensor) -> _Measured:
    is_matrix = ours.is_floating_point() and layout(name, ours.shape) != "vector"
    is_equal = ours.shape == theirs.shape and are_equal(ours, theirs, is_matrix=is_matrix)
    if is_equal or not is_matrix or ours.shape != theirs.shape:
        return _Measured(name, is_whole=not is_equal)
    return _Measured(name, *measure_pair(name, ours, theirs))


def _memory(name: str, spec: TensorSpec) -> int:
    """Bytes that `_measure` takes for a parameter, beside blocks of rows; about."""
    has_svd = spec.dtype.is_floating_point and math.prod(spec.shape) <= LOW_RANK_ENTRIES
    return memory_of(name, spec, Encoding(planes=0, rank=1) if has_svd else Encoding())


def _candidates(
    name: str, spec: TensorSpec, errors: Mapping[str, float], most: int
) -> tuple[Candidate, ...]:
    """Raw, and the forms that take fewer bytes."""
    found = []
    for form, error in {RAW: 0.0, **errors}.items():
        stored = _stored(name, spec, form)
        if form == RAW or sum(part.nbytes for part in stored.values()) < spec.nbytes:
            price = sum(most_bytes(part, one, most) for part, one in stored.items())
            found.append(Candidate(form, price, error))
    return tuple(found)


def _stored(name: str, spec: TensorSpec, form: str) -> dict[str, TensorSpec]:
    """What a tensor in this form is in variant.safetensors."""
    if form == RAW:
        return {f"{name}.{RAW}": spec}
    return delta_entry(name, spec.shape, spec.dtype, Encoding.parse(form)).stored_specs()
