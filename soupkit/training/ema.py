"""The arithmetic of an exponential moving average: how much it keeps of itself, and one step of it.

    mine <- mine + share (live - mine),            share = 1 - decay
    decay of update n = min(most, n / (n + 9)),    n = 0, 1, ...

Update 0 copies. The growing decay then forgets what it copied: the average spans about the last
tenth of a short run and the last 1 / (1 - most) updates of a long one. With a constant decay of
0.999 an average of 300 updates would still be 74 % the weights that it began with. It is the
"num_updates" rule of TensorFlow's ExponentialMovingAverage, shifted by one. Lists of tensors only;
no models here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Entries that an update works on at once, beside the average: small enough for a CPU's cache, large
# enough that an accelerator's launches do not count.
_ENTRIES_AT_ONCE_ON_CPU = 2**18
_ENTRIES_AT_ONCE = 2**24


def decay_of_update(most: float, num_updates: int) -> float:
    """What the average keeps of itself at the update after `num_updates` ones; 0 at the first."""
    return min(most, num_updates / (num_updates + 9))


def move_towards(pairs: Sequence[tuple[Tensor, Tensor]], *, share: float) -> None:
    """mine += share (live - mine) for pairs (mine, live) of equal shapes, in the dtype of mine.

    Plain operations, each rounded once: a fused one may round differently on another device, or at
    the end of a vector, and the result would depend on how weights are sharded.
    """
    kinds = dict.fromkeys((mine.device, mine.dtype) for mine, _ in pairs)
    for device, dtype in kinds:
        own = [pair for pair in pairs if (pair[0].device, pair[0].dtype) == (device, dtype)]
        most = _ENTRIES_AT_ONCE_ON_CPU if device.type == "cpu" else _ENTRIES_AT_ONCE
        batches = list(_batches(own, most))
        entries = max(sum(mine.numel() for mine, _ in batch) for batch in batches)
        # Copies from an accelerator are several times faster into pinned memory; of all that lives
        # on the host only this needs to be pinned.
        is_pinned = device.type == "cpu" and any(live.is_cuda for _, live in own)
        room = torch.empty(entries, dtype=dtype, device=device, pin_memory=is_pinned)
        for batch in batches:
            mine, live = map(list, zip(*batch, strict=True))
            sizes = [one.numel() for one in mine]
            pieces = torch.split(room[: sum(sizes)], sizes)
            difference = [piece.view(one.shape) for piece, one in zip(pieces, mine, strict=True)]
            torch._foreach_copy_(difference, live)
            torch._foreach_sub_(difference, mine)
            torch._foreach_mul_(difference, share)
            torch._foreach_add_(mine, difference)


def _batches(
    pairs: Iterable[tuple[Tensor, Tensor]], most: int
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The pairs, cut along the first axis, in batches of about `most` entries."""
    batch: list[tuple[Tensor, Tensor]] = []
    entries = 0
    for mine, live in pairs:
        rows = max(1, most * len(mine) // mine.numel()) if mine.dim() else 1
        whole = not mine.dim()
        cuts = ([mine], [live]) if whole else (torch.split(mine, rows), torch.split(live, rows))
        for piece in zip(*cuts, strict=True):
            if entries and entries + piece[0].numel() > most:
                yield batch
                batch, entries = [], 0
            batch.append(piece)
            entries += piece[0].numel()
    if batch:
        yield batch
