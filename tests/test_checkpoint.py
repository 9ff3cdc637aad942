"""Promises of soupkit.checkpoint, fingerprint, shards, tensorfile and files."""

import contextlib
import errno
import hashlib
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from soupkit import fingerprint as fingerprint_module
from soupkit.checkpoint import (
    ShardWriter,
    checkpoint_fingerprint,
    fingerprint,
    open_checkpoint,
    tensor_digest,
)
from soupkit.errors import CheckpointError
from soupkit.files import (
    PENDING_PREFIX,
    atomic_folder,
    atomic_write_json,
    make_pending_folder,
    parse_json,
    plain_json,
)
from soupkit.shards import SpooledFile
from soupkit.tensorfile import MappedFile, TensorFileWriter, TensorSpec, read_header

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Memory:
    """A TensorSource over a dict, as training's parameters are."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.names = tuple(sorted(tensors))

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def tensor(self, name):
        return self.tensors[name]


def reference_fingerprint(tensors):
    """The definition of the interface page, in numpy and hashlib alone."""
    rows = []
    for name in sorted(tensors):
        array = tensors[name].float().numpy().astype("<f4")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        rows.append([name, "F32", list(array.shape), digest])
    text = json.dumps(rows, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def copy_weights(source: Path, target: Path, tensors, config=None) -> Path:
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    document = {**json.loads((source / "config.json").read_text()), **(config or {})}
    (target / "config.json").write_text(json.dumps(document))
    return target


def test_tensors_are_those_that_safetensors_reads(base_folder):
    checkpoint = open_checkpoint(base_folder)
    wanted = load_file(base_folder / "model.safetensors")
    assert checkpoint.names == tuple(sorted(wanted))
    for name, tensor in wanted.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert checkpoint.tied == {HEAD: EMBEDDING}
    assert torch.equal(checkpoint.tensor(HEAD), wanted[EMBEDDING])
    assert checkpoint.main_dtype == torch.float32
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        checkpoint.tensor("nothing")


def test_companions_are_tokenizer_generation_and_config_files(base_folder, tmp_path):
    folder = copy_weights(base_folder, tmp_path / "m", load_file(base_folder / "model.safetensors"))
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
        "trainer_state.json",
        "x.py",
    ):
        (folder / name).write_text("{}")
    wanted = ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"]
    assert list(open_checkpoint(folder).files()) == wanted


def test_single_sharded_bfloat16_and_memory_have_one_fingerprint(make_llama, tmp_path):
    single = make_llama(tmp_path / "single", dtype=torch.bfloat16, tied=False)
    sharded = make_llama(
        tmp_path / "sharded", dtype=torch.bfloat16, tied=False, max_shard_size="8KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tensors = load_file(single / "model.safetensors")
    in_memory = Memory({name: tensor.float() for name, tensor in tensors.items()})
    wanted = reference_fingerprint(tensors)
    assert fingerprint(open_checkpoint(single)) == wanted
    assert fingerprint(open_checkpoint(sharded)) == wanted
    assert fingerprint(in_memory) == wanted
    tensors[HEAD].view(torch.int16)[0, 0] ^= 1
    assert fingerprint(Memory(tensors)) != wanted


def test_fingerprint_tells_names_shapes_and_integers_apart():
    ones = torch.ones(2, 3)
    digests = [
        fingerprint(Memory(tensors))
        for tensors in (
            {"a": ones},
            {"b": ones},
            {"a": ones.reshape(3, 2)},
            {"a": ones.to(torch.int32)},
            {"a": ones.to(torch.int64)},
            {"a": ones.double()},
            {},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert fingerprint(Memory({"a": ones.half()})) == digests[0]


def test_content_digest_is_over_the_own_bytes():
    tensors = {"b": torch.arange(3, dtype=torch.uint8), "a": torch.ones(2, dtype=torch.bfloat16)}
    rows = [
        ["a", "BF16", [2], hashlib.sha256(bytes.fromhex("803f803f")).hexdigest()],
        ["b", "U8", [3], hashlib.sha256(bytes([0, 1, 2])).hexdigest()],
    ]
    text = json.dumps(rows, separators=(",", ":")).encode()
    assert tensor_digest(tensors) == "sha256:" + hashlib.sha256(text).hexdigest()


def test_fingerprint_cache_follows_the_files_and_survives_damage(
    base_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = load_file(base_folder / "model.safetensors")
    folder = copy_weights(base_folder, tmp_path / "m", tensors)
    first = checkpoint_fingerprint(open_checkpoint(folder))
    (entry,) = (tmp_path / "cache" / "soupkit" / "fingerprints").iterdir()
    calls = []
    original = fingerprint_module.fingerprint
    monkeypatch.setattr(
        fingerprint_module, "fingerprint", lambda source: calls.append(1) or original(source)
    )
    assert checkpoint_fingerprint(open_checkpoint(folder)) == first
    assert not calls
    for junk in (b"", b"[1]", b'{"fingerprint": 3}', b'{"fingerprint": "sha256:zz"}', b"\xff"):
        entry.write_bytes(junk)
        assert checkpoint_fingerprint(open_checkpoint(folder)) == first
    assert len(calls) == 5
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_fingerprint(open_checkpoint(folder)) != first


def test_a_file_replaced_after_it_was_opened_gets_a_fingerprint_of_its_own(
    base_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = load_file(base_folder / "model.safetensors")
    folder = copy_weights(base_folder, tmp_path / "m", tensors)
    opened = open_checkpoint(folder)
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "new.safetensors", metadata={"format": "pt"})
    (tmp_path / "new.safetensors").replace(folder / "model.safetensors")
    checkpoint_fingerprint(opened)
    replaced = open_checkpoint(folder)
    assert checkpoint_fingerprint(replaced) == fingerprint(replaced)


def test_unwritable_cache_is_passed_over(base_folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    checkpoint = open_checkpoint(base_folder)
    assert checkpoint_fingerprint(checkpoint) == fingerprint(checkpoint)


def test_tied_alias_is_dropped_only_if_it_is_the_same_matrix(base_folder, tmp_path):
    tensors = load_file(base_folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone()
    equal = open_checkpoint(copy_weights(base_folder, tmp_path / "equal", tensors))
    assert equal.tied == {HEAD: EMBEDDING}
    assert HEAD not in equal.names
    assert fingerprint(equal) == fingerprint(open_checkpoint(base_folder))
    tensors[HEAD][3, 1] += 1
    different = copy_weights(base_folder, tmp_path / "different", tensors)
    with pytest.raises(CheckpointError, match=f"(?s){HEAD}.*{EMBEDDING}.*tie_word_embeddings"):
        open_checkpoint(different)
    untied = copy_weights(
        base_folder, tmp_path / "untied", tensors, config={"tie_word_embeddings": False}
    )
    assert HEAD in open_checkpoint(untied).names


def test_wrapper_parts_are_dropped_and_clashes_refused(base_folder, tmp_path):
    wrapped = {"module.a._orig_mod.weight": torch.ones(2), "b": torch.zeros(1)}
    checkpoint = open_checkpoint(copy_weights(base_folder, tmp_path / "w", wrapped))
    assert checkpoint.names == ("a.weight", "b")
    assert torch.equal(checkpoint.tensor("a.weight"), torch.ones(2))
    wrapped["a.weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=r"both the parameter 'a.weight'"):
        open_checkpoint(copy_weights(base_folder, tmp_path / "c", wrapped))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "neither model.safetensors nor"),
        ({"pytorch_model.bin": b"x"}, "pickle.*save_pretrained"),
        ({"pytorch_model.bin.index.json": b"{}"}, "pickle.*save_pretrained"),
        ({"family.json": b"{}"}, "is a family.*soupkit restore"),
        (
            {"checkpoint-90/a": b"", "checkpoint-400/a": b""},
            "one of its checkpoints.*checkpoint-400",
        ),
        ({"adapter_config.json": b"{}"}, "PEFT adapter.*merge_and_unload"),
        ({"model.safetensors.index.json": b"["}, "index.json"),
        ({"model.safetensors.index.json": b'{"weight_map": 3}'}, "no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": 3}}'}, "no file of this folder"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../other.safetensors"}}'},
            "no file of this folder",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "gone.safetensors is missing",
        ),
    ],
)
def test_folders_that_are_no_model_are_told_with_a_remedy(tmp_path, files, complaint):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(tmp_path)


def test_index_that_puts_a_tensor_into_the_wrong_file_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks the tensor 'b'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"architectures": 5}',
        b'{"architectures": [{}]}',
    ],
)
def test_damaged_config_is_refused(base_folder, tmp_path, config):
    folder = copy_weights(base_folder, tmp_path / "m", load_file(base_folder / "model.safetensors"))
    (folder / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [2], "data_offsets": [0, 2], **changes}


HOSTILE_FILES = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "length bomb": raw_file({}, length=2**63),
    "length over the limit": raw_file({}, length=200_000_000),
    "no json": raw_file(b"{"),
    "list": raw_file([]),
    "deep": raw_file(b"[" * 200_000),
    "nan": raw_file(b'{"a": NaN}'),
    "entry is a number": raw_file({"a": 1}),
    "field missing": raw_file({"a": {"dtype": "U8", "shape": [2]}}),
    "field too many": raw_file({"a": entry(more=1)}, b"xx"),
    "unknown dtype": raw_file({"a": entry(dtype="Q7")}, b"xx"),
    "dtype is a list": raw_file({"a": entry(dtype=["U8"])}, b"xx"),
    "negative axis": raw_file({"a": entry(shape=[-2])}, b"xx"),
    "axis is true": raw_file({"a": entry(shape=[True, 2])}, b"xx"),
    "axis is a float": raw_file({"a": entry(shape=[2.0])}, b"xx"),
    "product overflows": raw_file({"a": entry(shape=[2**40, 2**40])}, b"xx"),
    "offsets backwards": raw_file({"a": entry(data_offsets=[2, 0])}, b"xx"),
    "offsets are text": raw_file({"a": entry(data_offsets="02")}, b"xx"),
    "three offsets": raw_file({"a": entry(data_offsets=[0, 2, 2])}, b"xx"),
    "beyond the end": raw_file({"a": entry()}, b"x"),
    "bytes left over": raw_file({"a": entry()}, b"xxx"),
    "a hole": raw_file({"a": entry(data_offsets=[1, 3])}, b"xxx"),
    "overlap": raw_file({"a": entry(), "b": entry()}, b"xx"),
    "shape and bytes differ": raw_file({"a": entry(shape=[3])}, b"xx"),
    "key twice": raw_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
}


@pytest.mark.parametrize("content", HOSTILE_FILES.values(), ids=HOSTILE_FILES.keys())
def test_hostile_weight_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: not a regular file"


def test_paths_that_are_neither_folder_nor_hub_id(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file: give the folder that holds"):
        open_checkpoint(tmp_path / "file")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="link is a link that leads nowhere"):
        open_checkpoint(tmp_path / "link")
    with pytest.raises(ValueError, match="an empty path is no model"):
        open_checkpoint("")
    with pytest.raises(CheckpointError, match="no such folder, and the hub cannot be reached"):
        open_checkpoint("nobody/nothing")


def test_hub_id_opens_the_snapshot_and_keeps_its_commit(base_folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.parent.mkdir()
    snapshot.symlink_to(base_folder)
    asked = []

    def download(hub_id, **options):
        asked.append((hub_id, options["revision"]))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    checkpoint = open_checkpoint("org/model", revision="main")
    assert asked == [("org/model", "main")]
    assert (checkpoint.source, checkpoint.revision) == ("org/model", "abc123")


DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float16]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text("abc.é", min_size=1, max_size=6),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_written_files_are_read_back_bit_for_bit(shapes, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    tensors = {
        name: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
        for name, (dtype, shape) in shapes.items()
    }
    specs = {name: TensorSpec(one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    writer = TensorFileWriter(path, specs)
    for name in reversed(list(tensors)):
        writer.write(name, tensors[name])
    writer.check_complete()
    writer.close()
    for found in (load_file(path), {name: MappedFile(path).tensor(name) for name in tensors}):
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_file_layout_is_the_safetensors_packages_own(tmp_path):
    tensors = {
        "b.sign": torch.arange(9, dtype=torch.uint8).reshape(1, 3, 3),
        "b.scale": torch.tensor([[1.5, -2.0, 0.0]]),
        "a.raw": torch.ones(3, dtype=torch.bfloat16),
        "s": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    specs = {name: TensorSpec(one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    writer = TensorFileWriter(tmp_path / "ours", specs, metadata={"format": "pt"})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_writer_refuses_what_was_not_announced(tmp_path):
    writer = TensorFileWriter(tmp_path / "x", {"a": TensorSpec(torch.float32, (2,))})
    with pytest.raises(ValueError, match="announced as"):
        writer.write("a", torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="do not fit"):
        writer.write("a", torch.ones(2), first_entry=1)
    writer.write("a", torch.ones(1), first_entry=1)
    with pytest.raises(ValueError, match="4 announced bytes were not written"):
        writer.check_complete()
    writer.close()


def planned(folder, tensors, **options):
    specs = {name: TensorSpec(one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    return ShardWriter(folder, specs, **options)


@pytest.mark.parametrize("limit", [1, 60, 10**9])
def test_shards_hold_what_was_written_in_any_order(tmp_path, limit):
    tensors = {f"t{i}": torch.arange(i * 5.0).reshape(i, 5) for i in range(5)}
    writer = planned(tmp_path, tensors, max_shard_bytes=limit)
    for name, tensor in reversed(tensors.items()):
        for row in reversed(range(len(tensor))):
            writer.write(name, tensor[row], first_entry=5 * row)
    paths = writer.finish()
    assert sorted(tmp_path.glob("*.safetensors")) == sorted(paths)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == tuple(sorted(tensors))
    assert all(torch.equal(checkpoint.tensor(name), tensors[name]) for name in tensors)
    if limit > 1000:
        assert [path.name for path in paths] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
        assert paths[0].name == f"model-00001-of-{len(paths):05d}.safetensors"
        sizes = [sum(one.nbytes for one in load_file(path).values()) for path in paths]
        assert all(
            size <= limit or len(load_file(path)) == 1
            for size, path in zip(sizes, paths, strict=True)
        )


def test_shards_are_written_from_many_threads(tmp_path):
    tensors = {f"t{i}": torch.arange(3000.0).roll(i).reshape(1000, 3) for i in range(4)}
    writer = planned(tmp_path, tensors, max_shard_bytes=20_000)
    rows = [(name, row) for name in tensors for row in range(1000)]

    def write(place):
        writer.write(place[0], tensors[place[0]][place[1]], first_entry=3 * place[1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, rows))
    writer.finish()
    found = open_checkpoint(tmp_path)
    assert all(torch.equal(found.tensor(name), tensors[name]) for name in tensors)


def test_spool_is_copied_without_copy_file_range(tmp_path, monkeypatch):
    def unsupported(*args, **options):
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr(os, "copy_file_range", unsupported)
    file = SpooledFile(tmp_path / "x.safetensors")
    file.add("a", torch.arange(7))
    file.finish()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], torch.arange(7))
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_pieces_must_be_the_tensor(tmp_path):
    file = SpooledFile(tmp_path / "x.safetensors")
    spec = TensorSpec(torch.float32, (3, 2))
    file.add_pieces("a", spec, [torch.ones(2, 2), torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="a was written before"):
        file.add("a", torch.ones(1))
    with pytest.raises(ValueError, match="16 bytes came"):
        file.add_pieces("b", spec, [torch.ones(2, 2)])
    with pytest.raises(ValueError, match="announced as"):
        file.add_pieces("c", spec, [torch.ones(3, 2, dtype=torch.int64)])
    file.add("d", torch.tensor([7]))
    file.finish()
    found = load_file(tmp_path / "x.safetensors")
    assert found["a"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert found["d"].tolist() == [7]


def test_shards_refuse_to_lack_entries_and_to_be_none(tmp_path):
    writer = planned(tmp_path, {"a": torch.ones(2)})
    writer.write("a", torch.ones(1))
    with pytest.raises(ValueError, match="a: 4 announced bytes were not written"):
        writer.finish()
    writer.close()
    with pytest.raises(ValueError, match="no tensor for model"):
        ShardWriter(tmp_path, {})
    with pytest.raises(ValueError, match="must be >= 1"):
        planned(tmp_path, {"a": torch.ones(2)}, max_shard_bytes=0)


def test_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "out"

    def fail():
        with atomic_folder(target) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(target.parent.iterdir()) == []
    with atomic_folder(target) as folder:
        (folder / "whole").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["whole"]
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(target):
        pass
    assert [path.name for path in tmp_path.glob("*/*")] == ["out"]


def test_only_dead_writers_leftovers_are_removed(tmp_path):
    live, descriptor = make_pending_folder(tmp_path)
    named = live.rename(tmp_path / f"{PENDING_PREFIX}out-live")
    dead = tmp_path / f"{PENDING_PREFIX}out-dead"
    other = tmp_path / f"{PENDING_PREFIX}other-dead"
    dead.mkdir()
    other.mkdir()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "x").touch()
    assert named.exists()
    assert other.exists()
    assert not dead.exists()
    os.close(descriptor)


def test_json_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    atomic_write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(path, {"new": float("nan")})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic_write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_numbers_that_json_lacks_become_null_and_other_things_are_refused():
    value = {"loss": float("nan"), 3: (1, 2.5, [float("inf"), None, True, "x"])}
    assert plain_json(value) == {"loss": None, "3": [1, 2.5, [None, None, True, "x"]]}
    with pytest.raises(ValueError, match="no form in JSON"):
        plain_json({"a": torch.ones(1)})


@given(st.binary(max_size=40))
def test_parsing_json_raises_value_error_only(raw):
    with contextlib.suppress(ValueError):
        parse_json(raw)


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 2**31), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_headers_raise_value_error_only(position, bit, cut, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(1, dtype=torch.uint8)}, path)
    raw = bytearray(path.read_bytes())
    position %= len(raw)
    if cut:
        raw = raw[:position]
    else:
        raw[position] ^= 1 << bit
    path.write_bytes(raw)
    with contextlib.suppress(ValueError):
        read_header(path)
