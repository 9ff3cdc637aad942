"""Promises of soupkit.restore: W_base + delta, loadable by transformers."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch
from delta_kit import dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from soupkit import restore as restore_module
from soupkit import signs
from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import BundleError, CheckpointError, MergeError
from soupkit.export import export_variant
from soupkit.files import canonical_json
from soupkit.fingerprint import digest_of, sha256_of
from soupkit.merge import MergeRule
from soupkit.offline import merge_checkpoints
from soupkit.restore import restore
from soupkit.tensorfile import dtype_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = torch.arange(1, 21).reshape(2, 10)


def export(base, finetuned, family, **options):
    return export_variant(
        open_checkpoint(base),
        open_checkpoint(finetuned),
        family=family,
        name="v",
        companions=finetuned,
        **options,
    )


def oracle(base, finetuned, *, planes=1):
    """W_base + sum_p mean|r_p| sign(r_p) by rows in numpy, straight from the definition."""
    ours, theirs = (load_file(one / "model.safetensors") for one in (finetuned, base))
    restored = {}
    for name, tensor in ours.items():
        source = theirs.get(name, theirs[EMBEDDING])
        if tensor.ndim == 1 or tensor.shape != source.shape:
            restored[name] = tensor.float()
            continue
        start = source.float().numpy().astype(np.float64)
        residual = tensor.float().numpy().astype(np.float64) - start
        total = start
        for _ in range(planes):
            scale = np.abs(residual).mean(axis=1, keepdims=True).astype(np.float32)
            plane = scale * np.where(residual >= 0, 1.0, -1.0)
            total, residual = total + plane, residual - plane
        restored[name] = torch.from_numpy(total).float()
    return restored


def logits(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(("encoding", "planes"), [("row", 1), ("row-x2", 2)])
def test_logits_are_those_of_the_definition(
    base_folder, finetuned_folder, tmp_path, encoding, planes
):
    export(base_folder, finetuned_folder, tmp_path / "f", encoding=encoding)
    report = restore(tmp_path / "f", "v", out=tmp_path / "dense")
    wanted = oracle(base_folder, finetuned_folder, planes=planes)
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert set(found) == set(wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-7)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model.load_state_dict(wanted, strict=False)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "dense"), expected, rtol=1e-5, atol=1e-6)
    assert report.rounding_loss == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "encoding",
    ["matrix", "column", "rank1-x2", "sparse", "row-x2-refit", "lowrank-2", "row+lowrank-2",
     "lowrank-3+rank1", "lowrank-1+matrix-x2"],
)  # fmt: skip
def test_every_encoding_of_every_layout_is_its_sum(tmp_path, monkeypatch, encoding, dtype):
    """W_base + delta in float64 from the stored parts, whatever the blocks."""
    monkeypatch.setattr(signs, "_BLOCK_ENTRIES", 40)
    monkeypatch.setattr(restore_module, "BLOCK_ENTRIES", 40)
    monkeypatch.setattr(restore_module, "_JOB_ENTRIES", 100)
    shapes = {
        "a.weight": (13, 21),
        "conv.weight": (5, 3, 2, 2),
        "experts.up_proj": (3, 4, 7),
        "thin.weight": (1, 9),
    }
    generator = torch.Generator().manual_seed(0)
    models = []
    for folder in ("base", "ft"):
        tensors = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in shapes.items()
        }
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        models.append(tensors)
    export_variant(
        open_checkpoint(tmp_path / "base"),
        open_checkpoint(tmp_path / "ft"),
        family=tmp_path / "f",
        name="v",
        encoding=encoding,
    )
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    variant = open_variant(open_family(tmp_path / "f").folder("v"))
    for entry in variant.manifest.tensors:
        if entry.kind == "raw":
            assert torch.equal(found[entry.name], models[1][entry.name].float())
            continue
        delta = variant.delta(entry.name)
        matrix = dense(delta, (delta.out_features, delta.in_features))
        wanted = models[0][entry.name].double().numpy() + matrix.reshape(entry.shape)
        torch.testing.assert_close(
            found[entry.name].double(), torch.from_numpy(wanted), rtol=1e-6, atol=1e-6
        )
        lost = models[1][entry.name].double().numpy() - wanted
        change = (models[1][entry.name].double() - models[0][entry.name].double()).numpy()
        share = np.square(lost).sum() / np.square(change).sum()
        assert entry.residual_energy == pytest.approx(share, rel=1e-4, abs=1e-5)
    assert variant.manifest.entries()["a.weight"].kind == "delta"


@pytest.mark.parametrize("encoding", ["row", "lowrank-3+rank1-x2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_of_threads_changes_no_bit(
    base_folder, finetuned_folder, tmp_path, monkeypatch, encoding, dtype
):
    monkeypatch.setattr(restore_module, "_JOB_ENTRIES", 150)
    export(base_folder, finetuned_folder, tmp_path / "f", encoding=encoding)
    threads = torch.get_num_threads()
    losses = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            report = restore(tmp_path / "f", "v", out=tmp_path / str(count), dtype=dtype)
            losses.append(report.rounding_loss)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert losses[0] == losses[1]
    one, three = (tmp_path / count / "model.safetensors" for count in ("1", "3"))
    assert one.read_bytes() == three.read_bytes()


def test_progress_is_in_bytes_written(base_folder, finetuned_folder, tmp_path):
    export(base_folder, finetuned_folder, tmp_path / "f")
    seen = []
    restore(
        tmp_path / "f", "v", out=tmp_path / "dense", dtype=torch.bfloat16,
        progress=lambda name, done, total: seen.append((done, total)),
    )  # fmt: skip
    weights = load_file(tmp_path / "dense" / "model.safetensors")
    nbytes = sum(one.nbytes for one in weights.values())
    assert seen[-1] == (nbytes, nbytes)
    assert seen == sorted(seen)


def test_unchanged_model_comes_back_bit_for_bit(base_folder, tmp_path):
    export(base_folder, base_folder, tmp_path / "f")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    wanted = load_file(base_folder / "model.safetensors")
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rounding_loss_is_what_the_narrow_dtype_loses(base_folder, finetuned_folder, tmp_path):
    export(base_folder, finetuned_folder, tmp_path / "f")
    report = restore(tmp_path / "f", "v", out=tmp_path / "dense", dtype=torch.bfloat16)
    exact = oracle(base_folder, finetuned_folder)
    base = load_file(base_folder / "model.safetensors")
    lost = energy = 0.0
    for name, weight in exact.items():
        if weight.ndim == 2:
            lost += float((weight.bfloat16().double() - weight.double()).square().sum())
            energy += float((weight.double() - base[name].double()).square().sum())
    assert report.rounding_loss == pytest.approx(math.sqrt(lost / energy), rel=1e-3)
    found = load_file(tmp_path / "dense" / "model.safetensors")
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["dtype"] == "bfloat16"
    assert logits(tmp_path / "dense").dtype == torch.bfloat16


def test_untied_fine_tune_of_a_tied_base_loads_untied(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors[HEAD] = tensors[EMBEDDING] + 0.1

    untied = {"tie_word_embeddings": False}
    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit, config=untied)
    export(base_folder, finetuned, tmp_path / "f")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.config.tie_word_embeddings is False
    wanted = oracle(base_folder, finetuned)
    torch.testing.assert_close(model.lm_head.weight.detach(), wanted[HEAD], rtol=1e-6, atol=1e-7)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_newly_tied_fine_tune_of_an_untied_base_loads_untied(make_llama, base_folder, tmp_path):
    untied = make_llama(tmp_path / "base", tied=False)
    export(untied, base_folder, tmp_path / "f")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored[HEAD])


def test_resized_vocabulary_loads_with_its_rows(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], torch.ones(3, 24)])

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    # Without a fitting config.json from the fine-tune the base's is corrected.
    export_variant(
        open_checkpoint(base_folder),
        open_checkpoint(finetuned),
        family=tmp_path / "f",
        name="v",
    )
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert model.config.vocab_size == 102
    wanted = load_file(finetuned / "model.safetensors")[EMBEDDING]
    assert torch.equal(model.model.embed_tokens.weight, wanted)


def test_vocabulary_and_ties_of_a_text_config_follow_the_weights(tmp_path):
    name = "model.language_model.embed_tokens.weight"
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {"vocab_size": 9, "tie_word_embeddings": True},
    }
    for folder, rows in (("base", 9), ("ft", 11)):
        (tmp_path / folder).mkdir()
        save_file({name: torch.ones(rows, 4)}, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    base, finetuned = (open_checkpoint(tmp_path / folder) for folder in ("base", "ft"))
    export_variant(base, finetuned, family=tmp_path / "f", name="v")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    merge_checkpoints(base, [finetuned], out=tmp_path / "merged", rule=MergeRule("mean"))
    for folder in ("dense", "merged"):
        found = json.loads((tmp_path / folder / "config.json").read_text())
        assert found["text_config"] == {"vocab_size": 11, "tie_word_embeddings": True}
        assert found["tie_word_embeddings"] is True
        assert "vocab_size" not in found


def test_whole_numbers_keep_the_fine_tunes_dtype_and_value(tmp_path):
    for folder, count in (
        ("base", torch.tensor([1], dtype=torch.uint8)),
        ("ft", torch.tensor([300])),
    ):
        (tmp_path / folder).mkdir()
        save_file({"count": count}, tmp_path / folder / "model.safetensors")
    base, finetuned = (open_checkpoint(tmp_path / folder) for folder in ("base", "ft"))
    export_variant(base, finetuned, family=tmp_path / "f", name="v")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    merge_checkpoints(base, [finetuned], out=tmp_path / "merged", rule=MergeRule("mean"))
    for folder in ("dense", "merged"):
        found = load_file(tmp_path / folder / "model.safetensors")["count"]
        assert found.dtype == torch.int64
        assert found.tolist() == [300]


def test_weights_beyond_float16_are_refused_not_made_infinite(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"][0] = 1e6

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    export(base_folder, finetuned, tmp_path / "f")
    told = r"model\.norm\.weight: .* beyond the range of torch\.float16"
    with pytest.raises(MergeError, match=told):
        restore(tmp_path / "f", "v", out=tmp_path / "dense", dtype=torch.float16)
    assert not (tmp_path / "dense").exists()


def test_companions_are_the_variants_over_the_bases(base_folder, make_finetune, tmp_path):
    finetuned = make_finetune(tmp_path / "ft", base_folder)
    (finetuned / "chat_template.jinja").write_text("{{ messages }}")
    export(base_folder, finetuned, tmp_path / "f")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert (tmp_path / "dense" / "chat_template.jinja").read_text() == "{{ messages }}"
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "dense" / name).read_bytes() == (base_folder / name).read_bytes()


def test_damaged_companion_is_refused_and_leaves_nothing(base_folder, make_finetune, tmp_path):
    finetuned = make_finetune(tmp_path / "ft", base_folder)
    (finetuned / "chat_template.jinja").write_text("{{ messages }}")
    report = export(base_folder, finetuned, tmp_path / "f")
    (report.path / "chat_template.jinja").write_text("{{ other }}")
    with pytest.raises(BundleError, match=r"chat_template\.jinja: damaged"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert not (tmp_path / "dense").exists()
    assert not list(tmp_path.glob(".*"))


def test_flipped_bit_is_refused_and_leaves_nothing(base_folder, finetuned_folder, tmp_path):
    report = export(base_folder, finetuned_folder, tmp_path / "f")
    path = report.path / "variant.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BundleError, match="damaged or replaced; export the variant again"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


def test_variant_of_another_export_or_base_is_refused(
    make_llama, base_folder, finetuned_folder, tmp_path
):
    export(base_folder, finetuned_folder, tmp_path / "f")
    export(base_folder, finetuned_folder, tmp_path / "g", encoding="row-x2")
    other = make_llama(tmp_path / "other", seed=4)
    export(other, finetuned_folder, tmp_path / "h")
    for family in ("g", "h"):
        shutil.rmtree(tmp_path / "f" / "variants" / "v")
        shutil.copytree(tmp_path / family / "variants" / "v", tmp_path / "f" / "variants" / "v")
        with pytest.raises(BundleError, match="was replaced; export the variant again"):
            restore(tmp_path / "f", "v", out=tmp_path / "dense")
    listed = json.loads((tmp_path / "f" / "family.json").read_text())
    listed["variants"] = json.loads((tmp_path / "h" / "family.json").read_text())["variants"]
    (tmp_path / "f" / "family.json").write_text(json.dumps(listed))
    with pytest.raises(BundleError, match="another base than the family's"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")


@pytest.mark.parametrize("text", ["[]", "{", '{"architectures": 5}'])
def test_damaged_config_of_a_variant_is_refused(base_folder, make_finetune, tmp_path, text):
    finetuned = make_finetune(tmp_path / "ft", base_folder, config={"temperature": 0.5})
    checkpoint = open_checkpoint(finetuned)
    (finetuned / "config.json").write_text(text)
    export_variant(
        open_checkpoint(base_folder), checkpoint, family=tmp_path / "f", name="v",
        companions=finetuned,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"config\.json"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


def test_config_with_infinity_is_kept(base_folder, make_finetune, tmp_path):
    # json.dumps writes Infinity, as in config.json of Mamba2 models on the hub.
    finetuned = make_finetune(tmp_path / "ft", base_folder, config={"limit": [0.0, math.inf]})
    export(base_folder, finetuned, tmp_path / "f")
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config["limit"] == [0.0, math.inf]


def test_base_can_be_moved_but_not_changed(make_llama, make_finetune, tmp_path):
    base = make_llama(tmp_path / "base")
    export(base, make_finetune(tmp_path / "ft", base), tmp_path / "f")
    moved = shutil.move(base, tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"cannot be opened.*--base"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")
    other = make_llama(tmp_path / "other", seed=4)
    with pytest.raises(BundleError, match="is not the base of"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense", base=other)
    restore(tmp_path / "f", "v", out=tmp_path / "dense", base=moved)


def test_existing_folder_is_not_overwritten(base_folder, tmp_path):
    export(base_folder, base_folder, tmp_path / "f")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "mine").touch()
    with pytest.raises(FileExistsError, match="exists already"):
        restore(tmp_path / "f", "v", out=tmp_path / "dense")
    assert [path.name for path in (tmp_path / "dense").iterdir()] == ["mine"]


GATE = "model.layers.0.mlp.gate_proj.weight"


def entry_of(document, name):
    return next(one for one in document["tensors"] if one["name"] == name)


def drop_entry(document, tensors, name):
    """Leave a parameter without anything stored; returns its entry."""
    for stored in [one for one in tensors if one.rpartition(".")[0] == name]:
        del tensors[stored]
    nothing = {"planes": 0, "scale_axis": None, "encoding": None, "rank": 0, "bytes": 0}
    entry = entry_of(document, name)
    entry.update(nothing, residual_energy=0.0)
    return entry


def tie_to_nothing(document, tensors):
    drop_entry(document, tensors, GATE).update(kind="tied", source="nowhere")


def tie_to_another(document, tensors):
    source = GATE.replace("layers.0", "layers.1")
    drop_entry(document, tensors, GATE).update(kind="tied", source=source)


def delta_of_whole_numbers(document, tensors):
    parts = {"kind": "delta", "planes": 1, "scale_axis": "row", "encoding": "row", "bytes": 20}
    entry_of(document, "ids.weight").update(parts)
    tensors["ids.weight.sign"] = torch.zeros(1, 4, 1, dtype=torch.uint8)
    tensors["ids.weight.scale"] = torch.ones(1, 4)


def delta_of_floats_on_whole_numbers(document, tensors):
    delta_of_whole_numbers(document, tensors)
    entry_of(document, "ids.weight")["dtype"] = "F32"


def whole_tensor_of_another_shape(document, tensors):
    drop_entry(document, tensors, GATE).update(kind="raw", dtype="F32", shape=[3], bytes=12)
    tensors[f"{GATE}.raw"] = torch.ones(3)


def factors_of_an_infinite_product(document, tensors):
    tensors[f"{GATE}.up"].fill_(3e38)
    tensors[f"{GATE}.down"].fill_(3e38)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (tie_to_nothing, "tied to 'nowhere'"),
        (tie_to_another, "not so in the base"),
        (delta_of_whole_numbers, "is a delta of I64"),
        (delta_of_floats_on_whole_numbers, "is a delta of F32, the base has torch.int64"),
        (whole_tensor_of_another_shape, r"has shape \(3,\)"),
        (factors_of_an_infinite_product, "beyond float32"),
    ],
)
def test_a_consistent_lie_is_a_bundle_error_and_leaves_nothing(
    make_llama, make_finetune, tmp_path, change, complaint
):
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    tensors = load_file(base / "model.safetensors")
    tensors["ids.weight"] = torch.arange(24).reshape(4, 6)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    finetuned = make_finetune(tmp_path / "ft", base)
    report = export(base, finetuned, tmp_path / "f", encoding="lowrank-2+row")
    stored = load_file(report.path / "variant.safetensors")
    document = json.loads((report.path / "manifest.json").read_text())
    change(document, stored)
    save_file(stored, report.path / "variant.safetensors")
    document["digest"] = digest_of(
        (name, dtype_name(one.dtype), tuple(one.shape), sha256_of(one, dtype=one.dtype))
        for name, one in stored.items()
    )
    del document["checksum"]
    sha = hashlib.sha256(canonical_json(document).encode()).hexdigest()
    document["checksum"] = f"sha256:{sha}"
    (report.path / "manifest.json").write_text(json.dumps(document))
    text = (tmp_path / "f" / "family.json").read_text()
    (tmp_path / "f" / "family.json").write_text(text.replace(report.digest, document["digest"]))
    with pytest.raises(BundleError, match=complaint):
        restore(tmp_path / "f", "v", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
