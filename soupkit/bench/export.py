"""Export of a fine-tune to one bit against copying the bytes that it reads: wall time."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from soupkit.bench.rows import Row, compare
from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.restore import restore

GOAL = 2.0  # of `cp`
LAYERS = {True: 4, False: 30}  # quick or not
HIDDEN = 576


def run(*, quick: bool) -> list[Row]:
    """Rows for export and restore of a made-up bfloat16 model of SmolLM2's shapes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base, finetuned = (
            _write_model(folder / name, seed, layers=LAYERS[quick])
            for seed, name in enumerate(("base", "finetuned"))
        )
        family = folder / "family"

        def copy_both() -> None:
            for source in (base, finetuned):
                shutil.copyfile(source / "model.safetensors", folder / "copy")

        def export() -> None:
            export_variant(
                open_checkpoint(base), open_checkpoint(finetuned), family=family, name="ft"
            )

        def restored() -> None:
            shutil.rmtree(folder / "dense", ignore_errors=True)
            restore(family, "ft", out=folder / "dense")

        size = 2 * (base / "model.safetensors").stat().st_size
        repeats = 3 if quick else 7
        return [
            compare(
                f"export, {size / 1e6:.0f} MB read",
                export,
                copy_both,
                against="cp",
                repeats=repeats,
                clock=time.perf_counter,
                goal=GOAL,
            ),
            compare(
                f"restore, {size / 2e6:.0f} MB written",
                restored,
                lambda: shutil.copyfile(base / "model.safetensors", folder / "copy"),
                against="cp",
                repeats=repeats,
                clock=time.perf_counter,
            ),
        ]


def _write_model(folder: Path, seed: int, *, layers: int) -> Path:
    """A folder that open_checkpoint takes; the fine-tune differs in every linear."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    noise = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(49152, HIDDEN, generator=generator)}
    kv, wide = HIDDEN // 3, HIDDEN * 8 // 3
    shapes = {"q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes |= {"gate": (wide, HIDDEN), "up": (wide, HIDDEN), "down": (HIDDEN, wide)}
    for layer in range(layers):
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator)
            moved = 1e-2 * seed * torch.randn(shape, generator=noise)
            tensors[f"model.layers.{layer}.{name}_proj.weight"] = weight + moved
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return folder
