"""What several replicas tell, as one server would: status, what an unload freed."""

from collections.abc import Mapping, Sequence
from typing import Any

from soupkit.version import __version__

from .states import Phase

# Of a variant in several places the first of these.
_BEST = (
    Phase.RESIDENT, Phase.INSTALLING, Phase.LOADING, Phase.QUEUED, Phase.DRAINING, Phase.HOST,
    Phase.FAILED, Phase.DISK,
)  # fmt: skip
_RANK = {phase.value: rank for rank, phase in enumerate(_BEST)}
_SUMS = (
    "device_bytes", "host_bytes", "users", "waiting", "hits", "misses", "loads", "failures",
    "evictions", "requests_per_second",
)  # fmt: skip
_TIMES = ("first_token_p50", "first_token_p99", "next_token_p50", "next_token_p99")


def merged_status(told: Sequence[Mapping[str, Any]], *, state: str) -> dict[str, Any]:
    """One status of those of all replicas that are up: sums; of times the longest."""

    def total(part: str) -> dict[str, int]:
        names = told[0][part] if told else ()
        return {name: sum(one[part][name] for one in told) for name in names}

    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for one in told:
        for model in one["models"]:
            by_name.setdefault(model["name"], []).append(model)
    return {
        "version": __version__,
        "state": state,
        "queue": total("queue"),
        "device": total("device"),
        "host": total("host"),
        "models": [_model(models) for models in by_name.values()],
    }


def _model(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    variants = [model["variant"] for model in models if model["variant"]]
    return {
        "name": models[0]["name"],
        "requests": sum(model["requests"] for model in models),
        "tokens": sum(model["tokens"] for model in models),
        **{name: _longest(model[name] for model in models) for name in _TIMES},
        "variant": _variant(variants) if variants else None,
    }


def _variant(variants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "phase": min((one["phase"] for one in variants), key=_RANK.__getitem__),
        "pinned": any(one["pinned"] for one in variants),
        **{name: sum(one[name] for one in variants) for name in _SUMS},
        "load_seconds": max(one["load_seconds"] for one in variants),
    }


def _longest(times: Any) -> float | None:
    return max((time for time in times if time is not None), default=None)


def merged_unload(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of an unload of all replicas."""
    freed = [one["freed_bytes"] for one in told]
    return {
        **told[0],
        "freed_bytes": {tier: sum(one[tier] for one in freed) for tier in freed[0]},
        "shared_with": sorted({name for one in told for name in one["shared_with"]}),
        "requests_ended": sum(one["requests_ended"] for one in told),
        "seconds": max(one["seconds"] for one in told),
    }
