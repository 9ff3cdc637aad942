"""Events of generations -> the choices of an OpenAI answer, whole or as a stream of chunks."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from soupkit.errors import ServingError

from .jobs import End, Generation, Scored
from .openai import ApiError, usage
from .sampling import Token
from .service import Service
from .states import VariantUnavailable
from .text import TextStream

Kind = Literal["text_completion", "chat.completion"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to a choice."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of an answer: where it comes from and how it is written down."""

    index: int
    generation: Generation
    tokenizer: Any
    stops: list[str]
    logprobs: bool
    echo: str | None = None  # the prompt's text, where it is to be repeated
    num_tokens: int = 0  # generated
    offset: int = 0  # characters of the tokens written so far, for text_offset

    async def pieces(self, service: Service) -> AsyncGenerator[Piece]:
        """Yields until the choice ends. Raises ApiError; leaving early cancels the generation."""
        stream = TextStream(self.tokenizer, stop=self.stops)
        if self.echo is not None and not self.generation.score_prompt:
            yield Piece(self.echo)
        try:
            while True:
                event = await self.generation.events.get()
                if isinstance(event, Scored):
                    yield Piece(self.echo or "", tuple(event.tokens))
                elif isinstance(event, Token):
                    self.num_tokens += 1
                    text = stream.push(event.id)
                    yield Piece(text, (event,), "stop" if stream.stopped else None)
                    if stream.stopped:
                        return
                else:
                    yield self._last(stream, event)
                    return
        finally:
            service.cancel(self.generation)

    def _last(self, stream: TextStream, event: End | ServingError) -> Piece:
        if isinstance(event, VariantUnavailable):
            raise unavailable(event)
        if isinstance(event, ServingError):
            raise ApiError(503, str(event), code="unavailable")
        if event.reason in ("error", "cancelled"):
            raise ApiError(
                500, event.error or "the request was cancelled", code="generation_failed"
            )
        rest = stream.finish()
        return Piece(rest, (), "stop" if stream.stopped else event.reason)

    def completion_logprobs(self, tokens: tuple[Token, ...]) -> dict[str, list[Any]]:
        """The four lists of a text completion's logprobs."""
        texts = [self._text(token.id) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        tops: list[dict[str, float] | None] = []
        for token, text in zip(tokens, texts, strict=True):
            best: dict[str, float] = {}
            for token_id, logprob in token.top:
                # Two ids can read alike; the likelier stays.
                best.setdefault(self._text(token_id), logprob)
            if token.logprob is not None:
                best.setdefault(text, token.logprob)
            tops.append(best if token.logprob is not None else None)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def chat_logprobs(self, tokens: tuple[Token, ...]) -> dict[str, Any]:
        """The content list of a chat completion's logprobs."""

        def one(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._text(token_id)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            {**one(token.id, token.logprob), "top_logprobs": [one(i, p) for i, p in token.top]}
            for token in tokens
            if token.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


@dataclass(slots=True)
class Answer:
    """One HTTP answer of several choices."""

    kind: Kind
    model: str
    choices: list[Choice]
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, service: Service) -> dict[str, Any]:
        """The body once all is generated. Raises ApiError of the first choice that failed."""
        try:
            written = [await self._collect(choice, service) for choice in self.choices]
        finally:
            self.cancel(service)
        return {**self._head(""), "choices": written, "usage": self._usage()}

    async def chunks(
        self, service: Service, *, include_usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Bodies of the stream, in the order in which they come; raises ApiError."""
        head = self._head(".chunk" if self.kind == "chat.completion" else "")
        head |= {"usage": None} if include_usage else {}
        if self.kind == "chat.completion":
            for choice in self.choices:
                role = {"role": "assistant", "content": ""}
                yield {**head, "choices": [self._chunk(choice, delta=role)]}
        async for choice, piece in _merged(self.choices, service):
            if piece.text or piece.finish_reason or (piece.tokens and choice.logprobs):
                yield {**head, "choices": [self._write(choice, piece, streamed=True)]}
        if include_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def cancel(self, service: Service) -> None:
        """Ends what still runs for this answer."""
        for choice in self.choices:
            service.cancel(choice.generation)

    async def _collect(self, choice: Choice, service: Service) -> dict[str, Any]:
        found = [piece async for piece in choice.pieces(service)]
        text = "".join(piece.text for piece in found)
        tokens = tuple(token for piece in found for token in piece.tokens)
        return self._write(choice, Piece(text, tokens, found[-1].finish_reason), streamed=False)

    def _write(self, choice: Choice, piece: Piece, *, streamed: bool) -> dict[str, Any]:
        if self.kind == "text_completion":
            logprobs = choice.completion_logprobs(piece.tokens) if choice.logprobs else None
            return {
                "index": choice.index,
                "text": piece.text,
                "logprobs": logprobs,
                "finish_reason": piece.finish_reason,
            }
        chat_logprobs = choice.chat_logprobs(piece.tokens) if choice.logprobs else None
        if streamed:
            delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
            return self._chunk(
                choice, delta=delta, logprobs=chat_logprobs, finish_reason=piece.finish_reason
            )
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs,
            "finish_reason": piece.finish_reason,
        }

    def _chunk(
        self,
        choice: Choice,
        *,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _head(self, suffix: str) -> dict[str, Any]:
        prefix = "cmpl" if self.kind == "text_completion" else "chatcmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": self.kind + suffix,
            "created": self.created,
            "model": self.model,
        }

    def _usage(self) -> dict[str, int]:
        return usage(self.prompt_tokens, sum(choice.num_tokens for choice in self.choices))


def unavailable(error: VariantUnavailable) -> ApiError:
    """The 503 of a variant that cannot be served now, with when to ask again (seconds)."""
    return ApiError(503, str(error), code="variant_unavailable", retry_seconds=error.retry_seconds)


async def _merged(choices: list[Choice], service: Service) -> AsyncIterator[tuple[Choice, Piece]]:
    """Pieces of all choices as they come; an error of one ends all."""
    queue: asyncio.Queue[tuple[Choice, Piece] | Exception | None] = asyncio.Queue()

    async def read(choice: Choice) -> None:
        try:
            async with contextlib.aclosing(choice.pieces(service)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((choice, piece))
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
