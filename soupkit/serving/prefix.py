"""Keys and values of a prompt's beginning, computed once for all requests of one variant's content.

    key(block 0) = H(salt, its tokens),  key(block i) = H(key(block i - 1), its tokens)

H is BLAKE2b with 32 bytes, the salt the variant's content digest. transformers' own keys know the
tokens only, so one variant would read what another computed (8 wrong answers of 20 in an
experiment); with the digest in them a block serves the same weights or none: not the base, not a
variant that took the name or the slot of another. A request that failed shares nothing from then
on: the keys and values that overflowed are zeros in the cache (guard.py).

Requests that begin alike and come together (the n choices of one, say) would all compute the same
blocks at once. So one goes first; the others wait while it still has blocks to compute that they
could use.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

# Request id -> the content digest of its weights, None if what it computed must not be shared.
SaltOf = Callable[[str], bytes | None]


class PrefixCache:
    """Takes the place of the block sharing of a paged cache; used on the engine's thread only.

    Attributes:
        reused_tokens: prompt tokens so far that were not computed again.
    """

    def __init__(self, cache: Any, scheduler: Any, *, page_tokens: int, salt_of: SaltOf) -> None:
        self.reused_tokens = 0
        self._cache, self._scheduler = cache, scheduler
        self._page_tokens, self._salt_of = page_tokens, salt_of
        self._waiting, scheduler._get_waiting_candidates = (
            scheduler._get_waiting_candidates,
            self.waiting,
        )
        cache.search_prefix_match = self.search
        cache.mark_complete_blocks = self.mark

    def search(self, request_id: str, prompt: list[int]) -> int:
        """Gives a request the blocks that are there of its prompt; how many tokens those are."""
        found = self._matching(request_id, prompt)
        count = min(map(len, found.values()), default=0) * self._page_tokens
        if count:
            for name, blocks in found.items():
                self._allocators[name].acquire_prefix_blocks(request_id, count, blocks)
            self.reused_tokens += count
        return count

    def mark(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Offers the blocks that the last batch completed for a request to those to come."""
        salt = self._salt_of(state.request_id)
        if salt is None or not complete_blocks:
            return
        tokens = state.initial_tokens + state.generated_tokens
        for name, count in complete_blocks.items():
            if state.request_id in self._allocators[name].block_table:
                self._mark(self._allocators[name], state.request_id, tokens, count, salt)

    def waiting(self) -> list[Any]:
        """Requests that may start now, in order."""
        begun = [s for s in self._scheduler.active_requests.values() if s.remaining_prefill_tokens]
        leaders: dict[tuple[bytes | None, tuple[int, ...]], list[list[int]]] = {}
        for state in begun:
            leaders.setdefault(self._kind(state), []).append(state.initial_tokens)
        ready = []
        for state in self._waiting():
            prompt, ahead = state.initial_tokens, leaders.setdefault(self._kind(state), [])
            usable = max((self._common_blocks(other, prompt) for other in ahead), default=0)
            ahead.append(prompt)
            if usable:
                matching = self._matching(state.request_id, prompt)
                if usable > min(map(len, matching.values()), default=0):
                    continue
            ready.append(state)
        return ready

    @property
    def _allocators(self) -> dict[str, Any]:
        allocators: dict[str, Any] = self._cache.cache_allocators
        return allocators

    def _kind(self, state: Any) -> tuple[bytes | None, tuple[int, ...]]:
        """Requests of different kinds have no block in common."""
        return self._salt_of(state.request_id), tuple(state.initial_tokens[: self._page_tokens])

    def _common_blocks(self, one: list[int], other: list[int]) -> int:
        """Whole blocks at the beginning of both; of `other` a token must be left to compute."""
        size, count = self._page_tokens, 0
        while (count + 1) * size < len(other) and (
            one[count * size : (count + 1) * size] == other[count * size : (count + 1) * size]
        ):
            count += 1
        return count

    def _matching(self, request_id: str, prompt: list[int]) -> dict[str, list[int]]:
        """For each allocator the blocks there are of a prompt's beginning, never of all of it."""
        salt = self._salt_of(request_id)
        found: dict[str, list[int]] = {}
        if salt is None or not self._cache.use_prefix_sharing:
            return found
        keys = list(self._keys(prompt, (len(prompt) - 1) // self._page_tokens, salt))
        for name, allocator in self._allocators.items():
            found[name] = []
            for key in keys:
                block = allocator.ledger.hash_to_block.get(key)
                if block is None:
                    break
                found[name].append(block)
        return found

    def _keys(self, tokens: list[int], count: int, salt: bytes) -> Iterator[bytes]:
        size, key = self._page_tokens, salt
        for at in range(0, count * size, size):
            key = hashlib.blake2b(
                key + array("q", tokens[at : at + size]).tobytes(), digest_size=32
            ).digest()
            yield key

    def _mark(
        self, allocator: Any, request_id: str, tokens: list[int], count: int, salt: bytes
    ) -> None:
        """Names the first `count` blocks without a key; one that is there twice is kept once."""
        table, ledger = allocator.block_table[request_id], allocator.ledger
        whole = min(len(table), len(tokens) // self._page_tokens)
        for at, key in enumerate(self._keys(tokens, whole, salt)):
            block = table[at]
            if block in ledger.block_to_hash:
                continue
            if not count:
                break
            count -= 1
            same = ledger.register_new_hash(block, key)
            if same is not None:
                ledger.acquire(same)
                table[at] = same
                if ledger.release(block):
                    allocator.pool.free_blocks(allocator.index, [block])
