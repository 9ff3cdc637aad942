"""The weights before a merge, until it is known whether the merge stays.

On disk they are one file of whole tensors, which becomes the captured partner without being copied
if the merge is refused. In memory they are this rank's shards, so that nothing is gathered. Putting
them back is local in both: an interrupted rank cannot wait for others.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from soupkit.training.params import ParamStore
from soupkit.training.snapshot import Snapshot


class SetAside(Protocol):
    """Weights that can be put back."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""
        ...

    def restore(self, store: ParamStore) -> None:
        """Put all of them back, bit for bit. Local."""
        ...


class OnDisk:
    """The undo file."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Args: snapshot: of the store's values."""
        self._snapshot = snapshot

    @property
    def place(self) -> str:
        """See SetAside."""
        return str(self._snapshot.path)

    def restore(self, store: ParamStore) -> None:
        """See SetAside."""
        for name in store.names:
            store.write(name, self._snapshot.tensor(name))


class InMemory:
    """Copies of this rank's parts and of their low-precision copies, in host memory."""

    def __init__(self, store: ParamStore) -> None:
        """Copy them."""
        self._copies: list[Tensor] = [tensor.to("cpu", copy=True) for tensor in store.memory()]

    @property
    def place(self) -> str:
        """See SetAside."""
        return "host memory"

    def restore(self, store: ParamStore) -> None:
        """See SetAside."""
        for live, copy in zip(store.memory(), self._copies, strict=True):
            live.copy_(copy)
