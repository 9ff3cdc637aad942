"""What every command shares: the application, option types, how a command is registered."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from soupkit.cli.console import guarded, say
from soupkit.version import __version__

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")

app = typer.Typer(
    help="Merge checkpoints, store fine-tunes as one-bit variants of their base, serve the family.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def parse_path(text: str) -> Path:
    """A path as it was given; an empty one, as from an unset variable, is not taken for "."."""
    if not text:
        raise typer.BadParameter("an empty path; for the present folder give .")
    return Path(text)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
BaseOption = Annotated[
    str | None, typer.Option("--base", help="The base, if it is not where the family says.")
]
Out = Annotated[
    Path,
    typer.Option("--out", help="Folder to write; must not exist yet.", parser=parse_path),
]
FamilyPath = Annotated[Path, typer.Argument(help="Folder of the family.", parser=parse_path)]


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Merge checkpoints, store fine-tunes as one-bit variants of their base, serve the family."""
    if version:
        say(f"soupkit {__version__}")
        raise typer.Exit


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Register a subcommand."""
    return app.command()(guarded(function))


def torch_dtype(dtype: str | None) -> "torch.dtype | None":
    """The torch dtype of that name."""
    import torch

    return None if dtype is None else getattr(torch, dtype)
