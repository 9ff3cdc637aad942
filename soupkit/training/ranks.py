"""The ranks of a run as one object: who am I, tell the others, agree with the others.

One process without torch.distributed is the case world_size = 1, where every method is local.
Otherwise every method is collective: all ranks enter it, in the same order. An error on one rank
becomes an error on all, because a rank that leaves alone makes the others wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from soupkit.errors import SoupkitError, TrainingError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the processes of the run."""

    rank: int
    world_size: int

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the default process group, or the single process.

        Raises:
            TrainingError: a launcher started several processes that know nothing of each other.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched.isdigit() and int(launched) > 1:
            raise TrainingError(
                f"WORLD_SIZE={launched}, but no process group is initialised: every process would "
                "train a model of its own and all would write the same folder. On a CPU pass "
                "use_cpu=True (TrainingArguments) or cpu=True (Accelerator), or call "
                "torch.distributed.init_process_group first"
            )
        return cls(0, 1)

    @property
    def is_zero(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's picklable value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: float) -> float:
        """The mean of a number over ranks, the same bits on each."""
        values = self.gather(value)
        # In the order of ranks, so the same bits; fsum would refuse infinities of both signs.
        return sum(values) / len(values)

    def tell(self, value: str | None) -> None:
        """From rank 0, to every other rank, which must be in `told`."""
        dist.broadcast_object_list([value], src=0)

    def told(self) -> str | None:
        """What rank 0 tells, on every other rank."""
        box: list[str | None] = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_zero(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0; every rank returns its (picklable) result or raises its error."""
        if self.world_size == 1:
            return act()
        box: list[Any] = [None, None]
        if self.is_zero:
            try:
                box[0] = act()
            except Exception as error:  # noqa: BLE001 - passed on to every rank below, this one included
                box[1] = _told_to_all(error)
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        result: T = box[0]
        return result

    def on_each(self, act: Callable[[], T]) -> T:
        """Run `act` on every rank; each returns its own result, or all raise together.

        A collective inside `act` is safe only if no rank can fail before it.
        """
        if self.world_size == 1:
            return act()
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(act())
        except Exception as found:  # noqa: BLE001 - raised on every rank below
            error = found
        self.raise_together(error)
        return result[0]

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error: one of the lowest one's kind, so that
        whoever tells kinds of errors apart does so on all ranks alike.

        Raises:
            type(error): on a rank whose own is of that kind; elsewhere the same, if it is a
                SoupkitError, else TrainingError; from the rank's own one.
        """
        found = self.gather(None if error is None else _told_of(error))
        for rank, other in enumerate(found):
            if other is None:
                continue
            kind, name, text = other
            if error is not None and _told_of(error)[1] == name:
                raise error
            raise (kind or TrainingError)(f"rank {rank}: {text}") from error

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Overwrite the contiguous `tensor` on every rank with rank `source`'s, bit for bit."""
        if self.world_size > 1 and tensor.numel() > 0:
            # As bytes: not every backend knows every dtype.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source)


# A caller's own kinds of errors, and what they hold, may not be picklable: only their text goes
# over to other ranks.


def _told_of(error: Exception) -> tuple[type[SoupkitError] | None, str, str]:
    """(kind, if it is ours; its name; text)."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return type(error) if isinstance(error, SoupkitError) else None, name, str(error)


def _told_to_all(error: Exception) -> Exception:
    """What every rank raises for rank 0's error."""
    if isinstance(error, SoupkitError) or type(error) is ValueError:
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return TrainingError(f"rank 0: {type(error).__name__}: {error}")
