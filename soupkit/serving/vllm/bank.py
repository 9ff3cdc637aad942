"""The variants of one vLLM worker: registered ones in host memory, some of them in slots.

Registering checks that every tensor has a site that acts, and that slots have room for it; it is
the only step that can refuse. Taking a registered variant into a slot is a copy from host memory,
which the engine may do in the middle of its work. Slots are taken from the least recently used,
pinned variants last; there are as many slots as a batch may have variants, and one more for each
pin, so a batch always fits.

All methods run on the thread that runs the forwards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from soupkit.bundle import LoadedVariant, Manifest
from soupkit.errors import ServingError
from soupkit.serving.layers import ties
from soupkit.serving.patches import BASE_SLOT
from soupkit.serving.shape import outline
from soupkit_kernels import Delta

from .batch import Batch
from .places import Place, meta_like, place_of
from .sites import Content, LinearSite, MatrixSite, NormSite, Site, Value

REMEDY = "serve the restored model instead (`soupkit restore`)"


@dataclass(frozen=True, slots=True)
class Sites:
    """The sites of a model.

    Attributes:
        modules: by module's name; an embedding that is the head too has two. refused: the other
            modules with parameters, and why they cannot act per token. packed: names of joined
            modules -> of what is joined. rename: a checkpoint's name -> the model's.
        shared: modules whose weight is one tensor with another's, by that other's name.
    """

    modules: Mapping[str, Sequence[Site]]
    refused: Mapping[str, str]
    packed: Mapping[str, Sequence[str]]
    rename: Callable[[str], str]
    shared: Mapping[str, Sequence[str]]


class Bank:
    """The variants of one worker, by the numbers that vLLM gives them (`lora_int_id`)."""

    batch: Batch | None = None

    def __init__(self, slots: int, *, device: torch.device, pins: frozenset[str]) -> None:
        """Its sites are told with `attach`."""
        self.slots = slots
        self._device, self._pins = device, pins
        self._sites: Sites | None = None
        self._registered: dict[int, tuple[str, Mapping[str, Value], LoadedVariant]] = {}
        self._slot_of: dict[int, int] = {}  # number -> slot, least recently used first
        self._planes = 1

    def attach(self, sites: Sites) -> None:
        """Once, before anything else."""
        self._sites = sites

    @property
    def numbers(self) -> frozenset[int]:
        """Those that are registered."""
        return frozenset(self._registered)

    def digest(self, number: int) -> str:
        """Of the content of a registered variant."""
        return self._registered[number][2].digest

    @property
    def resident(self) -> dict[int, int]:
        """Number -> slot, least recently used first."""
        return dict(self._slot_of)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(site.nbytes for site in self._all_sites())

    def reserve(self, manifests: Sequence[Manifest]) -> dict[int, str]:
        """Makes slots that take any of these.

        Returns:
            By index, why those that cannot be served are refused; they have no part in it.
        """
        refused: dict[int, str] = {}
        for index, manifest in enumerate(manifests):
            deltas, raw = outline(manifest)
            try:
                self._need(self._contents(manifest, {**deltas, **raw}))
            except ServingError as error:
                refused[index] = str(error)
        return refused

    def register(self, number: int, name: str, variant: LoadedVariant) -> None:
        """Admits a variant, whose tensors stay where they are until `drop`.

        Raises:
            ServingError: a tensor has no place that acts per token, or there is no memory for
                slots that take it.
        """
        values: dict[str, Value] = {**variant.deltas, **variant.raw}
        meta = {key: meta_like(value) for key, value in values.items()}
        try:
            self._need(self._contents(variant.manifest, meta))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ServingError(
                f"variant {name!r} needs larger slots than there are, and there is no memory for "
                f"them ({error}): restart the server, which makes them at its start"
            ) from error
        self._registered[number] = (name, values, variant)

    def drop(self, number: int) -> bool:
        """Forgets a variant; False if it is none. No running batch may have it."""
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._clear(slot)
        return self._registered.pop(number, None) is not None

    def take(self, number: int, *, keep: frozenset[int] = frozenset()) -> int:
        """The slot of a registered variant, which is put into one if it has none.

        Args:
            keep: numbers whose slots stay theirs.
        """
        _, values, variant = self._registered[number]
        if number in self._slot_of:
            self._slot_of[number] = slot = self._slot_of.pop(number)
            return slot
        free = set(range(self.slots)) - set(self._slot_of.values())
        if free:
            slot = min(free)
        else:
            others = [n for n in self._slot_of if n not in keep]
            others.sort(key=lambda n: self._registered[n][0] in self._pins)  # stable
            slot = self._slot_of.pop(others[0])
            self._clear(slot)
        for site, content in self._contents(variant.manifest, values):
            site.put(slot, content)
        self._slot_of[number] = slot
        return slot

    @property
    def has_free_slot(self) -> bool:
        return len(self._slot_of) < self.slots

    def set_batch(
        self,
        tokens: Sequence[int],
        heads: Sequence[int],
        *,
        warm_up: frozenset[int] = frozenset(),
    ) -> None:
        """Declares whose rows the next forward computes.

        Args:
            tokens, heads: the number of each token and of each row of logits; 0 is the base.
            warm_up: numbers that are the base too, if they are not registered.
        Raises:
            ServingError: another number is not registered; the caller has seen to it that all are.
        """
        numbers = frozenset(map(int, tokens))
        active = numbers & self._registered.keys()
        if unknown := numbers - active - warm_up - {0}:
            raise ServingError(f"variants {sorted(unknown)} are not registered in this worker")
        if not active:
            self.batch = None
            return
        for number in sorted(active):
            self.take(number, keep=active)
        slot_of = {n: self._slot_of[n] for n in active}

        def slots(numbers: Sequence[int]) -> list[int]:
            return [slot_of.get(int(number), BASE_SLOT) for number in numbers]

        self.batch = Batch(slots(tokens), slots(heads), self._device, self._planes)

    @contextmanager
    def prompt_rows(self, start: int, count: int) -> Iterator[None]:
        """While logits of these tokens are computed, instead of those of the batch's heads."""
        batch = self.batch
        if batch is None:
            yield
            return
        batch.prompt = range(start, start + count)
        try:
            yield
        finally:
            batch.prompt = None

    def _all_sites(self) -> Iterator[Site]:
        assert self._sites is not None
        for sites in self._sites.modules.values():
            yield from sites

    def _clear(self, slot: int) -> None:
        for site in self._all_sites():
            site.clear(slot)

    def _need(self, contents: Sequence[tuple[Site, Content]]) -> None:
        for site, content in contents:
            site.need(content)
            if isinstance(site, MatrixSite):
                self._planes = max([self._planes, *(a.planes for a in site.arenas.values())])

    def _contents(
        self, manifest: Manifest, values: Mapping[str, Value]
    ) -> list[tuple[Site, Content]]:
        """What a variant has in each site.

        Raises:
            ServingError: a tensor has no site, or does not fit it.
        """
        assert self._sites is not None
        tied = ties(manifest)
        # None: each tensor acts in its own module alone.
        own = None if tied["own"] is None else {self._module(name) for name in tied["own"]}
        for name, source in tied["tied"].items():
            self._check_tie(name, source or "")
        found: dict[int, tuple[Site, dict[int, Value]]] = {}
        for name, value in values.items():
            place = self._place(name)
            shared = self._sites.shared.get(place.module, ())
            also = [] if own is None else [module for module in shared if module not in own]
            for module in (place.module, *also):
                for site in self._sites_of(name, module):
                    content = found.setdefault(id(site), (site, {}))[1]
                    content.update(_content(name, site, place, value))
        return list(found.values())

    def _module(self, name: str) -> str:
        assert self._sites is not None
        return self._sites.rename(name).rpartition(".")[0]

    def _check_tie(self, name: str, source: str) -> None:
        assert self._sites is not None
        module, other = self._module(name), self._module(source)
        one = module not in self._sites.modules and module not in self._sites.refused
        if not one and module not in self._sites.shared.get(other, ()):
            raise ServingError(
                f"tensor {name!r}: the variant ties it to {source!r}, the base does not; {REMEDY}"
            )

    def _place(self, name: str) -> Place:
        assert self._sites is not None
        names = {**self._sites.modules, **self._sites.refused}
        renamed = self._sites.rename(name)
        place = place_of(renamed, names, self._sites.packed)
        if place is None:
            raise ServingError(f"tensor {name!r}: vLLM's model has no such parameter; {REMEDY}")
        return place

    def _sites_of(self, name: str, module: str) -> Sequence[Site]:
        assert self._sites is not None
        if module in self._sites.refused:
            raise ServingError(
                f"tensor {name!r}: {self._sites.refused[module]}, so it cannot differ per "
                f"request; {REMEDY}"
            )
        return self._sites.modules[module]


def _content(name: str, site: Site, place: Place, value: Value) -> dict[int, Value]:
    """A tensor as the site's content. Raises ServingError if it does not fit."""
    if isinstance(site, NormSite):
        return {0: _norm_weight(name, site, place, value)}
    assert isinstance(site, MatrixSite)
    is_bias = place.parameter == "bias"
    if place.parameter not in ("weight", "bias") or (is_bias and isinstance(value, Delta)):
        raise ServingError(f"tensor {name!r}: only weights and biases can differ; {REMEDY}")
    if is_bias and not (isinstance(site, LinearSite) and site.takes_bias):
        raise ServingError(f"tensor {name!r}: the base adds no bias in that module; {REMEDY}")
    try:
        shares = site.layout.shares(value, place.part)
    except ValueError as error:
        raise ServingError(
            f"tensor {name!r}: {error}; another vocabulary cannot share a batch: {REMEDY}"
        ) from None
    return {-1 - index if is_bias else index: share for index, share in shares.items()}


def _norm_weight(name: str, site: NormSite, place: Place, value: Value) -> Tensor:
    if place.parameter != "weight" or isinstance(value, Delta):
        raise ServingError(f"tensor {name!r}: of a norm only whole weights can differ; {REMEDY}")
    if tuple(value.shape) != (site.size,):
        raise ServingError(
            f"tensor {name!r}: shape {tuple(value.shape)}, the base's is {(site.size,)}"
        )
    return value
