"""Commands from model folders to model folders: merge, lora."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soupkit.cli.app import BaseOption, Json, Out, command, parse_path, torch_dtype
from soupkit.cli.console import (
    Cut,
    Dtype,
    Method,
    adapter_document,
    parse_weights,
    print_json,
    say,
    show_progress,
)
from soupkit.config import DEFAULT_RANK

if TYPE_CHECKING:
    from soupkit.merge import MergeRule
    from soupkit.opcm import OpcmRule


@command
def merge(
    out: Out,
    base: Annotated[
        str | None, typer.Argument(help="The common base: folder or hub id.", show_default=False)
    ] = None,
    checkpoints: Annotated[
        list[str] | None, typer.Argument(help="Fine-tunes of it.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A merge config of mergekit instead: linear or task_arithmetic of whole models.",
            parser=parse_path,
        ),
    ] = None,
    method: Annotated[
        Method | None, typer.Option(help="How deltas are merged [default: svd_mean].")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help=f"Rank kept by svd_mean [default: {DEFAULT_RANK}].")
    ] = None,
    energy: Annotated[
        float | None, typer.Option(help="Share of the energy to keep, instead of a rank.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="One number a checkpoint, as in 0.7,0.3 [default: equal].")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="With opcm: share of what is merged to protect [0.5].")
    ] = None,
    cut: Annotated[
        Cut | None, typer.Option(help="With opcm: as its code or its paper [block].")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the result [default: the config's, or the base's].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the randomised decompositions.")] = 0,
    as_json: Json = False,
) -> None:
    """Merge fine-tunes of one base into a new model folder.

    Example: soupkit merge base ft-1 ft-2 --out merged --method svd_mean --rank 64
    """
    from soupkit.checkpoint import open_checkpoint
    from soupkit.merge_config import MergePlan, read_merge_config
    from soupkit.offline import merge_checkpoints

    if config is None:
        if base is None or not checkpoints:
            raise typer.BadParameter("give BASE and CHECKPOINTS, or --config")
        chosen = method or Method.svd_mean
        rule = _rule(chosen, (rank, energy, weights), seed, (alpha, cut))
        plan = MergePlan(base, tuple(checkpoints), rule, None, chosen.value)
    else:
        given = (base, method, rank, energy, weights, alpha, cut)
        if checkpoints or any(one is not None for one in given):
            raise typer.BadParameter("--config says what is merged and how: leave the rest out")
        plan = read_merge_config(config)
    with show_progress("merging", is_bytes=True) as progress:
        report = merge_checkpoints(
            open_checkpoint(plan.base),
            [open_checkpoint(one) for one in plan.checkpoints],
            out=out,
            rule=plan.rule,
            dtype=torch_dtype(dtype.value if dtype else plan.dtype),
            progress=progress,
        )
    if as_json:
        print_json({"path": str(report.path), **report.to_json()})
        return
    count = len(plan.checkpoints)
    told = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    say(f"{out}: {plan.method} of {told} in {report.seconds:.1f} s")


def _rule(
    method: Method,
    mean: tuple[int | None, float | None, str | None],
    seed: int,
    opcm: tuple[float | None, Cut | None],
) -> "MergeRule | OpcmRule":
    """The rule that the options say. Args: mean: rank, energy, weights. opcm: alpha, cut."""
    from soupkit.merge import MergeRule
    from soupkit.opcm import OpcmRule

    rank, energy, weights = mean
    alpha, cut = opcm
    if method is Method.opcm:
        if any(one is not None for one in mean):
            raise typer.BadParameter("--method opcm takes --alpha and --cut only, no means")
        return OpcmRule(0.5 if alpha is None else alpha, "block" if cut is None else cut.value)
    if any(one is not None for one in opcm):
        raise typer.BadParameter("--alpha and --cut are for --method opcm")
    if method in (Method.mean, Method.monosoup) and rank is not None:
        raise typer.BadParameter(f"--rank is for --method svd_mean: {method.value} keeps all")
    if method is Method.mean and energy is not None:
        raise typer.BadParameter("--energy is for --method svd_mean and monosoup")
    if method is Method.svd_mean and rank is None and energy is None:
        rank = DEFAULT_RANK
    return MergeRule(method.value, rank, energy, parse_weights(weights), seed)


@command
def lora(
    base: Annotated[str, typer.Argument(help="The base: folder or hub id; or a family.")],
    finetuned: Annotated[str, typer.Argument(help="A fine-tune of it; or a variant's name.")],
    out: Out,
    moved: BaseOption = None,
    rank: Annotated[
        int | None, typer.Option(help=f"Largest rank [default: {DEFAULT_RANK}, more if exact].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a fine-tune, or a variant of a family, as a PEFT LoRA adapter of its base.

    Example: soupkit lora base coder-ft --out coder-lora --rank 64
    """
    from soupkit.adapters import export_adapter, export_variant_adapter
    from soupkit.checkpoint import open_checkpoint
    from soupkit.family import FAMILY_NAME

    is_family = (Path(base) / FAMILY_NAME).exists()
    if moved is not None and not is_family:
        raise ValueError(f"--base {moved} is for a family's variant; {base} is a base itself")
    with show_progress("factoring") as progress:
        if is_family:
            report = export_variant_adapter(
                base, finetuned, out=out, base=moved, rank=rank, progress=progress
            )
        else:
            theirs, ours = open_checkpoint(base), open_checkpoint(finetuned)
            report = export_adapter(theirs, ours, out=out, rank=rank, progress=progress)
    if as_json:
        print_json(adapter_document(report))
        return
    kind = (
        "exact"
        if report.is_exact
        else f"loses {report.lost_energy:.3%} of the linear layers' energy"
    )
    say(f"{out}: {len(report.ranks)} modules, rank up to {max(report.ranks.values())}, {kind}")
    if report.left_out:
        say(f"cannot travel ({report.left_out_energy:.3%} of the whole delta's energy):")
        say("\n".join(f"  {name}" for name in report.left_out))
