"""A family behind Ray Serve: the front of `soupkit serve --replicas` over replicas that Ray runs.

    HTTP -> Ray's proxy -> Ingress: front_app.py -> Ray's handle -> a replica: app.py

Ray starts, places and replaces replicas; each is the server of app.py in an actor, asked by its own
routes. Keys, routes, choice, retries, metrics and what an administrator does are the front's
(front.py, fleet.py), for which a replica is an address: ray_fleet.py turns a request to it into a
call of that actor. Names that were unloaded are served again when the ingress is started
anew, as when a front is. Keys are read where the ingress runs and go nowhere else. Not here:
replicas of several ranks, a number of replicas that Ray changes by itself.
recipes/serve/ray_family.py has a command that serves.
"""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any
from urllib.parse import quote, unquote

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from soupkit.bundle import open_family
from soupkit.errors import ServingError

from .fleet import STILL_SECONDS
from .front_app import create_front
from .listening import read_keys
from .ray_fleet import NamedRouter, RayFleet
from .replica_process import ReplicaSettings

# Calls of a replica that Ray lets pass at a time, the front's own among them.
MAX_ONGOING = 10_000


class FamilyReplica:
    """One replica: a service of its own, asked through its HTTP application."""

    # Ray awaits it, on the loop that it calls the other methods on.
    async def __init__(  # type: ignore[misc]
        self, settings: dict[str, Any], *, sharers: int, asks_key: bool
    ) -> None:
        from .app import create_app
        from .server import build_service

        self._name = serve.get_replica_context().replica_id.unique_id
        self._service = build_service(**settings, sharers=sharers)
        # Who may call an actor has passed the ingress; its app tells of keys and takes this one.
        key = secrets.token_hex()
        self._headers = [
            (b"content-type", b"application/json"),
            (b"authorization", b"Bearer " + key.encode()),
        ]
        self._app = create_app(self._service, keys=[key] * asks_key, admin_keys=[key])
        # Ray has no lifespan for it.
        await self._service.start()

    async def answer(
        self, name: str, method: str, target: bytes, body: bytes
    ) -> AsyncGenerator[Any, None]:
        """First the status and the headers, then the body as it comes; None if this is not `name`.

        Args:
            target: the path as it came, percent-encoded.
        """
        if name != self._name:
            yield None
            return
        told: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
        running = asyncio.create_task(self._run(told, method, target, body))
        try:
            while (message := await told.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def _run(
        self, told: "asyncio.Queue[Any]", method: str, target: bytes, body: bytes
    ) -> None:
        sent: list[dict[str, Any]] = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not sent:
                await asyncio.Event().wait()  # a client that goes away cancels this
            return sent.pop()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": unquote(target.decode("ascii")), "raw_path": target,
            "query_string": b"", "root_path": "", "headers": self._headers,
            "server": ("replica", 80), "client": ("ingress", 1),
        }  # fmt: skip
        try:
            await self._app(scope, receive, told.put)
        finally:
            await told.put(None)

    async def taken(self, name: str) -> bool:
        """Serves anew what a former ingress had unloaded. False if this is not `name`."""
        if name != self._name:
            return False
        for hidden in self._service.catalog.refs:
            self._service.catalog.show(hidden)
        self._service.follow_family()
        return True

    async def check_health(self) -> None:
        """Ray replaces a replica whose engine has stopped or hangs."""
        if not self._service.ready:
            raise ServingError("the engine has stopped")
        if self._service.engine.pulse.still_seconds() > STILL_SECONDS:
            raise ServingError(f"the engine has done nothing for {STILL_SECONDS:g} seconds")


class _Door:
    """The ASGI application that Ray gets: that of the ingress in this process, wherever mounted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await Starlette()(scope, receive, send)
        root, path = scope.get("root_path", ""), scope["path"]
        if root and path.startswith(root):
            # Keys are asked for by the path, which is to begin with /v1 for all that look at it.
            raw = scope.get("raw_path") or quote(path).encode()
            raw = (
                raw[len(root) :]
                if raw.startswith(root.encode())
                else quote(path[len(root) :]).encode()
            )
            scope = {
                **scope,
                "root_path": "",
                "path": path[len(root) :] or "/",
                "raw_path": raw or b"/",
            }
        await serve.get_replica_context().servable_object.front(scope, receive, send)


@serve.ingress(_Door())
class Ingress:
    """The front's routes before the replicas."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: dict[str, Any],
        replicas: Any,
        *,
        count: int,
        api_key_file: str | None,
        admin_key_file: str | None,
    ) -> None:
        keys, admin_keys = read_keys(api_key_file, admin_key_file)
        fleet = RayFleet(
            ReplicaSettings.from_json(settings), replicas, count=count, admin_keys=admin_keys
        )
        await fleet.start()
        self.front = create_front(fleet, keys=keys, admin_keys=admin_keys)


def _check(settings: ReplicaSettings, *, replicas: int, num_gpus: float) -> None:
    """Raises ValueError or SoupkitError: what Ray would tell late, and in many lines."""
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: must be at least 1")
    if not 0 <= num_gpus < math.inf:
        raise ValueError(f"num_gpus={num_gpus}: must be at least 0")
    if settings.tensor_parallel != 1:
        raise ValueError(
            f"tensor_parallel={settings.tensor_parallel}: a replica behind Ray is one process; "
            "start `soupkit serve --tensor-parallel` instead"
        )
    variants = open_family(settings.family).variants
    unknown = [name for name in settings.pin if name not in variants and settings.pool is None]
    if unknown:
        known = ", ".join(variants) or "none"
        raise ServingError(f"pin={unknown[0]}: there is no such variant, only {known}")


def family_app(
    settings: ReplicaSettings,
    *,
    replicas: int,
    num_gpus: float = 0.0,
    api_key_file: str | None = None,
    admin_key_file: str | None = None,
) -> Any:
    """A Ray Serve application for a family, to be given to `serve.run` or `serve run`.

    Args:
        replicas: how many. num_gpus: of each; 0 on CPUs.
        api_key_file, admin_key_file: as of `soupkit serve`, on the node of the ingress, which reads
            them; Ray is told their paths only.

    Raises:
        ValueError: an argument. SoupkitError: the family cannot be read here. What only a replica
            finds out is told by `serve status`.
    """
    read_keys(api_key_file, admin_key_file)
    _check(settings, replicas=replicas, num_gpus=num_gpus)
    # On CPUs all replicas may be on one machine.
    sharers = replicas if not num_gpus else max(1, math.floor(1 / num_gpus))
    deployed = serve.deployment(FamilyReplica).options(
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,  # the service refuses what is too much
        ray_actor_options={"num_gpus": num_gpus} if num_gpus else {},
        health_check_period_s=2,
        logging_config={"enable_access_log": False},  # the front asks for the status all the time
        request_router_config=RequestRouterConfig(request_router_class=NamedRouter),
    )
    own = asdict(settings)
    bound = deployed.bind({**own, "pin": ()}, sharers=sharers, asks_key=api_key_file is not None)
    return (
        serve.deployment(Ingress)
        .options(
            num_replicas=1,  # it remembers what is unloaded
            max_ongoing_requests=replicas * MAX_ONGOING,
        )
        .bind(own, bound, count=replicas, api_key_file=api_key_file, admin_key_file=admin_key_file)
    )
