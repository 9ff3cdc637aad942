"""Adapter folders that are damaged, hostile or more than plain LoRA: one line each, by name."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_zoo import Zoo, adapted, saved
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from soupkit import name_patterns
from soupkit.adapter_folder import Module, open_adapter, write_adapter
from soupkit.errors import CheckpointError, MergeError, SoupkitError
from soupkit.factored import Pair

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LINE_A, LINE_B = (f"base_model.model.line.lora_{side}.weight" for side in "AB")
NAN, INF = torch.full((5, 3), math.nan), torch.full((5, 3), -math.inf)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of three kinds; do not change it."""
    return saved(adapted(modules=("line", "table", "two")), tmp_path_factory.mktemp("plain") / "a")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "a"))


def rewrite(folder: Path, tensors: dict[str, Tensor | None] | None = None, **fields) -> Path:
    """Other tensors (None: gone) and other fields of the config."""
    found = load_file(folder / WEIGHTS)
    for name, tensor in (tensors or {}).items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))
    return folder


def assert_refused(folder: Path, words: str, kind: type[SoupkitError] = CheckpointError) -> None:
    with pytest.raises(kind, match=words) as caught:
        open_adapter(folder).load()
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, "'LOHA'; only LORA .* LoraConfig"),
        ({"peft_type": None}, "None; only LORA"),
        ({"use_dora": True}, "DoRA .* plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "aLoRA .* plain LoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"arrow_config": {"top_k": 1}}, "Arrow"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"velora_config": {}}, "VeLoRA"),
        ({"monteclora_config": {}}, "MonteCLoRA"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"lora_bias": True}, "a bias on lora_B"),
        ({"init_lora_weights": "mica"}, "MiCA"),
        ({"bias": "all"}, "bias='all'.* bias='none'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["norm"]}, r"modules_to_save.* merge_and_unload\(\)"),
        ({"trainable_token_indices": {"table": [1]}}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
        ({"ensure_weight_tying": True}, "tied .* only one of the two"),
        ({"init_lora_weights": "olora"}, "'olora' has changed the base .*weight_conversion"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' has changed the base"),
        ({"init_lora_weights": "loftq"}, "'loftq' has changed the base"),
        ({"lora_alpha": 0}, "lora_alpha is 0 for line.* set it"),
        ({"alpha_pattern": {"two": 0}}, "lora_alpha is 0 for two"),
        ({"lora_alpha": True}, "lora_alpha=True: needs a finite number"),
        ({"lora_alpha": 10**400}, "needs a finite number"),
        ({"r": 0}, "r=0: a rank is a whole number >= 1"),
        ({"r": 2.5}, "r=2.5"),
        ({"r": 4}, r"line\.lora_A\.weight has rank 3, the config says 4: correct"),
        ({"rank_pattern": {"two": 4}}, r"two\.lora_A\.weight has rank 3, the config says 4"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern: '\(' is no pattern"),
        ({"rank_pattern": [4]}, "rank_pattern=.4.: needs an object"),
        ({"alpha_pattern": {"two": "4"}}, r"alpha_pattern\['two'\]='4'"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path=3: needs a text"),
        ({"target_parameters": ["up"], "target_modules": []}, "no factor of a bare parameter"),
        ({"target_modules": "(", "target_parameters": ["up"]}, r"target_modules='\(' is no pat"),
        ({"target_modules": [1]}, "needs a list of names"),
        ({"target_parameters": "line.weight"}, "needs a list of names"),
        (
            {"target_parameters": ["line.w", "line.v"], "rank_pattern": {"line.w": 1}},
            "line.v and line.w have other ranks",
        ),
        ({"target_parameters": ["line.w"], "r": 2}, "rank 3, the config says a multiple of 2"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
def test_configs_that_are_refused(folder: Path, fields: dict, words: str) -> None:
    assert_refused(rewrite(folder, **fields), words)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "l.*", "target_parameters": ["up"]},
        {"rank_pattern": {"l.*": 4}, "target_modules": []},
        {"alpha_pattern": {"l.*": 4}, "target_modules": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_pattern_that_takes_too_long_is_refused(
    folder: Path, fields: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_patterns, "MATCH_SECONDS", 0.0)
    assert_refused(rewrite(folder, **fields), f"{next(iter(fields))}.* takes too long")


def other(name: str, *shape: int) -> dict[str, Tensor]:
    return {f"base_model.model.{name}": torch.ones(shape)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (other("line.lora_magnitude_vector", 5), "DoRA's magnitudes: train with plain LoRA"),
        (other("line.lora_B.bias", 5), "a trained bias: train with bias='none'"),
        (other("line.bias", 5), "a trained bias"),
        (other("line.lora_down.weight", 3, 6), "kohya's format: convert"),
        (other("line.lora_diag", 3), "no factor of plain LoRA"),
        (other("head.weight", 5, 5), r"whole tensor \(modules_to_save, or an embedding"),
        (other("token_adapter.trainable_tokens_delta", 5, 5), "trained rows of an embedding"),
        (other("table.base_layer.weight", 11, 6), "copy of .*save_embedding_layers=False"),
        (
            other("mha.base_layer.out.lora_A.weight", 3, 5)
            | other("mha.base_layer.out.lora_B.weight", 5, 3),
            "inside another adapted layer",
        ),
        ({LINE_A: None}, r"line\.lora_B\.weight has no lora_A beside it"),
        ({LINE_B: None}, r"line\.lora_A\.weight has no lora_B beside it"),
        ({LINE_B: torch.ones(5, 2)}, r"\(3, 6\) and .* \(5, 2\) do not pair"),
        ({LINE_B: torch.ones(5, 3, 1)}, "do not pair"),
        ({LINE_A: torch.ones(0)}, r"shape \(0,\): it was saved under ZeRO-3 or FSDP"),
        ({LINE_A: torch.ones(0, 6)}, "gather them and save it again"),
        ({LINE_A: torch.ones(3, 6, dtype=torch.int8)}, "torch.int8; .* dequantise"),
        ({LINE_A: torch.ones(3, 6).to(torch.float8_e4m3fn)}, "float8_e4m3fn; .* dequantise"),
        (other("two.lora_B.weight", 5, 1, 1, 1), "groups is no change of its weight"),
        (other("two.lora_B.weight", 5, 3, 2, 1), "do not pair"),
        (
            other("table.lora_embedding_A", 3, 11, 1) | other("table.lora_embedding_B", 6, 3, 1),
            "no factors of an embedding",
        ),
        (
            other("table.lora_A.weight", 3, 6) | other("table.lora_B.weight", 11, 3),
            "both as a linear layer and as an embedding",
        ),
        (other("line.lora_A.second.weight", 3, 6), "of several adapters: save each"),
        ({"line.lora_A.weight": torch.ones(3, 6)}, "one tensor's two names"),
        (other("lora_A.weight", 3, 6), "no factor of plain LoRA"),
    ],
    ids=lambda value: str(list(value))[:60] if isinstance(value, dict) else None,
)
def test_tensors_that_are_refused(folder: Path, tensors: dict, words: str) -> None:
    assert_refused(rewrite(folder, tensors), words)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_named_with_their_place(folder: Path, value: float) -> None:
    tensor = torch.ones(5, 3)
    tensor[4, 1] = value
    rewrite(folder, {LINE_B: tensor})
    assert_refused(folder, r"line\.lora_B\.weight: (nan|-inf) at index \(4, 1\)", MergeError)
    assert open_adapter(folder).module("two").pair.rank == 3


def test_a_zero_adapter_is_legal(folder: Path) -> None:
    rewrite(folder, {LINE_B: torch.zeros(5, 3)})
    assert not open_adapter(folder).module("line").pair.matrix().any()


def test_an_empty_adapter(folder: Path) -> None:
    save_file({}, folder / WEIGHTS)
    assert_refused(folder, "holds no tensor")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (WEIGHTS, truncate, "truncated"),
        (WEIGHTS, lambda path: os.truncate(path, 3), "truncated"),
        (WEIGHTS, lambda path: path.write_bytes(b"\xff" * 16), "truncated"),
        (WEIGHTS, Path.unlink, "no adapter_model.safetensors: give the folder"),
        (CONFIG, Path.unlink, "no adapter_config.json: give the folder"),
        (CONFIG, truncate, "not JSON"),
        (CONFIG, lambda path: path.write_text("[]"), "no JSON object"),
        (CONFIG, lambda path: path.write_text('{"r": 1, "r": 2}'), "twice"),
        (CONFIG, lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
        (WEIGHTS, lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
        (WEIGHTS, lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (WEIGHTS, lambda path: path.rename(path.with_name("adapter_model.bin")), "a pickle, "),
    ],
)
def test_files_that_are_damaged_or_missing(
    folder: Path, name: str, change: Callable[[Path], object], words: str
) -> None:
    change(folder / name)
    assert_refused(folder, words)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_links_stay_in_the_folder_or_in_the_cache_of_the_hub(folder: Path, name: str) -> None:
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(outside / name)
    assert_refused(folder, "a link to .*elsewhere.*outside of the folder: put a copy")
    (outside / name).rename(folder / "content")
    (folder / name).unlink()
    (folder / name).symlink_to("content")
    assert len(open_adapter(folder).load()) == 3
    snapshot = folder.parent / "models--a--b" / "snapshots" / "12ab"
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, one in enumerate((CONFIG, WEIGHTS)):
        shutil.copy(folder / one, blobs / str(number))
        (snapshot / one).symlink_to(f"../../blobs/{number}")
    assert len(open_adapter(snapshot).load()) == 3
    (folder / name).unlink()
    (folder / name).symlink_to("gone")
    assert_refused(folder, f"no {name}")


def test_no_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "gone", "no such folder")


def test_a_file_that_changes_after_it_was_opened(folder: Path) -> None:
    opened = open_adapter(folder)
    digest = opened.info.digest()
    rewrite(folder, {LINE_B: torch.ones(5, 3)})
    with pytest.raises(CheckpointError, match="has changed since it was opened; open"):
        opened.module("line")
    assert opened.info.digest() != digest
    with pytest.raises(CheckpointError, match="no module 'head'"):
        opened.module("head")
    (folder / WEIGHTS).unlink()
    for read in (opened.load, opened.info.digest):
        with pytest.raises(CheckpointError, match=WEIGHTS):
            read()


def test_what_peft_itself_saves_beside_the_factors(base_folder: Path, tmp_path: Path) -> None:
    """PEFT adds the embedding to an adapter of it unless it is told not to."""
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
    model.save_pretrained(tmp_path / "a")
    assert_refused(tmp_path / "a", r"base_layer\.weight is a copy .*save_embedding_layers=False")
    model.save_pretrained(tmp_path / "b", save_embedding_layers=False)
    assert open_adapter(tmp_path / "b").info.modules["model.embed_tokens"].shape == (99, 24)
    assert open_adapter(tmp_path / "b").info.base == str(base_folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["table"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "bias on lora_B"),
        ({"init_lora_weights": "mica"}, "MiCA"),
        ({"init_lora_weights": "olora"}, "changed the base"),
    ],
    ids=str,
)
def test_what_peft_trains_and_we_do_not_read(tmp_path: Path, options: dict, words: str) -> None:
    """The fields are PEFT's own: it writes these folders."""
    model = get_peft_model(Zoo(), LoraConfig(r=2, target_modules=["line"], **options))
    assert_refused(saved(model, tmp_path / "a"), words)


def test_grouped_convolutions_of_peft(tmp_path: Path) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Conv2d(4, 6, 3, groups=2)

    model = get_peft_model(Grouped(), LoraConfig(r=2, target_modules=["two"]))
    assert_refused(saved(model, tmp_path / "a"), "groups is no change of its weight; leave it out")


def pair(rank: int = 2, *, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Pair:
    return Pair(torch.ones(rank, 6, dtype=dtype), torch.full((5, rank), value, dtype=dtype), 3.0)


LINEAR = Module("linear", pair())
EXPERT = Module("expert", pair())


@pytest.mark.parametrize(
    ("modules", "options", "kind", "words"),
    [
        ({}, {}, ValueError, "no modules"),
        ({"a.lora_A": LINEAR}, {}, ValueError, "no name of a module"),
        ({"a..b": LINEAR}, {}, ValueError, "no name of a module"),
        ({"": LINEAR}, {}, ValueError, "no name of a module"),
        ({"module.a": LINEAR}, {}, ValueError, "no name of a module"),
        ({"a": EXPERT}, {}, ValueError, "names of experts"),
        ({"a[0]": LINEAR}, {}, ValueError, "names of experts"),
        ({"a[0]": EXPERT}, {}, ValueError, "target_parameters"),
        ({"a[0]": EXPERT, "a[2]": EXPERT}, {}, ValueError, r"experts \[0, 2\] .* every expert"),
        ({"a": LINEAR}, {"carried": {"r": 3}}, ValueError, r"carried=\['r'\]"),
        ({"a": LINEAR, "b": Module("linear", pair(value=math.nan))}, {}, MergeError, "b.b: nan"),
        ({"a": Module("linear", pair(value=1e30))}, {"dtype": torch.float16}, MergeError, "beyond"),
    ],
)
def test_what_cannot_be_written(
    tmp_path: Path, modules: dict, options: dict, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        write_adapter(tmp_path / "a", modules, base="x", **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_content_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="exists already"):
        write_adapter(tmp_path, {"a": LINEAR}, base="x")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("kind", "kernel"), [("linear", (1,)), ("conv", ()), ("conv", (4,)), ("conv", (1, 1, 1, 1))]
)
def test_a_module_checks_its_kernel(kind: str, kernel: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit a delta"):
        Module(kind, pair(), kernel)
