"""Tokens to text as they come, and stop strings that may lie across tokens.

Text is given out only when later tokens can no longer change it: half of a UTF-8 character, and a
tail that could still become a stop string, are held back. Pieces join to the same text as decoding
at once.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# Tokens of context decoded before each new one, so that spacing between words comes out right.
CONTEXT_TOKENS = 6


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
        self._held = ""  # taken, but may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that is certain now, nothing once `stopped`."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._begin : self._read])
        text = self._decode(self._ids[self._begin :])
        if text.endswith(REPLACEMENT) or len(text) <= len(known):
            return ""
        self._begin = max(self._begin, self._read - CONTEXT_TOKENS) if self._read else 0
        self._read = len(self._ids)
        return self._give(self._held + text[len(known) :], final=False)

    def finish(self) -> str:
        """The rest, whatever it is: no token will follow."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._begin : self._read])
        text = self._decode(self._ids[self._begin :])
        return self._give(self._held + text[len(known) :], final=True)

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
