"""The multi-variant linear against float64 arithmetic over numpy's own unpacking."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from soupkit_kernels import bitpack, cpu, delta_linear, naive

SHAPES = [(1, 1), (7, 33), (33, 7), (8, 64), (123, 1000), (3, 130)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Case:
    """A base and some variants; scales are a few percent of the weight, as real deltas are."""

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        planes: Sequence[int],
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(num_rows, num_columns, generator=generator).mul(0.05).to(dtype)
        self.packed, self.scale = [], []
        for index, count in enumerate(planes):
            signs = torch.randn(count, num_rows, num_columns, generator=generator)
            width = 1 if index % 2 else num_rows
            self.packed.append(bitpack.pack(signs))
            self.scale.append(torch.rand(count, width, generator=generator) * 0.01 - 0.002)
        self.bias = torch.randn(num_rows, generator=generator).to(dtype)
        self.generator = generator

    def tokens(self, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*lead, self.weight.shape[1])
        x = torch.randn(shape, generator=self.generator).to(self.weight.dtype)
        high = len(self.packed)
        return x, torch.randint(-1, high, lead, generator=self.generator)

    def effective(self, variant: int) -> np.ndarray:
        """float64 effective weight; the base for -1."""
        total = self.weight.double().numpy()
        if variant < 0:
            return total
        for signs, alpha in zip(
            self.packed[variant].numpy(), self.scale[variant].numpy(), strict=True
        ):
            bits = np.unpackbits(signs, axis=1, count=total.shape[1], bitorder="little")
            total = total + alpha.astype(np.float64)[:, None] * (bits * 2.0 - 1.0)
        return total

    def reference(self, x: torch.Tensor, index: torch.Tensor, *, bias: bool) -> torch.Tensor:
        flat, rows = x.double().reshape(-1, x.shape[-1]).numpy(), index.reshape(-1).tolist()
        y = np.stack([self.effective(v) @ row for row, v in zip(flat, rows, strict=True)])
        if bias:
            y = y + self.bias.double().numpy()
        return torch.from_numpy(y).reshape(*x.shape[:-1], -1)

    def plain_torch(self, x: torch.Tensor, index: torch.Tensor, *, bias: bool) -> torch.Tensor:
        """What torch makes of the effective weights in x's dtype: the yardstick."""
        flat, rows = x.reshape(-1, x.shape[-1]), index.reshape(-1).tolist()
        y = [
            F.linear(
                row[None],
                torch.from_numpy(self.effective(v)).to(x.dtype),
                self.bias if bias else None,
            )
            for row, v in zip(flat, rows, strict=True)
        ]
        return torch.cat(y).reshape(*x.shape[:-1], -1)


def check(case: Case, lead: tuple[int, ...], *, bias: bool) -> None:
    x, index = case.tokens(*lead)
    args = (x, case.weight, case.packed, case.scale, index, case.bias if bias else None)
    reference = case.reference(x, index, bias=bias)
    scale = float(reference.abs().max())
    own = float((case.plain_torch(x, index, bias=bias).double() - reference).abs().max())
    # A few units of the largest value where plain torch happens to be exact (tiny K).
    floor = 4 * torch.finfo(x.dtype).eps * scale
    for implementation in (delta_linear, cpu.torch_delta_linear, naive.delta_linear):
        y = implementation(*args)
        assert y.shape == reference.shape
        assert y.dtype == x.dtype
        error = float((y.double() - reference).abs().max())
        assert error <= max(2 * own, floor), (implementation, error, own)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_matches_float64_over_shapes_and_dtypes(
    num_rows: int, num_columns: int, dtype: torch.dtype
) -> None:
    case = Case(num_rows, num_columns, dtype, planes=(1, 1, 2))
    for lead in [(1,), (2, 3), (9,), (3,)]:
        check(case, lead, bias=True)
    check(case, (5,), bias=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_take_the_other_path_with_the_same_result(dtype: torch.dtype) -> None:
    check(Case(37, 75, dtype, planes=(1, 3)), (400,), bias=True)


def test_error_over_random_bfloat16_is_within_twice_of_plain_torch() -> None:
    """The tolerance rule itself, by root mean square, at a usual width."""
    case = Case(256, 576, torch.bfloat16, planes=(1,))
    x, _ = case.tokens(8)
    index = torch.zeros(8, dtype=torch.int64)
    reference = case.reference(x, index, bias=False)
    own = (case.plain_torch(x, index, bias=False).double() - reference).square().mean().sqrt()
    y = delta_linear(x, case.weight, case.packed, case.scale, index)
    error = (y.double() - reference).square().mean().sqrt()
    print(f"rms error {float(error):.2e}, plain torch {float(own):.2e}")
    assert error <= 2 * own


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 80),
    st.lists(st.integers(1, 3), max_size=4),
    st.integers(0, 2**31),
)
def test_fast_path_has_the_meaning_of_naive(
    num_rows: int, num_columns: int, num_tokens: int, planes: list[int], seed: int
) -> None:
    case = Case(num_rows, num_columns, torch.float64, planes, seed)
    x, index = case.tokens(num_tokens)
    args = (x, case.weight, case.packed, case.scale, index, case.bias)
    torch.testing.assert_close(
        delta_linear(*args), naive.delta_linear(*args), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("lead", [1, 40])
def test_identity_input_gives_the_effective_weight_exactly(lead: int) -> None:
    """x = I: both paths return W + scale * S rounded once, at a scale that float32 holds."""
    case = Case(17, 40, torch.float32, planes=(1,))
    case.scale[0] = torch.full((1, 17), 2.0**-9)
    case.weight = (case.weight * 1024).round() / 1024
    x, index = torch.eye(40), torch.zeros(40, dtype=torch.int64)
    parts = [
        delta_linear(x[i : i + lead], case.weight, case.packed, case.scale, index[i : i + lead])
        for i in range(0, 40, lead)
    ]
    assert torch.equal(torch.cat(parts).double().T, torch.from_numpy(case.effective(0)))


def test_one_hot_tokens_read_one_column_each() -> None:
    weight = torch.zeros(5, 13)
    signs = torch.randn(1, 5, 13)
    columns = torch.tensor([12, 0, 7])
    y = delta_linear(
        F.one_hot(columns, 13).float(), weight, [bitpack.pack(signs)], [torch.ones(1, 1)],
        torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    assert torch.equal(y, torch.where(signs[0] >= 0, 1.0, -1.0)[:, columns].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [6, 200])
def test_variants_do_not_leak_into_each_other(dtype: torch.dtype, num_tokens: int) -> None:
    """NaN tokens and infinite scales of one variant leave every other row as it was."""
    case = Case(24, 50, dtype, planes=(1, 2, 1))
    x, index = case.tokens(num_tokens)
    clean = delta_linear(x, case.weight, case.packed, case.scale, index)
    dirty_x = x.clone()
    dirty_x[index == 1] = float("nan")
    dirty_scale = [case.scale[0], torch.full_like(case.scale[1], float("inf")), case.scale[2]]
    dirty = delta_linear(dirty_x, case.weight, case.packed, dirty_scale, index)
    assert torch.equal(dirty[index != 1], clean[index != 1])
    assert bool(dirty[index == 1].isnan().all())


def test_rows_keep_their_order_and_own_result() -> None:
    case = Case(9, 31, torch.float64, planes=(1, 1, 1))
    x, index = case.tokens(50)
    y = delta_linear(x, case.weight, case.packed, case.scale, index)
    order = torch.randperm(50, generator=case.generator)
    shuffled = delta_linear(x[order], case.weight, case.packed, case.scale, index[order])
    torch.testing.assert_close(shuffled, y[order], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("variants", [0, 2])
def test_no_tokens_give_no_rows(variants: int) -> None:
    case = Case(5, 9, torch.float32, planes=(1,) * variants)
    for lead in [(0,), (2, 0)]:
        x, index = torch.empty(*lead, 9), torch.empty(lead, dtype=torch.int64)
        y = delta_linear(x, case.weight, case.packed, case.scale, index)
        assert y.shape == (*lead, 5)


def test_all_base_is_plain_linear_bit_for_bit() -> None:
    case = Case(16, 48, torch.bfloat16, planes=(1,))
    x, _ = case.tokens(2, 3)
    index = torch.full((2, 3), -1)
    y = delta_linear(x, case.weight, case.packed, case.scale, index, case.bias)
    assert torch.equal(y, F.linear(x, case.weight, case.bias))


def test_a_single_token_without_an_axis() -> None:
    case = Case(4, 10, torch.float32, planes=(1,))
    x, _ = case.tokens(1)
    y = delta_linear(x[0], case.weight, case.packed, case.scale, torch.tensor(0))
    assert y.shape == (4,)
    expected = torch.from_numpy(case.effective(0) @ x[0].double().numpy())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


def test_strided_inputs_are_read_right() -> None:
    case = Case(12, 20, torch.float32, planes=(1, 1))
    x, index = case.tokens(7)
    y = delta_linear(x, case.weight, case.packed, case.scale, index)
    wide = torch.empty(7, 40)
    wide[:, ::2] = x
    tall = torch.empty(24, 20)
    tall[::2] = case.weight
    strided = delta_linear(wide[:, ::2], tall[::2], case.packed, case.scale, index)
    torch.testing.assert_close(strided, y)


def test_float16_sums_past_65504_are_scaled_before_they_are_rounded() -> None:
    x = torch.full((1, 4096), 100.0, dtype=torch.float16)
    packed = [bitpack.pack(torch.ones(1, 2, 4096))]
    y = delta_linear(
        x, torch.zeros(2, 4096, dtype=torch.float16), packed, [torch.full((1, 2), 1e-3)],
        torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    torch.testing.assert_close(y.float(), torch.full((1, 2), 409.6), rtol=1e-3, atol=0.0)


def test_scale_stays_float32_in_a_bfloat16_model() -> None:
    """A scale between two bfloat16 values shows in the result."""
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    packed = [bitpack.pack(torch.ones(1, 1, 256))]
    index = torch.zeros(1, dtype=torch.int64)
    weight = torch.zeros(1, 256, dtype=torch.bfloat16)
    alpha = 1.0 + 3 * 2.0**-9  # bfloat16 would make it 1 + 2^-7
    y = delta_linear(x, weight, packed, [torch.full((1, 1), alpha)], index)
    assert float(y) == float(torch.tensor(alpha * 256).bfloat16())
    halves = delta_linear(x, weight - alpha, packed, [torch.full((1, 1), alpha)], index)
    assert float(halves) == pytest.approx(256 * (alpha - float(torch.tensor(alpha).bfloat16())))


@pytest.mark.parametrize("num_tokens", [2, 100])
def test_large_weights_go_block_by_block(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows that do not divide N, on both paths."""
    monkeypatch.setattr(cpu, "_BLOCK_ENTRIES", 5 * 30)
    monkeypatch.setattr(cpu, "_SIGNS_ENTRIES", 7 * 30)
    for dtype in (torch.float32, torch.bfloat16):
        check(Case(33, 30, dtype, planes=(2, 1)), (num_tokens,), bias=True)


def test_it_is_for_inference_only() -> None:
    case = Case(4, 8, torch.float32, planes=(1,))
    x, index = case.tokens(2)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        delta_linear(x, case.weight, case.packed, case.scale, index)
    with torch.no_grad():
        assert not delta_linear(x, case.weight, case.packed, case.scale, index).requires_grad
    parameter = torch.nn.Parameter(case.weight)
    assert not delta_linear(x.detach(), parameter, case.packed, case.scale, index).requires_grad


def test_mistakes_are_named() -> None:
    case = Case(4, 8, torch.float32, planes=(1,))
    x, index = case.tokens(2)
    good = {
        "x": x, "weight": case.weight, "packed": case.packed, "scale": case.scale,
        "variant_index": index, "bias": case.bias,
    }  # fmt: skip
    wrong = [
        ({"x": x.double()}, "floating dtype"),
        ({"x": x[:, :7]}, "K"),
        ({"weight": case.weight[0]}, "K"),
        ({"bias": case.bias[:3]}, "bias"),
        ({"variant_index": index[:1]}, "variant_index"),
        ({"variant_index": index.int()}, "int64"),
        ({"variant_index": index + 5}, r"must be in -1\.\.0"),
        ({"variant_index": index - 7}, r"must be in -1\.\.0"),
        ({"packed": []}, "one of each"),
        ({"packed": [case.packed[0][0]]}, r"packed\[0\]"),
        ({"packed": [case.packed[0].int()]}, r"packed\[0\]"),
        ({"scale": [case.scale[0][:, :3]]}, r"scale\[0\]"),
        ({"scale": [case.scale[0].double()]}, r"scale\[0\]"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            delta_linear(**{**good, **change})


@pytest.mark.parametrize("lead", [(0,), (3,), (70,), (2, 3)])
def test_no_inputs_leave_the_bias(lead):
    bias = torch.arange(5.0)
    signs, scale = [torch.zeros(1, 5, 0, dtype=torch.uint8)], [torch.ones(1, 5)]
    for variant in (-1, 0):
        index = torch.full(lead, variant)
        found = delta_linear(torch.zeros(*lead, 0), torch.zeros(5, 0), signs, scale, index, bias)
        assert torch.equal(found, bias.expand(*lead, 5))


def test_variant_without_planes_is_refused():
    signs, scale = [torch.zeros(0, 5, 1, dtype=torch.uint8)], [torch.zeros(0, 1)]
    with pytest.raises(ValueError, match=r"packed\[0\].*planes"):
        delta_linear(torch.zeros(1, 8), torch.zeros(5, 8), signs, scale, torch.zeros(1).long())
