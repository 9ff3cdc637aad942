"""Replicas for the front's tests that are no processes: they answer as the test tells them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from soupkit.serving.fleet import Fleet
from soupkit.serving.front_app import create_front
from soupkit.serving.replica_process import ReplicaSettings

NAMES = ("a", "b", "c")
ADMIN = {"authorization": "Bearer admin"}
TIMES = ("first_token_p50", "first_token_p99", "next_token_p50", "next_token_p99")


class Events(httpx.AsyncByteStream):
    """Chunks of events, and a broken connection after some of them."""

    def __init__(self, chunks: list[bytes], *, cut: int | None) -> None:
        self._chunks, self._cut, self.is_closed = chunks, cut, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, chunk in enumerate(self._chunks):
            if number == self._cut:
                raise httpx.ReadError("cut")
            yield chunk

    async def aclose(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class Fake:
    """One process of a replica.

    Args:
        lose: requests to lose before they are answered. cut: after how many chunks streams break.
        refuse: what completions are answered instead, and the state from then on. hold: what they
            wait for.
    """

    line: dict[str, Any]
    phases: dict[str, str] = field(default_factory=lambda: dict.fromkeys(NAMES, "disk"))
    pinned: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    targets: list[bytes] = field(default_factory=list)
    streams: list[Events] = field(default_factory=list)
    state: str = "ready"
    still_seconds: float = 0.0
    lose: int = 0
    cut: int | None = None
    refuse: tuple[int, dict[str, Any]] | None = None
    then: str = ""
    hold: asyncio.Event | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def wait(self) -> None:
        await self.over.wait()

    def send_signal(self, number: int) -> None:
        self.over.set()

    def status(self) -> dict[str, Any]:
        def one(name: str) -> dict[str, Any]:
            variant = None if name == "base" else {
                "phase": self.phases[name], "pinned": name in self.pinned, "device_bytes": 10,
                "host_bytes": 1, "users": 0, "waiting": 0, "hits": 1, "misses": 2, "loads": 1,
                "failures": 0, "evictions": 0, "load_seconds": 0.5, "requests_per_second": 0.25,
            }  # fmt: skip
            return {"name": name, "requests": 3, "tokens": 4, "variant": variant} | dict.fromkeys(
                TIMES, 0.1 * (self.line["index"] + 1)
            )

        shown = [name for name in NAMES if name not in self.hidden]
        return {
            "version": "x",
            "state": self.state,
            "still_seconds": self.still_seconds,
            "queue": {"running": 0, "max_running": 2, "waiting": 0, "max_queue": 4},
            "device": {"used_bytes": 0, "budget_bytes": 100, "slots": 2, "used_slots": 0},
            "host": {"used_bytes": 0, "budget_bytes": 0},
            "models": [one(name) for name in ("base", *shown)],
        }

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, await request.aread()
        if self.over.is_set():
            raise httpx.ConnectError("gone")
        if path == "/status":
            return httpx.Response(200, json=self.status())
        if path == "/metrics":
            text = "# TYPE soupkit_loads counter\nsoupkit_loads_total 2.0\n"
            return httpx.Response(200, text=text)
        if request.method == "GET" and "/metrics" not in path:
            self.targets.append(request.extensions.get("target", request.url.raw_path))
        if path == "/v1/models":
            shown = [{"id": m["name"]} for m in self.status()["models"]]
            return httpx.Response(200, json={"object": "list", "data": shown})
        if path.endswith("lora_adapter"):
            return self._admin(path, request, json.loads(body))
        try:
            return await self._complete(json.loads(body))
        except ValueError:
            return await self._complete(None)

    def _admin(self, path: str, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        assert request.headers["authorization"] == ADMIN["authorization"]
        name = body.get("lora_name")
        if name not in NAMES:
            return httpx.Response(404, json={"error": {"code": "model_not_found"}})
        if path.endswith("unload_lora_adapter"):
            self.hidden.add(name)
            freed = {"device": 10 * (self.phases[name] == "resident"), "host": 0}
            self.phases[name] = "disk"
            told = {"id": name, "freed_bytes": freed, "shared_with": [], "requests_ended": 1}
            return httpx.Response(200, json=told | {"seconds": 0.1 * (1 + self.line["index"])})
        self.hidden.discard(name)
        self.phases[name] = "resident"
        self.loads.append(name)
        if body.get("pinned") is not None:
            (self.pinned.add if body["pinned"] else self.pinned.discard)(name)
        return httpx.Response(200, json={"id": name, "pinned": name in self.pinned})

    async def _complete(self, body: Any) -> httpx.Response:
        if self.lose:
            self.lose -= 1
            raise httpx.RemoteProtocolError("lost")
        name = body.get("model") if isinstance(body, dict) else None
        self.asked.append(name)
        if self.hold is not None:
            await self.hold.wait()
        if self.refuse is not None:
            self.state = self.then or self.state
            return httpx.Response(self.refuse[0], json={"error": self.refuse[1]})
        if name in self.hidden or name not in ("base", *NAMES):
            return httpx.Response(404, json={"error": {"code": "model_not_found"}})
        if name != "base":
            self.phases[name] = "resident"
        if not body.get("stream"):
            return httpx.Response(200, json={"from": self.line["index"], "model": name})
        # The second chunk ends in the middle of an event.
        chunks = [
            b'data: {"n": 0}\n\n',
            b'data: {"n": 1}\n\ndata: {"n"',
            b": 2}\n\n",
            b"data: [DONE]\n\n",
        ]
        self.streams.append(Events(chunks, cut=self.cut))
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, stream=self.streams[-1]
        )


class Transport(httpx.AsyncBaseTransport):
    """Leads to the fakes, by host."""

    def __init__(self, fakes: dict[str, Fake]) -> None:
        self._fakes = fakes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host not in self._fakes:
            raise httpx.ConnectError("no such host")
        return await self._fakes[request.url.host].answer(request)


@dataclass
class Stage:
    """A front and its replicas."""

    fleet: Fleet
    client: httpx.AsyncClient
    app: Any
    by_host: dict[str, Fake]

    @property
    def fakes(self) -> list[Fake]:
        """All that were started, in that order."""
        return list(self.by_host.values())

    async def ask(self, model: str = "a", **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": "x"} | more
        return await self.client.post("/v1/completions", json=body)

    async def sees(self) -> None:
        """The fleet has heard what the replicas tell."""
        await asyncio.gather(*(self.fleet._ask(member) for member in self.fleet.members))


@asynccontextmanager
async def stage(
    count: int = 2, *, keys: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[Stage]:
    """Ends with nothing open anywhere."""
    by_host: dict[str, Fake] = {}

    async def spawn(line: str) -> Fake:
        fake = Fake(json.loads(line))
        host = f"replica{len(by_host)}"
        fake.url, by_host[host] = f"http://{host}", fake
        fake.pinned.update(fake.line["settings"]["pin"])
        return fake

    inner = httpx.AsyncClient(transport=Transport(by_host))
    fleet = Fleet(
        ReplicaSettings("family", **settings), count=count, client=inner, spawn=spawn,
        keys=list(keys), admin_keys=["admin"], max_wait_seconds=30,
    )  # fmt: skip
    await fleet.start()
    app = create_front(fleet, keys=keys, admin_keys=["admin"])
    outer = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front")
    try:
        yield Stage(fleet, outer, app, by_host)
        assert not any(member.open_for for member in fleet.members)
        assert all(stream.is_closed for fake in by_host.values() for stream in fake.streams)
    finally:
        await fleet.stop()
        await outer.aclose()
        await inner.aclose()
