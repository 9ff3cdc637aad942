"""This machine's memory, shared between variants and key-value cache as headroom.py says."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soupkit import headroom

# More gains nothing on a CPU, where attention reads the whole cache as one sequence.
CPU_KV_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Sizes of the engine's static buffers, in tokens."""

    kv_tokens: int
    batch_tokens: int

    def __post_init__(self) -> None:
        if self.kv_tokens < 16 or self.batch_tokens < 1:
            raise ValueError(
                f"kv_tokens={self.kv_tokens}, batch_tokens={self.batch_tokens}: needs at least 16 "
                "and 1; free memory or lower cache_bytes"
            )


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on a device; on Linux CPUs what the kernel says is available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_cache_bytes(
    device: torch.device,
    slot_bytes: int,
    num_variants: int,
    *,
    largest: int = 0,
    sharers: int = 1,
) -> int:
    """Slots for all variants and some that training may add, or two of `largest` bytes if that is
    more, but half of what is free at most.

    Args:
        sharers: engines that share the device's memory.
    """
    free = free_bytes(device) // sharers
    share = headroom.share_of_variants(free, slot_bytes=slot_bytes, num_variants=num_variants)
    return max(share, min(2 * largest, free // 2))


def plan_kv(model: Any, *, max_running: int, cache_bytes: int, sharers: int = 1) -> KVPlan:
    """Sizes the key-value cache for a loaded model, leaving room for `cache_bytes` of variants."""
    config, device = model.config.get_text_config(), model.device
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    batch_tokens = headroom.BATCH_TOKENS.get(device.type, headroom.BATCH_TOKENS["cpu"])
    size = {"head_width": head_dim, "itemsize": model.dtype.itemsize}
    per_token = headroom.kv_token_bytes(config.num_hidden_layers, kv_heads, **size)
    per_token += headroom.mask_token_bytes(heads, **size, batch_tokens=batch_tokens)
    context = getattr(config, "max_position_embeddings", 0) or 2048
    wanted = max_running * context
    if device.type != "cuda":
        wanted = min(wanted, max(CPU_KV_TOKENS, context))
    room = headroom.share_of_tokens(free_bytes(device) // sharers, cache_bytes)
    return KVPlan(min(wanted, room // per_token), batch_tokens)
