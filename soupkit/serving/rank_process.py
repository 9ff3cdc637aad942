"""The ranks of one replica: processes that share a base by tensor parallelism.

The first is the replica itself (replica_process.py); it starts the others, which hold their part of
the base and of every variant, and do as it says (engine.py, ranks.py). Each is told what to serve
in a line of JSON on stdin, which then stays open: its end is the end of the first. The end of
another is the end of the first, too, unless the first has told it to end: what is left could not
go on, and the front starts all anew.
"""

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from soupkit.errors import ServingError
from soupkit.exits import leave

from . import lifeline

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a replica. gpu: the index of its GPU, and of CPUs no matter."""

    rank: int
    ranks: int
    gpu: int


def start_ranks(settings: dict[str, Any], place: Place) -> None:
    """In the first rank: starts the others and joins their group.

    Args:
        settings: of the replica, as JSON types.
    Raises:
        ServingError: there are too few GPUs.
    """
    _check_devices(settings["device"], place)
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    for rank in range(1, place.ranks):
        told = {"settings": settings, "port": store.port, "rank": rank, "ranks": place.ranks}
        line = json.dumps(told | {"gpu": place.gpu + rank}) + "\n"
        child = subprocess.Popen(
            [sys.executable, "-c", lifeline.start_of("rank_process")],
            stdin=subprocess.PIPE,
        )
        assert child.stdin is not None
        child.stdin.write(line.encode())
        child.stdin.flush()
        threading.Thread(target=_follow_child, args=(child,), daemon=True).start()
    _join(store, place)


def end() -> NoReturn:
    """A rank's end: of the first, after its engine has told the others to end."""
    dist.destroy_process_group()
    leave()


def _follow_child(child: "subprocess.Popen[bytes]") -> None:
    # Only one that was told to end ends with 0.
    if code := child.wait():
        sys.stderr.write(f"soupkit: a rank ended with {code}; its replica cannot go on\n")
        os._exit(1)


def _check_devices(device: str | None, place: Place) -> None:
    num_gpus = torch.cuda.device_count()
    if device not in (None, "cpu", "cuda"):
        raise ServingError(
            f"--device {device} is one device, --tensor-parallel {place.ranks} takes as many: "
            "leave --device out, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if device == "cpu" and num_gpus:
        raise ServingError(
            "--device cpu with --tensor-parallel: hide the GPUs, with CUDA_VISIBLE_DEVICES="
        )
    if num_gpus and place.gpu + place.ranks > num_gpus:
        raise ServingError(
            f"--tensor-parallel {place.ranks} needs GPUs {place.gpu} to "
            f"{place.gpu + place.ranks - 1} for this replica, torch sees {num_gpus}"
        )


def _join(store: Any, place: Place) -> None:
    # Where transformers looks for the device of a rank.
    os.environ["LOCAL_RANK"] = str(place.gpu)
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.ranks)}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks)


def main() -> None:
    """Does as the first rank says, until that ends."""
    told = json.loads(sys.stdin.readline())
    # What a library prints is none of the replica's answer.
    os.dup2(2, 1)
    lifeline.hold()
    place = Place(told["rank"], told["ranks"], told["gpu"])
    _join(TCPStore(_HOST, told["port"], is_master=False), place)

    from .engine import Engine, bank_of
    from .ranks import agreed_plan
    from .server import open_model

    settings = told["settings"]
    _, model = open_model(
        settings["family"],
        base=settings["base"],
        device=settings["device"],
        dtype=settings["dtype"],
        tensor_parallel=place.ranks,
    )
    bank = bank_of(model)  # collective, too: it tries each module
    running, plan = agreed_plan(model, max_running=0, cache_bytes=0, sharers=1, ranks=place.ranks)
    engine = Engine(model, max_running=running, plan=plan, bank=bank)
    engine.start()
    engine.follow()
    end()
