"""One rank of a tensor-parallel model: `python serving_ranks.py ROOT`, started by a test."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from serving_kit import VARIANTS, dense, load_variant
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from soupkit.errors import ServingError
from soupkit.serving.layers import VariantBank, ties


@torch.no_grad()
def check_forwards(root: Path, model: Any) -> None:
    """Every variant alone, all of them beside each other, and the base again."""
    bank = VariantBank(
        model, vocab_size=model.config.vocab_size, head=model.get_output_embeddings()
    )
    ids = torch.randint(5, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = model(input_ids=ids).logits
    slots = {}
    for slot, name in enumerate(VARIANTS):
        variant = load_variant(root, name)
        bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))
        slots[name] = slot
    assert bank.arena_bytes == len(slots) * bank.shape.nbytes
    for name, slot in slots.items():
        bank.set_batch([slot] * 9, [slot] * 9)
        expected = dense(root, name)(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    # Attention mixes the rows of a sequence, so a layer that does not is what can be compared.
    layer, x = model.model.layers[0], torch.randn(1, 6, model.config.hidden_size)
    dist.broadcast(x, 0)
    mixed = [*slots.values(), -1]
    bank.set_batch(mixed, mixed)
    together = layer.mlp(layer.post_attention_layernorm(x))
    for at, slot in enumerate(mixed):
        name = next((n for n, s in slots.items() if s == slot), None)
        other = dense(root, name).model.layers[0]
        alone = other.mlp(other.post_attention_layernorm(x[:, at : at + 1]))
        torch.testing.assert_close(together[:, at : at + 1], alone, rtol=1e-4, atol=1e-4)
    bank.close()
    assert torch.equal(model(input_ids=ids).logits, plain)


def check_refused(model: Any) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding.weight, DTensor):
        bank, name = VariantBank(model, vocab_size=200, head=None), "model.embed_tokens.weight"
        with pytest.raises(ServingError, match="takes packed deltas"):
            bank.load(0, {}, {name: torch.zeros(embedding.weight.shape)})


def main() -> None:
    root = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(
        root / "base",
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"),
    ).eval()
    check_forwards(root, model)
    check_refused(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
