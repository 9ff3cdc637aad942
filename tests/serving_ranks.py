"""One rank of a tensor-parallel model: `python serving_ranks.py ROOT`, started by a test."""

import queue
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from serving_kit import VARIANTS, dense, greedy, load_variant
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from soupkit.errors import ServingError
from soupkit.exits import leave
from soupkit.serving.engine import Engine
from soupkit.serving.jobs import End, Job
from soupkit.serving.layers import VariantBank, ties
from soupkit.serving.memory import KVPlan
from soupkit.serving.patches import BASE_SLOT
from soupkit.serving.sampling import Sampling, Token

Box = queue.Queue[Token | End]


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


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 260, (count,), generator=generator).tolist()


def check_engine(root: Path, model: Any) -> None:
    """Greedy texts of all variants in one batch, with prompts in common; a cancel; a bad load."""
    engine = Engine(model, max_running=16, plan=KVPlan(kv_tokens=1024, batch_tokens=32))
    engine.start()
    if dist.get_rank() > 0:
        engine.follow()
        return
    slots = {"base": BASE_SLOT} | {name: slot for slot, name in enumerate(VARIANTS)}
    variants = {name: load_variant(root, name) for name in VARIANTS}
    engine.reserve(len(VARIANTS), engine.slot_shape(v.manifest for v in variants.values()))
    for name, variant in variants.items():
        engine.load(slots[name], variant)
    common = random_tokens(40, seed=1)
    asked = [(name, common + random_tokens(i, seed=i)) for name in slots for i in (3, 11)]
    boxes = [ask(engine, prompt, slots[name]) for name, prompt in asked]
    cancelled: Box = queue.Queue()
    job = Job(tuple(common), 100, frozenset(), Sampling())
    engine.cancel(engine.submit(job, 0, cancelled.put))
    for (name, prompt), box in zip(asked, boxes, strict=True):
        oracle = dense(root, None if name == "base" else name)
        assert ids_of(box) == greedy(oracle, prompt, 12, stop=None), name
    while not isinstance(event := cancelled.get(timeout=60), End):
        pass
    assert event.reason == "cancelled", event
    scored = engine.score(tuple(common), 0, num_top=1)
    with torch.no_grad():
        logits = dense(root, "linear")(input_ids=torch.tensor([common])).logits[0].log_softmax(-1)
    expected = [float(logits[at, token]) for at, token in enumerate(common[1:])]
    assert [token.logprob for token in scored[1:]] == pytest.approx(expected, abs=1e-4)
    engine.free(0)
    with pytest.raises(ServingError, match="no such parameter"):
        engine.load(0, replace(variants["linear"], deltas={}, raw={"nowhere": torch.zeros(1)}))
    engine.load(0, variants["matrix"])
    answer = ids_of(ask(engine, common, 0))
    assert answer == greedy(dense(root, "matrix"), common, 12, stop=None)
    engine.close()


def ask(engine: Engine, tokens: list[int], slot: int) -> Box:
    box: Box = queue.Queue()
    engine.submit(Job(tuple(tokens), 12, frozenset(), Sampling(temperature=0.0)), slot, box.put)
    return box


def ids_of(box: Box) -> list[int]:
    found = []
    while not isinstance(event := box.get(timeout=60), End):
        found.append(event.id)
    assert event.reason == "length", event
    return found


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
    check_engine(root, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
