"""BitDelta's equations as algorithms.md 1.7 and 1.8 state them, in float64 numpy."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.bitdelta import (
    SignDelta,
    decode,
    decode_tensor,
    encode,
    encode_tensor,
    residual_energy,
)
from soupkit.config import Scale
from soupkit.errors import MergeError

matrices = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lost(delta: torch.Tensor, encoded: SignDelta) -> float:
    return float((delta.double() - decode(encoded).double()).square().sum())


@pytest.mark.parametrize(
    ("scale", "alphas", "error"), [("matrix", [[1.5]], 5.0), ("row", [[2.0, 1.0]], 4.0)]
)
def test_worked_example(scale: Scale, alphas: list[list[float]], error: float) -> None:
    delta = torch.tensor([[1.0, -3.0], [0.0, 2.0]])
    encoded = encode(delta, scale=scale)
    assert encoded.scale.tolist() == alphas
    assert encoded.signs.tolist() == [[[0b01], [0b11]]]
    assert lost(delta, encoded) == error
    assert residual_energy(delta, encoded) == error / 14


def test_bytes_and_sizes_are_pinned() -> None:
    encoded = encode(gaussian(3, 13), planes=2)
    assert encoded.signs.shape == (2, 3, 2)
    assert encoded.signs.dtype == torch.uint8
    assert encoded.scale.shape == (2, 3)
    assert encoded.scale.dtype == torch.float32
    assert (encoded.planes, encoded.out_features, encoded.in_features) == (2, 3, 13)
    assert encoded.nbytes == 2 * 3 * 2 + 2 * 3 * 4
    assert encode(gaussian(3, 13), scale="matrix", planes=3).scale.shape == (3, 1)


@settings(deadline=None, max_examples=40)
@given(matrices, st.sampled_from(["row", "matrix"]))
def test_first_plane_is_the_sign_and_mean_of_numpy(
    shape: tuple[int, int, int], scale: Scale
) -> None:
    delta = gaussian(*shape[:2], seed=shape[2])
    encoded = encode(delta, scale=scale)
    witness = np.packbits(delta.numpy() >= 0, axis=1, bitorder="little")
    assert np.array_equal(encoded.signs[0].numpy(), witness)
    mean = np.abs(delta.double().numpy()).mean(axis=1 if scale == "row" else None)
    np.testing.assert_allclose(encoded.scale[0].numpy(), np.atleast_1d(mean), rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(matrices, st.sampled_from(["row", "matrix"]), st.floats(-2.0, 3.0))
def test_error_is_an_exact_parabola_in_the_scale(
    shape: tuple[int, int, int], scale: Scale, factor: float
) -> None:
    """Oracle 1: ||D - aS||^2 = ||D||^2 - N alpha^2 + N (a - alpha)^2, least at alpha."""
    delta = gaussian(*shape[:2], seed=shape[2])
    encoded = encode(delta, scale=scale)
    alpha = encoded.scale.double().expand(1, shape[0]).numpy()[0]
    signs = np.where(delta.numpy() >= 0, 1.0, -1.0)
    other = alpha * factor
    wide = delta.double().numpy()
    error = ((wide - other[:, None] * signs) ** 2).sum()
    best = (wide**2).sum() - shape[1] * (alpha**2).sum()
    expected = best + shape[1] * ((other - alpha) ** 2).sum()
    np.testing.assert_allclose(error, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lost(delta, encoded), best, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(matrices)
def test_row_scales_are_never_worse_than_one_scale(shape: tuple[int, int, int]) -> None:
    delta = gaussian(*shape[:2], seed=shape[2]) * torch.arange(1, shape[0] + 1).unsqueeze(1)
    row, matrix = encode(delta), encode(delta, scale="matrix")
    assert residual_energy(delta, row) <= residual_energy(delta, matrix) + 1e-7


def test_row_equals_matrix_where_all_row_means_are_equal() -> None:
    delta = gaussian(6, 50)
    delta = delta / delta.abs().mean(dim=1, keepdim=True)
    row, matrix = encode(delta), encode(delta, scale="matrix")
    assert residual_energy(delta, row) == pytest.approx(residual_energy(delta, matrix), rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(matrices, st.sampled_from(["row", "matrix"]))
def test_residual_is_orthogonal_and_norms_do_not_grow(
    shape: tuple[int, int, int], scale: Scale
) -> None:
    """Oracle 3: <D, aS> = ||aS||^2 = sum alpha^2; ||aS|| <= ||D||; max |aS| <= max |D|."""
    delta = gaussian(*shape[:2], seed=shape[2])
    encoded = encode(delta, scale=scale)
    wide, coded = delta.double(), decode(encoded).double()
    energy = float(coded.square().sum())
    assert float((wide * coded).sum()) == pytest.approx(energy, rel=1e-5)
    alphas = encoded.scale.double().expand(1, shape[0])
    assert shape[1] * float(alphas.square().sum()) == pytest.approx(energy, rel=1e-6)
    assert energy <= float(wide.square().sum()) * (1 + 1e-6)
    assert float(coded.abs().max()) <= float(wide.abs().max()) * (1 + 1e-6)


def test_constant_magnitude_is_coded_exactly() -> None:
    """Oracle 5, and an idempotent encoding (oracle 6)."""
    delta = torch.where(gaussian(7, 33) > 0, 0.25, -0.25)
    for scale in ("row", "matrix"):
        assert residual_energy(delta, encode(delta, scale=scale)) == 0.0
    first = encode(gaussian(7, 33))
    again = encode(decode(first))
    assert torch.equal(again.signs, first.signs)
    torch.testing.assert_close(again.scale, first.scale, rtol=1e-6, atol=0.0)


def test_uniform_entries_lose_a_quarter_with_each_plane() -> None:
    """Oracle 5: greedy K planes of uniform(-1, 1) leave 4^-K."""
    delta = torch.rand(256, 1024, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for planes in range(1, 5):
        for scale in ("row", "matrix"):
            energy = residual_energy(delta, encode(delta, scale=scale, planes=planes))
            assert energy == pytest.approx(4.0**-planes, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "energies"),
    [("gaussian", (0.3634, 0.131, 0.059, 0.033)), ("laplace", (0.500, 0.229, 0.142, 0.095))],
)
def test_published_residuals_of_greedy_planes(kind: str, energies: tuple[float, ...]) -> None:
    """The table of algorithms.md 1.5."""
    delta = gaussian(512, 1024)
    if kind == "laplace":
        uniform = torch.rand(512, 1024, generator=torch.Generator().manual_seed(1)) - 0.5
        delta = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    for planes, expected in enumerate(energies, start=1):
        energy = residual_energy(delta, encode(delta, scale="matrix", planes=planes))
        assert energy == pytest.approx(expected, rel=0.03)


@settings(deadline=None, max_examples=30)
@given(matrices, st.sampled_from(["row", "matrix"]))
def test_more_planes_never_lose_more(shape: tuple[int, int, int], scale: Scale) -> None:
    delta = gaussian(*shape[:2], seed=shape[2])
    energies = [
        residual_energy(delta, encode(delta, scale=scale, planes=planes)) for planes in (1, 2, 3, 4)
    ]
    assert all(b <= a + 1e-7 for a, b in pairwise(energies))


@settings(deadline=None, max_examples=20)
@given(matrices, st.sampled_from(["row", "matrix"]))
def test_planes_are_bitdelta_applied_to_the_residual(
    shape: tuple[int, int, int], scale: Scale
) -> None:
    delta = gaussian(*shape[:2], seed=shape[2])
    encoded = encode(delta, scale=scale, planes=2)
    residual = delta
    for plane in range(2):
        one = encode(residual, scale=scale)
        assert torch.equal(one.signs[0], encoded.signs[plane])
        torch.testing.assert_close(one.scale[0], encoded.scale[plane], rtol=1e-5, atol=1e-7)
        residual = residual - decode(one)


def test_scaling_negating_and_permuting_commute() -> None:
    """Oracle 6."""
    delta = gaussian(6, 21)
    encoded = encode(delta)
    scaled = encode(delta * 4)
    assert torch.equal(scaled.signs, encoded.signs)
    assert torch.equal(scaled.scale, encoded.scale * 4)
    assert torch.equal(decode(encode(-delta)), -decode(encoded))
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(decode(encode(delta[rows])), decode(encoded)[rows])
    columns = torch.randperm(21, generator=torch.Generator().manual_seed(1))
    permuted = decode(encode(delta[:, columns]))
    torch.testing.assert_close(permuted, decode(encoded)[:, columns], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("in_features", range(1, 18))
def test_flipping_one_bit_moves_one_entry_by_two_scales(in_features: int) -> None:
    """Oracle 7."""
    encoded = encode(gaussian(3, in_features))
    before = decode(encoded)
    column = in_features - 1
    encoded.signs[0, 1, column // 8] ^= 1 << (column % 8)
    change = decode(encoded) - before
    assert float(change[1, column].abs()) == pytest.approx(2 * float(encoded.scale[0, 1]))
    assert int((change != 0).sum()) == 1


def test_zeros_count_in_the_mean_and_code_as_plus_one() -> None:
    """Oracle 9: with density p the scale is p times the mean over nonzero entries."""
    delta = torch.zeros(1, 10)
    delta[0, :4] = torch.tensor([1.0, -2.0, 3.0, -2.0])
    encoded = encode(delta)
    assert float(encoded.scale) == pytest.approx(0.4 * 2.0)
    assert float(decode(encoded)[0, 9]) == float(encoded.scale)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_a_zero_delta_has_zero_scales_and_no_loss(scale: Scale) -> None:
    encoded = encode(torch.zeros(3, 10), scale=scale, planes=2)
    assert not encoded.scale.any()
    assert torch.equal(decode(encoded), torch.zeros(3, 10))
    assert residual_energy(torch.zeros(3, 10), encoded) == 0.0


def test_a_zero_row_stays_zero() -> None:
    delta = gaussian(3, 10)
    delta[1] = 0
    assert torch.equal(decode(encode(delta))[1], torch.zeros(10))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tb51_non_finite_is_refused_with_its_place(value: float) -> None:
    delta = gaussian(4, 6)
    delta[2, 5] = value
    with pytest.raises(MergeError, match=r"\(2, 5\)"):
        encode(delta)
    with pytest.raises(MergeError, match=r"layer\.weight: .*\(2, 5\)"):
        encode_tensor("layer.weight", delta)


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = gaussian(13, 37)
    for scale in ("row", "matrix"):
        whole = encode(delta, scale=scale, planes=3)
        energy = residual_energy(delta, whole)
        monkeypatch.setattr("soupkit.signs._BLOCK_ENTRIES", 2 * 37)
        parts = encode(delta, scale=scale, planes=3)
        assert torch.equal(parts.signs, whole.signs)
        torch.testing.assert_close(parts.scale, whole.scale, rtol=1e-6, atol=0.0)
        assert residual_energy(delta, parts) == pytest.approx(energy, rel=1e-6)
        monkeypatch.undo()


def test_the_mean_is_accumulated_in_float64() -> None:
    """A float32 running sum of 2^24 ones and more would stand still."""
    delta = torch.full((1, 3_000_000), 1.0)
    delta[0, 0] = 2.0**25
    expected = (2.0**25 + 2_999_999) / 3_000_000
    assert float(encode(delta).scale) == pytest.approx(expected, rel=1e-7)
    assert float(encode(delta.T.contiguous(), scale="matrix").scale) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "shape", "flat"),
    [
        ("q_proj.weight", (5, 13), (5, 13)),
        ("conv.weight", (4, 3, 2, 2), (4, 12)),
        ("conv1d.weight", (4, 3, 5), (4, 15)),
        ("depthwise.weight", (6, 1, 3, 3), (6, 9)),
        ("experts.gate_up_proj", (3, 4, 10), (12, 10)),
    ],
)
@pytest.mark.parametrize("planes", [1, 2])
def test_every_layout_round_trips(
    name: str, shape: tuple[int, ...], flat: tuple[int, int], planes: int
) -> None:
    delta = gaussian(*shape)
    encoded = encode_tensor(name, delta, planes=planes)
    assert (encoded.out_features, encoded.in_features) == flat
    direct = encode(delta.reshape(flat), planes=planes)
    assert torch.equal(encoded.signs, direct.signs)
    assert torch.equal(encoded.scale, direct.scale)
    assert torch.equal(decode_tensor(name, encoded, shape), decode(direct).reshape(shape))


def test_experts_get_one_scale_each() -> None:
    delta = gaussian(3, 4, 10) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    encoded = encode_tensor("experts.down_proj", delta, scale="matrix", planes=2)
    assert encoded.scale.shape == (2, 12)
    for expert in range(3):
        alone = encode(delta[expert], scale="matrix", planes=2)
        assert torch.equal(encoded.scale[:, 4 * expert : 4 * expert + 4], alone.scale.expand(2, 4))
        decoded = decode_tensor("experts.down_proj", encoded, (3, 4, 10))
        assert torch.equal(decoded[expert], decode(alone))


def test_non_contiguous_deltas_are_seen_as_rows_and_columns() -> None:
    delta = gaussian(9, 5)
    encoded, direct = encode(delta.T), encode(delta.T.contiguous())
    assert torch.equal(encoded.signs, direct.signs)
    assert torch.equal(encoded.scale, direct.scale)


def test_merged_weight_and_split_product_agree() -> None:
    """Oracle 8, in float64."""
    base, delta, x = gaussian(6, 20).double(), gaussian(6, 20, seed=1), gaussian(4, 20).double()
    coded = decode(encode(delta)).double()
    split = x @ base.T + x @ coded.T
    torch.testing.assert_close(split, x @ (base + coded).T, rtol=1e-12, atol=1e-12)


def test_mistakes_are_named() -> None:
    delta = gaussian(3, 4)
    with pytest.raises(ValueError, match="'column'"):
        encode(delta, scale="column")  # type: ignore[arg-type]
    for planes in (0, 5):
        with pytest.raises(ValueError, match=f"planes={planes}"):
            encode(delta, planes=planes)
    with pytest.raises(ValueError, match="float32 matrix"):
        encode(delta.double())
    with pytest.raises(ValueError, match="vector"):
        encode_tensor("bias", delta[0])
    with pytest.raises(ValueError, match="vectors are stored whole"):
        decode_tensor("bias", encode(delta), (12,))
    with pytest.raises(ValueError, match="entries"):
        decode_tensor("w", encode(delta), (3, 5))
    with pytest.raises(ValueError, match="compare a delta with its own"):
        residual_energy(gaussian(4, 4), encode(delta))
    good = encode(delta)
    with pytest.raises(ValueError, match="uint8"):
        SignDelta(good.signs.int(), good.scale, 4)
    with pytest.raises(ValueError, match="in_features=9"):
        SignDelta(good.signs, good.scale, 9)
    with pytest.raises(ValueError, match="scale of shape"):
        SignDelta(good.signs, good.scale[:, :2], 4)
