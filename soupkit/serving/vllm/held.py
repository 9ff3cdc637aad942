"""A variant that an engine has, who has it, and what an engine is asked."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from soupkit.errors import ServingError
from soupkit.family import VariantRef


class EngineClient(Protocol):
    """What is asked of vLLM's engine: EngineClient of its API process."""

    async def add_lora(self, lora_request: Any) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    async def abort(self, request_id: list[str]) -> None: ...


class NoRoom(ServingError):
    """All copies have requests now; the next one may find room."""


@dataclass(slots=True)
class Copy:
    """A variant that the engine has."""

    ref: VariantRef
    nbytes: int
    request: Any  # vLLM's LoRARequest
    users: Counter[str] = field(default_factory=Counter)  # open requests by id, which may recur
    is_leaving: bool = False
