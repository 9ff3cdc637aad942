"""A variant's tensors in vLLM's merged and split modules, and modules that act per slot, without
vLLM: stand-ins with a quantisation method each, and a dense float64 witness.
"""

from types import SimpleNamespace
from typing import Any

import delta_kit
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from soupkit.errors import ServingError
from soupkit.serving.patches import BASE_SLOT
from soupkit.serving.vllm.bank import Bank, Sites
from soupkit.serving.vllm.batch import Batch
from soupkit.serving.vllm.places import (
    Layout,
    Part,
    Place,
    padded,
    place_of,
    qkv_parts,
    split,
    whole,
)
from soupkit.serving.vllm.sites import EmbeddingSite, LinearSite, NormSite
from soupkit_kernels import Delta

ENCODINGS = delta_kit.ENCODINGS


def dense(value: Any) -> np.ndarray:
    if isinstance(value, Delta):
        return delta_kit.dense(value, (value.out_features, value.in_features))
    return np.asarray(value, dtype=np.float64)


def delta(rows: int, columns: int, encoding: Any, seed: int = 0) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    return delta_kit.make_delta(rows, columns, encoding, generator)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 4, 1), (8, 4, 2), (8, 2, 4), (8, 1, 8)]
)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ranks_hold_the_rows_of_their_heads_and_copies_of_shared_ones(
    heads: int, kv_heads: int, ranks: int, encoding: Any
) -> None:
    size, columns = 3, 33
    q, k = delta(heads * size, columns, encoding), delta(kv_heads * size, columns, encoding, 1)
    for rank in range(ranks):
        parts = qkv_parts(heads, kv_heads, (size, size), ranks=ranks, rank=rank)
        layout = Layout(parts, whole(columns))
        mine = dense(layout.shares(q, 0)[0])
        own_heads = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        assert np.array_equal(
            mine, dense(q).reshape(heads, size, -1)[own_heads].reshape(-1, columns)
        )
        # Query head h reads key/value head h * kv_heads // heads.
        read = sorted({head * kv_heads // heads for head in own_heads})
        there = dense(k).reshape(kv_heads, size, -1)[read].reshape(-1, columns)
        assert np.array_equal(dense(layout.shares(k, 1)[1]), there)
        assert layout.rows == (len(own_heads) + 2 * len(read)) * size


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("columns", "ranks"), [(64, 2), (96, 3), (40, 4), (44, 4)])
def test_row_parallel_ranks_sum_to_the_whole(columns: int, ranks: int, encoding: Any) -> None:
    value, x = delta(7, columns, encoding), np.random.default_rng(0).normal(size=(5, columns))
    total = np.zeros((5, 7))
    for rank in range(ranks):
        share = Layout((whole(7),), split(columns, ranks, rank)).shares(value, None)[0]
        width = columns // ranks
        total += x[:, rank * width : (rank + 1) * width] @ dense(share).T
    assert total == pytest.approx(x @ dense(value).T, abs=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_tensor_that_is_joined_in_the_checkpoint_is_cut_into_its_parts(encoding: Any) -> None:
    gate_up = delta(24, 17, encoding)
    for rank in (0, 1):
        layout = Layout((split(16, 2, rank), split(8, 2, rank)), whole(17))
        shares = layout.shares(gate_up, None)
        rows = dense(gate_up)
        assert np.array_equal(dense(shares[0]), rows[8 * rank : 8 * rank + 8])
        assert np.array_equal(dense(shares[1]), rows[16 + 4 * rank : 20 + 4 * rank])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_padding_of_a_vocabulary_is_zero(encoding: Any) -> None:
    value = delta(10, 9, encoding)
    # The second of two ranks: ids 6 to 9 of 10, in six rows.
    share = Layout((Part(10, 6, 4, padding=2),), whole(9)).shares(value, None)[0]
    assert np.array_equal(dense(share), np.vstack([dense(value)[6:], np.zeros((2, 9))]))
    vector = padded(torch.ones(3), 2)
    assert isinstance(vector, Tensor)
    assert vector.tolist() == [1, 1, 1, 0, 0]


def test_another_shape_is_refused_with_both() -> None:
    layout = Layout((whole(7),), whole(9))
    with pytest.raises(ValueError, match=r"\(8, 9\), the base's is \(7, 9\)"):
        layout.shares(torch.zeros(8, 9), None)


def test_names_are_found_in_joined_modules() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    names = ["m.0.attn.qkv_proj", "m.0.mlp.gate_up_proj", "m.0.mlp.down_proj", "qkv_proj"]
    assert place_of("m.0.attn.k_proj.bias", names, packed) == Place("m.0.attn.qkv_proj", 1, "bias")
    assert place_of("m.0.mlp.down_proj.weight", names, packed) == Place(
        "m.0.mlp.down_proj", None, "weight"
    )
    assert place_of("m.0.attn.qkv_proj.weight", names, packed) == Place(
        "m.0.attn.qkv_proj", None, "weight"
    )
    assert place_of("v_proj.weight", names, packed) == Place("qkv_proj", 2, "weight")
    assert place_of("m.1.attn.k_proj.weight", names, packed) is None


# -- sites --


class Method:
    """vLLM's quantisation method of a plain weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, layer.weight)


class Module(nn.Module):
    """A linear, an embedding or a head of vLLM's, as far as sites know them."""

    def __init__(self, rows: int, columns: int, *, has_bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randn(rows, columns, generator=generator) * 0.05
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = torch.randn(rows, generator=generator)
        self.bias = nn.Parameter(bias, requires_grad=False) if has_bias else None
        self.quant_method: Any = Method()


class Norm(nn.Module):
    """vLLM's RMSNorm, as far as sites know it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size), requires_grad=False)
        self.pass_weight = self.pass_weight_add = True

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        summed = x if residual is None else x + residual
        normed = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-6)
        normed = normed * self.weight if self.pass_weight else normed
        return normed if residual is None else (normed, summed)

    forward = forward_native


def bank_with(sites: Any) -> Bank:
    bank = Bank(3, device=torch.device("cpu"), pins=frozenset())
    bank.attach(Sites(sites(bank), {}, {}, lambda name: name, {}))
    return bank


TOKENS = [BASE_SLOT, 0, 2, 0, 1, 2, 2]


def batch() -> Batch:
    return Batch(TOKENS, [0, BASE_SLOT, 2], torch.device("cpu"), 1)


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_joined_linear_acts_per_row_whatever_its_parts_hold(fuses: bool, has_bias: bool) -> None:
    """Beside the base's product, and (as on a GPU) in one kernel."""
    layout = Layout((whole(6), whole(3), whole(4)), whole(11))
    module = Module(13, 11, has_bias=has_bias)
    bank = Bank(3, device=torch.device("cpu"), pins=frozenset())
    site = LinearSite(bank, module, 3, layout, dtype=torch.float32, fuses=fuses)
    generator = torch.Generator().manual_seed(5)
    contents: list[dict[int, Any]] = [
        {0: delta(6, 11, ENCODINGS[3]), 1: torch.randn(3, 11, generator=generator)},
        {},
        {0: delta(6, 11, ENCODINGS[7]), 2: delta(4, 11, ENCODINGS[5])},
    ]
    if has_bias:
        contents[2][-2] = torch.randn(3, generator=generator)
    weights, biases = [], []
    for slot, content in enumerate(contents):
        site.need(content)
        site.put(slot, content)
        weight = module.weight.double().numpy().copy()
        bias = module.bias.double().numpy().copy() if module.bias is not None else np.zeros(13)
        for part, value in content.items():
            at = layout.offset(part if part >= 0 else -1 - part)
            rows = slice(at, at + layout.parts[part if part >= 0 else -1 - part].local)
            if part < 0:
                bias[rows] = dense(value)
            elif isinstance(value, Delta):
                weight[rows] += dense(value)
            else:
                weight[rows] = dense(value)
        weights.append(weight)
        biases.append(bias)
    x = torch.randn(7, 11, generator=generator)
    plain = module.quant_method.apply(module, x, module.bias)
    bank.batch = batch()
    found = module.quant_method.apply(module, x, module.bias)
    for row, slot in enumerate(TOKENS):
        if slot == BASE_SLOT:
            assert torch.equal(found[row], plain[row]) or found[row].tolist() == pytest.approx(
                plain[row].tolist(), abs=1e-5
            )
            continue
        expected = x[row].double().numpy() @ weights[slot].T + biases[slot]
        assert found[row].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    # What is cleared leaves nothing, and the same module acts as the base again.
    for slot in range(3):
        site.clear(slot)
    assert torch.equal(module.quant_method.apply(module, x, module.bias), plain)
    assert all(not arena.data.any() for arena in site.arenas.values())


def test_ranks_that_sum_add_a_bias_once() -> None:
    """vLLM gives the bias to the first rank only; the others add none of a variant's own."""
    module = Module(5, 4, has_bias=True)
    bank = Bank(2, device=torch.device("cpu"), pins=frozenset())
    site = LinearSite(bank, module, 2, Layout((whole(5),), whole(4)), dtype=torch.float32)
    content = {-1: torch.arange(5.0)}
    site.need(content)
    site.put(1, content)
    bank.batch = Batch([1], [1], torch.device("cpu"), 1)
    x = torch.ones(1, 4)
    without = module.quant_method.apply(module, x, None)
    assert torch.equal(without, nn.functional.linear(x, module.weight))
    assert torch.equal(
        module.quant_method.apply(module, x, module.bias), without + torch.arange(5.0)
    )


def test_a_slot_that_had_a_bias_and_a_norm_of_its_own_has_the_bases_again() -> None:
    module, norm = Module(5, 4, has_bias=True), Norm(4)
    bank = Bank(1, device=torch.device("cpu"), pins=frozenset())
    linear = LinearSite(bank, module, 1, Layout((whole(5),), whole(4)), dtype=torch.float32)
    own = NormSite(bank, norm, 1)
    change = delta(5, 4, ENCODINGS[0])
    contents: list[dict[int, Any]] = [{-1: torch.ones(5)}, {0: torch.ones(5, 4)}, {0: change}]
    for content in contents:
        linear.need(content)
        linear.put(0, content)
    own.put(0, {0: torch.zeros(4)})
    own.clear(0)
    own._held |= {0}  # as if another variant had a norm there that is the base's
    bank.batch = Batch([0], [0], torch.device("cpu"), 1)
    x = torch.ones(1, 4)
    found = module.quant_method.apply(module, x, module.bias)
    weight = module.weight.double().numpy() + dense(change)
    assert module.bias is not None
    expected = weight.sum(1) + module.bias.double().numpy()
    assert found[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert torch.allclose(norm(x), norm.forward_native(x))


def test_embeddings_heads_and_norms_act_per_row() -> None:
    table, norm = Module(12, 8), Norm(8)
    bank = Bank(3, device=torch.device("cpu"), pins=frozenset())
    layout = Layout((Part(10, 0, 10, padding=2),), whole(8))
    embedding = EmbeddingSite(bank, table, 3, layout, dtype=torch.float32)
    head = LinearSite(bank, table, 3, layout, dtype=torch.float32, is_head=True)
    own = NormSite(bank, norm, 3)
    change = delta(10, 8, ENCODINGS[0])
    share = {0: layout.shares(change, None)[0]}
    for site, content in ((embedding, share), (head, share), (own, {0: torch.arange(8.0)})):
        site.need(content)
        site.put(2, content)
    bank.batch = batch()
    ids = torch.tensor([0, 9, 3, 3, 1, 0, 9])
    moved = table.weight.double().numpy().copy()
    moved[:10] += dense(change)
    found = table.quant_method.embedding(table, ids)
    x = torch.randn(3, 8)
    logits = table.quant_method.apply(table, x)
    for row, slot in enumerate(TOKENS):
        expected = moved if slot == 2 else table.weight.double().numpy()
        assert found[row].tolist() == pytest.approx(expected[ids[row]].tolist(), abs=1e-6)
    for row, slot in enumerate([0, BASE_SLOT, 2]):
        expected = moved if slot == 2 else table.weight.double().numpy()
        wanted = x[row].double().numpy() @ expected.T
        assert logits[row].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    # Heads of attention in an axis of their own, and folded into the tokens'.
    states = torch.randn(7, 2, 8)
    for given in (states, states.reshape(14, 8)):
        normed = norm(given).reshape(7, 2, 8)
        for row, slot in enumerate(TOKENS):
            unit = states[row] * torch.rsqrt(states[row].square().mean(-1, keepdim=True) + 1e-6)
            weight = torch.arange(8.0) if slot == 2 else norm.weight
            assert torch.allclose(normed[row], unit * weight, atol=1e-6)
    normed, residual = norm(states, states)
    assert torch.equal(residual, states + states)


def test_logits_of_a_prompt_are_those_of_its_tokens() -> None:
    rows = batch()
    rows.prompt = range(2, 5)
    assert rows.rows(3, is_head=True)._slots.tolist() == TOKENS[2:5]
    rows.prompt = None
    assert rows.rows(3, is_head=True)._slots.tolist() == [0, BASE_SLOT, 2]
    with pytest.raises(ServingError, match="given 4 rows, the batch has 3"):
        rows.rows(4, is_head=True)
    with pytest.raises(ServingError, match="given 9 rows, the batch has 7"):
        rows.rows(9, is_head=False)


# -- bank --


def variant(deltas: dict[str, Delta], **raw: Tensor) -> Any:
    manifest = SimpleNamespace(tensors=(), per_module=False)
    return SimpleNamespace(deltas=deltas, raw=raw, manifest=manifest)


def linear_bank(slots: int = 3, pins: frozenset[str] = frozenset()) -> tuple[Bank, Module]:
    module = Module(5, 8)
    bank = Bank(slots, device=torch.device("cpu"), pins=pins)
    site = LinearSite(bank, module, slots, Layout((whole(5),), whole(8)), dtype=torch.float32)
    refused = {"gate": "Router is no module that acts per token here"}
    bank.attach(Sites({"a": [site]}, refused, {}, lambda name: name, {}))
    return bank, module


def answers(bank: Bank, module: Module, numbers: list[int]) -> Tensor:
    bank.set_batch(numbers, numbers)
    return module.quant_method.apply(module, torch.ones(len(numbers), 8))


def test_variants_that_need_the_same_slots_take_turns_and_answer_as_themselves() -> None:
    bank, module = linear_bank(slots=2)
    deltas = {n: delta(5, 8, ENCODINGS[n], seed=n) for n in range(1, 6)}
    for number, value in deltas.items():
        bank.register(number, f"v{number}", variant({"a.weight": value}))
    for numbers in ([1, 2], [3, 0, 1], [4, 5], [5, 4, 4], [2], [0], [1, 3]):
        found = answers(bank, module, numbers)
        for row, number in enumerate(numbers):
            weight = module.weight.double().numpy()
            weight = weight + dense(deltas[number]) if number else weight
            assert found[row].tolist() == pytest.approx(weight.sum(1).tolist(), abs=1e-5)
    # The least recently used left, and what a batch has stays where it is.
    assert list(bank.resident) == [1, 3]
    for numbers in ([5], [4]):
        answers(bank, module, numbers)
    slot = bank.resident[5]
    answers(bank, module, [1, 5])
    assert bank.resident[5] == slot
    answers(bank, module, [1, 3])
    for numbers in ([1], [2]):
        answers(bank, module, numbers)
    assert set(bank.resident) == {1, 2}
    answers(bank, module, [1, 3])
    assert bank.drop(1)
    assert not bank.drop(1)
    assert list(bank.resident) == [3]
    # Never the base in place of a variant; but vLLM warms up with numbers that are none.
    with pytest.raises(ServingError, match=r"\[77\] are not registered"):
        answers(bank, module, [77, 3])
    bank.set_batch([77], [77], warm_up=frozenset({77}))
    assert bank.batch is None


def test_a_pinned_variant_leaves_its_slot_last() -> None:
    bank, module = linear_bank(slots=3, pins=frozenset({"v1"}))
    for number in range(1, 6):
        bank.register(number, f"v{number}", variant({"a.weight": delta(5, 8, ENCODINGS[0])}))
    answers(bank, module, [1])
    for numbers in ([2, 3], [4, 5], [3, 2]):
        answers(bank, module, numbers)
        assert 1 in bank.resident


def test_what_has_no_place_is_refused_by_name_and_nothing_is_registered() -> None:
    bank, _ = linear_bank()
    value = delta(5, 8, ENCODINGS[0])
    for name, tensor, message in (
        ("b.weight", value, "no such parameter"),
        ("gate.weight", value, "Router is no module that acts per token"),
        ("a.bias", torch.zeros(5), "adds no bias"),
        ("a.scale", torch.zeros(5), "only weights and biases"),
        ("a.weight", delta(6, 8, ENCODINGS[0]), r"shape \(6, 8\), the base's is \(5, 8\)"),
    ):
        given = {name: tensor} if isinstance(tensor, Delta) else {}
        raw = {} if given else {name: tensor}
        with pytest.raises(ServingError, match=message):
            bank.register(
                1,
                "x",
                SimpleNamespace(
                    deltas=given, raw=raw, manifest=SimpleNamespace(tensors=(), per_module=False)
                ),
            )
    assert not bank.numbers


def test_slots_grow_for_a_form_that_is_new_and_keep_what_they_hold() -> None:
    bank, module = linear_bank()
    first, second = delta(5, 8, ENCODINGS[0]), delta(5, 8, ENCODINGS[7], seed=2)
    bank.register(1, "v1", variant({"a.weight": first}))
    before = answers(bank, module, [1])
    bank.register(
        2,
        "v2",
        variant(
            {"a.weight": second},
        ),
    )
    assert torch.equal(answers(bank, module, [1]), before)
    weight = module.weight.double().numpy() + dense(second)
    assert answers(bank, module, [2])[0].tolist() == pytest.approx(weight.sum(1).tolist(), abs=1e-5)
