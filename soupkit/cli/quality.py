"""The command that measures what variants are worth: report."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from soupkit.cli.app import BaseOption, FamilyPath, Json, Out, command, parse_path
from soupkit.cli.console import PIPE_COLUMNS, print_json, say, show_progress


@command
def report(
    family: FamilyPath,
    data: Annotated[
        Path,
        typer.Option(
            help="Held-out JSON lines of prompt and answer, or of text.", parser=parse_path
        ),
    ],
    out: Out,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="NAME, or NAME=FOLDER of its full fine-tune [default: all, without]."),
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(help="Another encoding to try on the full fine-tunes, as in row-x2 or auto."),
    ] = None,
    base: BaseOption = None,
    device: Annotated[str, typer.Option(help="As in cpu, cuda, cuda:1.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure base, full fine-tune and variants on held-out data; writes a page and a JSON file.

    Example: soupkit report family --variant coder=coder-ft --data held-out.jsonl --out report
    """
    from soupkit.report import PAGE_NAME, make_report

    chosen: dict[str, str | None] = {}
    for text in variant or ():
        name, has_folder, folder = text.partition("=")
        if not name or name in chosen or (has_folder and not folder):
            raise ValueError(f"--variant {text!r}: give each NAME, or NAME=FOLDER, once")
        chosen[name] = folder or None
    with show_progress("measuring") as progress:
        document = make_report(
            family,
            data=data,
            out=out,
            variants=chosen or None,
            encodings=encoding or (),
            base=base,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(document)
        return
    _print(document)
    say(f"{out / PAGE_NAME}")


def _print(document: dict[str, Any]) -> None:
    """The page's tables on stdout."""
    from soupkit.report_page import (
        TITLES,
        cells,
        frontier_rows,
        layer_rows,
        legend,
        spectrum_rows,
    )

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    for found in document["variants"]:
        tables = (
            (TITLES, [cells(result) for result in found["results"]]),
            layer_rows(found),
            spectrum_rows(found),
            frontier_rows(found),
        )
        for titles, rows in tables:
            if rows:
                table = Table(*titles, title=found["name"])
                for row in rows:
                    table.add_row(*row)
                console.print(table)
    for line in legend(document):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
