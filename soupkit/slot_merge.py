"""A slot of a pool and the adapter that joins it, as one adapter; module by module, as factors.

With n tasks in the slot afterwards, w = (1 - 1/n, 1/n), delta = scale * b @ a of each side:
    history_mean  w_1 held + w_2 incoming: the mean of all n, in whatever order they came
    opcm          A = held / rescaling + P(incoming), over all modules rescaled to the mean norm
    ties          trim both to their largest entries; elect sign(w_1 held + w_2 incoming); the mean
                  of those that agree, by w. It is TIES (arXiv 2306.01708) of n - 1 equal deltas
                  and the new one.
    dare          history_mean of what is left of a task when entries are dropped at random and the
                  rest divided by the share kept (arXiv 2311.03099). A task is dropped from once.
The union of modules, one that a side lacks is zero there. Sums are made of deltas, not of a and b
each by itself (algorithms.md 4.3), then cut by SVD. ties and dare hold one dense delta at a time.
Not here: names of adapters, files, and which slot.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soupkit.alike import norms_of
from soupkit.errors import MergeError
from soupkit.factored import Pair, decompose, span
from soupkit.kmerge import PoolRule
from soupkit.lora import factor
from soupkit.numeric import check_finite, full_precision, squared_norm
from soupkit.opcm import fold_core, rescaling

# Singular values below this share of the largest hold only the rounding of float32 factors.
_FLOOR = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot remembers of its merges beside its deltas.

    Args:
        tasks: merged into it so far. norms: the sum of their norms, and rescaling: of A, by which
            it enters the slot (both opcm's).
    """

    tasks: int = 1
    norms: float = 0.0
    rescaling: float = 1.0


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What a merge did.

    Args:
        lost: share of the merged delta's energy that the cut to a rank lost, by module.
        lost_energy: the same over all modules. ranks: written, by module.
    """

    lost: Mapping[str, float]
    lost_energy: float
    ranks: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A merged module: its factors, its energy, and the share of energy that the cut lost."""

    pair: Pair
    energy: float
    lost: float


def first_state(modules: Mapping[str, Pair]) -> SlotState:
    """The state of a slot that holds one task, of these modules."""
    return SlotState(1, norm_of_all(modules))


def norm_of_all(modules: Mapping[str, Pair]) -> float:
    """The norm over all modules together."""
    return math.hypot(*norms_of(modules).values())


def merge_modules(
    held: Mapping[str, Pair],
    incoming: Mapping[str, Pair],
    rule: PoolRule,
    state: SlotState,
    *,
    rank: int | None = None,
) -> tuple[dict[str, Pair], SlotState, SlotReport]:
    """Merge an adapter into a slot; deterministic. O((m + n) (sum of ranks)^2) a module, but for
    ties and dare.

    Args:
        held, incoming: by module name; a module is taken from them once, so they may read it then.
        state: of `held`. rank: to cut to; None: the rule's.
    Returns:
        Float32 factors of scale 1 and rank at least 1, fresh memory; the state; what was lost.
    Raises:
        MergeError: a module has other shapes on both sides, or an entry is not finite.
    """
    method = _METHODS[rule.merge]
    cuts: dict[str, _Cut] = {}
    for name in sorted({*held, *incoming}):
        ours, theirs = (_finite(name, side.get(name)) for side in (held, incoming))
        if ours is not None and theirs is not None and ours.shape != theirs.shape:
            raise MergeError(
                f"{name}: the slot has shape {ours.shape}, the adapter {theirs.shape}: they are of "
                "different models"
            )
        job = _Job(name, rule, state, rule.rank if rank is None else rank)
        cuts[name] = method(job, ours, theirs)
    modules = {name: cut.pair for name, cut in cuts.items()}
    done = SlotState(state.tasks + 1, state.norms, 1.0)
    if rule.merge == "opcm":
        norms = state.norms + norm_of_all(incoming)
        kept = math.fsum(cut.energy * (1 - cut.lost) for cut in cuts.values())
        done = SlotState(done.tasks, norms, rescaling([norms / done.tasks], kept))
        modules = {name: replace(pair, b=pair.b * done.rescaling) for name, pair in modules.items()}
    return modules, done, _report(cuts)


def _report(cuts: Mapping[str, _Cut]) -> SlotReport:
    total = math.fsum(cut.energy for cut in cuts.values())
    lost = math.fsum(cut.energy * cut.lost for cut in cuts.values())
    return SlotReport(
        lost={name: cut.lost for name, cut in cuts.items()},
        lost_energy=lost / total if total else 0.0,
        ranks={name: cut.pair.rank for name, cut in cuts.items()},
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """How one module is merged."""

    name: str
    rule: PoolRule
    state: SlotState
    rank: int | None

    @property
    def weights(self) -> tuple[float, float]:
        """Of what is held and of what comes: every task counts the same."""
        return 1 - 1 / (self.state.tasks + 1), 1 / (self.state.tasks + 1)


def _mean(job: _Job, ours: Pair | None, theirs: Pair | None) -> _Cut:
    return _cut(job, _sum(ours, theirs, job.weights))


def _opcm(job: _Job, ours: Pair | None, theirs: Pair | None) -> _Cut:
    held = None if ours is None else replace(ours, scale=ours.scale / job.state.rescaling)
    if held is None or theirs is None:
        return _cut(job, _sum(held, theirs, (1.0, 1.0)))
    # As a parameter is named: that tells tables of embeddings, which are summed.
    return _cut_core(job, *fold_core(f"{job.name}.weight", held, theirs, job.rule.opcm))


def _ties(job: _Job, ours: Pair | None, theirs: Pair | None) -> _Cut:
    sides = [
        (weight, trim(pair.matrix(), job.rule.density))
        for weight, pair in zip(job.weights, (ours, theirs), strict=True)
        if pair is not None
    ]
    return _factored(job, elected_mean(sides))


def _dare(job: _Job, ours: Pair | None, theirs: Pair | None) -> _Cut:
    sides = []
    for index, pair in enumerate((ours, theirs)):
        if pair is None:
            continue
        delta = pair.matrix()
        if index or job.state.tasks == 1:
            number = job.state.tasks + index
            seed = zlib.crc32(f"{job.rule.seed}:{job.name}:{number}".encode())
            delta = drop(delta, job.rule.density, seed)
        sides.append(delta.mul_(job.weights[index]))
    return _factored(job, sides[0] if len(sides) == 1 else sides[0].add_(sides[1]))


_METHODS: Mapping[str, Callable[[_Job, Pair | None, Pair | None], _Cut]] = {
    "history_mean": _mean,
    "opcm": _opcm,
    "ties": _ties,
    "dare": _dare,
}


def trim(delta: Tensor, density: float) -> Tensor:
    """The delta with all but its largest int(density * entries) entries 0; fresh memory."""
    flat = delta.reshape(-1)
    largest = flat.abs().topk(int(density * flat.numel())).indices
    return torch.zeros_like(flat).index_put_((largest,), flat[largest]).reshape(delta.shape)


def elected_mean(sides: list[tuple[float, Tensor]]) -> Tensor:
    """The weighted mean of the entries that have the sign of the weighted sum (0: positive)."""
    total, mass = torch.zeros_like(sides[0][1]), torch.zeros_like(sides[0][1])
    for weight, delta in sides:
        total.add_(delta, alpha=weight)
    is_up = total >= 0
    total.zero_()
    for weight, delta in sides:
        agrees = torch.where(is_up, delta > 0, delta < 0)
        total.add_(delta * agrees, alpha=weight)
        mass.add_(agrees, alpha=weight)
    return total.div_(torch.where(mass > 0, mass, 1.0))


def drop(delta: Tensor, density: float, seed: int) -> Tensor:
    """Each entry kept with probability `density` and divided by it, else 0; fresh memory."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.bernoulli(torch.full_like(delta, density), generator=generator)
    return delta * kept / density


def _sum(ours: Pair | None, theirs: Pair | None, weights: tuple[float, float]) -> Pair:
    """The weighted sum of two deltas side by side, exact; one that is None is 0."""
    parts = [(pair, weight) for pair, weight in zip((ours, theirs), weights, strict=True) if pair]
    b = torch.cat([pair.b.double() * (pair.scale * weight) for pair, weight in parts], dim=1)
    return Pair(torch.cat([pair.a.double() for pair, _ in parts]), b, 1.0)


def _cut(job: _Job, pair: Pair) -> _Cut:
    """The best approximation of the rank wanted, or without what is rounding alone."""
    with full_precision(pair.a):
        basis_b, (beta,) = span([pair.b], pair.b.device)
        basis_a, (alpha,) = span([pair.a.T], pair.a.device)
        return _cut_core(job, basis_b, pair.scale * beta @ alpha.T, basis_a)


def _cut_core(job: _Job, basis_b: Tensor, core: Tensor, basis_a: Tensor) -> _Cut:
    """The same of Q_b core Q_a^T."""
    with full_precision(core):
        done = decompose(core)
        solid = int((done.values > _FLOOR * done.values[0]).sum())
        kept = max(1, solid if job.rank is None else min(job.rank, solid))
        root = done.values[:kept].sqrt()
        b = basis_b @ (done.left[:, :kept] * root).to(basis_b.device)
        a = (done.right[:, :kept] * root).T.to(basis_a.device) @ basis_a.T
    energy = done.energy()
    lost = max(0.0, 1 - done.energy(kept) / energy) if energy else 0.0
    return _Cut(Pair(a.float(), b.float(), 1.0), energy, lost)


def _factored(job: _Job, delta: Tensor) -> _Cut:
    """A dense delta as factors."""
    assert job.rank is not None  # PoolRule
    factors, lost = factor(delta, rank=min(job.rank, *delta.shape))
    return _Cut(Pair(factors.a, factors.b, 1.0), squared_norm(delta), lost)


def _finite(name: str, pair: Pair | None) -> Pair | None:
    """The pair; MergeError if an entry is not finite."""
    if pair is not None:
        check_finite(name, pair.a)
        check_finite(name, pair.b)
    return pair


def fitting_rank(
    held: Mapping[str, tuple[int, int, int]],
    incoming: Mapping[str, tuple[int, int, int]],
    *,
    nbytes: int,
    itemsize: int,
    rank: int | None,
) -> int | None:
    """The largest rank, at most `rank`, whose merged factors take at most `nbytes` bytes.

    Args:
        held, incoming: (rank, out, in) by module. itemsize: bytes of an entry.
    Returns:
        None: not even rank 1 fits.
    """
    sizes = []
    for name in {*held, *incoming}:
        sides = [side[name] for side in (held, incoming) if name in side]
        _, rows, columns = sides[0]
        sizes.append((min(sum(side[0] for side in sides), rows, columns), rows + columns))

    def fits(cap: int) -> bool:
        return sum(min(cap, most) * width for most, width in sizes) * itemsize <= nbytes

    best, over = 0, max(most for most, _ in sizes) + 1
    if rank is not None:
        over = min(over, rank + 1)
    while over - best > 1:
        middle = (best + over) // 2
        best, over = (middle, over) if fits(middle) else (best, middle)
    return best or None
