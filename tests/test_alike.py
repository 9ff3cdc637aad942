"""How alike adapters are; dense float64 is the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.alike import cosine, inner, norm, norms_of, similarity
from soupkit.errors import MergeError
from soupkit.factored import Pair

SIZES = st.integers(1, 12)
SCALES = st.sampled_from([1.0, 4.0, -2.0, 1e-3, 1 / 3])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(pair: Pair) -> np.ndarray:
    return pair.scale * (pair.b.double() @ pair.a.double()).numpy()


@st.composite
def two_pairs(draw) -> tuple[Pair, Pair]:
    out, columns, seed = draw(SIZES), draw(SIZES), draw(st.integers(0, 999))
    found = []
    for number in range(2):
        rank, dtype = (
            draw(st.integers(1, 6)),
            draw(st.sampled_from([torch.float32, torch.bfloat16])),
        )
        a = gaussian(rank, columns, seed=seed + number).to(dtype)
        found.append(Pair(a, gaussian(out, rank, seed=seed + number + 7).to(dtype), draw(SCALES)))
    return found[0], found[1]


@settings(deadline=None, max_examples=40)
@given(two_pairs())
def test_inner_products_norms_and_cosines_are_those_of_the_dense_deltas(pairs) -> None:
    first, second = (dense(pair) for pair in pairs)
    sizes = np.linalg.norm(first) * np.linalg.norm(second)
    assert inner(*pairs) == pytest.approx((first * second).sum(), rel=1e-10, abs=1e-12 * sizes)
    assert norm(pairs[0]) == pytest.approx(np.linalg.norm(first), rel=1e-10)
    assert cosine(*pairs) == pytest.approx((first * second).sum() / sizes, abs=1e-10)


@settings(deadline=None, max_examples=40)
@given(two_pairs(), st.integers(0, 99), st.floats(1e-3, 1e3))
def test_a_cosine_knows_no_gauge_and_no_positive_scale(pairs, seed: int, factor: float) -> None:
    """algorithms.md 4.7.1."""
    first, second = pairs
    value = cosine(first, second)
    assert -1.0 <= value <= 1.0
    assert cosine(second, first) == pytest.approx(value, abs=1e-12)
    assert cosine(first, first) == pytest.approx(1.0, abs=1e-12)
    assert cosine(first, Pair(-first.a, first.b, first.scale)) == pytest.approx(-1.0, abs=1e-12)
    # Not singular: diagonally dominant.
    turn = gaussian(first.rank, first.rank, seed=seed).double() / 8 + torch.eye(first.rank) * 2
    turned = Pair(turn.inverse() @ first.a.double(), first.b.double() @ turn, first.scale * factor)
    assert cosine(turned, second) == pytest.approx(value, abs=1e-9)
    assert norm(turned) == pytest.approx(factor * norm(first), rel=1e-9)


def test_columns_that_cancel() -> None:
    a, b = gaussian(2, 9).double(), gaussian(7, 2).double()
    nothing = Pair(torch.cat([a, a]), torch.cat([b, -b], dim=1), 2.0)
    assert norm(nothing) == 0.0
    assert cosine(nothing, nothing) == cosine(nothing, Pair(a, b, 1.0)) == 0.0
    little = Pair(torch.cat([a, a]), torch.cat([b, -b * (1 - 2**-20)], dim=1), 2.0)
    assert norm(little) == pytest.approx(2.0 * 2**-20 * float((b @ a).norm()), rel=1e-6)
    assert cosine(little, Pair(a, b, 1.0)) == pytest.approx(1.0, abs=1e-6)


def test_a_zero_adapter_is_like_nothing() -> None:
    zero = Pair(gaussian(2, 9), torch.zeros(7, 2), 2.0)
    assert norm(zero) == 0.0
    assert cosine(zero, zero) == 0.0
    assert similarity({"a": zero}, {"a": Pair(gaussian(1, 9), gaussian(7, 1), 1.0)}) == 0.0
    assert similarity({"a": zero}, {"a": zero}, weighting="norm") == 0.0


def adapter(seed: int, **shapes: tuple[int, int]) -> dict[str, Pair]:
    return {
        name: Pair(gaussian(2, n, seed=seed + i), gaussian(m, 2, seed=seed + i + 50), 1.0 + seed)
        for i, (name, (m, n)) in enumerate(shapes.items())
    }


def test_similarity_is_the_mean_or_the_cosine_of_all_that_both_have() -> None:
    first = adapter(0, x=(7, 9), y=(4, 3), z=(5, 5))
    second = adapter(3, x=(7, 9), y=(4, 3), w=(2, 2))
    first["x"] = Pair(first["x"].a, first["x"].b, 20.0)
    wanted = (cosine(first["x"], second["x"]) + cosine(first["y"], second["y"])) / 2
    assert similarity(first, second, weighting="module") == pytest.approx(wanted, abs=1e-12)
    flat = [
        np.concatenate([dense(one["x"]).ravel(), dense(one["y"]).ravel()])
        for one in (first, second)
    ]
    wanted = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert similarity(first, second, weighting="norm") == pytest.approx(wanted, abs=1e-12)
    for weighting in ("module", "norm"):
        found = similarity(first, second, weighting=weighting)
        norms = norms_of(first)
        assert similarity(first, second, weighting=weighting, norms=norms) == found
        assert similarity(first, first, weighting=weighting) == pytest.approx(1.0, abs=1e-12)
        assert similarity(first, adapter(0, q=(2, 2)), weighting=weighting) == -math.inf


def test_mistakes_are_named() -> None:
    first, second = adapter(0, x=(7, 9)), adapter(0, x=(9, 7))
    with pytest.raises(MergeError, match=r"x: deltas of shapes \(7, 9\) and \(9, 7\)"):
        similarity(first, second)
    with pytest.raises(ValueError, match="weighting='size'"):
        similarity(first, first, weighting="size")


def test_no_dense_matrix_is_made() -> None:
    """Its 80 GB would not fit."""
    first, second = adapter(0, x=(100_000, 100_000)), adapter(3, x=(100_000, 100_000))
    assert abs(similarity(first, second)) < 1e-3
