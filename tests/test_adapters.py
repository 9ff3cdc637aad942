"""Promises of soupkit.adapters; the oracle is PEFT: it loads the folder and adds the same delta."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from soupkit.adapters import export_adapter, export_variant_adapter
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import BundleError, CheckpointError, MergeError
from soupkit.export import export_variant
from soupkit.restore import restore

# PEFT 0.21.2 asks transformers 5.24 for a name that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LAYER = "model.layers.0."
GATE = f"{LAYER}mlp.gate_proj.weight"


def low_rank(ranks):
    """An edit that undoes the noise and adds a delta of the given rank to some weights."""

    def edit(tensors):
        generator = torch.Generator().manual_seed(7)
        for name, rank in ranks.items():
            rows, columns = tensors[name].shape
            left = torch.randn(rows, rank, generator=generator)
            tensors[name] += 0.05 * left @ torch.randn(rank, columns, generator=generator)

    return edit


def adapt(base, finetuned, out, **options):
    return export_adapter(open_checkpoint(base), open_checkpoint(finetuned), out=out, **options)


def variant(base, finetuned, family, encoding):
    """A variant of that encoding, and the weights that it stands for."""
    opened = open_checkpoint(base), open_checkpoint(finetuned)
    export_variant(*opened, family=family, name="v", encoding=encoding)
    restore(family, "v", out=family / "dense")
    return load_file(family / "dense" / "model.safetensors")


def merged_by_peft(base, adapter):
    model = AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def test_low_rank_delta_is_reproduced_exactly_by_peft(base_folder, make_finetune, tmp_path):
    ranks = {
        GATE: 3,
        f"{LAYER}self_attn.q_proj.weight": 1,
        "model.layers.1.mlp.down_proj.weight": 5,
    }
    finetuned = make_finetune(tmp_path / "ft", base_folder, size=0.0, edit=low_rank(ranks))
    report = adapt(base_folder, finetuned, tmp_path / "lora")
    assert report.ranks == {name.removesuffix(".weight"): rank for name, rank in ranks.items()}
    assert report.is_exact
    assert report.left_out == ()
    merged = merged_by_peft(base_folder, tmp_path / "lora")
    for name, wanted in load_file(finetuned / "model.safetensors").items():
        torch.testing.assert_close(merged[name], wanted, rtol=1e-5, atol=1e-6)


def test_full_fine_tune_loses_what_the_report_says(base_folder, finetuned_folder, tmp_path):
    report = adapt(base_folder, finetuned_folder, tmp_path / "lora", rank=4)
    assert set(report.ranks.values()) == {4}
    assert not report.is_exact
    base = load_file(base_folder / "model.safetensors")
    finetuned = load_file(finetuned_folder / "model.safetensors")
    merged = merged_by_peft(base_folder, tmp_path / "lora")
    lost = total = 0.0
    for module, share in report.lost.items():
        delta = finetuned[f"{module}.weight"] - base[f"{module}.weight"]
        values = torch.linalg.svdvals(delta.double())
        tail = float(values[4:].square().sum())
        assert share == pytest.approx(tail / float(values.square().sum()), rel=1e-3)
        error = finetuned[f"{module}.weight"] - merged[f"{module}.weight"]
        assert float(error.square().sum()) == pytest.approx(tail, rel=1e-2)
        lost, total = lost + tail, total + float(values.square().sum())
    assert report.lost_energy == pytest.approx(lost / total, rel=1e-3)


def test_what_cannot_travel_is_named(base_folder, finetuned_folder, tmp_path):
    report = adapt(base_folder, finetuned_folder, tmp_path / "lora")
    norms = [
        f"model.layers.{i}.{one}_layernorm.weight"
        for i in (0, 1)
        for one in ("input", "post_attention")
    ]
    assert sorted(report.left_out) == sorted(
        [*norms, "model.norm.weight", "model.embed_tokens.weight"]
    )
    assert 0 < report.left_out_energy < 1
    # Full rank of these small matrices is within the default: nothing else is lost.
    assert report.lost_energy < 1e-9


def test_untied_head_travels(make_llama, make_finetune, tmp_path):
    base = make_llama(tmp_path / "base", tied=False)
    edit = low_rank({"lm_head.weight": 2})
    finetuned = make_finetune(tmp_path / "ft", base, size=0.0, edit=edit)
    report = adapt(base, finetuned, tmp_path / "lora")
    assert report.ranks == {"lm_head": 2}
    merged = merged_by_peft(base, tmp_path / "lora")
    wanted = load_file(finetuned / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(merged["lm_head.weight"], wanted, rtol=1e-5, atol=1e-6)


def test_transposed_layers_of_gpt2_are_reproduced(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_embd=12,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    (name,) = [one for one in tensors if one.endswith("mlp.c_fc.weight")]
    assert tensors[name].shape == (12, 48)
    tensors[name] += torch.outer(torch.arange(12.0), torch.ones(48)) / 10
    (tmp_path / "ft").mkdir()
    save_file(tensors, tmp_path / "ft" / "model.safetensors")
    variant(tmp_path / "base", tmp_path / "ft", tmp_path / "f", "lowrank-1")
    for report in (
        adapt(tmp_path / "base", tmp_path / "ft", tmp_path / "lora"),
        export_variant_adapter(tmp_path / "f", "v", out=tmp_path / "of-variant"),
    ):
        assert report.is_exact
        merged = merged_by_peft(tmp_path / "base", report.path)
        full = next(one for one in merged if one.endswith("mlp.c_fc.weight"))
        torch.testing.assert_close(merged[full], tensors[name], rtol=1e-5, atol=1e-6)


def test_a_variant_of_factors_is_the_adapter(base_folder, make_finetune, tmp_path):
    """Also where the fine-tune is no low-rank one: the variant is."""

    def edit(tensors):
        for name, tensor in load_file(base_folder / "model.safetensors").items():
            if name not in (GATE, f"{LAYER}self_attn.q_proj.weight"):
                tensors[name] = tensor

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    wanted = variant(base_folder, finetuned, tmp_path / "f", "lowrank-3")
    report = export_variant_adapter(tmp_path / "f", "v", out=tmp_path / "lora")
    assert report.is_exact
    assert report.lost_energy == 0.0
    assert set(report.ranks.values()) == {3}
    assert len(report.ranks) == 2
    stored = load_file(tmp_path / "f" / "variants" / "v" / "variant.safetensors")
    found = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    module = GATE.removesuffix(".weight")
    assert torch.equal(found[f"base_model.model.{module}.lora_A.weight"], stored[f"{GATE}.down"])
    assert torch.equal(found[f"base_model.model.{module}.lora_B.weight"], stored[f"{GATE}.up"])
    merged = merged_by_peft(base_folder, tmp_path / "lora")
    for name, tensor in wanted.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-7)
    cut = export_variant_adapter(tmp_path / "f", "v", out=tmp_path / "cut", rank=2)
    assert set(cut.ranks.values()) == {2}
    assert 0 < cut.lost_energy < 1


@pytest.mark.parametrize("encoding", ["row", "lowrank-2+row", "rank1-x2", "raw"])
def test_a_variant_with_signs_loses_what_a_fine_tune_would(
    base_folder, finetuned_folder, tmp_path, encoding
):
    variant(base_folder, finetuned_folder, tmp_path / "f", encoding)
    found = export_variant_adapter(tmp_path / "f", "v", out=tmp_path / "lora", rank=4)
    wanted = adapt(base_folder, tmp_path / "f" / "dense", tmp_path / "other", rank=4)
    assert found.ranks == wanted.ranks
    assert found.lost == pytest.approx(wanted.lost, rel=1e-3)
    assert sorted(found.left_out) == sorted(wanted.left_out)
    assert found.left_out_energy == pytest.approx(wanted.left_out_energy, rel=1e-3)


def test_variants_that_are_damaged_or_unknown_make_no_adapter(
    base_folder, finetuned_folder, tmp_path
):
    variant(base_folder, finetuned_folder, tmp_path / "f", "row")
    with pytest.raises(BundleError, match="no variant 'gone'"):
        export_variant_adapter(tmp_path / "f", "gone", out=tmp_path / "lora")
    path = tmp_path / "f" / "variants" / "v" / "variant.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BundleError, match="damaged"):
        export_variant_adapter(tmp_path / "f", "v", out=tmp_path / "lora")
    assert not (tmp_path / "lora").exists()


def test_folder_has_only_what_peft_writes(base_folder, finetuned_folder, tmp_path):
    adapt(base_folder, finetuned_folder, tmp_path / "lora", rank=2)
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_folder)
    assert (config["r"], config["lora_alpha"]) == (2, 2)


def test_nothing_to_put_into_an_adapter_is_told(base_folder, make_finetune, tmp_path):
    with pytest.raises(CheckpointError, match="no linear layer changed"):
        adapt(base_folder, base_folder, tmp_path / "lora")

    def edit(tensors):
        tensors[GATE][0, 0] = float("nan")

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    with pytest.raises(MergeError, match=GATE):
        adapt(base_folder, finetuned, tmp_path / "lora")
    with pytest.raises(ValueError, match="rank"):
        adapt(base_folder, finetuned, tmp_path / "lora", rank=0)
    assert not (tmp_path / "lora").exists()
    assert not list(tmp_path.glob(".*"))
