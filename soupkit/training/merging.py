"""One merge of the live weights with captured ones, matrix by matrix, shared out over ranks.

    W <- W_base + merge(W - W_base, W_partner - W_base)

The parameters are dealt out in rounds by falling cost, one matrix a rank and round: each rank
decomposes its own, then hands the result to the others, so every rank writes the same bits and at
most one matrix a rank is in work. Arithmetic in float32, rounded once into the parameter's dtype.
Whoever calls can undo: it writes in place.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from soupkit.delta import TensorSource, layout, subtract
from soupkit.merge import MatrixReport, MergeRule, merge_deltas
from soupkit.numeric import check_finite
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks


def cost_of(name: str, shape: tuple[int, ...]) -> int:
    """Multiplications of decomposing one parameter, up to a common factor; of a vector, entries."""
    entries = math.prod(shape)
    kind = layout(name, shape)
    if kind == "vector":
        return entries
    rows, columns = (shape[-2], shape[-1]) if kind == "experts" else (shape[0], entries // shape[0])
    return entries * min(rows, columns)


def rounds(store: TensorSource, world_size: int) -> list[tuple[str, ...]]:
    """Parameters in rounds of `world_size` at most, dearest first; place i of a round: rank i."""
    order = sorted(store.names, key=lambda name: (-cost_of(name, store.shape(name)), name))
    return [tuple(order[i : i + world_size]) for i in range(0, len(order), world_size)]


def merged_weight(
    name: str, current: Tensor, *, base: TensorSource, partner: TensorSource, rule: MergeRule
) -> tuple[Tensor, MatrixReport]:
    """The merged value of one parameter, in the dtype and on the device of its `current` one, and
    what was done.

    Raises:
        MergeError: a weight or the result is not finite, or no decomposition was found.
    """
    start = base.tensor(name).to(current.device)
    other = partner.tensor(name).to(current.device)
    deltas = (subtract(current, start, name=name), subtract(other, start, name=name))
    merged, report = merge_deltas(name, deltas, rule)
    wide = torch.promote_types(torch.promote_types(current.dtype, start.dtype), torch.float32)
    value = (start.to(wide) + merged.to(wide)).to(current.dtype)
    check_finite(name, value)
    return value.contiguous(), report


def merge_into(
    store: ParamStore, *, base: TensorSource, partner: TensorSource, rule: MergeRule, ranks: Ranks
) -> tuple[MatrixReport, ...]:
    """Overwrite every parameter of the store by its merge with the partner. Collective.

    Returns:
        One report a parameter, sorted by name, the same on every rank.

    Raises:
        MergeError: on every rank, if one rank's parameter cannot be merged; some are written
            already: undo them. Any other fault of one rank (memory, a disk) is raised on all, too.
    """
    own: list[MatrixReport] = []

    def share(name: str | None, current: Tensor | None) -> Tensor | None:
        if name is None or current is None:
            return None
        value, report = merged_weight(name, current, base=base, partner=partner, rule=rule)
        own.append(report)
        return value

    for names in rounds(store, ranks.world_size):
        mine = names[ranks.rank] if ranks.rank < len(names) else None
        current = _own_value(store, names, mine)
        value = ranks.on_each(partial(share, mine, current))
        del current
        for owner, name in enumerate(names):
            if owner == ranks.rank and value is not None:
                shared = value
            else:
                shared = torch.empty(
                    store.shape(name), dtype=store.dtype(name), device=store.device
                )
            ranks.broadcast(shared, source=owner)
            store.write(name, shared)
    every = [report for reports in ranks.gather(own) for report in reports]
    return tuple(sorted(every, key=lambda report: report.name))


def _own_value(store: ParamStore, names: tuple[str, ...], mine: str | None) -> Tensor | None:
    """The present value of this rank's parameter; all ranks gather all that are sharded."""
    own = None
    for name in names:
        if name == mine or not store.is_whole:
            value = store.read(name)
            own = value if name == mine else own
    return own
