"""Several replicas behind one address: what a request asks for decides who answers it.

Bodies pass unread but for the model and the number of sequences, answers event by event. A request
whose replica is lost before its answer has begun goes to another one, `MAX_LOST` times, as a
request may be what kills them; a stream that has begun ends with an event that says so. Keys,
names that were unloaded and pins are the front's to remember: a replica that is started anew knows
none of them.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from soupkit.config import BASE_NAME
from soupkit.errors import ServingError

from .asking import beginning_of, model_of, parsed, read
from .connection import while_connected
from .fleet import Fleet
from .fleet_metrics import FrontCounts
from .gate import LOAD_PATH
from .member import Member
from .merged import merged_unload
from .openai import ApiError, unknown_model

Ask = Callable[[Member, AsyncExitStack], Awaitable[Response]]

MAX_LOST = 3
EVENTS = "text/event-stream"
_SENT = ("content-type", "authorization")
_PASSED = ("content-type", "cache-control", "retry-after")


class Stream(StreamingResponse):
    """Events of a replica; what they hold is let go however they end."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type=EVENTS, headers={"Cache-Control": "no-cache"})
        self._held = AsyncExitStack()

    def keep(self, held: AsyncExitStack) -> None:
        """Has these let go at the end."""
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


class Front:
    """Answers for a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.counts = fleet, FrontCounts()
        self.hidden: set[str] = set()
        # A name's lock is gone when nobody holds it or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def check_served(self, name: str) -> None:
        """Raises ApiError for a name that was unloaded."""
        if name in self.hidden:
            raise unknown_model(name, self.names(), hidden=True)

    def names(self) -> list[str]:
        """Model ids that are served."""
        return [name for name in self.fleet.names() if name not in self.hidden]

    async def any(self, request: Request) -> Response:
        """An answer that each replica gives alike."""
        await request.body()

        async def ask(member: Member, held: AsyncExitStack) -> Response:
            return await self._ask(member, request, b"", held)

        return await while_connected(request, self._anywhere(BASE_NAME, 1, ask))

    async def complete(self, request: Request) -> Response:
        """The answer to a completion."""
        body = await request.body()
        found = await read(body)
        name, weight = model_of(found)
        self.check_served(name)
        beginning = beginning_of(found)

        async def ask(member: Member, held: AsyncExitStack) -> Response:
            refusal = await self._show(member, name)
            if refusal is not None:
                return refusal
            found = await self._ask(member, request, body, held)
            if found.status_code == 200:
                self.fleet.note_answer(member, name)
            return found

        work = self._anywhere(name, weight, ask, beginning=beginning)
        return await while_connected(request, work)

    async def models(self, request: Request) -> Response:
        """The base and the variants that are served."""
        found = await self.any(request)
        if found.status_code != 200 or not self.hidden:
            return found
        listed = json.loads(bytes(found.body))
        listed["data"] = [model for model in listed["data"] if model["id"] not in self.hidden]
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        """One of them."""
        self.check_served(request.path_params["model"])
        return await self.any(request)

    # What an administrator does.

    async def load(self, request: Request) -> Response:
        """Makes a variant resident on one replica, and serves it again if it was unloaded."""
        body = await request.body()
        name, pinned = _admin_fields(body)
        return await while_connected(request, self._load(request, body, name, pinned))

    async def _load(
        self, request: Request, body: bytes, name: str, pinned: bool | None
    ) -> Response:
        async def ask(member: Member, held: AsyncExitStack) -> Response:
            found = await self._ask(member, request, body, held)
            if found.status_code == 200:
                self.fleet.note_load(member, name, loaded=True)
                self.hidden.discard(name)
                member.hidden.discard(name)
                if pinned is not None:
                    self.fleet.note_pin(member, name, pinned)
            return found

        async with self._turn(name):
            pinning = [one for one in self.fleet.members if one.is_up and name in one.pinned]
            if pinned is None or not pinning:
                return await self._anywhere(name, 1, ask)
            found = []
            for member in pinning:
                try:
                    async with AsyncExitStack() as held:
                        found.append(await ask(member, held))
                except httpx.TransportError:
                    self.fleet.note_fault(member)
            if not found:
                return await self._anywhere(name, 1, ask)
            return next((one for one in found if one.status_code != 200), found[0])

    async def unload(self, request: Request) -> Response:
        """Serves a variant no more on any replica, and frees its memory."""
        body = await request.body()
        name, _ = _admin_fields(body)
        async with self._turn(name):
            self.check_served(name)
            asked = [m for m in self.fleet.members if m.is_up and name not in m.hidden]
            self.hidden.add(name)
            try:
                told = await asyncio.gather(*(self._unload(m, request, body) for m in asked))
            except BaseException:
                self.hidden.discard(name)
                raise
            answered = [(m, one) for m, one in zip(asked, told, strict=True) if one is not None]
            gone = {m: one for m, one in answered if one.status_code == 200}
            if not gone:
                self.hidden.discard(name)
            for member in gone:
                member.hidden.add(name)
                self.fleet.note_load(member, name, loaded=False)
            for member in self.fleet.members if gone else ():
                member.pins.pop(name, None)
            for _, one in answered:
                if one.status_code != 200:
                    return one
            if not gone:
                raise ServingError("no replica is up; ask again later")
            return JSONResponse(merged_unload([parsed(bytes(o.body)) for o in gone.values()]))

    async def _unload(self, member: Member, request: Request, body: bytes) -> Response | None:
        """What a replica answers; None if it is lost, and with it what it held."""
        async with AsyncExitStack() as held:
            try:
                return await self._ask(member, request, body, held)
            except httpx.TransportError:
                self.fleet.note_fault(member)
                return None

    async def _show(self, member: Member, name: str) -> Response | None:
        """Has a replica serve a name that it hides still; what it answers if it cannot."""
        if name not in member.hidden:
            return None
        async with self._turn(name):
            if name not in member.hidden:
                return None
            self.check_served(name)
            headers = {"authorization": f"Bearer {self.fleet.admin_keys[0]}"}
            found = await self.fleet.client.post(
                member.url + LOAD_PATH, json={"lora_name": name}, headers=headers
            )
            if found.status_code == 200:
                member.hidden.discard(name)
                return None
            return Response(found.content, found.status_code, _passed(found))

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    # Replicas.

    async def _anywhere(
        self, name: str, weight: int, ask: Ask, *, beginning: bytes = b""
    ) -> Response:
        """The answer of the replica that is best for a model, or of the next if that one is lost.

        Raises:
            ApiError: too many were lost. ServingError: none is up.
        """
        refused: set[tuple[int, int]] = set()  # replicas, and which of their processes
        lost = 0
        while lost < MAX_LOST:
            excluded = [i for i, restarts in refused if self.fleet.members[i].restarts == restarts]
            member = await self.fleet.pick(
                name, weight=weight, excluded=excluded, beginning=beginning
            )
            try:
                async with AsyncExitStack() as held:
                    held.callback(self.fleet.release, member, name, weight)
                    found = await ask(member, held)
                    if isinstance(found, Stream):
                        found.keep(held.pop_all())
            except httpx.TransportError:
                self.fleet.note_fault(member)
                lost += 1
                self.counts.retries += 1
                continue
            if not _is_leaving(found) or member.index in excluded:
                return found
            # It stops, or its engine has: another one may answer, or the one in its place.
            self.fleet.note_fault(member)
            refused.add((member.index, member.restarts))
            self.counts.retries += 1
        raise too_many_lost()

    async def _ask(
        self, member: Member, request: Request, body: bytes, held: AsyncExitStack
    ) -> Response:
        """A replica's answer, whole, or its events once the first has come.

        Raises:
            httpx.TransportError: the replica is lost.
        """
        client = self.fleet.client
        path: bytes = request.scope.get("raw_path") or request.url.path.encode()
        headers = {n: request.headers[n] for n in _SENT if n in request.headers}
        sent = client.build_request(
            request.method, member.url + path.decode("ascii"), content=body, headers=headers,
            extensions={"target": path},  # as it came: a URL loses its dots and what follows a #
        )  # fmt: skip
        response = await client.send(sent, stream=True)
        held.push_async_callback(response.aclose)
        if not response.headers.get("content-type", "").startswith(EVENTS):
            content = await response.aread()
            return Response(content, response.status_code, _passed(response))
        events = whole_events(response.aiter_bytes())
        held.push_async_callback(events.aclose)
        first = await anext(events, None)
        if first is None:
            raise httpx.RemoteProtocolError("a stream without events", request=sent)
        return Stream(self._rest(member, first, events))

    async def _rest(
        self, member: Member, first: bytes, events: AsyncGenerator[bytes, None]
    ) -> AsyncIterator[bytes]:
        yield first
        try:
            async for event in events:
                yield event
                # The loop has its turn: to notice that the client has left, and for the others.
                await asyncio.sleep(0)
        except httpx.TransportError:
            self.fleet.note_fault(member)
            self.counts.lost_streams += 1
            yield lost_event()


def too_many_lost() -> ApiError:
    """Of a request that was sent to so many replicas that are gone."""
    message = f"{MAX_LOST} replicas were lost with this request; it is not tried again"
    return ApiError(503, message, code="replica_lost")


def lost_event() -> bytes:
    """The last event of a stream whose replica is gone."""
    message = "the replica that answered was lost; ask again"
    told = json.dumps(ApiError(503, message, code="replica_lost").body)
    return f"data: {told}\n\n".encode()


async def whole_events(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole events only, as half of one would spoil what is said after it; those that came together
    stay together.
    """
    rest = b""
    async for part in parts:
        whole, end, rest = (rest + part).rpartition(b"\n\n")
        if end:
            yield whole + end
    if rest:
        yield rest


def _admin_fields(body: bytes) -> tuple[str, bool | None]:
    """The variant and whether it is to be pinned; a replica tells what is wrong."""
    found = parsed(body)
    name, pinned = found.get("lora_name"), found.get("pinned")
    return name if isinstance(name, str) else BASE_NAME, pinned if type(pinned) is bool else None


def _passed(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in _PASSED if name in response.headers}


def _is_leaving(response: Response) -> bool:
    """Whether a replica refuses since it stops, rather than for what was asked."""
    if response.status_code != 503 or isinstance(response, Stream):
        return False
    error = parsed(bytes(response.body)).get("error")
    return isinstance(error, dict) and error.get("code") == "unavailable"
