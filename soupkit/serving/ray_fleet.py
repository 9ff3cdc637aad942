"""The replicas that Ray Serve runs, as the front's fleet.

A replica is found where Ray's handle knows it, is taken by a member that has none, and is given up
when Ray has it no more. A request to it is a call of its actor, by a transport of httpx; which one
is asked is the fleet's choice, and Ray's router sends the call there.
"""

import asyncio
import contextlib
import importlib
import json
import logging
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any

import httpx
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from soupkit.errors import ServingError

from .fleet import Fleet
from .front_app import DEFAULT_MAX_WAIT_SECONDS
from .gate import LOAD_PATH
from .member import Member
from .replica_process import ReplicaSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
_LOST = (RayError, RayServeException)
# That of the one handle that an ingress has, in its process.
_routers: list["NamedRouter"] = []


def _known_routers() -> list["NamedRouter"]:
    # Ray makes copies of classes, with globals of their own; a module by its name is there once.
    found: list[NamedRouter] = importlib.import_module(__name__)._routers
    return found


class NamedRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Sends each call to the replica that it names: the front has chosen."""

    def initialize_state(self, **_: Any) -> None:
        _known_routers()[:] = [self]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        name = pending_request.args[0] if pending_request is not None else None
        named = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        # Where it is gone any other one answers that it is not the one.
        return [named or list(candidate_replicas)]


def _running() -> set[str]:
    """The replicas that Ray has now."""
    return {one.unique_id for router in _known_routers() for one in list(router.curr_replicas)}


def _call(method: Any, *given: Any) -> Any:
    """What Ray's handle returns.

    Calls in the context of one request have one number, by which the router loses all but one of
    those that wait, and then spins. In a context of its own each has another one.
    """
    return Context().run(method.remote, *given)


class _Body(httpx.AsyncByteStream):
    """What a replica sends, and its call, which ends with it."""

    def __init__(self, parts: Any, request: httpx.Request) -> None:
        self._parts, self._request = parts, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._parts:
                yield part
        except _LOST as error:
            raise httpx.ReadError(str(error), request=self._request) from error

    async def aclose(self) -> None:
        self._parts.cancel()


class RayTransport(httpx.AsyncBaseTransport):
    """Sends a request for http://NAME to the replica of that name."""

    def __init__(self, replicas: Any) -> None:
        """replicas: Ray's handle of them."""
        self._replicas = replicas.options(stream=True)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        target = request.extensions.get("target", request.url.raw_path)
        name, body = request.url.host, await request.aread()
        parts = _call(self._replicas.answer, name, request.method, target, body)
        is_over = True
        try:
            seconds = request.extensions.get("timeout", {}).get("read")
            first = await asyncio.wait_for(anext(parts), seconds)
            is_over = first is None
        except TimeoutError:
            raise httpx.ReadTimeout(f"replica {name} does not answer", request=request) from None
        except (*_LOST, StopAsyncIteration) as error:
            raise httpx.ReadError(str(error), request=request) from error
        finally:
            if is_over:
                parts.cancel()
        if first is None:
            raise httpx.ConnectError(f"replica {name} is gone", request=request)
        return httpx.Response(first[0], headers=first[1], stream=_Body(parts, request))


class RayReplica:
    """A replica that Ray runs, as the fleet's process."""

    def __init__(self, name: str) -> None:
        self.name, self.url, self._let_go = name, f"http://{name}", asyncio.Event()

    async def wait(self) -> None:
        """Until Ray has it no more, or the fleet lets it go."""
        while self.name in _running() and not self._let_go.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._let_go.wait(), LOOK_SECONDS)

    def send_signal(self, _: int) -> None:
        """Ray ends it, not the fleet; one that answers again is taken again."""
        self._let_go.set()


class RayFleet(Fleet):
    """The replicas that Ray runs for an application."""

    def __init__(
        self, settings: ReplicaSettings, replicas: Any, *, count: int, admin_keys: list[str]
    ) -> None:
        """replicas: Ray's handle of them."""
        super().__init__(
            settings,
            count=count,
            client=httpx.AsyncClient(transport=RayTransport(replicas), timeout=None),
            admin_keys=admin_keys,
            spawn=self._take,
            max_wait_seconds=settings.max_wait_seconds or DEFAULT_MAX_WAIT_SECONDS,
        )
        self._replicas, self._taking = replicas, set[str]()

    async def start(self) -> None:
        """Looks for replicas from now on; requests wait for them."""
        self._keepers = [asyncio.create_task(self._look_after(member)) for member in self.members]

    async def _look_after(self, member: Member) -> None:
        while member.process is None:
            try:
                await self._begin(member)
            except ServingError as error:
                logger.warning("replica %d cannot be taken: %s", member.index, error)
                await asyncio.sleep(LOOK_SECONDS)
        await self._keep(member)

    async def _take(self, line: str) -> RayReplica:
        """A replica that is no member's yet, with the pins of the one that takes it."""
        while not (free := sorted(_running() - self._taking - self._taken())):
            if not _known_routers():  # the handle has none before it is used
                with contextlib.suppress(httpx.TransportError):
                    await self.client.get("http://none/health")
            await asyncio.sleep(LOOK_SECONDS)
        found = RayReplica(free[0])
        self._taking.add(found.name)
        try:
            if not await _call(self._replicas.taken, found.name):
                raise ServingError("it has ended")
            for name in json.loads(line)["settings"]["pin"]:
                told = await self.client.post(
                    found.url + LOAD_PATH, json={"lora_name": name, "pinned": True}
                )
                if told.status_code != 200:
                    logger.warning("%r is not pinned: %s", name, told.text)
        except (*_LOST, httpx.TransportError) as error:
            raise ServingError(str(error)) from error
        finally:
            self._taking.discard(found.name)
        return found

    def _taken(self) -> set[str]:
        processes = (member.process for member in self.members)
        return {one.name for one in processes if isinstance(one, RayReplica)}
