"""Promises of soupkit.verify: each kind of damage is found and named."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint, tensor_digest
from soupkit.errors import BundleError
from soupkit.export import export_variant
from soupkit.manifest import _checksum
from soupkit.verify import verify_family

GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"


@pytest.fixture(scope="session")
def whole(base_folder, finetuned_folder, tmp_path_factory):
    family = tmp_path_factory.mktemp("verify") / "family"
    for name in ("bad", "good"):
        export_variant(
            open_checkpoint(base_folder),
            open_checkpoint(finetuned_folder),
            family=family,
            name=name,
            companions=finetuned_folder,
        )
    return family


@pytest.fixture
def family(whole, tmp_path):
    """A copy to damage; only its variant `bad` is."""
    return shutil.copytree(whole, tmp_path / "family")


def one_fault(family, **options):
    (fault,) = verify_family(family, **options)
    return fault


def rewrite(family, change, *, tensors=None):
    """Change the manifest (and the weights) of `bad` so that every digest fits again."""
    folder = family / "variants" / "bad"
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("checksum")
    if tensors is not None:
        save_file(tensors, folder / "variant.safetensors")
        document["digest"] = tensor_digest(tensors)
    change(document)
    document["checksum"] = _checksum(document)
    (folder / "manifest.json").write_text(json.dumps(document))
    listed = json.loads((family / "family.json").read_text())
    listed["variants"]["bad"]["digest"] = document["digest"]
    (family / "family.json").write_text(json.dumps(listed))


def test_whole_family_has_no_fault(whole):
    seen = []
    assert verify_family(whole, progress=lambda *step: seen.append(step)) == []
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["base", "bad", "good"]
    base = open_checkpoint(open_family(whole).base.path)
    sizes = [base.spec(name).nbytes for name in base.names]
    variants = [open_variant(whole / "variants" / name) for name in ("bad", "good")]
    total = sum(sizes) + sum(variant.nbytes for variant in variants)
    assert {told for _, _, told in seen} == {total}
    assert [done for what, done, _ in seen if what == "base"][-1] == sum(sizes)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total


def test_flipped_byte_is_named(family):
    path = family / "variants" / "bad" / "variant.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)
    fault = one_fault(family)
    assert fault.startswith("bad: ")
    assert "variant.safetensors: its content has digest" in fault


def test_truncated_file_is_named(family):
    path = family / "variants" / "bad" / "variant.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    assert "variant.safetensors: truncated" in one_fault(family)


def test_wrong_base_with_the_same_shapes_is_named(family, make_llama, tmp_path):
    other = make_llama(tmp_path / "other", seed=11)
    assert "is not the base of" in one_fault(family, base=other)


def test_flipped_bit_in_the_base_is_found_though_the_cache_knows_it(
    base_folder, finetuned_folder, tmp_path
):
    base = shutil.copytree(base_folder, tmp_path / "base")
    export_variant(
        open_checkpoint(base), open_checkpoint(finetuned_folder), family=tmp_path / "f", name="v"
    )
    path = base / "model.safetensors"
    times = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "is not the base of" in one_fault(tmp_path / "f")


def test_missing_base_is_named_with_the_remedy(family, tmp_path):
    assert one_fault(family, base=tmp_path / "gone").startswith("base: ")


@pytest.mark.parametrize("part", [f"{NORM}.raw", f"{GATE}.scale"])
def test_nan_is_named_though_the_digest_fits(family, part):
    tensors = load_file(family / "variants" / "bad" / "variant.safetensors")
    tensors[part].view(-1)[0] = float("nan")
    rewrite(family, lambda document: None, tensors=tensors)
    assert f"{part!r} holds NaN" in one_fault(family)


def test_missing_tensor_in_the_file_is_named(family):
    tensors = load_file(family / "variants" / "bad" / "variant.safetensors")
    del tensors[f"{GATE}.sign"]
    rewrite(family, lambda document: None, tensors=tensors)
    assert f"the tensor '{GATE}.sign' that the manifest lists is missing" in one_fault(family)


def test_missing_parameter_in_the_manifest_is_named(family):
    tensors = load_file(family / "variants" / "bad" / "variant.safetensors")
    del tensors[f"{NORM}.raw"]

    def change(document):
        document["tensors"] = [one for one in document["tensors"] if one["name"] != NORM]

    rewrite(family, change, tensors=tensors)
    assert f"the manifest lacks {NORM!r}, which the base has" in one_fault(family)


def test_shape_that_is_not_the_bases_is_named(family):
    def change(document):
        (entry,) = [one for one in document["tensors"] if one["name"] == GATE]
        # 23 columns take as many bytes as 24.
        entry["shape"] = [44, 23]

    rewrite(family, change)
    assert f"{GATE!r} has shape (44, 23), the base (44, 24)" in one_fault(family)


def test_manifest_of_another_base_is_named(family):
    rewrite(family, lambda document: document.update(base_fingerprint="sha256:" + "0" * 64))
    assert "was made for another base" in one_fault(family)


def test_swapped_variant_is_named(family, base_folder, tmp_path):
    other = tmp_path / "other"
    base = open_checkpoint(base_folder)
    report = export_variant(base, base, family=other, name="bad")
    shutil.rmtree(family / "variants" / "bad")
    shutil.copytree(report.path, family / "variants" / "bad")
    assert "family.json another" in one_fault(family)


def test_edited_manifest_and_missing_folder_are_named(family):
    path = family / "variants" / "bad" / "manifest.json"
    path.write_text(path.read_text().replace('"planes": 1', '"planes": 2', 1))
    assert "damaged or edited" in one_fault(family)
    shutil.rmtree(path.parent)
    assert "manifest.json: No such file" in one_fault(family)


def test_changed_and_missing_companions_are_named(family):
    path = family / "variants" / "bad" / "config.json"
    path.write_text("{}")
    assert "config.json: has digest" in one_fault(family)
    path.unlink()
    assert "config.json: No such file" in one_fault(family)


def test_all_faults_are_listed_in_one_run(family, tmp_path):
    for name in ("bad", "good"):
        (family / "variants" / name / "variant.safetensors").unlink()
    faults = verify_family(family, base=tmp_path / "gone")
    assert [fault.split(":")[0] for fault in faults] == ["base", "bad", "good"]


def test_no_family_is_an_error(tmp_path):
    with pytest.raises(BundleError, match="is no family"):
        verify_family(tmp_path)


def test_non_finite_numbers_of_every_kind_count(family):
    tensors = load_file(family / "variants" / "bad" / "variant.safetensors")
    tensors[f"{NORM}.raw"][0] = float("-inf")
    tensors[f"{GATE}.scale"][0, 0] = torch.inf
    rewrite(family, lambda document: None, tensors=tensors)
    assert len(verify_family(family)) == 2


@pytest.mark.parametrize("part", ["scale", "column", "up", "down"])
def test_every_part_of_a_delta_is_looked_at(base_folder, finetuned_folder, tmp_path, part):
    export_variant(
        open_checkpoint(base_folder),
        open_checkpoint(finetuned_folder),
        family=tmp_path / "family",
        name="bad",
        encoding="lowrank-2+rank1-x2",
    )
    assert verify_family(tmp_path / "family") == []
    path = tmp_path / "family" / "variants" / "bad" / "variant.safetensors"
    tensors = load_file(path)
    tensors[f"{GATE}.{part}"].view(-1)[3] = torch.nan
    rewrite(tmp_path / "family", lambda document: None, tensors=tensors)
    assert f"'{GATE}.{part}' holds NaN" in one_fault(tmp_path / "family")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert any("digest" in fault for fault in verify_family(tmp_path / "family"))
