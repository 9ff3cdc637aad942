"""What fits where: plan."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from soupkit.cli.app import Json, command
from soupkit.cli.console import parse_bytes, print_json, say, size_of, table_console


class Targets(str, Enum):
    """Which linears an adapter changes."""

    attention = "attention"
    all_linear = "all-linear"


@command
def plan(
    params: Annotated[
        float | None, typer.Option(help="Parameters of the base, as in 7e9: the nearest Llama.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="A model folder instead: its config.")] = None,
    variants: Annotated[int, typer.Option(help="1-bit variants.", min=0)] = 0,
    adapters: Annotated[int, typer.Option(help="LoRA adapters, a slot each.", min=0)] = 0,
    rank: Annotated[int, typer.Option(help="Of the adapters.", min=1)] = 32,
    targets: Annotated[Targets, typer.Option(help="What they change.")] = Targets.attention,
    budget_bytes: Annotated[
        str | None, typer.Option(help="The memory for all of it, as in 16GB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bytes of a base, its 1-bit variants and LoRA adapters, with their formulas, and what fits.

    Example: soupkit plan --params 7e9 --adapters 8 --rank 32 --budget-bytes 16GB
    """
    from rich.table import Table

    from soupkit.placement import plan as planned
    from soupkit.placement import shape_for, shape_of

    if (params is None) == (base is None):
        raise typer.BadParameter("give --params or --base")
    if base is not None:
        config = json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))
        shape = shape_of(config, Path(base).name)
    else:
        assert params is not None
        shape = shape_for(params)
    found = planned(
        shape,
        variants=variants,
        adapters=adapters,
        rank=rank,
        targets=targets.value,
        budget_bytes=parse_bytes(budget_bytes),
    )
    if as_json:
        print_json(found.to_json())
        return
    table = Table("what", "count", "each", "together", "one is", title=f"{shape.name}")
    for item in found.items:
        sizes = size_of(item.nbytes), size_of(item.total)
        table.add_row(item.what, str(item.count), *sizes, item.formula)
    table.add_row("all", "", "", size_of(found.total), "")
    table_console().print(table)
    if found.budget_bytes is not None:
        verdict = "fits" if found.fits else "does not fit"
        say(f"it {verdict} into {size_of(found.budget_bytes)}")
        for what, most in found.more.items():
            say(f"beside the base alone there is room for {most} x {what}")
