"""How `soupkit plan --gpus` shows a plan: layouts, one GPU, times, the article's figures."""

from rich.table import Table

from soupkit.cli.console import say, size_of, table_console
from soupkit.node import GpuPlan
from soupkit.node_plan import NodePlan
from soupkit.node_times import Figure, Speeds


def show_node(found: NodePlan) -> None:
    """Print it all."""
    _show_layouts(found)
    best, times = found.best, found.times
    if best is None or times is None:
        say("the base fits in no layout: more GPUs, or larger ones")
        return
    _show_gpu(best)
    _show_times(times.figures, found.speeds)
    wish, cold = best.wish, best.wish.variants - best.resident
    verdict = "everything fits" if best.fits else "not everything fits"
    say(
        f"advised: {best.layout}: {verdict}; {best.resident} of {wish.variants} variants resident"
        + (f", {cold} cold" if cold else "")
    )
    say(f"it needs {found.needs}")
    layout = best.layout
    running = -(-wish.requests // layout.replicas)
    if layout.pipeline == 1:
        # Half a slot more, so that no slot is lost to what a server aligns.
        cache_bytes = int((best.slots + 0.5) * best.slot_bytes)
        cache = f" --cache-bytes {cache_bytes}" if best.slots else ""
        say(
            f"soupkit serve FAMILY --replicas {layout.replicas} --tensor-parallel {layout.tensor}"
            f"{cache} --max-running {running}"
        )
    table = Table("figure", "the article", "here", "why", title="The article's figures")
    for claim in found.claims:
        told = f"off: {claim.why}" if claim.is_off else claim.why
        table.add_row(claim.what, claim.said, claim.found, told)
    table_console().print(table)


def _show_layouts(found: NodePlan) -> None:
    table = Table(
        "layout", "base, a GPU", "a variant's part", "slots", "resident", "cold",
        "tokens of context", "verdict", title=f"{found.shape.name}, {found.wish.requests} requests",
    )  # fmt: skip
    for plan in found.plans:
        base = sum(item.total for item in plan.items if item.what.startswith("base "))
        if plan.refusal:
            table.add_row(str(plan.layout), size_of(base), *["-"] * 5, plan.refusal)
            continue
        told = "fits" if plan.fits else "too small for all of it"
        if plan is found.best:
            told += ", advised"
        table.add_row(
            str(plan.layout), size_of(base), size_of(plan.slot_bytes), str(plan.slots),
            str(plan.resident), str(plan.wish.variants - plan.resident),
            f"{plan.kv_tokens:,} of {plan.kv_tokens_wanted:,}", told,
        )  # fmt: skip
    table_console().print(table)


def _show_gpu(plan: GpuPlan) -> None:
    title = f"One GPU of {plan.layout}"
    table = Table("what", "count", "each", "together", "one is", title=title)
    for item in plan.items:
        sizes = size_of(item.nbytes), size_of(item.total)
        table.add_row(item.what, f"{item.count:,}", *sizes, item.formula)
    table.add_row("all", "", "", size_of(plan.total), f"of {size_of(plan.gpu_bytes)}")
    table_console().print(table)


def _show_times(figures: tuple[Figure, ...], speeds: Speeds) -> None:
    given = (
        f"disk {size_of(int(speeds.disk))}/s, link {size_of(int(speeds.link))}/s, HBM "
        f"{size_of(int(speeds.hbm))}/s, flops {speeds.flops / 1e12:g} T/s"
    )
    table = Table("least time", "ms", "which is", title=f"A model: {given}")
    for figure in figures:
        table.add_row(figure.what, _milliseconds(figure.seconds), figure.formula)
    table_console().print(table)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.2g}"
