"""Commands that make a stored variant better: distill."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from soupkit.cli.app import BaseOption, FamilyPath, Json, command, parse_path
from soupkit.cli.console import error_line, print_json, say, show_progress


class DistillMethod(str, Enum):
    """What the scales are fitted to."""

    kl = "kl"
    gram = "gram"


@command
def distill(
    family: FamilyPath,
    name: Annotated[str, typer.Argument(help="The variant.")],
    finetuned: Annotated[str, typer.Option(help="Its fine-tune: folder or hub id.")],
    data: Annotated[
        Path,
        typer.Option(
            help='Texts to match: JSON lines of {"prompt", "answer"} or {"text"}.',
            parser=parse_path,
        ),
    ],
    out_name: Annotated[
        str | None, typer.Option(help="Name of the result [default: it replaces the variant].")
    ] = None,
    method: Annotated[
        DistillMethod,
        typer.Option(
            help="kl: train on the logits. gram: least squares layer by layer, for little data and "
            "models larger than memory; of the options below only batch, held-out and seed count."
        ),
    ] = DistillMethod.kl,
    steps: Annotated[int, typer.Option(help="Of the optimiser, at most.")] = 40,
    learning_rate: Annotated[float, typer.Option(help="Relative to each scale.")] = 0.02,
    batch: Annotated[int, typer.Option(help="Lines of the data a step.")] = 8,
    held_out: Annotated[float, typer.Option(help="Share of the data that only scores.")] = 0.2,
    evaluate_every: Annotated[int, typer.Option(help="Steps between two scores.")] = 5,
    patience: Annotated[int, typer.Option(help="Scores without a gain that end the run.")] = 3,
    norms: Annotated[
        bool, typer.Option("--norms", help="Train norms and biases that are stored whole, too.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the held-out share and the order.")] = 0,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder to save the run in, and to resume it from.", parser=parse_path),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    base: BaseOption = None,
    as_json: Json = False,
) -> None:
    """Train a variant's scales to answer as its fine-tune; kept only if held-out text says so.

    Example: soupkit distill family coder --finetuned coder-ft --data train.jsonl
    """
    from soupkit.distill import DistillConfig
    from soupkit.distill import distill as run
    from soupkit.distill.state import STATE_NAME

    config = DistillConfig(
        method=method.value,
        steps=steps,
        learning_rate=learning_rate,
        batch=batch,
        held_out=held_out,
        evaluate_every=evaluate_every,
        patience=patience,
        norms=norms,
        seed=seed,
    )
    try:
        with show_progress(f"distilling {name}") as progress:
            report = run(
                family,
                name,
                finetuned=finetuned,
                data=data,
                config=config,
                out_name=out_name,
                base=base,
                state=state,
                device=device,
                progress=progress,
            )
    except (KeyboardInterrupt, SystemExit):
        if state is not None and (state / STATE_NAME).exists():
            error_line(f"the run so far is kept in {state}: the same command goes on from there")
        raise
    if as_json:
        print_json(report.to_json())
    else:
        say(report.line())
