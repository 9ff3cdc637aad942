"""Every route and method behind a front beside those of a single process."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from serving_kit import make_family

from soupkit.serving.app import create_app
from soupkit.serving.fleet import Fleet
from soupkit.serving.front_app import create_front, make_client
from soupkit.serving.listening import Server
from soupkit.serving.replica_process import ReplicaSettings
from soupkit.serving.server import build_service

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
PATHS = (
    "/", "/health", "/ready", "/status", "/metrics", "/openapi.json", "/v1/models",
    "/v1/models/linear", "/v1/models/none", "/v1/models/", "/v1/completions",
    "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/nothing",
    "/health/", "/docs", "/v1", "/v1/models/linear/", "/v1/completions/",
)  # fmt: skip
# Of one process and of several: their bodies differ, and by the moment.
OWN = ("/status", "/metrics")
SECRET, ADMIN = "secret", "admin"


class Replica:
    """A server in this process."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def send_signal(self, number: int) -> None:
        """It goes on: the test ends it."""


async def serve(server: Server) -> tuple["asyncio.Task[None]", str]:
    """Its task and its address; its handlers of signals would be this process's."""
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0)
    host, port = server.address
    return serving, f"http://{host}:{port}"


@asynccontextmanager
async def fronting(urls: Sequence[str], keys: list[str]) -> AsyncIterator[str]:
    """The address of a front before servers of this process."""

    async def spawn(line: str) -> Replica:
        return Replica(urls[json.loads(line)["index"]])

    async with make_client() as client:
        fleet = Fleet(
            ReplicaSettings("family"), count=len(urls), client=client, keys=keys,
            admin_keys=[ADMIN], spawn=spawn, max_wait_seconds=30,
        )  # fmt: skip
        await fleet.start()
        app = create_front(fleet, keys=keys, admin_keys=[ADMIN])
        front = Server(app, fleet, host="127.0.0.1", port=0)
        front.config.lifespan = "off"
        serving, url = await serve(front)
        try:
            yield url
        finally:
            front.should_exit = True
            await serving
            for keeper in fleet._keepers:
                keeper.cancel()
            await asyncio.gather(*fleet._keepers, return_exceptions=True)


async def told(client: httpx.AsyncClient, url: str, method: str, path: str, key: str) -> Any:
    """All that a client may notice of an answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await client.request(method, url + path, headers=headers)
    kept = ("content-type", "allow", "location", "retry-after", "cache-control")
    found = {name: answer.headers.get(name, "").removeprefix(url) for name in kept}
    length = None if path in OWN else answer.headers["content-length"]
    return answer.status_code, found, length, b"" if path in OWN else answer.content


def test_routes_and_methods_are_those_of_a_single_process(tmp_path: Path) -> None:
    keys = [SECRET]
    make_family(tmp_path, names=["linear"])
    service = build_service(tmp_path / "family", device="cpu")
    app = create_app(service, keys=keys, admin_keys=[ADMIN])

    async def scene() -> None:
        single = Server(app, service, host="127.0.0.1", port=0)
        serving, alone = await serve(single)
        async with fronting([alone], keys) as behind, make_client() as client:
            for key in ("", SECRET, ADMIN):
                for path in PATHS:
                    for method in METHODS:
                        expected = await told(client, alone, method, path, key)
                        found = await told(client, behind, method, path, key)
                        assert found == expected, (method, path, key)
                        if method == "GET":
                            get = expected
                        elif method == "HEAD":
                            assert expected == (*get[:3], b""), path
        single.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(scene(), 60))
