"""Deltas, layouts and names; the numeric policy underneath."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit import numeric
from soupkit.delta import (
    as_matrices,
    canonical_name,
    from_matrices,
    layout,
    selected,
    subtract,
)
from soupkit.errors import MergeError
from soupkit.numeric import check_finite, full_precision, inner_product, squared_norm


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.a._fsdp_wrapped_module.b.weight", "a.b.weight"),
        ("layers.0._checkpoint_wrapped_module.mlp.weight", "layers.0.mlp.weight"),
        ("submodule.modules.weight", "submodule.modules.weight"),
        ("a.module", "a"),
    ],
)
def test_wrapper_parts_leave_names_anywhere(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


def test_include_and_exclude_search() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert selected(name, (), ())
    assert selected(name, ("q_proj",), ())
    assert selected(name, ("k_proj", r"layers\.\d+\."), ())
    assert not selected(name, ("^q_proj",), ())
    assert not selected(name, (), ("attn",))
    assert not selected(name, ("attn",), ("q_proj",))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("logit_scale", (), "vector"),
        ("q_proj.bias", (5,), "vector"),
        ("empty.weight", (0, 5), "vector"),
        ("empty.weight", (4, 0, 3), "vector"),
        ("q_proj.weight", (3, 4), "matrix"),
        ("embed.weight", (100, 8), "matrix"),
        ("conv.weight", (4, 3, 2, 2), "conv"),
        ("kernel", (4, 3, 2, 2, 2), "conv"),
        ("conv1d.weight", (4, 3, 5), "conv"),
        ("weight", (4, 3, 5), "conv"),
        ("mlp.experts.gate_up_proj", (8, 6, 4), "experts"),
        ("experts.fc_weight", (8, 6, 4), "experts"),
    ],
)
def test_tb55_layouts(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert layout(name, shape) == kind


@pytest.mark.parametrize(
    ("name", "shape", "matrices"),
    [
        ("q_proj.weight", (3, 4), (1, 3, 4)),
        ("conv.weight", (4, 3, 2, 2), (1, 4, 12)),
        ("conv1d.weight", (4, 3, 5), (1, 4, 15)),
        ("depthwise.weight", (6, 1, 3, 3), (1, 6, 9)),
        ("experts.down_proj", (8, 6, 4), (8, 6, 4)),
    ],
)
def test_matrices_round_trip(name: str, shape: tuple[int, ...], matrices: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).float()
    seen = as_matrices(name, tensor)
    assert seen.shape == matrices
    assert seen.data_ptr() == tensor.data_ptr()
    assert torch.equal(from_matrices(name, seen, shape), tensor)


def test_vectors_are_no_matrices() -> None:
    with pytest.raises(ValueError, match=r"bias: shape \(5,\) is no matrix"):
        as_matrices("bias", torch.zeros(5))
    with pytest.raises(ValueError, match="entries"):
        from_matrices("w", torch.zeros(1, 2, 3), (2, 4))


def test_tb47_the_delta_of_bfloat16_weights_is_float32() -> None:
    base = torch.tensor([1.0, 1.0, 256.0]).bfloat16()
    finetuned = torch.tensor([1.0078125, 1.0, 258.0]).bfloat16()
    delta = subtract(finetuned, base, name="w")
    assert delta.dtype == torch.float32
    assert delta.tolist() == [0.0078125, 0.0, 2.0]
    # A float32 master of a bfloat16 base keeps an update that bfloat16 rounds away.
    assert float(torch.tensor(1.0).bfloat16() + 0.001) == 1.0
    mixed = subtract(torch.tensor([1.001]), torch.tensor([1.0]).bfloat16(), name="w")
    assert float(mixed) == pytest.approx(0.001, rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_the_delta_is_the_float64_difference_rounded_once(
    seed: int, first: torch.dtype, second: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(7, 5, generator=generator).to(second)
    finetuned = (base.float() + 0.01 * torch.randn(7, 5, generator=generator)).to(first)
    delta = subtract(finetuned, base, name="w")
    assert torch.equal(delta, (finetuned.double() - base.double()).float())


def test_subtract_leaves_its_inputs_alone() -> None:
    base = torch.nn.Parameter(torch.ones(2, 2))
    finetuned = torch.nn.Parameter(torch.full((2, 2), 3.0))
    delta = subtract(finetuned, base, name="w")
    assert not delta.requires_grad
    delta.zero_()
    assert torch.equal(finetuned, torch.full((2, 2), 3.0))
    assert subtract(torch.zeros(0, 5), torch.zeros(0, 5), name="w").shape == (0, 5)


def test_shapes_are_both_named() -> None:
    with pytest.raises(MergeError, match=r"embed: .*\(65, 16\).*\(64, 16\)"):
        subtract(torch.zeros(65, 16), torch.zeros(64, 16), name="embed")
    with pytest.raises(ValueError, match="int64"):
        subtract(torch.zeros(2, dtype=torch.int64), torch.zeros(2), name="ids")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["finetuned", "base", "both"])
def test_tb51_the_first_bad_entry_is_named(value: float, side: str) -> None:
    finetuned, base = torch.ones(3, 4, 5), torch.zeros(3, 4, 5)
    for tensor, touched in ((finetuned, side != "base"), (base, side != "finetuned")):
        if touched:
            tensor[1, 2, 3] = value
            tensor[2, 0, 0] = float("nan")
    with pytest.raises(MergeError, match=r"layers\.0\.w: .*\(1, 2, 3\).*must be finite"):
        subtract(finetuned, base, name="layers.0.w")


def test_an_overflow_of_the_difference_is_refused() -> None:
    with pytest.raises(MergeError, match="inf"):
        subtract(torch.tensor([3e38]), torch.tensor([-3e38]), name="w")
    # 65504 + 65504 overflows float16, not float32.
    half = torch.tensor([65504.0]).half()
    assert float(subtract(half, -half, name="w")) == 131008.0


def test_sums_run_in_float64_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(7, 31, generator=torch.Generator().manual_seed(0))
    b = torch.randn(31, 7, generator=torch.Generator().manual_seed(1)).T
    expected = float((a.double() * b.double()).sum())
    assert inner_product(a, b) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(numeric, "_BLOCK_ENTRIES", 10)
    assert inner_product(a, b) == pytest.approx(expected, rel=1e-12)
    assert squared_norm(a) == pytest.approx(float(a.double().square().sum()), rel=1e-12)
    assert squared_norm(torch.zeros(0)) == 0.0
    assert squared_norm(torch.full((3,), 1e30)) == pytest.approx(3e60)


def test_finite_tensors_pass() -> None:
    for shape in [(), (0,), (3, 4)]:
        check_finite("w", torch.zeros(shape))


def test_full_precision_undoes_the_callers_settings_and_restores_them() -> None:
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = a @ a
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (a @ a).dtype == torch.bfloat16
                with full_precision(a):
                    assert torch.equal(a @ a, exact)
                assert (a @ a).dtype == torch.bfloat16
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_full_precision_works_where_one_backend_has_a_setting_of_its_own() -> None:
    """torch raises when the common setting is read then; Trainer's tf32=True sets one so."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only the common setting")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with full_precision(torch.zeros(1)):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_full_precision_restores_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(KeyError), full_precision(torch.zeros(1)):
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
