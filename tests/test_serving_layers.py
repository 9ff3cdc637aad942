"""Variants inside a model: equal to dense models, out again without a trace, refused where they
cannot act.
"""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_kit import VARIANTS, dense, load_variant, make_family
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from soupkit.encoding import Encoding, decode, encode
from soupkit.errors import ServingError
from soupkit.serving import patches
from soupkit.serving.layers import VariantBank, ties
from soupkit.serving.patches import DeltaPatch
from soupkit.serving.probe import TokenWise, token_wise
from soupkit.serving.shape import SlotShape, outline
from soupkit_kernels import DeltaArena


def bank_of(model: Any) -> VariantBank:
    return VariantBank(
        model, vocab_size=model.config.vocab_size, head=model.get_output_embeddings()
    )


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Qwen3 has q_norm and k_norm on [batch, tokens, heads, head_dim] and here biases; its head is
    # its own.
    return make_family(
        tmp_path_factory.mktemp(request.param), kind=request.param, tied=request.param == "llama"
    )


@pytest.fixture
def served(root: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    return model


def load_all(bank: VariantBank, root: Path) -> dict[str, int]:
    slots = {name: slot for slot, name in enumerate(VARIANTS)}
    for name, slot in slots.items():
        variant = load_variant(root, name)
        bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))
    return slots


@torch.no_grad()
def test_each_variant_alone_equals_its_dense_model(root: Path, served: Any) -> None:
    bank = bank_of(served)
    ids = torch.randint(5, 200, (1, 17))
    plain = served(input_ids=ids).logits
    for name, slot in load_all(bank, root).items():
        bank.set_batch([slot] * 17, [slot] * 17)
        got = served(input_ids=ids).logits
        expected = dense(root, name)(input_ids=ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert (got - plain).abs().max() > 0.1, "the variant did nothing"
    bank.set_batch([-1] * 17, [-1] * 17)
    assert torch.equal(served(input_ids=ids).logits, plain)


@torch.no_grad()
def test_close_leaves_the_plain_base(root: Path, served: Any) -> None:
    ids = torch.randint(5, 200, (1, 9))
    plain = served(input_ids=ids).logits
    bank = bank_of(served)
    load_all(bank, root)
    bank.set_batch([0] * 9, [0] * 9)
    bank.close()
    assert torch.equal(served(input_ids=ids).logits, plain)
    assert all("forward" not in module.__dict__ for module in served.modules())


@torch.no_grad()
def test_rows_of_one_batch_do_not_see_each_other(root: Path, served: Any) -> None:
    """Token-wise modules only, so rows of all variants can be mixed in one call and compared one by
    one.
    """
    bank = bank_of(served)
    slots = [-1, *load_all(bank, root).values()]
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, len(slots), (23,), generator=generator).tolist()
    mixed = [slots[row] for row in rows]
    layer = served.model.layers[0]
    x = torch.randn(1, 23, served.config.hidden_size, generator=generator)

    def act(tensor: torch.Tensor) -> torch.Tensor:
        return layer.mlp(layer.input_layernorm(tensor))

    bank.set_batch(mixed, mixed)
    together = act(x)
    for at, slot in enumerate(mixed):
        bank.set_batch([slot], [slot])
        torch.testing.assert_close(
            together[:, at : at + 1], act(x[:, at : at + 1]), rtol=1e-5, atol=1e-5
        )


def test_an_occupied_slot_is_never_overwritten(root: Path, served: Any) -> None:
    bank = bank_of(served)
    variant = load_variant(root, "linear")
    bank.load(0, variant.deltas, variant.raw)
    with pytest.raises(ValueError, match="slot 0 is occupied"):
        bank.load(0, variant.deltas, variant.raw)
    bank.free(0)
    bank.load(0, variant.deltas, variant.raw)
    with pytest.raises(ValueError, match="slot 7 is empty"):
        bank.free(7)


def arenas_of(bank: VariantBank) -> dict[str, DeltaArena]:
    return {
        name: patch.arena
        for name, patch in bank._patches.items()
        if isinstance(patch, DeltaPatch) and patch.arena is not None
    }


def test_slots_of_the_arenas_are_those_of_the_bank(root: Path, served: Any) -> None:
    """A slot holds what its variant changes there; freed, it is empty and zero."""
    bank = bank_of(served)
    slots = load_all(bank, root)
    arenas, stored = arenas_of(bank), 0
    for name, slot in slots.items():
        variant = load_variant(root, name)
        stored += sum(delta.nbytes for delta in variant.deltas.values())
        for module_name, arena in arenas.items():
            given = variant.deltas.get(f"{module_name}.weight")
            if given is None and module_name == "lm_head":
                continue  # it may be tied
            delta = arena.delta(slot)
            assert (delta is None) == (given is None)
            if delta is not None and given is not None:
                assert torch.equal(decode(delta), decode(given))
    assert sum(arena.data.nbytes for arena in arenas.values()) >= stored
    assert bank.arena_bytes == len(slots) * bank.shape.nbytes
    bank.free(slots["matrix"])
    for arena in arenas.values():
        assert arena.is_empty(slots["matrix"])
        at = slots["matrix"] * arena.slot_bytes
        assert not arena.data[at : at + arena.slot_bytes].any()


def family_shape(bank: VariantBank, root: Path) -> SlotShape:
    shape = SlotShape()
    for name in VARIANTS:
        manifest = load_variant(root, name).manifest
        shape = shape.merged(bank.shape_of(*outline(manifest), **ties(manifest)))
    return shape


def addresses(bank: VariantBank) -> list[tuple[int, tuple[int, ...]]]:
    """Of all memory that a forward reads, with its shapes."""
    parts = [part for arena in arenas_of(bank).values() for part in (arena.data, arena.table)]
    for patch in bank._patches.values():
        parts += patch.whole._tables.values()
    return [(part.data_ptr(), tuple(part.shape)) for part in parts]


@torch.no_grad()
def test_reserved_slots_are_exact_and_loading_moves_nothing(root: Path, served: Any) -> None:
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 11))
    shape = family_shape(bank, root)
    bank.reserve(3, shape)
    assert (bank.num_slots, bank.arena_bytes) == (3, 3 * shape.nbytes)
    before = addresses(bank)
    # Each slot is every variant in turn.
    for turn in range(len(VARIANTS)):
        for slot in range(3):
            name = list(VARIANTS)[(turn + slot) % len(VARIANTS)]
            variant = load_variant(root, name)
            assert shape.takes(bank.shape_of(variant.deltas, variant.raw, **ties(variant.manifest)))
            bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))
            bank.set_batch([slot] * 11, [slot] * 11)
            expected = dense(root, name)(input_ids=ids).logits
            torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        for slot in range(3):
            bank.free(slot)
    assert addresses(bank) == before
    assert bank.arena_bytes == 3 * shape.nbytes


@torch.no_grad()
def test_a_slot_full_of_nan_is_written_whole(root: Path, served: Any) -> None:
    """Rule R4: whatever lay in a slot, nothing of it is left in what comes next."""
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 11))
    bank.reserve(2, family_shape(bank, root))
    for name in VARIANTS:
        for arena in arenas_of(bank).values():
            arena.data.fill_(0xFF)
        for patch in bank._patches.values():
            for local, table in patch.whole._tables.items():
                # The base's row, and what slots without a vector of their own repeat, stay.
                if table.ndim > 1 and not patch.whole._is_vector(local):
                    table.fill_(float("nan"))
        variant = load_variant(root, name)
        bank.load(1, variant.deltas, variant.raw, **ties(variant.manifest))
        # Mixed with base rows, too, which read the table's other rows.
        for slots in ([1] * 11, [1, -1] * 5 + [1]):
            bank.set_batch(slots, slots)
            assert served(input_ids=ids).logits.isfinite().all()
        bank.set_batch([1] * 11, [1] * 11)
        expected = dense(root, name)(input_ids=ids).logits
        torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        bank.free(1)


@torch.no_grad()
def test_slots_are_made_anew_under_residents(root: Path, served: Any) -> None:
    """Larger, more and fewer slots; a resident that has no place there stops it."""
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 11))
    linear = load_variant(root, "linear")
    small = bank.shape_of(linear.deltas, linear.raw, **ties(linear.manifest))
    bank.reserve(4, small)
    for slot in (0, 1):
        bank.load(slot, linear.deltas, linear.raw, **ties(linear.manifest))
    large = family_shape(bank, root)
    assert large.nbytes > small.nbytes
    assert not small.takes(large)
    before = addresses(bank)
    with pytest.raises(ValueError, match=r"slots \[1\] hold variants"):
        bank.reserve(1, large)
    assert addresses(bank) == before
    for slots, shape in ((2, large), (5, large), (3, large)):
        bank.reserve(slots, shape)
        assert (bank.num_slots, bank.arena_bytes) == (slots, slots * shape.nbytes)
        bank.set_batch([1] * 11, [1] * 11)
        expected = dense(root, "linear")(input_ids=ids).logits
        torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    matrix = load_variant(root, "matrix")
    bank.load(2, matrix.deltas, matrix.raw, **ties(matrix.manifest))
    with pytest.raises(ValueError, match=r"slots \[2\] hold variants"):
        bank.reserve(3, small)
    bank.free(2)
    # What nobody needs any more is the plain module again.
    bank.reserve(2, small)
    assert bank.arena_bytes == 2 * small.nbytes
    patched = sum("forward" in module.__dict__ for module in served.modules())
    assert patched == len(small.modules)


@torch.no_grad()
def test_norms_of_a_mixed_batch_run_once(root: Path, served: Any) -> None:
    """Vectors of each token, gathered; equal to the variant's own module bit for bit."""
    bank = bank_of(served)
    slots = load_all(bank, root)
    norm = served.model.layers[0].input_layernorm
    whole = bank._patches["model.layers.0.input_layernorm"].whole
    mixed = [slots["norms"], -1, slots["matrix"], slots["linear"], slots["norms"]]
    x = torch.randn(1, 5, served.config.hidden_size)
    bank.set_batch(mixed, mixed)
    together = norm(x)
    assert not whole._clones, "a clone ran for a variant"
    for at, slot in enumerate(mixed):
        bank.set_batch([slot], [slot])
        assert torch.equal(together[:, at : at + 1], norm(x[:, at : at + 1]))


@torch.no_grad()
def test_a_variant_in_another_s_slot_is_itself(root: Path, served: Any) -> None:
    """Nothing of the old variant remains, whichever is the larger."""
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 11))
    for name in ("matrix", "linear", "embed", "norms", "matrix"):
        variant = load_variant(root, name)
        bank.load(0, variant.deltas, variant.raw, **ties(variant.manifest))
        bank.set_batch([0] * 11, [0] * 11)
        expected = dense(root, name)(input_ids=ids).logits
        torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        bank.free(0)


@torch.no_grad()
def test_one_plan_serves_all_layers_of_a_batch(
    root: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, made = bank_of(served), []
    slots = [-1, *load_all(bank, root).values()]
    plan_of = patches.plan_of

    def counted(*args: Any, **rest: Any) -> Any:
        made.append(args)
        return plan_of(*args, **rest)

    monkeypatch.setattr(patches, "plan_of", counted)
    tokens = [slots[at % len(slots)] for at in range(17)]
    bank.set_batch(tokens, tokens)
    served(input_ids=torch.randint(5, 200, (1, 17)))
    assert "lm_head" in arenas_of(bank)
    assert len(made) == 1
    bank.set_batch(tokens, [tokens[-1]])
    served(input_ids=torch.randint(5, 200, (1, 17)), logits_to_keep=1)
    # The rows of the head have one of their own, as they are others.
    assert len(made) == 3


@torch.no_grad()
def test_larger_variants_may_come_in_the_middle_of_a_batch(root: Path, served: Any) -> None:
    """More planes and more slots than the batch's plan was made for."""
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 13))
    linear = load_variant(root, "linear")
    bank.load(0, linear.deltas, linear.raw, **ties(linear.manifest))
    bank.set_batch([0, -1] * 6 + [0], [0])
    layer = served.model.layers[0].mlp
    x = torch.randn(1, 13, served.config.hidden_size)
    before = layer(x)
    matrix = load_variant(root, "matrix")
    bank.load(5, matrix.deltas, matrix.raw, **ties(matrix.manifest))
    torch.testing.assert_close(layer(x), before)
    assert {arena.slots for arena in arenas_of(bank).values()} == {6}
    bank.set_batch([5] * 13, [5] * 13)
    expected = dense(root, "matrix")(input_ids=ids).logits
    torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_forwards_on_another_thread_never_see_half_an_arena(root: Path, served: Any) -> None:
    bank, ids = bank_of(served), torch.randint(5, 200, (1, 7))
    linear, matrix = load_variant(root, "linear"), load_variant(root, "matrix")
    bank.load(0, linear.deltas, linear.raw, **ties(linear.manifest))
    done, wrong = threading.Event(), []

    @torch.no_grad()
    def generate() -> None:
        bank.set_batch([0] * 7, [0] * 7)
        expected = served(input_ids=ids).logits
        count = 0
        while not done.is_set() or count < 3:
            bank.set_batch([0] * 7, [0] * 7)
            wrong.append(not torch.allclose(served(input_ids=ids).logits, expected, atol=1e-4))
            count += 1

    thread = threading.Thread(target=generate)
    thread.start()
    for slot in (1, 2, 4, 7):
        bank.load(slot, matrix.deltas, matrix.raw, **ties(matrix.manifest))
        bank.free(slot)
        bank.load(slot, linear.deltas, linear.raw, **ties(linear.manifest))
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(wrong) >= 3
    assert not any(wrong)


@torch.no_grad()
def test_a_load_that_fails_half_way_leaves_nothing(
    root: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, calls = bank_of(served), []
    ids = torch.randint(5, 200, (1, 9))
    plain = served(input_ids=ids).logits
    variant = load_variant(root, "matrix")
    put = DeltaArena.put

    def failing(arena: DeltaArena, slot: int, delta: Any) -> None:
        calls.append(slot)
        if len(calls) > 5:
            raise MemoryError("no more")
        put(arena, slot, delta)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaArena, "put", failing)
        with pytest.raises(MemoryError):
            bank.load(0, variant.deltas, variant.raw, **ties(variant.manifest))
    assert bank.slots == frozenset()
    assert all(arena.is_empty(0) for arena in arenas_of(bank).values())
    bank.set_batch([-1] * 9, [-1] * 9)
    assert torch.equal(served(input_ids=ids).logits, plain)
    bank.load(0, variant.deltas, variant.raw, **ties(variant.manifest))
    bank.set_batch([0] * 9, [0] * 9)
    expected = dense(root, "matrix")(input_ids=ids).logits
    torch.testing.assert_close(served(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def delta_of(shape: tuple[int, ...]) -> Any:
    return encode(torch.randn(shape, generator=torch.Generator().manual_seed(1)), Encoding())


def test_what_cannot_act_is_refused_by_name_and_changes_nothing(served: Any) -> None:
    bank = bank_of(served)
    hidden = served.config.hidden_size
    good = {"model.layers.0.self_attn.q_proj.weight": delta_of((40, hidden))}
    bad_vocabulary = {"model.embed_tokens.weight": torch.zeros(999, hidden)}
    with pytest.raises(ServingError, match=r"model\.embed_tokens\.weight.*vocabulary"):
        bank.load(0, good, bad_vocabulary)
    with pytest.raises(
        ServingError, match=r"'nowhere\.weight': the base model has no such parameter"
    ):
        bank.load(0, {**good, "nowhere.weight": good[next(iter(good))]}, {})
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ServingError, match=f"{name}.*stored shape"):
        bank.load(0, {**good, name: delta_of((3, 4))}, {})
    assert bank.slots == frozenset()
    assert all("forward" not in module.__dict__ for module in served.modules())


def test_a_variant_that_unties_the_head_acts_apart(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=())
    model = dense(root, None)
    reference = dense(root, None)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    shape = tuple(model.get_parameter(embed).shape)
    deltas = {embed: delta_of(shape), head: encode(torch.randn(shape), Encoding())}
    bank = bank_of(model)
    bank.load(0, deltas, {}, own=frozenset({embed, head}))
    bank.set_batch([0] * 5, [0] * 5)
    with torch.no_grad():
        ids = torch.tensor([[7, 8, 9, 10, 11]])
        got = model(input_ids=ids).logits
        old = reference.get_parameter(embed).detach()
        reference.lm_head.weight = nn.Parameter(old + decode(deltas[head]))
        reference.model.embed_tokens.weight = nn.Parameter(old + decode(deltas[embed]))
        torch.testing.assert_close(got, reference(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_a_tie_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    model = dense(make_family(tmp_path, tied=False, names=()), None)
    with pytest.raises(ServingError, match=r"lm_head\.weight.*ties it"):
        bank_of(model).load(0, {}, {}, tied={"lm_head.weight": "model.embed_tokens.weight"})


@torch.no_grad()
def test_embeddings_that_scale_and_norms_after_a_transpose_work() -> None:
    """Gemma 3: a scaled embedding class of its own, and q_norm on [batch, heads, tokens,
    head_dim].
    """
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    reference = Gemma3ForCausalLM(config).eval()
    reference.load_state_dict(model.state_dict())
    bank = bank_of(model)
    deltas, raw = {}, {}
    for name, parameter in reference.named_parameters():
        if parameter.ndim == 1:
            raw[name] = parameter + 0.3 * torch.randn_like(parameter)
            parameter.copy_(raw[name])
        else:
            deltas[name] = encode(0.1 * torch.randn(parameter.shape), Encoding())
            parameter.add_(decode(deltas[name]))
    bank.load(4, deltas, raw)
    bank.set_batch([4] * 12, [4] * 12)
    ids = torch.randint(1, 64, (1, 12))
    torch.testing.assert_close(
        model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-4, atol=1e-4
    )


def test_modules_that_mix_tokens_are_not_token_wise() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(dim=1) * self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mixer, self.norm = nn.Embedding(32, 8), Mixer(), nn.LayerNorm(8)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.norm(self.mixer(self.embed(input_ids)))

    model = Model().eval()
    # F.layer_norm takes no weight of each row.
    assert token_wise(model, vocab_size=32) == {"embed": TokenWise(1), "norm": TokenWise(1)}
    bank = VariantBank(model, vocab_size=32, head=None)
    with pytest.raises(ServingError, match=r"'mixer\.weight'.*does not act on every token"):
        bank.load(0, {}, {"mixer.weight": torch.zeros(8)})


def test_a_conv1d_of_gpt2_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    )
    name = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(ServingError, match=rf"{name}.*not in Conv1D"):
        bank_of(model.eval()).load(0, {name: delta_of((16, 48))}, {})


@torch.no_grad()
def test_raw_matrices_and_biases_act_per_row() -> None:
    layer = nn.Sequential(nn.Embedding(16, 6), nn.Linear(6, 5))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layer

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            out: torch.Tensor = self.body(input_ids)
            return out

    bank = VariantBank(Model().eval(), vocab_size=16, head=None)
    weight, bias = torch.randn(5, 6), torch.randn(5)
    bank.load(0, {}, {"body.1.weight": weight})
    bank.load(1, {}, {"body.1.bias": bias})
    bank.load(2, {"body.1.weight": delta_of((5, 6))}, {"body.1.bias": bias})
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    bank.set_batch([0, 1, 2, -1, 0], [0, 1, 2, -1, 0])
    x = layer[0].weight[ids[0]]
    old, b = layer[1].weight, layer[1].bias
    signed = old + decode(delta_of((5, 6)))
    expected = torch.stack(
        [
            weight @ x[0] + b,
            old @ x[1] + bias,
            signed @ x[2] + bias,
            old @ x[3] + b,
            weight @ x[4] + b,
        ]
    )
    torch.testing.assert_close(layer(ids)[0], expected, rtol=1e-5, atol=math.ldexp(1, -18))
