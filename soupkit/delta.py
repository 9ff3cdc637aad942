"""Deltas: W_ft - W_base by parameter name, and which parameters take part in what.

    delta = float32(W_ft) - float32(W_base)

Subtracted in float32 (float64 where an input has it), because in bfloat16 the update is rounded
away. A delta that takes part in a merge or an encoding is seen as a batch of matrices [batch, out,
in]; what is no matrix is a vector. This module reads no files and decides nothing about merges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from soupkit.errors import MergeError
from soupkit.numeric import check_finite

Layout = Literal["vector", "matrix", "conv", "experts"]

# What wrappers (DDP and DataParallel, torch.compile, FSDP, activation checkpointing) put into
# parameter names.
WRAPPER_PARTS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)

_EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|position\w*)\.")


class TensorSource(Protocol):
    """Anything that hands out whole tensors by canonical parameter name, one at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """Unique parameter names, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor, without reading it."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its own dtype."""
        ...


def canonical_name(name: str) -> str:
    """`name` without wrapper parts: "module._orig_mod.norm.weight" -> "norm.weight"."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """True if an include pattern is found in `name`, or there is none, and no exclude is."""
    wanted = not include or any(re.search(pattern, name) for pattern in include)
    return wanted and not any(re.search(pattern, name) for pattern in exclude)


def layout(name: str, shape: Sequence[int]) -> Layout:
    """How a parameter of this name and shape is seen.

    Returns:
        "vector": at most one axis, or empty; "matrix": [out, in]; "conv": [out, in, kernel...];
        "experts": [experts, out, in], one matrix an expert. A 3-D tensor is a Conv1d kernel if its
        name ends ".weight" (a module's own weight) and experts otherwise (parameters such as
        "experts.gate_up_proj").
    """
    if len(shape) <= 1 or 0 in shape:
        return "vector"
    if len(shape) == 2:
        return "matrix"
    if len(shape) >= 4 or name == "weight" or name.endswith(".weight"):
        return "conv"
    return "experts"


def is_embedding(name: str) -> bool:
    """Whether a parameter of this name is a table of embeddings rather than a linear's weight."""
    return _EMBEDDING.search(name) is not None


def as_matrices(name: str, tensor: Tensor) -> Tensor:
    """`tensor` as matrices [batch, out, in]; a view where strides allow.

    Raises:
        ValueError: the tensor is a vector by `layout`.
    """
    kind = layout(name, tensor.shape)
    if kind == "vector":
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} is no matrix; treat it as a vector")
    if kind == "experts":
        return tensor
    return tensor.reshape(1, tensor.shape[0], -1)


def from_matrices(name: str, matrices: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `as_matrices`: [batch, out, in] -> `shape`.

    Raises:
        ValueError: the number of entries differs.
    """
    if matrices.numel() != torch.Size(shape).numel():
        raise ValueError(f"{name}: {tuple(matrices.shape)} has not the entries of {tuple(shape)}")
    return matrices.reshape(tuple(shape))


def subtract(
    finetuned: Tensor,
    base: Tensor,
    *,
    name: str,
    whole: Sequence[int] | None = None,
    start: int = 0,
) -> Tensor:
    """The delta of one parameter.

    Args:
        finetuned, base: same shape, any floating dtypes.
        name: of the parameter, for messages.
        whole, start: where both are some rows of a parameter, see `numeric.check_finite`.
    Returns:
        float32 of the same shape, on finetuned's device, fresh memory.
    Raises:
        MergeError: the shapes differ, or an entry of the delta is NaN or infinite.
        ValueError: a dtype is not floating.
    """
    if finetuned.shape != base.shape:
        raise MergeError(
            f"{name}: fine-tune has shape {tuple(finetuned.shape)}, base has {tuple(base.shape)}; "
            "a delta needs the same shape on both sides"
        )
    if not (finetuned.is_floating_point() and base.is_floating_point()):
        raise ValueError(
            f"{name}: {finetuned.dtype} and {base.dtype}: only floating tensors have a delta"
        )
    wide = torch.float64 if torch.float64 in (finetuned.dtype, base.dtype) else torch.float32
    with torch.no_grad():
        delta = (
            finetuned.detach().to(wide, copy=True).sub_(base.detach().to(finetuned.device, wide))
        )
        delta = delta.to(torch.float32)
        check_finite(name, delta, whole=whole, start=start)
    return delta
