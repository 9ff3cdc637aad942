"""A worker's part: what vLLM's model runner asks its LoRA manager, answered by a bank of variants.

It takes the place of vLLM's manager in each worker of an engine that serves a family. LoRARequest
carries a variant: its number, and the path of its checked copy in the store.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from soupkit.bundle import Manifest, open_variant
from soupkit.errors import BundleError, ServingError
from soupkit.family import open_family

from .bank import Bank
from .limits import check_config
from .model import attach
from .settings import Settings, settings
from .store import read_copy

logger = logging.getLogger("vllm.soupkit")

# Of the adapters that vLLM warms up with; `_set_active_loras` hands them on like any.
WARM_UP_PATH = "/not/a/real/path"


class VariantManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]  # vLLM may be absent
    """Variants of a family instead of LoRA adapters."""

    bank: Bank

    def create_lora_manager(self, model: Any, vllm_config: Any = None) -> Any:
        """Makes the model's modules act per slot; returns the model."""
        told = settings()
        assert told is not None
        check_config(vllm_config)
        config = vllm_config.model_config
        self.bank = Bank(
            self.lora_config.max_loras + len(told.pins),
            device=self.device,
            pins=frozenset(told.pins),
        )
        ties = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        attach(self.bank, model, dtype=config.dtype, ties_head=ties)
        _reserve(self.bank, told)
        return model

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Registers a variant, in a slot if one is free. Outside of a step: it may refuse."""
        bank, number = self.bank, lora_request.lora_int_id
        path = Path(lora_request.lora_path)
        if number not in bank.numbers:
            bank.register(number, lora_request.lora_name, read_copy(path))
        elif bank.digest(number).rpartition(":")[2] != path.name:
            raise ServingError(
                f"number {number} is {bank.digest(number)} here, not {path.name} "
                f"({lora_request.lora_name!r}): give each content a number of its own"
            )
        if bank.has_free_slot:
            bank.take(number)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forgets a variant and frees what holds it."""
        return self.bank.drop(adapter_id)

    def remove_all_adapters(self) -> None:
        """Forgets all; vLLM does so after its warm-up, when there is none yet."""
        for number in self.bank.numbers:
            self.bank.drop(number)

    def list_adapters(self) -> set[int]:
        """Numbers of those that are registered."""
        return set(self.bank.numbers)

    def pin_adapter(self, adapter_id: int) -> bool:
        """Puts a variant into a slot; the settings say which ones leave last."""
        self.bank.take(adapter_id)
        return True

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Once a step: whose rows the forward computes. All are registered, so nothing can fail."""
        if mapping is not None:
            warm_up = frozenset(r.lora_int_id for r in requests if r.lora_path == WARM_UP_PATH)
            self.bank.set_batch(mapping.index_mapping, mapping.prompt_mapping, warm_up=warm_up)

    # Warm-up runs as the base: what variants add to a module is not compiled or captured.
    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        return False

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield


def _reserve(bank: Bank, told: Settings) -> None:
    """Slots for all that the family has now; later ones may need larger ones."""
    family = open_family(told.family)
    found: dict[str, Manifest] = {}
    for name in family.variants:
        try:
            found[name] = open_variant(family.folder(name)).manifest
        except BundleError as error:
            logger.warning("variant %r cannot be opened: %s", name, error)
    refused = bank.reserve(list(found.values()))
    names = list(found)
    for index, reason in refused.items():
        logger.warning("variant %r cannot be served by vLLM: %s", names[index], reason)
    if found and len(refused) == len(found):
        raise ServingError(
            f"vLLM can serve no variant of {told.family}: {names[0]!r}: {refused[0]}"
        )
    logger.info("%d slots of variants take %d bytes", bank.slots, bank.nbytes)
