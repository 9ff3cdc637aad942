"""The HTTP server: FastAPI routes that delegate, and `run`, which serves a family until it is told
to stop.
"""

import asyncio
import hashlib
import hmac
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from soupkit.errors import ServingError

from .answers import Answer, unavailable
from .assemble import DEFAULT_MAX_QUEUE, build_service
from .metrics import CONTENT_TYPE
from .openai import ApiError, ChatRequest, CompletionRequest, field_error, model_list
from .prepare import chat_answer, completion_answer
from .service import Service
from .states import QueueFull, VariantUnavailable

# How long a stop waits for open requests.
DRAIN_SECONDS = 30
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def create_app(service: Service, *, keys: Sequence[str] = ()) -> FastAPI:
    """The application over a service it starts and stops; with keys, /v1 asks for one of them."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="soupkit", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_key_check(app, keys)
    _add_status(app, service)
    _add_models(app, service, created=int(time.time()))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _respond(service, request, body, await completion_answer(service, body))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _respond(service, request, body, await chat_answer(service, body))

    return app


def _add_key_check(app: FastAPI, keys: Sequence[str]) -> None:
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @app.middleware("http")
    async def check_key(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if digests and request.url.path.startswith("/v1/") and not _has_key(request, digests):
            return _error(ApiError(401, "a valid API key is needed", code="invalid_api_key"))
        return await answer(request)


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
        listed = model_list(service.names(), created=created)["data"]
        found = next((entry for entry in listed if entry["id"] == model), None)
        if found is None:
            message = f"the model {model!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found


async def _respond(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, answer: Answer
) -> Response:
    """Starts the answer's generations and sends them, whole or streamed."""
    service.submit([choice.generation for choice in answer.choices])
    if not body.stream:
        return JSONResponse(await _while_connected(request, answer.whole(service)))
    chunks = answer.chunks(service, include_usage=body.include_usage)
    try:
        # Nothing is sent before the first token is there, so that a failure still has its own
        # status.
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
    return ApiError(503, str(error), code="unavailable")


def _error(error: ApiError) -> Response:
    headers = {}
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_seconds)))
    return JSONResponse(error.body, error.status, headers)


def _has_key(request: Request, digests: Sequence[bytes]) -> bool:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = hashlib.sha256(key.encode()).digest()
    # All are compared, so that the time tells nothing about which one fits.
    fits = [hmac.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(fits)


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and stops being ready as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on, once started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.address
            names = ", ".join(self._service.names())
            sys.stderr.write(f"soupkit serves {names} on http://{host}:{port}\n")
            sys.stderr.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)


def make_server(service: Service, *, host: str, port: int, keys: Sequence[str] = ()) -> Server:
    config = uvicorn.Config(
        create_app(service, keys=keys),
        host=host,
        port=port,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return Server(config, service)


def run(
    family: str | Path,
    *,
    base: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache_bytes: int | None = None,
    pin: Sequence[str] = (),
    max_running: int | None = None,
    max_queue: int = DEFAULT_MAX_QUEUE,
    api_key_file: str | Path | None = None,
) -> None:
    """Serves a family over HTTP until SIGTERM or SIGINT, then lets open requests end.

    Args:
        family: folder with family.json.
        base: folder or hub id of the base, if it is not where the family says.
        host, port: where to listen; port 0 = a free one, told on stderr.
        device: "cuda", "cuda:1" or "cpu"; by default cuda if there is one.
        dtype: "float32", "bfloat16" or "float16"; by default float32 on CPUs, the base's own on
            GPUs.
        cache_bytes: what resident variants may hold; by default all of them if they fit in half of
            the free memory.
        pin: variants that are loaded at the start and never evicted.
        max_running: sequences in one batch; 16 on CPUs, 128 on GPUs by default.
        max_queue: requests that may wait beyond those that run; more get 429.
        api_key_file: file with one key a line; without it everyone who reaches the port may ask.

    Raises:
        SoupkitError: the family, the base or a pinned name cannot be served.
        ValueError: an argument.
    """
    keys = [] if api_key_file is None else Path(api_key_file).read_text().split()
    if api_key_file is not None and not keys:
        raise ValueError(f"api_key_file={str(api_key_file)!r} holds no key; write one a line")
    service = build_service(
        family,
        base=base,
        device=device,
        dtype=dtype,
        cache_bytes=cache_bytes,
        pin=pin,
        max_running=max_running,
        max_queue=max_queue,
    )
    make_server(service, host=host, port=port, keys=keys).run()
