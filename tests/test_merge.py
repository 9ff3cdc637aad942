"""Merges against numpy in float64: algorithms.md 2.5 and 2.6, fault rows TB47, 48, 51, 55, 57."""

import json
import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.config import Method
from soupkit.delta import subtract
from soupkit.errors import MergeError
from soupkit.merge import MergeRule, merge_deltas, merge_with_cuts, monosoup_coefficients
from soupkit.monosoup import edit
from soupkit.solvers import TOLERANCE
from soupkit.svd import truncated_svd

METHODS: tuple[Method, ...] = ("svd_mean", "monosoup", "mean")
shapes = st.tuples(st.integers(2, 14), st.integers(2, 14))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numpy_truncated(matrix: torch.Tensor, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def numpy_monosoup(matrix: np.ndarray, share: float | None = None) -> np.ndarray:
    """The paper's operator, written down again from algorithms.md 2.2."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    squares = values**2 / (values**2).sum()
    if share is None:
        p = values / values.sum()
        p = p[p > 1e-12]
        k = math.ceil(math.exp(-(p * np.log(p)).sum()) - 1e-6)
    else:
        k = int(np.argmax(np.cumsum(squares) >= share - 1e-12)) + 1
    rho = (values[k] / values[0]) ** 2 if k < values.size else 0.0
    cos = math.sqrt(max(0.0, 1 - squares[:k].sum()))
    low = rho + (1 - rho) * cos
    weights = np.where(np.arange(values.size) < k, 1 - low, low)
    return (left * values * weights) @ right


def rule_for(method: Method, rank: int = 2, **others: object) -> MergeRule:
    return MergeRule(method, rank=rank if method == "svd_mean" else None, **others)  # type: ignore[arg-type]


# svd_mean


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 15), st.integers(1, 4), st.integers(0, 2**31))
def test_svd_mean_is_the_weighted_mean_of_truncations(
    shape: tuple[int, int], rank: int, count: int, seed: int
) -> None:
    deltas = [gaussian(*shape, seed=seed + i) for i in range(count)]
    weights = tuple(float(i + 1) for i in range(count))
    merged, report = merge_deltas("w", deltas, MergeRule(rank=rank, weights=weights))
    expected = sum(
        weight / sum(weights) * numpy_truncated(delta, rank)
        for weight, delta in zip(weights, deltas, strict=True)
    )
    np.testing.assert_allclose(merged.numpy(), expected, rtol=0.0, atol=3e-5)
    energies = [float((numpy_truncated(delta, rank) ** 2).sum()) for delta in deltas]
    total = sum(float(delta.double().square().sum()) for delta in deltas)
    assert report.rank == min(rank, *shape)
    assert report.kept_energy == pytest.approx(sum(energies) / total, abs=1e-6)


@pytest.mark.parametrize("shape", [(9, 7), (7, 9), (300, 270)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tb48_equal_deltas_merge_to_their_truncation(shape: tuple[int, int], count: int) -> None:
    delta = gaussian(*shape)
    merged, report = merge_deltas("w", [delta] * count, MergeRule(rank=3))
    np.testing.assert_allclose(merged.numpy(), numpy_truncated(delta, 3), rtol=0.0, atol=2e-4)
    assert report.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("rank", [7, 8, 64])
def test_tb48_full_rank_is_the_plain_mean_bit_for_bit(rank: int) -> None:
    deltas = [gaussian(9, 7, seed=seed) for seed in (0, 1)]
    full, report = merge_deltas("w", deltas, MergeRule(rank=rank))
    plain, _ = merge_deltas("w", deltas, MergeRule("mean"))
    assert torch.equal(full, plain)
    assert torch.equal(full, (deltas[0] * 0.5).add(deltas[1], alpha=0.5))
    assert (report.kept_energy, report.rank, report.solver) == (1.0, 7, "none")


@settings(deadline=None, max_examples=30)
@given(shapes, st.integers(1, 14), st.floats(0.05, 0.95), st.integers(0, 2**31))
def test_tb48_the_merge_lies_between_its_inputs(
    shape: tuple[int, int], rank: int, weight: float, seed: int
) -> None:
    """Norms do not exceed the weighted norms, and the tails bound the distance to the mean."""
    deltas = [gaussian(*shape, seed=seed), gaussian(*shape, seed=seed + 1)]
    weights = (1 - weight, weight)
    merged, report = merge_deltas("w", deltas, MergeRule(rank=rank, weights=weights))
    limit = sum(w * n for w, n in zip(weights, report.delta_norms, strict=True))
    assert report.merged_norm <= limit * (1 + 1e-5)
    mean = sum(w * delta.double() for w, delta in zip(weights, deltas, strict=True))
    tails = [
        float((delta.double() - torch.from_numpy(numpy_truncated(delta, rank))).norm())
        for delta in deltas
    ]
    tail = sum(w * t for w, t in zip(weights, tails, strict=True))
    assert float((merged.double() - mean).norm()) <= tail + 1e-4


def test_a_merge_does_not_depend_on_the_order() -> None:
    deltas = [gaussian(30, 20, seed=seed) for seed in range(3)]
    weights = (0.2, 0.5, 0.3)
    for method in METHODS:
        results = []
        for order in permutations(range(3)):
            rule = rule_for(method, 4, weights=tuple(weights[i] for i in order))
            results.append(merge_deltas("w", [deltas[i] for i in order], rule)[0])
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def test_a_merge_is_linear_in_the_weights() -> None:
    deltas = [gaussian(8, 6, seed=seed) for seed in range(2)]
    first, _ = merge_deltas("w", deltas, MergeRule(rank=2, weights=(1.0, 0.0)))
    second, _ = merge_deltas("w", deltas, MergeRule(rank=2, weights=(0.0, 1.0)))
    mixed, _ = merge_deltas("w", deltas, MergeRule(rank=2, weights=(0.3, 0.7)))
    torch.testing.assert_close(mixed, 0.3 * first + 0.7 * second)


def test_tb57_weights_are_normalised_and_kept() -> None:
    """Weights 0.1 and 1.0 of one model give that model, not 1.1 of it."""
    delta = gaussian(5, 5)
    rule = MergeRule("mean", weights=(0.1, 1.0))
    assert rule.weights == (0.1 / 1.1, 1.0 / 1.1)
    torch.testing.assert_close(merge_deltas("w", [delta, delta], rule)[0], delta)
    assert MergeRule("mean", weights=(2, 2)).weights == (0.5, 0.5)


@pytest.mark.parametrize("energy", [0.3, 0.9, 1.0])
def test_energy_instead_of_a_rank(energy: float) -> None:
    deltas = [gaussian(12, 9, seed=seed) for seed in range(2)]
    merged, report = merge_deltas("w", deltas, MergeRule(energy=energy))
    assert report.kept_energy >= energy - 1e-6
    ranks = []
    for delta in deltas:
        values = np.linalg.svd(delta.double().numpy(), compute_uv=False) ** 2
        ranks.append(int((np.cumsum(values) < (energy - 1e-9) * values.sum()).sum()) + 1)
    expected = sum(0.5 * numpy_truncated(d, r) for d, r in zip(deltas, ranks, strict=True))
    np.testing.assert_allclose(merged.numpy(), expected, rtol=0.0, atol=1e-5)
    assert report.rank == max(ranks)


def test_tb47_a_bfloat16_model_is_averaged_in_float32() -> None:
    """The mean of 1.0 and 1.0078125 is neither in float32, though bfloat16 has nothing between."""
    base = torch.ones(1, 2).bfloat16()
    other = torch.full((1, 2), 1.0078125).bfloat16()
    deltas = [subtract(base, base, name="w"), subtract(other, base, name="w")]
    merged, _ = merge_deltas("w", deltas, MergeRule("mean"))
    assert merged.tolist() == [[0.00390625, 0.00390625]]


# MonoSoup


@pytest.mark.parametrize(
    ("values", "energy", "expected"),
    [
        ([8.0, 1, 1, 1], None, (3, None, 0.135886, 66 / 67, 1 / 64, 0.122169)),
        ([2.0**-i for i in range(8)], None, (4, None, 0.066041, None, 2.0**-8, None)),
        ([4.0, 2, 1], 0.8, (2, None, 0.267079, 20 / 21, 1 / 16, 0.218218)),
        ([1.0], None, (1, 1.0, 0.0, 1.0, 0.0, 0.0)),
        ([1.0] * 5, None, (5, 1.0, 0.0, 1.0, 0.0, 0.0)),
        ([0.0] * 3, None, (1, 1.0, 0.0, 1.0, 0.0, 0.0)),
        ([1.0, 1, 0, 0], 1.0, (2, 1.0, 0.0, 1.0, 0.0, 0.0)),
    ],
)
def test_coefficients_of_the_official_function(
    values: list[float], energy: float | None, expected: tuple[float | None, ...]
) -> None:
    """Oracle 5, reproduced there with the authors' layer function."""
    for order in (values, values[::-1]):
        found = monosoup_coefficients(torch.tensor(order), energy=energy)
        for value, wanted in zip(found, expected, strict=True):
            assert wanted is None or value == pytest.approx(wanted, abs=1e-6)
        assert found[1] + found[2] == pytest.approx(1.0)


def test_a_flat_spectrum_followed_by_zeros_has_its_own_count() -> None:
    """In float32 the official function returns one more for 86 of these 199 sizes."""
    for size in range(1, 200):
        values = torch.cat([torch.full((size,), 0.37), torch.zeros(200 - size)])
        assert monosoup_coefficients(values)[0] == size


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.sampled_from([None, 0.5, 0.8, 1.0]))
def test_coefficients_stay_in_their_ranges(values: list[float], energy: float | None) -> None:
    k, high, low, kept, rho, cos = monosoup_coefficients(torch.tensor(values), energy=energy)
    assert 1 <= k <= len(values)
    for number in (high, low, kept, rho, cos):
        assert 0.0 <= number <= 1.0 + 1e-12
    assert high + low == pytest.approx(1.0)
    if energy is not None:
        assert kept >= energy - 1e-9
        assert cos <= math.sqrt(1 - energy) + 1e-6


@pytest.mark.parametrize("share", [None, 0.8])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (40, 40), (150, 160)])
def test_monosoup_is_the_papers_operator(shape: tuple[int, int], share: float | None) -> None:
    delta = gaussian(*shape)
    done = edit(delta, energy=share)
    expected = numpy_monosoup(delta.double().numpy(), share)
    np.testing.assert_allclose(done.matrix.numpy(), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("share", [None, 0.8])
def test_monosoup_averages_first_and_edits_once(share: float | None) -> None:
    deltas = [gaussian(12, 9, seed=seed) for seed in range(3)]
    rule = MergeRule("monosoup", energy=share, weights=(1, 2, 1))
    merged, report = merge_deltas("w", deltas, rule)
    mean = (deltas[0] + 2 * deltas[1] + deltas[2]).double().numpy() / 4
    np.testing.assert_allclose(merged.numpy(), numpy_monosoup(mean, share), rtol=0.0, atol=1e-5)
    assert report.method == "monosoup"
    k, _, _, kept, _, _ = monosoup_coefficients(
        torch.from_numpy(np.linalg.svd(mean, compute_uv=False)), energy=share
    )
    assert report.rank == k
    assert report.kept_energy == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("kind", ["identity", "rank one", "flat on its support"])
def test_monosoup_leaves_flat_spectra_unchanged(kind: str) -> None:
    """Oracle 4; the support case is a spectrum with an empty tail, as LoRA-merged deltas have."""
    basis = torch.linalg.qr(gaussian(20, 5)).Q
    delta = {
        "identity": torch.eye(20),
        "rank one": gaussian(20, 1) @ gaussian(1, 15, seed=1),
        "flat on its support": basis @ torch.linalg.qr(gaussian(15, 5, seed=1)).Q.T,
    }[kind]
    torch.testing.assert_close(edit(delta).matrix, delta, rtol=0.0, atol=2e-5)


@settings(deadline=None, max_examples=30)
@given(shapes, st.integers(0, 2**31), st.floats(0.01, 100.0))
def test_monosoup_is_equivariant_and_shrinks(
    shape: tuple[int, int], seed: int, factor: float
) -> None:
    """Oracle 6."""
    delta = gaussian(*shape, seed=seed).double()
    plain = edit(delta)
    left = torch.linalg.qr(gaussian(shape[0], shape[0], seed=1).double()).Q
    right = torch.linalg.qr(gaussian(shape[1], shape[1], seed=2).double()).Q
    for changed, expected in [
        (delta * factor, plain.matrix * factor),
        (delta.T, plain.matrix.T),
        (left @ delta @ right.T, left @ plain.matrix @ right.T),
    ]:
        found = edit(changed)
        # The effective rank may round to the other side of a whole number after rounding.
        if found.rank == plain.rank:
            torch.testing.assert_close(found.matrix, expected, rtol=1e-6, atol=1e-7)
    assert float(plain.matrix.norm()) <= float(delta.norm()) * (1 + 1e-12)


def test_monosoup_gaussian_figures() -> None:
    """algorithms.md 2.3: erank 0.80 n, P 0.994, rho 0.024, lambda_low 0.10 for a square one."""
    values = torch.linalg.svdvals(gaussian(400, 400).double())
    k, _, low, kept, rho, _ = monosoup_coefficients(values)
    assert k / 400 == pytest.approx(0.80, abs=0.02)
    assert kept == pytest.approx(0.994, abs=0.002)
    assert rho == pytest.approx(0.024, abs=0.006)
    assert low == pytest.approx(0.10, abs=0.01)


# Layouts and edges


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5,), (), (0,), (0, 5), (1,)])
def test_tb55_vectors_are_averaged_plainly(method: Method, shape: tuple[int, ...]) -> None:
    deltas = [gaussian(*shape, seed=seed) for seed in range(2)]
    merged, report = merge_deltas("norm.weight", deltas, rule_for(method, 1, weights=(1, 3)))
    torch.testing.assert_close(merged, deltas[0] * 0.25 + deltas[1] * 0.75)
    assert merged.shape == shape
    assert (report.method, report.rank, report.kept_energy) == ("mean", 0, 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_tb55_conv_kernels_are_matrices_of_their_outputs(method: Method) -> None:
    deltas = [gaussian(6, 4, 3, 3, seed=seed) for seed in range(2)]
    merged, _ = merge_deltas("conv.weight", deltas, rule_for(method))
    flat, _ = merge_deltas("w", [delta.reshape(6, 36) for delta in deltas], rule_for(method))
    assert torch.equal(merged, flat.reshape(6, 4, 3, 3))


@pytest.mark.parametrize("method", METHODS)
def test_tb55_experts_are_merged_one_by_one(method: Method) -> None:
    deltas = [gaussian(3, 8, 6, seed=seed) for seed in range(2)]
    merged, report = merge_deltas("experts.down_proj", deltas, rule_for(method))
    assert report.shape == (3, 8, 6)
    for expert in range(3):
        alone, _ = merge_deltas("w", [delta[expert] for delta in deltas], rule_for(method))
        torch.testing.assert_close(merged[expert], alone, rtol=1e-5, atol=1e-6)


def test_experts_report_their_common_energy() -> None:
    delta = torch.zeros(2, 4, 4)
    delta[0] = torch.diag(torch.tensor([10.0, 0, 0, 0]))
    delta[1] = torch.diag(torch.tensor([1.0, 1, 0, 0]))
    _, report = merge_deltas("experts.w", [delta], MergeRule(rank=1))
    assert report.kept_energy == pytest.approx(101 / 102)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (5,), (300, 270)])
def test_zero_deltas_merge_to_exact_zero(method: Method, shape: tuple[int, ...]) -> None:
    zero = torch.zeros(shape)
    merged, report = merge_deltas("w", [zero, zero], rule_for(method))
    assert torch.equal(merged, zero)
    assert (report.kept_energy, report.cosine, report.merged_norm) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)])
def test_tb55_thin_matrices(method: Method, shape: tuple[int, int]) -> None:
    deltas = [gaussian(*shape, seed=seed) for seed in range(2)]
    merged, _ = merge_deltas("w", deltas, rule_for(method, 64))
    torch.testing.assert_close(merged, (deltas[0] + deltas[1]) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_tb51_non_finite_deltas_are_refused_by_name(
    method: Method, value: float, which: int
) -> None:
    deltas = [gaussian(6, 5), gaussian(6, 5)]
    deltas[which][4, 1] = value
    with pytest.raises(MergeError, match=r"layers\.3\.w: .*\(4, 1\)"):
        merge_deltas("layers.3.w", deltas, rule_for(method))


@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_left_alone_and_results_are_fresh(method: Method) -> None:
    delta = gaussian(6, 5)
    kept = delta.clone()
    merged, _ = merge_deltas("w", [delta], rule_for(method, 64))
    merged.zero_()
    assert torch.equal(delta, kept)


def test_each_parameter_has_a_sketch_of_its_own_and_the_same_every_time() -> None:
    delta = gaussian(800, 20) @ gaussian(20, 780, seed=1) + 0.1 * gaussian(800, 780)
    first, report = merge_deltas("a", [delta], MergeRule(rank=4))
    again, _ = merge_deltas("a", [delta], MergeRule(rank=4))
    other, _ = merge_deltas("b", [delta], MergeRule(rank=4))
    assert report.solver.startswith("krylov")
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    state = torch.get_rng_state()
    merge_deltas("a", [delta], MergeRule(rank=4, seed=9))
    assert torch.equal(torch.get_rng_state(), state)


# Reports and mistakes


def test_the_report_is_true_and_json() -> None:
    deltas = [gaussian(9, 7, seed=seed) for seed in range(3)]
    merged, report = merge_deltas("layers.0.w", deltas, MergeRule(rank=2))
    assert (report.name, report.shape, report.method) == ("layers.0.w", (9, 7), "svd_mean")
    for delta, norm in zip(deltas, report.delta_norms, strict=True):
        assert norm == pytest.approx(float(delta.double().norm()))
    assert report.merged_norm == pytest.approx(float(merged.double().norm()))
    a, b = deltas[0].double().flatten(), deltas[1].double().flatten()
    assert report.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert report.seconds >= 0
    document = json.loads(json.dumps(report.to_json()))
    assert document["shape"] == [9, 7]
    assert document["rank"] == 2
    assert len(document["delta_norms"]) == 3


@pytest.mark.parametrize(
    ("deltas", "cosine"),
    [
        ([[1.0, 0.0]], 1.0),
        ([[1.0, 0.0], [2.0, 0.0]], 1.0),
        ([[1.0, 0.0], [-2.0, 0.0]], -1.0),
        ([[1.0, 0.0], [0.0, 3.0]], 0.0),
        ([[1.0, 0.0], [0.0, 0.0]], 0.0),
    ],
)
def test_cosine_of_the_first_two(deltas: list[list[float]], cosine: float) -> None:
    _, report = merge_deltas("b", [torch.tensor(d) for d in deltas], MergeRule("mean"))
    assert report.cosine == pytest.approx(cosine)


def test_mistakes_are_named() -> None:
    delta = gaussian(4, 3)
    with pytest.raises(ValueError, match="no deltas"):
        merge_deltas("w", [], MergeRule("mean"))
    with pytest.raises(ValueError, match="2 weights for 1 deltas"):
        merge_deltas("w", [delta], MergeRule("mean", weights=(1, 1)))
    with pytest.raises(ValueError, match="bfloat16"):
        merge_deltas("w", [delta.bfloat16()], MergeRule("mean"))
    with pytest.raises(MergeError, match=r"\(4, 3\) and \(3, 4\)"):
        merge_deltas("w", [delta, delta.T], MergeRule("mean"))
    with pytest.raises(ValueError, match="needs rank= or energy="):
        MergeRule("svd_mean")
    with pytest.raises(ValueError, match="one of the two"):
        MergeRule(rank=3, energy=0.5)
    with pytest.raises(ValueError, match="method='ties'"):
        MergeRule("ties", rank=3)  # type: ignore[arg-type]
    for weights in [(), (1.0, -1.0), (0.0,), (math.nan, 1.0), (math.inf, 1.0)]:
        with pytest.raises(ValueError, match="positive sum"):
            MergeRule("mean", weights=weights)
    with pytest.raises(ValueError, match="no singular values"):
        monosoup_coefficients(torch.zeros(0))
    with pytest.raises(ValueError, match="energy"):
        monosoup_coefficients(torch.ones(2), energy=0.0)


@pytest.mark.parametrize("weights", [(1e308, 1e308), (1e300, -1e300, 1e-10), (math.inf, -math.inf)])
def test_weights_beyond_floats_are_refused_with_their_values(weights):
    with pytest.raises(ValueError, match=r"weights=.*finite"):
        MergeRule("mean", weights=weights)


# Cuts that are kept from one merge to the next


def decaying(*shape: int, seed: int = 0) -> torch.Tensor:
    """A spectrum like that of a fine-tune's delta, and white noise."""
    short = min(shape[-2:])
    powers = torch.arange(1, short + 1).pow(-0.8)
    left = gaussian(*shape[:-1], short, seed=seed)
    right = gaussian(*shape[:-2], short, shape[-1], seed=seed + 1)
    return (left * powers) @ right / short + 0.02 * gaussian(*shape, seed=seed + 2)


@pytest.mark.parametrize(
    "shape", [(9, 7), (7, 9), (300, 280), (280, 333), (3, 8, 6), (2, 290, 270)]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_known_cuts_give_the_cold_merge(shape: tuple[int, ...], count: int) -> None:
    deltas = [decaying(*shape, seed=0) + 0.1 * decaying(*shape, seed=i) for i in range(count)]
    rule = MergeRule(rank=4, weights=tuple(float(i + 1) for i in range(count)))
    cold = merge_with_cuts("experts.w", deltas, rule)
    assert torch.equal(cold.delta, merge_deltas("experts.w", deltas, rule)[0])
    assert all(cuts is not None for cuts in cold.cuts)
    for known in (cold.cuts, cold.cuts[:1], (None, *cold.cuts[1:])):
        warm = merge_with_cuts("experts.w", deltas, rule, known=known)
        assert "known" in warm.report.solver or known == (None,)
        # Each truncation is within TOLERANCE of the least dropped energy, so any two of them are
        # within twice its root of one another, relative to what is dropped.
        dropped = sum(float(d.square().sum()) for d in deltas) * (1 - cold.report.kept_energy)
        assert float((warm.delta - cold.delta).norm()) <= 2 * math.sqrt(4 * TOLERANCE * dropped)
        assert warm.report.kept_energy == pytest.approx(cold.report.kept_energy, rel=1e-4)
    everything = merge_with_cuts("experts.w", deltas, rule, known=cold.cuts)
    assert everything.report.solver == "known"
    assert torch.equal(everything.delta, cold.delta)


def test_the_other_delta_starts_from_the_known_cut() -> None:
    delta = decaying(300, 280)
    other = delta + 0.01 * decaying(300, 280, seed=5)
    known = (truncated_svd(delta, rank=8),)
    done = merge_with_cuts("w", [delta, other], MergeRule(rank=8), known=[known])
    assert done.report.solver.startswith("known+warm q=")
    second = merge_with_cuts("w", [other, delta], MergeRule(rank=8), known=[None, known])
    torch.testing.assert_close(second.delta, done.delta, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 13), st.integers(1, 3), st.integers(0, 2**31))
def test_the_merged_cut_is_the_truncation_of_the_merge(
    shape: tuple[int, int], rank: int, count: int, seed: int
) -> None:
    deltas = [gaussian(*shape, seed=seed + i) for i in range(count)]
    done = merge_with_cuts("w", deltas, MergeRule(rank=rank))
    if rank >= min(shape):
        assert (done.cuts, done.merged, done.report.spectrum) == ((None,) * count, None, ())
        return
    assert done.merged is not None
    (cut,) = done.merged
    assert cut.left.dtype == cut.right.dtype == torch.float32
    assert cut.rank == rank
    dense = done.delta.double().numpy()
    values = np.linalg.svd(dense, compute_uv=False)
    np.testing.assert_allclose(cut.singular_values.numpy(), values[:rank], rtol=1e-5, atol=1e-5)
    assert cut.total_energy == pytest.approx((values**2).sum(), rel=1e-5)
    error = float(((dense - cut.matrix().double().numpy()) ** 2).sum())
    assert error <= (values[rank:] ** 2).sum() * (1 + 1e-6) + 1e-9 * cut.total_energy
    gram = cut.right.double() @ cut.right.double().T
    torch.testing.assert_close(gram, torch.eye(rank).double(), rtol=0, atol=5e-6)


def test_the_merged_cut_is_the_known_one_of_the_next_merge() -> None:
    """W after a merge is base + merged: its own cut needs no decomposition."""
    base, other = decaying(40, 30), decaying(40, 30, seed=3)
    rule = MergeRule(rank=5)
    done = merge_with_cuts("w", [base, other], rule)
    again = merge_with_cuts("w", [done.delta, other], rule, known=(done.merged, done.cuts[1]))
    cold, _ = merge_deltas("w", [done.delta, other], rule)
    assert again.report.solver == "known"
    torch.testing.assert_close(again.delta, cold, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_zero_deltas_have_cuts_too(rank: int) -> None:
    zero = torch.zeros(6, 5)
    done = merge_with_cuts("w", [zero, zero], MergeRule(rank=rank))
    assert done.merged is not None
    assert torch.equal(done.merged[0].matrix(), zero)
    assert done.merged[0].rank == rank
    again = merge_with_cuts("w", [zero, zero], MergeRule(rank=rank), known=(done.merged,))
    assert torch.equal(again.delta, zero)


def test_cuts_that_do_not_fit_are_left_unused() -> None:
    deltas = [gaussian(9, 7), gaussian(9, 7, seed=1)]
    rule = MergeRule(rank=3)
    cold = merge_with_cuts("w", deltas, rule)
    assert cold.cuts[0] is not None
    for known in (
        (truncated_svd(deltas[0], rank=2),),
        (truncated_svd(deltas[0].T, rank=3),),
        cold.cuts[0] * 2,
        (),
    ):
        done = merge_with_cuts("w", deltas, rule, known=[known])
        assert torch.equal(done.delta, cold.delta)
        assert "known" not in done.report.solver
    with pytest.raises(ValueError, match="3 known cuts for 2 deltas"):
        merge_with_cuts("w", deltas, rule, known=[None] * 3)


@pytest.mark.parametrize(
    ("rule", "name", "shape"),
    [
        (MergeRule("mean"), "w", (9, 7)),
        (MergeRule("monosoup"), "w", (9, 7)),
        (MergeRule(rank=2), "norm.weight", (9,)),
    ],
)
def test_methods_that_truncate_nothing_have_no_cuts(
    rule: MergeRule, name: str, shape: tuple[int, ...]
) -> None:
    deltas = [gaussian(*shape, seed=seed) for seed in range(2)]
    known = [(truncated_svd(gaussian(9, 7), rank=2),)]
    done = merge_with_cuts(name, deltas, rule, known=known)
    assert (done.cuts, done.merged, done.report.spectrum) == ((None, None), None, ())
    assert torch.equal(done.delta, merge_deltas(name, deltas, rule)[0])


def test_a_rule_of_energy_has_cuts_but_no_merged_one() -> None:
    deltas = [gaussian(9, 7, seed=seed) for seed in range(2)]
    done = merge_with_cuts("w", deltas, MergeRule(energy=0.8))
    assert done.merged is None
    assert all(cuts is not None for cuts in done.cuts)
    again = merge_with_cuts("w", deltas, MergeRule(energy=0.8), known=done.cuts)
    assert torch.equal(again.delta, done.delta)


def test_the_report_has_the_spectrum_of_the_first_delta() -> None:
    deltas = [gaussian(2, 90, 80, seed=seed) for seed in range(2)]
    report = merge_deltas("experts.w", deltas, MergeRule(rank=3))[1]
    values = np.linalg.svd(deltas[0][0].double().numpy(), compute_uv=False)
    np.testing.assert_allclose(report.spectrum, values[:3], rtol=1e-5)
    assert json.loads(json.dumps(report.to_json()))["spectrum"] == list(report.spectrum)
    long = merge_deltas("experts.w", deltas, MergeRule(rank=75))[1].spectrum
    assert len(long) == 64
    np.testing.assert_allclose([long[0], long[-1]], [values[0], values[74]], rtol=1e-5)
    assert list(long) == sorted(long, reverse=True)
    assert replace(report, spectrum=()).to_json()["spectrum"] == []
