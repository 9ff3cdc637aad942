"""Linears and embeddings whose delta has scales that can be trained; the signs stay packed.

    y = x (W + D)^T + bias,   D = sum_p diag(row_p) S_p diag(column_p)
    dL/drow_p[i] = sum_j (g^T x)_ij S_ij column_j,   dL/dcolumn_p[j] = sum_i row_i (g^T x)_ij S_ij

with g = dL/dy. Signs are unpacked one plane at a time, W + D is built anew in the backward pass,
and g^T x lives for one layer only, so that a step holds no float copy of the model beside the base.
What is trained is a factor: value = start (1 + step), so that a step of the optimiser is relative
to the scale, as Adam moves every number by about the learning rate whatever its size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soupkit.forms import SignScale
from soupkit_kernels import Delta
from soupkit_kernels.bitpack import unpack


def effective(weight: Tensor, packed: Tensor, scale: Tensor, column: Tensor | None) -> Tensor:
    """W + D in weight's dtype, fresh memory.

    Args:
        weight: [N, K]. packed: uint8 [P, N, ceil(K / 8)]. scale: [P, N] or [P, 1]. column: [P, K].
    """
    total = weight.clone()
    for plane in range(packed.shape[0]):
        term = unpack(packed[plane], weight.shape[1], weight.dtype)
        term = term * scale[plane].to(weight.dtype).unsqueeze(1)
        if column is not None:
            term *= column[plane].to(weight.dtype)
        total += term
    return total


class SignLinear(torch.autograd.Function):
    """y = x (W + D)^T with gradients for x, scale and column; none for the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., K]
        weight: Tensor,  # [N, K]
        packed: Tensor,  # uint8 [P, N, ceil(K / 8)]
        scale: Tensor,  # [P, N] or [P, 1]
        column: Tensor | None,  # [P, K]
    ) -> Tensor:  # [..., N]
        """The product."""
        ctx.save_for_backward(x, weight, packed, scale, column)
        return F.linear(x, effective(weight, packed, scale, column))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients, with W + D built anew."""
        x, weight, packed, scale, column = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_scale = grad_column = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ effective(weight, packed, scale, column)
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            outer = grad.flatten(0, -2).T @ x.flatten(0, -2)
            grad_scale, grad_column = _scale_grads(outer, packed, scale, column)
        return grad_x, None, None, grad_scale, grad_column


def _scale_grads(
    outer: Tensor, packed: Tensor, scale: Tensor, column: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dL/dscale and dL/dcolumn of all planes from dL/dW = outer [N, K]."""
    grad_scale = torch.empty_like(scale)
    grad_column = None if column is None else torch.empty_like(column)
    for plane in range(packed.shape[0]):
        term = unpack(packed[plane], outer.shape[1], outer.dtype) * outer
        by_row = term.sum(1) if column is None else term @ column[plane].to(outer.dtype)
        grad_scale[plane] = by_row.sum() if scale.shape[1] == 1 else by_row
        if grad_column is not None:
            rows = scale[plane].to(outer.dtype).expand(outer.shape[0])
            grad_column[plane] = rows @ term
    return grad_scale, grad_column


class TrainedDelta(nn.Module):
    """The scales of one delta, as trained: start (1 + step) of those that its encoding trains.

    Row and matrix scales train `scale`, column scales `column_scale` (the power of two beside them
    stays), rank-1 scales both. The two planes of a sparse delta share their steps, so that they
    cancel off the support. A scale of 0 stays 0; one may change its sign.
    """

    start: Tensor
    packed: Tensor
    column_start: Tensor | None

    def __init__(self, delta: Delta, axis: SignScale, *, is_sparse: bool = False) -> None:
        """Start at the scales of `delta`, which must have signs."""
        super().__init__()
        assert delta.packed is not None
        assert delta.scale is not None
        self._delta = delta
        self.register_buffer("packed", delta.packed)
        self.register_buffer("start", delta.scale)
        self.register_buffer("column_start", delta.column_scale)
        rows = delta.scale[:1] if is_sparse else delta.scale
        self.row_step = nn.Parameter(torch.zeros_like(rows)) if axis != "column" else None
        columns = delta.column_scale
        self.column_step = None if columns is None else nn.Parameter(torch.zeros_like(columns))

    def scale(self) -> Tensor:
        """float32 [P, N] or [P, 1], as trained."""
        return self.start if self.row_step is None else self.start * (1 + self.row_step)

    def column_scale(self) -> Tensor | None:
        """float32 [P, K], as trained; None for ones."""
        if self.column_start is None or self.column_step is None:
            return self.column_start
        return self.column_start * (1 + self.column_step)

    def delta(self) -> Delta:
        """The delta with its scales as they are now, on the CPU."""
        scale, columns = self.scale().detach().cpu(), self.column_scale()
        return replace(
            self._delta,
            scale=scale.contiguous(),
            column_scale=None if columns is None else columns.detach().cpu().contiguous(),
        )


class DeltaLinear(nn.Module):
    """An nn.Linear with a TrainedDelta beside its weight."""

    def __init__(self, linear: nn.Linear, trained: TrainedDelta) -> None:
        """Share the linear's weight and bias."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.trained = trained

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K]; returns [..., N]."""
        trained = self.trained
        y: Tensor = SignLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, trained.packed, trained.scale(), trained.column_scale()
        )
        return y if self.bias is None else y + self.bias


class DeltaEmbedding(nn.Module):
    """An nn.Embedding with a TrainedDelta beside its weight."""

    def __init__(self, embedding: nn.Embedding, trained: TrainedDelta) -> None:
        """Share the embedding's weight."""
        super().__init__()
        self.weight = embedding.weight
        self.trained = trained

    def forward(self, ids: Tensor) -> Tensor:
        """ids: integers [...]; returns [..., K]."""
        packed, scale = self.trained.packed, self.trained.scale()
        columns = self.trained.column_scale()
        total = F.embedding(ids, self.weight)
        for plane in range(packed.shape[0]):
            signs = unpack(packed[plane][ids], self.weight.shape[1], total.dtype)
            rows = scale[plane].expand(self.weight.shape[0])[ids].unsqueeze(-1)
            term = rows.to(total.dtype) * signs
            total = total + (term if columns is None else term * columns[plane].to(total.dtype))
        return total
