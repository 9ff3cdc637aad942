"""The parts of a server put together: family, base, model, engine, cache, service."""

from collections.abc import Sequence
from pathlib import Path

import torch

from soupkit.errors import ServingError
from soupkit.family import open_base

from .catalog import Catalog
from .engine import Engine
from .memory import default_cache_bytes, plan_kv
from .pretrained import load_model
from .service import Service
from .states import Limits

DEFAULT_MAX_QUEUE = 256
DEFAULT_MAX_RUNNING = {"cpu": 16, "cuda": 128}


def build_service(
    family: str | Path,
    *,
    base: str | Path | None = None,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache_bytes: int | None = None,
    pin: Sequence[str] = (),
    max_running: int | None = None,
    max_queue: int = DEFAULT_MAX_QUEUE,
) -> Service:
    """Opens the family, loads its base and makes a service that is not started yet; see `run`."""
    catalog = Catalog(Path(family))
    unknown = [name for name in pin if name not in catalog.variants]
    if unknown:
        known = ", ".join(catalog.variants) or "none"
        raise ServingError(f"--pin {unknown[0]}: the family has no such variant, only {known}")
    checkpoint = open_base(catalog.family, base)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # On CPUs float32 is exact and rarely slower; on GPUs what the base was stored in.
    default = torch.float32 if torch.device(device).type == "cpu" else checkpoint.main_dtype
    model = load_model(checkpoint.path, device=device, dtype=_dtype(dtype, default))
    running = max_running or DEFAULT_MAX_RUNNING.get(model.device.type, DEFAULT_MAX_RUNNING["cpu"])
    if cache_bytes is None:
        cache_bytes = default_cache_bytes(model.device, catalog.total_bytes())
    plan = plan_kv(model, max_running=running, cache_bytes=cache_bytes)
    name = Path(checkpoint.source).name
    return Service(
        catalog,
        checkpoint,
        Engine(model, max_running=running, plan=plan),
        base_name="base" if name in catalog.variants else name,
        cache_bytes=cache_bytes,
        limits=Limits(max_running=running, max_queue=max_queue),
        pin=tuple(pin),
    )


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
