"""What a run leaves behind: the weights it ends with, as a 1-bit variant in a family, in the model.

An export is checked before step 1, so that no training is wasted on a folder that cannot be written
or a family of another base.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soupkit.budget import export_within
from soupkit.checkpoint import Checkpoint, checkpoint_fingerprint
from soupkit.config import ExportConfig
from soupkit.delta import TensorSource
from soupkit.errors import TrainingError
from soupkit.export import ExportReport, export_variant
from soupkit.family import open_family
from soupkit.forms import AUTO
from soupkit.tracking import say
from soupkit.training.base import check_fingerprint, open_base, save_configs
from soupkit.training.checkpoint_tensors import checkpoint_model, checkpoint_tensors
from soupkit.training.ema_run import EmaRun
from soupkit.training.final import Final
from soupkit.training.served import on_zero_reading
from soupkit.training.soup import SoupRun


def check_export(export: ExportConfig, base: Checkpoint | None, tensors: TensorSource) -> None:
    """Raise TrainingError if the run could not be exported at its end. On one rank.

    Args:
        tensors: those of the checkpoint that the model would make.
    """
    if base is None:
        raise TrainingError(
            "this run has no base to export against: it began as an adapter on a quantised model"
        )
    family = Path(export.family)
    place = next(path for path in (family.absolute(), *family.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise TrainingError(
            f"family={str(family)!r}: {place} is no folder that can be written; choose another"
        )
    if (family / "family.json").exists():
        expected = open_family(family).base.fingerprint
        if expected != checkpoint_fingerprint(base):
            raise TrainingError(
                f"family={str(family)!r} belongs to another base than {base.source}: its variants "
                "would not fit on one base; choose another family, or start from that base"
            )
    names, known = set(tensors.names), set(base.names)
    if names != known:
        odd = sorted(names ^ known)[0]
        where = "the model, not in the base" if odd in names else "the base, not in the model"
        raise TrainingError(
            f"{odd} is in {where} {base.source}, so the run could not be exported; leave base= "
            "out, so that the step-0 weights become the base"
        )


def finish_run(
    run: SoupRun | EmaRun,
    export: ExportConfig | None,
    *,
    step: int,
    save_companions: Callable[[Path], None],
    first: Sequence[Callable[[Final], None]] = (),
) -> ExportReport | None:
    """Export the weights that the run ends with, if asked to, and make them the live ones, if the
    config says so. Collective; rank 0 writes.

    Args:
        step: the last optimizer step.
        save_companions: writes tokenizer files into a folder.
        first: what else the run leaves of them, before the export; collective, too.

    Returns:
        The report of the export, on every rank.
    """
    if export is None and not run.config.loads_at_end and not first:
        return None
    final, report = run.final(), None
    for leave in first:
        leave(final)
    if export is not None:
        report = _export(run, final, export, step=step, save_companions=save_companions)
    if run.config.loads_at_end and final.instead is not None:
        for name in run.store.names:
            # A side soup may be of a time when the run had other dtypes.
            run.store.write(name, final.instead.tensor(name).to(run.store.dtype(name)))
    return report


def _export(
    run: SoupRun | EmaRun,
    final: Final,
    export: ExportConfig,
    *,
    step: int,
    save_companions: Callable[[Path], None],
) -> ExportReport:
    def write(tensors: TensorSource) -> ExportReport:
        # Opened anew: the run's own is mapped, and may be of files that are no longer there.
        base = open_base(run.state.base, run.journal.folder)
        check_export(export, base, tensors)
        assert base is not None
        check_fingerprint(base, run.state.base)
        with tempfile.TemporaryDirectory(prefix="soupkit-") as companions:
            save_configs(checkpoint_model(run.store.model), Path(companions))
            save_companions(Path(companions))
            options: dict[str, Any] = {
                "family": export.family,
                "name": export.name,
                "companions": Path(companions),
                "history": run.state.history,
                "metrics": {"step": step, "weights": final.name, **_score_of(run)},
            }
            if export.encoding == AUTO:
                within = export_within(base, tensors, budget_bytes=export.budget_bytes, **options)
                report = within.export
            else:
                report = export_variant(base, tensors, encoding=export.encoding, **options)
        say(f"exported to {export.family}: {report.line()}")
        return report

    source = checkpoint_tensors(run.store.model, instead=final.instead)
    return on_zero_reading(run.ranks, source, write)


def _score_of(run: SoupRun | EmaRun) -> dict[str, Any]:
    partner = run.state.partner
    return {} if partner is None else {"best_step": partner.step, "best_score": partner.score}
