"""A family behind Ray Serve: replicas on one machine or a cluster, one OpenAI-compatible address.

    pip install "soupkit[ray]"
    serve run recipes.serve.ray_family:app family=/data/family replicas=3
    serve run recipes.serve.ray_family:app family=/data/family replicas=8 num_gpus=1 \
        api_key_file=/etc/soupkit/api-keys admin_key_file=/etc/soupkit/admin-keys

from the folder that holds `recipes`; in a config file of Ray they are the application's `args`.
Every node that Ray may place a replica on needs the family's folder at that path, and its base at
the path that the family names (or base=). The files of keys are read on the node of the deployment
`Ingress` alone; Ray, its dashboard and its logs have their paths only. A variant that is exported
into the family later is served without a restart. Ray replaces a replica that dies.
"""

from collections.abc import Mapping
from typing import Any

from soupkit.serving.ray_app import family_app
from soupkit.serving.replica_process import ReplicaSettings

TEXTS = ("family", "base", "device", "dtype", "pool", "adapters")
COUNTS = ("cache_bytes", "host_cache_bytes", "max_running", "max_queue", "auto_pin")
KEYS = ("api_key_file", "admin_key_file")
KNOWN = (*TEXTS, *COUNTS, "max_wait_seconds", "pin", "replicas", "num_gpus", *KEYS)


def app(arguments: Mapping[str, Any]) -> Any:
    """The application that `serve run` starts, of the words after its name."""
    unknown = sorted(set(arguments) - set(KNOWN))
    if unknown or not arguments.get("family"):
        what = f"{unknown[0]}= is unknown" if unknown else "family= is missing"
        raise ValueError(f"{what}; give {', '.join(f'{name}=' for name in KNOWN)}")
    numbers = {name: _number(name, value) for name, value in arguments.items() if _is_number(name)}
    replicas, num_gpus = numbers.pop("replicas", 1), numbers.pop("num_gpus", 0.0)
    texts = {name: str(arguments[name]) for name in TEXTS if name in arguments}
    pins = tuple(filter(None, str(arguments.get("pin", "")).split(",")))
    keys = {name: str(arguments[name]) for name in KEYS if name in arguments}
    settings = ReplicaSettings(**texts, **numbers, pin=pins)
    return family_app(settings, replicas=replicas, num_gpus=num_gpus, **keys)


def _is_number(name: str) -> bool:
    return name in (*COUNTS, "max_wait_seconds", "replicas", "num_gpus")


def _number(name: str, value: Any) -> Any:
    is_whole = name in (*COUNTS, "replicas")
    try:
        return int(str(value)) if is_whole else float(str(value))
    except ValueError:
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{name}={value}: needs {kind}") from None
