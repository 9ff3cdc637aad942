"""Adapter folders; PEFT is the oracle: it wrote what is read, and loads what is written."""

import json
import math
from pathlib import Path

import pytest
import torch
from adapter_zoo import LINEAR, MODULES, PARAMETERS, TOKENS, Zoo, adapted, deltas_of, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from soupkit.adapter_folder import Module, open_adapter, write_adapter
from soupkit.errors import CheckpointError
from soupkit.factored import Pair, merge_pairs
from soupkit.merge import MergeRule

# PEFT warns of layers whose fan_in_fan_out it sets by itself, and of embeddings that it would save.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(folder: Path) -> dict[str, Tensor]:
    return {name: module.pair.matrix() for name, module in open_adapter(folder).load().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6):
    assert found.keys() == wanted.keys()
    for name, delta in wanted.items():
        error = torch.linalg.matrix_norm(found[name].double() - delta.double())
        assert error <= tolerance * torch.linalg.matrix_norm(delta.double()), name


PATTERNS = {
    "rank_pattern": {"^one": 1, "blocks.1.line": 2, "line": 5, "t.*": 4},
    "alpha_pattern": {"^line": 7, "blocks.*": 3, "in": 50, "w": 100},
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 5},
        {"modules": LINEAR[1:], "fan_in_fan_out": False},
        PATTERNS,
        {**PATTERNS, "use_rslora": True},
        {"modules": ("fused",), "fan_in_fan_out": True},
        {"modules": (), "parameters": PARAMETERS},
        {"modules": (*MODULES,), "parameters": ("experts.down", "turned.up"), "use_rslora": True},
        {
            "modules": ("line",),
            "parameters": PARAMETERS,
            "rank_pattern": {r"experts\.(up|down)": 2},
            "alpha_pattern": {r"^turned\..*": 9},
        },
    ],
    ids=repr,
)
def test_what_peft_saves_is_read_as_the_delta_that_it_adds(tmp_path: Path, options: dict) -> None:
    model = adapted(**options)
    folder = open_adapter(saved(model, tmp_path / "a"))
    wanted = deltas_of(model)
    assert_same(deltas_of(PeftModel.from_pretrained(Zoo(), tmp_path / "a")), wanted)
    assert_same({name: folder.module(name).pair.matrix() for name in folder.names}, wanted)
    assert_same(matrices(tmp_path / "a"), wanted)
    for name, known in folder.info.modules.items():
        module = folder.module(name)
        assert (known.kind, known.kernel) == (module.kind, module.kernel)
        assert known.shape == module.pair.shape == tuple(wanted[name].shape)
        assert (known.rank, known.scale) == (module.pair.rank, module.pair.scale)
        assert known.dtype == module.pair.a.dtype == module.pair.b.dtype == torch.float32
    assert folder.nbytes == folder.info.nbytes == (tmp_path / "a" / WEIGHTS).stat().st_size


def test_kinds_kernels_and_orientations(tmp_path: Path) -> None:
    found = open_adapter(saved(adapted(parameters=PARAMETERS), tmp_path / "a")).info.modules
    kinds = {name: (known.kind, known.kernel, known.shape) for name, known in found.items()}
    assert kinds["table"] == ("embedding", (), (11, 6))
    assert kinds["fused"] == ("linear", (), (10, 6))
    assert kinds["one"] == ("conv", (3,), (4, 18))
    assert kinds["two"] == ("conv", (3, 2), (5, 18))
    assert kinds["point"] == ("conv", (1, 1), (5, 3))
    assert kinds["three"] == ("conv", (2, 2, 2), (3, 8))
    # The parameter that a module registers first is the innermost.
    assert kinds["experts.base_layer[2]"] == ("expert", (), (7, 5))
    assert kinds["experts[0]"] == kinds["turned[1]"] == ("expert", (), (5, 7))
    assert [name for name in found if name in MODULES] == sorted(MODULES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_stay_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    model = adapted().to(dtype)
    folder = open_adapter(saved(model, tmp_path / "a"))
    assert {known.dtype for known in folder.info.modules.values()} == {dtype}
    tolerance = max(1e-6, torch.finfo(dtype).eps)
    assert_same(matrices(tmp_path / "a"), deltas_of(model), tolerance)
    own = model.base_model.model.line
    pair = folder.module("line").pair
    assert torch.equal(pair.a, own.lora_A["default"].weight)
    assert torch.equal(pair.b, own.lora_B["default"].weight)


def rewritten(folder: Path, rename=lambda name: name, **changes) -> Path:
    """Another name for every tensor, other values in the config, other tensors."""
    tensors = load_file(folder / WEIGHTS)
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    for name, tensor in changes.pop("tensors", {}).items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace("lora_A.", "lora_A.default.").replace(
            "lora_B.", "lora_B.default."
        ),
        lambda name: f"_orig_mod.{name}".replace("blocks.", "module.blocks._fsdp_wrapped_module."),
        lambda name: name.replace(".model.", ".model._orig_mod."),
    ],
    ids=["no prefix", "adapter name", "wrappers", "compiled"],
)
def test_other_spellings_of_names(tmp_path: Path, rename) -> None:
    """TB78."""
    model = adapted(modules=(*LINEAR, "two"), rank_pattern={"^line": 2, r"blocks\.1\.line": 5})
    saved(model, tmp_path / "a")
    rewritten(tmp_path / "a", rename)
    assert_same(matrices(tmp_path / "a"), deltas_of(model))


def test_an_embedding_with_the_name_of_its_adapter(tmp_path: Path) -> None:
    model = adapted(modules=("table",))
    saved(model, tmp_path / "a")
    rewritten(tmp_path / "a", lambda name: f"{name}.tuned")
    assert_same(matrices(tmp_path / "a"), deltas_of(model))


def test_patterns_that_overlap_mean_what_they_mean_when_peft_loads_them(tmp_path: Path) -> None:
    """PEFT takes the first that matches, and its file has them in another order than the run."""
    model = adapted(alpha_pattern={"line": 9, "blocks.1.line": 2})
    folder = saved(model, tmp_path / "a")
    loaded = deltas_of(PeftModel.from_pretrained(Zoo(), folder))
    assert not torch.allclose(loaded["blocks.1.line"], deltas_of(model)["blocks.1.line"])
    assert_same(matrices(folder), loaded)
    folder = saved(adapted(rank_pattern={"line": 4, "blocks.1.line": 2}), tmp_path / "b")
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(Zoo(), folder)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.line\.lora_A.* rank 4, .* says 2"):
        open_adapter(folder)


def test_converted_pissa_is_plain_and_unconverted_is_refused(tmp_path: Path) -> None:
    base = Zoo().state_dict()
    options = LoraConfig(r=2, target_modules="line", init_lora_weights="pissa")
    model = get_peft_model(Zoo(), options)
    config = model.peft_config["default"]
    config.init_lora_weights = True
    saved(model, tmp_path / "start")
    config.init_lora_weights = "pissa"
    for parameter in model.base_model.model.line.lora_B.parameters():
        parameter.data += gaussian(*parameter.shape)
    start = str(tmp_path / "start")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=start)
    saved(model, tmp_path / "pissa")
    wanted = {"line": model.merge_and_unload().line.weight.detach() - base["line.weight"]}
    assert_same(matrices(tmp_path / "plain"), wanted, 1e-5)
    with pytest.raises(CheckpointError, match=r"'pissa' has changed the base.*weight_conversion"):
        open_adapter(tmp_path / "pissa")


# What is written.


def moved(model: nn.Module, deltas: dict[str, Tensor]) -> Tensor:
    """The output of a Zoo whose own weights were changed by these deltas."""
    with torch.no_grad():
        for name, delta in deltas.items():
            stored, _, expert = name.partition("[")
            if expert:
                outer = "down" if "base_layer" not in stored else "up"
                owner = model.get_submodule(stored.removesuffix(".base_layer"))
                getattr(owner, outer)[int(expert[:-1])] += delta.T if "turned" in name else delta
            else:
                weight = model.get_submodule(stored).weight
                weight += delta.T if stored == "fused" else delta.reshape(weight.shape)
        return model(TOKENS)


def loaded_by_peft(folder: Path) -> nn.Module:
    model = PeftModel.from_pretrained(Zoo(), folder)
    result = model.load_adapter(folder, "again")
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key]
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {**PATTERNS, "parameters": PARAMETERS},
        {"modules": (), "parameters": PARAMETERS, "rank_pattern": {r"turned\..*": 2}},
        {"modules": ("fused",), "fan_in_fan_out": True},
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_merged", [False, True], ids=["copy", "merged"])
def test_what_is_written_changes_the_output_in_peft_as_its_delta_says(
    tmp_path: Path, options: dict, is_merged: bool
) -> None:
    folder = open_adapter(saved(adapted(**options), tmp_path / "a"))
    modules = folder.load()
    if is_merged:
        other = open_adapter(saved(adapted(seed=7, **options), tmp_path / "b"))
        for number, (name, module) in enumerate(modules.items()):
            pairs, rank = [module.pair, other.module(name).pair], 1 + number % 4
            a, b, _ = merge_pairs(name, pairs, MergeRule(method="mean"), rank=rank)
            modules[name] = Module(module.kind, Pair(a, b, module.pair.scale), module.kernel)
    out = write_adapter(tmp_path / "out", modules, base="zoo", carried=folder.info.carried)
    deltas = {name: module.pair.matrix() for name, module in modules.items()}
    model = loaded_by_peft(out)
    assert_same(deltas_of(model), deltas)
    with torch.no_grad():
        found = model(TOKENS)
    torch.testing.assert_close(found, moved(Zoo(), deltas), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, Zoo()(TOKENS), atol=1e-2)
    assert_same(matrices(out), deltas)
    assert sorted(path.name for path in out.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("scales", [(2.0,), (1 / 3,), (2.0, 0.3), (0.7,), (-2.0,)])
def test_one_scale_is_kept_where_a_whole_alpha_says_it(tmp_path: Path, scales: tuple) -> None:
    """Servers that read neither rank_pattern nor alpha_pattern then have the right scale too."""
    modules = {
        name: Module("linear", Pair(gaussian(rank, 6), gaussian(6, rank), scales[i % len(scales)]))
        for i, (name, rank) in enumerate({"blocks.0.line": 3, "blocks.1.line": 6}.items())
    }
    out = write_adapter(tmp_path / "a", modules, base=None)
    config = json.loads((out / CONFIG).read_text())
    found = open_adapter(out)
    for name, module in modules.items():
        is_kept = scales in ((2.0,), (1 / 3,))
        scale = scales[0] if is_kept else 1.0
        assert config["lora_alpha"] / config["r"] == found.info.modules[name].scale == scale
        assert torch.equal(found.module(name).pair.a, module.pair.a)
        if is_kept:
            assert torch.equal(found.module(name).pair.b, module.pair.b)
    assert_same(matrices(out), {name: module.pair.matrix() for name, module in modules.items()})
    loaded_by_peft(out)


def test_a_pattern_is_written_for_one_module_alone(tmp_path: Path) -> None:
    """TB72: a name that is the end of others; "." stands for itself."""
    ranks = {"line": 2, "blocks.0.line": 3, "blocks.1.line": 3, "one": 1}
    shapes = {"one": ((3,), 4, 18), "line": ((), 5, 6)}
    modules = {}
    for name, rank in ranks.items():
        kernel, out, columns = shapes.get(name, ((), 6, 6))
        pair = Pair(gaussian(rank, columns), gaussian(out, rank), 1.0)
        modules[name] = Module("conv" if kernel else "linear", pair, kernel)
    model = loaded_by_peft(write_adapter(tmp_path / "a", modules, base=None))
    wanted = {name: module.pair.matrix() for name, module in modules.items()}
    assert_same(deltas_of(model), wanted)


KINDS = st.sampled_from(["linear", "embedding", "conv", "expert"])


@st.composite
def adapters(draw) -> dict[str, Module]:
    modules = {}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(KINDS)
        kernel = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        kernel = kernel if kind == "conv" else ()
        out, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9)) * math.prod(kernel)
        for expert in range(draw(st.integers(1, 3))) if kind == "expert" else [None]:
            rank, seed = draw(st.integers(1, 5)), draw(st.integers(0, 99))
            scale = draw(st.sampled_from([1.0, 2.0, 0.25, 1 / 3, -1.5, 1e-3]))
            pair = Pair(gaussian(rank, columns, seed=seed), gaussian(out, rank, seed=seed), scale)
            name = f"net.{number}.proj" + ("" if expert is None else f"[{expert}]")
            modules[name] = Module(kind, pair, kernel)
    return modules


@settings(deadline=None, max_examples=25)
@given(modules=adapters(), dtype=st.sampled_from([None, torch.bfloat16, torch.float64]))
def test_what_is_written_is_read_again(tmp_path_factory, modules, dtype) -> None:
    folder = tmp_path_factory.mktemp("round") / "a"
    carried = {"target_parameters": [f"net.{i}.proj.w" for i in range(4)]}
    is_expert = {name: module.kind == "expert" for name, module in modules.items()}
    if any(is_expert.values()):
        carried["target_parameters"] = sorted(
            {f"{name.partition('[')[0]}.w" for name in modules if is_expert[name]}
        )
    write_adapter(folder, modules, base="b", revision="r", dtype=dtype, carried=carried)
    found = open_adapter(folder)
    assert (found.info.base, found.info.revision) == ("b", "r")
    assert set(found.names) == set(modules)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-6
    wanted = {name: module.pair.matrix() for name, module in modules.items()}
    assert_same({name: found.module(name).pair.matrix() for name in found.names}, wanted, tolerance)
    for name, module in modules.items():
        known = found.info.modules[name]
        assert (known.kind, known.kernel, known.shape) == (
            module.kind,
            module.kernel,
            module.pair.shape,
        )
        assert known.dtype == dtype or dtype is None
    again = write_adapter(folder.with_name("b"), found.load(), base="b", revision="r",
                          carried=found.info.carried)  # fmt: skip
    assert (again / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert open_adapter(again).info.digest() == found.info.digest()


@pytest.mark.parametrize(
    ("targets", "parameters", "ranks"),
    [
        (["w1", "w2", "w3", "q_proj"], None, {4, 2}),
        ("all-linear", None, {4, 2}),
        (["q_proj"], ["gate_up_proj", "down_proj"], {2}),
        ([], ["experts.down_proj"], {2}),
    ],
    ids=str,
)
def test_experts_as_peft_finds_them_in_a_mixture(
    tmp_path: Path, targets: object, parameters: list[str] | None, ranks: set[int]
) -> None:
    """PEFT names parameters without their module, and gives what was two layers twice the rank."""

    def mixture() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 12, "head_dim": 4, "vocab_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_hidden_layers=1))

    config = LoraConfig(r=2, target_modules=targets, target_parameters=parameters)
    model = get_peft_model(mixture(), config)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data = gaussian(*parameter.shape, seed=number)
    folder = open_adapter(saved(model, tmp_path / "a"))
    assert {known.rank for known in folder.info.modules.values()} == ranks
    experts = [name for name in folder.names if "experts" in name]
    assert len(experts) == 3 * (2 if len(parameters or "two") > 1 else 1)
    assert_same(matrices(tmp_path / "a"), deltas_of(model))
    carried = folder.info.carried
    out = write_adapter(tmp_path / "b", folder.load(), base=None, carried=carried)
    again = PeftModel.from_pretrained(mixture(), out)
    assert_same(deltas_of(again), deltas_of(model))
    tokens = torch.arange(6)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)


# PEFT's own merges.


class Wide(nn.Module):
    """PEFT's svd needs sides of at least svd_rank, and knows no Conv1d or Conv3d."""

    NAMES = ("table", "line", "fused", "two")

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 17)
        self.line = nn.Linear(19, 23)
        self.fused = Conv1D(13, 29)
        self.two = nn.Conv2d(5, 14, (3, 2))


@pytest.mark.parametrize("scaled", [{}, {"lora_alpha": 12}, {"use_rslora": True}])
@pytest.mark.parametrize("ranks", [(3, 3), (2, 5)])
def test_the_mean_is_that_of_peft(tmp_path: Path, scaled: dict, ranks: tuple[int, int]) -> None:
    """TB70, TB74: the mean of deltas; PEFT's "linear" of an adapter with itself is twice it."""
    folders = []
    for seed, rank in enumerate(ranks):
        options = {"seed": seed, "r": rank, "modules": Wide.NAMES, **(scaled if seed else {})}
        folders.append(saved(adapted(model=Wide(), **options), tmp_path / str(seed)))
    model = PeftModel.from_pretrained(Wide(), folders[0], adapter_name="0")
    model.load_adapter(folders[1], "1")
    found = [open_adapter(folder) for folder in folders]
    rule = MergeRule(method="mean", weights=(0.3, 0.7))

    def merged(rank: int, *folders) -> dict[str, Tensor]:
        result = {}
        for name in folders[0].names:
            pairs = [folder.module(name).pair for folder in folders]
            a, b, _ = merge_pairs(name, pairs, rule, rank=rank)
            result[name] = Pair(a, b, pairs[0].scale).matrix()
        return result

    for kind, rank in (("cat", sum(ranks)), ("svd", 2), ("svd", sum(ranks))):
        if kind == "cat":
            model.add_weighted_adapter(["0", "1"], [0.3, 0.7], "cat", combination_type="cat")
        else:
            model.add_weighted_adapter(
                ["0", "1"], [0.3, 0.7], f"svd{rank}", combination_type="svd", svd_rank=rank
            )
        wanted = deltas_of(model, kind if kind == "cat" else f"svd{rank}")
        assert_same(merged(rank, *found), wanted, 3e-6)
    model.add_weighted_adapter(["0", "0"], [0.5, 0.5], "twice", combination_type="linear")
    own = deltas_of(model, "0")
    assert_same(deltas_of(model, "twice"), {name: 2 * delta for name, delta in own.items()}, 3e-6)
    assert_same(merged(ranks[0], found[0], found[0]), own)
