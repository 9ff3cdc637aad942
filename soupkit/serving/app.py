"""The HTTP application: FastAPI routes that delegate, answers sent whole or streamed, errors."""

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from soupkit.errors import ServingError

from .admin import Admin, LoadRequest, UnloadRequest
from .answers import Answer, unavailable
from .catalog import Unloaded
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
from .states import QueueFull, VariantUnavailable

# Room for the longest prompts of a few contexts; parsing more would delay everyone.
MAX_BODY_BYTES = 8 << 20
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = frozenset({LOAD_PATH, UNLOAD_PATH})
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


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

    app = FastAPI(title="soupkit", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    app.add_middleware(Gate, keys=keys, admin_keys=admin_keys)
    _add_status(app, service)
    _add_models(app, service, created=int(time.time()))
    _add_admin(app, Admin(service))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _respond(service, request, body, await completion_answer(service, body))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _respond(service, request, body, await chat_answer(service, body))

    return app


class Gate:
    """What every request passes first: a key under /v1 where keys are set, and a bounded body.

    The routes of the administrator ask for a key of their own, and are closed without one. Plain
    ASGI, as Starlette's own base class would send every answer through one more task.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._app = app
        self._digests, self._admin_digests = _digests(keys), _digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await _error(refusal)(scope, receive, send)
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            return message

        return await self._app(scope, receive_bounded, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request may not pass, if it may not."""
        if scope["path"] in ADMIN_PATHS:
            if not self._admin_digests:
                message = "this server takes no changes; start it with --admin-key-file"
                return ApiError(403, message, code="admin_disabled")
            if not _has_key(scope, self._admin_digests):
                return ApiError(401, "the admin key is needed", code="invalid_api_key")
            return None
        asks = self._digests and scope["path"].startswith("/v1/")
        if asks and not _has_key(scope, self._digests):
            return ApiError(401, "a valid API key is needed", code="invalid_api_key")
        return None


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _has_key(scope: Scope, digests: list[bytes]) -> bool:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    # Digests are of one length, and all are compared: the time tells nothing about a key.
    given = hashlib.sha256(key.encode()).digest()
    fits = [hmac.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(fits)


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> Response:
        state = "ready" if service.ready else "cannot generate"
        return JSONResponse({"status": state}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.render_metrics(), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service, *, created: int) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list(service.names(), created=created)

    @app.get("/v1/models/{model}")
    async def model(model: str) -> Any:
        names = service.names()
        listed = model_list(names, created=created)["data"]
        found = next((entry for entry in listed if entry["id"] == model), None)
        if found is None:
            raise unknown_model(model, names, hidden=service.catalog.is_hidden(model))
        return found


def _add_admin(app: FastAPI, admin: Admin) -> None:
    @app.post(LOAD_PATH)
    async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
        return await _while_connected(request, admin.load(body))

    @app.post(UNLOAD_PATH)
    async def unload(body: UnloadRequest) -> dict[str, Any]:
        return await admin.unload(body)


async def _respond(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, answer: Answer
) -> Response:
    """Starts the answer's generations and sends them, whole or streamed."""
    service.submit([choice.generation for choice in answer.choices])
    if not body.stream:
        return JSONResponse(await _while_connected(request, answer.whole(service)))
    chunks = answer.chunks(service, include_usage=body.include_usage)
    try:
        # Nothing is sent before the first token, so that a failure still has a status of its own.
        held = [await _while_connected(request, anext(chunks))]
        while not _has_content(held[-1]):
            held.append(await _while_connected(request, anext(chunks)))
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


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`; cancels it and raises ClientGone when the client disconnects first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's body."""

    async def api_error(_: Request, error: Exception) -> Response:
        return _error(_as_api_error(error))

    for kind in (ApiError, RequestValidationError, HTTPException, ServingError):
        app.add_exception_handler(kind, api_error)

    async def fault(_: Request, __: Exception) -> Response:
        # The trace goes to the log; what it says is nothing for a client.
        return _error(ApiError(500, "internal error", code="internal_error"))

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
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_seconds=1)
    if isinstance(error, VariantUnavailable):
        return unavailable(error)
    if isinstance(error, Unloaded):
        return ApiError(404, str(error), param="model", code="model_not_found")
    return ApiError(503, str(error), code="unavailable")


def _error(error: ApiError) -> Response:
    headers = {}
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_seconds)))
    return JSONResponse(error.body, error.status, headers)
