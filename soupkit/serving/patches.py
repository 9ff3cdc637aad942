"""One module of the model acting per slot: what `layers.VariantBank` puts in a module's `forward`.

Every row of a batch has a slot (-1 = base); a patched module acts as y[t] = f(x[t]; W_base +
delta[slot[t]]). The packed deltas of a linear or an embedding lie in one arena, slot by slot; a
slot that holds none there acts as the base. Whole tensors (norms, biases) lie beside it, in
`Entry`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soupkit.errors import ServingError
from soupkit.forms import MAX_PLANES
from soupkit_kernels import Delta, DeltaArena, Plan, delta_embedding, delta_linear, plan_of
from soupkit_kernels.triton_support import why_not

BASE_SLOT = -1


class Rows:
    """The slots of one row vector of a batch (its tokens, or the rows the head computes)."""

    def __init__(
        self, slots: Tensor, active: Sequence[int], device: torch.device, *, planes: int
    ) -> None:
        """planes: the most of any layer now; a layer that has more makes the plan anew."""
        self._slots = slots  # [rows] int64 on the CPU
        self._device = device
        self._num_slots, self._planes = max(active) + 1, planes
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._members: dict[int, Tensor] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        # Those that kernels of this batch may read though another has taken their place.
        self._arenas: set[DeltaArena] = set()
        self.uniform = active[0] if len(active) == 1 and bool((slots == active[0]).all()) else None

    def __len__(self) -> int:
        return self._slots.numel()

    def step(self, arena: DeltaArena, lead: torch.Size, axis: int) -> Plan:
        """The plan for inputs of shape [*lead, features], the rows lying along `axis`.

        One serves all layers of the batch. The arena lives until the next batch.
        """
        self._arenas.add(arena)
        # On a GPU some layers may not be able to take the Triton kernels.
        key = (arena.is_lane, *(() if lead.numel() == len(self) else (axis, *lead)))
        found = self._plans.get(key)
        if found is None or found.planes < arena.planes:
            self._planes = max(self._planes, arena.planes)
            found = self._plans[key] = plan_of(
                self._slots if len(key) == 1 else spread(self._slots, lead, axis),
                slots=self._num_slots,
                planes=self._planes,
                device=self._device,
                is_lane=arena.is_lane,
            )
        return found

    def index(self, order: tuple[int, ...]) -> Tensor:
        """[rows] int64 on the device: where in `order` each row's slot is; -1 = nowhere."""
        found = self._indices.get(order)
        if found is None:
            local = torch.full_like(self._slots, -1)
            for position, slot in enumerate(order):
                local[self._slots == slot] = position
            found = self._indices[order] = local.to(self._device)
        return found

    def members(self, slot: int) -> Tensor:
        """[n] int64 on the device: the rows of one slot."""
        found = self._members.get(slot)
        if found is None:
            found = self._members[slot] = (self._slots == slot).nonzero().flatten().to(self._device)
        return found


@dataclass(frozen=True, slots=True)
class Batch:
    """The slots of one forward pass; valid until the engine sets the next one."""

    active: tuple[int, ...]  # distinct slots except the base's, ascending
    tokens: Rows
    heads: Rows

    def rows(self, count: int, *, is_head: bool) -> Rows:
        """The rows of a module that was given `count` of them; only the head may see fewer."""
        if is_head and count == len(self.heads):
            return self.heads
        if count == len(self.tokens):
            return self.tokens
        raise ServingError(
            f"a module was given {count} rows, but the batch has {len(self.tokens)} tokens and "
            f"{len(self.heads)} head rows; this model cannot serve variants"
        )


@dataclass(slots=True)
class Entry:
    """The whole tensors that one variant has in one module."""

    raw: dict[str, Tensor] = field(default_factory=dict)  # local parameter name -> whole tensor
    # The module with its raw parameters in place, where rows run through it.
    clone: nn.Module | None = None


class HoldsBatch(Protocol):
    """Whoever knows the batch of the forward that is running; None = base rows only."""

    batch: Batch | None


class Patch:
    """One module of the model that acts per slot; `module.forward` while it is installed."""

    def __init__(self, bank: HoldsBatch, module: nn.Module, axis: int, *, is_head: bool) -> None:
        self.module, self.axis, self.is_head = module, axis, is_head
        self.slots: dict[int, Entry] = {}
        self._bank = bank
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward

    def install(self) -> None:
        self.module.forward = self

    def remove(self) -> None:
        if self._own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self._own

    def changes(self, slot: int) -> bool:
        """Whether a slot differs from the base here."""
        return slot in self.slots

    def clear(self, slot: int) -> None:
        """Forget a slot that no batch names."""
        self.slots.pop(slot, None)

    def __call__(self, x: Tensor) -> Tensor:
        batch = self._bank.batch
        if batch is None:
            out: Tensor = self.original(x)
            return out
        active = [slot for slot in batch.active if self.changes(slot)]
        if not active:
            return self.original(x)  # type: ignore[no-any-return]  # as the line above
        return self.act(x, batch.rows(x.shape[self.axis], is_head=self.is_head), active)

    def act(self, x: Tensor, rows: Rows, active: list[int]) -> Tensor:
        """The module on a batch in which at least one row belongs to a variant that changes it."""
        if rows.uniform is not None:
            clone = self.slots[rows.uniform].clone
            assert clone is not None
            return clone(x)  # type: ignore[no-any-return]  # nn.Module's call is untyped
        out: Tensor = self.original(x)
        return self._through_clones(x, out, rows, active)

    def _through_clones(self, x: Tensor, out: Tensor, rows: Rows, slots: list[int]) -> Tensor:
        for slot in slots:
            clone = self.slots[slot].clone if slot in self.slots else None
            members = rows.members(slot)
            if clone is not None and members.numel():
                part = clone(x.index_select(self.axis, members))
                out = out.index_copy(self.axis, members, part)
        return out


class DeltaPatch(Patch):
    """A module with a weight [out, in] that packed deltas act on."""

    module: nn.Linear | nn.Embedding
    # None until the first delta. A larger one takes its place while a forward reads the old one.
    arena: DeltaArena | None = None

    def changes(self, slot: int) -> bool:
        return super().changes(slot) or self._has_delta(self.arena, slot)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        if self.arena is not None and self._has_delta(self.arena, slot):
            self.arena.clear(slot)

    def put(self, slot: int, delta: Delta) -> None:
        """Write a delta into a slot of the arena, which has it and is large enough."""
        assert self.arena is not None
        self.arena.put(slot, delta)

    def reserve(self, slots: int, like: Delta | None) -> None:
        """Make sure of an arena of so many slots that takes a delta such as `like`, if any."""
        arena, weight = self.arena, self.module.weight
        if arena is None and like is not None:
            # More planes may come later: as many as a bundle can have.
            refusal = why_not(weight.device, weight.dtype, like.in_features, MAX_PLANES)
            nothing = DeltaArena(
                like.out_features, like.in_features, slots=0, slot_bytes=0, planes=0,
                has_columns=False, rank=0, dtype=weight.dtype, device=weight.device,
                is_lane=refusal is None,
            )  # fmt: skip
            larger = nothing.grown(slots=slots, like=like)
        elif arena is not None and (
            arena.slots < slots or (like is not None and not arena.takes(like))
        ):
            larger = arena.grown(slots=slots, like=like)
        else:
            return
        if weight.device.type == "cuda":
            # Forwards run on a stream of their own: what was copied must be there before they look.
            torch.cuda.synchronize(weight.device)
        self.arena = larger

    def _has_delta(self, arena: DeltaArena | None, slot: int) -> bool:
        return arena is not None and slot < arena.slots and not arena.is_empty(slot)

    def _any_delta(self, active: list[int]) -> DeltaArena | None:
        """The arena, if one of these slots holds something there."""
        arena = self.arena
        return arena if any(self._has_delta(arena, slot) for slot in active) else None


class LinearPatch(DeltaPatch):
    """A linear whose weight and bias follow each token's variant."""

    module: nn.Linear

    def act(self, x: Tensor, rows: Rows, active: list[int]) -> Tensor:
        biased = tuple(s for s in active if s in self.slots and "bias" in self.slots[s].raw)
        base_bias = None if biased else self.module.bias
        weight, arena = self.module.weight, self._any_delta(active)
        if arena is not None:
            step = rows.step(arena, x.shape[:-1], self.axis)
            out = delta_linear(x, weight, arena, step, base_bias)
        else:
            out = F.linear(x, weight, base_bias)
        if biased:
            table = torch.stack([self.slots[s].raw["bias"] for s in biased] + [self.module.bias])
            # Index -1, the base, reads the last row.
            out = out + table[spread(rows.index(biased), x.shape[:-1], self.axis)]
        return self._through_clones(x, out, rows, active)


class EmbeddingPatch(DeltaPatch):
    """An embedding whose rows follow each token's variant; only the rows asked for are unpacked."""

    module: nn.Embedding

    def act(self, x: Tensor, rows: Rows, active: list[int]) -> Tensor:
        arena = self._any_delta(active)
        if arena is None:
            out: Tensor = self.original(x)
        else:
            step = rows.step(arena, x.shape, self.axis)
            out = self._finish(delta_embedding(x, self.module.weight, arena, step))
        return self._through_clones(x, out, rows, active)

    def _finish(self, found: Tensor) -> Tensor:
        """What the module does beside looking up: classes of models scale, say."""
        if type(self.module) is nn.Embedding and self.module.max_norm is None:
            return found
        clone = with_parameters(self.module, {"weight": found.flatten(0, -2)})
        # It names a row of the whole table; the clone's table is these rows.
        clone.padding_idx = None
        fresh = torch.arange(clone.weight.shape[0], device=found.device)
        out: Tensor = clone(fresh.view(found.shape[:-1]))
        return out


def spread(rows: Tensor, lead: torch.Size, axis: int) -> Tensor:
    """[rows] -> lead, the rows lying along `axis`."""
    shape = [1] * len(lead)
    shape[axis] = -1
    return rows.view(shape).expand(lead)


def with_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Any:
    """A shallow copy of a leaf module with some parameters replaced; everything else is shared."""
    clone = copy.copy(module)
    clone.__dict__.pop("forward", None)
    clone.__dict__["_parameters"] = {**module._parameters, **parameters}
    return clone
