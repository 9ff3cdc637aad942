"""The HTTP application: FastAPI routes that delegate, answers sent whole or streamed, errors."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from soupkit.errors import ServingError
from soupkit.version import __version__

from .admin import Admin, LoadRequest, UnloadRequest
from .answers import Answer, unavailable
from .bodies import (
    ChatCompletion,
    Completion,
    LoadedVariant,
    ModelCard,
    ModelList,
    State,
    UnloadedVariant,
    answer,
    errors,
)
from .connection import ClientGone, while_connected
from .gate import LOAD_PATH, UNLOAD_PATH, Gate, error_response
from .jobs import Generation
from .metrics import CONTENT_TYPE
from .openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    field_error,
    model_list,
    unknown_model,
)
from .prepare import chat_answer, completion_answer
from .service import Service
from .states import NotServed, QueueFull, TooMany, VariantUnavailable
from .status import overview
from .status_page import PAGE, PAGE_HEADERS

Asked = TypeVar("Asked", CompletionRequest, ChatRequest)


def create_app(
    service: Service, *, keys: Sequence[str] = (), admin_keys: Sequence[str] = ()
) -> FastAPI:
    """The application over a service it starts and stops.

    Args:
        keys: /v1 asks for one of them; everyone may ask if there is none.
        admin_keys: loading and unloading asks for one of them; nobody may if there is none.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="soupkit",
        version=__version__,
        description="A base and its variants in OpenAI's shapes; a model id is a variant's name.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _add_errors(app, service)
    app.add_middleware(Gate, keys=keys, admin_keys=admin_keys)
    _add_status(app, service)
    # Only documents that a key is asked for: the gate asks.
    asks, admin_asks = (
        [Security(HTTPBearer(auto_error=False))] if k else [] for k in (keys, admin_keys)
    )
    _add_models(app, service, created=int(time.time()), asks=asks)
    _add_completions(app, service, asks=asks)
    _add_admin(app, Admin(service), asks=admin_asks)
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=State)
    async def health() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "alive"}

    @app.get("/ready", response_model=State, responses={503: {"model": State}})
    async def ready() -> Response:
        """Whether it can generate."""
        state = "ready" if service.ready else "cannot generate"
        return JSONResponse({"status": state}, 200 if service.ready else 503)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """The status page, for people."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/status", response_model=None)
    async def status() -> dict[str, Any]:
        """What the status page shows; its fields may change with any version."""
        return overview(service)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """What Prometheus reads."""
        return Response(service.render_metrics(), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service, *, created: int, asks: list[Any]) -> None:
    @app.get("/v1/models", response_model=ModelList, dependencies=asks, responses=errors(401))
    async def models() -> dict[str, Any]:
        """The base and the variants that are served."""
        return model_list(service.names(), created=created)

    @app.get(
        "/v1/models/{model}",
        response_model=ModelCard,
        dependencies=asks,
        responses=errors(401, 404),
    )
    async def model(model: str) -> Any:
        """One of them."""
        names = service.names()
        listed = model_list(names, created=created)["data"]
        found = next((entry for entry in listed if entry["id"] == model), None)
        if found is None:
            raise unknown_model(model, names, hidden=service.catalog.is_hidden(model))
        return found


def _add_completions(app: FastAPI, service: Service, *, asks: list[Any]) -> None:
    faults = errors(400, 401, 404, 413, 429, 500, 503)

    @app.post(
        "/v1/completions",
        dependencies=asks,
        responses={200: answer(Completion, events=True), **faults},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues prompts, as text or as token ids."""
        return await _answered(service, request, body, completion_answer)

    @app.post(
        "/v1/chat/completions",
        dependencies=asks,
        responses={200: answer(ChatCompletion, events=True), **faults},
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answers messages, written as the model's chat template says."""
        return await _answered(service, request, body, chat_answer)


def _add_admin(app: FastAPI, admin: Admin, *, asks: list[Any]) -> None:
    faults = errors(400, 401, 403, 404, 413, 503)

    @app.post(
        LOAD_PATH,
        response_model=LoadedVariant,
        dependencies=asks,
        responses=faults | errors(429),
    )
    async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
        """Makes a variant of the family resident, and serves it again if it was unloaded."""
        return await while_connected(request, admin.load(body))

    @app.post(UNLOAD_PATH, response_model=UnloadedVariant, dependencies=asks, responses=faults)
    async def unload(body: UnloadRequest) -> dict[str, Any]:
        """Serves a variant no more, and frees its memory once its open requests have ended."""
        return await admin.unload(body)


async def _answered(
    service: Service,
    request: Request,
    body: Asked,
    make: Callable[[Service, Asked], Awaitable[Answer]],
) -> Response:
    """Answers; anew where the model's content became another one before it could be read, as that
    of a pool's slot does by each merge.
    """
    while True:
        answer = await make(service, body)
        try:
            return await _respond(service, request, body, answer)
        except (ApiError, VariantUnavailable) as error:
            is_late = _as_api_error(error).code == "variant_unavailable"
            if not (is_late and _is_outdated(service, answer.choices[0].generation)):
                raise


def _is_outdated(service: Service, generation: Generation) -> bool:
    """Whether its model is served with another content by now."""
    try:
        ref = service.resolve(generation.model)
    except KeyError:
        return False
    return ref is not None and ref.digest != generation.digest


async def _respond(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, answer: Answer
) -> Response:
    """Starts the answer's generations and sends them, whole or streamed."""
    service.submit([choice.generation for choice in answer.choices])
    if not body.stream:
        return JSONResponse(await while_connected(request, answer.whole(service)))
    chunks = answer.chunks(service, include_usage=body.include_usage)
    try:
        # Nothing is sent before the first token, so that a failure still has a status of its own.
        held = [await while_connected(request, anext(chunks))]
        while not _has_content(held[-1]):
            held.append(await while_connected(request, anext(chunks)))
    except BaseException:
        answer.cancel(service)
        raise

    async def events() -> AsyncIterator[str]:
        try:
            for chunk in held:
                yield _event(chunk)
            async for chunk in chunks:
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)
        finally:
            answer.cancel(service)

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _has_content(chunk: dict[str, Any]) -> bool:
    """Whether a chunk is more than the opening of a chat message."""
    return not chunk["choices"] or chunk["choices"][0].get("delta", {}).get("role") is None


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _add_errors(app: FastAPI, service: Service) -> None:
    """Every error leaves in OpenAI's body."""

    async def api_error(_: Request, error: Exception) -> Response:
        told = _as_api_error(error)
        service.metrics.errors.labels(str(told.status)).inc()
        return error_response(told)

    for kind in (ApiError, RequestValidationError, HTTPException, ServingError):
        app.add_exception_handler(kind, api_error)

    async def fault(_: Request, __: Exception) -> Response:
        # The trace goes to the log; what it says is nothing for a client.
        return error_response(ApiError(500, "internal error", code="internal_error"))

    app.add_exception_handler(Exception, fault)

    async def client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientGone, client_gone)


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return field_error(list(error.errors()))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, TooMany):
        return ApiError(400, str(error), param="n")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_seconds=1)
    if isinstance(error, VariantUnavailable):
        return unavailable(error)
    if isinstance(error, NotServed):
        return ApiError(404, str(error), param="model", code="model_not_found")
    return ApiError(503, str(error), code="unavailable")
