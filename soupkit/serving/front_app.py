"""`soupkit serve --replicas`: the front's HTTP routes, and the process that has it all.

The front loads no model. Every route is one of app.py's, with the same bodies and errors.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from soupkit.bundle import open_family
from soupkit.errors import ServingError

from .connection import ClientGone
from .fleet import Fleet
from .fleet_metrics import render
from .front import Front
from .gate import LOAD_PATH, UNLOAD_PATH, Gate, error_response
from .listening import Server, check_address, read_keys
from .member import Member
from .merged import merged_status
from .metrics import CONTENT_TYPE
from .openai import ApiError
from .replica_process import ReplicaSettings
from .states import QueueFull
from .status_page import PAGE, PAGE_HEADERS

DEFAULT_MAX_WAIT_SECONDS = 300.0
# Prometheus waits for 10 seconds by default: for the other replicas too, if one hangs.
CONNECT_SECONDS, SCRAPE_SECONDS = 5.0, 5.0
# The replicas' servers close a connection that was idle for 5 seconds.
IDLE_SECONDS = 2.0


class FrontServer(Server):
    """Ends the replicas with itself."""

    def __init__(self, app: Starlette, fleet: Fleet, *, host: str, port: int) -> None:
        super().__init__(app, fleet, host=host, port=port)
        self.config.lifespan = "off"  # the fleet runs before the server does
        self._fleet = fleet

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C waits for nothing, replicas neither."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._fleet.kill()

    async def shutdown(self, sockets: Any = None) -> None:
        """They answer what is open while the front's connections end."""
        self._fleet.terminate()
        await super().shutdown(sockets)
        await self._fleet.stop()


def create_front(
    fleet: Fleet, *, keys: Sequence[str] = (), admin_keys: Sequence[str] = ()
) -> Starlette:
    """The application over a fleet that runs; keys as in `create_app`."""
    front = Front(fleet)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        is_ready = _state(fleet) == "ready"
        status = "ready" if is_ready else "cannot generate"
        return JSONResponse({"status": status}, 200 if is_ready else 503)

    async def page(_: Request) -> Response:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    async def status(_: Request) -> Response:
        return JSONResponse(_overview(front))

    async def metrics(_: Request) -> Response:
        return Response(await _metrics(front), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/", page),
            Route("/status", status),
            Route("/metrics", metrics),
            Route("/openapi.json", front.any),
            Route("/v1/models", front.models),
            Route("/v1/models/{model}", front.model),
            Route("/v1/completions", front.complete, methods=["POST"]),
            Route("/v1/chat/completions", front.complete, methods=["POST"]),
            Route(LOAD_PATH, front.load, methods=["POST"]),
            Route(UNLOAD_PATH, front.unload, methods=["POST"]),
        ],
        middleware=[Middleware(Gate, keys=keys, admin_keys=admin_keys)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _api_error,
            ServingError: _api_error,
            ClientGone: _client_gone,
            Exception: _fault,
        },
    )


async def _api_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, QueueFull):
        error = ApiError(429, str(error), code="queue_full", retry_seconds=1)
    if not isinstance(error, ApiError):
        error = ApiError(503, str(error), code="unavailable")
    return error_response(error)


async def _fault(_: Request, __: Exception) -> Response:
    # The trace goes to the log; what it says is nothing for a client.
    return error_response(ApiError(500, "internal error", code="internal_error"))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _state(fleet: Fleet) -> str:
    if fleet.draining:
        return "draining"
    return "ready" if any(member.is_up for member in fleet.members) else "cannot generate"


def _overview(front: Front) -> dict[str, Any]:
    """One status for all, and what each replica does."""
    fleet = front.fleet
    found = merged_status([m.told for m in fleet.members if m.is_up], state=_state(fleet))
    found["models"] = [one for one in found["models"] if one["name"] not in front.hidden]
    return found | {"replicas": [_of_member(member) for member in fleet.members]}


def _of_member(member: Member) -> dict[str, Any]:
    return {
        "index": member.index,
        "state": member.told["state"] if member.is_up else "down",
        "open": member.open_for.total(),
        "restarts": member.restarts,
        "resident": sorted(member.view(frozenset()).held),
    }


async def _metrics(front: Front) -> bytes:
    fleet = front.fleet

    async def scrape(member: Member) -> str | None:
        try:
            found = await fleet.client.get(f"{member.url}/metrics", timeout=SCRAPE_SECONDS)
        except httpx.HTTPError:
            return None
        return found.text if found.status_code == 200 else None

    members = [member for member in fleet.members if member.is_up]
    texts = await asyncio.gather(*(scrape(member) for member in members))
    told = zip(members, texts, strict=True)
    return render(
        {member.index: text for member, text in told if text is not None},
        front.counts,
        up=[member.is_up for member in fleet.members],
        restarts=[member.restarts for member in fleet.members],
        open_requests=[member.open_for.total() for member in fleet.members],
        copies=fleet.copies,
    )


def make_client() -> httpx.AsyncClient:
    """For a fleet: no bound on connections, and none on the time that an answer takes."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS
        ),
        trust_env=False,
    )


def run(
    family: str | Path,
    *,
    replicas: int,
    base: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    dtype: str | None = None,
    cache_bytes: int | None = None,
    host_cache_bytes: int = 0,
    pool: str | Path | None = None,
    adapters: str | Path | None = None,
    pin: Sequence[str] = (),
    auto_pin: int = 0,
    max_running: int | None = None,
    max_queue: int | None = None,
    max_wait_seconds: float | None = None,
    tensor_parallel: int = 1,
    api_key_file: str | Path | None = None,
    admin_key_file: str | Path | None = None,
) -> None:
    """Serves a family with several replicas until SIGTERM or SIGINT, then lets open requests end.

    Args:
        replicas: how many; each has a GPU of its own, if there are as many.
        tensor_parallel: processes of a replica, which share its base; each has a GPU of its own.
        pin: shared out over the replicas.
        device and all others: as in `soupkit.serving.server.run`, for each replica.

    Raises:
        SoupkitError: a replica cannot start.
        ValueError: an argument.
    """
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: must be at least 1")
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel={tensor_parallel}: must be at least 1")
    open_family(family)  # what is wrong with it is told before any process starts
    settings = ReplicaSettings(
        family=str(family),
        base=None if base is None else str(base),
        device=device,
        dtype=dtype,
        cache_bytes=cache_bytes,
        host_cache_bytes=host_cache_bytes,
        pool=None if pool is None else str(pool),
        adapters=None if adapters is None else str(adapters),
        pin=tuple(pin),
        auto_pin=auto_pin,
        max_running=max_running,
        max_queue=max_queue,
        max_wait_seconds=max_wait_seconds,
        tensor_parallel=tensor_parallel,
    )
    keys, admin_keys = read_keys(api_key_file, admin_key_file)
    check_address(host, port)

    has_started = False

    async def serve() -> None:
        nonlocal has_started
        async with make_client() as client:
            fleet = Fleet(
                settings,
                count=replicas,
                client=client,
                keys=keys,
                admin_keys=admin_keys,
                max_wait_seconds=settings.max_wait_seconds or DEFAULT_MAX_WAIT_SECONDS,
            )
            await fleet.start()
            has_started = True
            app = create_front(fleet, keys=keys, admin_keys=admin_keys)
            try:
                await FrontServer(app, fleet, host=host, port=port).serve()
            finally:
                await fleet.stop()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        # uvicorn raises the signal again once it has stopped; a person who stops it needs no trace.
        if not has_started:
            raise
