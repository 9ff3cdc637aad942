"""One replica: a server of its own in a process that ends with the one that started it.

What to serve comes as a line of JSON on stdin, which then stays open: at its end the other process
is gone, however it went, and this one follows at once. Stdout takes one line of JSON: the port, or
why there is none.
"""

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from soupkit.errors import SoupkitError


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What each replica of a family is started with; as `soupkit.serving.server.run` has them."""

    family: str
    base: str | None = None
    device: str | None = None
    dtype: str | None = None
    cache_bytes: int | None = None
    host_cache_bytes: int = 0
    pool: str | None = None
    adapters: str | None = None
    pin: tuple[str, ...] = ()
    auto_pin: int = 0
    max_running: int | None = None
    max_queue: int | None = None
    max_wait_seconds: float | None = None

    def to_json(self, *, index: int, count: int, keys: list[str], admin_keys: list[str]) -> str:
        """The line for the replica `index` of `count`."""
        told = {"index": index, "count": count, "keys": keys, "admin_keys": admin_keys}
        return json.dumps({"settings": asdict(self), **told}) + "\n"

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "ReplicaSettings":
        """The inverse."""
        made = cls(**{one.name: found[one.name] for one in fields(cls)})
        return replace(made, pin=tuple(made.pin))


def main() -> None:
    """Serves until stdin ends or a signal comes."""
    told = json.loads(sys.stdin.readline())
    # What a library prints is none of the answer.
    answer = os.dup(1)
    os.dup2(2, 1)

    def tell(document: dict[str, Any]) -> None:
        os.write(answer, (json.dumps(document) + "\n").encode())

    threading.Thread(target=_follow, daemon=True).start()
    try:
        _serve(told, tell)
    except (SoupkitError, ValueError, OSError, ImportError) as error:
        tell({"error": str(error) or type(error).__name__})
        raise SystemExit(1) from None


def _follow() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(1)


def _serve(told: dict[str, Any], tell: Any) -> None:
    from .app import create_app
    from .listening import Server
    from .server import build_service

    settings = ReplicaSettings.from_json(told["settings"])
    device, sharers = _device(settings.device, told["index"], told["count"])
    given = asdict(settings) | {"device": device, "sharers": sharers}
    service = build_service(given.pop("family"), **given)

    class Replica(Server):
        def announce(self) -> None:
            tell({"port": self.address[1]})

    app = create_app(service, keys=told["keys"], admin_keys=told["admin_keys"])
    Replica(app, service, host="127.0.0.1", port=0).run()


def _device(device: str | None, index: int, count: int) -> tuple[str | None, int]:
    """The device of a replica, and how many replicas share its memory: a GPU each, if there are."""
    import torch

    num_gpus = torch.cuda.device_count()
    if device is not None or not num_gpus:
        return device, count
    return f"cuda:{index % num_gpus}", -(-count // num_gpus)
