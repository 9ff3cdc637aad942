"""The exponential moving average of a run's weights, as float32 shards beside the live ones.

    avg <- avg + (1 - decay) (live - avg)          in float32 (float64 for float64 weights)

Each rank averages its own parts, so an update needs no communication and is the same under every
strategy, bit for bit, wherever the average lives. Training never sees it. A live weight that is not
finite makes the average so too, from then on. The arithmetic is in ema.py. Not here: when it is
updated, scored, saved or exported.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soupkit.config import Place
from soupkit.delta import TensorSource
from soupkit.errors import TrainingError
from soupkit.files import PENDING_PREFIX, make_folder, naming
from soupkit.training.ema import move_towards
from soupkit.training.guards import held_interrupts
from soupkit.training.params import ParamStore
from soupkit.training.parts import Part
from soupkit.training.ranks import Ranks
from soupkit.training.undo import InMemory


class Average:
    """The moving average of a store's parameters; a TensorSource of its exact values.

    Reading a tensor is collective. Until the first update it holds the weights it was built from.
    """

    def __init__(
        self, store: ParamStore, *, ranks: Ranks, place: Place, folder: Path | None = None
    ) -> None:
        """Begin with a copy of the live weights. Local.

        Args:
            place: "device": beside each part; "host": in host memory; "disk": in a mapped file of
                this rank, that has no name and goes with the process.
            folder: the soup folder, where that file is made; needed by "disk".

        Raises:
            OSError: no room on the disk.
        """
        self.num_updates = 0
        self._store = store
        specs = {
            name: [(part.data, self.dtype(name)) for part in store.parts(name)]
            for name in store.names
        }
        flat = [spec for of_name in specs.values() for spec in of_name]
        if place == "disk":
            assert folder is not None, 'place="disk" needs folder='
            path = folder / f"{PENDING_PREFIX}average-{ranks.rank:05d}"
            memory: Iterable[Tensor] = _mapped(path, flat)
        else:
            memory = (
                torch.empty(
                    data.shape, dtype=dtype, device=data.device if place == "device" else "cpu"
                )
                for data, dtype in flat
            )
        room = iter(memory)
        self._shards = {name: [next(room) for _ in of_name] for name, of_name in specs.items()}
        for mine, part in self._pairs():
            mine.copy_(part.data.detach())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, sorted."""
        return self._store.names

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every tensor, so that reading one needs no other rank."""
        return self._store.is_whole

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(mine.nbytes for shards in self._shards.values() for mine in shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one whole tensor."""
        return self._store.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which it is averaged: float32, or float64."""
        return torch.promote_types(self._store.dtype(name), torch.float32)

    def tensor(self, name: str) -> Tensor:
        """The whole average of one parameter on the CPU; do not write to it. Collective."""
        return self.read(name).cpu()

    def read(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """The whole average of one parameter, on the training device; do not write to it.
        Collective.

        Args:
            dtype: what it is rounded to; None: not rounded.
        """
        dtype = dtype or self.dtype(name)
        shards = [
            mine.to(device=part.data.device, dtype=dtype) for mine, part in self._pairs_of(name)
        ]
        return self._store.assemble(name, shards, dtype=dtype)

    def rounded(self) -> Rounded:
        """The average in the dtypes of the live values, as they would hold it."""
        return Rounded(self)

    def live_dtype(self, name: str) -> torch.dtype:
        """Dtype of the live value of one parameter."""
        return self._store.dtype(name)

    def update(self, decay: float) -> None:
        """Move the average towards the live weights. Local.

        Args:
            decay: share of itself that it keeps, in [0, 1); with 0 it becomes the live weights.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must satisfy 0 <= decay < 1")
        pairs = [(mine, part.data.detach()) for mine, part in self._pairs() if mine.numel()]
        # A caught interrupt must not leave some parameters one update ahead of the others.
        with held_interrupts():
            if decay == 0:
                for mine, live in pairs:
                    mine.copy_(live)
            else:
                move_towards(pairs, share=1.0 - decay)
            self.num_updates += 1

    def load(self, source: TensorSource, *, num_updates: int) -> None:
        """Go on from stored averages, exactly; each rank takes its parts of the whole. Local.

        Args:
            source: whole tensors in the dtypes of the average. num_updates: that they have seen.

        Raises:
            TrainingError: `source` is not of these parameters.
        """
        known = set(source.names)
        for name in self.names:
            expected = (self.shape(name), self.dtype(name))
            if name not in known or (source.shape(name), source.dtype(name)) != expected:
                found = f"{source.dtype(name)} {source.shape(name)}" if name in known else "nothing"
                raise TrainingError(
                    f"the stored average has {found} for {name}, not {expected[1]} {expected[0]}: "
                    "resume with the include= and exclude= that the run began with, or start a "
                    "new run"
                )
        for name in self.names:
            whole = source.tensor(name).contiguous()
            for mine, part in self._pairs_of(name):
                mine.copy_(part.of(whole))
        self.num_updates = num_updates

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the live weights be the average inside the block, then put theirs back bit for bit.

        Collective on the way in. The live weights wait in host memory; putting them back is local,
        so a rank that fails or is interrupted alone does it, too.
        """
        assert self.num_updates > 0, "an average that has seen no update is no model to score"
        saved = InMemory(self._store)
        try:
            for mine, part in self._pairs():
                part.data.detach().copy_(mine)
            self._store.flush()
            yield
        finally:
            with held_interrupts():
                saved.restore(self._store)

    def _pairs_of(self, name: str) -> Iterator[tuple[Tensor, Part]]:
        return zip(self._shards[name], self._store.parts(name), strict=True)

    def _pairs(self) -> Iterator[tuple[Tensor, Part]]:
        """Every shard with its part, looked up anew: a framework may move its memory."""
        for name, parts in self._store.all_parts():
            yield from zip(self._shards[name], parts, strict=True)


@dataclass(frozen=True, slots=True)
class Rounded:
    """An average in the dtypes of the live values; a TensorSource, to export it."""

    average: Average

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, sorted."""
        return self.average.names

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every tensor."""
        return self.average.is_whole

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one whole tensor."""
        return self.average.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the live value."""
        return self.average.live_dtype(name)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the training device; do not write to it. Collective."""
        return self.average.read(name, dtype=self.dtype(name))

    def tensor(self, name: str) -> Tensor:
        """One whole tensor on the CPU; do not write to it. Collective."""
        return self.read(name).cpu()


def _mapped(path: Path, specs: Sequence[tuple[Tensor, torch.dtype]]) -> Iterator[Tensor]:
    """Zeros of these shapes and dtypes, backed by a file whose name is gone once it is mapped.

    Raises:
        OSError: the disk has no room; found now, as a mapped write could only kill the process.
    """
    sizes = [-(-data.numel() * dtype.itemsize // 64) * 64 for data, dtype in specs]
    if not sum(sizes):
        return iter([torch.empty(data.shape, dtype=dtype) for data, dtype in specs])
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with naming(path):
            os.posix_fallocate(descriptor, 0, sum(sizes))
            mapped = mmap.mmap(descriptor, sum(sizes))
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    # The tensors hold the map, which holds the file.
    pieces = torch.split(torch.frombuffer(mapped, dtype=torch.uint8), sizes)
    return (
        piece[: data.numel() * dtype.itemsize].view(dtype).view(data.shape)
        for piece, (data, dtype) in zip(pieces, specs, strict=True)
    )
