"""The variants inside a model: put in place without touching the base's weights, taken out again.

Every token of a batch has a slot (-1 = base). A module that some resident variant changed acts as
    y[t] = f(x[t]; W_base + delta[slot[t]])
nn.Linear and nn.Embedding through the multi-variant kernel ops (`soupkit_kernels.op`), which read
packed deltas from an arena of slots in each of them, any other token-wise leaf (norms) by running
it per variant on that variant's rows. The slots of a batch are one object that the engine sets
before each forward.

Tied parameters are one parameter: a delta of the embedding acts in a tied lm_head too. What cannot
act per token is refused when the variant is loaded, with the tensor's name; nothing is left out
silently. Not here: which variants are resident (cache.py), and tensors sliced over several devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soupkit.bundle import Manifest
from soupkit.errors import ServingError
from soupkit_kernels import Delta

from .patches import (
    BASE_SLOT,
    Batch,
    DeltaPatch,
    EmbeddingPatch,
    Entry,
    LinearPatch,
    Patch,
    Rows,
    with_parameters,
)
from .probe import token_axes


class VariantBank:
    """The variants that live in one model.

    `load`, `free` and `close` may run on any one thread while forwards run on another: a slot's
    entries appear whole before any batch names the slot, and go after the last one did; the engine
    keeps that. Where a layer's arena is too small a larger one takes its place, slots in use as
    they were.
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
        self._axes = token_axes(model, vocab_size=vocab_size)
        self._patches: dict[str, Patch] = {}
        self._occupied: set[int] = set()
        # Of every arena: how many slots, and the most planes of any.
        self._num_slots, self._planes = 0, 1
        # Owners of a parameter, several if it is tied: id -> (module name, local name).
        self._owners: dict[int, list[tuple[str, str]]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for module_name, module in model.named_modules():
            for local, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((module_name, local))
                self._parameters[_join(module_name, local)] = parameter

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(self._occupied)

    @property
    def arena_bytes(self) -> int:
        """Device memory of all slots, free ones too; whole tensors of variants are not in it.

        It can exceed the bytes of the variants' deltas: the slots of a layer are as large as the
        largest variant was there, there are up to a quarter more than were ever in use, a matrix's
        one scale is repeated for its rows, and a tied delta lies in every owner's arena.
        """
        patches = list(self._patches.values())
        arenas = [patch.arena for patch in patches if isinstance(patch, DeltaPatch)]
        return sum(arena.data.nbytes for arena in arenas if arena is not None)

    def set_batch(self, token_slots: Sequence[int], head_slots: Sequence[int]) -> None:
        """Declares whose rows the next forward computes: a slot for each token and each head row.

        Only the thread that runs the forwards may call it.
        """
        active = tuple(sorted(set(token_slots) - {BASE_SLOT}))
        if not active:
            self.batch = None
            return
        unknown = [slot for slot in active if slot not in self._occupied]
        assert not unknown, f"slots {unknown} hold no variant"
        tokens, heads = (
            Rows(torch.tensor(slots, dtype=torch.int64), active, self._device, planes=self._planes)
            for slots in (token_slots, head_slots)
        )
        self.batch = Batch(active, tokens, heads)

    def load(
        self,
        slot: int,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        *,
        own: frozenset[str] = frozenset(),
        tied: Mapping[str, str | None] | None = None,
    ) -> None:
        """Installs a variant in an empty slot.

        Args:
            slot: >= 0, not occupied.
            deltas: parameter name -> packed delta; any device, moved to the model's.
            raw: parameter name -> whole tensor, cast to the parameter's dtype.
            own: names that the variant stores apart though the base ties them; the delta of a tied
                name acts on every owner that is not in here.
            tied: name -> the name it is the same parameter as, which the base must agree with.

        Raises:
            ServingError: a tensor has no place that acts per token; the model is left as it was.
        """
        if slot in self._occupied or slot < 0:
            raise ValueError(f"slot {slot} is occupied or negative; free it first")
        entries: dict[str, Entry] = {}
        placed: dict[str, Delta] = {}
        for module_name, local, value in self._resolve(deltas, raw, own, tied or {}):
            if isinstance(value, Delta):
                placed[module_name] = value
            else:
                like = self._parameters[_join(module_name, local)]
                moved = value.to(device=like.device, dtype=like.dtype)
                entries.setdefault(module_name, Entry()).raw[local] = moved
        self._build_clones(entries)
        try:
            self._reserve(slot, placed)
            for module_name, delta in placed.items():
                self._delta_patch(module_name).put(slot, delta)
            for module_name, entry in entries.items():
                self._patch(module_name).slots[slot] = entry
        except BaseException:
            # No memory: what is written of the variant goes again.
            self._clear(slot)
            raise
        if self._device.type == "cuda":
            # The copies above must have landed before any batch names the slot.
            torch.cuda.synchronize(self._device)
        self._occupied.add(slot)

    def _reserve(self, slot: int, deltas: Mapping[str, Delta]) -> None:
        """Room for a slot in every arena, and for these deltas in theirs."""
        if slot >= self._num_slots:
            self._num_slots = max(slot + 1, self._num_slots * 5 // 4)
        self._planes = max([self._planes, *(delta.planes for delta in deltas.values())])
        for module_name in deltas:
            self._patch(module_name)
        for module_name, patch in self._patches.items():
            if isinstance(patch, DeltaPatch):
                patch.reserve(self._num_slots, deltas.get(module_name))

    def free(self, slot: int) -> None:
        """Empties a slot that no batch names any more."""
        if slot not in self._occupied:
            raise ValueError(f"slot {slot} is empty")
        self._occupied.discard(slot)
        self._clear(slot)

    def _clear(self, slot: int) -> None:
        for patch in self._patches.values():
            patch.clear(slot)

    def close(self) -> None:
        """Takes everything out: the model is the plain base again."""
        for patch in self._patches.values():
            patch.remove()
        self._patches.clear()
        self._occupied.clear()
        self.batch = None

    def check(
        self,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        *,
        own: frozenset[str] = frozenset(),
        tied: Mapping[str, str | None] | None = None,
    ) -> None:
        """Raises what `load` would raise about the tensors; changes and copies nothing."""
        self._resolve(deltas, raw, own, tied or {})

    def _resolve(
        self,
        deltas: Mapping[str, Delta],
        raw: Mapping[str, Tensor],
        own: frozenset[str],
        tied: Mapping[str, str | None],
    ) -> list[tuple[str, str, Delta | Tensor]]:
        """Where each tensor acts, as (module name, local parameter name, tensor), all checked."""
        own = frozenset(self._full_name(name) for name in own)
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
            found += [(module_name, local, delta) for module_name, local in places]
        for name, tensor in raw.items():
            places = self._places(name, own, self._check_raw, tensor)
            found += [(module_name, local, tensor) for module_name, local in places]
        return found

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
            if module_name not in self._axes:
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

    def _check_raw(self, name: str, module_name: str, local: str, tensor: Tensor) -> None:
        shape = self._parameters[_join(module_name, local)].shape
        if shape != tensor.shape:
            raise ServingError(
                f"tensor {name!r}: shape {tuple(tensor.shape)}, the base's is {tuple(shape)}; "
                "another vocabulary cannot share a batch: serve the restored model instead"
            )

    def _build_clones(self, entries: dict[str, Entry]) -> None:
        for module_name, entry in entries.items():
            module = self._model.get_submodule(module_name)
            bias_is_enough = type(module) is nn.Linear and "weight" not in entry.raw
            if entry.raw and not bias_is_enough:
                entry.clone = with_parameters(module, entry.raw)

    def _delta_patch(self, module_name: str) -> DeltaPatch:
        patch = self._patch(module_name)
        assert isinstance(patch, DeltaPatch)
        return patch

    def _patch(self, module_name: str) -> Patch:
        patch = self._patches.get(module_name)
        if patch is None:
            module = self._model.get_submodule(module_name)
            kind = Patch
            if type(module) is nn.Linear:
                kind = LinearPatch
            elif isinstance(module, nn.Embedding):
                kind = EmbeddingPatch
            patch = self._patches[module_name] = kind(
                self, module, self._axes[module_name], is_head=module is self._head
            )
            patch.install()
        return patch


def _join(module_name: str, local: str) -> str:
    return f"{module_name}.{local}" if module_name else local


def ties(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says about shared parameters, as `VariantBank.load` takes it."""
    tied = {entry.name: entry.source for entry in manifest.tensors if entry.kind == "tied"}
    return {"tied": tied, "own": frozenset(entry.name for entry in manifest.tensors) - tied.keys()}
