"""The variants inside a model: put in place without touching the base's weights, taken out again.

Every token of a batch has a slot (-1 = base). A module that some resident variant changed acts as
    y[t] = f(x[t]; W_base + delta[slot[t]])
nn.Linear and nn.Embedding through the multi-variant kernel ops (`soupkit_kernels.op`), which read
packed deltas from an arena of slots in each of them, any other token-wise leaf (norms) with each
row's own vectors, or by running it per variant on that variant's rows. The slots of a batch are one
object that the engine sets before each forward.

Tied parameters are one parameter: a delta of the embedding acts in a tied lm_head too, but for a
LoRA's. What cannot act per token is refused by name when the variant is loaded; nothing is left out
silently. Not here: which variants are resident (cache.py), ranks of one model (parallel.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soupkit.bundle import Manifest
from soupkit.errors import ServingError
from soupkit.forms import MAX_PLANES
from soupkit_kernels import Delta
from soupkit_kernels.slots import Room, form_of
from soupkit_kernels.triton_support import why_not

from .parallel import check_place, cut
from .parallel import local as local_part
from .patches import BASE_SLOT, Batch, EmbeddingPatch, LinearPatch, Patch, Rows
from .probe import token_wise
from .shape import ModuleShape, SlotShape, WholeSpec


class VariantBank:
    """The variants that live in one model.

    `reserve`, `load`, `free` and `close` may run on any one thread while forwards run on another: a
    slot's content appears whole before any batch names the slot, and goes after the last one did;
    the engine keeps that.
    """

    def __init__(self, model: nn.Module, *, vocab_size: int, head: nn.Module | None) -> None:
        """No variant is in it yet.

        Args:
            model: in eval mode on its final device; patched by `load`, plain after `close`.
            vocab_size: of the base; ids below it are valid.
            head: the module that may compute only the rows whose next token is wanted.
        """
        self.batch: Batch | None = None
        self._model = model
        self._head = head
        self._device = next(model.parameters()).device
        self._token_wise = token_wise(model, vocab_size=vocab_size)
        self._patches: dict[str, Patch] = {}
        self._residents: dict[int, SlotShape] = {}
        self._num_slots, self._shape, self._planes = 0, SlotShape(), 1
        # Owners of a parameter, several if it is tied: id -> (module name, local name).
        self._owners: dict[int, list[tuple[str, str]]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for module_name, module in model.named_modules():
            for local, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((module_name, local))
                self._parameters[_join(module_name, local)] = parameter

    @property
    def slots(self) -> frozenset[int]:
        """Those that hold a variant."""
        return frozenset(self._residents)

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def shape(self) -> SlotShape:
        """What each slot takes."""
        return self._shape

    @property
    def arena_bytes(self) -> int:
        """Device memory of all slots, free ones too: their number times `shape.nbytes`.

        That exceeds the bytes of files: a slot has room for the largest form of each module, a
        matrix's one scale is repeated for its rows, a tied tensor lies in every owner.
        """
        return sum(patch.nbytes for patch in self._patches.values())

    def set_batch(self, token_slots: Sequence[int], head_slots: Sequence[int]) -> None:
        """Declares whose rows the next forward computes: a slot for each token and each head row.

        Only the thread that runs the forwards may call it.
        """
        active = frozenset(token_slots) - {BASE_SLOT}
        if not active:
            self.batch = None
            return
        unknown = active - self._residents.keys()
        assert not unknown, f"slots {sorted(unknown)} hold no variant"
        tokens = self._rows(token_slots, active)
        # While all sequences decode, these are the same and so is their plan.
        heads = tokens if head_slots == token_slots else self._rows(head_slots, active)
        self.batch = Batch(active, tokens, heads)

    def _rows(self, slots: Sequence[int], active: frozenset[int]) -> Rows:
        return Rows(torch.tensor(slots), tuple(active), self._device, planes=self._planes)

    def load(
        self,
        slot: int,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        *,
        own: frozenset[str] | None = frozenset(),
        tied: Mapping[str, str | None] | None = None,
    ) -> None:
        """Installs a variant in an empty slot, larger ones or more of them being made if need be.

        Args:
            slot: >= 0, not occupied.
            deltas: parameter name -> packed delta; any device, moved to the model's.
            raw: parameter name -> whole tensor, cast to the parameter's dtype.
            own: names that the variant stores apart though the base ties them, None = all; the
                delta of a tied name acts on every owner that is not in here.
            tied: name -> the name it is the same parameter as, which the base must agree with.

        Raises:
            ServingError: a tensor has no place that acts per token; the model is left as it was.
        """
        if slot in self._residents or slot < 0:
            raise ValueError(f"slot {slot} is occupied or negative; free it first")
        places = self._resolve(deltas, raw, own, tied or {})
        shape = self._shape_of(places)
        if slot >= self._num_slots or not self._shape.takes(shape):
            self.reserve(max(slot + 1, self._num_slots), self._shape.merged(shape))
        packed = {name: value for name, _, value in places if isinstance(value, Delta)}
        whole: dict[str, dict[str, Tensor]] = {}
        for name, local, value in places:
            if not isinstance(value, Delta):
                whole.setdefault(name, {})[local] = value
        try:
            self._clear(slot)  # of what a fault may have left
            for name in shape.modules:
                self._patches[name].put(slot, packed.get(name), whole.get(name, {}))
        except BaseException:
            # What is written of the variant goes again.
            self._clear(slot)
            raise
        if self._device.type == "cuda":
            # The copies above must have landed before any batch names the slot.
            torch.cuda.synchronize(self._device)
        self._residents[slot] = shape

    def reserve(self, slots: int, shape: SlotShape) -> None:
        """Allocates so many slots of that shape, or makes those there anew, a module at a time.

        Residents stay where they are; memory beside the old and the new slots is that of one
        module's. After that `load` of what fits the shape allocates nothing.

        Raises:
            ValueError: a resident has no place there; nothing has changed.
        """
        lost = [s for s, held in self._residents.items() if s >= slots or not shape.takes(held)]
        if lost:
            raise ValueError(f"slots {sorted(lost)} hold variants that {slots} such slots lack")
        # If memory runs out half-way, the slots that all modules have are as they were.
        self._num_slots = min(slots, self._num_slots)
        rooms = [module.room for module in shape.modules.values()]
        self._planes = max([1, *(room.planes for room in rooms if room is not None)])
        for name in self._patches.keys() - shape.modules.keys():
            self._patches.pop(name).remove()
        for name, module in shape.modules.items():
            self._patch(name).resize(module, slots)
        self._num_slots, self._shape = slots, shape

    def shape_of(
        self,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        *,
        own: frozenset[str] | None = frozenset(),
        tied: Mapping[str, str | None] | None = None,
    ) -> SlotShape:
        """What a slot needs for a variant, whose tensors may be on the meta device.

        Raises:
            ServingError: as `load`.
        """
        return self._shape_of(self._resolve(deltas, raw, own, tied or {}))

    def _shape_of(self, places: Sequence[tuple[str, str, Delta | Tensor]]) -> SlotShape:
        found = SlotShape()
        for name, local, value in places:
            parameter = self._parameters[_join(name, local)]
            if isinstance(value, Delta):
                # More planes may come later: as many as a bundle can have.
                refusal = why_not(parameter.device, parameter.dtype, value.in_features, MAX_PLANES)
                room = Room(
                    value.out_features, value.in_features, parameter.dtype, refusal is None,
                    frozenset({form_of(value)}),
                )  # fmt: skip
                module = ModuleShape(room)
            else:
                spec = WholeSpec(tuple(value.shape), parameter.dtype)
                module = ModuleShape(None, {local: spec})
            found = found.merged(SlotShape({name: module}))
        return found

    def fitted(self, shape: SlotShape) -> SlotShape:
        """The shape for this rank's parts of the parameters, from that for another rank's."""
        return shape.over(lambda name, own: local_part(self._parameters[_join(name, own)]).shape)

    def free(self, slot: int) -> None:
        """Empties a slot that no batch names any more."""
        if slot not in self._residents:
            raise ValueError(f"slot {slot} is empty")
        self._clear(slot)
        del self._residents[slot]

    def _clear(self, slot: int) -> None:
        for patch in self._patches.values():
            patch.clear(slot)

    def close(self) -> None:
        """Takes everything out: the model is the plain base again."""
        for patch in self._patches.values():
            patch.remove()
        self._patches.clear()
        self._residents.clear()
        self._num_slots, self._shape = 0, SlotShape()
        self.batch = None

    def _resolve(
        self,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        own: frozenset[str] | None,
        tied: Mapping[str, str | None],
    ) -> list[tuple[str, str, Delta | Tensor]]:
        """Where each tensor acts, as (module name, local parameter name, tensor), all checked.

        Of parameters that are split over ranks the tensors are this rank's parts.
        """
        own = frozenset(self._parameters if own is None else map(self._full_name, own))
        for name, source in tied.items():
            target = self._parameters.get(self._full_name(name))
            if target is None or target is not self._parameters.get(self._full_name(source or "")):
                raise ServingError(
                    f"tensor {name!r}: the variant ties it to {source!r}, the base does not; "
                    "serve the restored model instead"
                )
        found: list[tuple[str, str, Delta | Tensor]] = []
        for name, delta in deltas.items():
            places = self._places(name, own, self._check_delta, delta)
            found += [(module, local, self._cut(delta, module, local)) for module, local in places]
        for name, tensor in raw.items():
            places = self._places(name, own, self._check_raw, tensor)
            found += [(module, local, self._cut(tensor, module, local)) for module, local in places]
        return found

    def _cut(self, value: Delta | Tensor, module_name: str, local: str) -> Delta | Tensor:
        return cut(value, self._parameters[_join(module_name, local)])

    def _full_name(self, name: str) -> str:
        """A checkpoint's name in the model: one saved without its head lacks the body's prefix."""
        prefix = getattr(self._model, "base_model_prefix", "")
        return name if name in self._parameters else _join(prefix, name)

    def _places(
        self,
        name: str,
        own: frozenset[str],
        check: Callable[[str, str, str, Any], None],
        value: Any,
    ) -> list[tuple[str, str]]:
        """The (module name, local name) pairs a variant's tensor acts in, all checked."""
        found = self._full_name(name)
        parameter = self._parameters.get(found)
        if parameter is None:
            raise ServingError(f"tensor {name!r}: the base model has no such parameter")
        places = [
            (module_name, local)
            for module_name, local in self._owners[id(parameter)]
            if _join(module_name, local) == found or _join(module_name, local) not in own
        ]
        for module_name, local in places:
            if module_name not in self._token_wise:
                kind = type(self._model.get_submodule(module_name)).__name__
                raise ServingError(
                    f"tensor {name!r}: its module {module_name!r} ({kind}) does not act on every "
                    "token alone, so it cannot differ per request; serve the restored model instead"
                )
            check(name, module_name, local, value)
        return places

    def _check_delta(self, name: str, module_name: str, local: str, delta: Delta) -> None:
        module = self._model.get_submodule(module_name)
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            raise ServingError(
                f"tensor {name!r}: deltas act in nn.Linear and nn.Embedding, not in "
                f"{type(module).__name__}; store that tensor whole (raw)"
            )
        shape = tuple(self._parameters[_join(module_name, local)].shape)
        stored = (delta.out_features, delta.in_features)
        if local != "weight" or shape != stored:
            raise ServingError(f"tensor {name!r}: stored shape {stored}, the base's is {shape}")
        check_place(name, module, is_packed=True)

    def _check_raw(self, name: str, module_name: str, local: str, tensor: Tensor) -> None:
        shape = self._parameters[_join(module_name, local)].shape
        if shape != tensor.shape:
            raise ServingError(
                f"tensor {name!r}: shape {tuple(tensor.shape)}, the base's is {tuple(shape)}; "
                "another vocabulary cannot share a batch: serve the restored model instead"
            )
        check_place(name, self._model.get_submodule(module_name), is_packed=False)

    def _patch(self, module_name: str) -> Patch:
        patch = self._patches.get(module_name)
        if patch is None:
            module = self._model.get_submodule(module_name)
            kind = Patch
            if type(module) is nn.Linear:
                kind = LinearPatch
            elif isinstance(module, nn.Embedding):
                kind = EmbeddingPatch
            axis, takes_vectors = self._token_wise[module_name]
            patch = self._patches[module_name] = kind(
                self, module, axis, is_head=module is self._head, takes_vectors=takes_vectors
            )
            patch.install()
        return patch


def _join(module_name: str, local: str) -> str:
    return f"{module_name}.{local}" if module_name else local


def ties(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says about shared parameters, as `VariantBank.load` takes it."""
    tied = {entry.name: entry.source for entry in manifest.tensors if entry.kind == "tied"}
    own = frozenset(entry.name for entry in manifest.tensors) - tied.keys()
    return {"tied": tied, "own": None if manifest.per_module else own}
