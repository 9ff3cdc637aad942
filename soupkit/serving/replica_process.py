"""One replica: a server of its own in a process that ends with the one that started it.

What to serve comes as a line of JSON on stdin, which then stays open: at its end the other process
is gone, however it went, and this one follows at once. Stdout takes one line of JSON: the port, or
why there is none.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from soupkit.errors import SoupkitError

from . import lifeline


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
    tensor_parallel: int = 1

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

    lifeline.hold()
    try:
        _serve(told, tell)
    except (SoupkitError, ValueError, OSError, ImportError) as error:
        tell({"error": str(error) or type(error).__name__})
        raise SystemExit(1) from None


def _serve(told: dict[str, Any], tell: Any) -> None:
    from .app import create_app
    from .listening import Server
    from .rank_process import Place, end, start_ranks
    from .server import build_service

    settings = ReplicaSettings.from_json(told["settings"])
    ranks = settings.tensor_parallel
    if ranks > 1:
        start_ranks(told["settings"], Place(0, ranks, gpu=told["index"] * ranks))
    device, sharers = _device(settings, told["index"], told["count"])
    given = asdict(settings) | {"device": device, "sharers": sharers}
    service = build_service(given.pop("family"), **given)

    class Replica(Server):
        def announce(self) -> None:
            tell({"port": self.address[1]})

    app = create_app(service, keys=told["keys"], admin_keys=told["admin_keys"])
    Replica(app, service, host="127.0.0.1", port=0).run()
    if ranks > 1:
        end()


def _device(settings: ReplicaSettings, index: int, count: int) -> tuple[str | None, int]:
    """The device of a replica, and how many engines share its memory: GPUs of its own, if there
    are.
    """
    import torch

    num_gpus, ranks = torch.cuda.device_count(), settings.tensor_parallel
    if ranks > 1 and num_gpus:
        return f"cuda:{index * ranks}", 1
    if settings.device is not None or not num_gpus:
        return settings.device, count * ranks
    return f"cuda:{index % num_gpus}", -(-count // num_gpus)
