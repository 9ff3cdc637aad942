"""Small real checkpoints that many tests share; an environment without network or home folder."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Triton reads it when imported: without CUDA its kernels run in the interpreter (triton_bfloat16).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

MakeLlama = Callable[..., Path]
MakeFinetune = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _no_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches go to a folder of this run; no test asks a hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def make_llama() -> MakeLlama:
    """A function that writes a random Llama with transformers and returns its folder.

    make_llama(folder, *, seed=0, tied=True, dtype=torch.float32, vocab=99, hidden=24,
    max_shard_size=None)
    """
    return _make_llama


@pytest.fixture(scope="session")
def make_finetune() -> MakeFinetune:
    """A function that writes a changed copy of a checkpoint folder and returns the new folder.

    make_finetune(folder, base, *, seed=1, size=1e-2, edit=None): every float gets seeded noise of
    standard deviation `size`; `edit(tensors)` may then change the mapping of names to tensors.
    """
    return _make_finetune


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied float32 Llama: 2 layers, hidden 24, 99 tokens; do not change it."""
    return _make_llama(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def finetuned_folder(base_folder: Path) -> Path:
    """A fine-tune of base_folder in which every parameter changed; do not change it."""
    return _make_finetune(base_folder.with_name("finetuned"), base_folder)


def _make_llama(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    vocab: int = 99,
    hidden: int = 24,
    max_shard_size: str | None = None,
) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden - 4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    options = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    return folder


def _make_finetune(
    folder: Path,
    base: Path,
    *,
    seed: int = 1,
    size: float = 1e-2,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    tensors: dict[str, Tensor] = {}
    for path in sorted(base.glob("*.safetensors")):
        tensors |= load_file(path)
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        if tensors[name].is_floating_point():
            noise = torch.randn(tensors[name].shape, generator=generator) * size
            tensors[name] = (tensors[name].float() + noise).to(tensors[name].dtype)
    if edit:
        edit(tensors)
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    document = {**json.loads((base / "config.json").read_text()), **(config or {})}
    (folder / "config.json").write_text(json.dumps(document))
    return folder
