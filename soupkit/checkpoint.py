"""Hugging Face model folders, read lazily: safetensors files or shards with an index, ties,
companion files.

A Checkpoint is a TensorSource: it hands out one tensor at a time, mapped from the file. Everything
is checked when the folder is opened, before work starts. No architecture table: parameters are
known by name only, save for the usual names of tied input and output embeddings. It does not build
models.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.companions import companion_files
from soupkit.delta import canonical_name
from soupkit.errors import CheckpointError
from soupkit.files import fault_text, read_json
from soupkit.fingerprint import cached_fingerprint, fingerprint, tensor_digest
from soupkit.shards import ShardWriter
from soupkit.tensorfile import MappedFile, TensorSpec

__all__ = [
    "Checkpoint",
    "ShardWriter",
    "checkpoint_fingerprint",
    "fingerprint",
    "open_checkpoint",
    "tensor_digest",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]

# Names that one matrix goes by when input and output embeddings are tied, by the last parts of the
# name.
OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor's name inside its file, and the file."""

    file: MappedFile
    stored_name: str

    @property
    def spec(self) -> TensorSpec:
        return self.file.slots[self.stored_name].spec


class Checkpoint:
    """A model folder that was opened and checked; a TensorSource.

    Attributes:
        path: the folder.
        source: what it was asked for by: the absolute folder, or a hub id.
        revision: the commit of a hub snapshot, else None.
        config: the parsed config.json ({} without one).
        names: unique parameters, sorted; aliases of tied ones are left out.
        tied: alias -> the parameter that it is the same matrix as; accepted by shape, dtype and
            tensor.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, _Located],
        *,
        config: dict[str, Any],
        tied: dict[str, str],
        weight_files: tuple[Path, ...],
        source: str,
        revision: str | None,
    ) -> None:
        """For open_checkpoint only."""
        self.path = path
        self.config = config
        self.tied = tied
        self.weight_files = weight_files
        self.source = source
        self.revision = revision
        self._tensors = tensors
        self.stamps = {found.file.stamp for found in tensors.values()}
        self.names: tuple[str, ...] = tuple(sorted(tensors))

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of one tensor. Raises CheckpointError if there is none of that name."""
        found = self._tensors.get(self.tied.get(name, name))
        if found is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return found.spec

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor, without reading it."""
        return self.spec(name).dtype

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its own dtype, mapped from the file: do not write to it."""
        self.spec(name)
        found = self._tensors[self.tied.get(name, name)]
        return found.file.tensor(found.stored_name)

    def prefetch(self, name: str) -> None:
        """Have the system begin to read a tensor that will be asked for soon."""
        self.spec(name)
        found = self._tensors[self.tied.get(name, name)]
        found.file.prefetch(found.stored_name)

    def files(self) -> dict[str, Path]:
        """Tokenizer, generation and configuration files by name."""
        return companion_files(self.path)

    @property
    def main_dtype(self) -> torch.dtype:
        """The floating dtype that most of the parameters' entries are stored in (float32 without
        any).
        """
        entries: dict[torch.dtype, int] = {}
        for name in self.names:
            spec = self.spec(name)
            if spec.dtype.is_floating_point:
                entries[spec.dtype] = (
                    entries.get(spec.dtype, 0) + spec.nbytes // spec.dtype.itemsize
                )
        return max(entries, key=lambda dtype: entries[dtype], default=torch.float32)


def open_checkpoint(path_or_hub_id: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a model folder, or a snapshot of a hub model; checks every header, reads no weight.

    Args:
        path_or_hub_id: a folder with model.safetensors or its shards and index, or a hub id such as
            "org/model".
        revision: branch, tag or commit of the hub model.

    Raises:
        CheckpointError: it is missing, truncated, not safetensors, or its config does not fit its
            tensors.
        ValueError: an empty path.
    """
    source = str(path_or_hub_id)
    if not source:
        raise ValueError("an empty path is no model: give a folder or a hub id")
    folder = Path(os.path.expanduser(path_or_hub_id))
    if folder.is_dir():
        folder = folder.resolve()
        source = str(folder)
        commit = None
    elif os.path.lexists(folder):
        kind = "a link that leads nowhere" if folder.is_symlink() else "a file"
        raise CheckpointError(f"{source} is {kind}: give the folder that holds {SINGLE_NAME}")
    else:
        folder = _download(source, revision)
        commit = folder.name
    try:
        located, weight_files = _locate(folder)
        config = read_config(folder / "config.json")
    except OSError as error:
        raise CheckpointError(fault_text(error, folder)) from error
    tied = _find_ties(folder, config, located)
    return Checkpoint(
        folder,
        {name: found for name, found in located.items() if name not in tied},
        config=config,
        tied=tied,
        weight_files=weight_files,
        source=source,
        revision=commit,
    )


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """The fingerprint of a checkpoint, cached by its files' path, size and times."""
    return cached_fingerprint(checkpoint, checkpoint.stamps)


def _download(hub_id: str, revision: str | None) -> Path:
    if not _HUB_ID.fullmatch(hub_id):
        raise CheckpointError(f"{hub_id}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (LocalEntryNotFoundError, ConnectionError):
        raise CheckpointError(
            f"{hub_id}: no such folder, and the hub cannot be reached nor has it a copy on this "
            "machine; check the path or the network"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{hub_id}: no such folder, and the hub has none: {reason}"
        ) from error


def _map_file(path: Path) -> MappedFile:
    try:
        return MappedFile(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _locate(folder: Path) -> tuple[dict[str, _Located], tuple[Path, ...]]:
    """Every tensor of the folder by canonical name, and the files that hold them."""
    if (folder / SINGLE_NAME).exists():
        file = _map_file(folder / SINGLE_NAME)
        return _by_canonical_name(folder, ((name, file) for name in file.slots)), (
            folder / SINGLE_NAME,
        )
    if not (folder / INDEX_NAME).exists():
        raise CheckpointError(_why_no_weights(folder))
    weight_map = _read_index(folder / INDEX_NAME)
    files = {name: _map_file(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in files[name].slots:
            raise CheckpointError(
                f"{folder / name} lacks the tensor {tensor!r} that the index puts there"
            )
    located = _by_canonical_name(
        folder, ((tensor, files[name]) for tensor, name in weight_map.items())
    )
    return located, tuple(folder / name for name in files)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map of tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{path}: puts {tensor!r} into {name!r}, which is no file of this folder"
            )
        if not (path.parent / name).is_file():
            raise CheckpointError(
                f"{path.parent / name} is missing; the index names it: fetch it again"
            )
    return weight_map


def _by_canonical_name(
    folder: Path, pairs: Iterable[tuple[str, MappedFile]]
) -> dict[str, _Located]:
    located: dict[str, _Located] = {}
    for stored, file in pairs:
        name = canonical_name(stored)
        if name in located:
            other = located[name].stored_name
            raise CheckpointError(
                f"{folder}: {stored!r} and {other!r} are both the parameter {name!r}"
            )
        located[name] = _Located(file, stored)
    return located


def _why_no_weights(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return f"{folder} is a PEFT adapter: merge_and_unload it into its base and save that model"
    if any(folder.glob("pytorch_model*.bin*")):
        return (
            f"{folder} has pytorch_model.bin, a pickle, which can run code when read: load it with "
            "transformers and save_pretrained(folder) to get model.safetensors"
        )
    if (folder / "family.json").exists():
        return f"{folder} is a family, no model: `soupkit restore` writes the model of a variant"
    remedy = "give a Hugging Face model folder"
    if found := sorted((len(path.name), path) for path in folder.glob("checkpoint-*/")):
        remedy = f"give one of its checkpoints, such as {found[-1][1]}"
    return f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}: {remedy}"


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json; {} if there is none.

    Raises:
        CheckpointError: it is no JSON object, or `architectures` is no list of names.
        OSError: it cannot be read.
    """
    if not path.exists():
        return {}
    try:
        # Real ones hold Infinity, as in the time_step_limit of Mamba2.
        config = read_json(path, allow_nan=True)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    heads = config.get("architectures") or []
    if not isinstance(heads, list) or not all(isinstance(head, str) for head in heads):
        raise CheckpointError(f"{path}: architectures is {heads!r}, not a list of names")
    return config


def _find_ties(
    folder: Path, config: dict[str, Any], tensors: dict[str, _Located]
) -> dict[str, str]:
    """Aliases of tied embeddings: output name -> input name."""
    tie = config.get("tie_word_embeddings")
    inputs = [name for name in sorted(tensors) if name.endswith(INPUT_EMBEDDINGS)]
    outputs = [name for name in sorted(tensors) if name.endswith(OUTPUT_EMBEDDINGS)]
    if tie is False or len(inputs) != 1 or len(outputs) > 1:
        return {}
    source = inputs[0]
    if not outputs:
        alias = "embed_out.weight" if source.endswith("embed_in.weight") else "lm_head.weight"
        heads = config.get("architectures") or []
        is_lm = any("CausalLM" in head or "LMHead" in head for head in heads)
        return {alias: source} if is_lm else {}
    if not tie:
        return {}
    alias = outputs[0]
    pair = [tensors[name].file.tensor(tensors[name].stored_name) for name in (source, alias)]
    if pair[0].dtype != pair[1].dtype or pair[0].shape != pair[1].shape or not torch.equal(*pair):
        raise CheckpointError(
            f"{folder}: config.json ties {alias!r} to {source!r}, but the files hold two different "
            "matrices; set tie_word_embeddings to false there, or drop the one that is not meant"
        )
    return {alias: source}
