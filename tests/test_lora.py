"""Deltas as thin factors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.errors import MergeError
from soupkit.lora import factor, numerical_rank
from soupkit.merge import MergeRule, merge_deltas


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    return gaussian(rows, rank, seed=seed) @ gaussian(rank, columns, seed=seed + 1)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**31))
def test_the_rank_of_a_product_is_found_and_nothing_is_lost(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    delta = low_rank(rows, columns, rank, seed)
    expected = int(np.linalg.matrix_rank(delta.numpy()))
    assert numerical_rank(delta) == expected
    factors, lost = factor(delta)
    assert factors.rank == expected <= rank
    assert factors.a.shape == (expected, columns)
    assert factors.b.shape == (rows, expected)
    assert factors.a.dtype == factors.b.dtype == torch.float32
    assert lost <= 1e-9
    torch.testing.assert_close(factors.b @ factors.a, delta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (300, 280)])
def test_a_cut_loses_the_tail_of_the_spectrum(shape: tuple[int, int]) -> None:
    delta = gaussian(*shape)
    factors, lost = factor(delta, rank=6)
    squares = np.linalg.svd(delta.double().numpy(), compute_uv=False) ** 2
    assert factors.rank == 6
    assert lost == pytest.approx(squares[6:].sum() / squares.sum(), rel=1e-3)
    assert torch.equal(factors.matrix(), factors.b @ factors.a)


def test_both_factors_carry_the_root_of_the_singular_values() -> None:
    delta = gaussian(12, 9)
    factors, _ = factor(delta, rank=4)
    values = np.linalg.svd(delta.double().numpy(), compute_uv=False)[:4]
    np.testing.assert_allclose(factors.a.norm(dim=1).numpy(), values**0.5, rtol=1e-5)
    np.testing.assert_allclose(factors.b.norm(dim=0).numpy(), values**0.5, rtol=1e-5)


def test_a_merge_of_two_truncations_has_twice_their_rank() -> None:
    """The delta after an svd_mean merge travels as an adapter without loss."""
    merged, _ = merge_deltas(
        "w", [gaussian(300, 200), gaussian(300, 200, seed=1)], MergeRule(rank=5)
    )
    factors, lost = factor(merged)
    assert factors.rank == 10
    assert lost <= 1e-9


@pytest.mark.parametrize("rank", [None, 3])
def test_a_zero_delta(rank: int | None) -> None:
    factors, lost = factor(torch.zeros(5, 4), rank=rank)
    assert numerical_rank(torch.zeros(5, 4)) == 0
    assert lost == 0.0
    assert torch.equal(factors.matrix(), torch.zeros(5, 4))
    assert factors.rank == (0 if rank is None else rank)


def test_a_tolerance_ignores_a_small_tail() -> None:
    delta = torch.diag(torch.tensor([1.0, 0.5, 1e-3]))
    assert numerical_rank(delta) == 3
    assert numerical_rank(delta, tolerance=1e-2) == 2
    factors, lost = factor(delta, tolerance=1e-2)
    assert factors.rank == 2
    assert lost == pytest.approx(1e-6 / 1.250001, rel=1e-3)


def test_half_precision_is_raised() -> None:
    delta = low_rank(8, 6, 2).bfloat16()
    factors, lost = factor(delta, rank=6)
    assert factors.a.dtype == torch.float32
    assert lost <= 1e-10


def test_mistakes_are_named() -> None:
    delta = gaussian(4, 3)
    with pytest.raises(ValueError, match="rank=0"):
        factor(delta, rank=0)
    with pytest.raises(ValueError, match="tolerance"):
        factor(delta, tolerance=1.0)
    with pytest.raises(ValueError, match="floating matrix"):
        factor(delta[0], rank=1)
    delta[1, 2] = float("nan")
    with pytest.raises(MergeError, match=r"\(1, 2\)"):
        factor(delta)
