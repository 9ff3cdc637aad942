"""Commands on a pool of LoRA adapters: pool add, list, resolve, remove."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from soupkit.cli.app import Json, app, parse_path
from soupkit.cli.console import guarded, parse_bytes, print_json, say, size_of, table_console

pool_app = typer.Typer(
    help="A pool of LoRA adapters within a number of bytes: what does not fit is merged.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(pool_app, name="pool")

PoolPath = Annotated[Path, typer.Argument(help="Folder of the pool.", parser=parse_path)]
Task = Annotated[str, typer.Argument(help="The task.")]


class SlotMethod(str, Enum):
    """How an adapter joins a slot."""

    history_mean = "history_mean"
    opcm = "opcm"
    ties = "ties"
    dare = "dare"


class Likeness(str, Enum):
    """How cosines of modules become one."""

    module = "module"
    norm = "norm"


class WhenFull(str, Enum):
    """What happens where nothing fits."""

    evict = "evict"
    refuse = "refuse"


@pool_app.command()
@guarded
def add(
    pool: Annotated[
        Path, typer.Argument(help="Folder of the pool; made if absent.", parser=parse_path)
    ],
    adapter: Annotated[Path, typer.Argument(help="A PEFT adapter folder.", parser=parse_path)],
    budget_bytes: Annotated[
        str | None, typer.Option(help="Of all slots, as in 200MB; needed for a new pool.")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="At most [default: as many as fit].")] = None,
    task: Annotated[
        str | None, typer.Option(help="That it serves [default: the folder's name].")
    ] = None,
    merge: Annotated[
        SlotMethod | None, typer.Option(help="How adapters share a slot [default: history_mean].")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Of merged slots [default: as much as fits].")
    ] = None,
    similarity: Annotated[
        Likeness | None, typer.Option(help="Mean cosine, or weighted by norm [default: module].")
    ] = None,
    gate_similarity: Annotated[
        float | None, typer.Option(help="Least similarity of a merge [default: any].")
    ] = None,
    open_below: Annotated[
        float | None,
        typer.Option(help="Free slots only for what is less like every slot [default: for all]."),
    ] = None,
    when_full: Annotated[
        WhenFull | None,
        typer.Option(help="Where no merge passes: let slots of little use go [default: refuse]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Let an adapter into a pool: a slot of its own if it fits, else merged into the nearest.

    Options that are given hold from then on; else the pool's own do.

    Example: soupkit pool add pool sql-lora --budget-bytes 200MB --rank 32
    """
    from soupkit.pool import AdapterPool
    from soupkit.pool_manifest import POOL_NAME

    given: dict[str, Any] = {
        "capacity_bytes": parse_bytes(budget_bytes),
        "slots": slots,
        "merge": merge and merge.value,
        "rank": rank,
        "similarity": similarity and similarity.value,
        "gate_similarity": gate_similarity,
        "open_below": open_below,
        "when_full": when_full and when_full.value,
    }
    given = {field: value for field, value in given.items() if value is not None}
    if budget_bytes is None and not (pool / POOL_NAME).exists():
        raise typer.BadParameter(f"{pool} is no pool yet: --budget-bytes is needed to make one")
    report = AdapterPool.add_to(pool, adapter, task=task, rule=given)
    if as_json:
        print_json(report.to_json())
        return
    where = "stored" if report.action == "store" else "merged"
    say(
        f"{report.task}: {where}, slot {report.slot} serves {', '.join(report.tasks)} "
        f"({report.reason}); {size_of(report.slot_bytes)}, in all {size_of(report.pool_bytes)}"
    )
    if report.action == "merge":
        alike = "no module in common" if report.similarity is None else f"{report.similarity:.4f}"
        say(
            f"  similarity {alike}, rank {report.rank}, the cut loses {report.lost_energy:.3%} of "
            "the merged delta's energy"
        )
    if report.evicted:
        say(f"  no longer in the pool: {', '.join(report.evicted)}")


@pool_app.command("list")
@guarded
def list_slots(pool: PoolPath, as_json: Json = False) -> None:
    """Show the slots of a pool: their tasks, bytes and merges.

    Example: soupkit pool list pool
    """
    from soupkit.pool import AdapterPool

    document = AdapterPool.open(pool).to_json()
    if as_json:
        print_json(document)
    else:
        print_pool(document)


@pool_app.command()
@guarded
def resolve(pool: PoolPath, task: Task, as_json: Json = False) -> None:
    """Print the adapter folder that serves a task.

    Example: soupkit pool resolve pool sql-lora
    """
    from soupkit.pool import AdapterPool

    path = AdapterPool.open(pool).resolve(task)
    if as_json:
        print_json({"task": task, "path": str(path)})
    else:
        say(str(path))


@pool_app.command()
@guarded
def remove(pool: PoolPath, task: Task, as_json: Json = False) -> None:
    """Let a task go; its slot goes with its last one, and until then keeps what was merged.

    Example: soupkit pool remove pool sql-lora
    """
    from soupkit.pool import AdapterPool

    left = AdapterPool.open(pool).remove(task)
    if as_json:
        print_json({"task": task, "left": list(left)})
        return
    kept = f"; its slot keeps what was merged, and serves {', '.join(left)}" if left else ""
    say(f"{pool}: {task} is removed{kept}")


def print_pool(document: dict[str, Any]) -> None:
    """Print what AdapterPool.to_json tells as a table on stdout."""
    console, rule = table_console(), document["rule"]
    name = document["base"]["name"] if document["base"] else "none yet"
    console.print(f"base {name}", highlight=False, markup=False, soft_wrap=True)
    size = f"{size_of(document['bytes'])} of {size_of(rule['capacity_bytes'])}"
    console.print(f"{size}, merged by {rule['merge']}", highlight=False)
    table = Table("slot", Column("tasks", overflow="fold"), "bytes", "merged", "lost", "uses")
    for slot in document["slots"]:
        # Of the latest merge: what earlier ones lost is not in it any more.
        lost = slot["history"][-1]["lost_energy"]
        told = str(len(slot["history"])), f"{lost:.3f}", str(slot["uses"])
        tasks = ", ".join(slot["tasks"])
        table.add_row(str(slot["number"]), tasks, size_of(slot["nbytes"]), *told)
    console.print(table)
