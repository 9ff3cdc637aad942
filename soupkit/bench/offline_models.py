"""Made-up model folders for the offline benchmarks: real shapes, any size, written at disk speed.

Names, shapes and config.json are Llama's, in bfloat16, so that transformers and mergekit know them.
Values are one tile of normal numbers over and over: no tool's time depends on them. A fine-tune
moves every matrix and no vector.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit.files import atomic_write_json
from soupkit.tensorfile import TensorFileWriter, TensorSpec

TILE = 2**22  # values
SHARD_BYTES = 1_000_000_000
MOVED = 1e-2  # of a fine-tune, by the base's standard deviation


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a Llama: of the hidden state, the MLP, keys and values, the vocabulary, a head."""

    hidden: int
    wide: int
    kv: int
    vocab: int
    head: int

    def layer(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of one layer."""
        at = f"model.layers.{index}"
        square, narrow = (self.hidden, self.hidden), (self.kv, self.hidden)
        return {
            f"{at}.input_layernorm.weight": (self.hidden,),
            f"{at}.mlp.down_proj.weight": (self.hidden, self.wide),
            f"{at}.mlp.gate_proj.weight": (self.wide, self.hidden),
            f"{at}.mlp.up_proj.weight": (self.wide, self.hidden),
            f"{at}.post_attention_layernorm.weight": (self.hidden,),
            f"{at}.self_attn.k_proj.weight": narrow,
            f"{at}.self_attn.o_proj.weight": square,
            f"{at}.self_attn.q_proj.weight": square,
            f"{at}.self_attn.v_proj.weight": narrow,
        }

    def model(self, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter; the head is tied to the embedding."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for index in range(num_layers):
            found |= self.layer(index)
        return found

    def layers_for(self, num_bytes: int) -> int:
        """Layers of a bfloat16 model of about that size, at least one."""
        one = 2 * sum(map(math.prod, self.layer(0).values()))
        return max(1, round((num_bytes - 2 * self.vocab * self.hidden) / one))

    def num_bytes(self, num_layers: int) -> int:
        """Bytes of the weights."""
        return 2 * sum(map(math.prod, self.model(num_layers).values()))


SMOL = Shapes(hidden=576, wide=1536, kv=192, vocab=49152, head=64)
LLAMA = Shapes(hidden=4096, wide=14336, kv=1024, vocab=32000, head=128)
TINY = Shapes(hidden=64, wide=128, kv=64, vocab=128, head=64)


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError where the disk of `folder` has fewer free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, and the benchmark needs "
            f"{needed / 1e9:.1f} GB: set TMPDIR to a folder of a larger disk"
        )


def write_model(folder: Path, shapes: Shapes, num_layers: int, *, tuned: int) -> Path:
    """Write a model folder and return it.

    Args:
        folder: is made. tuned: 0: the base; else which of its fine-tunes.
    """
    folder.mkdir()
    tiles = _tiles(tuned)
    shards = list(_shards(shapes.model(num_layers)))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        specs = {one: TensorSpec(torch.bfloat16, shape) for one, shape in shard.items()}
        writer = TensorFileWriter(folder / name, specs, metadata={"format": "pt"})
        with closing(writer):
            for one, shape in shard.items():
                _fill(writer, one, math.prod(shape), tiles[len(shape) == 1])
    total = {"total_size": shapes.num_bytes(num_layers)}
    index = {"metadata": total, "weight_map": weight_map}
    atomic_write_json(folder / "model.safetensors.index.json", index)
    (folder / "config.json").write_text(json.dumps(_config(shapes, num_layers)))
    return folder


def _tiles(tuned: int) -> tuple[Tensor, Tensor]:
    """Values of matrices and of vectors."""
    base = torch.randn(TILE, generator=torch.Generator().manual_seed(0))
    moved = base
    if tuned:
        noise = torch.randn(TILE, generator=torch.Generator().manual_seed(tuned))
        moved = base + MOVED * noise
    return moved.mul(0.02).bfloat16(), base.mul(0.02).bfloat16()


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The parameters of one file after another."""
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, shape in shapes.items():
        if shard and held + 2 * math.prod(shape) > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = shape
        held += 2 * math.prod(shape)
    yield shard


def _fill(writer: TensorFileWriter, name: str, count: int, tile: Tensor) -> None:
    for start in range(0, count, len(tile)):
        writer.write(name, tile[: count - start], first_entry=start)


def _config(shapes: Shapes, num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.wide,
        "num_attention_heads": shapes.hidden // shapes.head,
        "num_key_value_heads": shapes.kv // shapes.head,
        "num_hidden_layers": num_layers,
        "vocab_size": shapes.vocab,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
