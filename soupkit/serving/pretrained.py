"""A model folder opened with transformers: the model, and what turns its tokens into text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from soupkit.errors import ServingError

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class TextSetup:
    """What turns a model's tokens into text, from the files beside its weights."""

    tokenizer: Any
    stop_tokens: frozenset[int]
    config: dict[str, Any]


def load_model(path: Path, *, device: str, dtype: torch.dtype) -> Any:
    """The base as a causal LM in eval mode, attention by torch's sdpa; no remote code."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    )
    return model.to(device).eval().requires_grad_(False)


def load_text_setup(folder: Path) -> TextSetup:
    """Reads tokenizer, stop tokens and configuration of a folder; no remote code.

    Raises:
        ServingError: there is no tokenizer.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Without any of these transformers makes an empty tokenizer for some model types.
    if not any(found for name in TOKENIZER_FILES for found in folder.glob(name)):
        raise ServingError(f"{folder}: no tokenizer files; save the tokenizer beside the weights")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ServingError(f"{folder}: no usable tokenizer: {error}") from error
    stop = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        stop = GenerationConfig.from_pretrained(folder).eos_token_id
    if stop is None:
        stop = tokenizer.eos_token_id
    ids = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return TextSetup(tokenizer, frozenset(i for i in ids if i >= 0), config.to_dict())
