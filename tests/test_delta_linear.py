"""The multi-variant layers against float64 arithmetic over numpy's own unpacking."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from delta_kit import ENCODINGS, Encoding, dense, effective, make_delta, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from soupkit_kernels import (
    Delta,
    DeltaArena,
    Plan,
    add_delta_,
    arena_of,
    delta_embedding,
    delta_linear,
    naive,
    pack,
    plan_of,
    torch_path,
)

SHAPES = [(1, 1), (7, 33), (33, 7), (8, 64), (123, 1000), (3, 130)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIGNS: Encoding = (1, False, 0, False)
MATRIX: Encoding = (1, False, 0, True)
TWO: Encoding = (2, False, 0, False)


class Case:
    """A base and some variants in an arena."""

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        encodings: Sequence[Encoding | None],
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(num_rows, num_columns, generator=generator).mul(0.05).to(dtype)
        self.deltas = [
            None if each is None else make_delta(num_rows, num_columns, each, generator)
            for each in encodings
        ]
        self.bias = torch.randn(num_rows, generator=generator).to(dtype)
        self.generator = generator

    @property
    def arena(self) -> DeltaArena:
        return arena_of(self.deltas, dtype=self.weight.dtype)

    def tokens(self, *lead: int) -> tuple[Tensor, Tensor]:
        shape = (*lead, self.weight.shape[1])
        x = torch.randn(shape, generator=self.generator).to(self.weight.dtype)
        return x, torch.randint(-1, len(self.deltas), lead, generator=self.generator)

    def linear(self, x: Tensor, index: Tensor) -> Tensor:
        return delta_linear(x, self.weight, self.arena, index, self.bias)

    def plain_torch(self, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
        """What torch makes of the effective weights in x's dtype: the yardstick."""
        matrices = [torch.from_numpy(m).to(x.dtype) for m in effective(self.weight, self.deltas)]
        flat, rows = x.reshape(-1, x.shape[-1]), index.reshape(-1).tolist()
        y = [F.linear(row[None], matrices[v], bias) for row, v in zip(flat, rows, strict=True)]
        return torch.cat(y).reshape(*x.shape[:-1], -1)


def through_torch(
    x: Tensor, weight: Tensor, arena: DeltaArena, index: Tensor, bias: Tensor | None
) -> Tensor:
    step = plan_of(index, slots=arena.slots, planes=arena.planes)
    y = torch_path.linear(x.reshape(-1, x.shape[-1]), weight, bias, arena, step)
    return y.reshape(*x.shape[:-1], -1)


def check(case: Case, lead: tuple[int, ...], *, has_bias: bool) -> None:
    x, index = case.tokens(*lead)
    bias = case.bias if has_bias else None
    expected = reference(x, case.weight, case.deltas, index, bias)
    own = float((case.plain_torch(x, index, bias).double() - expected).abs().max())
    # A few units of the largest value where plain torch happens to be exact (tiny K).
    floor = 4 * torch.finfo(x.dtype).eps * float(expected.abs().max())
    found = {
        "op": delta_linear(x, case.weight, case.arena, index, bias),
        "torch": through_torch(x, case.weight, case.arena, index, bias),
        "naive": naive.delta_linear(x, case.weight, case.deltas, index, bias),
    }
    for name, y in found.items():
        assert y.shape == expected.shape
        assert y.dtype == x.dtype
        error = float((y.double() - expected).abs().max())
        assert error <= max(2 * own, floor), (name, error, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_matches_float64_over_shapes_and_dtypes(
    num_rows: int, num_columns: int, dtype: torch.dtype
) -> None:
    case = Case(num_rows, num_columns, dtype, (SIGNS, MATRIX, TWO))
    for lead in [(1,), (2, 3), (9,), (3,)]:
        check(case, lead, has_bias=True)
    check(case, (5,), has_bias=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_all_encodings_mix_in_one_batch(
    num_rows: int, num_columns: int, dtype: torch.dtype
) -> None:
    """Empty slots among them; few tokens of each, and many."""
    case = Case(num_rows, num_columns, dtype, (None, *ENCODINGS, None))
    for lead in [(1,), (23,), (300,)]:
        check(case, lead, has_bias=True)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_tokens", [1, 5, 90])
def test_every_encoding_alone(encoding: Encoding, num_tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(29, 75, dtype, (encoding,))
        x, _ = case.tokens(num_tokens)
        index = torch.zeros(num_tokens, dtype=torch.int64)
        y = delta_linear(x, case.weight, case.arena, index)
        expected = reference(x, case.weight, case.deltas, index)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_take_the_other_path_with_the_same_result(dtype: torch.dtype) -> None:
    check(Case(37, 75, dtype, (SIGNS, (3, False, 0, True))), (400,), has_bias=True)


def test_error_over_random_bfloat16_is_within_twice_of_plain_torch() -> None:
    """The tolerance rule itself, by root mean square, at a usual width."""
    case = Case(256, 576, torch.bfloat16, (SIGNS,))
    x, _ = case.tokens(8)
    index = torch.zeros(8, dtype=torch.int64)
    expected = reference(x, case.weight, case.deltas, index)
    own = (case.plain_torch(x, index, None).double() - expected).square().mean().sqrt()
    y = delta_linear(x, case.weight, case.arena, index)
    assert (y.double() - expected).square().mean().sqrt() <= 2 * own


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 80),
    st.lists(st.sampled_from([None, *ENCODINGS]), max_size=4),
    st.integers(0, 2**31),
)
def test_fast_path_has_the_meaning_of_naive(
    num_rows: int, num_columns: int, num_tokens: int, encodings: list[Any], seed: int
) -> None:
    case = Case(num_rows, num_columns, torch.float64, [SIGNS, *encodings], seed)
    x, index = case.tokens(num_tokens)
    torch.testing.assert_close(
        case.linear(x, index),
        naive.delta_linear(x, case.weight, case.deltas, index, case.bias),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("lead", [1, 40])
def test_identity_input_gives_the_effective_weight_exactly(lead: int) -> None:
    """x = I: both paths return W + scale * S rounded once, at a scale that float32 holds."""
    case = Case(17, 40, torch.float32, (SIGNS,))
    delta = case.deltas[0]
    assert delta is not None
    case.deltas = [Delta(17, 40, delta.packed, torch.full((1, 17), 2.0**-9))]
    case.weight = (case.weight * 1024).round() / 1024
    x, index, arena = torch.eye(40), torch.zeros(40, dtype=torch.int64), case.arena
    parts = [
        delta_linear(x[i : i + lead], case.weight, arena, index[i : i + lead])
        for i in range(0, 40, lead)
    ]
    whole = torch.from_numpy(effective(case.weight, case.deltas)[0])
    assert torch.equal(torch.cat(parts).double().T, whole)


def test_one_hot_tokens_read_one_column_each() -> None:
    signs = torch.randn(1, 5, 13)
    columns = torch.tensor([12, 0, 7])
    arena = arena_of([Delta(5, 13, pack(signs), torch.ones(1, 1))], dtype=torch.float32)
    x = F.one_hot(columns, 13).float()
    y = delta_linear(x, torch.zeros(5, 13), arena, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(y, torch.where(signs[0] >= 0, 1.0, -1.0)[:, columns].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [6, 200])
@pytest.mark.parametrize("encoding", [TWO, (1, True, 2, False)])
def test_variants_do_not_leak_into_each_other(
    encoding: Encoding, num_tokens: int, dtype: torch.dtype
) -> None:
    """NaN tokens and infinite scales of one variant leave every other row as it was."""
    case = Case(24, 50, dtype, (SIGNS, encoding, SIGNS, (0, False, 2, False)))
    x, index = case.tokens(num_tokens)
    index[:4] = torch.tensor([1, 0, -1, 3])
    clean = case.linear(x, index)
    dirty_x = x.clone()
    dirty_x[index == 1] = float("nan")
    old = case.deltas[1]
    assert old is not None
    assert old.scale is not None
    infinite = torch.full_like(old.scale, float("inf"))
    case.deltas[1] = Delta(24, 50, old.packed, infinite, old.column_scale, old.up, old.down)
    dirty = case.linear(dirty_x, index)
    assert torch.equal(dirty[index != 1], clean[index != 1])
    assert bool(dirty[index == 1].isnan().all())


def test_rows_keep_their_order_and_own_result() -> None:
    case = Case(9, 31, torch.float64, ENCODINGS)
    x, index = case.tokens(50)
    y = case.linear(x, index)
    order = torch.randperm(50, generator=case.generator)
    torch.testing.assert_close(
        case.linear(x[order], index[order]), y[order], rtol=1e-13, atol=1e-13
    )


def test_no_tokens_give_no_rows() -> None:
    case = Case(5, 9, torch.float32, (SIGNS, None))
    for lead in [(0,), (2, 0)]:
        x, index = torch.empty(*lead, 9), torch.empty(lead, dtype=torch.int64)
        assert case.linear(x, index).shape == (*lead, 5)
        y = torch.empty(*lead, 5)
        assert add_delta_(y, x, case.arena, index) is y
        ids = torch.empty(lead, dtype=torch.int64)
        assert delta_embedding(ids, case.weight, case.arena, index).shape == (*lead, 9)


@pytest.mark.parametrize("index", [[0], [0] * 70, [0, 1, -1] * 30])
def test_a_layer_without_rows_gives_nothing(index: list[int]) -> None:
    case = Case(0, 16, torch.bfloat16, (SIGNS, TWO))
    x, _ = case.tokens(len(index))
    assert case.linear(x, torch.tensor(index)).shape == (len(index), 0)
    y = torch.empty(len(index), 0, dtype=torch.bfloat16)
    assert add_delta_(y, x, case.arena, torch.tensor(index)) is y


def test_all_base_and_empty_slots_are_plain_linear_bit_for_bit() -> None:
    case = Case(16, 48, torch.bfloat16, (SIGNS, None))
    x, _ = case.tokens(2, 3)
    index = torch.tensor([[-1, 1, -1], [1, 1, -1]])
    assert torch.equal(case.linear(x, index), F.linear(x, case.weight, case.bias))


def test_a_single_token_without_an_axis() -> None:
    case = Case(4, 10, torch.float32, (SIGNS,))
    x, _ = case.tokens(1)
    y = case.linear(x[0], torch.tensor(0))
    assert y.shape == (4,)
    expected = reference(x, case.weight, case.deltas, torch.zeros(1).long(), case.bias)
    torch.testing.assert_close(y.double(), expected[0], rtol=1e-5, atol=1e-6)


def test_strided_inputs_are_read_right() -> None:
    case = Case(12, 20, torch.float32, (SIGNS, (1, True, 1, False)))
    x, index = case.tokens(7)
    wide, tall = torch.empty(7, 40), torch.empty(24, 20)
    wide[:, ::2], tall[::2] = x, case.weight
    strided = delta_linear(wide[:, ::2], tall[::2], case.arena, index, case.bias)
    torch.testing.assert_close(strided, case.linear(x, index))


def test_float16_sums_past_65504_are_scaled_before_they_are_rounded() -> None:
    x = torch.full((1, 4096), 100.0, dtype=torch.float16)
    delta = Delta(2, 4096, pack(torch.ones(1, 2, 4096)), torch.full((1, 2), 1e-3))
    arena = arena_of([delta], dtype=torch.float16)
    index = torch.zeros(1, dtype=torch.int64)
    y = delta_linear(x, torch.zeros(2, 4096, dtype=torch.float16), arena, index)
    torch.testing.assert_close(y.float(), torch.full((1, 2), 409.6), rtol=1e-3, atol=0.0)


def test_scale_stays_float32_in_a_bfloat16_model() -> None:
    """A scale between two bfloat16 values shows in the result."""
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    alpha = 1.0 + 3 * 2.0**-9  # bfloat16 would make it 1 + 2^-7
    delta = Delta(1, 256, pack(torch.ones(1, 1, 256)), torch.full((1, 1), alpha))
    arena, index = arena_of([delta], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    weight = torch.zeros(1, 256, dtype=torch.bfloat16)
    y = delta_linear(x, weight, arena, index)
    assert float(y) == float(torch.tensor(alpha * 256).bfloat16())
    halves = delta_linear(x, weight - alpha, arena, index)
    assert float(halves) == pytest.approx(256 * (alpha - float(torch.tensor(alpha).bfloat16())))


@pytest.mark.parametrize("num_tokens", [2, 100])
def test_large_weights_go_block_by_block(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows that do not divide N, on both paths."""
    monkeypatch.setattr(torch_path, "_BLOCK_ENTRIES", 5 * 30)
    monkeypatch.setattr(torch_path, "_SIGNS_ENTRIES", 7 * 30)
    for dtype in (torch.float32, torch.bfloat16):
        check(Case(33, 30, dtype, (TWO, (1, True, 2, False))), (num_tokens,), has_bias=True)


# -- add_delta_ and delta_embedding --


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 12, 300])
@pytest.mark.parametrize("is_torch", [False, True])
def test_the_delta_alone_is_added_in_place(
    num_tokens: int, dtype: torch.dtype, is_torch: bool
) -> None:
    case = Case(37, 75, dtype, (*ENCODINGS, None))
    x, index = case.tokens(num_tokens)
    y = torch.randn(num_tokens, 37, generator=case.generator).to(dtype)
    y[0] = -0.0
    expected = y.double() + reference(x, torch.zeros_like(case.weight), case.deltas, index)
    found = y.clone()
    arena = case.arena
    if is_torch:
        torch_path.add(found, x, arena, plan_of(index, slots=arena.slots, planes=arena.planes))
    else:
        assert add_delta_(found, x, arena, index) is found
    # The sum is rounded once; the products of signs may be bfloat16 (torch) before the scale.
    eps, part = torch.finfo(dtype).eps, (expected - y.double()).abs()
    assert bool(
        ((found.double() - expected).abs() <= eps * (expected.abs() + 4 * part.max())).all()
    )
    is_base = (index < 0) | (index == len(ENCODINGS))
    assert torch.equal(found[is_base], y[is_base])


def test_base_rows_of_y_keep_their_bits() -> None:
    case = Case(4, 9, torch.float32, (SIGNS, None))
    x, _ = case.tokens(3)
    y = torch.full((3, 4), -0.0)
    add_delta_(y, x, case.arena, torch.tensor([-1, 0, 1]))
    assert bool(torch.signbit(y[[0, 2]]).all())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_embedding_rows_are_those_of_the_effective_weight(dtype: torch.dtype) -> None:
    case = Case(19, 45, dtype, (*ENCODINGS, None))
    ids = torch.randint(0, 19, (3, 20), generator=case.generator)
    index = torch.randint(-1, len(case.deltas), (3, 20), generator=case.generator)
    rows = delta_embedding(ids, case.weight, case.arena, index)
    matrices = effective(case.weight, case.deltas)
    expected = torch.stack(
        [
            torch.from_numpy(matrices[v][i])
            for v, i in zip(index.flatten().tolist(), ids.flatten().tolist(), strict=True)
        ]
    ).view(3, 20, 45)
    assert rows.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(rows.double(), expected, rtol=eps, atol=eps * 0.01)
    wide = naive.delta_embedding(ids, case.weight, case.deltas, index)
    torch.testing.assert_close(rows, wide, rtol=eps, atol=eps * 0.01)
    one = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(
        delta_embedding(ids[0, :2], case.weight, case.arena, one),
        delta_embedding(ids[0, :2].int(), case.weight, case.arena, one),
    )


# -- slots, plans --


def test_a_slot_that_is_overwritten_keeps_nothing_of_the_old_variant() -> None:
    case = Case(13, 45, torch.float32, ENCODINGS)
    x, _ = case.tokens(40)
    index = torch.zeros(40, dtype=torch.int64)
    mixed, fresh = case.arena, torch.nn.functional.linear(x, case.weight)
    for delta in (*case.deltas, *reversed(case.deltas)):
        assert delta is not None
        mixed.put(0, delta)
        expected = reference(x, case.weight, [delta], index)
        for count in (3, 40):
            y = delta_linear(x[:count], case.weight, mixed, index[:count])
            torch.testing.assert_close(y.double(), expected[:count], rtol=1e-4, atol=1e-5)
    mixed.clear(0)
    assert torch.equal(delta_linear(x, case.weight, mixed, index), fresh)


def test_one_plan_serves_all_layers() -> None:
    """Layers of other sizes, fewer planes and more slots than the plan."""
    index = torch.tensor([0, 1, -1, 1, 0, 2])
    step = plan_of(index, slots=3, planes=3)
    for shape, encodings in [
        ((8, 16), (SIGNS, TWO, None)),
        ((16, 24), ((3, True, 1, False), None, SIGNS, SIGNS)),
    ]:
        case = Case(*shape, torch.float32, encodings)
        x, _ = case.tokens(6)
        with_plan = delta_linear(x, case.weight, case.arena, step, case.bias)
        assert torch.equal(with_plan, case.linear(x, index))
        again = delta_linear(x.view(2, 3, -1), case.weight, case.arena, step, case.bias)
        assert torch.equal(again.flatten(0, 1), with_plan)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    case = Case(8, 16, torch.float32, (TWO, SIGNS))
    x, index = case.tokens(6)
    arena = case.arena
    for step, message in (
        (plan_of(index, slots=3, planes=2), "3 slots"),
        (plan_of(index, slots=2, planes=1), "1 planes"),
        (plan_of(index[:4], slots=2, planes=2), "4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            delta_linear(x, case.weight, arena, step)


# -- refusals --


@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_it_is_for_inference_only(which: str) -> None:
    case = Case(4, 8, torch.float32, (SIGNS,))
    x, index = case.tokens(2)
    arena = case.arena
    given = {"x": x, "weight": case.weight, "bias": case.bias}
    given[which] = given[which].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        delta_linear(**given, arena=arena, variants=index)
    with torch.no_grad():
        assert not delta_linear(**given, arena=arena, variants=index).requires_grad


def test_neither_have_the_others_a_backward() -> None:
    case = Case(4, 8, torch.float32, (SIGNS,))
    x, index = case.tokens(2)
    needs = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        add_delta_(torch.zeros(2, 4), needs, case.arena, index)
    with pytest.raises(RuntimeError, match="no backward"):
        add_delta_(torch.zeros(2, 4, requires_grad=True), x, case.arena, index)
    with pytest.raises(RuntimeError, match="no backward"):
        delta_embedding(torch.tensor([0, 1]), case.weight.requires_grad_(), case.arena, index)


def test_mistakes_are_named() -> None:
    case = Case(4, 8, torch.float32, (SIGNS,))
    x, index = case.tokens(2)
    good: dict[str, Any] = {
        "x": x, "weight": case.weight, "arena": case.arena, "variants": index, "bias": case.bias,
    }  # fmt: skip
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": x.double()}, "needs the arena's torch.float32"),
        ({"x": x[:, :7]}, r"x \(2, 7\): needs"),
        ({"x": torch.tensor(1.0)}, "needs"),
        ({"x": x.int()}, "torch.int32"),
        ({"weight": case.weight[0]}, r"weight .*\(8,\)"),
        ({"weight": case.weight.double()}, "weight torch.float64"),
        ({"bias": case.bias[:3]}, "bias"),
        ({"bias": case.bias.double()}, "bias torch.float64"),
        ({"variants": index[:1]}, r"variants \(1,\): needs \(2,\)"),
        ({"variants": index.float()}, "needs int32 or int64"),
        ({"variants": index + 5}, r"must be in -1\.\.0"),
        ({"variants": index - 7}, r"must be in -1\.\.0"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            delta_linear(**{**good, **change})
    y = torch.zeros(2, 4)
    for bad, message in (
        (y.double(), "torch.float64"),
        (y[:1], r"\(1, 4\)"),
        (torch.zeros(4, 2).T, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            add_delta_(bad, x, case.arena, index)
    square = Case(8, 8, torch.float32, (SIGNS,))
    same, index_of_it = square.tokens(2)
    with pytest.raises(ValueError, match="y is x"):
        add_delta_(same.view(2, 8), same, square.arena, index_of_it)
    with pytest.raises(ValueError, match=r"ids torch\.float32"):
        delta_embedding(x[:, 0], case.weight, case.arena, index)
    with pytest.raises(IndexError):
        delta_embedding(torch.tensor([0, 4]), case.weight, case.arena, index)


@pytest.mark.parametrize("lead", [(0,), (3,), (70,), (2, 3)])
@pytest.mark.parametrize("encoding", [SIGNS, (1, True, 2, False), (0, False, 2, False)])
def test_no_inputs_leave_the_bias(encoding: Encoding, lead: tuple[int, ...]) -> None:
    bias = torch.arange(5.0)
    delta = make_delta(5, 0, encoding, torch.Generator())
    arena = arena_of([delta], dtype=torch.float32)
    for variant in (-1, 0):
        index = torch.full(lead, variant)
        found = delta_linear(torch.zeros(*lead, 0), torch.zeros(5, 0), arena, index, bias)
        assert torch.equal(found, bias.expand(*lead, 5))


# -- torch.compile and the operators --


class Layers(nn.Module):
    """All three in one module: embed, a linear, a delta added to another kernel's product."""

    def __init__(self, table: Case, first: Case, second: Case) -> None:
        super().__init__()
        self.table, self.first, self.second = table.weight, first.weight, second.weight
        self.arenas = table.arena, first.arena, second.arena
        self.bias = first.bias

    def forward(self, ids: Tensor, variants: Plan) -> Tensor:
        table, first, second = self.arenas
        h = delta_embedding(ids, self.table, table, variants)
        h = torch.tanh(delta_linear(h, self.first, first, variants, self.bias))
        return add_delta_(F.linear(h, self.second), h, second, variants) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_module_gives_the_same(dtype: torch.dtype) -> None:
    mixed = (SIGNS, (2, True, 1, False), None)
    module = Layers(
        Case(30, 16, dtype, mixed), Case(24, 16, dtype, mixed), Case(9, 24, dtype, mixed)
    )
    compiled: Callable[..., Tensor] = torch.compile(module, fullgraph=True, backend="aot_eager")
    for count in (7, 40, 12):
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(0, 30, (count,), generator=generator)
        step = plan_of(torch.randint(-1, 3, (count,), generator=generator), slots=3, planes=2)
        with torch.no_grad():
            before = compiled(ids, step)
            assert torch.equal(before, module(ids, step))
            # Another variant in a slot is seen without compiling anew.
            for arena in module.arenas:
                shape = (arena.out_features, arena.in_features)
                arena.put(2, make_delta(*shape, (1, True, 1, False), generator))
            assert torch.equal(compiled(ids, step), module(ids, step))
            assert not torch.equal(compiled(ids, step), before)
            for arena in module.arenas:
                arena.clear(2)


def test_the_operators_keep_torch_s_rules() -> None:
    from soupkit_kernels import op

    case = Case(6, 20, torch.float32, (SIGNS, (1, True, 1, False)))
    x, index = case.tokens(5)
    arena = case.arena
    rest = op._operands(arena, plan_of(index, slots=2, planes=arena.planes))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.soupkit.delta_linear.default, (x, case.weight, case.bias, *rest),
        test_utils=tests,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.soupkit.add_delta_.default, (torch.zeros(5, 6), x, *rest), test_utils=tests
    )
    ids = torch.tensor([0, 5, 3, 3, 1])
    torch.library.opcheck(
        torch.ops.soupkit.delta_embedding.default, (ids, case.weight, *rest), test_utils=tests
    )


def test_the_kit_agrees_with_the_delta_s_own_sum() -> None:
    for encoding in ENCODINGS:
        delta = make_delta(7, 19, encoding, torch.Generator().manual_seed(5))
        torch.testing.assert_close(
            delta.dense(torch.float64), torch.from_numpy(dense(delta, (7, 19)))
        )
