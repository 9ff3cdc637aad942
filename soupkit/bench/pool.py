"""Adding an adapter to a full pool: similarity to every slot, merge, write; against the dense way.

The adapters are those of a 1B model's attention projections at rank 32. The dense way forms the two
deltas of each module, averages them and cuts the mean by torch.svd_lowrank; it neither looks for
the nearest slot nor writes anything.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from soupkit.adapter_folder import Module, write_adapter
from soupkit.bench.rows import Row, compare
from soupkit.factored import Pair
from soupkit.kmerge import PoolRule, SlotMethod
from soupkit.pool import AdapterPool

SLOTS = 8
RANK = 32
# Layers, hidden size, width of keys and values: of Llama-3.2-1B, and of next to nothing.
SHAPE, QUICK_SHAPE = (16, 2048, 512), (2, 256, 64)


def run(*, quick: bool) -> list[Row]:
    """A row for each way of merging that is factored throughout; CPU time of one thread."""
    shape, repeats = (QUICK_SHAPE, 3) if quick else (SHAPE, 7)
    methods = [method for method in get_args(SlotMethod) if method not in ("ties", "dare")]
    threads = torch.get_num_threads()
    # CPU time is what counts, and threads that wait for each other spend it.
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            adapters = [_adapter(shape, seed=seed) for seed in range(SLOTS + 1)]
            folders = [Path(scratch) / f"adapter-{i}" for i in range(SLOTS + 1)]
            for folder, modules in zip(folders, adapters, strict=True):
                # No model's name, with whose shapes the pool would compare these.
                write_adapter(folder, modules, base=f"{scratch}/base", revision=None)
            return [_row(method, Path(scratch), folders, adapters, repeats) for method in methods]
    finally:
        torch.set_num_threads(threads)


def _row(
    method: SlotMethod,
    scratch: Path,
    folders: list[Path],
    adapters: list[dict[str, Module]],
    repeats: int,
) -> Row:
    rule = PoolRule(capacity_bytes=10**12, slots=SLOTS, merge=method, rank=RANK)
    pool = AdapterPool.create(scratch / f"pool-{method}", rule)
    for folder in folders[:SLOTS]:
        pool.add(folder)
    tasks = itertools.count()
    return compare(
        f"add to a pool of {SLOTS}, {method}",
        lambda: pool.add(folders[SLOTS], task=f"task-{next(tasks)}"),
        lambda: dense(adapters[0], adapters[SLOTS]),
        against="two dense deltas, svd_lowrank of their mean",
        repeats=repeats,
        clock=time.process_time,
    )


def dense(first: Mapping[str, Module], second: Mapping[str, Module]) -> None:
    """The mean of two adapters by way of dense matrices."""
    for name, module in first.items():
        mean = (module.pair.matrix() + second[name].pair.matrix()) / 2
        torch.svd_lowrank(mean, q=RANK, niter=2)


def _adapter(shape: tuple[int, int, int], *, seed: int) -> dict[str, Module]:
    layers, hidden, kv_width = shape
    generator = torch.Generator().manual_seed(seed)
    found = {}
    widths = {"q_proj": hidden, "k_proj": kv_width, "v_proj": kv_width, "o_proj": hidden}
    for layer, (name, width) in itertools.product(range(layers), widths.items()):
        a = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
        b = torch.randn(width, RANK, generator=generator) / hidden**0.5
        pair = Pair(a=a, b=b, scale=2.0)
        found[f"model.layers.{layer}.self_attn.{name}"] = Module("linear", pair)
    return found
