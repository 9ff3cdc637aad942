"""What `soupkit inspect` found, as tables on stdout."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from soupkit.cli.console import size_of, table_console

# Of a merge's matrices: those that lost most.
SHOWN_MATRICES = 5


def print_inspection(document: dict[str, Any]) -> None:
    """Print what soupkit.describe, or soupkit.training.inspection, found as tables on stdout."""
    console = table_console()
    if document["kind"] == "family":
        _print_family(console, document)
    elif document["kind"] == "variant":
        _print_variant(console, document)
    elif document["kind"] == "soup":
        _print_soup(console, document)
    else:
        console.print(f"checkpoint {document['path']}", highlight=False, soft_wrap=True)
        console.print(f"fingerprint {document['fingerprint']}", highlight=False, soft_wrap=True)
        console.print(f"{len(document['tensors'])} tensors, {document['bytes']['total']:,} bytes")
        for alias, source in document["tied"].items():
            console.print(f"{alias} is tied to {source}", highlight=False, soft_wrap=True)


def print_budget(document: dict[str, Any]) -> None:
    """Print what an export under a budget chose, and what other budgets would buy, on stdout."""
    console = table_console()
    if "choices" in document:
        table = Table("encoding", "tensors", "bytes", "lost energy")
        for group in document["choices"]:
            told = size_of(group["bytes"]), f"{group['lost_energy']:.3f}"
            table.add_row(group["encoding"], str(group["tensors"]), *told)
        total = sum(group["tensors"] for group in document["choices"])
        told = size_of(document["bytes"]), f"{document['lost_energy']:.3f}"
        table.add_row("variant.safetensors", str(total), *told)
        console.print(table)
    table = Table("budget", "bytes", "lost energy", title="what a budget buys")
    for point in document["frontier"]:
        mark = " *" if point["budget_bytes"] == document["budget_bytes"] else ""
        told = size_of(point["bytes"]), f"{point['lost_energy']:.3f}"
        table.add_row(size_of(point["budget_bytes"]) + mark, *told)
    row = document["row"]
    table.add_row("row scales", size_of(row["bytes"]), f"{row['lost_energy']:.3f}")
    console.print(table)


def _print_family(console: Console, document: dict[str, Any]) -> None:
    base = document["base"]
    console.print(f"base {base['path']} ({base['dtype']})", highlight=False, soft_wrap=True)
    console.print(f"fingerprint {base['fingerprint']}", highlight=False, soft_wrap=True)
    if not document["variants"]:
        console.print("no variants yet")
        return
    name_column = Column("variant", overflow="fold")
    parts = ("signs", "scales", "factors", "raw", "total")
    # Of the tensors, each counted once: not the share of all energy that a budget speaks of.
    table = Table(name_column, *parts, "of bf16", "mean lost energy")
    for name, variant in document["variants"].items():
        if "fault" in variant:
            table.add_row(name, "damaged")
            continue
        sizes = variant["bytes"]
        share = sizes["weights"] / max(1, variant["model_bf16_bytes"])
        told = [size_of(sizes[part]) for part in parts]
        table.add_row(name, *told, f"{share:.2%}", f"{_mean_lost(variant['tensors']):.3f}")
    console.print(table)
    for name, variant in document["variants"].items():
        if "fault" in variant:
            console.print(
                f"{name}: {variant['fault']}", highlight=False, markup=False, soft_wrap=True
            )


def _mean_lost(tensors: list[dict[str, Any]]) -> float:
    """Mean relative residual energy of the tensors stored as deltas."""
    lost = [entry["residual_energy"] for entry in tensors if entry["kind"] == "delta"]
    return sum(lost) / len(lost) if lost else 0.0


def _print_variant(console: Console, document: dict[str, Any]) -> None:
    console.print(
        f"variant {document['name']} {document['digest']}", highlight=False, soft_wrap=True
    )
    named = (Column(title, overflow="fold") for title in ("tensor", "kind"))
    table = Table(*named, "shape", "encoding", "bytes", "lost energy")
    for entry in document["tensors"]:
        table.add_row(
            entry["name"],
            f"tied to {entry['source']}" if entry["source"] else entry["kind"],
            "x".join(map(str, entry["shape"])),
            entry["encoding"] or "",
            size_of(entry["bytes"]),
            f"{entry['residual_energy']:.3f}" if entry["kind"] == "delta" else "",
        )
    console.print(table)
    if document["budget"]:
        print_budget(document["budget"])
    for event in document["history"]:
        console.print(_pairs(event), highlight=False, markup=False, soft_wrap=True)
    if document["metrics"]:
        told = _pairs(document["metrics"])
        console.print(f"metrics {told}", highlight=False, markup=False, soft_wrap=True)


def _print_soup(console: Console, document: dict[str, Any]) -> None:
    base, partner = document["base"], document["partner"]
    console.print(f"base {base['path']}", highlight=False, soft_wrap=True)
    console.print(f"fingerprint {base['fingerprint']}", highlight=False, soft_wrap=True)
    console.print(f"state of step {document['step']}, {size_of(document['bytes'])} on disk")
    if partner is not None:
        score = "" if partner["score"] is None else f", score {partner['score']:.6g}"
        console.print(f"next partner: the weights of step {partner['step']}{score}")
    if document["average"] is not None:
        console.print(f"moving average of {document['average']['num_updates']} updates")
    if not document["merges"]:
        console.print("no merge yet")
        return
    table = Table("step", "with", "result", "before", "after", "energy kept", "cosine", "seconds")
    for merge in document["merges"]:
        table.add_row(
            str(merge["step"]),
            "average" if merge["method"] == "ema" else str(merge["partner_step"]),
            "kept" if merge["accepted"] else "refused",
            *(_number(merge[key], ".6g") for key in ("metric_current", "metric_merged")),
            *(_number(merge.get(key), ".3f") for key in ("kept_energy", "cosine")),
            f"{merge['seconds']:.2f}",
        )
    console.print(table)
    for merge in document["merges"]:
        if merge["reason"]:
            told = f"step {merge['step']}: {merge['reason']}"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
    _print_matrices(console, document["matrices"])


def _print_matrices(console: Console, matrices: list[dict[str, Any]]) -> None:
    """Those of the last merge that lost most."""
    cut = sorted((one for one in matrices if one["rank"]), key=lambda one: one["kept_energy"])
    if not cut:
        return
    table = Table(
        Column("matrix", overflow="fold"), "rank", "energy kept", "cosine", "solver",
        title=f"the last merge: {min(len(cut), SHOWN_MATRICES)} of {len(cut)} matrices",
    )  # fmt: skip
    for one in cut[:SHOWN_MATRICES]:
        told = f"{one['kept_energy']:.3f}", f"{one['cosine']:.3f}", one["solver"]
        table.add_row(one["name"], str(one["rank"]), *told)
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pairs(values: dict[str, Any]) -> str:
    """key=value of all that is told, numbers in four digits."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
        if value is not None and value != ""
    )
