"""What of a PEFT model takes part: real models of PEFT are the reference."""

import copy
import os
from collections.abc import Callable

import pytest
import torch
from soup_runs import LENGTH, VOCABULARY, tiny_llama
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soupkit.errors import TrainingError
from soupkit.factored import merge_pairs
from soupkit.merge import MergeRule
from soupkit.training.peft import (
    LoraUnit,
    MergedWeights,
    factors_of,
    is_peft,
    lora_units,
    pair_of,
    plain_parameters,
)
from soupkit.training.weights import unwrap

peft = pytest.importorskip("peft")
# PEFT 0.21 asks for a property that transformers 5 has renamed, and warns of ties and groups.
pytestmark = pytest.mark.filterwarnings("ignore")
ATTENTION = ["q_proj", "v_proj"]


class Mixed(nn.Module):
    """Every kind of layer that LoRA can adapt, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.table = nn.Embedding(11, 6)
        self.one = nn.Conv1d(4, 6, 3)
        self.two = nn.Conv2d(3, 5, (3, 2))
        self.point = nn.Conv2d(3, 5, 1)
        self.three = nn.Conv3d(2, 3, 2)
        self.line = nn.Linear(9, 7)
        self.fused = Conv1D(10, 6)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


MIXED = ["table", "one", "two", "point", "three", "line", "fused"]


def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` with random values in everything trainable, as after some steps."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(model: nn.Module, targets: list[str], **options) -> nn.Module:
    config = peft.LoraConfig(target_modules=targets, **{"r": 3, "lora_alpha": 6, **options})
    return trained(peft.get_peft_model(model, config))


def reader(model: nn.Module) -> Callable[[str], Tensor]:
    """Tensors by own name, from the module's own tables."""
    inner = unwrap(model)

    def read(name: str) -> Tensor:
        place, _, key = name.rpartition(".")
        return getattr(inner.get_submodule(place), key)

    return read


def merged_by_peft(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(unwrap(model)).merge_and_unload().state_dict()


def assert_same_as_peft(model: nn.Module, missing: tuple[str, ...] = ()) -> None:
    expected = merged_by_peft(model)
    source = MergedWeights(model, reader(model))
    assert source.names == tuple(sorted(expected.keys() - set(missing)))
    for name in source.names:
        value = source.tensor(name)
        assert value.shape == source.shape(name) == expected[name].shape, name
        assert value.dtype == source.dtype(name), name
        torch.testing.assert_close(
            value, expected[name].to(value.dtype), rtol=1e-6, atol=1e-6, msg=name
        )


def units_by_name(model: nn.Module) -> dict[str, LoraUnit]:
    return {unit.name: unit for unit in lora_units(model)}


def delta_of(model: nn.Module, unit: LoraUnit) -> Tensor:
    read = reader(model)
    return pair_of(unit, read(unit.a), read(unit.b)).matrix().reshape(unit.shape)


def test_units_have_the_names_of_the_base_and_their_own() -> None:
    model = adapted(tiny_llama(), ATTENTION)
    units = lora_units(model)
    assert [unit.name for unit in units] == sorted(
        f"model.layers.{i}.self_attn.{part}.weight" for i in (0, 1) for part in ATTENTION
    )
    base = tiny_llama().state_dict()
    for unit in units:
        assert unit.shape == tuple(base[unit.name].shape)
        assert (unit.kind, unit.scale, unit.is_trained) == ("linear", 2.0, True)
        own = f"base_model.model.{unit.name.removesuffix('.weight')}"
        assert (unit.a, unit.b) == (f"{own}.lora_A.default.weight", f"{own}.lora_B.default.weight")
    assert plain_parameters(model) == ()
    assert_same_as_peft(model, missing=("lm_head.weight",))


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_those_of_merge_and_unload(tied: bool) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = adapted(tiny_llama(tied=tied), targets)
    assert_same_as_peft(model, missing=("lm_head.weight",) if tied else ())


def test_every_kind_of_layer_is_flattened_and_put_back() -> None:
    """TB74 and the issue's list: convolutions of all sizes, embeddings, transformers' Conv1D."""
    model = adapted(Mixed(), MIXED)
    units = units_by_name(model)
    assert {name.removesuffix(".weight"): unit.kind for name, unit in units.items()} == {
        "table": "embedding", "one": "conv", "two": "conv", "point": "conv", "three": "conv",
        "line": "linear", "fused": "fan_in_fan_out",
    }  # fmt: skip
    read = reader(model)
    original = Mixed().state_dict()
    for name, unit in units.items():
        a, b = read(unit.a), read(unit.b)
        pair = pair_of(unit, a, b)
        assert unit.shape == tuple(original[name].shape)
        assert pair.b.shape[0] == unit.shape[0]
        back = factors_of(unit, pair)
        assert torch.equal(back[0], a)
        assert torch.equal(back[1], b)
        assert back[0].is_contiguous()
        assert back[1].is_contiguous()
        layer = model.base_model.model.get_submodule(name.removesuffix(".weight"))
        expected = layer.get_delta_weight("default")
        torch.testing.assert_close(delta_of(model, unit), expected, rtol=1e-6, atol=1e-6)
    assert_same_as_peft(model)


def test_a_merge_of_each_kind_is_the_mean_of_the_dense_deltas() -> None:
    first, second = (trained(adapted(Mixed(), MIXED), seed) for seed in (1, 2))
    reads = reader(first), reader(second)
    for unit in lora_units(first):
        pairs = [pair_of(unit, read(unit.a), read(unit.b)) for read in reads]
        a, b, _ = merge_pairs(unit.name, pairs, MergeRule(method="mean"), rank=6)
        own = factors_of(unit, type(pairs[0])(a, b, unit.scale))
        whole = pair_of(unit, *own).matrix().reshape(unit.shape)
        expected = (delta_of(first, unit) + delta_of(second, unit)) / 2
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)


def test_scales_and_ranks_are_those_of_each_layer() -> None:
    """TB72: rank_pattern and alpha_pattern; rslora divides by the root."""
    options = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 9}}
    units = units_by_name(adapted(tiny_llama(), ATTENTION, **options))
    query = units["model.layers.0.self_attn.q_proj.weight"]
    value = units["model.layers.0.self_attn.v_proj.weight"]
    assert (query.scale, value.scale) == (6 / 5, 9 / 3)
    assert_same_as_peft(adapted(tiny_llama(tied=False), ATTENTION, **options))
    model = adapted(tiny_llama(tied=False), ATTENTION, use_rslora=True)
    assert lora_units(model)[0].scale == pytest.approx(6 / 3**0.5)
    assert_same_as_peft(model)


def test_copies_and_biases_are_plain_parameters() -> None:
    model = adapted(
        tiny_llama(tied=False), ATTENTION, modules_to_save=["lm_head", "model.norm"], bias="none"
    )
    assert plain_parameters(model) == (
        "base_model.model.lm_head.modules_to_save.default.weight",
        "base_model.model.model.norm.modules_to_save.default.weight",
    )
    assert_same_as_peft(model)
    source = MergedWeights(model, reader(model))
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(source.tensor("lm_head.weight"), head)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_a_trained_bias_is_the_base_layers_own(bias: str) -> None:
    model = adapted(Mixed(), ["line", "table"], bias=bias)
    expected = {"base_model.model.line.base_layer.bias"}
    if bias == "all":
        expected |= {
            f"base_model.model.{name}.bias"
            for name in ("one", "two", "point", "three", "fused", "norm")
        }
    assert set(plain_parameters(model)) == expected
    assert_same_as_peft(model)


class Standing(nn.Module):
    """A wrapper as FSDP's and checkpointing's: one part in names, all else passed on."""

    def __init__(self, inner: nn.Module, part: str) -> None:
        super().__init__()
        self.part = part
        setattr(self, part, inner)

    @property
    def weight(self) -> Tensor:
        return getattr(self, self.part).weight


@pytest.mark.parametrize("wrapper", ["compile", "ddp", "compile in ddp"])
def test_names_are_the_same_inside_wrappers(wrapper: str, tmp_path) -> None:
    model = adapted(tiny_llama(tied=False), ATTENTION, modules_to_save=["lm_head"])
    expected = lora_units(model), plain_parameters(model)
    started = "ddp" in wrapper
    if started:
        store = torch.distributed.FileStore(os.fspath(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.compile(model) if "compile" in wrapper else model
        wrapped = DistributedDataParallel(wrapped) if started else wrapped
        assert (lora_units(wrapped), plain_parameters(wrapped)) == expected
        assert is_peft(wrapped)
        assert_same_as_peft(wrapped)
    finally:
        if started:
            torch.distributed.destroy_process_group()


def test_wrappers_deep_inside_leave_base_names_alone() -> None:
    model = adapted(tiny_llama(tied=False), ATTENTION)
    expected = [(unit.name, unit.shape) for unit in lora_units(model)]
    layers = model.base_model.model.model.layers
    layers[0] = Standing(layers[0], "_checkpoint_wrapped_module")
    query = layers[1].self_attn.q_proj
    query.base_layer = Standing(query.base_layer, "_fsdp_wrapped_module")
    query.lora_A["default"] = Standing(query.lora_A["default"], "_fsdp_wrapped_module")
    units = lora_units(model)
    assert [(unit.name, unit.shape) for unit in units] == expected
    own = dict(unwrap(model).named_parameters())
    assert all(own[name].requires_grad for unit in units for name in (unit.a, unit.b))
    assert sum("_fsdp_wrapped_module" in unit.a for unit in units) == 1
    source = MergedWeights(model, reader(model))
    assert source.names == tuple(sorted(tiny_llama(tied=False).state_dict()))
    name = "model.layers.1.self_attn.q_proj.weight"
    unit = next(unit for unit in units if unit.name == name)
    torch.testing.assert_close(source.tensor(name), query.base_layer.weight + delta_of(model, unit))


def test_layers_injected_without_a_peft_model() -> None:
    model = tiny_llama(tied=False)
    config = peft.LoraConfig(target_modules=ATTENTION, r=3, lora_alpha=6)
    model = trained(peft.inject_adapter_in_model(config, model))
    units = lora_units(model)
    assert len(units) == 4
    assert units[0].a == "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    source = MergedWeights(model, reader(model))
    assert source.names == tuple(sorted(tiny_llama(tied=False).state_dict()))
    name = units[0].name
    layer = model.get_submodule(name.removesuffix(".weight"))
    torch.testing.assert_close(
        source.tensor(name), layer.base_layer.weight + layer.get_delta_weight("default")
    )


def test_without_the_adapter_the_base_comes_back_bit_for_bit() -> None:
    for tied in (True, False):
        base = tiny_llama(tied=tied)
        expected = {name: value.clone() for name, value in base.state_dict().items()}
        options = {} if tied else {"modules_to_save": ["lm_head"]}
        model = adapted(base, ATTENTION, **options)
        source = MergedWeights(model, reader(model), adapted=False)
        assert source.names == tuple(sorted(expected.keys() - ({"lm_head.weight"} if tied else ())))
        for name in source.names:
            assert torch.equal(source.tensor(name), expected[name]), name


def test_before_the_first_step_the_merged_weights_are_the_base() -> None:
    expected = {name: value.clone() for name, value in tiny_llama().state_dict().items()}
    config = peft.LoraConfig(target_modules=[*ATTENTION, "down_proj"], r=3)
    model = peft.get_peft_model(tiny_llama(), config)
    source = MergedWeights(model, reader(model))
    for name in source.names:
        assert torch.equal(source.tensor(name), expected[name]), name


def test_a_bfloat16_base_gives_float32_where_it_is_changed() -> None:
    """TB77: rounding the sum back loses some of the adapter, so that is left to whoever writes."""
    model = adapted(tiny_llama().to(torch.bfloat16), ATTENTION)
    source = MergedWeights(model, reader(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert source.dtype(name) == source.tensor(name).dtype == torch.float32
    assert source.dtype("model.norm.weight") == torch.bfloat16
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    expected = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    torch.testing.assert_close(source.tensor(name).double(), expected, rtol=1e-6, atol=1e-6)


def test_shapes_do_not_come_from_empty_placeholders() -> None:
    """TB75: under ZeRO-3 every parameter is empty; its shape is in ds_shape."""
    model = adapted(Mixed(), MIXED)
    expected = lora_units(model)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    values |= dict(model.named_buffers())
    whole = MergedWeights(model, reader(model))
    reference = {name: whole.tensor(name).clone() for name in whole.names}
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert lora_units(model) == expected
    source = MergedWeights(model, values.__getitem__)
    for name in source.names:
        assert source.shape(name) == tuple(reference[name].shape)
        assert torch.equal(source.tensor(name), reference[name]), name


def test_frozen_units_change_weights_and_are_marked() -> None:
    model = adapted(tiny_llama(tied=False), ATTENTION)
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(False)
    assert [unit.is_trained for unit in lora_units(model)] == [False, False, True, True]
    assert_same_as_peft(model)


def test_an_inactive_frozen_adapter_takes_no_part() -> None:
    """TRL's reference adapter."""
    model = adapted(tiny_llama(tied=False), ATTENTION)
    expected = lora_units(model)
    model.add_adapter("reference", peft.LoraConfig(target_modules=["down_proj"], r=2))
    model.set_adapter("default")
    assert lora_units(model) == expected
    assert plain_parameters(model) == ()
    assert_same_as_peft(model)


def test_ties_of_copies_are_kept_where_peft_keeps_them() -> None:
    options = {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}
    model = adapted(tiny_llama(), ATTENTION, **options)
    assert plain_parameters(model) == (
        "base_model.model.model.embed_tokens.modules_to_save.default.weight",
    )
    assert_same_as_peft(model, missing=("lm_head.weight",))


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}],
    ids=["a copy of the head", "an adapter on the embedding"],
)
def test_half_a_tie_cannot_be_written_but_merged(options: dict) -> None:
    targets = options.pop("target_modules", ATTENTION)
    model = adapted(tiny_llama(), targets, **options)
    assert lora_units(model)
    with pytest.raises(TrainingError, match=r"lm_head\.weight are tied.*tie_word_embeddings"):
        MergedWeights(model, reader(model))


def quantised(model: nn.Module) -> nn.Module:
    """A base weight as bitsandbytes keeps it: bytes of another shape."""
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(72, 1, dtype=torch.uint8), requires_grad=False)
    return model


def test_a_quantised_base_is_merged_on_factors_and_not_written() -> None:
    plain = adapted(tiny_llama(), ATTENTION)
    expected = lora_units(plain)
    model = quantised(plain)
    assert lora_units(model) == expected
    with pytest.raises(TrainingError, match=r"q_proj\.weight is quantised.*merge_and_unload"):
        MergedWeights(model, reader(model))


def with_two_active(model: nn.Module) -> nn.Module:
    model.add_adapter("other", peft.LoraConfig(target_modules=ATTENTION, r=2))
    model.base_model.set_adapter(["default", "other"])
    return model


def with_a_frozen_factor(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def without_training(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def while_merged(model: nn.Module) -> nn.Module:
    model.merge_adapter()
    return model


def while_disabled(model: nn.Module) -> nn.Module:
    model.base_model.disable_adapter_layers()
    return model


def with_a_trained_outsider(model: nn.Module) -> nn.Module:
    model.add_adapter("other", peft.LoraConfig(target_modules=ATTENTION, r=2))
    model.set_adapter("default")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["other"].weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_two_active, r"\['default', 'other'\] are active at once.*set_adapter"),
        (with_a_frozen_factor, r"factor A is frozen.*LoRA-FA.*train both"),
        (without_training, r"'default' is active but frozen.*is_trainable"),
        (while_merged, r"'default' is merged into its base.*unmerge_adapter"),
        (while_disabled, r"adapters are disabled.*enable_adapter_layers"),
        (with_a_trained_outsider, r"'other' is trainable and not active.*set_adapter"),
    ],
)
def test_states_that_are_no_run_of_one_adapter_are_refused(
    change: Callable[[nn.Module], nn.Module], words: str
) -> None:
    with pytest.raises(TrainingError, match=words):
        lora_units(change(adapted(tiny_llama(), ATTENTION)))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.attention = nn.MultiheadAttention(6, 2)
        self.line = nn.Linear(9, 7)


@pytest.mark.parametrize(
    ("targets", "options", "words"),
    [
        (["line"], {"use_dora": True}, r"line\.weight: DoRA \(use_dora=True\)"),
        (["line"], {"lora_bias": True}, r"line\.weight: a bias on lora_B \(lora_bias=True\)"),
        (["line"], {"init_lora_weights": "mica"}, r"MiCA"),
        (["line"], {"kasa_config": peft.KasaConfig()}, r"KaSA"),
        (["conv"], {"r": 4}, r"groups=2"),
        (["attention"], {}, r"nn\.MultiheadAttention"),
        ([], {"target_parameters": ["line.weight"]}, r"target_parameters"),
        (["line"], {"lora_alpha": 0}, r"lora_alpha is 0"),
    ],
)
def test_lora_that_is_not_plain_is_refused_by_name(
    targets: list[str], options: dict, words: str
) -> None:
    model = adapted(Grouped(), targets, **options)
    with pytest.raises(TrainingError, match=words) as caught:
        lora_units(model)
    assert "or train without soupkit" in str(caught.value) or "set it above 0" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: peft.IA3Config(target_modules=["line"], feedforward_modules=[]), "IA3"),
        (lambda: peft.VeraConfig(target_modules=["line"], r=2), "VERA"),
        (lambda: peft.LoHaConfig(target_modules=["line"], r=2), "LOHA"),
        (lambda: peft.OFTConfig(target_modules=["line"], oft_block_size=3), "OFT"),
        (lambda: peft.AdaLoraConfig(target_modules=["line"], total_step=9), "ADALORA"),
    ],
)
def test_other_tuners_are_refused_by_name(config: Callable, words: str) -> None:
    model = peft.get_peft_model(Grouped(), config())
    assert is_peft(model)
    with pytest.raises(TrainingError, match=f"'default' is {words}; only LoRA"):
        lora_units(model)


def test_prompts_and_trained_tokens_are_refused_by_name() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(TrainingError, match="PROMPT_TUNING"):
        lora_units(peft.get_peft_model(tiny_llama(), config))
    model = adapted(tiny_llama(), ATTENTION, trainable_token_indices=[1, 2])
    with pytest.raises(TrainingError, match="embed_tokens: TrainableTokens"):
        lora_units(model)


def test_factors_that_share_memory_are_refused() -> None:
    """PEFT ties an embedding's factors to the head's as two parameters on one memory."""
    model = adapted(tiny_llama(), ["embed_tokens", "lm_head"], ensure_weight_tying=True)
    with pytest.raises(TrainingError, match=r"share one memory.*ensure_weight_tying"):
        lora_units(model)


def test_a_plain_model_is_no_peft_model() -> None:
    assert not is_peft(tiny_llama())
    with pytest.raises(TrainingError, match="no LoRA adapter is active"):
        lora_units(tiny_llama())


def test_the_merged_model_computes_what_the_adapted_one_does() -> None:
    model = adapted(tiny_llama(), [*ATTENTION, "down_proj"]).eval()
    source = MergedWeights(model, reader(model))
    plain = tiny_llama(seed=9).eval()
    plain.load_state_dict({name: source.tensor(name) for name in source.names}, strict=False)
    ids = torch.arange(LENGTH).unsqueeze(0) % VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
