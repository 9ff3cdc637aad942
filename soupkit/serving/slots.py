"""The variants of an engine: the same ones in the same slots of every rank."""

import contextlib
from collections.abc import Iterable
from typing import Any

from soupkit.bundle import Manifest
from soupkit.errors import ServingError

from .layers import VariantBank, ties
from .patches import BASE_SLOT
from .pulse import Pulse
from .ranks import Ranks
from .shape import SlotShape, outline


def slot_shape(bank: VariantBank, manifests: Iterable[Manifest]) -> SlotShape:
    """What a slot has to take for any of these variants; one that cannot be served adds nothing
    (`EngineSlots.check` says why).
    """
    shape = SlotShape()
    for manifest in manifests:
        with contextlib.suppress(ServingError):
            shape = shape.merged(bank.shape_of(*outline(manifest), **ties(manifest)))
    return shape


def check_manifest(bank: VariantBank, manifest: Manifest, *, cache_bytes: int) -> None:
    """Raise ServingError if the model, or a cache of so many bytes, cannot take a variant."""
    nbytes = bank.shape_of(*outline(manifest), **ties(manifest)).nbytes
    if nbytes > cache_bytes:
        raise ServingError(
            f"the variant needs a slot of {nbytes} bytes, the cache has {cache_bytes}; raise "
            "--cache-bytes"
        )


class EngineSlots:
    """For one loader thread of the first rank; the others follow.

    Attributes:
        salts: by slot, the content digest of what it holds, or held last.
        pulse: whether the thread that has the model goes on.
    """

    def __init__(self, bank: VariantBank, ranks: Ranks) -> None:
        self.salts, self.pulse = {BASE_SLOT: b""}, Pulse()
        self._bank, self._ranks = bank, ranks
        ranks.works |= {"load": self._load, "free": bank.free, "reserve": self._reserve}
        ranks.undo["load"] = self._unload

    def load(self, slot: int, variant: Any) -> None:
        """Puts a checked variant into an empty slot; see `VariantBank.load`."""
        if slot in self._bank.slots or slot < 0:
            raise ValueError(f"slot {slot} is occupied or negative; free it first")
        self._ranks.everywhere("load", slot, variant)
        self.salts[slot] = variant.digest.encode()

    @property
    def occupied(self) -> frozenset[int]:
        """The slots that hold a variant."""
        return self._bank.slots

    def free(self, slot: int) -> None:
        """Empties a slot that nothing uses any more."""
        self._ranks.everywhere("free", slot)

    def check(self, variant: Any) -> None:
        """Raises ServingError, naming the tensor, if `load` would refuse the variant."""
        self._bank.shape_of(variant.deltas, variant.raw, **ties(variant.manifest))

    def slot_shape(self, manifests: Iterable[Manifest]) -> SlotShape:
        """See `slot_shape`. Of ranks with unequal parts it is the first's, the largest."""
        return slot_shape(self._bank, manifests)

    def slot_bytes(self, manifests: Iterable[Manifest]) -> int:
        """Device bytes of a slot that takes any of these variants."""
        return self.slot_shape(manifests).nbytes

    @property
    def arena_bytes(self) -> int:
        """See `VariantBank.arena_bytes`."""
        return self._bank.arena_bytes

    def reserve(self, slots: int, shape: SlotShape) -> None:
        """Allocates the slots; see `VariantBank.reserve`."""
        self._ranks.everywhere("reserve", slots, shape)

    def _load(self, slot: int, variant: Any) -> None:
        self._bank.load(slot, variant.deltas, variant.raw, **ties(variant.manifest))

    def _unload(self, slot: int, _: Any) -> None:
        if slot in self._bank.slots:
            self._bank.free(slot)

    def _reserve(self, slots: int, shape: SlotShape) -> None:
        self._bank.reserve(slots, shape if self._ranks.is_first else self._bank.fitted(shape))
