"""Commands on a family on disk: export, restore, inspect, verify, remove."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soupkit.cli.app import BaseOption, FamilyPath, Json, Out, command, parse_path, torch_dtype
from soupkit.cli.console import (
    Dtype,
    error_line,
    export_document,
    parse_bytes,
    print_json,
    say,
    show_progress,
)
from soupkit.cli.inspection import print_budget, print_inspection
from soupkit.config import check_variant_name
from soupkit.errors import CheckpointError, MergeError
from soupkit.forms import AUTO, parse_encoding

if TYPE_CHECKING:
    from soupkit.checkpoint import Checkpoint
    from soupkit.export import ExportReport, Progress


@command
def export(
    base: Annotated[str, typer.Argument(help="The base: folder or hub id.")],
    finetuned: Annotated[list[str], typer.Argument(help="Fine-tunes of it.")],
    family: Annotated[
        Path,
        typer.Option(help="Folder of the family; made if absent.", parser=parse_path),
    ],
    name: Annotated[
        list[str] | None, typer.Option(help="Name of each variant [default: its folder's].")
    ] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="Of every changed matrix: row, matrix, column or rank1 scales of its signs, with "
            "-x2 to -x4 for more planes and then -refit to fit them together; lowrank-R, "
            "lowrank-R+row, row+lowrank-R; sparse; raw. auto: for each the form that loses least "
            "within --budget-bytes."
        ),
    ] = "row",
    budget_bytes: Annotated[
        str | None,
        typer.Option(
            help="With --encoding auto: of variant.safetensors, as in 20MB "
            "[default: what row scales would take]."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add fine-tunes to a family as variants of its base, one bit a weight unless told otherwise.

    Of several, one that fails does not keep the others out: exit code 1, and its reason is told. A
    large one that was interrupted goes on with the same command.

    Example: soupkit export base coder-ft --family family --name coder --encoding lowrank-16+row

    Example: soupkit export base coder-ft --family family --encoding auto --budget-bytes 20MB
    """
    from soupkit.checkpoint import open_checkpoint

    budget = parse_bytes(budget_bytes)
    if budget is not None and encoding != AUTO:
        raise ValueError(f"--budget-bytes goes with --encoding {AUTO}, not with {encoding}")
    if encoding != AUTO:
        parse_encoding(encoding)
    opened = [open_checkpoint(one) for one in finetuned]
    names = name or [one.path.name for one in opened]
    if len(names) != len(opened) or len(set(names)) != len(names):
        raise ValueError(f"{len(opened)} fine-tunes need as many different names; got {names}")
    for one in names:
        check_variant_name(one)
    root = open_checkpoint(base)
    told: list[dict[str, Any]] = []
    try:
        for checkpoint, one in zip(opened, names, strict=True):
            try:
                with (
                    _telling_what_is_kept(family, one),
                    show_progress(f"exporting {one}", is_bytes=True) as progress,
                ):
                    report, budgeted = _export(
                        root,
                        checkpoint,
                        family=family,
                        name=one,
                        encoding=encoding,
                        budget_bytes=budget,
                        progress=progress,
                    )
            except (CheckpointError, MergeError, ValueError) as error:
                # The fine-tune's fault, or a budget too small for it. A fault of the family or the
                # disk would meet the next, too.
                error_line(f"{one}: {error}" if isinstance(error, ValueError) else error)
                told.append({"name": one, "error": str(error)})
                continue
            told.append(export_document(report) | ({"budget": budgeted} if budgeted else {}))
            if not as_json:
                say(report.line())
                if budgeted:
                    print_budget(budgeted)
    finally:
        if as_json:
            print_json(told)
    failed = [one["name"] for one in told if "error" in one]
    if failed and len(opened) > 1:
        error_line(f"{len(failed)} of {len(opened)} not exported: {', '.join(failed)}")
    if failed:
        raise typer.Exit(1)


@contextmanager
def _telling_what_is_kept(family: Path, name: str) -> Iterator[None]:
    """Tell on the way out of an interruption, or of a full disk, if another try will go on."""
    from soupkit.family_write import has_partial

    try:
        yield
    except (KeyboardInterrupt, SystemExit, OSError):
        if has_partial(family, name):
            error_line(f"{name}: what is done is kept: the same command goes on from there")
        raise


def _export(
    base: "Checkpoint",
    finetuned: "Checkpoint",
    *,
    family: Path,
    name: str,
    encoding: str,
    budget_bytes: int | None,
    progress: "Progress",
) -> "tuple[ExportReport, dict[str, Any] | None]":
    """One export; what soupkit.budget tells of it with encoding auto."""
    from soupkit.budget import export_within
    from soupkit.export import export_variant

    place: dict[str, Any] = {
        "family": family,
        "name": name,
        "companions": finetuned.path,
        "progress": progress,
    }
    if encoding != AUTO:
        return export_variant(base, finetuned, encoding=encoding, **place), None
    report = export_within(base, finetuned, budget_bytes=budget_bytes, **place)
    return report.export, report.to_json()


@command
def import_bitdelta(
    base: Annotated[str, typer.Argument(help="The base: folder or hub id.")],
    file: Annotated[
        Path, typer.Argument(help="A .pt file of the original BitDelta code.", parser=parse_path)
    ],
    family: Annotated[
        Path,
        typer.Option(help="Folder of the family; made if absent.", parser=parse_path),
    ],
    name: Annotated[str | None, typer.Option(help="Of the variant [default: the file's].")] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the fine-tune's tokenizer and configuration, which the file lacks.",
            parser=parse_path,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add an original BitDelta file to a family, sign for sign; nothing in it is run.

    Example: soupkit import-bitdelta base diff.pt --family family --name vicuna
    """
    from soupkit.bitdelta_file import import_bitdelta as run
    from soupkit.checkpoint import open_checkpoint

    name = name or file.stem
    check_variant_name(name)
    with show_progress(f"importing {name}", is_bytes=True) as progress:
        report = run(
            open_checkpoint(base),
            file,
            family=family,
            name=name,
            companions=files,
            progress=progress,
        )
    if as_json:
        print_json(export_document(report))
    else:
        say(report.line())


@command
def restore(
    family: FamilyPath,
    name: Annotated[str, typer.Argument(help="The variant.")],
    out: Out,
    base: BaseOption = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the dense weights.")] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Write base + variant as a dense model folder.

    Example: soupkit restore family coder --out coder-dense --dtype bfloat16
    """
    from soupkit.restore import restore as run

    with show_progress(f"restoring {name}", is_bytes=True) as progress:
        report = run(
            family, name, out=out, base=base, dtype=torch_dtype(dtype.value), progress=progress
        )
    document = {"path": str(out), "dtype": dtype.value, "rounding_loss": report.rounding_loss}
    if as_json:
        print_json(document)
        return
    say(
        f"{out}: {name} in {dtype.value}; rounding moves the weights by {report.rounding_loss:.2%} "
        "of the delta's norm"
    )


@command
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="A family, a variant's folder, a checkpoint, a run's soup folder, or a pool.",
            parser=parse_path,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show variants, bytes, the error of every tensor, and history; of a run, its merges.

    Example: soupkit inspect family
    """
    from soupkit.cli.pool import print_pool
    from soupkit.describe import describe
    from soupkit.training.inspection import describe_soup

    document = describe_soup(path) or describe(path)
    if as_json:
        print_json(document)
    elif document["kind"] == "pool":
        print_pool(document)
    else:
        print_inspection(document)


@command
def verify(
    family: FamilyPath,
    base: BaseOption = None,
    as_json: Json = False,
) -> None:
    """Check digests, the base's fingerprint, shapes and finiteness; exit 1 with the list of faults.

    Example: soupkit verify family
    """
    from soupkit.verify import verify_family

    with show_progress("verifying", is_bytes=True) as progress:
        faults = verify_family(family, base=base, progress=progress)
    if as_json:
        print_json({"ok": not faults, "faults": faults})
    else:
        say("\n".join(faults) if faults else f"{family}: all is well")
    if faults:
        raise typer.Exit(1)


@command
def remove(
    family: FamilyPath,
    name: Annotated[str, typer.Argument(help="The variant.")],
) -> None:
    """Take a variant out of a family and delete its files.

    Example: soupkit remove family coder
    """
    from soupkit.family_write import remove_variant

    remove_variant(family, name)
    say(f"{family}: {name} is removed")
