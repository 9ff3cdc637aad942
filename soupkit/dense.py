"""Writing a dense model folder that transformers loads: weights streamed to shards, config.json
kept in step.

Only the fields of config.json that the weights decide are changed: dtype, vocab_size,
tie_word_embeddings, the latter two in its text_config too. Everything else, and every other
companion file, is carried over as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from soupkit.checkpoint import OUTPUT_EMBEDDINGS, Checkpoint, read_config
from soupkit.files import atomic_write_json


def write_config(
    folder: Path,
    source: Path,
    *,
    dtype: torch.dtype,
    base: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Write config.json for the parameters of `shapes`, from the file `source` (nothing if absent).

    Args:
        folder: of the model to be. dtype: of its weights. base: whose vocabulary and ties the
            shapes are compared with. shapes: of every parameter that is written.
    """
    if not source.is_file():
        return
    config = read_config(source)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    has_head = any(name.endswith(OUTPUT_EMBEDDINGS) for name in shapes)
    if base.tied:
        config["tie_word_embeddings"] = not has_head
    for part in _sections(config):
        if has_head and part.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = False
    for name, shape in shapes.items():
        rows = base.shape(name)[:1]
        for part, before in zip(_sections(config), _sections(base.config), strict=True):
            if shape[:1] != rows and rows == (before.get("vocab_size"),):
                part["vocab_size"] = shape[0]
    atomic_write_json(folder / "config.json", config, allow_nan=True)


def _sections(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config itself and its text_config, which models of several modalities have."""
    text = config.get("text_config")
    return config, text if isinstance(text, dict) else {}
