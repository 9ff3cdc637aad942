"""One module of the model acting per slot: what `layers.VariantBank` puts in a module's `forward`.

Every row of a batch has a slot (-1 = base); a patched module acts as y[t] = f(x[t]; W_base +
delta[slot[t]]).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soupkit.bitdelta import SignDelta
from soupkit.errors import ServingError
from soupkit_kernels.bitpack import unpack
from soupkit_kernels.op import delta_linear

BASE_SLOT = -1


class Rows:
    """The slots of one row vector of a batch (its tokens, or the rows the head computes)."""

    def __init__(self, slots: Tensor, active: Sequence[int], device: torch.device) -> None:
        self._slots = slots  # [rows] int64 on the CPU
        self._device = device
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self._members: dict[int, Tensor] = {}
        self.uniform = active[0] if len(active) == 1 and bool((slots == active[0]).all()) else None

    def __len__(self) -> int:
        return self._slots.numel()

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
    """What one variant changes in one module."""

    sign: SignDelta | None = None  # tensors on the model's device
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

    def __call__(self, x: Tensor) -> Tensor:
        batch = self._bank.batch
        if batch is None:
            out: Tensor = self.original(x)
            return out
        active = [slot for slot in batch.active if slot in self.slots]
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
            clone, members = self.slots[slot].clone, rows.members(slot)
            if clone is not None and members.numel():
                part = clone(x.index_select(self.axis, members))
                out = out.index_copy(self.axis, members, part)
        return out


class LinearPatch(Patch):
    """A linear whose weight and bias follow each token's variant."""

    module: nn.Linear

    def act(self, x: Tensor, rows: Rows, active: list[int]) -> Tensor:
        signed = tuple(s for s in active if self.slots[s].sign is not None)
        biased = tuple(s for s in active if "bias" in self.slots[s].raw)
        base_bias = None if biased else self.module.bias
        weight = self.module.weight
        if signed:
            signs = [self.slots[s].sign for s in signed]
            packed = [sign.signs for sign in signs if sign is not None]
            scale = [sign.scale for sign in signs if sign is not None]
            index = self._spread(rows.index(signed), x)
            out = delta_linear(
                x, weight, packed=packed, scale=scale, variant_index=index, bias=base_bias
            )
        else:
            out = F.linear(x, weight, base_bias)
        if biased:
            table = torch.stack([self.slots[s].raw["bias"] for s in biased] + [self.module.bias])
            # Index -1, the base, reads the last row.
            out = out + table[self._spread(rows.index(biased), x)]
        whole = [s for s in active if self.slots[s].clone is not None]
        return self._through_clones(x, out, rows, whole)

    def _spread(self, index: Tensor, x: Tensor) -> Tensor:
        """[rows] -> x.shape[:-1], the rows lying along the token axis."""
        shape = [1] * (x.ndim - 1)
        shape[self.axis] = -1
        return index.view(shape).expand(x.shape[:-1])


class EmbeddingPatch(Patch):
    """An embedding whose rows follow each token's variant; only the rows asked for are unpacked."""

    module: nn.Embedding

    def act(self, x: Tensor, rows: Rows, active: list[int]) -> Tensor:
        out: Tensor = self.original(x)
        for slot in active:
            members, sign = rows.members(slot), self.slots[slot].sign
            if sign is None or not members.numel():
                continue
            ids = x.index_select(self.axis, members)
            clone = with_parameters(self.module, {"weight": self._weight_rows(ids.flatten(), sign)})
            # It names a row of the whole table; the clone's table is these rows.
            clone.padding_idx = None
            fresh = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            out = out.index_copy(self.axis, members, clone(fresh))
        return self._through_clones(x, out, rows, active)

    def _weight_rows(self, ids: Tensor, sign: SignDelta) -> Tensor:
        """[n, embedding_dim]: the rows of base + delta, summed in float32 as restoring does."""
        weight = self.module.weight
        delta = torch.zeros(ids.numel(), weight.shape[1], device=ids.device)
        for plane in range(sign.planes):
            scale = sign.scale[plane]
            per_row = scale[ids] if scale.numel() > 1 else scale
            delta += per_row.unsqueeze(-1) * unpack(sign.signs[plane, ids], sign.in_features)
        return (weight[ids].float() + delta).to(weight.dtype)


def with_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Any:
    """A shallow copy of a leaf module with some parameters replaced; everything else is shared."""
    clone = copy.copy(module)
    clone.__dict__.pop("forward", None)
    clone.__dict__["_parameters"] = {**module._parameters, **parameters}
    return clone
