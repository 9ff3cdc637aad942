"""A family behind Ray Serve: replicas on one machine or a cluster, one OpenAI-compatible address.

    pip install "soupkit[ray]"
    serve run recipes.serve.ray_family:app family=/data/family replicas=3
    serve run recipes.serve.ray_family:app family=/data/family replicas=8 num_gpus=1

from the folder that holds `recipes`. Every node that Ray may place a replica on needs the family's
folder at that path, and its base at the path that the family names (or base=). A variant that is
exported into the family later is served without a restart. Ray replaces a replica that dies; to put
the address behind keys, put a proxy in front.
"""

from typing import Any

from soupkit.serving.ray_app import family_app
from soupkit.serving.replica_process import ReplicaSettings

KNOWN = ("base", "cache_bytes", "device", "family", "max_running", "num_gpus", "replicas")


def app(arguments: dict[str, str]) -> Any:
    """The application that `serve run` starts, of the words after its name."""
    unknown = sorted(set(arguments) - set(KNOWN))
    if unknown or "family" not in arguments:
        what = f"{unknown[0]}= is unknown" if unknown else "family= is missing"
        raise SystemExit(f"{what}; give {', '.join(f'{name}=' for name in KNOWN)}")
    numbers = {n: int(arguments[n]) for n in ("cache_bytes", "max_running") if n in arguments}
    settings = ReplicaSettings(
        arguments["family"],
        base=arguments.get("base"),
        device=arguments.get("device"),
        cache_bytes=numbers.get("cache_bytes"),
        max_running=numbers.get("max_running"),
    )
    return family_app(
        settings,
        replicas=int(arguments.get("replicas", "1")),
        num_gpus=float(arguments.get("num_gpus", "0")),
    )
