"""Request, response and error bodies in OpenAI's shapes; no HTTP and no engine here.

A field that is not supported is refused by name unless it says what happens anyway; an unknown
field is refused too. Beyond OpenAI's own: `top_k` and `ignore_eos`, as vLLM and others name them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .sampling import MAX_LOGPROBS, Sampling

MAX_CHOICES = 128
MAX_STOPS = 16


def _is_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
# Lists end at their first fault: a message for each of a million entries would fill the memory.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MAX_CHOICES)]
Stop = Text | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_STOPS)] | None


class ApiError(Exception):
    """An error the client is told, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_seconds = status, param, code, retry_seconds
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        message = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": message}


class Body(BaseModel):
    """A JSON object of a request: no unknown fields, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _only_neutral(schema: dict[str, Any], model: Any) -> None:
    """Writes into a body's schema that of some fields only the neutral values pass."""
    for name, values in model.NEUTRAL.items():
        told = "No other value is supported."
        schema["properties"][name] = {"enum": list(values), "description": told}


class StreamOptions(Body):
    """What a streaming client asks for beside the text."""

    include_usage: bool = False


class _Request(Body):
    """What both kinds of completion share."""

    model_config = ConfigDict(json_schema_extra=_only_neutral)
    # Field -> the values of it that ask for nothing.
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (None, 0.0),
        "presence_penalty": (None, 0.0),
        "logit_bias": (None, {}),
    }

    model: Text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None  # a label of the caller's; it never changed an answer
    # OpenAI's fields without an answer here: only the value that asks for nothing passes.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int) -> Sampling:
        """Settings of one choice."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            choice=choice,
            logprobs=self.num_logprobs,
        )

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def refuse_unsupported(self) -> None:
        """Raises ApiError naming the first field that asks for what this server does not do."""
        for name, allowed in self.NEUTRAL.items():
            if getattr(self, name) not in allowed:
                raise ApiError(
                    400, f"{name} is not supported by this server; leave it out", param=name
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        if any(not stop for stop in self.stops):
            raise ApiError(400, "stop: an empty string would stop at once", param="stop")


class CompletionRequest(_Request):
    """Body of POST /v1/completions: one prompt or several, as text or token ids."""

    NEUTRAL = {**_Request.NEUTRAL, "suffix": (None, "")}

    prompt: (
        Text
        | Texts
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt, text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]  # likewise

    def refuse_unsupported(self) -> None:
        _Request.refuse_unsupported(self)
        if self.best_of not in (None, self.num_choices):
            raise ApiError(400, "best_of is supported only where it equals n", param="best_of")


class TextPart(Body):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Text | None = None

    def as_template_input(self) -> dict[str, str]:
        """The message as chat templates know it."""
        text = self.content
        plain = text if isinstance(text, str) else "".join(part.text for part in text)
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": plain, **named}


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    NEUTRAL = {
        **_Request.NEUTRAL,
        "tools": (None, []),
        "tool_choice": (None, "none"),
        "parallel_tool_calls": (None, False),
        "functions": (None, []),
        "function_call": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "reasoning_effort": (None,),
    }

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[Any] | None = None
    reasoning_effort: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        chosen = self.max_completion_tokens
        return self.max_tokens if chosen is None else chosen

    def refuse_unsupported(self) -> None:
        _Request.refuse_unsupported(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")


def field_error(errors: list[dict[str, Any]]) -> ApiError:
    """The 400 for what pydantic found wrong with a body, naming the first field.

    A field of several forms has an error for each form: all are told.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    name = str(first["loc"][1]) if len(first["loc"]) > 1 else None
    if name is None:
        return ApiError(400, "the body is no JSON object, or its Content-Type does not say so")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{_path(first)}: this server knows no such field", param=name)
    told = [f"{_path(error)}: {error['msg']}" for error in errors if error["loc"][1] == name]
    return ApiError(400, "; or ".join(dict.fromkeys(told)), param=name)


def _path(error: dict[str, Any]) -> str:
    """Where in a body an error is, as in messages.0.role; without pydantic's names of the forms."""
    parts = [str(part) for part in error["loc"][1:]]
    return ".".join(part for part in parts if "[" not in part)


def unknown_model(name: str, names: list[str], *, hidden: bool = False) -> ApiError:
    """The 404 of a model id that is none of `names`, or was unloaded."""
    why = "was unloaded; an administrator can load it again" if hidden else "does not exist"
    message = f"the model {name!r} {why}; there are {', '.join(names)}"
    return ApiError(404, message, param="model", code="model_not_found")


def model_list(names: list[str], *, created: int) -> dict[str, Any]:
    """The body of /v1/models; the base's own name comes first."""
    base = names[0]
    data = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "soupkit",
            "root": base,
            "parent": None if name == base else base,
        }
        for name in names
    ]
    return {"object": "list", "data": data}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts that close an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
