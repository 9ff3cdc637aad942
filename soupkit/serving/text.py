"""Tokens to text as they come, and stop strings that may lie across tokens.

Text is given out only when later tokens can no longer change it: half of a UTF-8 character, and a
tail that could still become a stop string, are held back. Pieces join to the same text as decoding
at once, but for a tokenizer that takes back whole characters where bytes after them are no text.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# Tokens of context decoded before each new one, so that spacing between words comes out right.
CONTEXT_TOKENS = 6
# Of UTF-8. A token adds at least one or no text at all, so what is further back is decided.
CHARACTER_BYTES = 4


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""


class TextStream:
    """The text of one generated sequence."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self.length = 0  # characters given out
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._ids: list[int] = []
        self._begin = 0  # first token of the context
        self._read = 0  # tokens before it are in text that was taken
        # Ends of what was taken at a time, after `_begin`: only there no character is cut in two.
        self._ends: deque[int] = deque()
        self._held = ""  # taken, but may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that is certain now, nothing once `stopped`."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        known, text = self._texts()
        end = len(self._ids)
        if text.endswith(REPLACEMENT) or len(text) <= len(known):
            if self._is_special(token_id):
                # It decides nothing about the bytes before it, however many of them come.
                del self._ids[-1]
                return ""
            end = self._decided(text)
            text = self._decode(self._ids[self._begin : end])
            if text == known:
                # Tokens without text: kept, they would push the words before them out of sight.
                del self._ids[self._read : end]
                return ""
        self._read = end
        self._ends.append(end)
        while self._ends[0] <= end - CONTEXT_TOKENS:
            self._begin = self._ends.popleft()
        return self._give(self._held + text[len(known) :], final=False)

    def finish(self) -> str:
        """The rest, whatever it is: no token will follow."""
        if self.stopped:
            return ""
        known, text = self._texts()
        return self._give(self._held + text[len(known) :], final=True)

    def _texts(self) -> tuple[str, str]:
        """The text of the tokens since `_begin` that were taken, and of all."""
        known = self._decode(self._ids[self._begin : self._read])
        text = self._decode(self._ids[self._begin :])
        if not text.startswith(known):
            # What was given out cannot be taken back: the rest is read alone.
            self._begin = self._read
            self._ends.clear()
            known, text = "", self._decode(self._ids[self._begin :])
        return known, text

    def _decided(self, text: str) -> int:
        """The end of those tokens not taken yet whose text no later token can change."""
        last = len(self._ids) - CHARACTER_BYTES
        # One of so many neighbours is no place inside a character.
        for end in range(last, max(self._read, last - CHARACTER_BYTES), -1):
            before, after = self._ids[self._begin : end], self._ids[end:]
            if self._decode(before) + self._decode(after) == text:
                return end
        return self._read

    def _is_special(self, token_id: int) -> bool:
        """Whether decoding skips it; a token that is a space at most is none of those."""
        whole = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return bool(whole) and not self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _give(self, text: str, *, final: bool) -> str:
        hits = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self.stopped, self._held, text = True, "", text[: min(hits)]
        elif final:
            self._held = ""
        else:
            keep = max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held, text = text[len(text) - keep :], text[: len(text) - keep]
        self.length += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that a stop string begins with."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
