"""Every encoding, served beside the base in one batch: the tokens of the restored dense model."""

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_kit import greedy, load_variant, make_base, make_finetune
from transformers import AutoModelForCausalLM

from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.restore import restore
from soupkit.serving.engine import Engine
from soupkit.serving.jobs import End, Job
from soupkit.serving.layers import VariantBank, ties
from soupkit.serving.memory import KVPlan
from soupkit.serving.patches import BASE_SLOT, DeltaPatch
from soupkit.serving.pretrained import load_model
from soupkit.serving.sampling import Sampling, Token
from soupkit.verify import verify_family

WAIT = 60
ENCODINGS = (
    "row",
    "matrix",
    "column",
    "rank1",
    "row-x4",
    "rank1-x2",
    "matrix-x2-refit",
    "column-x3-refit",
    "sparse",
    "lowrank-3",
    "lowrank-5+row",
    "row+lowrank-3",
    "lowrank-2+rank1-x2",
    "column-x2-refit+lowrank-4",
    "raw",
)
EMBEDDING = "model.embed_tokens.weight"
GATE, DOWN = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight"
# Each tensor its own.
MIX = {EMBEDDING: "lowrank-2+column", GATE: "raw", DOWN: "sparse"}


def sparsened(folder: Path, base: Path) -> Path:
    """Leave a fifth of each matrix's change, as reinforcement learning does."""
    ours = load_file(folder / "model.safetensors")
    theirs = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name, tensor in ours.items():
        if tensor.ndim == 2:
            is_kept = torch.rand(tensor.shape, generator=generator) < 0.2
            ours[name] = torch.where(is_kept, tensor, theirs[name]).contiguous()
    save_file(ours, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "bfloat16"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/base, root/family with a variant for each encoding and "mix", root/dense-<name>."""
    root = tmp_path_factory.mktemp(request.param)
    kind = "qwen3" if request.param == "qwen3" else "llama"
    base = make_base(root / "base", kind=kind, tied=kind == "llama")
    finetune = make_finetune(base, root / "ft", lambda name: True, seed=1)
    folders = {"dense": finetune}
    folders["sparse"] = sparsened(make_finetune(base, root / "s", lambda name: True, seed=2), base)
    if request.param == "bfloat16":
        for folder in (base, *folders.values()):
            tensors = load_file(folder / "model.safetensors")
            halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    for name in (*ENCODINGS, "mix"):
        source = folders["sparse" if name == "sparse" else "dense"]
        options: Any = {"encoding": name} if name != "mix" else {"encodings": MIX}
        export_variant(
            open_checkpoint(base),
            open_checkpoint(source),
            family=root / "family",
            name=model_name(name),
            **options,
        )
        restore(root / "family", model_name(name), out=root / f"dense-{name}")
    return root


def model_name(encoding: str) -> str:
    """A variant's name cannot have a +."""
    return encoding.replace("+", "_")


def test_verify_accepts_every_encoding(root: Path) -> None:
    assert verify_family(root / "family") == []


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(5, 260, (n,), generator=generator).tolist() for n in lengths]


def test_a_mixed_batch_gives_the_tokens_of_the_restored_models(root: Path) -> None:
    names = ["base", *ENCODINGS, "mix"]
    model = load_model(root / "base", device="cpu", dtype=torch.float32)
    plan = KVPlan(kv_tokens=4096, batch_tokens=48)
    engine = Engine(model, max_running=2 * len(names), plan=plan)
    slots = {"base": BASE_SLOT}
    for slot, name in enumerate(names[1:]):
        engine.load(slot, load_variant(root, model_name(name)))
        slots[name] = slot
    asked = [(name, prompt) for prompt in prompts(2) for name in names]
    boxes: list[queue.Queue[Token | End]] = []
    engine.start()
    try:
        for name, prompt in asked:
            boxes.append(queue.Queue())
            job = Job(tuple(prompt), 16, frozenset({1}), Sampling(temperature=0.0))
            engine.submit(job, slots[name], boxes[-1].put)
        answers = [tokens_of(box) for box in boxes]
    finally:
        engine.close()
    folders = {name: root / (name if name == "base" else f"dense-{name}") for name in names}
    expected = []
    for name, prompt in asked:
        dense = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
        expected.append(greedy(dense, prompt, 16))
    assert answers == expected
    # The encodings are told apart by what they say.
    assert len({tuple(answer) for answer in answers}) > len(names)


def tokens_of(box: "queue.Queue[Token | End]") -> list[int]:
    found: list[int] = []
    while not isinstance(event := box.get(timeout=WAIT), End):
        found.append(event.id)
    return found


@torch.no_grad()
def test_a_slot_is_each_encoding_in_turn(root: Path) -> None:
    """Logits equal those of the restored model; nothing of another encoding remains."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    bank = VariantBank(
        model, vocab_size=model.config.vocab_size, head=model.get_output_embeddings()
    )
    ids = torch.randint(5, 200, (1, 11), generator=torch.Generator().manual_seed(0))
    for name in [*ENCODINGS, "mix", "lowrank-3", "row"]:
        variant = load_variant(root, model_name(name))
        bank.load(0, variant.deltas, variant.raw, **ties(variant.manifest))
        bank.set_batch([0] * 11, [0] * 11)
        dense = AutoModelForCausalLM.from_pretrained(root / f"dense-{name}", dtype=torch.float32)
        expected = dense(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        bank.free(0)


def test_bytes_of_a_variant_are_those_of_its_parts_and_its_slots_hold_them(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    bank = VariantBank(
        model, vocab_size=model.config.vocab_size, head=model.get_output_embeddings()
    )
    for slot, name in enumerate((*ENCODINGS, "mix")):
        variant = load_variant(root, model_name(name))
        deltas = sum(delta.nbytes for delta in variant.deltas.values())
        assert variant.nbytes == deltas + sum(tensor.nbytes for tensor in variant.raw.values())
        bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))
        for full_name, delta in variant.deltas.items():
            patch = bank._patches[full_name.removesuffix(".weight")]
            assert isinstance(patch, DeltaPatch)
            assert patch.arena is not None
            stored = patch.arena.delta(slot)
            assert stored is not None
            assert torch.equal(stored.dense(), delta.dense())
