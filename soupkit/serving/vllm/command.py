"""vLLM's own OpenAI server, started for a family: what of `soupkit serve` it is told, and how.

The process becomes vLLM's (exec), which loads the plug-in by its entry point. A flag that vLLM has
nothing for is refused by name.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from soupkit.bundle import Family, open_family, open_variant
from soupkit.checkpoint import Checkpoint
from soupkit.config import BASE_NAME
from soupkit.errors import BundleError, ServingError
from soupkit.family import open_base
from soupkit.manifest import Manifest
from soupkit.serving.shape import outline
from soupkit_kernels.slots import Room, form_of

from .settings import FAMILY, HOST_BYTES, PIN

MODULE = "vllm.entrypoints.openai.api_server"
# Flags of `soupkit serve` that vLLM's server has nothing for, and what to do instead.
NOT_VLLM = {
    "device": "vLLM computes where it was built for; choose GPUs with CUDA_VISIBLE_DEVICES",
    "pool": "adapters of a pool are served by --engine transformers only",
    "adapters": "adapters of a pool are served by --engine transformers only",
    "auto-pin": "name what stays with --pin",
    "max-queue": "vLLM bounds no queue for itself; bound it in what stands in front of it",
    "replicas": "start vLLM's servers side by side, with a router in front",
    "max-wait": "vLLM bounds no waiting; bound it in what stands in front of it",
    "admin-key-file": "vLLM knows one kind of key; SOUPKIT_RUNTIME_LOADS=1 lets whoever has it "
    "load and unload",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A program's arguments, and what is added to the environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def command(
    family: str | Path,
    *,
    base: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    cache_bytes: int | None = None,
    host_cache_bytes: int | None = None,
    pin: Sequence[str] = (),
    max_running: int | None = None,
    keys: Sequence[str] = (),
    tensor_parallel: int = 1,
) -> Command:
    """How vLLM is started for a family; arguments as in `soupkit.serving.server.run`.

    Args:
        cache_bytes: of slots of variants on each GPU; by default all variants have one.
        host_cache_bytes: of copies of variants in host memory.
        keys: at most one; handed on in the environment, where other users do not see it.
        tensor_parallel: GPUs that share the base and each variant.
    Raises:
        SoupkitError: the family or the base cannot be served. ValueError: an argument.
    """
    if not port:
        raise ValueError("--port 0: vLLM does not tell which port it took; name one")
    if len(keys) > 1:
        raise ValueError(
            f"--api-key-file holds {len(keys)} keys, vLLM takes one of the environment"
        )
    opened = open_family(family)
    checkpoint = open_base(opened, base)
    unknown = [name for name in pin if name not in opened.variants]
    if unknown:
        known = ", ".join(opened.variants) or "none"
        raise ServingError(f"--pin {unknown[0]}: there is no such variant, only {known}")
    name = checkpoint.path.name
    computes_in = dtype or _default_dtype(checkpoint)
    slots = _slots(opened, cache_bytes, computes_in, tensor_parallel)
    arguments = [
        "--model", str(checkpoint.path.absolute()),
        "--served-model-name", BASE_NAME if name in opened.variants else name,
        "--host", host, "--port", str(port), "--dtype", computes_in,
        # max-lora-rank: of adapters that are not served; the least takes the least memory.
        "--enable-lora", "--max-loras", str(max(1, slots - len(pin))), "--max-lora-rank", "1",
        "--enforce-eager", "--tensor-parallel-size", str(tensor_parallel),
    ]  # fmt: skip
    if max_running is not None:
        arguments += ["--max-num-seqs", str(max_running)]
    environment = {FAMILY: str(Path(family).absolute())}
    if pin:
        environment[PIN] = ",".join(pin)
    if host_cache_bytes is not None:
        environment[HOST_BYTES] = str(host_cache_bytes)
    if keys:
        environment["VLLM_API_KEY"] = keys[0]
    return Command(tuple(arguments), environment)


def run(found: Command) -> None:
    """Becomes vLLM's server.

    Raises:
        ServingError: vLLM is not installed here.
    """
    if find_spec("vllm") is None:
        raise ServingError('--engine vllm: pip install "soupkit[vllm]", in a venv of its own')
    told = [f"{key}={value}" for key, value in found.environment.items() if "KEY" not in key]
    sys.stderr.write(f"{' '.join(told)} python -m {MODULE} {' '.join(found.arguments)}\n")
    sys.stderr.flush()
    arguments = [sys.executable, "-m", MODULE, *found.arguments]
    os.execve(sys.executable, arguments, {**os.environ, **found.environment})


def _default_dtype(checkpoint: Checkpoint) -> str:
    """On CPUs float32 is exact and rarely slower; on GPUs what the base was stored in."""
    dtype = checkpoint.main_dtype if torch.cuda.is_available() else torch.float32
    return str(dtype).removeprefix("torch.")


def _slots(family: Family, cache_bytes: int | None, dtype: str, ranks: int) -> int:
    """Slots that the budget has room for; without one, one for each variant."""
    if cache_bytes is None:
        return max(1, len(family.variants))
    needed = slot_bytes(_manifests(family), getattr(torch, dtype)) // ranks
    if needed > cache_bytes:
        raise ServingError(
            f"--cache-bytes {cache_bytes} is too small for a slot of this family, which takes "
            f"{needed} bytes on each GPU; give more"
        )
    return max(1, min(len(family.variants), cache_bytes // max(1, needed)))


def _manifests(family: Family) -> list[Manifest]:
    found = []
    for name in family.variants:
        try:
            found.append(open_variant(family.folder(name)).manifest)
        except BundleError as error:
            sys.stderr.write(f"soupkit: variant {name!r} cannot be opened: {error}\n")
    return found


def slot_bytes(manifests: Sequence[Manifest], dtype: torch.dtype) -> int:
    """Bytes of a slot that takes any of these, about: ranks and GPUs pad theirs."""
    sizes: dict[str, int] = {}
    rooms: dict[str, Room] = {}
    for manifest in manifests:
        deltas, raw = outline(manifest)
        for name, delta in deltas.items():
            room = Room(
                delta.out_features, delta.in_features, dtype, False, frozenset({form_of(delta)})
            )
            rooms[name] = rooms[name].merged(room) if name in rooms else room
        for name, tensor in raw.items():
            sizes[name] = tensor.numel() * dtype.itemsize
    return sum(room.nbytes for room in rooms.values()) + sum(sizes.values())
