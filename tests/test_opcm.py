"""OPCM against its authors' code, its identities, and cases worked by hand."""

import json
import math

import opcm_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soupkit.errors import MergeError
from soupkit.factored import Pair
from soupkit.opcm import (
    OpcmRule,
    fold,
    fold_core,
    is_projected,
    norm_of,
    project,
    rescaling,
)

CUTS = ("block", "two_sided")
LINEAR = "layers.0.q_proj.weight"
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))
ALPHAS = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def in_turn(name: str, deltas: list[Tensor], rule: OpcmRule) -> tuple[Tensor, list[float]]:
    """A_T of one parameter, and the squared norms of its deltas, in their order."""
    held = torch.zeros_like(deltas[0])
    for delta in deltas:
        held = fold(name, held, delta, rule)
    return held, [float(delta.double().square().sum()) for delta in deltas]


def fold_pairs(name: str, held: Pair, delta: Pair, rule: OpcmRule) -> Pair:
    basis_b, core, basis_a = fold_core(name, held, delta, rule)
    return Pair(a=basis_a.T, b=basis_b @ core, scale=1.0)


def low_rank(shape: tuple[int, int], rank: int, *, seed: int) -> Tensor:
    return normal(shape[0], rank, seed=seed) @ normal(rank, shape[1], seed=seed + 1)


def by_full_bases(delta: Tensor, held: Tensor, alpha: float, cut: str) -> Tensor:
    """The paper's sums and the code's blocks, term by term, for `held` of full rank."""
    left, values, right = torch.linalg.svd(held, full_matrices=True)
    shares = values.cumsum(0) / values.sum()
    first = next((i for i, share in enumerate(shares.tolist()) if share > alpha), 0)
    if alpha == 1:
        first = 0
    kept = torch.zeros_like(delta)
    for i in range(delta.shape[0]):
        for j in range(delta.shape[1]):
            if cut == "block":
                is_kept = i != j and not (i < first and j < first)
            else:
                is_kept = i != j and i >= first and j >= first
            if is_kept:
                kept += (left[:, i] @ delta @ right[j]) * torch.outer(left[:, i], right[j])
    return kept


@settings(max_examples=60, deadline=None)
@given(SHAPES, ALPHAS, st.sampled_from(CUTS), st.integers(0, 99))
def test_full_rank_gives_the_sums_of_paper_and_code(shape, alpha, cut, seed) -> None:
    held, delta = normal(*shape, seed=seed), normal(*shape, seed=seed + 1000)
    found = project(delta, held, OpcmRule(alpha, cut))
    expected = by_full_bases(delta, held, alpha, cut)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(delta.norm()))


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.3, [[0, 2, 3], [4, 0, 6], [7, 8, 0]]),
        (0.6, [[0, 2, 3], [4, 0, 6], [7, 8, 0]]),
        (0.9, [[0, 0, 3], [0, 0, 6], [7, 8, 0]]),
        (1.0, [[0, 2, 3], [4, 0, 6], [7, 8, 0]]),
    ],
)
def test_the_case_worked_by_hand(alpha: float, expected: list[list[int]]) -> None:
    held = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    delta = torch.arange(1.0, 10.0).view(3, 3)
    found = project(delta, held, OpcmRule(alpha))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(0, 9), ALPHAS, st.sampled_from(CUTS), st.integers(0, 99))
def test_the_identities_of_a_projection(shape, rank, alpha, cut, seed) -> None:
    """At right angles to what is held, linear, idempotent, never longer; of any rank."""
    rule = OpcmRule(alpha, cut)
    held = low_rank(shape, min(rank, *shape), seed=seed)
    first, second = normal(*shape, seed=seed + 7), normal(*shape, seed=seed + 8)
    kept = project(first, held, rule)
    size = float(first.norm())
    assert abs(float((kept * held).sum())) <= 1e-10 * size * float(held.norm())
    assert float(kept.norm()) <= size * (1 + 1e-12)
    near = {"rtol": 0.0, "atol": 1e-10 * (size + float(second.norm()))}
    torch.testing.assert_close(project(kept, held, rule), kept, **near)
    torch.testing.assert_close(project(first, 3.0 * held, rule), kept, **near)
    both = project(2.0 * first - second, held, rule)
    torch.testing.assert_close(both, 2.0 * kept - project(second, held, rule), **near)
    wider = project(first, held, OpcmRule(alpha, "block"))
    narrow = project(first, held, OpcmRule(alpha, "two_sided"))
    assert float(narrow.norm()) <= float(wider.norm()) + near["atol"]


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 3), st.integers(1, 3), ALPHAS, st.sampled_from(CUTS))
def test_factors_give_what_dense_deltas_give(shape, held_rank, rank, alpha, cut) -> None:
    rule = OpcmRule(alpha, cut)

    def pair(rank: int, scale: float, seed: int) -> Pair:
        return Pair(
            a=normal(rank, shape[1], seed=seed),
            b=normal(shape[0], rank, seed=seed + 1),
            scale=scale,
        )

    held, delta = pair(held_rank, -0.5, 3), pair(rank, 4.0, 5)
    found = fold_pairs(LINEAR, held, delta, rule)
    dense = [one.scale * one.b @ one.a for one in (held, delta)]
    expected = fold(LINEAR, *dense, rule)
    size = sum(float(one.norm()) for one in dense)
    torch.testing.assert_close(found.b @ found.a, expected, rtol=0, atol=1e-9 * size)
    assert found.rank <= held_rank + rank


@pytest.mark.parametrize("cut", CUTS)
def test_turned_factors_change_nothing(cut: str) -> None:
    """(B R, R^-1 A) is the same delta; projecting A and B apart would not see that."""
    held = Pair(a=normal(3, 9, seed=1), b=normal(7, 3, seed=2), scale=1.0)
    delta = Pair(a=normal(2, 9, seed=3), b=normal(7, 2, seed=4), scale=2.0)
    turn = normal(2, 2, seed=5)
    turned = Pair(a=torch.linalg.solve(turn, delta.a), b=delta.b @ turn, scale=2.0)
    one, two = (fold_pairs(LINEAR, held, each, OpcmRule(0.5, cut)) for each in (delta, turned))
    torch.testing.assert_close(one.b @ one.a, two.b @ two.a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", opcm_reference.ALPHAS)
def test_a_stream_of_tasks_ends_where_the_authors_code_ends(alpha: float) -> None:
    """The running sum, scaled once at the end, is the code's chain of lambdas; recorded results."""
    expected = json.loads(opcm_reference.RESULTS.read_text())[str(alpha)]
    base, *tasks = (
        dict(opcm_reference.model(task).state_dict()) for task in range(opcm_reference.TASKS + 1)
    )
    assert base.keys() == expected.keys()
    found = {
        name: in_turn(name, [task[name] - base[name] for task in tasks], OpcmRule(alpha))
        for name in base
    }
    norms = [norm_of([found[name][1][i] for name in base]) for i in range(len(tasks))]
    energy = sum(float(total.square().sum()) for total, _ in found.values())
    scale = rescaling(norms, energy)
    for name in base:
        wanted = torch.tensor(expected[name], dtype=torch.float64).view_as(base[name])
        torch.testing.assert_close(base[name] + scale * found[name][0], wanted)
    assert math.isclose(scale * math.sqrt(energy), sum(norms) / len(norms))


def test_energies_of_projected_tasks_add_up() -> None:
    held = normal(9, 6, seed=1)
    delta = normal(9, 6, seed=2)
    total = fold(LINEAR, held, delta, OpcmRule())
    kept = project(delta, held, OpcmRule())
    expected = float(held.square().sum() + kept.square().sum())
    assert math.isclose(float(total.square().sum()), expected, rel_tol=1e-12)


@pytest.mark.parametrize("factor", [1.0, -2.0])
def test_a_task_again_or_negated_adds_nothing_to_a_linear(factor: float) -> None:
    held = normal(6, 9, seed=1)
    kept = project(factor * held, held, OpcmRule())
    assert float(kept.norm()) <= 1e-12 * float(held.norm())
    bias = normal(6, seed=2)
    torch.testing.assert_close(
        fold("q_proj.bias", bias, factor * bias, OpcmRule()), (1 + factor) * bias
    )


def test_the_first_task_enters_whole_and_nothing_divides_by_zero() -> None:
    delta = normal(4, 6, seed=1)
    assert torch.equal(project(delta, torch.zeros_like(delta), OpcmRule()), delta)
    total, energies = in_turn(LINEAR, [torch.zeros(4, 6), torch.zeros(4, 6)], OpcmRule())
    assert not total.any()
    assert energies == [0.0, 0.0]
    assert rescaling([0.0, 0.0], 0.0) == 1.0


def test_experts_are_projected_one_by_one_and_embeddings_not_at_all() -> None:
    held, delta = normal(3, 5, 4, seed=1), normal(3, 5, 4, seed=2)
    found = fold("mlp.experts.gate_up_proj", held, delta, OpcmRule())
    for i in range(3):
        torch.testing.assert_close(found[i], fold(LINEAR, held[i], delta[i], OpcmRule()))
    assert not is_projected("model.embed_tokens.weight", (5, 4))
    assert not is_projected("conv.weight", (5, 4, 3))
    assert not is_projected("norm.weight", (5,))
    torch.testing.assert_close(
        fold("model.embed_tokens.weight", held[0], delta[0], OpcmRule()), held[0] + delta[0]
    )


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_large_float32_matrices_are_near_float64(shape, monkeypatch) -> None:
    monkeypatch.setattr("soupkit.opcm._WIDE_ENTRIES", 0)
    held, delta = normal(*shape, seed=1), normal(*shape, seed=2)
    found = project(delta.float(), held.float(), OpcmRule())
    assert found.dtype == torch.float32
    error = float((found.double() - project(delta, held, OpcmRule())).norm())
    assert error <= 1e-4 * float(delta.norm())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_input_is_named(bad: float) -> None:
    broken = torch.ones(3, 4)
    broken[1, 2] = bad
    pair = Pair(a=torch.ones(1, 4), b=torch.ones(3, 1), scale=1.0)
    rotten = Pair(a=broken[1:2], b=torch.ones(3, 1), scale=1.0)
    for act in (
        lambda: fold("q.weight", torch.ones(3, 4), broken, OpcmRule()),
        lambda: fold("q.weight", broken, torch.ones(3, 4), OpcmRule()),
        lambda: fold_pairs("q.weight", pair, rotten, OpcmRule()),
    ):
        with pytest.raises(MergeError, match=r"q\.weight"):
            act()
    with pytest.raises(MergeError, match=r"\(3, 4\), the task \(3, 5\)"):
        fold("q.weight", torch.ones(3, 4), torch.ones(3, 5), OpcmRule())
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            OpcmRule(alpha)
    with pytest.raises(ValueError, match="cut"):
        OpcmRule(0.5, "both")  # type: ignore[arg-type]
