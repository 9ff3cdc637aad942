"""What fits where: plan, of one memory or of a node of GPUs."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soupkit.cli.app import Json, command
from soupkit.cli.console import parse_bytes, print_json, say, size_of, table_console

if TYPE_CHECKING:
    from soupkit.placement import ModelShape, Plan


class Targets(str, Enum):
    """Which linears an adapter changes."""

    attention = "attention"
    all_linear = "all-linear"


class Heads(str, Enum):
    """What a variant has for embedding and head."""

    sign = "sign"
    raw = "raw"
    same = "same"


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
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of a node instead of one memory.", min=1, max=1024)
    ] = None,
    gpu_bytes: Annotated[str | None, typer.Option(help="Of each GPU, as in 80GB.")] = None,
    heads: Annotated[
        Heads, typer.Option(help="A variant's embedding and head: 1 bit, bf16, the base's.")
    ] = Heads.sign,
    context: Annotated[int, typer.Option(help="Tokens of a request.", min=1)] = 8192,
    requests: Annotated[int, typer.Option(help="Requests at a time on the node.", min=1)] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens before the first answer.", min=1)] = 1024,
    disk_speed: Annotated[float, typer.Option(help="Bytes a second of the node's disk.")] = 7e9,
    link_speed: Annotated[float, typer.Option(help="From host memory to each GPU.")] = 50e9,
    hbm_speed: Annotated[float, typer.Option(help="Of each GPU's memory.")] = 3.35e12,
    flops: Annotated[float, typer.Option(help="bf16 operations a second of each GPU.")] = 989e12,
    as_json: Json = False,
) -> None:
    """Bytes of a base, its 1-bit variants and LoRA adapters, with their formulas, and what fits.

    Of GPUs: every layout, what lies on each GPU of the advised one, and the least times.

    Example: soupkit plan --params 7e9 --adapters 8 --rank 32 --budget-bytes 16GB,
    soupkit plan --params 70e9 --variants 14 --gpus 8 --gpu-bytes 80e9
    """
    from soupkit.placement import plan as planned

    shape = _shape(params, base)
    if gpus is not None:
        room = parse_bytes(gpu_bytes)
        if not room or adapters or budget_bytes is not None:
            told = "--gpus needs --gpu-bytes, and takes no --adapters and no --budget-bytes"
            raise typer.BadParameter(told)
        from soupkit.cli.node import show_node
        from soupkit.node import Wish
        from soupkit.node_plan import plan_node
        from soupkit.node_times import Speeds

        node = plan_node(
            shape,
            Wish(variants, heads.value, context, requests),
            gpus=gpus,
            gpu_bytes=room,
            speeds=Speeds(disk_speed, link_speed, hbm_speed, flops),
            prompt=prompt,
            parameters=params or float(shape.parameters),
        )
        print_json(node.to_json()) if as_json else show_node(node)
        return
    if gpu_bytes is not None:
        raise typer.BadParameter("--gpu-bytes is for --gpus")
    found = planned(
        shape,
        variants=variants,
        adapters=adapters,
        rank=rank,
        targets=targets.value,
        budget_bytes=parse_bytes(budget_bytes),
    )
    print_json(found.to_json()) if as_json else _show_memory(found)


def _show_memory(found: "Plan") -> None:
    from rich.table import Table

    table = Table("what", "count", "each", "together", "one is", title=f"{found.shape.name}")
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


def _shape(params: float | None, base: str | None) -> "ModelShape":
    from soupkit.files import fault_text, read_json
    from soupkit.placement import shape_for, shape_of

    if (params is None) == (base is None):
        raise typer.BadParameter("give --params or --base")
    if base is None:
        assert params is not None
        return shape_for(params)
    path = Path(base) / "config.json"
    try:
        config = read_json(path, allow_nan=True)
    except (OSError, ValueError) as error:
        raise ValueError(fault_text(error, path)) from None
    return shape_of(config, Path(base).name)
