"""Truncated SVDs against numpy's in float64: algorithms.md 2.6 (1, 2) and 5; TB49, 51, 55."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit import solvers
from soupkit.errors import MergeError
from soupkit.svd import effective_rank, singular_values, spectrum, truncated_svd

SPECTRA = ("flat", "half", "one", "two", "spike", "low")


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthonormal(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(gaussian(rows, columns, seed=seed).double()).Q


def with_spectrum(values: torch.Tensor, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """float32 matrix with the singular values given, over random bases."""
    count = values.numel()
    left, right = orthonormal(rows, count, seed), orthonormal(columns, count, seed + 1)
    return ((left * values.double()) @ right.T).float()


def of_kind(kind: str, rows: int, columns: int) -> torch.Tensor:
    index = torch.arange(1, min(rows, columns) + 1).double()
    if kind == "flat":
        return gaussian(rows, columns)
    values = {
        "half": index**-0.5,
        "one": 1 / index,
        "two": index**-2,
        "spike": torch.where(index <= 8, 1.0, 0.02),
        "low": torch.where(index <= 12, 1.0, 0.0),
    }[kind]
    return with_spectrum(values, rows, columns)


def numpy_values(matrix: torch.Tensor) -> np.ndarray:
    return np.linalg.svd(matrix.double().numpy(), compute_uv=False)


def check_truncation(
    matrix: torch.Tensor,
    rank: int,
    start: torch.Tensor | None = None,
    tolerance: float = solvers.TOLERANCE,
) -> str:
    """Eckart-Young within the promised tolerance, factors as described; returns the solver."""
    cut = truncated_svd(matrix, rank=rank, start=start)
    exact = numpy_values(matrix)
    kept = min(rank, exact.size)
    assert cut.rank == kept
    assert cut.left.shape == (matrix.shape[0], kept)
    assert cut.right.shape == (kept, matrix.shape[1])
    assert cut.left.dtype == cut.right.dtype == torch.float32
    assert cut.singular_values.dtype == torch.float64
    total = float((exact**2).sum())
    assert cut.total_energy == pytest.approx(total, rel=1e-6)
    error = float((matrix.double() - cut.left.double() @ cut.right.double()).square().sum())
    best = float((exact[kept:] ** 2).sum())
    # 1e-12 of the energy is a relative error of 1e-6, the rounding of the float32 factors.
    assert error <= best * (1 + tolerance) + 1e-12 * total
    assert error >= best * (1 - 1e-5) - 1e-12 * total
    # Rows that are orthonormal to 5e-6 (below) leave some 1e-6 of the energy open.
    assert cut.kept_energy == pytest.approx(1 - error / total, abs=3e-6)
    gram = cut.right.double() @ cut.right.double().T
    torch.testing.assert_close(gram, torch.eye(kept).double(), rtol=0.0, atol=5e-6)
    norms = cut.left.double().norm(dim=0)
    torch.testing.assert_close(
        norms.sort(descending=True).values, cut.singular_values, rtol=1e-5, atol=1e-6
    )
    return cut.solver


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 30), st.integers(0, 2**31))
def test_small_matrices_of_every_shape(rows: int, columns: int, rank: int, seed: int) -> None:
    matrix = gaussian(rows, columns, seed=seed)
    check_truncation(matrix, rank)
    cut = truncated_svd(matrix, rank=rank)
    exact = numpy_values(matrix)[: cut.rank]
    np.testing.assert_allclose(cut.singular_values.numpy(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(300, 270, 60), (270, 600, 60), (400, 380, 12), (160, 200, 30)]
)
@pytest.mark.parametrize("krylov_min", [0, 768])
def test_every_solver_is_within_its_tolerance(
    kind: str, rows: int, columns: int, rank: int, krylov_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solvers, "_KRYLOV_MIN", krylov_min)
    print(check_truncation(of_kind(kind, rows, columns), rank))


def test_the_solver_follows_size_rank_and_spectrum() -> None:
    """TB68: no full SVD of a large matrix."""
    assert check_truncation(gaussian(40, 30), 5) == "full"
    assert check_truncation(gaussian(160, 200), 30) == "gram"
    assert check_truncation(gaussian(300, 270), 60) == "gram32"
    assert check_truncation(of_kind("one", 300, 270), 60) == "gram32 refined"
    assert check_truncation(gaussian(400, 380), 12) == "gram32"
    assert check_truncation(of_kind("one", 800, 780), 12).startswith("krylov q=")
    assert truncated_svd(torch.zeros(4, 3), rank=2).solver == "none"


def test_krylov_that_does_not_converge_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_KRYLOV_MIN", 0)
    monkeypatch.setattr(solvers, "TOLERANCE", 1e-9)
    matrix = gaussian(300, 300)
    assert truncated_svd(matrix, rank=18).solver in ("gram", "gram32 refined", "gram32")
    error = float((matrix - truncated_svd(matrix, rank=18).matrix()).double().square().sum())
    assert error == pytest.approx(float((numpy_values(matrix)[18:] ** 2).sum()), rel=1e-7)


def test_no_other_matrix_of_the_rank_does_better() -> None:
    matrix = gaussian(12, 9)
    best = float((matrix - truncated_svd(matrix, rank=3).matrix()).norm())
    for seed in range(50):
        other = gaussian(12, 3, seed=seed) @ torch.linalg.pinv(gaussian(12, 3, seed=seed)) @ matrix
        assert float((matrix - other).norm()) >= best - 1e-5


def test_spectral_error_is_the_next_singular_value() -> None:
    matrix = gaussian(40, 30)
    residual = matrix - truncated_svd(matrix, rank=7).matrix()
    assert numpy_values(residual)[0] == pytest.approx(numpy_values(matrix)[7], rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 7), (300, 280)])
def test_full_rank_gives_the_matrix_back_and_rank_zero_nothing(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    torch.testing.assert_close(
        truncated_svd(matrix, rank=999).matrix(), matrix, rtol=1e-5, atol=1e-5
    )
    none = truncated_svd(matrix, rank=0)
    assert none.rank == 0
    assert none.kept_energy == 0.0
    assert torch.equal(none.matrix(), torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (0, 5), (5, 0), (0, 0)])
def test_tb55_tiny_and_empty_matrices(shape: tuple[int, int]) -> None:
    matrix = torch.full(shape, 3.0)
    cut = truncated_svd(matrix, rank=64)
    assert cut.rank == min(shape)
    assert cut.matrix().shape == shape
    torch.testing.assert_close(cut.matrix(), matrix)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (200, 180)])
def test_a_zero_matrix_keeps_all_of_its_energy(shape: tuple[int, int]) -> None:
    for cut in (
        truncated_svd(torch.zeros(shape), rank=2),
        truncated_svd(torch.zeros(shape), energy=0.9),
    ):
        assert cut.kept_energy == 1.0
        assert torch.equal(cut.matrix(), torch.zeros(shape))
    assert not singular_values(torch.zeros(shape)).any()
    gram = truncated_svd(torch.zeros(shape), rank=2).right
    assert torch.equal(gram @ gram.T, torch.eye(2))


@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (140, 300)])
def test_rows_stay_orthonormal_past_the_rank(shape: tuple[int, int], rank: int) -> None:
    matrix = gaussian(shape[0], 2) @ gaussian(2, shape[1], seed=1)
    check_truncation(matrix, rank)


@pytest.mark.parametrize("energy", [0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(20, 30), (150, 140)])
def test_energy_keeps_the_least_rank_that_suffices(energy: float, shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    cut = truncated_svd(matrix, energy=energy)
    share = np.cumsum(numpy_values(matrix) ** 2) / (numpy_values(matrix) ** 2).sum()
    assert cut.kept_energy >= energy - 1e-6
    assert cut.rank == int((share < energy - 1e-9).sum()) + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tb49_half_precision_is_raised_to_float32(dtype: torch.dtype) -> None:
    matrix = gaussian(8, 6).to(dtype)
    cut = truncated_svd(matrix, rank=6)
    assert cut.left.dtype == torch.float32
    torch.testing.assert_close(cut.matrix(), matrix.float(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(singular_values(matrix).numpy(), numpy_values(matrix), rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tb51_non_finite_is_refused_before_lapack(value: float) -> None:
    matrix = gaussian(8, 6)
    matrix[3, 2] = value
    for act in (lambda: truncated_svd(matrix, rank=2), lambda: singular_values(matrix)):
        with pytest.raises(MergeError, match=r"\(3, 2\)"):
            act()


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1e15, 1e37])
@pytest.mark.parametrize("shape", [(12, 10), (270, 300)])
def test_scale_does_not_matter(scale: float, shape: tuple[int, int]) -> None:
    plain = with_spectrum(torch.arange(10, 0, -1) / 10, *shape)
    matrix = plain * scale
    cut = truncated_svd(matrix, rank=4)
    expected = truncated_svd(matrix.double() / scale, rank=4)
    # Subnormal float32 has few bits left: those of the input bound those of the result.
    rel = max(1e-4, 2.0**-149 / (float(matrix.abs().max()) / 8))
    np.testing.assert_allclose(
        (cut.singular_values / scale).numpy(), expected.singular_values.numpy(), rtol=rel
    )
    assert cut.kept_energy == pytest.approx(expected.kept_energy, rel=rel)


def test_the_same_seed_gives_the_same_bits_and_the_global_generator_is_left_alone() -> None:
    matrix = of_kind("half", 800, 780)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = truncated_svd(matrix, rank=10, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    again = truncated_svd(matrix, rank=10, seed=5)
    assert first.solver.startswith("krylov")
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.right, again.right)
    other = truncated_svd(matrix, rank=10, seed=6)
    torch.testing.assert_close(other.matrix(), first.matrix(), rtol=0.0, atol=2e-3)


def test_the_callers_matmul_precision_does_not_reach_the_result() -> None:
    matrix = gaussian(300, 270)
    exact = truncated_svd(matrix, rank=50).matrix()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(truncated_svd(matrix, rank=50).matrix(), exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_gradients_are_not_recorded() -> None:
    matrix = gaussian(8, 6).requires_grad_()
    assert not truncated_svd(matrix, rank=2).matrix().requires_grad


@pytest.mark.parametrize("size", [20, 150])
def test_a_failing_solver_is_followed_by_another(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ladder: LAPACK gives up on the first choice, the other float64 solver takes over."""
    first = "_full" if size == 20 else "_gram64"

    def fail(tall: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise solvers.LinAlgError("did not converge")

    matrix = gaussian(size, size)
    monkeypatch.setattr(solvers, first, fail)
    assert check_truncation(matrix, 5) == ("gram" if size == 20 else "full")
    monkeypatch.setattr(solvers, "_full", fail)
    monkeypatch.setattr(solvers, "_gram64", fail)
    with pytest.raises(MergeError, match="full: did not converge"):
        truncated_svd(matrix, rank=5)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (150, 140), (140, 400)])
def test_the_whole_spectrum_is_numpys(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    parts = spectrum(matrix)
    np.testing.assert_allclose(parts.singular_values.numpy(), numpy_values(matrix), rtol=1e-9)
    wide = matrix.double() if shape[0] >= shape[1] else matrix.T.double()
    image = wide @ parts.vectors
    torch.testing.assert_close(image.norm(dim=0), parts.singular_values, rtol=1e-9, atol=1e-9)


def test_effective_rank_oracles() -> None:
    """algorithms.md 2.6 (1)."""
    for size in (1, 4, 50):
        assert effective_rank(torch.ones(size)) == pytest.approx(size, rel=1e-12)
        assert effective_rank(singular_values(torch.eye(size))) == pytest.approx(size, rel=1e-12)
    assert effective_rank(torch.tensor([4.0, 2.0, 1.0])) == pytest.approx(2.60049, abs=5e-6)
    assert effective_rank(2.0 ** -torch.arange(8)) == pytest.approx(3.89867, abs=5e-6)
    rank_one = gaussian(9, 1).double() @ gaussian(1, 7).double()
    assert effective_rank(singular_values(rank_one)) == pytest.approx(1.0, abs=1e-9)
    assert effective_rank(torch.zeros(5)) == 0.0
    assert effective_rank(torch.zeros(0)) == 0.0
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == 1.0


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_effective_rank_is_bounded_and_invariant(
    rows: int, columns: int, factor: float, seed: int
) -> None:
    matrix = gaussian(rows, columns, seed=seed).double()
    rank = effective_rank(singular_values(matrix))
    assert 1 - 1e-9 <= rank <= np.linalg.matrix_rank(matrix.numpy()) + 1e-9
    assert effective_rank(singular_values(matrix * factor)) == pytest.approx(rank, rel=1e-9)
    turned = orthonormal(rows, rows, seed % 1000) @ matrix @ orthonormal(columns, columns, 7)
    assert effective_rank(singular_values(turned)) == pytest.approx(rank, rel=1e-9)


def test_mistakes_are_named() -> None:
    matrix = gaussian(3, 3)
    with pytest.raises(ValueError, match="exactly one"):
        truncated_svd(matrix)
    with pytest.raises(ValueError, match="exactly one"):
        truncated_svd(matrix, rank=1, energy=0.5)
    with pytest.raises(ValueError, match="rank=-1"):
        truncated_svd(matrix, rank=-1)
    for energy in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="energy"):
            truncated_svd(matrix, energy=energy)
    with pytest.raises(ValueError, match="needs a floating matrix"):
        truncated_svd(gaussian(3), rank=1)
    with pytest.raises(ValueError, match="needs a floating matrix"):
        singular_values(torch.ones(3, 3, dtype=torch.int64))
    for bad in (torch.tensor([-1.0]), torch.tensor([math.nan])):
        with pytest.raises(ValueError, match="singular values"):
            effective_rank(bad)


@pytest.mark.parametrize("rank", [5, 20, 200])
@pytest.mark.parametrize("kind", ["diagonal", "permuted", "dense"])
def test_krylov_basis_stays_orthonormal(kind, rank):
    # A block that adds nothing to the basis, or more of them than the short side has room for.
    values = torch.arange(1, 301).double() ** -2
    matrix = with_spectrum(values, 340, 300) if kind == "dense" else torch.zeros(340, 300)
    if kind != "dense":
        order = torch.arange(300) if kind == "diagonal" else torch.arange(300).flip(0)
        matrix[order, torch.arange(300)] = values.float()
    cut = truncated_svd(matrix, rank=rank)
    gram = cut.right.double() @ cut.right.double().T
    torch.testing.assert_close(gram, torch.eye(rank).double(), rtol=0, atol=1e-5)
    best = float(values[rank:].square().sum())
    left_over = float((matrix.double() - cut.left.double() @ cut.right.double()).square().sum())
    assert left_over <= best * (1 + 1e-3) + 1e-12


def test_sparse_matrix_of_low_rank_is_cut_exactly_by_krylov():
    matrix = torch.zeros(900, 800)
    matrix[torch.arange(57), torch.arange(57)] = 0.8 ** torch.arange(57)
    cut = truncated_svd(matrix, rank=45)
    best = float(matrix.diagonal()[45:].double().square().sum())
    assert float((matrix - cut.matrix()).double().square().sum()) <= best * 1.001 + 1e-12


def test_float64_beyond_float32_is_refused():
    with pytest.raises(MergeError, match="inf"):
        truncated_svd(torch.full((3, 3), 1e200, dtype=torch.float64), rank=1)
    with pytest.raises(MergeError, match="inf"):
        truncated_svd(torch.full((3, 3), 1e39, dtype=torch.float64), rank=1)


def drifted(matrix: torch.Tensor, share: float, seed: int = 9) -> torch.Tensor:
    """The matrix plus white noise of a share of its norm."""
    noise = gaussian(*matrix.shape, seed=seed)
    return matrix + noise * (share * matrix.norm() / noise.norm())


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(300, 270), (270, 600), (533, 411)])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 2.0])
def test_a_warm_start_is_as_accurate_as_a_cold_one(
    kind: str, shape: tuple[int, int], share: float
) -> None:
    matrix = of_kind(kind, *shape)
    start = truncated_svd(drifted(matrix, share), rank=30).short_side
    solver = check_truncation(matrix, 30, start)
    if share == 0.0 and kind != "two":
        assert solver == "warm q=1"


@pytest.mark.parametrize("kind", ["half", "one", "spike"])
def test_a_rotten_start_costs_time_never_accuracy(kind: str) -> None:
    matrix = of_kind(kind, 340, 300)
    vectors = torch.from_numpy(np.linalg.svd(matrix.double().numpy())[2].T.copy())
    for start in (
        torch.zeros(300, 20),
        torch.ones(300, 20),
        vectors[:, -20:],
        vectors[:, 20:60],
        torch.cat([vectors[:, :8], vectors[:, 9:30]], dim=1),
        gaussian(300, 3),
        torch.zeros(300, 0),
        vectors[:, :20] * 1e30,
        (vectors[:, :20] * 1e-42).float(),
        vectors[:, :20].half(),
        vectors[:, :20] @ gaussian(20, 20).double(),
    ):
        check_truncation(matrix, 20, start)


def test_a_vector_that_the_start_lacks_is_found() -> None:
    """The largest one, at right angles to the start up to float32 rounding."""
    left, right = orthonormal(500, 400, 1), orthonormal(400, 400, 2)
    values = torch.cat([torch.linspace(3, 2, 21), torch.linspace(0.1, 0.05, 379)]).double()
    matrix = ((left * values) @ right.T).float()
    assert check_truncation(matrix, 20, right[:, 1:21]).startswith("warm q=")


def test_a_small_gain_is_not_taken_for_the_end_in_a_tight_cluster() -> None:
    """Two passes once lost 9e-4 of the dropped energy here, at 1536 x 4096."""
    for width, rank in ((1e-3, 24), (1e-2, 24), (3e-2, 40), (1e-1, 24)):
        values = torch.full((800,), 0.05).double()
        values[:150] = 1 + width * torch.linspace(1, -1, 150)
        values[: rank - 5] = 4.0
        matrix = with_spectrum(values, 900, 800)
        # An estimate decides: it missed by 1.4 TOLERANCE in the worst of 554 random clusters.
        print(width, check_truncation(matrix, rank, tolerance=2 * solvers.TOLERANCE))
        start = truncated_svd(drifted(matrix, 0.05), rank=rank).short_side
        print(width, check_truncation(matrix, rank, start, tolerance=2 * solvers.TOLERANCE))


@settings(deadline=None, max_examples=25)
@given(
    st.integers(260, 330),
    st.integers(1, 60),
    st.floats(0, 3),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_warm_starts_of_any_spectrum(
    short: int, rank: int, power: float, share: float, seed: int
) -> None:
    matrix = with_spectrum(
        torch.arange(1, short + 1).double() ** -power, short + 7, short, seed % 99
    )
    matrix = matrix if seed % 2 else matrix.T.contiguous()
    start = truncated_svd(drifted(matrix, share, seed), rank=rank).short_side
    check_truncation(matrix, rank, start, tolerance=2 * solvers.TOLERANCE)


def test_a_warm_start_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    matrix = of_kind("one", 400, 300)
    start = truncated_svd(drifted(matrix, 0.05), rank=20).short_side
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = truncated_svd(matrix, rank=20, seed=5, start=start)
    assert torch.equal(torch.get_rng_state(), state)
    again = truncated_svd(matrix, rank=20, seed=5, start=start)
    assert first.solver.startswith("warm")
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.right, again.right)


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (300, 280), (280, 300)])
def test_the_short_side_is_orthonormal_and_leads(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape)
    matrix[:, 0] = 0
    cut = truncated_svd(matrix, rank=4)
    assert cut.short_side.shape == (min(shape), 4)
    side = cut.short_side.double()
    torch.testing.assert_close(side.T @ side, torch.eye(4).double(), rtol=0, atol=1e-5)
    tall = matrix.double() if shape[0] >= shape[1] else matrix.double().T
    torch.testing.assert_close((tall @ side).norm(dim=0), cut.singular_values, rtol=1e-5, atol=0)
    zero = truncated_svd(torch.zeros(6, 9), rank=3).short_side
    torch.testing.assert_close(zero.T @ zero, torch.eye(3))


def test_mistaken_starts_are_named() -> None:
    matrix = gaussian(300, 270)
    for start in (gaussian(300, 5), gaussian(270), torch.ones(270, 5, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"floating columns \[270, k\]"):
            truncated_svd(matrix, rank=5, start=start)
    with pytest.raises(ValueError, match="leave start out"):
        truncated_svd(matrix, energy=0.5, start=gaussian(270, 5))
    bad = gaussian(270, 5)
    bad[7, 3] = math.nan
    with pytest.raises(MergeError, match=r"start: nan at index \(7, 3\)"):
        truncated_svd(matrix, rank=5, start=bad)
