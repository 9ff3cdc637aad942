"""One module of the model acting per slot: what `layers.VariantBank` puts in a module's `forward`.

Every row of a batch has a slot (-1 = base); a patched module acts as y[t] = f(x[t]; W_base +
delta[slot[t]]). The packed deltas of a linear or an embedding lie in one arena, slot by slot; a
slot that holds none there acts as the base. Whole tensors (norms, biases) lie in tables beside it
(whole.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from soupkit.errors import ServingError
from soupkit_kernels import Delta, DeltaArena, Plan, delta_embedding, delta_linear, plan_of
from soupkit_kernels.arena import arena_for
from soupkit_kernels.slots import Room

from .parallel import Vocabulary, inner_forward, is_partial, local
from .shape import ModuleShape
from .whole import WholeTensors, with_parameters

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
        self._count = slots.numel()
        self._index: Tensor | None = None
        self._members: dict[int, Tensor] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._plan: Plan | None = None  # that of nearly all layers where signs lie as in files
        # Those that kernels of this batch may still read on a GPU when another takes their place.
        self._arenas: set[DeltaArena] = set()
        self.uniform = active[0] if len(active) == 1 and bool((slots == active[0]).all()) else None

    def __len__(self) -> int:
        return self._count

    def step(self, arena: DeltaArena, lead: torch.Size, axis: int) -> Plan:
        """The plan for inputs of shape [*lead, features], the rows lying along `axis`.

        One serves all layers of the batch. On a GPU the arena lives until the next batch.
        """
        if arena.is_lane:
            self._arenas.add(arena)
        elif (
            self._plan is not None
            and self._plan.planes >= arena.planes
            and lead.numel() == self._count
        ):
            return self._plan
        # On a GPU some layers may not be able to take the Triton kernels.
        key = (arena.is_lane, *(() if lead.numel() == self._count else (axis, *lead)))
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
        if key == (False,):
            self._plan = found
        return found

    @property
    def index(self) -> Tensor:
        """[rows] int64 on the device: slot + 1, 0 the base, as the tables of vectors have it."""
        if self._index is None:
            self._index = (self._slots + 1).to(self._device)
        return self._index

    def members(self, slot: int) -> Tensor:
        """[n] int64 on the device: the rows of one slot."""
        found = self._members.get(slot)
        if found is None:
            found = self._members[slot] = (self._slots == slot).nonzero().flatten().to(self._device)
        return found


@dataclass(frozen=True, slots=True)
class Batch:
    """The slots of one forward pass; valid until the engine sets the next one."""

    active: frozenset[int]  # slots that are in it, except the base's
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


class HoldsBatch(Protocol):
    """Whoever knows the batch of the forward that is running; None = base rows only."""

    batch: Batch | None


class Patch:
    """One module of the model that acts per slot; `module.forward` while it is installed."""

    def __init__(
        self,
        bank: HoldsBatch,
        module: nn.Module,
        axis: int,
        *,
        is_head: bool,
        takes_vectors: bool = False,
    ) -> None:
        """takes_vectors: whether its parameters may be vectors of each row (whole.py asks)."""
        self.module, self.axis, self.is_head = module, axis, is_head
        self.whole = WholeTensors(module, {}, 0)
        self._takes_vectors = takes_vectors
        self._changed: frozenset[int] = frozenset()  # slots that differ from the base here
        self._bank = bank
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")
        # The wrapper of an embedding joins what the ranks have its own way.
        self._inner = None if isinstance(module, nn.Embedding) else inner_forward(module)
        self.is_partial, self.is_first = is_partial(module)
        self.original: Callable[..., Any] = (
            module.forward if self._inner is None else self._inner.cell_contents
        )

    def install(self) -> None:
        if self._inner is None:
            self.module.forward = self
        else:
            self._inner.cell_contents = self

    def remove(self) -> None:
        if self._inner is not None:
            self._inner.cell_contents = self.original
        elif self._own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self._own

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return self.whole.nbytes

    def resize(self, shape: ModuleShape, slots: int) -> None:
        """So many slots of that shape; what is in them stays and must fit.

        Memory of both, of this module only, is there at once. A forward that runs meanwhile reads
        the old or the new.
        """
        if (self.whole.specs, self.whole.slots) != (shape.whole, slots):
            whole = self.whole.resized(shape.whole, slots)
            self._wait_for_copies()
            self.whole = whole

    def put(self, slot: int, delta: Delta | None, whole: Mapping[str, Tensor]) -> None:
        """Write what a variant has here into an empty slot that is large enough."""
        self.whole.put(slot, whole)
        self._changed |= {slot}

    def clear(self, slot: int) -> None:
        """Forget a slot that no batch names."""
        self._changed -= {slot}
        self.whole.clear(slot)

    def __call__(self, x: Tensor) -> Tensor:
        batch = self._bank.batch
        if batch is None or self._changed.isdisjoint(batch.active):
            out: Tensor = self.original(x)
            return out
        rows = batch.rows(x.shape[self.axis], is_head=self.is_head)
        return self.act(x, rows, batch.active)

    def act(self, x: Tensor, rows: Rows, active: frozenset[int]) -> Tensor:
        """The module on a batch in which at least one row belongs to a variant that changes it."""
        out: Tensor
        if rows.uniform is not None:
            out = self.whole.clone(rows.uniform).forward(x)
        elif self._takes_vectors:
            out = self.whole.mixed(rows.index, x.ndim, self.axis).forward(x)
        else:
            out = self._through_clones(x, self.original(x), rows, active)
        return out

    def _through_clones(self, x: Tensor, out: Tensor, rows: Rows, slots: frozenset[int]) -> Tensor:
        """`out`, with the rows of each slot that holds something run on their own."""
        whole = self.whole
        for slot in sorted(slots):
            members = rows.members(slot)
            if members.numel() and whole.held.get(slot):
                part = whole.clone(slot).forward(x.index_select(self.axis, members))
                out = out.index_copy(self.axis, members, part)
        return out

    def _wait_for_copies(self) -> None:
        device = next(self.module.parameters()).device
        if device.type == "cuda":
            # Forwards run on a stream of their own: what was copied must be there before they look.
            torch.cuda.synchronize(device)


class DeltaPatch(Patch):
    """A module with a weight [out, in] that packed deltas act on."""

    module: nn.Linear | nn.Embedding
    # None where no variant has one. Another takes its place while a forward reads the old one.
    arena: DeltaArena | None = None
    _room: Room | None = None
    _with_delta: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + (0 if self.arena is None else self.arena.data.nbytes)

    def resize(self, shape: ModuleShape, slots: int) -> None:
        super().resize(shape, slots)
        arena, room = self.arena, shape.room
        if room is None:
            arena = None
        elif arena is None:
            arena = arena_for(room, slots=slots, device=self.module.weight.device)
        elif (arena.slots, self._room) != (slots, room):
            arena = arena.resized(slots, room)
        self._wait_for_copies()
        self.arena, self._room = arena, room

    def put(self, slot: int, delta: Delta | None, whole: Mapping[str, Tensor]) -> None:
        if delta is not None:
            assert self.arena is not None
            self.arena.put(slot, delta)
            self._with_delta |= {slot}
        super().put(slot, delta, whole)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self._with_delta -= {slot}
        if self.arena is not None and slot < self.arena.slots and not self.arena.is_empty(slot):
            self.arena.clear(slot)

    def _arena_of(self, active: frozenset[int]) -> DeltaArena | None:
        """The arena, if one of these slots holds something there."""
        return None if self._with_delta.isdisjoint(active) else self.arena


class LinearPatch(DeltaPatch):
    """A linear whose weight and bias follow each token's variant."""

    module: nn.Linear

    def act(self, x: Tensor, rows: Rows, active: frozenset[int]) -> Tensor:
        whole = self.whole
        # Not by attribute: a module looks through three places for those, in every layer and step.
        parameters: Any = self.module._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        own_biases = "bias" in whole.specs
        if own_biases:
            # All rows of one variant: its own bias; else each row's is added after.
            slot = None if self.is_partial else rows.uniform
            bias = None if slot is None else whole.own(slot, "bias")
        arena = self._arena_of(active)
        if arena is not None:
            out = delta_linear(x, weight, arena, rows.step(arena, x.shape[:-1], self.axis), bias)
        else:
            out = F.linear(x, weight, bias)
        if "weight" in whole.specs:
            out = self._with_whole_weights(x, out, rows, active, bias)
        if own_biases and bias is None:
            out = self._with_biases(out, rows)
        return out

    def _with_whole_weights(
        self, x: Tensor, out: Tensor, rows: Rows, active: frozenset[int], bias: Tensor | None
    ) -> Tensor:
        for slot in sorted(active):
            members = rows.members(slot)
            if "weight" in self.whole.held.get(slot, ()) and members.numel():
                given, weight = x.index_select(self.axis, members), self.whole.own(slot, "weight")
                out = out.index_copy(self.axis, members, F.linear(given, weight, bias))
        return out

    def _with_biases(self, out: Tensor, rows: Rows) -> Tensor:
        biases = self.whole.vectors("bias", rows.index, out.ndim, self.axis)
        if not self.is_partial:
            return out + biases
        # The base's is added to the sum of all ranks; what differs from it only once.
        return out + (biases - self.whole.base("bias")) if self.is_first else out


class EmbeddingPatch(DeltaPatch):
    """An embedding whose rows follow each token's variant; only the rows asked for are unpacked."""

    module: nn.Embedding

    def act(self, x: Tensor, rows: Rows, active: frozenset[int]) -> Tensor:
        arena, weight = self._arena_of(active), self.module.weight
        if arena is None:
            out: Tensor = self.original(x)
        elif isinstance(weight, DTensor):
            part = Vocabulary(weight)
            step = rows.step(arena, x.shape, self.axis)
            found = delta_embedding(part.local_ids(x), local(weight), arena, step)
            out = self._finish(part.joined(x, found))
        else:
            out = self._finish(
                delta_embedding(x, weight, arena, rows.step(arena, x.shape, self.axis))
            )
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
