"""Whether a layer can take the Triton kernels; asked once, when its arena is made.

Imports neither triton nor a GPU runtime until there is a GPU to ask.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os

import torch

from soupkit_kernels.configs import MAX_PLANES

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of 16 inputs start where 16-byte loads may; without that the compiled code is several times
# slower than two plain products.
_MULTIPLE = 16


def why_not(
    device: torch.device | str, dtype: torch.dtype, in_features: int, planes: int
) -> str | None:
    """Why such a layer cannot take the Triton kernels; None where it can."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"tensors on {device}"
    if os.environ.get("SOUPKIT_KERNEL") == "torch":
        return "SOUPKIT_KERNEL=torch"
    if dtype not in DTYPES:
        return f"{dtype} on a GPU"
    if in_features % _MULTIPLE:
        return f"in_features {in_features} is no multiple of {_MULTIPLE}"
    if planes > MAX_PLANES:
        return f"{planes} planes, more than {MAX_PLANES}"
    return _installed() or _able(device)


@functools.cache
def _installed() -> str | None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed: pip install triton"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_TRITON:
        return f"triton {version}: needs {'.'.join(map(str, OLDEST_TRITON))} or newer"
    return None


@functools.cache
def _able(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "an AMD GPU: the kernels were never run on one"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}: needs 8.0 or newer"
    return None
