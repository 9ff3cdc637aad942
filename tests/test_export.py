"""Promises of soupkit.export, blocks and family_write: what is stored; no half-changed family."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soupkit import blocks, partial, signs
from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.encoding import Encoding, decode, encode, residual_energy
from soupkit.errors import BundleError, CheckpointError, MergeError
from soupkit.export import export_variant
from soupkit.files import PENDING_PREFIX
from soupkit.manifest import TensorEntry
from soupkit.merge import MergeRule
from soupkit.offline import merge_checkpoints
from soupkit.restore import restore
from soupkit.verify import verify_family

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"
ROOT = Path(__file__).resolve().parents[1]

ENCODINGS = [
    "row",
    "matrix",
    "column",
    "rank1",
    "row-x3",
    "matrix-x2",
    "row-x2-refit",
    "sparse",
    "lowrank-3",
    "lowrank-2+row",
    "row+lowrank-2",
    "lowrank-2+rank1",
    "matrix-x2-refit+lowrank-1",
]


def equal_parts(one, other) -> bool:
    return len(one.parts) == len(other.parts) and all(map(torch.equal, one.parts, other.parts))


def export(base: Path, finetuned: Path, family: Path, name: str = "v", **options):
    return export_variant(
        open_checkpoint(base), open_checkpoint(finetuned), family=family, name=name, **options
    )


def load(family: Path, name: str = "v"):
    return open_variant(open_family(family).folder(name)).load()


def kinds(report) -> dict[str, str]:
    return {entry.name: entry.kind for entry in report.entries}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_stored_is_the_encoded_delta(base_folder, finetuned_folder, tmp_path, encoding):
    report = export(base_folder, finetuned_folder, tmp_path / "f", encoding=encoding)
    loaded = load(tmp_path / "f")
    base = load_file(base_folder / "model.safetensors")
    finetuned = load_file(finetuned_folder / "model.safetensors")
    for entry in report.entries:
        if entry.kind == "tied":
            continue
        delta = finetuned[entry.name] - base[entry.name]
        if delta.ndim == 1:
            assert torch.equal(loaded.raw[entry.name], finetuned[entry.name])
            continue
        wanted = encode(delta, Encoding.parse(encoding))
        assert equal_parts(loaded.deltas[entry.name], wanted)
        assert entry.residual_energy == pytest.approx(residual_energy(delta, wanted), abs=1e-6)
        assert (entry.encoding, entry.rank, entry.planes) == (encoding, wanted.rank, wanted.planes)
        assert entry.bytes == wanted.nbytes
    assert set(loaded.deltas) | set(loaded.raw) | {HEAD} == {one.name for one in report.entries}
    assert report.digest == loaded.digest


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_blocks_of_rows_change_nothing(base_folder, finetuned_folder, tmp_path, monkeypatch, rows):
    def exported(name, encoding):
        report = export(base_folder, finetuned_folder, tmp_path / "f", name, encoding=encoding)
        return report, load(tmp_path / "f", name).deltas

    encodings = [*ENCODINGS, "column-x2-refit"]
    whole = [exported(f"whole-{number}", one) for number, one in enumerate(encodings)]
    for module in (blocks, signs):
        for name in ("BLOCK_ENTRIES", "_BLOCK_ENTRIES"):
            monkeypatch.setattr(module, name, rows * 24, raising=False)
    for number, encoding in enumerate(encodings):
        (before, one), (after, other) = whole[number], exported(f"cut-{number}", encoding)
        if encoding in ("row", "row-x3", "row-x2-refit", "sparse", "lowrank-3"):
            assert before.digest == after.digest
        for name, delta in one.items():
            torch.testing.assert_close(decode(other[name]), decode(delta), rtol=1e-4, atol=1e-5)
        for entry, cut in zip(before.entries, after.entries, strict=True):
            assert cut.residual_energy == pytest.approx(entry.residual_energy, rel=1e-4)


def test_unchanged_parameters_store_nothing(base_folder, make_finetune, tmp_path):
    base = load_file(base_folder / "model.safetensors")

    def edit(tensors):
        for name in base:
            if name != GATE:
                tensors[name] = base[name].clone()

    report = export(
        base_folder, make_finetune(tmp_path / "ft", base_folder, edit=edit), tmp_path / "f"
    )
    stored = {name for name, kind in kinds(report).items() if kind not in ("same", "tied")}
    assert stored == {GATE}
    same = export(base_folder, base_folder, tmp_path / "f", "same")
    assert set(kinds(same).values()) == {"same", "tied"}
    assert load(tmp_path / "f", "same").nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["lowrank-3", "lowrank-3+row", "row+lowrank-3"])
def test_factors_of_16_bits_travel_bit_for_bit(
    make_llama, make_finetune, tmp_path, encoding, dtype
):
    base = make_llama(tmp_path / "base", dtype=dtype)
    finetuned = make_finetune(tmp_path / "ft", base)
    export(base, finetuned, tmp_path / "f", encoding=encoding)
    loaded = load(tmp_path / "f")
    before, after = (load_file(one / "model.safetensors") for one in (base, finetuned))
    for name, found in loaded.deltas.items():
        wanted = encode(
            after[name].float() - before[name].float(),
            Encoding.parse(encoding),
            factor_dtype=dtype,
        )
        assert found.up.dtype == found.down.dtype == dtype
        assert all(
            torch.equal(one, other) for one, other in zip(found.parts, wanted.parts, strict=True)
        )
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for name, found in loaded.deltas.items():
        torch.testing.assert_close(dense[name], before[name].float() + decode(found))
    assert verify_family(tmp_path / "f") == []


def test_bfloat16_base_and_equal_float32_fine_tune_differ_in_nothing(make_llama, tmp_path):
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    exact = {name: one.float() for name, one in load_file(base / "model.safetensors").items()}
    shutil.copytree(base, tmp_path / "ft")
    save_file(exact, tmp_path / "ft" / "model.safetensors", metadata={"format": "pt"})
    assert set(kinds(export(base, tmp_path / "ft", tmp_path / "f")).values()) == {"same", "tied"}


def test_sharded_and_single_fine_tunes_have_one_digest(
    base_folder, make_llama, make_finetune, tmp_path
):
    single = make_llama(tmp_path / "single", seed=5)
    sharded = make_llama(tmp_path / "sharded", seed=5, max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    digests = {
        export(base_folder, folder, tmp_path / "f", folder.name).digest
        for folder in (single, sharded)
    }
    assert len(digests) == 1


def test_each_tensor_may_have_its_own_encoding(base_folder, finetuned_folder, tmp_path):
    choice = {GATE: "raw", KEYS: Encoding(planes=0, rank=2), NORM: "raw", EMBEDDING: "sparse"}
    report = export(base_folder, finetuned_folder, tmp_path / "f", encodings=choice)
    entries = {entry.name: entry for entry in report.entries}
    assert (entries[GATE].kind, entries[NORM].kind) == ("raw", "raw")
    assert (entries[KEYS].encoding, entries[EMBEDDING].encoding) == ("lowrank-2", "sparse")
    rest = {one.encoding for one in report.entries if one.kind == "delta"}
    assert rest == {"lowrank-2", "sparse", "row"}
    finetuned = load_file(finetuned_folder / "model.safetensors")
    assert torch.equal(load(tmp_path / "f").raw[GATE], finetuned[GATE])
    # The names' order and the default do not matter where every tensor is named.
    named = {one.name: one.encoding or "raw" for one in report.entries if one.kind != "tied"}
    again = dict(sorted(named.items(), reverse=True))
    other = export(
        base_folder, finetuned_folder, tmp_path / "f", "w", encoding="raw", encodings=again
    )
    assert other.digest == report.digest


def test_whole_tensors_are_stored_where_an_encoding_takes_as_many_bytes(
    base_folder, finetuned_folder, tmp_path
):
    report = export(base_folder, finetuned_folder, tmp_path / "f", encoding="lowrank-500")
    assert set(kinds(report).values()) == {"raw", "tied"}
    whole = export(base_folder, finetuned_folder, tmp_path / "f", "w", encoding="raw")
    assert whole.digest == report.digest
    assert whole.bytes["raw"] == sum(
        one.nbytes for one in load_file(finetuned_folder / "model.safetensors").values()
    )


def test_an_equal_matrix_in_another_dtype_is_not_stored_whole(make_llama, tmp_path):
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    exact = {name: one.float() for name, one in load_file(base / "model.safetensors").items()}
    exact[GATE][0, 0] += 1
    shutil.copytree(base, tmp_path / "ft")
    save_file(exact, tmp_path / "ft" / "model.safetensors", metadata={"format": "pt"})
    found = kinds(export(base, tmp_path / "ft", tmp_path / "f", encoding="raw"))
    assert {name for name, kind in found.items() if kind == "raw"} == {GATE}


def test_bytes_are_itemised_to_the_last_one(base_folder, finetuned_folder, tmp_path):
    report = export(
        base_folder,
        finetuned_folder,
        tmp_path / "f",
        companions=finetuned_folder,
        encoding="lowrank-2+rank1",
    )
    sizes = report.bytes
    on_disk = sum(path.stat().st_size for path in report.path.iterdir())
    assert sizes["total"] == on_disk
    assert sum(sizes[key] for key in ("signs", "scales", "factors", "raw", "other")) == on_disk
    assert sizes["weights"] == (report.path / "variant.safetensors").stat().st_size
    stored = load_file(report.path / "variant.safetensors")
    for key, suffixes in (
        ("signs", ".sign"),
        ("scales", (".scale", ".column")),
        ("factors", (".up", ".down")),
        ("raw", ".raw"),
    ):
        assert sizes[key] == sum(
            one.nbytes for name, one in stored.items() if name.endswith(suffixes)
        )
        assert sizes[key] > 0
    unique = load_file(finetuned_folder / "model.safetensors").values()
    assert report.model_bf16_bytes == 2 * sum(one.numel() for one in unique)


def test_smollm2_with_a_changed_embedding_is_a_fifteenth_of_its_bfloat16_bytes():
    shapes = {EMBEDDING: (49152, 576), NORM: (576,)}
    for layer in range(30):
        path = f"model.layers.{layer}."
        shapes |= {
            f"{path}self_attn.{one}_proj.weight": (rows, 576)
            for one, rows in (("q", 576), ("k", 192), ("v", 192), ("o", 576))
        }
        shapes |= {f"{path}mlp.{one}_proj.weight": (1536, 576) for one in ("gate", "up")}
        shapes |= {f"{path}mlp.down_proj.weight": (576, 1536)}
        shapes |= {f"{path}{one}_layernorm.weight": (576,) for one in ("input", "post_attention")}
    entries = [
        TensorEntry(
            name, "raw" if len(shape) == 1 else "delta", shape, "BF16", len(shape) - 1, "row"
        )
        for name, shape in shapes.items()
    ]
    specs = {name: spec for entry in entries for name, spec in entry.stored_specs().items()}
    # The header takes about 130 bytes a tensor.
    stored = sum(spec.nbytes for spec in specs.values()) + 130 * len(specs)
    model = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    print(f"{stored / 1e6:.2f} of {model / 1e6:.1f} MB: 1/{model / stored:.2f}")
    assert stored <= model / 15


def test_untied_head_is_a_delta_to_the_tied_matrix(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors[HEAD] = tensors[EMBEDDING] + 0.25

    finetuned = make_finetune(
        tmp_path / "ft", base_folder, edit=edit, config={"tie_word_embeddings": False}
    )
    report = export(base_folder, finetuned, tmp_path / "f", companions=finetuned)
    assert kinds(report)[HEAD] == "delta"
    base = load_file(base_folder / "model.safetensors")
    delta = load_file(finetuned / "model.safetensors")[HEAD] - base[EMBEDDING]
    assert equal_parts(load(tmp_path / "f").deltas[HEAD], encode(delta, Encoding()))
    config = json.loads((report.path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_kept_tie_is_recorded_and_a_new_tie_is_a_delta(make_llama, base_folder, tmp_path):
    """TB58."""
    tied = export(base_folder, base_folder, tmp_path / "f").entries
    (alias,) = [entry for entry in tied if entry.kind == "tied"]
    assert (alias.name, alias.source, alias.shape) == (HEAD, EMBEDDING, (99, 24))
    untied = make_llama(tmp_path / "untied", tied=False)
    report = export(untied, base_folder, tmp_path / "g")
    assert kinds(report)[HEAD] == "delta"


def test_resized_vocabulary_is_stored_whole(base_folder, make_finetune, tmp_path):
    """TB61."""

    def edit(tensors):
        tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], torch.ones(3, 24)])

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit, config={"vocab_size": 102})
    report = export(base_folder, finetuned, tmp_path / "f")
    assert kinds(report)[EMBEDDING] == "raw"
    stored = load(tmp_path / "f").raw[EMBEDDING]
    assert torch.equal(stored, load_file(finetuned / "model.safetensors")[EMBEDDING])


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (drop(GATE), f"lacks '{GATE}'"),
        (put("extra.weight", torch.ones(2, 2)), "has 'extra.weight'.*base lacks"),
        (put(GATE, torch.ones(44, 23)), r"gate_proj.*\(44, 23\) against \(44, 24\)"),
        # A whole model with fewer heads or a narrower MLP differs in first axes only.
        (put(GATE, torch.ones(40, 24)), r"ft: .*gate_proj.*\(40, 24\) against \(44, 24\)"),
        (put(KEYS, torch.ones(6, 24)), r"k_proj.*\(6, 24\) against .*only the vocabulary"),
        (put(NORM, torch.ones(25)), r"norm.weight: shape \(25,\) against \(24,\)"),
        (put(NORM, torch.ones(24, dtype=torch.int32)), "norm.weight: torch.int32 against"),
    ],
)
def test_models_that_do_not_fit_are_refused(base_folder, make_finetune, tmp_path, edit, complaint):
    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    with pytest.raises(CheckpointError, match=complaint):
        export(base_folder, finetuned, tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("name", [GATE, NORM])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    base_folder, make_finetune, tmp_path, name, value
):
    def edit(tensors):
        tensors[name].view(-1)[3] = value

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    with pytest.raises(MergeError, match=f"^{finetuned}: {name}: "):
        export(base_folder, finetuned, tmp_path / "f")
    assert open_family(tmp_path / "f").variants == {}
    assert list((tmp_path / "f" / "variants").iterdir()) == []


def test_base_that_is_not_finite_is_named(make_llama, make_finetune, tmp_path):
    def edit(tensors):
        tensors[GATE].view(-1)[3] = float("nan")

    base = make_finetune(tmp_path / "base", make_llama(tmp_path / "whole"), edit=edit)
    with pytest.raises(MergeError, match=f"^{base}: {GATE}: "):
        export(base, tmp_path / "whole", tmp_path / "f")


@pytest.mark.parametrize("encoding", ["row", "matrix", "lowrank-3+row", "raw"])
@pytest.mark.parametrize(
    ("name", "index"), [("a.weight", (33, 4)), ("experts.up", (3, 2, 1)), ("bias", (333,))]
)
def test_index_of_what_is_not_finite_is_that_of_the_whole_tensor(
    tmp_path, monkeypatch, name, index, encoding
):
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", 64)
    shapes = {"a.weight": (50, 20), "experts.up": (5, 6, 10), "bias": (500,)}
    base, finetuned = tmp_path / "base", tmp_path / "ft"
    for folder, value in ((base, 0.0), (finetuned, 1.0)):
        tensors = {one: torch.full(shape, value) for one, shape in shapes.items()}
        if value:
            tensors[name][index] = float("nan")
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    told = re.escape(f"{name}: nan at index {index} of shape {shapes[name]};")
    with pytest.raises(MergeError, match=told):
        export(base, finetuned, tmp_path / "f", encoding=encoding)
    with pytest.raises(MergeError, match=told):
        merge_checkpoints(
            open_checkpoint(base),
            [open_checkpoint(finetuned)],
            out=tmp_path / "out",
            rule=MergeRule("mean"),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
def test_infinity_on_both_sides_is_told_as_infinity(tmp_path, dtype):
    tensors = {"a.weight": torch.tensor([[0.0, 1.0], [-math.inf, 2.0]]).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    base = open_checkpoint(tmp_path)
    told = re.escape(f"{tmp_path}: a.weight: -inf at index (1, 0) of shape (2, 2);")
    with pytest.raises(MergeError, match=told):
        merge_checkpoints(base, [base], out=tmp_path / "out", rule=MergeRule("mean"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_travels(tmp_path, dtype):
    base, finetuned = tmp_path / "base", tmp_path / "ft"
    for folder, value in ((base, 0.5), (finetuned, 1.0)):
        tensors = {
            "same.weight": torch.full((2, 8), 0.25).to(dtype),
            "a.weight": torch.full((2, 8), value).to(dtype),
            "bias": torch.full((4,), value).to(dtype),
        }
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    report = export(base, finetuned, tmp_path / "f")
    assert kinds(report) == {"same.weight": "same", "a.weight": "delta", "bias": "raw"}
    merge_checkpoints(
        open_checkpoint(base),
        [open_checkpoint(finetuned)],
        out=tmp_path / "out",
        rule=MergeRule("mean"),
    )
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["a.weight"].float(), torch.ones(2, 8))
    assert verify_family(tmp_path / "f") == []
    restore(tmp_path / "f", "v", out=tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert torch.equal(dense["a.weight"], torch.ones(2, 8))
    assert torch.equal(dense["bias"], torch.ones(4))


def test_resized_vocabulary_without_a_config_is_known_by_name(make_llama, make_finetune, tmp_path):
    base = make_llama(tmp_path / "base", tied=False)

    def edit(tensors):
        for name in (EMBEDDING, "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.ones(3, 24)])

    finetuned = make_finetune(tmp_path / "ft", base, edit=edit)
    (base / "config.json").unlink()
    report = export(base, finetuned, tmp_path / "f")
    assert {one.kind for one in report.entries if one.shape[0] == 102} == {"raw"}


def test_family_is_not_made_inside_a_model(base_folder, finetuned_folder, make_finetune, tmp_path):
    model = make_finetune(tmp_path / "ft", base_folder)
    before = sorted(model.iterdir())
    with pytest.raises(BundleError, match="is a model folder: give the family a folder of its own"):
        export(base_folder, finetuned_folder, model)
    assert sorted(model.iterdir()) == before


@pytest.mark.parametrize("place", ["file", "file/family", "link", "family"])
def test_file_in_the_way_of_a_family_is_named(base_folder, tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "variants").touch()
    with pytest.raises(NotADirectoryError, match=f"is no folder.*{place.partition('/')[0]}"):
        export(base_folder, base_folder, tmp_path / place)


def test_other_layouts_and_odd_shapes_travel(tmp_path):
    generator = torch.Generator().manual_seed(3)

    def model(folder: str, shift: float) -> Path:
        shapes = {
            "conv.weight": (5, 3, 2, 2),
            "conv1d.weight": (4, 3, 5),
            "experts.up_proj": (3, 4, 7),
            "expert.up_proj": (1, 4, 7),
            "one.weight": (1, 1),
            "wide.weight": (2, 123),
            "empty.weight": (0, 4),
            "scalar": (),
        }
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors["count"] = torch.tensor(int(shift))
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        return tmp_path / folder

    base, finetuned = model("base", 0), model("ft", 1)
    report = export(base, finetuned, tmp_path / "f", encoding="matrix")
    loaded = load(tmp_path / "f")
    assert loaded.deltas["experts.up_proj"].scale.shape == (1, 12)
    assert loaded.deltas["expert.up_proj"].scale.shape == (1, 4)
    assert loaded.deltas["conv.weight"].packed.shape == (1, 5, 2)
    # One bit and a scale would be larger.
    assert kinds(report)["one.weight"] == "raw"
    assert loaded.raw["count"].item() == 1
    assert kinds(report)["empty.weight"] == "same"
    assert kinds(report)["scalar"] == "raw"
    delta = [load_file(one / "model.safetensors")["experts.up_proj"] for one in (finetuned, base)]
    means = (delta[0] - delta[1]).abs().mean(dim=(1, 2)).repeat_interleave(4)
    torch.testing.assert_close(loaded.deltas["experts.up_proj"].scale[0], means)


def test_companions_are_kept_byte_for_byte_where_they_differ(base_folder, make_finetune, tmp_path):
    """TB64."""
    finetuned = make_finetune(tmp_path / "ft", base_folder)
    (finetuned / "tokenizer_config.json").write_bytes(b'{"odd":   "spacing"}\r\n')
    (finetuned / "chat_template.jinja").write_bytes(b"{{ messages }}")
    (finetuned / "trainer_state.json").write_text("{}")
    report = export(base_folder, finetuned, tmp_path / "f", companions=finetuned)
    manifest = open_variant(report.path).manifest
    # generation_config.json is the base's own; config.json was spelled differently.
    assert sorted(manifest.companions) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer_config.json",
    ]
    for name in manifest.companions:
        assert (report.path / name).read_bytes() == (finetuned / name).read_bytes()


def test_history_and_metrics_are_kept_and_nan_becomes_null(base_folder, tmp_path):
    report = export(
        base_folder,
        base_folder,
        tmp_path / "f",
        history=[{"step": 10}],
        metrics={"l": float("nan")},
    )
    manifest = open_variant(report.path).manifest
    assert manifest.history == ({"step": 10},)
    assert manifest.metrics == {"l": None}
    with pytest.raises(ValueError, match="no form in JSON"):
        export(base_folder, base_folder, tmp_path / "f", metrics={"x": object()})


def test_progress_counts_every_byte_once(base_folder, finetuned_folder, tmp_path):
    seen = []
    export(
        base_folder,
        finetuned_folder,
        tmp_path / "f",
        progress=lambda name, done, total: seen.append((name, done, total)),
    )
    tensors = load_file(finetuned_folder / "model.safetensors")
    assert sorted(name for name, _, _ in seen) == sorted(tensors)
    assert {total for _, _, total in seen} == {sum(one.nbytes for one in tensors.values())}
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "base"},
        {"name": "a/b"},
        {"encoding": "row-x5"},
        {"encoding": ""},
        {"encodings": {GATE: "col"}},
        {"encodings": {"gone.weight": "row"}},
        {"encodings": {HEAD: "row"}},
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(base_folder, tmp_path, options):
    with pytest.raises(ValueError, match=str(next(iter(options)))):
        export(base_folder, base_folder, tmp_path / "f", **{"name": "v", **options})
    assert not (tmp_path / "f").exists()


def test_wrong_base_with_the_same_shapes_is_refused(base_folder, make_llama, tmp_path):
    """TB63."""
    export(base_folder, base_folder, tmp_path / "f")
    other = make_llama(tmp_path / "other", seed=9)
    with pytest.raises(BundleError, match="is not the base of"):
        export(other, other, tmp_path / "f", "w")
    assert list(open_family(tmp_path / "f").variants) == ["v"]


def test_replacing_leaves_one_folder_and_the_new_content(base_folder, finetuned_folder, tmp_path):
    family = tmp_path / "f"
    first = export(base_folder, finetuned_folder, family)
    assert (first.replaced, first.path.name) == (False, "v")
    second = export(base_folder, finetuned_folder, family, encoding="row-x2")
    assert second.replaced
    assert second.path.name == f"v@{second.digest[7:15]}"
    third = export(base_folder, finetuned_folder, family, encoding="row-x2")
    assert third.path.name == "v"
    assert [path.name for path in (family / "variants").iterdir()] == ["v"]
    assert load(family).digest == third.digest == second.digest


def test_folders_that_a_person_put_there_are_left_alone(base_folder, tmp_path):
    family = tmp_path / "f"
    export(base_folder, base_folder, family, "a")
    (family / "variants" / "v").mkdir()
    (family / "variants" / "v" / "notes.txt").write_text("mine")
    report = export(base_folder, base_folder, family, "v")
    assert report.path.name.startswith("v@")
    assert (family / "variants" / "v" / "notes.txt").read_text() == "mine"


# Every call by which an export changes the disk; a fault is put before each of them in turn.
FAULT_POINTS = [
    (os, name)
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "pwrite", "fchmod")
] + [
    (os, "copy_file_range"),
    (shutil, "copyfile"),
    (Path, "touch"),
    (os, "write"),
    (os, "ftruncate"),
]


@contextlib.contextmanager
def fault_before(number: int, action):
    """Call `action` before the `number`-th call that changes the disk; yields the counter."""
    count = [0]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in FAULT_POINTS:
            original = getattr(owner, name)

            def counted(*args, _original=original, **options):
                count[0] += 1
                if count[0] == number + 1:
                    action()
                return _original(*args, **options)

            patch.setattr(owner, name, counted)
        yield count


def check_old_or_new(family: Path, old: str, new: str) -> str:
    """Assert that the family is one of the two and whole; returns the digest that it has."""
    digest = open_family(family).variants["v"].digest
    assert digest in (old, new)
    assert verify_family(family) == []
    return digest


def check_clean(family: Path) -> None:
    """Assert that nothing lies in the family but what family.json lists."""
    listed = {Path(ref.path).name for ref in open_family(family).variants.values()}
    assert {path.name for path in (family / "variants").iterdir()} == listed
    left = [path for path in family.rglob("*") if path.name.startswith(PENDING_PREFIX)]
    assert left + list(family.rglob(".unlisted")) + list(family.rglob("*.spool")) == []


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def small(tmp_path):
    """A base, two fine-tunes and a family with `v` from the first; with the digests of both."""
    (tmp_path / "base").mkdir()
    tensors = {"a.weight": torch.ones(3, 9), "n": torch.ones(2)}
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    for number in (1, 2):
        folder = tmp_path / f"ft{number}"
        folder.mkdir()
        changed = {
            name: one + number * torch.arange(one.numel()).reshape(one.shape)
            for name, one in tensors.items()
        }
        save_file(changed, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(str(number))
    new = export(tmp_path / "base", tmp_path / "ft2", tmp_path / "probe").digest
    old = export(tmp_path / "base", tmp_path / "ft1", tmp_path / "kept").digest
    return tmp_path, old, new


def replace_v(root: Path) -> None:
    export(root / "base", root / "ft2", root / "family", companions=root / "ft2")


@pytest.mark.parametrize("least", [0, partial.LEAST_BYTES], ids=["kept", "small"])
def test_full_disk_at_any_point_leaves_the_old_family_or_the_new(small, monkeypatch, least):
    root, old, new = small
    monkeypatch.setattr(partial, "LEAST_BYTES", least)
    states = []
    for number in range(200):
        shutil.rmtree(root / "family", ignore_errors=True)
        shutil.copytree(root / "kept", root / "family")
        with fault_before(number, full_disk) as count, contextlib.suppress(OSError):
            replace_v(root)
        if count[0] <= number:
            break
        states.append(check_old_or_new(root / "family", old, new))
        replace_v(root)
        assert check_old_or_new(root / "family", new, new) == new
        check_clean(root / "family")
    assert 20 < len(states) < 199
    assert {old, new} == set(states)


def test_full_disk_is_reported_and_leaves_nothing_behind(small):
    root, old, _ = small
    shutil.copytree(root / "kept", root / "family")
    before = (root / "family" / "family.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: full_disk())
        with pytest.raises(OSError, match="No space left"):
            replace_v(root)
    assert (root / "family" / "family.json").read_bytes() == before
    check_clean(root / "family")
    assert load(root / "family").digest == old


KILL_SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {kernels!r}, {tests!r}]
import importlib.util
spec = importlib.util.spec_from_file_location("test_export", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
work, old, new = Path({work!r}), {old!r}, {new!r}
module.partial.LEAST_BYTES = {least!r}

def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1]

def killed(number):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    with module.fault_before(number, die):
        module.replace_v(work)

def check(path):
    digest = module.check_old_or_new(work / "family", old, new)
    path.write_text(digest)
    module.replace_v(work)
    assert module.check_old_or_new(work / "family", new, new) == new
    module.check_clean(work / "family")

states = []
for number in range(200):
    shutil.rmtree(work / "family", ignore_errors=True)
    shutil.copytree(work / "kept", work / "family")
    status = in_child(lambda: killed(number))
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, (number, status)
    assert in_child(lambda: check(work / "state")) == 0, f"after a kill before call {{number}}"
    states.append((work / "state").read_text())
assert 20 < len(states) < 199, len(states)
assert states == sorted(states, key=lambda digest: digest == new)
assert set(states) == {{old, new}}
print(len(states), "points")
"""


@pytest.mark.parametrize("least", [0, partial.LEAST_BYTES], ids=["kept", "small"])
def test_kill_at_any_point_leaves_the_old_family_or_the_new(small, least):
    root, old, new = small
    script = KILL_SCRIPT.format(
        root=str(ROOT),
        kernels=str(ROOT / "kernels"),
        tests=str(ROOT / "tests"),
        file=__file__,
        work=str(root),
        old=old,
        new=new,
        least=least,
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def test_exporters_at_once_do_not_lose_each_others_variants(small):
    root, _, _ = small
    errors = []

    def work(number: int) -> None:
        try:
            for name in (f"own{number}", "shared"):
                export(root / "base", root / f"ft{1 + number % 2}", root / "family", name)
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(open_family(root / "family").variants) == [
        *(f"own{i}" for i in range(6)),
        "shared",
    ]
    assert verify_family(root / "family") == []
    check_clean(root / "family")


MEMORY_SCRIPT = """
import sys, threading, time
sys.path[:0] = [{root!r}, {kernels!r}]
from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.merge import MergeRule
from soupkit.offline import merge_checkpoints

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

peak = [0]
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
base, finetuned = open_checkpoint({base!r}), open_checkpoint({finetuned!r})
started = anonymous()
for encoding in ("row", "matrix-x2", "rank1", "column-x2-refit", "sparse"):
    export_variant(base, finetuned, family={family!r}, name=encoding, encoding=encoding)
merge_checkpoints(base, [finetuned, finetuned], out={out!r}, rule=MergeRule("mean"))
print(peak[0] - started)
"""


LOW_RANK_SCRIPT = (
    MEMORY_SCRIPT.partition("for encoding in")[0]
    + """
export_variant(base, finetuned, family={family!r}, name="low", encoding="lowrank-2+row")
print(peak[0] - started)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rows", "most"),
    [
        # Packed signs of two planes are 32 MiB; the rest is blocks of rows and what malloc keeps.
        (MEMORY_SCRIPT, 2**16, 400 * 2**20),
        # A low-rank part has a matrix at a time in memory, and the SVD two copies of it.
        (LOW_RANK_SCRIPT, 2**15, (3 * 256 + 200) * 2**20),
    ],
    ids=["signs", "low rank"],
)
def test_memory_does_not_grow_with_a_matrix(tmp_path, script, rows, most):
    """TB67: in an export and in a merge of checkpoints."""
    tensor = torch.zeros(rows, 2**11, dtype=torch.bfloat16)
    for name, value in (("base", 0.0), ("ft", 0.5)):
        (tmp_path / name).mkdir()
        save_file({"embed.weight": tensor + value}, tmp_path / name / "model.safetensors")
    script = script.format(
        root=str(ROOT),
        kernels=str(ROOT / "kernels"),
        base=str(tmp_path / "base"),
        finetuned=str(tmp_path / "ft"),
        family=str(tmp_path / "f"),
        out=str(tmp_path / "out"),
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    grown = int(done.stdout)
    size = tensor.numel() * 4 / 2**20
    print(f"{grown / 2**20:.0f} MiB more than at the start, for a matrix of {size:.0f} in float32")
    assert grown < most
