"""A socket that listens, and who may ask there: uvicorn, the address, files of keys."""

import asyncio
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from soupkit.errors import ServingError

# How long a stop waits for open requests; after the last ones their connections are cut.
DRAIN_SECONDS = 25
LAST_SECONDS = 5


class Served(Protocol):
    """What a server serves. draining: whether it takes no more requests."""

    draining: bool

    def names(self) -> list[str]:
        """Model ids."""

    def end_open(self) -> None:
        """Ends all that is open; its clients are told that the server stops."""


class Server(uvicorn.Server):
    """uvicorn that says when it is ready, and stops being ready as soon as it is told to stop."""

    def __init__(self, app: ASGIApp, service: Served, *, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http="h11",  # bounds a header
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=DRAIN_SECONDS + LAST_SECONDS,
        )
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
            for server in self.servers:
                for listener in server.sockets:
                    # Of connections too: those whose other end has gone do not stay for ever.
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.announce()

    def announce(self) -> None:
        """Tells that requests are taken."""
        host, port = self.address
        names = ", ".join(self._service.names())
        sys.stderr.write(f"soupkit serves {names} on http://{host}:{port}\n")
        sys.stderr.flush()

    async def shutdown(self, sockets: Any = None) -> None:
        """As uvicorn's, but those that would be cut are told before."""
        self._service.draining = True
        ending = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_late(self) -> None:
        await asyncio.sleep(DRAIN_SECONDS)
        self._service.end_open()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.draining = True
        super().handle_exit(sig, frame)


def read_keys(
    api_key_file: str | Path | None, admin_key_file: str | Path | None
) -> tuple[list[str], list[str]]:
    """The keys of users and of admins; none without a file. Raises ValueError."""
    keys = _read_keys("api_key_file", api_key_file)
    admin_keys = _read_keys("admin_key_file", admin_key_file)
    if set(keys) & set(admin_keys):
        raise ValueError("a key is in api_key_file and in admin_key_file; give admins another one")
    return keys, admin_keys


def _read_keys(option: str, path: str | Path | None) -> list[str]:
    """The keys of a file, one a line; none without a file."""
    if path is None:
        return []
    try:
        keys = Path(path).read_text("ascii").split()
    except UnicodeDecodeError:
        raise ValueError(f"{option}={str(path)!r} is no ASCII text; write keys only") from None
    except OSError as error:
        raise ValueError(f"{option}={str(path)!r} cannot be read: {error.strerror}") from None
    if not keys:
        raise ValueError(f"{option}={str(path)!r} holds no key; write one a line")
    return keys


def check_address(host: str, port: int) -> None:
    """Raises ServingError if nothing can listen there: said before the base is loaded."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ServingError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose --host and --port"
        ) from None
