"""A family behind Ray Serve: replicas of the engine, and a router that knows what each one holds.

    HTTP -> ingress -> Ray's handle -> FamilyRouter (replicas.py's choice) -> a replica: app.py

Ray starts, places, scales and replaces replicas; each is the server of app.py in an actor, asked by
its own routes. What replicas hold comes to the router with Ray's routing statistics; what the
router itself gave counts at once. A request whose replica is lost before its answer has begun goes
to another one. Not here: routes that change what all replicas hold; a family's folder is the
registry. recipes/serve/ray_family.py has a command that serves.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.responses import JSONResponse, Response

from soupkit.config import BASE_NAME
from soupkit.errors import ServingError

from .front import EVENTS, MAX_LOST, Stream, asked, lost_event, too_many_lost, whole_events
from .gate import error_response
from .openai import ApiError
from .replica_process import ReplicaSettings
from .replicas import Replica, choose
from .states import Phase

STATS_SECONDS = 0.5
# A request that was chosen for and then not sent is forgotten.
FORGET_SECONDS = 10.0
_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/openapi.json", "/ready")
_LOST = (RayError, RayServeException)


class FamilyRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Sends each request where its variant is; in every process that holds a handle."""

    def initialize_state(self, **_: Any) -> None:
        # By request: the replica, the model, how many sequences, and when it was chosen.
        self._given: dict[str, tuple[ReplicaID, str, int, float]] = {}
        self._sent: set[str] = set()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [list(candidate_replicas)]
        now = asyncio.get_running_loop().time()
        self._forget(now)
        name, weight = pending_request.args[:2]
        views = [self._view(one) for one in candidate_replicas]
        chosen = choose(views, None if name == BASE_NAME else name)
        if chosen is None:
            return [list(candidate_replicas)]
        replica, number = candidate_replicas[chosen], pending_request.metadata.internal_request_id
        self._given[number] = (replica.replica_id, name, weight, now)
        return [[replica]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        number = pending_request.metadata.internal_request_id
        name, weight = pending_request.args[:2]
        self._given[number] = (replica_id, name, weight, 0.0)
        self._sent.add(number)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._given.pop(internal_request_id, None)
        self._sent.discard(internal_request_id)

    def _forget(self, now: float) -> None:
        for number, (_, _, _, then) in list(self._given.items()):
            if number not in self._sent and now - then > FORGET_SECONDS:
                del self._given[number]

    def _view(self, replica: RunningReplica) -> Replica:
        told: Mapping[str, Any] = replica.routing_stats or {}
        open_for: Counter[str] = Counter()
        for there, name, weight, _ in self._given.values():
            if there == replica.replica_id:
                open_for[name] += weight
        total = open_for.total()
        open_for.pop(BASE_NAME, None)
        return Replica(
            is_up=True,
            open=total,
            max_running=told.get("max_running", 1),
            max_queue=told.get("max_queue", 1),
            slots=told.get("slots", 0),
            phases={name: Phase(phase) for name, phase in told.get("phases", {}).items()},
            pinned=told.get("pinned", ()),
            open_for=open_for,
        )


class FamilyReplica:
    """One replica: a service of its own, asked through its HTTP application."""

    # Ray awaits it, on the loop that it calls the other methods on.
    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        from .app import create_app
        from .server import build_service

        self._service = build_service(**settings)
        self._app = create_app(self._service)
        # Ray has no lifespan for it.
        await self._service.start()

    async def answer(
        self, name: str, weight: int, method: str, path: str, body: bytes
    ) -> AsyncGenerator[Any, None]:
        """First the status and the headers, then the body as it comes.

        Args:
            name, weight: for the router.
        """
        told: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
        sent: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent:
                await gone.wait()
                return {"type": "http.disconnect"}
            return sent.pop()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
            "server": ("replica", 80), "client": ("ingress", 1),
        }  # fmt: skip

        async def run() -> None:
            try:
                await self._app(scope, receive, told.put)
            finally:
                await told.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await told.get()) is not None:
                if message["type"] == "http.response.start":
                    yield (
                        message["status"],
                        [(k.decode(), v.decode()) for k, v in message["headers"]],
                    )
                elif message.get("body"):
                    yield message["body"]
        finally:
            gone.set()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router looks at."""
        residents, router = self._service.residents(), self._service.router
        return {
            "max_running": router.limits.max_running,
            "max_queue": router.limits.max_queue,
            "slots": router.cache.num_slots,
            "phases": {name: stats.phase.value for name, stats in residents.items()},
            "pinned": [name for name, stats in residents.items() if stats.pinned],
        }

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine has stopped."""
        if not self._service.ready:
            raise ServingError("the engine has stopped")


async def _rest(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for event in events:
            yield event
    except _LOST:
        yield lost_event()


_app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)


@serve.ingress(_app)
class Ingress:
    """OpenAI's routes in front of the replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    @_app.api_route("/{path:path}", methods=["GET", "POST"])
    async def any(self, request: Request) -> Response:
        """What a replica answers."""
        path = request.url.path
        if path == "/health":
            return JSONResponse({"status": "alive"})
        if path not in _PATHS and not path.startswith("/v1/models/"):
            return error_response(ApiError(404, "Not Found"))
        body = await request.body()
        name, weight = await asked(body)
        for _ in range(MAX_LOST):
            with contextlib.suppress(*_LOST):
                return await self._ask(name, weight, request.method, path, body)
        return error_response(too_many_lost())

    async def _ask(self, name: str, weight: int, method: str, path: str, body: bytes) -> Response:
        parts = self._replicas.answer.remote(name, weight, method, path, body)
        async with AsyncExitStack() as held:
            held.callback(parts.cancel)
            status, headers = await anext(parts)
            kept = {k: v for k, v in headers if k in ("content-type", "retry-after")}
            if not kept.get("content-type", "").startswith(EVENTS):
                return Response(b"".join([part async for part in parts]), status, kept)
            events = whole_events(parts)
            first = await anext(events)
            stream = Stream(_rest(first, events))
            stream.keep(held.pop_all())
            return stream


def family_app(settings: ReplicaSettings, *, replicas: int, num_gpus: float = 0.0) -> Any:
    """A Ray Serve application for a family, to be given to `serve.run` or `serve run`.

    Args:
        replicas: how many. num_gpus: of each; 0 on CPUs.
    """
    running, queued = settings.max_running or 16, settings.max_queue or 512
    deployed = serve.deployment(FamilyReplica).options(
        num_replicas=replicas,
        max_ongoing_requests=running + queued,  # the service refuses what is too much
        ray_actor_options={"num_gpus": num_gpus} if num_gpus else {},
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=FamilyRouter, request_routing_stats_period_s=STATS_SECONDS
        ),
    )
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=replicas * (running + queued))
    return ingress.bind(deployed.bind(asdict(settings)))
