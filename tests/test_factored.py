"""Merges on factors: the dense merge in float64, PEFT and hand-worked cases are the references."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soupkit.errors import MergeError
from soupkit.factored import Pair, merge_pairs
from soupkit.gauge import nearest_factors
from soupkit.merge import MergeRule, merge_deltas

SHAPES = [(1, 1, 1), (7, 33, 3), (33, 7, 4), (123, 40, 8), (5, 9, 8), (64, 64, 16)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(rows: int, columns: int, rank: int, *, seed: int, scale: float = 2.0, **kwargs) -> Pair:
    """As after training: rows of a near length 1, b smaller."""
    a = gaussian(rank, columns, seed=seed, **kwargs) / columns**0.5
    return Pair(a, 0.1 * gaussian(rows, rank, seed=seed + 1000, **kwargs), scale)


def dense(one: Pair) -> np.ndarray:
    return one.scale * (one.b.double() @ one.a.double()).numpy()


def product(a: Tensor, b: Tensor, scale: float) -> np.ndarray:
    return scale * (b.double() @ a.double()).numpy()


def cut(matrix: np.ndarray, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert np.linalg.norm(found - expected) <= tolerance * max(np.linalg.norm(expected), 1e-30)


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("weight", [0.5, 0.3])
def test_the_mean_is_the_mean_of_products_and_never_of_factors(
    rows: int, columns: int, rank: int, weight: float
) -> None:
    """TB70: factors averaged one by one are far off."""
    pairs = [pair(rows, columns, rank, seed=seed) for seed in (1, 2)]
    rule = MergeRule(method="mean", weights=(1 - weight, weight))
    expected = (1 - weight) * dense(pairs[0]) + weight * dense(pairs[1])
    a, b, report = merge_pairs("w", pairs, rule, rank=2 * rank)
    assert a.shape == (2 * rank, columns)
    assert b.shape == (rows, 2 * rank)
    assert a.dtype == b.dtype == torch.float32
    assert_near(product(a, b, 2.0), expected)
    assert report.kept_energy == pytest.approx(1.0)
    a, b, report = merge_pairs("w", pairs, rule, rank=rank)
    best = cut(expected, rank)
    assert_near(product(a, b, 2.0), best)
    assert report.kept_energy == pytest.approx(
        (np.linalg.norm(best) / np.linalg.norm(expected)) ** 2
    )
    assert report.rank == min(rank, rows, columns)
    assert report.shape == (rows, columns)
    assert report.method == "mean"
    assert report.delta_norms == pytest.approx([np.linalg.norm(dense(p)) for p in pairs])
    assert report.merged_norm == pytest.approx(np.linalg.norm(best))
    first, second = (dense(p).ravel() for p in pairs)
    assert report.cosine == pytest.approx(
        first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    )


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("options", [{"rank": 2}, {"rank": 64}, {"energy": 0.7}])
def test_svd_mean_cuts_each_delta_before_the_mean(
    rows: int, columns: int, rank: int, options: dict
) -> None:
    pairs = [pair(rows, columns, rank, seed=seed) for seed in (3, 4)]
    deltas = [dense(p) for p in pairs]
    ranks, kept = [], 0.0
    for delta in deltas:
        squares = np.linalg.svd(delta, compute_uv=False) ** 2
        shares = squares.cumsum() / squares.sum()
        wanted = options.get("rank") or int((shares < options["energy"]).sum()) + 1
        ranks.append(min(wanted, len(squares)))
        kept += squares[: ranks[-1]].sum()
    expected = sum(cut(delta, rank) for delta, rank in zip(deltas, ranks, strict=True)) / 2
    a, b, report = merge_pairs("w", pairs, MergeRule(**options), rank=2 * rank)
    assert_near(product(a, b, 2.0), expected)
    total = sum(np.linalg.norm(delta) ** 2 for delta in deltas)
    assert report.kept_energy == pytest.approx(kept / total)
    best = cut(expected, rank)
    a, b, report = merge_pairs("w", pairs, MergeRule(**options), rank=rank)
    assert_near(product(a, b, 2.0), best)
    written = (np.linalg.norm(best) / np.linalg.norm(expected)) ** 2
    assert report.kept_energy == pytest.approx(kept / total * written)


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("energy", [None, 0.6])
def test_monosoup_is_that_of_the_dense_delta(
    rows: int, columns: int, rank: int, energy: float | None
) -> None:
    pairs = [pair(rows, columns, rank, seed=seed) for seed in (5, 6)]
    rule = MergeRule(method="monosoup", energy=energy, weights=(0.4, 0.6))
    deltas = [torch.from_numpy(dense(p)).float() for p in pairs]
    expected, dense_report = merge_deltas("w", deltas, rule)
    a, b, report = merge_pairs("w", pairs, rule, rank=2 * rank)
    assert_near(product(a, b, 2.0), expected.double().numpy(), 1e-5)
    assert report.kept_energy == pytest.approx(dense_report.kept_energy, rel=1e-5)
    assert report.cosine == pytest.approx(dense_report.cosine, abs=1e-5)
    assert report.merged_norm == pytest.approx(dense_report.merged_norm, rel=1e-5)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(33, 21, bias=False)


@pytest.mark.parametrize("alpha", [8, 32])  # a scale of 1 and of 4
def test_peft_agrees_where_it_is_exact(alpha: int) -> None:
    """TB70. rslora sources are left out: PEFT 0.21.2 scales them sqrt(r) too large."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=alpha, target_modules=["layer"])
    model = peft.get_peft_model(Wide(), config, adapter_name="one")
    model.add_adapter("two", config)
    layer = model.base_model.model.layer
    pairs = []
    for seed, name in enumerate(("one", "two")):
        made = pair(21, 33, 8, seed=seed)
        layer.lora_A[name].weight.data, layer.lora_B[name].weight.data = made.a, made.b
        pairs.append(Pair(made.a, made.b, layer.scaling[name]))
    assert pairs[0].scale == alpha / 8
    rule = MergeRule(method="mean", weights=(0.25, 0.75))
    for kind, rank in (("svd", 16), ("cat", 16), ("svd", 8)):
        name = f"{kind}{rank}"
        model.add_weighted_adapter(
            ["one", "two"], [0.25, 0.75], name, combination_type=kind, svd_rank=rank
        )
        a, b, _ = merge_pairs("layer.weight", pairs, rule, rank=rank)
        expected = layer.get_delta_weight(name).detach().double().numpy()
        assert_near(product(a, b, alpha / 8), expected, 2e-6)


@pytest.mark.parametrize("method", ["mean", "monosoup", "svd_mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merge_with_itself_gives_its_own_factors_back(method: str, dtype: torch.dtype) -> None:
    rank = 1 if method == "monosoup" else 4  # a flat spectrum, which monosoup leaves as it is
    own = pair(19, 31, rank, seed=8, dtype=dtype)
    rule = MergeRule(method=method, rank=64 if method == "svd_mean" else None)
    a, b, report = merge_pairs("w", [own, own], rule, rank=rank)
    torch.testing.assert_close(a, own.a.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(b, own.b.float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(a.to(dtype), own.a) or dtype == torch.float32
    assert report.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_a_merge_does_not_use_of_the_own_pair_stays(is_swapped: bool) -> None:
    """Few steps after the start b has a low rank; a's other rows must not be lost."""
    own = pair(19, 31, 6, seed=9)
    own.b[:, 2:] = 0
    if is_swapped:  # an embedding's or a Conv1D's, which start with zeros in the other factor
        own = Pair(own.b.T.contiguous(), own.a.T.contiguous(), own.scale)
    a, b, _ = merge_pairs("w", [own, own], MergeRule(method="mean"), rank=6)
    torch.testing.assert_close(a, own.a, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(b, own.b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["mean", "monosoup", "svd_mean"])
def test_two_adapters_before_their_first_step_stay_as_they_are(method: str) -> None:
    zero = Pair(gaussian(4, 9), torch.zeros(7, 4), 2.0)
    rule = MergeRule(method=method, rank=3 if method == "svd_mean" else None)
    other = Pair(gaussian(4, 9, seed=1), torch.zeros(7, 4), 2.0)
    a, b, report = merge_pairs("w", [zero, other], rule, rank=4)
    assert torch.equal(a, zero.a)
    assert torch.equal(b, zero.b)
    assert a.data_ptr() != zero.a.data_ptr()
    assert (report.rank, report.kept_energy, report.merged_norm, report.cosine) == (0, 1.0, 0, 0)


def test_a_zero_adapter_and_a_trained_one() -> None:
    zero = Pair(gaussian(4, 9), torch.zeros(7, 4), 2.0)
    other = pair(7, 9, 4, seed=3)
    a, b, report = merge_pairs("w", [zero, other], MergeRule(method="mean"), rank=4)
    assert_near(product(a, b, 2.0), dense(other) / 2)
    assert report.cosine == 0.0


def test_opposite_adapters_cancel_and_keep_a_side_to_train_on() -> None:
    own = pair(7, 9, 4, seed=3)
    a, b, report = merge_pairs(
        "w", [own, Pair(own.a, -own.b, own.scale)], MergeRule(method="mean"), rank=4
    )
    assert_near(a.numpy(), own.a.numpy())
    assert float(b.abs().max()) <= 1e-7
    assert report.cosine == pytest.approx(-1.0)
    assert report.rank == 0


def test_ranks_and_scales_may_differ_between_pairs() -> None:
    """TB72: rank_pattern; the partner has another rank than the weight that is written."""
    pairs = [pair(20, 30, 3, seed=1, scale=4.0), pair(20, 30, 7, seed=2, scale=0.5)]
    expected = (dense(pairs[0]) + dense(pairs[1])) / 2
    for rank in (3, 7, 10, 12):
        a, b, _ = merge_pairs("w", pairs, MergeRule(method="mean"), rank=rank)
        assert a.shape == (rank, 30)
        assert b.shape == (20, rank)
        assert_near(product(a, b, 4.0), cut(expected, rank))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**20),
    st.sampled_from(["mean", "monosoup", "svd_mean"]),
)  # fmt: skip
def test_the_merged_delta_does_not_depend_on_the_gauge_of_its_inputs(
    rows: int, columns: int, rank: int, seed: int, method: str
) -> None:
    pairs = [pair(rows, columns, rank, seed=seed + i) for i in range(2)]
    turn = torch.linalg.qr(gaussian(rank, rank, seed=seed).double()).Q
    size = torch.linspace(0.5, 4, rank, dtype=torch.float64)
    turned = [
        Pair(
            torch.diag(1 / size) @ turn.T @ p.a.double(),
            p.b.double() @ turn @ torch.diag(size),
            2.0,
        )
        for p in pairs
    ]
    rule = MergeRule(method=method, energy=0.8 if method == "svd_mean" else None)
    first = merge_pairs("w", pairs, rule, rank=rank)
    second = merge_pairs("w", turned, rule, rank=rank)
    expected, _ = merge_deltas("w", [torch.from_numpy(dense(p)).float() for p in pairs], rule)
    # Where two singular values meet at the cut, which of them is kept is arbitrary.
    values = np.linalg.svd(expected.double().numpy(), compute_uv=False)
    if len(values) > rank and values[rank] > 0.99 * values[rank - 1]:
        return
    assert_near(product(*second[:2], 2.0), product(*first[:2], 2.0), 1e-4)
    assert first[2].kept_energy == pytest.approx(second[2].kept_energy, rel=1e-6)
    assert first[2].merged_norm == pytest.approx(second[2].merged_norm, rel=1e-6)


def test_the_same_merge_gives_the_same_bits_and_leaves_the_random_state() -> None:
    pairs = [pair(40, 30, 8, seed=seed) for seed in (1, 2)]
    state = torch.get_rng_state()
    first = merge_pairs("w", pairs, MergeRule(rank=4), rank=8)
    second = merge_pairs("w", pairs, MergeRule(rank=4), rank=8)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_factors_are_nearer_to_the_own_ones_than_a_plain_split() -> None:
    """A partner from the same run: a has moved a little, b more."""
    own = pair(50, 60, 8, seed=1)
    partner = Pair(own.a + 0.02 * gaussian(8, 60, seed=5) / 60**0.5, 0.7 * own.b, own.scale)
    a, b, _ = merge_pairs("w", [own, partner], MergeRule(method="mean"), rank=8)
    assert_near(product(a, b, 2.0), cut((dense(own) + dense(partner)) / 2, 8))
    assert float((a - own.a).norm() / own.a.norm()) <= 0.03
    assert float((b - own.b).norm() / own.b.norm()) <= 0.2
    assert float((b - 0.85 * own.b).norm() / own.b.norm()) <= 0.03


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 5),
    st.integers(0, 2**20), st.sampled_from(["both", "a", "b", "none"]),
)  # fmt: skip
def test_any_own_pair_gets_exactly_the_product_that_was_asked_for(
    rows: int, columns: int, rank: int, kept: int, seed: int, nonzero: str
) -> None:
    kept = min(kept, rank, rows, columns)
    left = torch.linalg.qr(gaussian(rows, kept, seed=seed).double()).Q
    right = torch.linalg.qr(gaussian(columns, kept, seed=seed + 1).double()).Q
    values = torch.linspace(2, 1, kept, dtype=torch.float64)
    own_b = gaussian(rows, rank, seed=seed + 2).double() * (nonzero in ("both", "b"))
    own_a = gaussian(rank, columns, seed=seed + 3).double() * (nonzero in ("both", "a"))
    b, a = nearest_factors(left, values, right, own_b=own_b, own_a=own_a)
    assert b.shape == own_b.shape
    assert a.shape == own_a.shape
    torch.testing.assert_close(b @ a, (left * values) @ right.T, rtol=1e-6, atol=1e-8)


def test_an_ill_conditioned_own_pair_does_not_blow_the_factors_up() -> None:
    left = torch.linalg.qr(gaussian(9, 2).double()).Q
    right = torch.eye(8, 2, dtype=torch.float64)
    own_a = torch.zeros(2, 8, dtype=torch.float64)
    own_a[0, 0], own_a[1, 1] = 1.0, 1e-7
    values = torch.tensor([1.0, 0.5], dtype=torch.float64)
    b, a = nearest_factors(left, values, right, own_b=torch.zeros(9, 2).double(), own_a=own_a)
    assert float(b.abs().max()) <= 2
    assert float(a.abs().max()) <= 2


@pytest.mark.parametrize(
    ("pairs", "error", "words"),
    [
        ([], ValueError, "no pairs"),
        ([pair(3, 4, 2, seed=0), pair(4, 4, 2, seed=0)], MergeError, "shape"),
        ([Pair(torch.full((1, 3), float("nan")), torch.ones(2, 1), 1.0)], MergeError, "finite"),
        ([pair(3, 4, 2, seed=0)] * 3, ValueError, "2 weights for 3"),
    ],
)
def test_what_cannot_be_merged_is_refused(pairs: list, error: type, words: str) -> None:
    rule = MergeRule(method="mean", weights=(1, 1) if len(pairs) == 3 else None)
    with pytest.raises(error, match=words):
        merge_pairs("w", pairs, rule, rank=2)


@pytest.mark.parametrize(
    ("a", "b", "scale", "words"),
    [
        (torch.ones(2, 3), torch.ones(4, 3), 1.0, "one rank r"),
        (torch.ones(2, 3), torch.ones(4, 2), 0.0, "not 0"),
        (torch.ones(2, 3), torch.ones(4, 2), float("inf"), "finite"),
        (torch.ones(2, 3, dtype=torch.int8), torch.ones(4, 2), 1.0, "floating"),
    ],
)
def test_a_pair_checks_itself(a: Tensor, b: Tensor, scale: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pair(a, b, scale)


def test_extremes_of_float32_are_merged() -> None:
    for size in (1e-18, 1e18):
        pairs = [
            Pair(gaussian(2, 5, seed=s), size * gaussian(4, 2, seed=s + 9), -3.0) for s in (1, 2)
        ]
        a, b, report = merge_pairs("w", pairs, MergeRule(method="monosoup"), rank=4)
        assert report.kept_energy > 0.5
        expected, _ = merge_deltas(
            "w",
            [torch.from_numpy(dense(p) / size).float() for p in pairs],
            MergeRule(method="monosoup"),
        )
        assert_near(product(a, b, -3.0) / size, expected.double().numpy(), 1e-5)
