"""Promises of the method "gram": models streamed by layer, the closed form on real inputs."""

import pytest
import torch
from delta_kit import dense
from test_distill import held_out_kl, make_family, make_models, run, snapshot

from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.distill import DistillConfig
from soupkit.distill.batches import collate
from soupkit.distill.grams import GramFit, _summing
from soupkit.distill.models import scored_logits
from soupkit.distill.streamed import StreamedModel, variant_weights
from soupkit.errors import CheckpointError
from soupkit.quality import encode, open_model, open_tokenizer, read_examples
from soupkit.restore import restore
from soupkit.verify import verify_family

CONFIG = DistillConfig(method="gram", batch=6)
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def models(request, tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("gram"), tied=request.param)


def rows_of(models):
    return encode(read_examples(models / "data.jsonl"), open_tokenizer(models / "ft"))


def test_a_streamed_model_is_the_model(models, tmp_path):
    batch = collate(rows_of(models)[:5])
    finetuned = open_checkpoint(models / "ft")
    streamed = StreamedModel(finetuned.path, finetuned.tensor)
    wanted = scored_logits(open_model(models / "ft"), batch, {})
    assert torch.equal(streamed.logits(batch), wanted)
    # Nothing stays in memory, and it can run again.
    assert all(one.device.type == "meta" for one in streamed.model.parameters())
    assert torch.equal(streamed.logits(batch), wanted)
    family = make_family(models, tmp_path / "f", "lowrank-2+row")
    variant = open_variant(open_family(family).folder("v"))
    base = open_checkpoint(models / "base")
    streamed = StreamedModel(base.path, variant_weights(base, variant, {}))
    restored = open_model(restore(family, "v", out=tmp_path / "dense").path)
    assert torch.equal(streamed.logits(batch), scored_logits(restored, batch, {}))


def test_weights_of_another_shape_are_refused(models):
    finetuned = open_checkpoint(models / "ft")
    streamed = StreamedModel(finetuned.path, lambda name: finetuned.tensor(name)[:1])
    with pytest.raises(CheckpointError, match="its configuration says"):
        streamed.logits(collate(rows_of(models)[:2]))


@pytest.mark.parametrize("gram_bytes", [0, 2**30])
def test_scales_are_those_of_the_closed_form(models, tmp_path, gram_bytes):
    family = make_family(models, tmp_path / "f")
    variant = open_variant(open_family(family).folder("v"))
    base, finetuned = (open_checkpoint(models / one) for one in ("base", "ft"))
    rows = rows_of(models)
    fit = GramFit(base, finetuned, variant, rows, batch=7)
    told = []
    found = fit.fit(range(11), gram_bytes=gram_bytes, progress=lambda *one: told.append(one[1:]))
    # A tied head is an embedding too, and keeps its scales.
    linears = 2 * 7 + (not base.tied)
    assert told == [(done, linears) for done in range(1, linears + 1)]
    inputs = []
    model = open_model(models / "ft")
    layer = model.get_submodule(GATE.removesuffix(".weight"))
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for row in rows[:11]:
        model(input_ids=torch.tensor([row.ids]))
    x = torch.cat([one[0] for one in inputs]).double()
    delta = (finetuned.tensor(GATE) - base.tensor(GATE)).double()
    signs = torch.where(delta >= 0, 1.0, -1.0).double()
    wanted = ((x @ delta.T) * (x @ signs.T)).sum(0) / (x @ signs.T).square().sum(0)
    torch.testing.assert_close(found[GATE].scale[0].double(), wanted, rtol=1e-4, atol=0)
    assert dense(found[GATE], tuple(delta.shape)).shape == delta.shape


@pytest.mark.parametrize("encoding", ["matrix", "row", "column", "rank1", "lowrank-2+row-x2"])
def test_held_out_kl_falls_or_the_start_is_kept(models, tmp_path, encoding):
    family = make_family(models, tmp_path / "f", encoding)
    before = snapshot(family)
    report = run(models, family, CONFIG)
    assert verify_family(family) == []
    assert report.kl <= report.start_kl
    assert (snapshot(family) == before) == (report.best_step == 0)
    end = restore(family, "v", out=tmp_path / "end").path
    assert held_out_kl(models, end, CONFIG) == pytest.approx(report.kl, rel=1e-3)


def test_a_gram_of_one_token_has_no_negative_directions():
    linear = torch.nn.Linear(64, 3)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    # An outlier channel, as language models have them.
    x[..., 3] *= 300
    grams = {}
    with _summing({"w": linear}, grams, torch.ones(1, 1, dtype=torch.bool)):
        linear(x)
    values = torch.linalg.eigvalsh(grams["w"])
    assert float(values[0]) > -1e-13 * float(values[-1])


def test_what_only_training_has_is_refused(models, tmp_path):
    family = make_family(models, tmp_path / "f")
    with pytest.raises(ValueError, match="no state"):
        run(models, family, CONFIG, state=tmp_path / "s")
    with pytest.raises(ValueError, match="method='mse'"):
        DistillConfig(method="mse")
