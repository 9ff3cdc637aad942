"""How the memory beside the base is shared: slots of variants, key-value cache, room to work in.

    slots of variants   V + max(2, V / 4), so that training may add some
    room to work in     a fifth of what base and slots leave: activations, logits
    key-value cache     what is left

The server takes its defaults from here, and `soupkit plan` its figures. Without a flash kernel a
batch also keeps a mask of [batch_tokens, kv_tokens + batch_tokens] elements, so a token of cache
costs batch_tokens mask elements more, and its keys and values are read back once, expanded to all
heads.
"""

from __future__ import annotations

# One batch's tokens: long prompts are cut into pieces of this size, so that none stalls others.
BATCH_TOKENS = {"cpu": 256, "cuda": 2048}
# Sequences in one batch.
MAX_RUNNING = {"cpu": 16, "cuda": 128}
_INDEX_BYTES = 16


def kv_token_bytes(layers: int, kv_heads: int, *, head_width: int, itemsize: int) -> int:
    """Keys and values of one token: 2 x layers x kv_heads x head_width x itemsize."""
    return 2 * layers * kv_heads * head_width * itemsize


def mask_token_bytes(heads: int, *, head_width: int, itemsize: int, batch_tokens: int) -> int:
    """What a token of the key-value cache costs beside its keys and values; see the module."""
    return itemsize * (batch_tokens + 2 * heads * head_width) + _INDEX_BYTES


def slots_for(num_variants: int) -> int:
    """Slots for all variants and some that training may add."""
    return num_variants + max(2, num_variants // 4)


def share_of_variants(
    free_bytes: int, *, slot_bytes: int, num_variants: int, kv_bytes: int | None = None
) -> int:
    """Bytes of the slots.

    Args:
        free_bytes: beside the base. kv_bytes: that the key-value cache needs; None: unknown, and
            then slots get half of what is free at most.
    """
    most = free_bytes // 2
    if kv_bytes is not None:
        most = max(most, free_bytes - -(-kv_bytes * 5 // 4))
    return max(1, min(slots_for(num_variants) * slot_bytes, most))


def share_of_tokens(free_bytes: int, cache_bytes: int) -> int:
    """Bytes of the key-value cache and its masks beside slots of `cache_bytes`."""
    return (free_bytes - cache_bytes) * 4 // 5
