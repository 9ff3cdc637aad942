"""The server process: family, base, engine and service put together, until a signal."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from soupkit.checkpoint import Checkpoint
from soupkit.errors import ServingError
from soupkit.family import open_base, open_family
from soupkit.headroom import MAX_RUNNING

from .app import create_app
from .catalog import Catalog
from .engine import Engine, bank_of
from .listening import Server, check_address, read_keys
from .memory import default_cache_bytes
from .pretrained import load_model
from .ranks import agreed_plan
from .service import Service
from .shelf import Shelf
from .slots import check_manifest, slot_shape
from .states import Limits

logger = logging.getLogger(__name__)

DEFAULT_MAX_QUEUE = 512
DEFAULT_MAX_WAIT_SECONDS = 300.0


def make_server(
    service: Service,
    *,
    host: str,
    port: int,
    keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
) -> Server:
    """A server for `service` that is not running yet; keys as in `create_app`."""
    app = create_app(service, keys=keys, admin_keys=admin_keys)
    return Server(app, service, host=host, port=port)


def build_service(
    family: str | Path,
    *,
    base: str | Path | None = None,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache_bytes: int | None = None,
    host_cache_bytes: int = 0,
    pool: str | Path | None = None,
    adapters: str | Path | None = None,
    pin: Sequence[str] = (),
    auto_pin: int = 0,
    max_running: int | None = None,
    max_queue: int | None = None,
    max_wait_seconds: float | None = None,
    sharers: int = 1,
    tensor_parallel: int = 1,
) -> Service:
    """Opens the family, loads its base and makes a service that is not started yet; see `run`.

    Args:
        sharers: engines that share the device's memory.
        tensor_parallel: ranks of the process group, of which this is the first (rank_process.py).
    """
    for name, value in (("max_running", max_running), ("max_queue", max_queue)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    for name, value in (("host_cache_bytes", host_cache_bytes), ("auto_pin", auto_pin)):
        if value < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    if max_wait_seconds is not None and not max_wait_seconds > 0:
        raise ValueError(f"max_wait_seconds={max_wait_seconds}: must be above 0")
    shelf = None
    if pool is not None:
        shelf = Shelf(Path(pool), adapters=None if adapters is None else Path(adapters))
    elif adapters is not None:
        raise ValueError("--adapters needs --pool, the folder of the pool that they come into")
    pin_memory = _device(device).type == "cuda"
    catalog = Catalog(Path(family), shelf=shelf, pin_memory=pin_memory)
    unknown = [name for name in pin if name not in catalog.variants]
    if unknown:
        known = ", ".join(catalog.variants) or "none"
        raise ServingError(f"--pin {unknown[0]}: there is no such variant, only {known}")
    checkpoint, model = open_model(
        family, base=base, device=device, dtype=dtype, tensor_parallel=tensor_parallel
    )
    if shelf is not None:
        shelf.serve_with(checkpoint, catalog.family.base)
    running = max_running or MAX_RUNNING.get(model.device.type, MAX_RUNNING["cpu"])
    queue = max_queue or DEFAULT_MAX_QUEUE
    bank = bank_of(model)
    coming = [] if shelf is None else shelf.to_come(catalog.family.base.fingerprint)
    needed = slot_shape(bank, coming).nbytes
    if cache_bytes is None:
        manifests = catalog.manifests().values()
        # Of a family without variants yet: slots of an eighth of the base.
        slot_bytes = slot_shape(bank, manifests).nbytes or int(model.get_memory_footprint()) // 8
        cache_bytes = default_cache_bytes(
            model.device,
            slot_bytes,
            len(manifests) + len(coming),
            largest=needed,
            sharers=sharers,
        )
    running, plan = agreed_plan(
        model,
        max_running=running,
        cache_bytes=cache_bytes,
        sharers=sharers,
        ranks=tensor_parallel,
    )
    engine = Engine(model, max_running=running, plan=plan, bank=bank)
    _check_room(catalog, engine, cache_bytes)
    if shelf is not None:
        shelf.check_by(partial(check_manifest, bank, cache_bytes=cache_bytes))
    if needed > cache_bytes:
        logger.warning(
            "adapters that are still to come may need a cache of %d bytes, it has %d: raise "
            "--cache-bytes, or give the pool a smaller --rank",
            needed,
            cache_bytes,
        )
    return Service(
        catalog,
        checkpoint,
        engine,
        cache_bytes=cache_bytes,
        host_bytes=host_cache_bytes,
        limits=Limits(
            max_running=running,
            max_queue=queue,
            # A flood for one model leaves room for the others.
            max_variant_queue=-(-queue // 2),
            max_wait_seconds=max_wait_seconds or DEFAULT_MAX_WAIT_SECONDS,
            auto_pin=auto_pin,
        ),
        pin=tuple(pin),
    )


def open_model(
    family: str | Path,
    *,
    base: str | Path | None,
    device: str | None,
    dtype: torch.dtype | str | None,
    tensor_parallel: int,
) -> tuple[Checkpoint, Any]:
    """A family's base, and what this process has of it as a model; see `build_service`."""
    target, checkpoint = _device(device), open_base(open_family(family), base)
    # On CPUs float32 is exact and rarely slower; on GPUs what the base was stored in.
    default = torch.float32 if target.type == "cpu" else checkpoint.main_dtype
    model = load_model(
        checkpoint.path,
        device=target,
        dtype=_dtype(dtype, default),
        tensor_parallel=tensor_parallel,
    )
    return checkpoint, model


def _check_room(catalog: Catalog, engine: Engine, cache_bytes: int) -> None:
    """Says which variants the cache is too small for; ServingError if it is for all."""
    needed = {name: engine.slot_bytes([manifest]) for name, manifest in catalog.manifests().items()}
    small = [name for name, num_bytes in needed.items() if num_bytes > cache_bytes]
    if small and len(small) == len(needed):
        least = min(needed, key=lambda name: (needed[name], name))
        raise ServingError(
            f"--cache-bytes {cache_bytes} is too small for any variant: {least!r} needs "
            f"{needed[least]}, the largest {max(needed.values())}; give more"
        )
    for name in small:
        logger.warning(
            "variant %r needs a cache of %d bytes, it has %d", name, needed[name], cache_bytes
        )


def _device(name: str | None) -> torch.device:
    """The device of that name, by default the first GPU if there is one; ValueError if absent."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device={name!r} is no device: use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={name!r}: torch sees {count} GPUs here; use another, or cpu")
    return device


def _dtype(dtype: torch.dtype | str | None, default: torch.dtype) -> torch.dtype:
    found = (
        default
        if dtype is None
        else getattr(torch, dtype, None)
        if isinstance(dtype, str)
        else dtype
    )
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={dtype!r}: use float32, bfloat16 or float16")
    assert isinstance(found, torch.dtype)
    return found


def run(
    family: str | Path,
    *,
    base: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache_bytes: int | None = None,
    host_cache_bytes: int = 0,
    pool: str | Path | None = None,
    adapters: str | Path | None = None,
    pin: Sequence[str] = (),
    auto_pin: int = 0,
    max_running: int | None = None,
    max_queue: int | None = None,
    max_wait_seconds: float | None = None,
    api_key_file: str | Path | None = None,
    admin_key_file: str | Path | None = None,
) -> None:
    """Serves a family over HTTP until SIGTERM or SIGINT, then lets open requests end.

    Args:
        family: folder with family.json.
        base: folder or hub id of the base, if it is not where the family says.
        host, port: where to listen; port 0 = a free one, told on stderr.
        device: "cuda", "cuda:1" or "cpu"; by default cuda if there is one.
        dtype: "float32", "bfloat16" or "float16"; by default float32 on CPUs, the base's own on
            GPUs.
        cache_bytes: what resident variants may hold, in slots of equal size; by default all
            variants and a quarter more, but no more than half of the free memory.
        host_cache_bytes: what variants may hold in host memory, from where they come back to the
            device without a read; of no use on a CPU.
        pool: of LoRA adapters (soupkit.pool), whose tasks are served as models too.
        adapters: folder of PEFT adapters that come into the pool when they are asked for.
        pin: variants that are loaded at the start and never evicted, the most important first: one
            slot is always for others.
        auto_pin: so many of the most asked for are not evicted either.
        max_running: sequences in one batch; 16 on CPUs, 128 on GPUs by default.
        max_queue: requests that may wait beyond those that run, half of them for one model; more
            get 429; 512 by default.
        max_wait_seconds: how long they may wait; then they get 503; 300 by
            default.
        api_key_file: file with one key a line; without it everyone who reaches the port may ask.
        admin_key_file: likewise, for loading and unloading; without it nobody may.

    Raises:
        SoupkitError: the family, the base or a pinned name cannot be served.
        ValueError: an argument.
    """
    keys, admin_keys = read_keys(api_key_file, admin_key_file)
    check_address(host, port)
    service = build_service(
        family,
        base=base,
        device=device,
        dtype=dtype,
        cache_bytes=cache_bytes,
        host_cache_bytes=host_cache_bytes,
        pool=pool,
        adapters=adapters,
        pin=pin,
        auto_pin=auto_pin,
        max_running=max_running,
        max_queue=max_queue,
        max_wait_seconds=max_wait_seconds,
    )
    # uvicorn raises the signal again once it has stopped; a person who stops it needs no trace.
    with suppress(KeyboardInterrupt):
        make_server(service, host=host, port=port, keys=keys, admin_keys=admin_keys).run()
