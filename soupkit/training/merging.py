"""One merge of the live weights with captured ones, unit by unit, shared out over ranks.

    W <- W_base + merge(W - W_base, W_partner - W_base)

LoRA factors are merged as the deltas they stand for, without a dense matrix or a base. The units
are dealt out in rounds by falling cost, one a rank and round: each rank decomposes its own, then
hands the result to the others, so every rank writes the same bits. On a CPU a rank works on as many
units at once as it has threads (workers.py), elsewhere on one. Arithmetic in float32, rounded once
into the parameter's dtype. Whoever calls can undo: it writes in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from soupkit.delta import TensorSource, layout, subtract
from soupkit.factored import merge_pairs
from soupkit.merge import Cuts, MatrixReport, MergeRule, merge_with_cuts
from soupkit.numeric import check_finite, full_precision
from soupkit.training.params import ParamStore, Unit
from soupkit.training.peft import LoraUnit, factors_of, pair_of
from soupkit.training.ranks import Ranks
from soupkit.training.stored_cuts import Found, StoredCuts, on_host
from soupkit.workers import Workers


def cost_of(name: str, shape: tuple[int, ...]) -> int:
    """Multiplications of decomposing one parameter, up to a common factor; of a vector, entries."""
    entries = math.prod(shape)
    kind = layout(name, shape)
    if kind == "vector":
        return entries
    rows, columns = (shape[-2], shape[-1]) if kind == "experts" else (shape[0], entries // shape[0])
    return entries * min(rows, columns)


def rounds(costs: dict[str, int], world_size: int) -> list[tuple[str, ...]]:
    """Names in rounds of `world_size` at most, dearest first; place i of a round: rank i."""
    order = sorted(costs, key=lambda name: (-costs[name], name))
    return [tuple(order[i : i + world_size]) for i in range(0, len(order), world_size)]


def merged_values(
    unit: Unit,
    current: Sequence[Tensor],
    *,
    base: TensorSource | None,
    partner: TensorSource,
    rule: MergeRule,
    known: StoredCuts | None = None,
) -> tuple[list[Tensor], MatrixReport, Found | None]:
    """The merged values of one unit, in the dtypes and on the devices of its `current` ones; what
    was done; and what was found for the next merge.

    Args:
        known: of the partner.

    Raises:
        MergeError: a weight or the result is not finite, or no decomposition was found.
    """
    captured = [
        partner.tensor(name).to(value.device)
        for name, value in zip(unit.names, current, strict=True)
    ]
    found: Found | None = None
    if unit.lora is not None:
        merged, report = _merged_factors(unit.lora, current, captured, rule)
    elif unit.has_base and base is not None:
        start = base.tensor(unit.name).to(current[0].device)
        cuts = None if known is None else known.of(unit.name)
        value, report, found = _merged_weight(unit.name, current[0], captured[0], start, rule, cuts)
        merged = [value]
    else:
        plain = MergeRule("mean", weights=rule.weights)
        start = torch.zeros((), device=current[0].device).expand(current[0].shape)
        value, report, _ = _merged_weight(unit.name, current[0], captured[0], start, plain, None)
        merged = [value]
    values = [
        value.to(live.dtype).contiguous() for value, live in zip(merged, current, strict=True)
    ]
    for name, value in zip(unit.names, values, strict=True):
        check_finite(name, value)
    return values, report, found


def _merged_weight(
    name: str,
    current: Tensor,
    other: Tensor,
    start: Tensor,
    rule: MergeRule,
    cuts: Cuts | None,
) -> tuple[Tensor, MatrixReport, Found | None]:
    deltas = (subtract(current, start, name=name), subtract(other, start, name=name))
    known = None if cuts is None else tuple(cut.to(current.device) for cut in cuts)
    done = merge_with_cuts(name, deltas, rule, known=(None, known))
    wide = torch.promote_types(torch.promote_types(current.dtype, start.dtype), torch.float32)
    # In the delta's own memory: one copy of the largest matrix less.
    value = done.delta.to(wide).add_(start)
    own, captured = done.cuts
    if own is None or captured is None or rule.rank is None:
        return value, done.report, None
    return value, done.report, Found(on_host(own), on_host(captured))


def _merged_factors(
    lora: LoraUnit, current: Sequence[Tensor], captured: Sequence[Tensor], rule: MergeRule
) -> tuple[list[Tensor], MatrixReport]:
    pairs = [pair_of(lora, *current), pair_of(lora, *captured)]
    a, b, report = merge_pairs(lora.name, pairs, rule, rank=pairs[0].rank)
    return list(factors_of(lora, type(pairs[0])(a, b, pairs[0].scale))), report


def merge_into(
    store: ParamStore,
    *,
    base: TensorSource | None,
    partner: TensorSource,
    rule: MergeRule,
    ranks: Ranks,
    known: StoredCuts | None = None,
) -> tuple[tuple[MatrixReport, ...], dict[str, Found]]:
    """Overwrite every parameter of the store by its merge with the partner. Collective.

    Args:
        known: truncated deltas of the partner, from an earlier merge.

    Returns:
        One report a unit, sorted by name, the same on every rank; and what this rank has found of
        the units that it decomposed.

    Raises:
        MergeError: on every rank, if one rank's unit cannot be merged; some are written already:
            undo them. Any other fault of one rank (memory, a disk) is raised on all, too.
    """
    own: list[MatrixReport] = []
    found: dict[str, Found] = {}

    def share(unit: Unit | None, current: Sequence[Tensor]) -> list[Tensor]:
        if unit is None:
            return []
        values, report, of_unit = merged_values(
            unit, current, base=base, partner=partner, rule=rule, known=known
        )
        own.append(report)
        if of_unit is not None:
            found[unit.name] = of_unit
        return values

    units = {unit.name: unit for unit in store.units}
    costs = {
        unit.name: sum(cost_of(name, store.shape(name)) for name in unit.names)
        for unit in store.units
    }
    entries = {
        unit.name: sum(math.prod(store.shape(name)) for name in unit.names) for unit in store.units
    }
    in_work: deque[tuple[list[Unit], Future[list[Tensor]]]] = deque()
    # The threads end before the precision, which is the process's, is put back.
    with full_precision(torch.empty(0, device=store.device)), Workers(store.device) as workers:
        # Reading and handing out are collective: in one order, however many threads a rank has.
        threads = min(ranks.gather(workers.count))
        # What is in work or waits is at most one largest matrix a thread.
        room = threads * max(entries.values()) if threads > 1 else 0
        for names in rounds(costs, ranks.world_size):
            dealt = [units[name] for name in names]
            mine = dealt[ranks.rank] if ranks.rank < len(dealt) else None
            current = _own_values(store, dealt, mine)
            in_work.append((dealt, workers.submit(partial(share, mine, current))))
            while sum(entries[dealt[0].name] for dealt, _ in in_work) > room:
                _finish(store, ranks, *in_work.popleft())
        while in_work:
            _finish(store, ranks, *in_work.popleft())
    every = [report for reports in ranks.gather(own) for report in reports]
    return tuple(sorted(every, key=lambda report: report.name)), found


def _finish(
    store: ParamStore, ranks: Ranks, dealt: Sequence[Unit], future: Future[list[Tensor]]
) -> None:
    """Hand the results of one round to all ranks and write them."""
    values = ranks.on_each(future.result)
    for owner, unit in enumerate(dealt):
        for index, name in enumerate(unit.names):
            value = values[index] if owner == ranks.rank else _room_for(store, name)
            ranks.broadcast(value, source=owner)
            store.write(name, value)


def _own_values(store: ParamStore, dealt: Sequence[Unit], mine: Unit | None) -> list[Tensor]:
    """The present values of this rank's unit; all ranks gather what is sharded of all units."""
    own: list[Tensor] = []
    for unit in dealt:
        for name in unit.names:
            if unit is mine or not store.is_whole:
                value = store.read(name)
                own += [value] if unit is mine else []
    return own


def _room_for(store: ParamStore, name: str) -> Tensor:
    return torch.empty(store.shape(name), dtype=store.dtype(name), device=store.device)
