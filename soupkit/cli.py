"""The command `soupkit`: parses, calls, prints.

Results go to stdout (one JSON document with --json), progress and complaints to stderr. Exit codes:
0 done, 1 the check failed or the input was bad, 2 usage. Heavy modules are imported inside the
command that needs them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from soupkit.config import DEFAULT_RANK, check_variant_name
from soupkit.console import (
    Dtype,
    Method,
    Scale,
    adapter_document,
    export_document,
    guarded,
    leave_signals,
    parse_bytes,
    parse_weights,
    prepare_process,
    print_inspection,
    print_json,
    say,
    show_progress,
)
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


@command
def merge(
    base: Annotated[str, typer.Argument(help="The common base: folder or hub id.")],
    checkpoints: Annotated[list[str], typer.Argument(help="Fine-tunes of it.")],
    out: Out,
    method: Annotated[Method, typer.Option(help="How deltas are merged.")] = Method.svd_mean,
    rank: Annotated[
        int | None, typer.Option(help=f"Rank kept by svd_mean [default: {DEFAULT_RANK}].")
    ] = None,
    energy: Annotated[
        float | None, typer.Option(help="Share of the energy to keep, instead of a rank.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="One number a checkpoint, as in 0.7,0.3 [default: equal].")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the result [default: the base's].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the randomised decompositions.")] = 0,
    as_json: Json = False,
) -> None:
    """Merge fine-tunes of one base into a new model folder.

    Example: soupkit merge base ft-1 ft-2 --out merged --method svd_mean --rank 64
    """
    from soupkit.checkpoint import open_checkpoint
    from soupkit.merge import MergeRule
    from soupkit.offline import merge_checkpoints

    if method is Method.svd_mean and rank is None and energy is None:
        rank = DEFAULT_RANK
    rule = MergeRule(method.value, rank, energy, parse_weights(weights), seed)
    opened = [open_checkpoint(one) for one in checkpoints]
    with show_progress("merging") as progress:
        report = merge_checkpoints(
            open_checkpoint(base),
            opened,
            out=out,
            rule=rule,
            dtype=torch_dtype(dtype.value if dtype else None),
            progress=progress,
        )
    if as_json:
        print_json({"path": str(report.path), **report.to_json()})
        return
    count = "1 checkpoint" if len(opened) == 1 else f"{len(opened)} checkpoints"
    say(f"{out}: {method.value} of {count} in {report.seconds:.1f} s")


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
    scale: Annotated[
        Scale, typer.Option(help="A scale for each row, or one a matrix.")
    ] = Scale.row,
    planes: Annotated[int, typer.Option(help="Sign planes, 1 to 4.")] = 1,
    as_json: Json = False,
) -> None:
    """Add fine-tunes to a family as one-bit variants of its base.

    Example: soupkit export base coder-ft --family family --name coder
    """
    from soupkit.checkpoint import open_checkpoint
    from soupkit.export import export_variant

    opened = [open_checkpoint(one) for one in finetuned]
    names = name or [one.path.name for one in opened]
    if len(names) != len(opened) or len(set(names)) != len(names):
        raise ValueError(f"{len(opened)} fine-tunes need as many different names; got {names}")
    for one in names:
        check_variant_name(one)
    root = open_checkpoint(base)
    reports = []
    for checkpoint, one in zip(opened, names, strict=True):
        with show_progress(f"exporting {one}") as progress:
            report = export_variant(
                root,
                checkpoint,
                family=family,
                name=one,
                scale=scale.value,
                planes=planes,
                companions=checkpoint.path,
                progress=progress,
            )
        reports.append(report)
        if not as_json:
            share = report.model_bf16_bytes / max(1, report.bytes["weights"])
            told = (
                f"{one}: {report.bytes['weights']:,} bytes, 1/{share:.1f} of the model in bfloat16"
            )
            say(told + ("; it replaced the variant of that name" if report.replaced else ""))
    if as_json:
        print_json([export_document(report) for report in reports])


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

    with show_progress(f"restoring {name}") as progress:
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
        typer.Argument(help="A family, a variant's folder, or a checkpoint.", parser=parse_path),
    ],
    as_json: Json = False,
) -> None:
    """Show variants, bytes, the error of every tensor, and history.

    Example: soupkit inspect family
    """
    from soupkit.describe import describe

    document = describe(path)
    if as_json:
        print_json(document)
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

    with show_progress("verifying") as progress:
        faults = verify_family(family, base=base, progress=progress)
    if as_json:
        print_json({"ok": not faults, "faults": faults})
    else:
        say("\n".join(faults) if faults else f"{family}: all is well")
    if faults:
        raise typer.Exit(1)


@command
def lora(
    base: Annotated[str, typer.Argument(help="The base: folder or hub id.")],
    finetuned: Annotated[str, typer.Argument(help="A fine-tune of it.")],
    out: Out,
    rank: Annotated[
        int | None, typer.Option(help=f"Largest rank [default: {DEFAULT_RANK}, more if exact].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a fine-tune as a PEFT LoRA adapter of its base.

    Example: soupkit lora base coder-ft --out coder-lora --rank 64
    """
    from soupkit.adapters import export_adapter
    from soupkit.checkpoint import open_checkpoint

    with show_progress("factoring") as progress:
        report = export_adapter(
            open_checkpoint(base), open_checkpoint(finetuned), out=out, rank=rank, progress=progress
        )
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


@command
def serve(
    family: FamilyPath,
    base: BaseOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[str | None, typer.Option(help="As in cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="To compute in.")] = None,
    cache_bytes: Annotated[
        str | None, typer.Option(help="What resident variants may hold, as in 20GB.")
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Variant that is never evicted.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests generated at a time.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests waiting before 429.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key to ask for.")] = None,
) -> None:
    """Serve the base and all variants of a family over HTTP, in OpenAI's shapes.

    Example: soupkit serve family --port 8000 --cache-bytes 2GB
    """
    from soupkit.serving import server

    leave_signals()
    limits = {} if max_queue is None else {"max_queue": max_queue}
    server.run(
        family,
        base=base,
        host=host,
        port=port,
        device=device,
        dtype=dtype.value if dtype else None,
        cache_bytes=parse_bytes(cache_bytes),
        pin=pin or (),
        max_running=max_running,
        api_key_file=api_key_file,
        **limits,
    )


def main() -> None:
    """Entry point of the `soupkit` command."""
    prepare_process()
    app()


if __name__ == "__main__":
    main()
