"""Variants inside a model through the Triton kernels: what serving does on a GPU, interpreted."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from serving_kit import VARIANTS, dense, load_variant, make_family
from triton_bfloat16 import DEVICE

from soupkit.serving import layers
from soupkit.serving.layers import VariantBank, ties


@pytest.mark.slow
@torch.no_grad()
def test_slice_a_batch_of_all_variants_equals_the_dense_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "why_not", lambda *_: None)
    root = make_family(tmp_path)
    model = dense(root, None).to(DEVICE)
    bank = VariantBank(
        model, vocab_size=model.config.vocab_size, head=model.get_output_embeddings()
    )
    names = [*VARIANTS, None]
    for slot, name in enumerate(VARIANTS):
        variant = load_variant(root, name)
        bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))
    # One variant a sequence: attention then mixes none.
    ids = torch.randint(5, 200, (1, 7), generator=torch.Generator().manual_seed(0))
    for slot, name in zip([*range(len(VARIANTS)), -1], names, strict=True):
        bank.set_batch([slot] * 7, [slot] * 7)
        found = model(input_ids=ids.to(DEVICE)).logits.cpu()
        expected = dense(root, name)(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mixed = [0, -1, 3, 1, 2, 3, 0]
    layer, x = model.model.layers[0], torch.randn(1, 7, model.config.hidden_size, device=DEVICE)
    bank.set_batch(mixed, mixed)
    together = layer.mlp(layer.input_layernorm(x))
    for at, slot in enumerate(mixed):
        bank.set_batch([slot], [slot])
        alone = layer.mlp(layer.input_layernorm(x[:, at : at + 1]))
        torch.testing.assert_close(together[:, at : at + 1], alone, rtol=1e-5, atol=1e-5)
