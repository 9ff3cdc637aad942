"""Export under a budget of bytes: the form of each tensor is chosen by the error that it leaves.

    minimize  sum_t ||delta_t - decoded_t||^2   with   bytes of variant.safetensors <= budget

One pass over both models measures what each form of each changed matrix would lose (candidates.py);
allocate.py chooses; the export is one more pass. What counts is variant.safetensors, header
included, not the manifest and companion files. Plain row scales are taken where they fit and lose
no more, also if that only shows in what was written: auto is never worse than they for their bytes.
Every changed matrix is stored: none is dropped to win bytes. Not here: errors of outputs on data,
tr(R G R^T) of a residual R and the Gram G of its layer's inputs: no way to add them up was reliably
better. On SmolLM2-135M's word problems (G of 48 training lines, row's bytes, 40 held-out prompts,
one run) the KL is 0.0081 as it is, 0.014 with them summed as they are, 0.012 with each relative to
its layer's output, 0.010 to its input, 0.009 to 0.010 weighted by squared gradients of the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soupkit.allocate import error_of
from soupkit.checkpoint import Checkpoint
from soupkit.checks import MAX_BUDGET, check_count
from soupkit.config import check_variant_name
from soupkit.delta import TensorSource
from soupkit.export import EncodedSource, ExportReport, Progress, export_variant
from soupkit.forms import RAW
from soupkit.survey import Point, Survey
from soupkit.survey import survey as survey_of

# Budgets of the frontier, in bytes of plain row scales.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)


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
        progress: as for export_variant.
    Raises:
        CheckpointError: the two models do not fit. MergeError: a weight is NaN or infinite.
        ValueError: the budget is no whole number, or is too small: the least that would do is told.
    """
    if isinstance(finetuned, EncodedSource):
        raise ValueError("encoding auto: the deltas are encoded already; export them as they are")
    if budget_bytes is not None:
        check_count("budget_bytes", budget_bytes, least=0, most=MAX_BUDGET)
    survey = survey_of(base, finetuned, progress=progress)
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
    history: Sequence[Mapping[str, Any]] = (),
    metrics: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> BudgetReport:
    """Export a fine-tune as the best variant that a budget of bytes buys.

    Args:
        base, finetuned, family, name, companions, history, metrics: as for export_variant; all
            tensors of a finetuned that is no Checkpoint are asked for twice, in order.
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
            history=history,
            metrics=metrics,
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
    """The progress of the first (0) or second (1) of two passes over the same bytes."""
    return lambda what, done, total: progress(what, start * total + done, 2 * total)


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
