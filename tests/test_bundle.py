"""Promises of soupkit.bundle, manifest and family: what was written, or a BundleError."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint, tensor_digest
from soupkit.encoding import decode
from soupkit.errors import BundleError
from soupkit.export import export_variant
from soupkit.files import canonical_json
from soupkit.manifest import Manifest, _checksum

TINY_BASE = {"norm.weight": torch.tensor([1.0, 2.0]), "up.weight": torch.zeros(2, 3)}
TINY_FINETUNED = {
    "norm.weight": torch.tensor([1.0, 2.5]),
    "up.weight": torch.tensor([[1.0, -3.0, 0.0], [0.0, 2.0, 2.0]]),
}


def save_model(folder: Path, tensors) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A family with the variant `v` of a model of two tensors; copy it before changing it."""
    root = tmp_path_factory.mktemp("tiny")
    base = open_checkpoint(save_model(root / "base", TINY_BASE))
    finetuned = open_checkpoint(save_model(root / "ft", TINY_FINETUNED))
    export_variant(base, finetuned, family=root / "family", name="v", metrics={"loss": 0.5})
    return root / "family"


@pytest.fixture
def family(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "family"))


def test_bytes_of_a_tiny_variant_are_pinned(tiny):
    header = (
        b'{"norm.weight.raw":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"up.weight.scale":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
        b'"up.weight.sign":{"dtype":"U8","shape":[1,2,1],"data_offsets":[16,18]}}'
    )
    header += b" " * (-len(header) % 8)
    # raw 1.0, 2.5; scales 4/3 and 4/3; signs + - + and + + +, least significant bit first.
    data = bytes.fromhex("0000803f 00002040 abaaaa3f abaaaa3f 05 07")
    wanted = len(header).to_bytes(8, "little") + header + data
    assert (tiny / "variants" / "v" / "variant.safetensors").read_bytes() == wanted


def test_manifest_of_a_tiny_variant_is_pinned(tiny):
    document = json.loads((tiny / "variants" / "v" / "manifest.json").read_text())
    assert document["schema"] == 2
    assert document["metrics"] == {"loss": 0.5}
    assert (
        document["digest"]
        == json.loads((tiny / "family.json").read_text())["variants"]["v"]["digest"]
    )
    norm, up = document["tensors"]
    assert norm == {
        "name": "norm.weight",
        "kind": "raw",
        "shape": [2],
        "dtype": "F32",
        "planes": 0,
        "scale_axis": None,
        "bytes": 8,
        "residual_energy": 0.0,
        "source": None,
        "rank": 0,
        "encoding": None,
    }
    # ||delta||^2 = 10 + 8, of which 3 * (4/3)^2 is kept in each row.
    assert up.pop("residual_energy") == pytest.approx((18 - 2 * 16 / 3) / 18, rel=1e-6)
    assert up == {
        "name": "up.weight",
        "kind": "delta",
        "shape": [2, 3],
        "dtype": "F32",
        "planes": 1,
        "scale_axis": "row",
        "bytes": 10,
        "source": None,
        "rank": 0,
        "encoding": "row",
    }


def test_loading_gives_back_the_files_tensors_and_the_digest(tiny):
    variant = open_variant(open_family(tiny).folder("v"))
    loaded = variant.load()
    stored = load_file(variant.path / "variant.safetensors")
    assert loaded.digest == tensor_digest(stored) == open_family(tiny).variants["v"].digest
    assert loaded.nbytes == variant.nbytes == 18
    assert torch.equal(loaded.raw["norm.weight"], stored["norm.weight.raw"])
    assert torch.equal(loaded.deltas["up.weight"].packed, stored["up.weight.sign"])
    assert torch.equal(loaded.deltas["up.weight"].scale, stored["up.weight.scale"])
    assert loaded.deltas["up.weight"].in_features == 3
    unchecked = variant.load(check=False)
    assert torch.equal(unchecked.raw["norm.weight"], loaded.raw["norm.weight"])
    assert torch.equal(variant.raw("norm.weight"), loaded.raw["norm.weight"])
    assert torch.equal(variant.delta("up.weight").packed, loaded.deltas["up.weight"].packed)


def test_asking_for_the_wrong_kind_or_name_is_told(tiny):
    variant = open_variant(tiny / "variants" / "v")
    with pytest.raises(BundleError, match="stored as 'raw', not 'delta'"):
        variant.delta("norm.weight")
    with pytest.raises(BundleError, match="stored as 'delta', not 'raw'"):
        variant.raw("up.weight")
    with pytest.raises(BundleError, match="no parameter 'nothing'"):
        variant.raw("nothing")
    with pytest.raises(BundleError, match="no variant 'nothing'; it has: v"):
        open_family(tiny).folder("nothing")


def damage(path: Path, position: int, bit: int, *, cut: bool) -> None:
    raw = bytearray(path.read_bytes())
    position %= len(raw)
    if cut:
        raw = raw[:position]
    else:
        raw[position] ^= 1 << bit
    path.write_bytes(raw)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 2**20), bit=st.integers(0, 7), cut=st.booleans())
def test_any_flip_or_cut_of_the_weights_is_a_bundle_error(position, bit, cut, tiny):
    folder = tiny / "variants" / "v"
    target = tiny.parent / "fuzzed-weights"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    damage(target / "variant.safetensors", position, bit, cut=cut)
    with pytest.raises(BundleError, match=r"variant\.safetensors"):
        open_variant(target).load()


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 2**20), bit=st.integers(0, 7), cut=st.booleans())
def test_any_flip_or_cut_of_the_manifest_is_a_bundle_error(position, bit, cut, tiny):
    folder = tiny / "variants" / "v"
    target = tiny.parent / "fuzzed-manifest"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    damage(target / "manifest.json", position, bit, cut=cut)
    try:
        loaded = open_variant(target)
    except BundleError:
        return
    # White space may turn into other white space, and the last line's end may go: nothing is lost.
    assert loaded.manifest == open_variant(folder).manifest


def rewrite(folder: Path, change) -> None:
    """Change the parsed manifest and sign it with a fitting checksum, as an attacker would."""
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("checksum")
    change(document)
    document["checksum"] = _checksum(document)
    (folder / "manifest.json").write_text(canonical_json(document))


def setter(*path, value):
    def change(document):
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


JUNK = [None, True, -1, 2**70, 1.5, "", "x", [], {}, [[]], {"a": 1}]


@pytest.mark.parametrize("field", ["schema", "name", "digest", "base_fingerprint", "encoding"])
@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_manifest_fields_of_wrong_types_are_bundle_errors(family, field, value):
    folder = family / "variants" / "v"
    rewrite(folder, setter(field, value=value))
    if (field, value) == ("name", "x"):
        return  # a fine name
    with pytest.raises(BundleError, match=r"manifest\.json"):
        open_variant(folder)


@pytest.mark.parametrize("field", ["companions", "history", "metrics", "versions", "tensors"])
@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_manifest_collections_of_wrong_types_are_bundle_errors(family, field, value):
    folder = family / "variants" / "v"
    rewrite(folder, setter(field, value=value))
    fine = {
        "metrics": [{}, {"a": 1}],
        "versions": [{}, {"a": 1}],
        "companions": [{}],
        "history": [[]],
    }
    if any(value == one and type(value) is type(one) for one in fine.get(field, [])):
        open_variant(folder)
        return
    with pytest.raises(BundleError):
        open_variant(folder)


ENTRY_FIELDS = [
    "name",
    "kind",
    "shape",
    "dtype",
    "planes",
    "scale_axis",
    "bytes",
    "residual_energy",
    "rank",
    "encoding",
]


@pytest.mark.parametrize("field", [*ENTRY_FIELDS, "source"])
@pytest.mark.parametrize("value", JUNK, ids=repr)
@pytest.mark.parametrize("index", [0, 1])
def test_entry_fields_of_wrong_types_are_bundle_errors(family, index, field, value):
    folder = family / "variants" / "v"
    before = json.loads((folder / "manifest.json").read_text())["tensors"][index][field]
    rewrite(folder, setter("tensors", index, field, value=value))
    if value == before and type(value) is type(before):
        return
    with pytest.raises(BundleError):
        open_variant(folder).load()


@pytest.mark.parametrize(
    "change",
    [
        setter("tensors", 1, "shape", value=[2, 9]),
        setter("tensors", 1, "shape", value=[2**30, 2**30]),
        setter("tensors", 1, "shape", value=[1] * 40),
        setter("tensors", 1, "planes", value=5),
        setter("tensors", 1, "dtype", value="Q4"),
        setter("tensors", 0, "kind", value="delta"),
        setter("tensors", 1, "kind", value="sign"),
        setter("tensors", 1, "encoding", value="matrix"),
        setter("tensors", 1, "encoding", value="row-x2"),
        setter("tensors", 1, "encoding", value="sparse"),
        setter("tensors", 1, "encoding", value="row+lowrank-1"),
        setter("tensors", 1, "encoding", value="lowrank-1"),
        setter("tensors", 1, "encoding", value="lowrank-" + "9" * 5000),
        setter("tensors", 1, "scale_axis", value="column"),
        setter("tensors", 1, "rank", value=1),
        setter("schema", value=1),
        setter("tensors", 0, "kind", value="same"),
        setter("tensors", 0, "kind", value="tied"),
        setter("companions", value={"../../escape.json": "sha256:" + "0" * 64}),
        setter("companions", value={".hidden": "sha256:" + "0" * 64}),
        setter("companions", value={"a.json": "md5:00"}),
        lambda document: document["tensors"].reverse(),
        lambda document: document["tensors"].append(copy.copy(document["tensors"][0])),
        lambda document: document["tensors"].pop(),
        lambda document: document["tensors"][0].pop("source"),
        lambda document: document["tensors"][0].update(more=1),
    ],
)
def test_hostile_manifests_are_bundle_errors(family, change):
    folder = family / "variants" / "v"
    rewrite(folder, change)
    with pytest.raises(BundleError):
        open_variant(folder).load()


@pytest.mark.parametrize(
    "raw", [b"", b"[" * 200_000, b"null", b"{}", b"\xff", b'{"a": NaN}', b"1" * 5000]
)
@pytest.mark.parametrize("name", ["manifest.json", "../../family.json"])
def test_junk_in_place_of_json_is_a_bundle_error(family, raw, name):
    folder = family / "variants" / "v"
    (folder / name).write_bytes(raw)
    with pytest.raises(BundleError):
        open_variant(open_family(family).folder("v"))


def test_checksum_finds_an_edit_that_still_parses(family):
    path = family / "variants" / "v" / "manifest.json"
    path.write_text(path.read_text().replace('"loss": 0.5', '"loss": 0.4'))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_variant(path.parent)


@pytest.mark.parametrize("name", ["manifest.json", "variant.safetensors"])
def test_missing_files_pipes_and_links_are_bundle_errors(family, name):
    folder = family / "variants" / "v"
    path = folder / name
    kept = path.rename(family.parent / name)
    with pytest.raises(BundleError, match=name):
        open_variant(folder)
    path.symlink_to(kept)
    with pytest.raises(BundleError, match="is a link"):
        open_variant(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="not a regular file"):
        open_variant(folder)


def test_file_that_shrinks_after_opening_is_a_bundle_error(family):
    variant = open_variant(family / "variants" / "v")
    os.truncate(variant.path / "variant.safetensors", 40)
    for read in (
        variant.load,
        lambda: variant.raw("norm.weight"),
        lambda: variant.delta("up.weight"),
    ):
        with pytest.raises(BundleError, match="truncated"):
            read()
    (variant.path / "variant.safetensors").unlink()
    with pytest.raises(BundleError, match="No such file"):
        variant.load()


@pytest.mark.parametrize("part", ["norm.weight.raw", "up.weight.scale"])
def test_stored_nan_is_a_bundle_error_that_names_the_tensor(family, part):
    folder = family / "variants" / "v"
    tensors = load_file(folder / "variant.safetensors")
    tensors[part].view(-1)[1] = float("nan")
    save_file(tensors, folder / "variant.safetensors")
    rewrite(folder, setter("digest", value=tensor_digest(tensors)))
    with pytest.raises(BundleError, match=f"{part}.*NaN"):
        open_variant(folder).load()
    with pytest.raises(BundleError, match="NaN"):
        open_variant(folder).load(check=False)


RICH = "lowrank-2+rank1-x2"


@pytest.fixture(scope="session")
def rich(tmp_path_factory) -> Path:
    """A family with the variant `v`, which has all parts of a delta; copy it before changing it."""
    root = tmp_path_factory.mktemp("rich")
    generator = torch.Generator().manual_seed(0)
    base = save_model(root / "base", {"up.weight": torch.zeros(13, 21)})
    tensors = {"up.weight": torch.randn(13, 21, generator=generator)}
    finetuned = save_model(root / "ft", tensors)
    export_variant(
        open_checkpoint(base),
        open_checkpoint(finetuned),
        family=root / "family",
        name="v",
        encoding=RICH,
    )
    return root / "family"


def test_every_part_comes_back_and_is_listed(rich):
    variant = open_variant(rich / "variants" / "v")
    stored = load_file(variant.path / "variant.safetensors")
    delta = variant.delta("up.weight")
    parts = {part: f"up.weight.{part}" for part in ("sign", "scale", "column", "up", "down")}
    assert set(stored) == set(parts.values())
    found = (delta.packed, delta.scale, delta.column_scale, delta.up, delta.down)
    shapes = [(2, 13, 3), (2, 13), (2, 21), (13, 2), (2, 21)]
    for part, tensor, shape in zip(parts.values(), found, shapes, strict=True):
        assert torch.equal(tensor, stored[part])
        assert tuple(tensor.shape) == shape
    (entry,) = variant.manifest.tensors
    assert (entry.planes, entry.scale_axis, entry.rank, entry.encoding) == (2, "rank1", 2, RICH)
    assert entry.bytes == variant.nbytes == delta.nbytes


@pytest.mark.parametrize(
    "change",
    [
        setter("tensors", 0, "encoding", value="lowrank-3+rank1-x2"),
        setter("tensors", 0, "encoding", value="lowrank-2+row-x2"),
        setter("tensors", 0, "rank", value=3),
        setter("tensors", 0, "rank", value=14),
        setter("tensors", 0, "rank", value=-2),
        setter("tensors", 0, "rank", value=True),
        setter("tensors", 0, "rank", value=2.0),
        setter("tensors", 0, "planes", value=0),
        setter("tensors", 0, "scale_axis", value=None),
        setter("tensors", 0, "shape", value=[21, 13]),
        setter("tensors", 0, "shape", value=[1, 273]),
        setter("tensors", 0, "dtype", value="BF16"),
        setter("encoding", "delta", value="none"),
        lambda document: document["tensors"][0].update(
            encoding="lowrank-99+rank1-x2", rank=99, bytes=10**6
        ),
    ],
)
def test_hostile_entries_of_rich_deltas_are_bundle_errors(rich, tmp_path, change):
    folder = shutil.copytree(rich / "variants" / "v", tmp_path / "v")
    rewrite(folder, change)
    with pytest.raises(BundleError):
        open_variant(folder)


@pytest.mark.parametrize("part", ["sign", "scale", "column", "up", "down"])
def test_damaged_parts_of_rich_deltas_are_bundle_errors(rich, tmp_path, part):
    folder = shutil.copytree(rich / "variants" / "v", tmp_path / "v")
    name = f"up.weight.{part}"
    tensors = load_file(folder / "variant.safetensors")
    for changed in (
        {one: tensor for one, tensor in tensors.items() if one != name},
        {**tensors, name: tensors[name][..., :1].contiguous()},
        {**tensors, name: tensors[name].short()},
    ):
        save_file(changed, folder / "variant.safetensors")
        with pytest.raises(BundleError, match=name):
            open_variant(folder)
    if part != "sign":
        tensors[name].view(-1)[1] = float("inf")
        save_file(tensors, folder / "variant.safetensors")
        rewrite(folder, setter("digest", value=tensor_digest(tensors)))
        for read in (lambda one: one.load(), lambda one: one.delta("up.weight")):
            with pytest.raises(BundleError, match=f"{name}.*NaN"):
                read(open_variant(folder))


def schema_1(folder: Path) -> Path:
    """A variant as the first release wrote it, by hand."""
    folder.mkdir()
    tensors = {
        "down.weight.sign": torch.tensor([[[5], [7]], [[2], [0]]], dtype=torch.uint8),
        "down.weight.scale": torch.tensor([[0.5], [0.25]]),
        "norm.weight.raw": torch.tensor([1.0, 2.5]),
        "up.weight.sign": torch.tensor([[[5], [7]]], dtype=torch.uint8),
        "up.weight.scale": torch.tensor([[1.5, 2.0]]),
    }
    save_file(tensors, folder / "variant.safetensors")
    common = {"dtype": "F32", "source": None, "residual_energy": 0.0}
    plain = {"planes": 0, "scale_axis": None, "bytes": 0}
    signs = {**common, "kind": "sign", "shape": [2, 3], "residual_energy": 0.25}
    document = {
        "schema": 1,
        "name": "old",
        "base_fingerprint": "sha256:" + "1" * 64,
        "digest": tensor_digest(tensors),
        "encoding": {
            "bit_order": "least significant bit first along in",
            "sign_of_zero": "+1",
            "pack_padding": "each row is padded to whole bytes; padding bits are never read",
        },
        "companions": {},
        "history": [],
        "metrics": {},
        "versions": {"soupkit": "0.1.0"},
        "tensors": [
            {**signs, "name": "down.weight", "planes": 2, "scale_axis": "matrix", "bytes": 12},
            {**common, **plain, "name": "head.weight", "kind": "tied", "shape": [2, 3],
             "source": "up.weight"},
            {**common, **plain, "name": "norm.weight", "kind": "raw", "shape": [2], "bytes": 8},
            {**common, **plain, "name": "q.weight", "kind": "same", "shape": [4, 4]},
            {**signs, "name": "up.weight", "planes": 1, "scale_axis": "row", "bytes": 10},
        ],
    }  # fmt: skip
    document["checksum"] = _checksum(document)
    (folder / "manifest.json").write_text(canonical_json(document))
    return folder


def test_variants_of_the_first_schema_are_read_as_what_they_mean(tmp_path):
    variant = open_variant(schema_1(tmp_path / "v"))
    loaded = variant.load()
    assert [(one.name, one.kind, one.encoding, one.rank) for one in variant.manifest.tensors] == [
        ("down.weight", "delta", "matrix-x2", 0),
        ("head.weight", "tied", None, 0),
        ("norm.weight", "raw", None, 0),
        ("q.weight", "same", None, 0),
        ("up.weight", "delta", "row", 0),
    ]
    wanted = torch.tensor([[1.5, -1.5, 1.5], [2.0, 2.0, 2.0]])
    assert torch.equal(decode(loaded.deltas["up.weight"]), wanted)
    wanted = torch.tensor([[0.25, -0.25, 0.25], [0.25, 0.25, 0.25]])
    assert torch.equal(decode(variant.delta("down.weight")), wanted)
    assert loaded.raw["norm.weight"].tolist() == [1.0, 2.5]
    # Written anew it is of the present schema, and says the same.
    assert Manifest.from_json(variant.manifest.to_json()) == variant.manifest


@pytest.mark.parametrize(
    "change",
    [
        setter("tensors", 4, "kind", value="delta"),
        setter("tensors", 4, "scale_axis", value="rank1"),
        setter("tensors", 4, "scale_axis", value=[]),
        setter("tensors", 4, "planes", value=True),
        setter("tensors", 4, "planes", value=5),
        setter("tensors", 4, "rank", value=0),
        setter("tensors", 4, "encoding", value="row"),
        setter("tensors", 4, value=3),
        lambda document: document["tensors"][4].pop("planes"),
        setter("schema", value=2),
        setter("schema", value=True),
    ],
)
def test_hostile_manifests_of_the_first_schema_are_bundle_errors(tmp_path, change):
    folder = schema_1(tmp_path / "v")
    rewrite(folder, change)
    with pytest.raises(BundleError):
        open_variant(folder)


def set_family(family: Path, change) -> None:
    document = json.loads((family / "family.json").read_text())
    change(document)
    (family / "family.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "..",
        "variants/..",
        "variants/../..",
        "variants/",
        "variants",
        "variants/a/b",
        "v",
        "variants/.hidden",
        "variants\\v",
        "variants/a\\b",
        "",
        None,
        3,
        ["variants/v"],
    ],
)
def test_no_path_of_family_json_leads_out(family, path):
    set_family(family, lambda document: document["variants"]["v"].update(path=path))
    with pytest.raises(BundleError, match="path"):
        open_family(family)


def test_no_link_leads_out_of_the_family(family, tmp_path):
    outside = shutil.move(family / "variants" / "v", tmp_path / "outside")
    (family / "variants" / "v").symlink_to(outside)
    with pytest.raises(BundleError, match="leads out of the family"):
        open_family(family).folder("v")


@pytest.mark.parametrize("key", ["schema", "base", "variants"])
@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_family_fields_of_wrong_types_are_bundle_errors(family, key, value):
    set_family(family, lambda document: document.update({key: value}))
    if (key, value) == ("schema", True) or (key, value) == ("variants", {}):
        return
    with pytest.raises(BundleError, match=r"family\.json"):
        open_family(family)


@pytest.mark.parametrize("field", ["path", "revision", "fingerprint", "dtype"])
@pytest.mark.parametrize("value", [True, 3, [], {}, "", "sha256:" + "g" * 64])
def test_base_fields_of_wrong_types_are_bundle_errors(family, field, value):
    set_family(family, lambda document: document["base"].update({field: value}))
    if (
        isinstance(value, str)
        and field in ("revision", "dtype", "path")
        and (value or field != "path")
    ):
        return
    with pytest.raises(BundleError, match=r"family\.json"):
        open_family(family)


def test_variant_names_are_checked(family):
    for name in ("base", "../x", "", "a b", "x" * 129):
        set_family(
            family,
            lambda document, name=name: document.update(
                variants={name: {"path": "variants/v", "digest": "sha256:" + "0" * 64}}
            ),
        )
        with pytest.raises(BundleError, match="variant name"):
            open_family(family)


def test_folder_without_family_json_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="file is no family"):
        open_family(tmp_path / "file")
    with pytest.raises(BundleError, match=r"is no family.*soupkit export"):
        open_family(tmp_path)
