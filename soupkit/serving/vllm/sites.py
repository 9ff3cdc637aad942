"""The modules of a vLLM model that act per slot.

A row of a batch has a slot (-1 = base), and
    y[t] = f(x[t]; W_base + delta[slot[t]], b[slot[t]])
Linears, heads and embeddings act through their quantisation method, which is what vLLM's modules
call for a product and what its tensor parallelism sums and gathers the results of: an
unquantised weight on a GPU in one fused kernel, any other by its own product and the delta's beside
it. RMS norms multiply by each row's own weights. Deltas lie in arenas of equal slots, one a part of
a merged module, so that each part has the encoding that it has. What else a variant may have
changed has no site, and is refused by name (bank.py).
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soupkit.forms import MAX_PLANES
from soupkit.serving.patches import Rows
from soupkit_kernels import Delta, DeltaArena, add_delta_, delta_embedding, delta_linear
from soupkit_kernels.arena import arena_for
from soupkit_kernels.slots import Room, form_of
from soupkit_kernels.triton_support import why_not

from .batch import Batch, HoldsBatch
from .places import Layout

Value = Delta | Tensor
# What a variant has in a site: a matrix's delta or whole rows by part, a bias by -1 - part.
Content = Mapping[int, Value]


class Site:
    """A module whose parameters follow each row's slot. Subclasses say how."""

    def __init__(self, bank: HoldsBatch, slots: int) -> None:
        self.slots = slots
        self._bank = bank
        self._held: frozenset[int] = frozenset()  # slots that differ from the base here

    @property
    def nbytes(self) -> int:
        """Device memory of its slots."""
        raise NotImplementedError

    def need(self, content: Content) -> None:
        """Makes room in every slot for content of this form; what they hold stays."""
        raise NotImplementedError

    def write(self, slot: int, content: Content) -> None:
        """Puts content, for which there is room, into an empty slot."""
        raise NotImplementedError

    def erase(self, slot: int) -> None:
        """Empties what `write` wrote."""
        raise NotImplementedError

    def put(self, slot: int, content: Content) -> None:
        self.clear(slot)
        if content:
            self.write(slot, content)
            self._held |= {slot}

    def clear(self, slot: int) -> None:
        if slot in self._held:
            self._held -= {slot}
            self.erase(slot)

    def _batch(self) -> Batch | None:
        """The batch, if a slot that it has differs here."""
        batch = self._bank.batch
        return None if batch is None or self._held.isdisjoint(batch.active) else batch


class MatrixSite(Site):
    """A module with a matrix in the parts of its layout."""

    def __init__(
        self, bank: HoldsBatch, slots: int, layout: Layout, *, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__(bank, slots)
        self.layout, self.dtype, self.device = layout, dtype, torch.device(device)
        self.arenas: dict[int, DeltaArena] = {}
        self._rooms: dict[int, Room] = {}
        self._whole: dict[int, Tensor] = {}  # part -> [slots, rows, columns]
        self._with_delta: dict[int, set[int]] = {}  # part -> slots
        self._with_whole: dict[int, set[int]] = {}

    @property
    def nbytes(self) -> int:
        packed = sum(arena.data.nbytes for arena in self.arenas.values())
        return packed + sum(table.nbytes for table in self._whole.values())

    def need(self, content: Content) -> None:
        for index, value in content.items():
            if isinstance(value, Delta):
                self._need_room(index, value)
            elif index >= 0 and index not in self._whole:
                part = self.layout.parts[index]
                self._whole[index] = torch.zeros(
                    self.slots, part.local, self.layout.columns.length,
                    dtype=self.dtype, device=self.device,
                )  # fmt: skip

    def _need_room(self, index: int, value: Delta) -> None:
        refusal = why_not(self.device, self.dtype, value.in_features, MAX_PLANES)
        room = Room(
            value.out_features, value.in_features, self.dtype, refusal is None,
            frozenset({form_of(value)}),
        )  # fmt: skip
        arena, old = self.arenas.get(index), self._rooms.get(index)
        if arena is None or old is None:
            arena = arena_for(room, slots=self.slots, device=self.device)
        else:
            room = old.merged(room)
            if room == old:
                return
            arena = arena.resized(self.slots, room)
        self.arenas[index], self._rooms[index] = arena, room

    def write(self, slot: int, content: Content) -> None:
        for index, value in content.items():
            if isinstance(value, Delta):
                self.arenas[index].put(slot, value)
                self._with_delta.setdefault(index, set()).add(slot)
            elif index >= 0:
                self._whole[index][slot].copy_(value)
                self._with_whole.setdefault(index, set()).add(slot)

    def erase(self, slot: int) -> None:
        for index, slots in self._with_delta.items():
            if slot in slots:
                self.arenas[index].clear(slot)
                slots.discard(slot)
        for slots in self._with_whole.values():
            slots.discard(slot)

    def _arena(self, index: int, active: frozenset[int]) -> DeltaArena | None:
        """A part's arena, if one of these slots holds something there."""
        held = self._with_delta.get(index)
        return None if held is None or held.isdisjoint(active) else self.arenas[index]


class LinearSite(MatrixSite):
    """A linear, or the head: y = x W^T + b."""

    def __init__(
        self,
        bank: HoldsBatch,
        module: Any,
        slots: int,
        layout: Layout,
        *,
        dtype: torch.dtype,
        is_head: bool = False,
        fuses: bool = False,
    ) -> None:
        """fuses: its weight is a plain [N, K] tensor that the fused kernel can read."""
        device = next(module.parameters()).device
        super().__init__(bank, slots, layout, dtype=dtype, device=device)
        self._is_head, self._fuses = is_head, fuses
        bias = getattr(module, "bias", None)
        # One that the module returns instead of adding is not its own to change.
        adds = isinstance(bias, Tensor) and not getattr(module, "skip_bias_add", False)
        self._base_bias: Tensor | None = bias if adds else None
        self._biases: Tensor | None = None  # [1 + slots, rows]; the first is the base's
        self._base: Callable[..., Tensor] = module.quant_method.apply
        with_method(module, "apply", self.apply)

    @property
    def takes_bias(self) -> bool:
        """Whether it adds a bias that a variant can have its own of."""
        return self._base_bias is not None

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._biases is None else self._biases[1:].nbytes)

    def need(self, content: Content) -> None:
        super().need(content)
        if any(index < 0 for index in content) and self._biases is None:
            assert self._base_bias is not None
            self._biases = self._base_bias.detach().expand(self.slots + 1, -1).clone()

    def write(self, slot: int, content: Content) -> None:
        super().write(slot, content)
        for index, value in content.items():
            if index < 0 and self._biases is not None and isinstance(value, Tensor):
                at = self.layout.offset(-1 - index)
                self._biases[slot + 1, at : at + value.shape[0]].copy_(value)

    def erase(self, slot: int) -> None:
        super().erase(slot)
        if self._biases is not None:
            self._biases[slot + 1].copy_(self._biases[0])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the quantisation method's apply does, with the deltas of the rows' slots."""
        batch = self._batch()
        if batch is None:
            return self._base(layer, x, bias)
        flat = x.reshape(-1, x.shape[-1])
        rows = batch.rows(flat.shape[0], is_head=self._is_head)
        # Where ranks sum their results, one of them is given the bias.
        own = None if bias is None else self._biases
        plain = bias if own is None else None
        if self._fuses:
            y = self._fused(layer.weight, flat, plain, rows, batch.active)
        else:
            y = self._beside(layer, flat, plain, rows, batch.active)
        self._put_whole(y, flat, plain, rows, batch.active)
        if own is not None:
            y += own.index_select(0, rows.index)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _fused(
        self, weight: Tensor, x: Tensor, bias: Tensor | None, rows: Rows, active: frozenset[int]
    ) -> Tensor:
        outs = []
        for index, part in enumerate(self.layout.parts):
            at = self.layout.offset(index)
            own, add = weight[at : at + part.local], bias
            if bias is not None:
                add = bias[at : at + part.local]
            arena = self._arena(index, active)
            if arena is None:
                outs.append(F.linear(x, own, add))
            else:
                outs.append(delta_linear(x, own, arena, rows.step(arena, x.shape[:1], 0), add))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def _beside(
        self, layer: Any, x: Tensor, bias: Tensor | None, rows: Rows, active: frozenset[int]
    ) -> Tensor:
        y = self._base(layer, x, bias).contiguous()
        x = x.to(self.dtype)
        for index, part in enumerate(self.layout.parts):
            arena = self._arena(index, active)
            if arena is None:
                continue
            step = rows.step(arena, x.shape[:1], 0)
            if len(self.layout.parts) == 1 and y.dtype == x.dtype:
                add_delta_(y, x, arena, step)
                continue
            at = self.layout.offset(index)
            y[:, at : at + part.local] += add_delta_(
                x.new_zeros(x.shape[0], part.local), x, arena, step
            )
        return y

    def _put_whole(
        self, y: Tensor, x: Tensor, bias: Tensor | None, rows: Rows, active: frozenset[int]
    ) -> None:
        """Replaces what slots that hold a part's whole matrix have there."""
        for index, slots in self._with_whole.items():
            at, size = self.layout.offset(index), self.layout.parts[index].local
            add = None if bias is None else bias[at : at + size]
            for slot in sorted(slots & active):
                members = rows.members(slot)
                if members.numel():
                    out = F.linear(x[members], self._whole[index][slot], add)
                    y[members, at : at + size] = out.to(y.dtype)


class EmbeddingSite(MatrixSite):
    """The embedding of tokens: only the rows that are asked for are unpacked."""

    def __init__(
        self, bank: HoldsBatch, module: Any, slots: int, layout: Layout, *, dtype: torch.dtype
    ) -> None:
        super().__init__(bank, slots, layout, dtype=dtype, device=module.weight.device)
        self._base: Callable[..., Tensor] = module.quant_method.embedding
        # vLLM's kernel for split vocabularies reads the weight without asking the method.
        module.use_fused_embedding = False
        with_method(module, "embedding", self.embedding)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """What the method's embedding does, with the deltas of the rows' slots."""
        batch = self._batch()
        if batch is None:
            return self._base(layer, ids)
        rows = batch.rows(ids.numel(), is_head=False)
        flat = ids.reshape(-1)
        arena = self._arena(0, batch.active)
        if arena is None:
            out = self._base(layer, flat)
        else:
            out = delta_embedding(flat, layer.weight, arena, rows.step(arena, flat.shape, 0))
        for slot in sorted(self._with_whole.get(0, set()) & batch.active):
            members = rows.members(slot)
            out[members] = F.embedding(flat[members], self._whole[0][slot])
        return out.view(*ids.shape, out.shape[-1])


class NormSite(Site):
    """An RMS norm: y = w[slot] * x / rms(x)."""

    def __init__(self, bank: HoldsBatch, module: Any, slots: int) -> None:
        super().__init__(bank, slots)
        self._base: Callable[..., Any] = module.forward
        weight = module.weight.detach()
        self.size = int(weight.shape[0])
        self._weights = weight.expand(slots + 1, -1).clone()  # the first is the base's
        self._plain = copy.copy(module)
        self._plain.pass_weight = self._plain.pass_weight_add = False
        self._normalise: Callable[..., Any] = type(module).forward_native
        module.forward = self.forward

    @property
    def nbytes(self) -> int:
        return int(self._weights[1:].nbytes)

    def need(self, content: Content) -> None:
        pass

    def write(self, slot: int, content: Content) -> None:
        for value in content.values():
            assert isinstance(value, Tensor)
            self._weights[slot + 1].copy_(value)

    def erase(self, slot: int) -> None:
        self._weights[slot + 1].copy_(self._weights[0])

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """What the norm does, each row with its own weights; heads may lie in axis 0 or 1."""
        batch = self._batch()
        if batch is None:
            return self._base(x, residual) if residual is not None else self._base(x)
        index = batch.rows(x.shape[0], is_head=False).index
        weights = self._weights.index_select(0, index)
        weights = weights.view(-1, *[1] * (x.ndim - 2), weights.shape[-1])
        if residual is None:
            return self._normalise(self._plain, x) * weights
        normed, residual = self._normalise(self._plain, x, residual)
        return normed * weights, residual


def with_method(module: Any, name: str, act: Callable[..., Tensor]) -> None:
    """Gives a module a quantisation method of its own, of the same class, with one method ours."""
    method = copy.copy(module.quant_method)
    setattr(method, name, act)
    module.quant_method = method
