"""Tensor parallelism: the part of a variant that belongs to this rank's part of the base.

transformers splits a linear's weight [N, K] by rows (column-parallel, y_r = x W_r^T) or by columns
(row-parallel, y = sum_r x_r W_r^T) and wraps its forward to exchange what the ranks have. A delta
is cut the same way and acts inside that wrapper, so a row-parallel one is in the partial sum that
is reduced, and costs no communication of its own. An embedding is split by its vocabulary; the one
rank that has a token's row gives it to all. Every rank loads the same variants into the same slots,
in one order. Parameters that are not split are whole on every rank.
"""

from types import CellType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from soupkit.errors import ServingError
from soupkit_kernels import Delta


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(value: Delta | Tensor, parameter: Tensor) -> Delta | Tensor:
    """This rank's part of a delta of a parameter, or of a tensor in its place."""
    if not isinstance(parameter, DTensor):
        return value
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    for axis, (start, length) in enumerate(zip(offset, shape, strict=True)):
        if length != parameter.shape[axis]:
            value = value.narrow(axis, start, length)
    return value


def is_partial(module: nn.Module) -> tuple[bool, bool]:
    """Whether the module gives this rank's part of a sum, and whether this is the first rank."""
    weight = module._parameters.get("weight")
    if not isinstance(weight, DTensor) or isinstance(module, nn.Embedding):
        return False, True
    return weight.placements != (Shard(0),), weight.device_mesh.get_local_rank() == 0


def check_place(name: str, module: nn.Module, *, is_packed: bool) -> None:
    """Raise ServingError for a tensor of a split embedding that cannot act per token."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Embedding) or not isinstance(weight, DTensor):
        return
    if not is_packed or weight.placements != (Shard(0),):
        raise ServingError(
            f"tensor {name!r}: an embedding that is split over ranks takes packed deltas, and "
            "only split by its vocabulary; serve the family without tensor parallelism"
        )


class Vocabulary:
    """The rows of a split embedding that this rank has."""

    def __init__(self, weight: DTensor) -> None:
        (self._count, _), (self._start, _) = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        self._group = weight.device_mesh.get_group()

    def local_ids(self, ids: Tensor) -> Tensor:
        """Where each id is among them; those of other ranks are anywhere."""
        return (ids - self._start).clamp(0, max(0, self._count - 1))

    def joined(self, ids: Tensor, rows: Tensor) -> Tensor:
        """rows [*ids.shape, K] of `local_ids` -> those of `ids`, on every rank; a collective."""
        is_here = (ids >= self._start) & (ids < self._start + self._count)
        rows = rows.masked_fill(~is_here.unsqueeze(-1), 0)
        dist.all_reduce(rows, group=self._group)
        return rows


def inner_forward(module: nn.Module) -> CellType | None:
    """Where transformers' wrapper of a split module keeps the forward that it calls, if it has one.

    Inside it parameters are this rank's plain tensors.
    """
    wrapper: Any = module.__dict__.get("forward")
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if "original_forward" not in names:
        return None
    cell: CellType = wrapper.__closure__[names.index("original_forward")]
    return cell
