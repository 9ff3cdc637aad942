"""Model folders opened with transformers: the base, and what turns every model's tokens into text.

A variant's own tokenizer and generation files take the place of the base's. No remote code.
"""

import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DistributedConfig,
    GenerationConfig,
)

from soupkit.bundle import VariantRef, open_variant
from soupkit.checkpoint import Checkpoint
from soupkit.errors import BundleError, ServingError

from .catalog import Catalog

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")

# Settings of config.json that do not change what a forward pass computes.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class TextSetup:
    """What turns a model's tokens into text, from the files beside its weights."""

    tokenizer: Any
    stop_tokens: frozenset[int]
    config: dict[str, Any]


def load_model(
    path: Path, *, device: torch.device | str, dtype: torch.dtype, tensor_parallel: int = 1
) -> Any:
    """The base as a causal LM in eval mode, attention by torch's sdpa; no remote code.

    Args:
        tensor_parallel: ranks of the process group, of which this process then has its part.
    Raises:
        ServingError: it has heads that so many ranks cannot share evenly.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if tensor_parallel > 1:
        _check_heads(path, tensor_parallel)
        ranks = DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")
        options["distributed_config"] = ranks
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    if tensor_parallel == 1:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _check_heads(path: Path, ranks: int) -> None:
    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise ServingError(
            f"--tensor-parallel {ranks}: the base has {heads} heads and {kv_heads} key-value "
            f"heads, which do not divide by {ranks}"
        )


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


class Texts:
    """Tokenizer, stop tokens and configuration of every model, read once a version."""

    def __init__(self, catalog: Catalog, base: Checkpoint) -> None:
        self.base = load_text_setup(base.path)
        self._catalog, self._files = catalog, base.files()
        self._readings: dict[tuple[str, str], asyncio.Task[TextSetup]] = {}

    async def of(self, ref: VariantRef | None) -> TextSetup:
        """The text setup of a variant, or of the base for None.

        Raises:
            SoupkitError: its files cannot be read, or say that it is another architecture.
        """
        if ref is None:
            return self.base
        key = (ref.path, ref.digest)
        if key not in self._readings:
            live = {(r.path, r.digest) for r in self._catalog.variants.values()}
            self._readings = {k: v for k, v in self._readings.items() if k in live}
            # Not on the threads that load weights: a slow load must not delay another variant.
            reading = asyncio.to_thread(self._read_variant, ref)
            self._readings[key] = asyncio.create_task(reading)
        task = self._readings[key]
        try:
            # One reading for all who ask; a client that goes away must not end it for the others.
            return await asyncio.shield(task)
        finally:
            # A failure is for those who waited; the next request tries again.
            if task.done() and (task.cancelled() or task.exception() is not None):
                self._readings.pop(key, None)

    def _read_variant(self, ref: VariantRef) -> TextSetup:
        if self._catalog.is_adapter(ref):
            return self.base
        folder = self._catalog.family.folder(ref.name)
        manifest = open_variant(folder).manifest
        if manifest.digest != ref.digest:
            raise BundleError(f"variant {ref.name!r} is being replaced; try again")
        if not manifest.companions:
            return self.base
        found = _with_companions(self._files, folder, manifest.companions)
        _check_config(found.config, self.base.config, name=ref.name)
        return found


def _with_companions(files: dict[str, Path], folder: Path, names: Iterable[str]) -> TextSetup:
    """Reads a folder of the base's files with those of a variant in their place."""
    files = files | {name: folder / name for name in names}
    with tempfile.TemporaryDirectory(prefix="soupkit-text-") as overlay:
        for name, path in files.items():
            (Path(overlay) / name).symlink_to(path.resolve())
        return load_text_setup(Path(overlay))


def _check_config(variant: dict[str, Any], base: dict[str, Any], *, name: str) -> None:
    """Refuses a variant whose configuration makes the model compute something else.

    Raises:
        ServingError: naming the first setting that differs.
    """
    for key in sorted(variant.keys() | base.keys()):
        if key in HARMLESS or "dropout" in key or variant.get(key) == base.get(key):
            continue
        raise ServingError(
            f"variant {name!r}: config.json sets {key}={variant.get(key)!r}, the base "
            f"{base.get(key)!r}; it cannot share a batch with the base: serve the restored model"
        )
