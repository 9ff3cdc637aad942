"""The ranks of one engine in step: the same variants in the same slots, the same requests.

The first rank is told what to do. What changes slots it passes on, in order, and waits until every
rank has done it (or none: then all undo it); requests travel with transformers' own, which every
rank schedules alike. With one rank all this does nothing.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from soupkit.errors import ServingError

from .memory import KVPlan, plan_kv

Work = Callable[..., Any]
_FOREVER = timedelta(days=365)


class Ranks:
    """What the ranks of a tensor-parallel group say to each other.

    Attributes:
        works: by name, what every rank can do, with the same arguments. undo: by name, what every
            rank does if a work failed on any of them.
    """

    def __init__(self, helper: Any) -> None:
        """A collective: every rank makes one.

        Args:
            helper: the DistributedHelper of the continuous-batching manager.
        """
        self.works: dict[str, Work] = {}
        self.undo: dict[str, Work] = {}
        self.is_first: bool = helper.is_tp_driver
        self._group: Any = None
        if helper.tp_size > 1:
            members = dist.get_process_group_ranks(helper.tp_group)
            # Of its own, as the engine's thread uses the others at any time; no limit of waiting.
            self._group = dist.new_group(members, backend="gloo", timeout=_FOREVER)
            self._root: int = helper.tp_root_global_rank
            self._model_group = helper.tp_group

    @property
    def alone(self) -> bool:
        return self._group is None

    def everywhere(self, name: str, *args: Any) -> Any:
        """On the first rank: the work of that name on every rank; what it gave here.

        Raises:
            Exception: what it raised here, or ServingError for what it raised elsewhere.
        """
        if not self.alone:
            dist.broadcast_object_list([(name, args)], src=self._root, group=self._group)
        return self._together(name, args)

    def follow(self) -> None:
        """On every other rank: does what the first says, until that was "close"."""
        name = ""
        while name != "close":
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=self._root, group=self._group)
            name, args = told[0]
            # The first rank hears of it and tells whoever asked.
            with suppress(Exception):
                self._together(name, args)

    def any(self, flags: Tensor) -> Tensor:
        """Where a flag is set on any rank; a collective of the engine's thread."""
        if self.alone:
            return flags
        counts = flags.to(torch.int32)
        dist.all_reduce(counts, group=self._model_group)
        return counts > 0

    def _together(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.alone:
            return self.works[name](*args)
        error, result = None, None
        try:
            result = self.works[name](*args)
        except Exception as caught:  # noqa: BLE001  # every rank has to hear of it
            error = caught
        said: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(said, None if error is None else str(error), group=self._group)
        other = next((text for text in said if text is not None), None)
        if other is not None and name in self.undo:
            self.undo[name](*args)
        if error is not None:
            raise error
        if other is not None:
            raise ServingError(f"another rank: {other}")
        return result


def agreed_plan(
    model: Any, *, max_running: int, cache_bytes: int, sharers: int, ranks: int
) -> tuple[int, KVPlan]:
    """Sequences of a batch and sizes of the key-value cache, alike on every rank: the first one's
    wishes, and what the rank with the least memory has room for. Collective.
    """
    wishes = [max_running, cache_bytes, sharers]
    if ranks > 1:
        dist.broadcast_object_list(wishes, src=0)
    max_running, cache_bytes, sharers = wishes
    plan = plan_kv(model, max_running=max_running, cache_bytes=cache_bytes, sharers=sharers)
    if ranks > 1:
        plans: list[Any] = [None] * ranks
        dist.all_gather_object(plans, plan)
        plan = min(plans, key=lambda one: one.kv_tokens)
    return max_running, plan
