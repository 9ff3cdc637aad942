"""The bodies of answers as the OpenAPI document describes them; answers.py and others write them.

A test holds what is sent against these.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Fault(_Answer):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Answer):
    """The body of every error."""

    error: Fault


class Usage(_Answer):
    """Tokens that an answer took."""

    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    total_tokens: Annotated[int, Field(ge=0)]


FinishReason = Literal["stop", "length"]


class CompletionLogprobs(_Answer):
    """Four lists of one entry a token; the first of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(_Answer):
    """The answer to a text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(_Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A generated token, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    """One entry a generated token."""

    content: list[ChosenLogprob]
    refusal: None


class ChatMessage(_Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Answer):
    """The answer to a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(_Answer):
    """A model id; `parent` is the base of a variant."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None


class ModelList(_Answer):
    """The base and all variants that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TierBytes(_Answer):
    """Bytes in device memory and in host memory."""

    device: int
    host: int


class LoadedVariant(_Answer):
    """A variant that was made resident."""

    object: Literal["variant"]
    id: str
    digest: str
    phase: str
    pinned: bool
    bytes: TierBytes
    seconds: float


class UnloadedVariant(_Answer):
    """A variant that was let go; `shared_with` names what keeps its memory in use."""

    object: Literal["variant.unloaded"]
    id: str
    digest: str
    freed_bytes: TierBytes
    shared_with: list[str]
    requests_ended: int
    seconds: float


class State(_Answer):
    """Whether the server lives, or can generate."""

    status: Literal["alive", "ready", "cannot generate"]


def answer(model: type[BaseModel], *, events: bool = False) -> dict[str, Any]:
    """A 200 of the document; with `events` it can also come as server-sent events."""
    if not events:
        return {"model": model}
    stream = {"schema": {"type": "string", "description": "data: CHUNK, ..., data: [DONE]"}}
    return {"model": model, "content": {"text/event-stream": stream}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, as the document has them."""
    # With a default FastAPI does not add its own 422, which is never sent.
    return {"default": {"model": ErrorBody, "description": "Any other error."}} | {
        status: {"model": ErrorBody, "description": _ERRORS[status]}
        | ({"headers": {"Retry-After": _RETRY}} if status in (429, 503) else {})
        for status in statuses
    }


_RETRY = {"description": "Seconds until it may be tried again.", "schema": {"type": "integer"}}


_ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "A valid key is needed.",
    403: "The server takes no changes: it has no admin key.",
    404: "No such model.",
    405: "No such method here.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The generation failed.",
    503: "The variant or the server cannot answer now, or its turn did not come in time.",
}
