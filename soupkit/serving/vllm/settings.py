"""What the plug-in is told: environment variables, since vLLM's processes inherit those.

Without SOUPKIT_FAMILY the plug-in leaves vLLM as it is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from soupkit.errors import ServingError

FAMILY = "SOUPKIT_FAMILY"
PIN = "SOUPKIT_PIN"
HOST_BYTES = "SOUPKIT_HOST_CACHE_BYTES"
STORE = "SOUPKIT_STORE"
CHANGES = "SOUPKIT_RUNTIME_LOADS"


@dataclass(frozen=True, slots=True)
class Settings:
    """What to serve.

    Attributes:
        family: its folder. pins: variants that are loaded at the start and leave slots last.
        host_bytes: of variants in host memory; None: half of what is free where they lie.
        store: where they lie; None: /dev/shm where there is one, else the folder for temporary
            files. changes: whether the routes that load and unload do so.
    """

    family: Path
    pins: tuple[str, ...] = ()
    host_bytes: int | None = None
    store: Path | None = None
    changes: bool = False


def settings(environment: Mapping[str, str] | None = None) -> Settings | None:
    """What the environment says; None if it names no family.

    Raises:
        ServingError: a value is none.
    """
    found = os.environ if environment is None else environment
    if not found.get(FAMILY):
        return None
    text = found.get(HOST_BYTES)
    if text is not None and not text.isdecimal():
        raise ServingError(f"{HOST_BYTES}={text!r}: must be a number of bytes")
    changes = found.get(CHANGES, "0")
    if changes not in ("0", "1"):
        raise ServingError(f"{CHANGES}={changes!r}: must be 0 or 1")
    store = found.get(STORE)
    return Settings(
        Path(found[FAMILY]).absolute(),
        tuple(name for name in found.get(PIN, "").split(",") if name),
        None if text is None else int(text),
        Path(store).absolute() if store else None,
        changes == "1",
    )
