"""Export under a budget of bytes: the form of each tensor is chosen by the error that it leaves.

    minimize  sum_t ||delta_t - decoded_t||^2   with   bytes of variant.safetensors <= budget

One pass over both models measures what each form of each changed matrix would lose (candidates.py);
allocate.py chooses; the export is one more pass. What counts is variant.safetensors, header
included, not the manifest and companion files. Plain row scales are taken where they fit and lose
no more, also if that only shows in what was written: auto is never worse than they for their bytes.
Every changed matrix is stored: none is dropped to win bytes. Not here: errors of outputs on data.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soupkit.allocate import Candidate, allocate, error_of, least_bytes
from soupkit.blocks import measure_pair
from soupkit.checkpoint import Checkpoint
from soupkit.checks import MAX_BUDGET, check_count
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource, layout
from soupkit.export import (
    EncodedSource,
    ExportReport,
    Progress,
    are_equal,
    delta_entry,
    export_variant,
)
from soupkit.forms import RAW, Encoding
from soupkit.pairs import naming_the_culprit, pair_names
from soupkit.tensorfile import TensorSpec, file_bytes, most_bytes

_ROW = Encoding().name
# Budgets of the frontier, in bytes of plain row scales.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
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
class Group:
    """What was stored in one form: its name, how many tensors, their bytes, and what they lose of
    the energy of all deltas.
    """

    encoding: str
    tensors: int
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


@dataclass(frozen=True, slots=True)
class Plan:
    """How an export keeps its budget.

    Args:
        budget_bytes: of variant.safetensors.
        encodings: of every changed matrix, for export_variant.
        row: what plain row scales would take and lose.
        frontier: what other budgets would buy, as far as it was measured: see candidates.py.
        survey: what it was chosen from.
    """

    budget_bytes: int
    encodings: dict[str, str]
    row: Point
    frontier: tuple[Point, ...]
    survey: Survey

    def to_json(self) -> dict[str, Any]:
        """The budget and the frontier, for a manifest."""
        return {
            "budget_bytes": self.budget_bytes,
            "row": asdict(self.row),
            "frontier": [asdict(point) for point in self.frontier],
        }


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """What an export under a budget wrote: `groups` and `lost_energy` are of what was written.

    Args:
        export: as of any export.
        plan: what was planned.
        groups: by form, the largest first.
        lost_energy: share of the energy of all deltas.
    """

    export: ExportReport
    plan: Plan
    groups: tuple[Group, ...]
    lost_energy: float

    def to_json(self) -> dict[str, Any]:
        """All of it but the export, as JSON types."""
        return {
            **self.plan.to_json(),
            "bytes": self.export.bytes["weights"],
            "lost_energy": self.lost_energy,
            "choices": [asdict(group) for group in self.groups],
        }


def plan_export(
    base: Checkpoint,
    finetuned: TensorSource,
    *,
    budget_bytes: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Choose the form of every changed matrix, in one pass over both models.

    Args:
        base, finetuned: as for export_variant; deltas must not be encoded yet.
        budget_bytes: of variant.safetensors; None: what plain row scales would take.
        progress: called after each tensor with its name, entries done, entries in all.
    Raises:
        CheckpointError: the two models do not fit. MergeError: a weight is NaN or infinite.
        ValueError: the budget is no whole number, or is too small: the least that would do is told.
    """
    if isinstance(finetuned, EncodedSource):
        raise ValueError("encoding auto: the deltas are encoded already; export them as they are")
    if budget_bytes is not None:
        check_count("budget_bytes", budget_bytes, least=0, most=MAX_BUDGET)
    survey = _survey(base, finetuned, progress)
    row = survey.row
    row_bytes = survey.bytes_of(row)
    budget = row_bytes if budget_bytes is None else budget_bytes
    choice = survey.choose(budget)
    return Plan(
        budget_bytes=budget,
        encodings={name: one.form for name, one in choice.items()},
        row=Point(row_bytes, row_bytes, error_of(row) / survey.energy),
        frontier=survey.frontier([*(int(share * row_bytes) for share in _SHARES), budget]),
        survey=survey,
    )


def export_within(
    base: Checkpoint,
    finetuned: TensorSource,
    *,
    family: str | Path,
    name: str,
    budget_bytes: int | None = None,
    companions: Path | None = None,
    progress: Progress | None = None,
) -> BudgetReport:
    """Export a fine-tune as the best variant that a budget of bytes buys.

    Args:
        base, finetuned, family, name, companions: as for export_variant.
        budget_bytes: of variant.safetensors; None: what plain row scales would take.
        progress: as for export_variant, over both passes.
    Raises:
        As export_variant; ValueError also for a budget that is too small.
    """
    check_variant_name(name)
    passes = [_half(progress, start) if progress else None for start in (0, 1)]
    plan = plan_export(base, finetuned, budget_bytes=budget_bytes, progress=passes[0])

    def run(encodings: Mapping[str, str]) -> ExportReport:
        return export_variant(
            base,
            finetuned,
            family=family,
            name=name,
            encodings=encodings,
            companions=companions,
            budget=plan.to_json(),
            progress=passes[1],
        )

    report, survey = run(plan.encodings), plan.survey
    row = {name: one.form for name, one in survey.row.items()}
    is_row_allowed = plan.row.bytes <= plan.budget_bytes and plan.encodings != row
    if is_row_allowed and _lost(report, survey) > plan.row.lost_energy * (1 + 1e-9):
        # What was estimated did not come true. What is replaced now was not there before.
        report = replace(run(row), replaced=report.replaced)
    return BudgetReport(report, plan, _groups(report, survey), _lost(report, survey))


def _half(progress: Progress, start: int) -> Progress:
    """The progress of the first (0) or second (1) of two passes over the same entries."""
    return lambda what, done, total: progress(what, start * total + done, 2 * total)


def _survey(base: Checkpoint, finetuned: TensorSource, progress: Progress | None) -> Survey:
    pairs = pair_names(base, finetuned)
    specs = {name: TensorSpec(finetuned.dtype(name), finetuned.shape(name)) for name, _ in pairs}
    most = sum(spec.nbytes for spec in specs.values())
    survey = Survey({}, {}, {}, {}, most)
    done, total = 0, sum(math.prod(spec.shape) for spec in specs.values())
    for ours, theirs in pairs:
        spec, mine, its = specs[ours], finetuned.tensor(ours), base.tensor(theirs)
        is_matrix = mine.is_floating_point() and layout(ours, spec.shape) != "vector"
        has_delta = is_matrix and mine.shape == its.shape
        is_equal = mine.shape == its.shape and are_equal(mine, its, is_matrix=is_matrix)
        if has_delta and not is_equal:
            with naming_the_culprit(ours, base, finetuned):
                energy, errors = measure_pair(ours, mine, its)
            if energy > 0.0:
                survey.specs[ours], survey.energies[ours] = spec, energy
                survey.table[ours] = _candidates(ours, spec, errors, most)
        elif not is_equal:
            survey.whole[f"{ours}.{RAW}"] = spec
        done += math.prod(spec.shape)
        if progress:
            progress(ours, done, total)
    return survey


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


def _lost(report: ExportReport, survey: Survey) -> float:
    """Share of the energy of all deltas that what was written loses."""
    return sum(group.lost_energy for group in _groups(report, survey))


def _groups(report: ExportReport, survey: Survey) -> tuple[Group, ...]:
    groups: dict[str, Group] = {}
    for entry in report.entries:
        if entry.name in survey.table:
            form = entry.encoding or RAW
            lost = entry.residual_energy * survey.energies[entry.name] / survey.energy
            old = groups.get(form, Group(form, 0, 0, 0.0))
            groups[form] = Group(
                form, old.tensors + 1, old.bytes + entry.bytes, old.lost_energy + lost
            )
    return tuple(sorted(groups.values(), key=lambda one: (-one.bytes, one.encoding)))
