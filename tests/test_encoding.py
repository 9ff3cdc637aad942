"""Encodings: the oracles of algorithms.md 1.8 for each they apply to, in float64 numpy."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soupkit.encoding import (
    FACTOR_DTYPES,
    Encoding,
    decode,
    encode,
    encode_blocks,
    residual_energy,
    stored_bytes,
)
from soupkit.errors import MergeError
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import packed_width

ONE_PLANE = ("matrix", "row", "column", "rank1")
GREEDY = (*ONE_PLANE, "matrix-x2", "row-x3", "column-x4", "rank1-x2")
REFIT = ("matrix-x2-refit", "row-x2-refit", "row-x3-refit", "column-x3-refit", "row-x4-refit")
LOW_RANK = ("lowrank-2", "lowrank-2+row", "row+lowrank-2", "rank1-x2+lowrank-3")
NAMES = (*GREEDY, *REFIT, *LOW_RANK, "sparse", "lowrank-1+column-x2-refit")
shapes = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**31))
Shape = tuple[int, int, int]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uneven(rows: int, columns: int, seed: int) -> Tensor:
    """Rows and columns of unlike sizes, and a few zeros."""
    delta = gaussian(rows, columns, seed=seed)
    delta *= gaussian(rows, 1, seed=seed + 1).exp() * gaussian(1, columns, seed=seed + 2).exp()
    return delta * (gaussian(rows, columns, seed=seed + 3) > -1)


def named(delta: Tensor, name: str, **options: torch.dtype) -> Delta:
    return encode(delta, Encoding.parse(name), **options)


def energy(delta: Tensor, name: str) -> float:
    return residual_energy(delta, named(delta, name))


def wide(encoded: Delta) -> np.ndarray:
    """The sum of the parts in float64, bits read by numpy."""
    total = np.zeros((encoded.out_features, encoded.in_features))
    if encoded.packed is not None and encoded.scale is not None:
        bits = np.unpackbits(
            encoded.packed.numpy(), axis=2, count=encoded.in_features, bitorder="little"
        )
        for plane, scale in enumerate(encoded.scale.double().numpy()):
            term = (2.0 * bits[plane] - 1) * scale[:, None]
            if encoded.column_scale is not None:
                term *= encoded.column_scale[plane].double().numpy()
            total += term
    if encoded.up is not None and encoded.down is not None:
        total += encoded.up.double().numpy() @ encoded.down.double().numpy()
    return total


def lost(delta: Tensor, encoded: Delta) -> float:
    return float(((delta.double().numpy() - wide(encoded)) ** 2).sum())


# Names


def every_encoding() -> list[Encoding]:
    found = [Encoding(is_sparse=True), Encoding(planes=0, rank=7)]
    scales = ("matrix", "row", "column", "rank1")
    for planes, scale, rank, first, refit in product(
        (1, 2, 3, 4), scales, (0, 1, 16, 256), (True, False), (True, False)
    ):
        if (rank or first) and not (refit and (planes < 2 or scale == "rank1")):
            found.append(Encoding(planes, scale, rank, first, refit))  # type: ignore[arg-type]
    return found


def test_names_read_back_and_are_distinct() -> None:
    encodings = every_encoding()
    assert [Encoding.parse(one.name) for one in encodings] == encodings
    assert len({one.name for one in encodings}) == len(encodings)
    for name in NAMES:
        assert Encoding.parse(name).name == name
    assert Encoding().name == "row"


@pytest.mark.parametrize(
    "text",
    ["", "raw", "row-x1", "row-x5", "row-refit-x2", "row+row", "row+", "lowrank-0", "lowrank-",
     "lowrank-02", "lowrank-2+lowrank-3", "row+lowrank-2+row", "sparse+row", "sparse-x2", " row",
     "Row", "row\n", "row-x2+sparse"],
)  # fmt: skip
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use row, matrix, column, rank1"):
        Encoding.parse(text)


@pytest.mark.parametrize("text", ["row-refit", "rank1-x2-refit"])
def test_names_of_what_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="refit=True"):
        Encoding.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"planes": 5}, "planes=5"),
        ({"planes": True}, "planes=True"),
        ({"scale": "group"}, "'group'"),
        ({"rank": -1}, "rank=-1"),
        ({"planes": 0}, "store nothing"),
        ({"planes": 0, "rank": 2, "scale": "matrix"}, "leave all but rank out"),
        ({"low_rank_first": False}, "no order without a rank"),
        ({"refit": True}, "at least two planes"),
        ({"is_sparse": True, "planes": 2}, "go with nothing else"),
        ({"is_sparse": True, "rank": 2}, "go with nothing else"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Encoding(**fields)  # type: ignore[arg-type]


# The scales, against numpy


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_signs_and_means_are_those_of_numpy(shape: Shape) -> None:
    delta = uneven(*shape)
    magnitude = np.abs(delta.double().numpy())
    signs = np.packbits(delta.numpy() >= 0, axis=1, bitorder="little")
    means = {
        "matrix": magnitude.mean(keepdims=True),
        "row": magnitude.mean(axis=1, keepdims=True),
        "column": magnitude.mean(axis=0, keepdims=True),
    }
    for name, expected in means.items():
        encoded = named(delta, name)
        assert encoded.packed is not None
        assert np.array_equal(encoded.packed[0].numpy(), signs)
        found = np.abs(wide(encoded))
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_rank1_scales_are_the_first_singular_pair_of_magnitudes(shape: Shape) -> None:
    delta = uneven(*shape)
    magnitude = np.abs(delta.double().numpy())
    values = np.linalg.svd(magnitude, compute_uv=False)
    total = float((magnitude**2).sum())
    encoded = named(delta, "rank1")
    best = total - values[0] ** 2
    assert best - 1e-6 * total <= lost(delta, encoded) <= best + 1e-3 * total
    assert encoded.scale is not None
    assert encoded.column_scale is not None
    assert bool((encoded.scale >= 0).all())
    assert bool((encoded.column_scale >= 0).all())


def test_worked_example() -> None:
    """Oracle 4."""
    delta = torch.tensor([[1.0, -3.0], [0.0, 2.0]])
    assert [lost(delta, named(delta, name)) for name in ONE_PLANE[:3]] == [5.0, 4.0, 1.0]
    assert np.array_equal(wide(named(delta, "column")), [[0.5, -2.5], [0.5, 2.5]])
    # |delta| = [[1, 3], [0, 2]]: sigma_2^2 = 7 - sqrt(45)
    assert lost(delta, named(delta, "rank1")) == pytest.approx(7 - 45**0.5, rel=1e-4)
    assert lost(delta, named(delta, "sparse")) == pytest.approx(2.0, rel=1e-6)
    assert residual_energy(delta, named(delta, "row")) == 4 / 14


@settings(deadline=None, max_examples=30)
@given(shapes, st.sampled_from(ONE_PLANE[:3]), st.floats(-2.0, 3.0))
def test_error_is_an_exact_parabola_in_the_scale(shape: Shape, name: str, factor: float) -> None:
    """Oracle 1: ||D - aS||^2 = ||D||^2 - sum alpha^2 + sum (a - alpha)^2, least at alpha."""
    delta = uneven(*shape)
    encoded = named(delta, name)
    exact, coded = delta.double().numpy(), wide(encoded)
    total = (exact**2).sum()
    expected = total - (coded**2).sum() + ((factor - 1) ** 2 * coded**2).sum()
    error = ((exact - factor * coded) ** 2).sum()
    np.testing.assert_allclose(error, expected, rtol=1e-5, atol=1e-5 * total)
    assert lost(delta, encoded) <= error + 1e-6 * total


@settings(deadline=None, max_examples=40)
@given(shapes)
def test_finer_scales_never_lose_more(shape: Shape) -> None:
    """Oracle 2: matrix -> row -> rank1 and matrix -> column -> rank1, of one plane."""
    delta = uneven(*shape)
    matrix, row, column, rank1 = (energy(delta, name) for name in ONE_PLANE)
    assert rank1 <= min(row, column) + 1e-6
    assert max(row, column) <= matrix + 1e-6


def test_row_equals_matrix_where_all_row_means_are_equal() -> None:
    delta = gaussian(6, 50)
    delta /= delta.abs().mean(dim=1, keepdim=True)
    assert energy(delta, "row") == pytest.approx(energy(delta, "matrix"), rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(shapes, st.sampled_from([*ONE_PLANE, "sparse", "lowrank-2"]))
def test_the_residual_is_orthogonal_to_what_is_stored(shape: Shape, name: str) -> None:
    """Oracle 3; where a scale is a mean, no entry outgrows the largest of the delta."""
    delta = uneven(*shape)
    exact, coded = delta.double().numpy(), wide(named(delta, name))
    total, kept = (exact**2).sum(), (coded**2).sum()
    np.testing.assert_allclose((exact * coded).sum(), kept, rtol=1e-5, atol=1e-6 * total)
    assert kept <= total * (1 + 1e-6)
    if name in ("matrix", "row", "column", "sparse"):
        assert np.abs(coded).max() <= np.abs(exact).max() * (1 + 1e-6)


@pytest.mark.parametrize("name", [*GREEDY, *REFIT, "sparse", "row+lowrank-2"])
def test_constant_magnitude_is_exact_with_one_plane(name: str) -> None:
    """Oracle 5."""
    delta = torch.where(gaussian(7, 33) > 0, 0.25, -0.25)
    assert energy(delta, name) <= 1e-12


@settings(deadline=None, max_examples=20)
@given(shapes)
def test_an_outer_product_is_exact_with_rank1_scales(shape: Shape) -> None:
    """Oracle 5."""
    rows, columns, seed = shape
    delta = gaussian(rows, 1, seed=seed) * gaussian(1, columns, seed=seed + 1)
    assert energy(delta, "rank1") <= 1e-12
    if min(rows, columns) > 3:
        assert energy(delta, "row") > 1e-6


@pytest.mark.parametrize("name", [*ONE_PLANE, "sparse", "lowrank-2"])
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    """Oracle 6."""
    first = named(uneven(7, 33, 0), name)
    assert residual_energy(decode(first), named(decode(first), name)) <= 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_scaling_and_negating_commute(name: str) -> None:
    """Oracle 6; a power of two, so that rounding is the same."""
    delta = gaussian(6, 21)
    coded = decode(named(delta, name))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if "lowrank" in name else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(decode(named(delta * 4, name)), 4 * coded, **tolerance)
    torch.testing.assert_close(decode(named(-delta, name)), -coded, **tolerance)


@pytest.mark.parametrize("name", [*GREEDY, *REFIT, "sparse"])
def test_permuting_rows_and_columns_commutes(name: str) -> None:
    """Oracle 6."""
    delta = gaussian(6, 21)
    coded = decode(named(delta, name))
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    columns = torch.randperm(21, generator=torch.Generator().manual_seed(1))
    for permuted, expected in (
        (delta[rows], coded[rows]),
        (delta[:, columns], coded[:, columns]),
    ):
        torch.testing.assert_close(decode(named(permuted, name)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_features", range(1, 18))
@pytest.mark.parametrize("name", ["row", "column-x2", "rank1", "row+lowrank-2"])
def test_flipping_one_bit_moves_one_entry_by_two_scales(in_features: int, name: str) -> None:
    """Oracle 7."""
    encoded = named(gaussian(3, in_features), name)
    assert encoded.packed is not None
    assert encoded.scale is not None
    before, last = wide(encoded), in_features - 1
    encoded.packed[0, 1, last // 8] ^= 1 << (last % 8)
    change = wide(encoded) - before
    step = float(encoded.scale[0].expand(3)[1])
    if encoded.column_scale is not None:
        step *= float(encoded.column_scale[0, last])
    assert abs(change[1, last]) == pytest.approx(2 * step, rel=1e-6)
    assert np.count_nonzero(np.abs(change) > 1e-12) == 1


@pytest.mark.parametrize("name", NAMES)
def test_merged_weight_and_split_product_agree(name: str) -> None:
    """Oracle 8, in float64."""
    base, x = gaussian(6, 20).double(), gaussian(4, 20, seed=1).double()
    coded = named(gaussian(6, 20, seed=2), name).dense(torch.float64)
    torch.testing.assert_close(
        x @ base.T + x @ coded.T, x @ (base + coded).T, rtol=1e-12, atol=1e-12
    )


def test_zeros_count_in_means_but_not_in_those_of_a_support() -> None:
    """Oracle 9, and what sparse is for."""
    delta = torch.zeros(1, 10)
    delta[0, :4] = torch.tensor([1.0, -2.0, 3.0, -2.0])
    assert float(decode(named(delta, "row"))[0, 9]) == pytest.approx(0.4 * 2.0)
    assert decode(named(delta, "sparse")).tolist() == [[2.0, -2.0, 2.0, -2.0, *[0.0] * 6]]


# Planes


@settings(deadline=None, max_examples=25)
@given(shapes, st.sampled_from(ONE_PLANE))
def test_more_greedy_planes_never_lose_more(shape: Shape, scale: str) -> None:
    delta = uneven(*shape)
    names = [scale, *(f"{scale}-x{planes}" for planes in (2, 3, 4))]
    assert all(b <= a + 1e-6 for a, b in pairwise(energy(delta, name) for name in names))


@settings(deadline=None, max_examples=20)
@given(shapes, st.sampled_from(ONE_PLANE))
def test_greedy_planes_are_one_plane_of_the_residual(shape: Shape, scale: str) -> None:
    delta = gaussian(*shape[:2], seed=shape[2])
    encoded = named(delta, f"{scale}-x2")
    first = named(delta, scale)
    second = named(delta - decode(first), scale)
    torch.testing.assert_close(
        decode(encoded), decode(first) + decode(second), rtol=1e-5, atol=1e-6
    )


@settings(deadline=None, max_examples=40)
@given(shapes, st.sampled_from(["matrix", "row", "column"]), st.integers(2, 4))
def test_refit_never_loses_more_than_greedy(shape: Shape, scale: str, planes: int) -> None:
    delta = uneven(*shape)
    greedy, refit = (energy(delta, f"{scale}-x{planes}{end}") for end in ("", "-refit"))
    assert refit <= greedy + 1e-7


def levels_of(encoded: Delta) -> np.ndarray:
    """[2^P, N, K]: every value that the scales of an entry can form."""
    assert encoded.scale is not None
    scales = encoded.scale.double().numpy()[:, :, None]
    if encoded.column_scale is not None:
        scales = scales * encoded.column_scale.double().numpy()[:, None, :]
    signs = np.array(list(product((1, -1), repeat=encoded.planes)), dtype=float)
    shape = (encoded.planes, encoded.out_features, encoded.in_features)
    return np.tensordot(signs, np.broadcast_to(scales, shape), axes=1)


@settings(deadline=None, max_examples=40)
@given(shapes, st.sampled_from(REFIT))
def test_refit_gives_every_entry_its_nearest_level(shape: Shape, name: str) -> None:
    delta = uneven(*shape)
    encoded = named(delta, name)
    exact = delta.double().numpy()
    nearest = np.abs(levels_of(encoded) - exact).min(axis=0)
    # float32 cuts between levels
    slack = 1e-6 * np.abs(exact).max()
    assert (np.abs(wide(encoded) - exact) <= nearest + slack).all()
    assert encoded.scale is not None
    assert bool((encoded.scale >= 0).all())


@pytest.mark.parametrize("planes", [2, 3])
def test_refit_ends_where_least_squares_wins_little(planes: int) -> None:
    delta = gaussian(16, 400)
    encoded = named(delta, f"row-x{planes}-refit")
    assert encoded.packed is not None
    bits = np.unpackbits(encoded.packed.numpy(), axis=2, count=400, bitorder="little")
    best = 0.0
    for row, exact in enumerate(delta.double().numpy()):
        signs = 2.0 * bits[:, row].T - 1
        best += float(np.linalg.lstsq(signs, exact, rcond=None)[1].sum())
    assert best <= lost(delta, encoded) <= best * 1.01


def test_refit_finds_the_optimum_of_short_rows_or_comes_near() -> None:
    """Against every assignment of signs of 7 entries to two planes, with their least squares."""
    delta = gaussian(20, 7)
    signs = np.array(list(product((1.0, -1.0), repeat=7)))
    first, second = (part.ravel() for part in np.meshgrid(range(128), range(128)))
    dot = (signs[first] * signs[second]).sum(axis=1)
    is_free = np.abs(dot) < 7
    first, second, dot = first[is_free], second[is_free], dot[is_free]
    ratios = []
    for row in range(20):
        exact = delta[row].double().numpy()
        p, q = signs[first] @ exact, signs[second] @ exact
        kept = (7 * p * p - 2 * dot * p * q + 7 * q * q) / (49 - dot * dot)
        best = float((exact**2).sum() - kept.max())
        found = lost(delta[row : row + 1], named(delta[row : row + 1], "row-x2-refit"))
        assert found >= best - 1e-6
        ratios.append((found + 1e-6) / (best + 1e-6))
    assert np.median(ratios) < 1.5


def test_columns_are_the_rows_of_the_transpose() -> None:
    delta = uneven(9, 30, 4)
    for end in ("", "-x3", "-x3-refit"):
        mine = decode(named(delta, f"column{end}"))
        theirs = decode(named(delta.T.contiguous(), f"row{end}")).T
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# Energies of algorithms.md 1.5


def entries(kind: str) -> Tensor:
    delta = gaussian(512, 1024)
    uniform = torch.rand(512, 1024, generator=torch.Generator().manual_seed(1)) - 0.5
    if kind == "uniform":
        return uniform
    return delta if kind == "gaussian" else -uniform.sign() * torch.log1p(-2 * uniform.abs())


@pytest.mark.parametrize(
    ("kind", "greedy", "fitted"),
    [
        ("uniform", (0.25, 0.0625, 0.0156, 0.0039), (0.0625, 0.0156)),
        ("gaussian", (0.3634, 0.131, 0.059, 0.033), (0.118, 0.037)),
        ("laplace", (0.500, 0.229, 0.142, 0.095), (0.176, 0.056)),
    ],
)
def test_published_energies(
    kind: str, greedy: tuple[float, ...], fitted: tuple[float, float]
) -> None:
    delta = entries(kind)
    for planes, expected in enumerate(greedy, start=1):
        for scale in ONE_PLANE:
            name = f"{scale}-x{planes}" if planes > 1 else scale
            assert energy(delta, name) == pytest.approx(expected, rel=0.04), name
    for planes, expected in enumerate(fitted, start=2):
        found = energy(delta, f"matrix-x{planes}-refit")
        assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("density", [0.3, 0.1])
def test_a_sparse_delta_wants_its_support(density: float) -> None:
    mask = torch.rand(512, 1024, generator=torch.Generator().manual_seed(2)) < density
    delta = gaussian(512, 1024) * mask
    assert energy(delta, "matrix") == pytest.approx(1 - 2 * density / np.pi, rel=0.01)
    assert energy(delta, "sparse") == pytest.approx(1 - 2 / np.pi, rel=0.03)
    assert torch.equal(decode(named(delta, "sparse")) != 0, delta != 0)


def test_unlike_rows_and_columns_want_their_scales() -> None:
    """Algorithms 1.6: lognormal(0.5) rows 0.510 -> 0.363; and columns 0.617 -> 0.505, 0.361."""
    rows = (0.5 * gaussian(1024, 1, seed=1)).exp()
    columns = (0.5 * gaussian(1, 1024, seed=2)).exp()
    delta = gaussian(1024, 1024)
    assert energy(delta * rows, "matrix") == pytest.approx(0.510, rel=0.05)
    assert energy(delta * rows, "row") == pytest.approx(0.363, rel=0.01)
    both = delta * rows * columns
    assert energy(both, "matrix") == pytest.approx(0.617, rel=0.05)
    assert energy(both, "row") == pytest.approx(0.505, rel=0.05)
    assert energy(both, "column") == pytest.approx(0.508, rel=0.05)
    assert energy(both, "rank1") == pytest.approx(0.361, rel=0.02)


# Low rank


def spike_and_noise(share: float = 0.815) -> Tensor:
    """Rank 16 with a share of the energy, noise with the rest."""
    spike = gaussian(512, 16) @ gaussian(16, 512, seed=1)
    noise = gaussian(512, 512, seed=2)
    spike *= (share / spike.square().sum()) ** 0.5
    return (spike + noise * ((1 - share) / noise.square().sum()) ** 0.5) * 512


def test_signs_after_low_rank_beat_signs_alone_and_the_other_order() -> None:
    """Algorithms 1.6: 1 bit 0.377, then rank 16 0.232; rank 16 0.186, then 1 bit 0.068."""
    delta = spike_and_noise()
    found = [energy(delta, n) for n in ("row", "row+lowrank-16", "lowrank-16", "lowrank-16+row")]
    signs, signs_first, low_rank, low_rank_first = found
    assert signs == pytest.approx(0.377, rel=0.1)
    assert signs_first == pytest.approx(0.232, rel=0.2)
    assert low_rank == pytest.approx(0.186, rel=0.1)
    assert low_rank_first == pytest.approx(0.068, rel=0.1)


@settings(deadline=None, max_examples=25)
@given(shapes, st.integers(1, 50))
def test_low_rank_loses_the_tail_of_the_spectrum(shape: Shape, rank: int) -> None:
    delta = gaussian(*shape[:2], seed=shape[2])
    squares = np.linalg.svd(delta.double().numpy(), compute_uv=False) ** 2
    encoded = named(delta, f"lowrank-{rank}")
    assert encoded.rank == min(rank, *shape[:2])
    tail = squares[rank:].sum()
    np.testing.assert_allclose(lost(delta, encoded), tail, rtol=1e-3, atol=1e-9 * squares.sum())


@pytest.mark.parametrize("name", ["lowrank-7", "lowrank-99", "lowrank-7+row", "row+lowrank-7"])
def test_full_rank_is_exact(name: str) -> None:
    assert energy(gaussian(7, 33), name) <= 1e-11


def test_both_factors_carry_the_root_of_the_singular_values() -> None:
    encoded = named(gaussian(12, 40), "lowrank-3")
    assert encoded.up is not None
    assert encoded.down is not None
    values = np.linalg.svd(gaussian(12, 40).double().numpy(), compute_uv=False)[:3]
    for norms in (encoded.up.norm(dim=0), encoded.down.norm(dim=1)):
        np.testing.assert_allclose(norms.numpy(), np.sqrt(values), rtol=1e-4)


@pytest.mark.parametrize("dtype", FACTOR_DTYPES)
@pytest.mark.parametrize("name", ["lowrank-4+row", "lowrank-4+matrix-x2"])
def test_signs_are_of_what_the_rounded_factors_leave(dtype: torch.dtype, name: str) -> None:
    delta = spike_and_noise()[:64, :100].contiguous()
    encoded = named(delta, name, factor_dtype=dtype)
    assert encoded.packed is not None
    assert encoded.up is not None
    assert encoded.down is not None
    assert encoded.up.dtype == encoded.down.dtype == dtype
    left = delta.double().numpy() - encoded.up.double().numpy() @ encoded.down.double().numpy()
    bits = np.unpackbits(encoded.packed[0].numpy(), axis=1, count=100, bitorder="little")
    is_clear = np.abs(left) > 1e-5 * np.abs(left).max()
    assert np.array_equal(bits[is_clear], (left >= 0)[is_clear])
    assert lost(delta, encoded) < (left**2).sum()


def test_a_factor_beyond_float16_is_refused() -> None:
    delta = gaussian(8, 8) * 1e12
    with pytest.raises(MergeError, match=r"beyond the range of torch\.float16"):
        named(delta, "lowrank-2", factor_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"factor_dtype=torch\.float64"):
        named(delta, "lowrank-2", factor_dtype=torch.float64)


# Bytes, shapes, blocks


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from(NAMES), st.sampled_from(FACTOR_DTYPES))
def test_stored_bytes_are_those_of_the_tensors(shape: Shape, name: str, dtype: torch.dtype) -> None:
    delta = uneven(*shape)
    encoded = named(delta, name, factor_dtype=dtype)
    expected = stored_bytes((shape[0], shape[1]), Encoding.parse(name), dtype)
    assert expected == sum(part.numel() * part.element_size() for part in encoded.parts)
    assert all(part.is_contiguous() for part in encoded.parts)


def test_bytes_are_pinned() -> None:
    shape = (3, 13)
    assert stored_bytes(shape, Encoding.parse("row")) == 3 * 2 + 3 * 4
    assert stored_bytes(shape, Encoding.parse("matrix-x2")) == 2 * (3 * 2 + 4)
    assert stored_bytes(shape, Encoding.parse("column")) == 3 * 2 + 4 + 13 * 4
    assert stored_bytes(shape, Encoding.parse("rank1")) == 3 * 2 + 3 * 4 + 13 * 4
    assert stored_bytes(shape, Encoding.parse("sparse")) == 2 * (3 * 2 + 3 * 4)
    assert stored_bytes(shape, Encoding.parse("lowrank-16"), torch.bfloat16) == 3 * 16 * 2


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from(NAMES))
def test_decode_is_the_sum_of_the_parts(shape: Shape, name: str) -> None:
    delta = uneven(*shape)
    encoded = named(delta, name)
    coded = decode(encoded)
    assert coded.dtype == torch.float32
    torch.testing.assert_close(coded, encoded.dense(), rtol=1e-6, atol=1e-6)
    top = float(np.abs(wide(encoded)).max())
    np.testing.assert_allclose(coded.numpy(), wide(encoded), rtol=1e-5, atol=1e-6 * top)
    total = float((delta.double() ** 2).sum())
    found = residual_energy(delta, encoded)
    assert found == pytest.approx(lost(delta, encoded) / total if total else 0.0, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 33), (5, 123), (16, 8)])
def test_odd_shapes_and_no_bit_beyond_the_last(name: str, shape: tuple[int, int]) -> None:
    encoded = named(gaussian(*shape), name)
    assert residual_energy(gaussian(*shape), encoded) < 1.0
    if encoded.packed is not None:
        assert encoded.packed.shape[1:] == (shape[0], packed_width(shape[1]))
        beyond = encoded.packed[:, :, -1] >> (shape[1] - 1) % 8 + 1
        assert not beyond.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_an_empty_delta_is_encoded(name: str, shape: tuple[int, int]) -> None:
    encoded = named(torch.zeros(shape), name)
    assert decode(encoded).shape == shape
    assert residual_energy(torch.zeros(shape), encoded) == 0.0
    assert sum(p.nbytes for p in encoded.parts) == stored_bytes(shape, Encoding.parse(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_delta_is_zero_and_loses_nothing(name: str) -> None:
    for zero in (0.0, -0.0):
        delta = torch.full((3, 10), zero)
        encoded = named(delta, name)
        assert not decode(encoded).any()
        assert residual_energy(delta, encoded) == 0.0
        assert encoded.scale is None or not encoded.scale.any()


@pytest.mark.parametrize("name", ["row", "row-x3", "row-x2-refit", "rank1", "rank1-x2", "sparse"])
def test_a_zero_row_stays_zero(name: str) -> None:
    delta = gaussian(3, 10)
    delta[1] = 0
    decoded = decode(named(delta, name))
    assert not decoded[1].any()
    assert bool(decoded[0].any())


@pytest.mark.parametrize("name", ["column", "column-x3", "column-x2-refit", "rank1", "sparse"])
def test_a_zero_column_stays_zero(name: str) -> None:
    delta = gaussian(10, 3)
    delta[:, 1] = 0
    assert not decode(named(delta, name))[:, 1].any()


def test_minus_zero_is_a_plus_and_off_the_support() -> None:
    delta = torch.tensor([[-0.0, 0.0, -1.0]])
    encoded = named(delta, "row")
    assert encoded.packed is not None
    assert encoded.packed.tolist() == [[[0b011]]]
    assert decode(named(delta, "sparse")).tolist() == [[0.0, 0.0, -1.0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_with_its_place(name: str, value: float) -> None:
    delta = gaussian(4, 6)
    delta[2, 5] = value
    with pytest.raises(MergeError, match=r"\(2, 5\)"):
        named(delta, name)


def test_mistakes_are_named() -> None:
    for wrong in (gaussian(3, 4).double(), gaussian(3), gaussian(2, 3, 4)):
        with pytest.raises(ValueError, match="float32 matrix"):
            encode(wrong, Encoding())
    with pytest.raises(ValueError, match="compare a delta with its own"):
        residual_energy(gaussian(4, 4), named(gaussian(3, 4), "row"))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_delta_gives_the_same_bits_and_leaves_the_generator(name: str) -> None:
    delta = gaussian(40, 70)
    state = torch.get_rng_state()
    first, second = named(delta, name), named(delta.T.contiguous().T, name)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(first.parts) == len(second.parts)
    for one, other in zip(first.parts, second.parts, strict=True):
        assert torch.equal(one, other) or "lowrank" in name or "rank1" in name
    again = named(delta, name)
    assert all(torch.equal(a, b) for a, b in zip(first.parts, again.parts, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_rows_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = gaussian(13, 37)
    whole = named(delta, name)
    lost_whole = residual_energy(delta, whole)
    monkeypatch.setattr("soupkit.signs._BLOCK_ENTRIES", 2 * 37)
    parts = named(delta, name)
    torch.testing.assert_close(decode(parts), decode(whole), rtol=1e-5, atol=1e-6)
    assert residual_energy(delta, parts) == pytest.approx(lost_whole, rel=1e-5)


@pytest.mark.parametrize("name", [*GREEDY, *REFIT, "sparse"])
def test_a_delta_that_is_handed_out_in_blocks_is_never_held(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta, asked = gaussian(13, 37), list[slice]()

    def read(rows: slice) -> Tensor:
        asked.append(rows)
        return delta[rows].clone()

    monkeypatch.setattr("soupkit.signs._BLOCK_ENTRIES", 3 * 37)
    encoded = encode_blocks(read, (13, 37), Encoding.parse(name))
    expected = named(delta, name)
    assert all(torch.equal(a, b) for a, b in zip(encoded.parts, expected.parts, strict=True))
    assert max(rows.stop - rows.start for rows in asked) == 3
    if name.startswith("row") or name == "sparse":
        assert [rows.start for rows in asked] == [0, 3, 6, 9, 12]


def test_column_scales_are_near_one_and_exact() -> None:
    """Float16 could not hold means of 1e-6; the power of two beside them costs no bit."""
    delta = uneven(20, 30, 1) * 1e-6
    for name in ("column-x2", "column-x2-refit", "rank1"):
        encoded = named(delta, name)
        assert encoded.column_scale is not None
        mean = encoded.column_scale.mean(dim=1)
        assert bool(((mean > 0.99) & (mean < 2.01)).all())
    means = delta.abs().mean(dim=0, dtype=torch.float64).float()
    assert torch.equal(decode(named(delta, "column")).abs()[0], means)


def test_the_mean_is_accumulated_in_float64() -> None:
    """A float32 running sum of 2^24 ones and more would stand still."""
    delta = torch.full((1, 3_000_000), 1.0)
    delta[0, 0] = 2.0**25
    expected = (2.0**25 + 2_999_999) / 3_000_000
    assert float(decode(named(delta, "row"))[0, 0]) == pytest.approx(expected, rel=1e-7)
    tall = decode(named(delta.T.contiguous(), "column"))
    assert float(tall[0, 0]) == pytest.approx(expected, rel=1e-7)


def test_extreme_magnitudes_are_encoded() -> None:
    for size in (1e-38, 1e37):
        delta = gaussian(9, 40).clamp(-3, 3) * size
        for name in (*GREEDY, *REFIT, "sparse", "lowrank-2"):
            assert energy(delta, name) == pytest.approx(
                energy(gaussian(9, 40).clamp(-3, 3), name), rel=1e-3
            ), name


def test_an_encoding_has_no_gradient() -> None:
    delta = gaussian(4, 9).requires_grad_()
    for name in NAMES:
        assert not any(part.requires_grad for part in named(delta, name).parts)
