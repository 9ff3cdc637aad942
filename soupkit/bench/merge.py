"""Truncated SVDs and svd_mean at rank 64: CPU time of one thread, energy kept, memory. Then merges
in training (soupkit.bench.strategies), and plain means of folders (soupkit.bench.offline_merge).

Matrices have a decaying spectrum (what fine-tuning gives) or a flat one (the worst case). A warm
start is the basis of the same matrix before a drift, white noise of a share of its norm. Baselines
are LAPACK's full SVD, which is also mergekit's extract-lora route, and torch.svd_lowrank where the
full one takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from soupkit.bench import offline_merge, strategies
from soupkit.bench.offline import Progress, silent
from soupkit.bench.rows import Row, compare
from soupkit.merge import MergeRule, merge_deltas, merge_with_cuts
from soupkit.svd import TruncatedSVD, truncated_svd

RANK = 64
SHAPES = ((576, 576), (1536, 576), (576, 1536), (2048, 2048), (4096, 4096), (4096, 14336))
QUICK_SHAPES = 3
# A full SVD of 2048 x 2048 takes 3 s, of 4096 x 4096 half a minute.
FULL_MAX = 2048
DRIFTS = (0.05, 0.3)
ENERGY_GOAL = 0.9999
MEMORY_GOAL = 4.0


def run(
    *,
    quick: bool,
    large: bool = False,
    program: str | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Rows for each shape and spectrum, then what a merge costs a run under each strategy, then
    folders; of large models, of 8 GB, folders only.

    Args:
        program: of mergekit; see soupkit.bench.mergekit.
    """
    within = [] if large else _training(quick=quick)
    return [
        *within,
        *offline_merge.rows(quick=quick, large=large, program=program, progress=progress),
    ]


def _training(*, quick: bool) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [
            row
            for shape in (SHAPES[:QUICK_SHAPES] if quick else SHAPES)
            for spectrum in ("decaying", "flat")
            # The flat worst case ends in an eigendecomposition of the short side: minutes there.
            if spectrum == "decaying" or min(shape) <= FULL_MAX
            for row in _rows(shape, spectrum, quick=quick)
        ]
    finally:
        torch.set_num_threads(threads)
    return [*found, *strategies.rows(quick=quick)]


def _matrix(shape: tuple[int, int], spectrum: str, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if spectrum == "flat":
        return noise
    short = min(shape)
    powers = torch.arange(1, short + 1).pow(-0.7)
    left = torch.randn(shape[0], short, generator=generator)
    right = torch.randn(short, shape[1], generator=generator)
    return (left * powers) @ right + 0.1 * noise


def _drifted(matrix: Tensor, share: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(matrix.shape, generator=generator)
    return matrix + noise * (share * float(matrix.norm() / noise.norm()))


def _full(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    cut: Tensor = (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
    return cut


def _lowrank(matrix: Tensor) -> Tensor:
    # It draws from the global generator, which is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, RANK, niter=2)
    return (u * s) @ v.T


def _rows(shape: tuple[int, int], spectrum: str, *, quick: bool) -> list[Row]:
    """Times, energies and, for decaying spectra, the memory of a merge."""
    generator = torch.Generator().manual_seed(0)
    matrix = _matrix(shape, spectrum, generator)
    name = f"{shape[0]}x{shape[1]} {spectrum}"
    starts = {
        f"{name} warm {share:.0%}": truncated_svd(
            _drifted(matrix, share, generator), rank=RANK
        ).short_side
        for share in DRIFTS
    }
    ways: dict[str, Callable[[], Tensor]] = {
        f"{name} cold": lambda: truncated_svd(matrix, rank=RANK).matrix()
    }
    for label, start in starts.items():
        ways[label] = lambda start=start: truncated_svd(matrix, rank=RANK, start=start).matrix()  # type: ignore[misc]
    is_small = min(shape) <= FULL_MAX
    if is_small:
        ways[f"{name} lowrank"] = lambda: _lowrank(matrix)
    against = "full SVD" if is_small else "svd_lowrank niter=2"
    baseline = _full if is_small else _lowrank
    repeats = 2 if quick else 3
    rows = [
        compare(label, way, lambda: baseline(matrix), against=against, repeats=repeats)
        for label, way in ways.items()
    ]
    rows += _energies(matrix, ways)
    if spectrum == "decaying":
        rows.append(_memory(name, [matrix, _drifted(matrix, DRIFTS[0], generator)]))
        rows += _merges(name, [matrix, _drifted(matrix, DRIFTS[0], generator)], repeats=repeats)
    return rows


def _merges(name: str, deltas: list[Tensor], *, repeats: int) -> list[Row]:
    """A merge of two deltas, 5 % apart, with one cut known, against a cold one."""
    rule = MergeRule("svd_mean", rank=RANK)
    known = merge_with_cuts("w", deltas, rule).cuts[:1]
    row = compare(
        f"{name}, merge with a known cut",
        lambda: merge_with_cuts("w", deltas, rule, known=known),
        lambda: merge_deltas("w", deltas, rule),
        against="cold merge",
        repeats=repeats,
    )
    return [row]


def _energies(matrix: Tensor, ways: dict[str, Callable[[], Tensor]]) -> list[Row]:
    """The energy that each way captures as a share of the best; none where that is too dear."""
    if min(matrix.shape) > FULL_MAX:
        return []
    total = float(matrix.double().square().sum())
    best = float(torch.linalg.svdvals(matrix)[:RANK].double().square().sum())
    rows = []
    for label, way in ways.items():
        kept = total - float((matrix - way()).double().square().sum())
        ratio = kept / best
        goal = None if label.endswith("lowrank") else ENERGY_GOAL
        rows.append(
            Row(f"{label}, energy", kept / total, "", "best", ratio, ratio, ratio, goal, "higher")
        )
    return rows


def _memory(name: str, deltas: list[Tensor]) -> Row:
    """Most memory that one merge holds beside its deltas and the factors, in matrices."""
    rule = MergeRule("svd_mean", rank=RANK)
    factors = sum(cut.left.nbytes + cut.right.nbytes for cut in _all_cuts(deltas, rule))
    peak = peak_bytes(lambda: merge_deltas("w", deltas, rule)) - factors
    ratio = peak / deltas[0].nbytes
    label = f"{name}, memory"
    return Row(label, peak / 1e6, "MB", "one matrix", ratio, ratio, ratio, MEMORY_GOAL)


def _all_cuts(deltas: list[Tensor], rule: MergeRule) -> list[TruncatedSVD]:
    done = merge_with_cuts("w", deltas, rule)
    return [cut for cuts in done.cuts if cuts is not None for cut in cuts]


def peak_bytes(act: Callable[[], object]) -> int:
    """Most bytes of CPU tensors that were allocated during a call and held at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    held = peak = 0
    results = seen.profiler.kineto_results  # no public way to them
    steps = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(steps, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)
