"""What goes on in a server, as the JSON document that the status page reads."""

from typing import Any

from soupkit.version import __version__

from .service import Service
from .states import VariantStats


def overview(service: Service) -> dict[str, Any]:
    """The server, its queue, its memory, and every model with its traffic."""
    router, cache = service.router, service.router.cache
    residents, totals = service.residents(), service.metrics.totals()
    models = [service.base_name, *residents]
    state = "draining" if service.draining else "ready" if service.ready else "cannot generate"
    return {
        "version": __version__,
        "state": state,
        "still_seconds": service.engine.pulse.still_seconds(),
        "queue": {
            "running": router.num_running,
            "max_running": router.limits.max_running,
            "waiting": router.num_waiting,
            "max_queue": router.limits.max_queue,
        },
        "device": {
            "used_bytes": cache.used_bytes,
            "budget_bytes": cache.budget_bytes,
            "slots": cache.num_slots,
            "used_slots": len(cache),
        },
        "host": {"used_bytes": cache.host_used_bytes, "budget_bytes": cache.host_bytes},
        "models": [
            {
                "name": name,
                **_traffic(totals.get(name, {})),
                **service.metrics.latencies.summary(name),
                "variant": _variant(residents[name]) if name in residents else None,
            }
            for name in models
        ],
    }


def _traffic(totals: dict[str, int]) -> dict[str, int]:
    return {"requests": totals.get("requests", 0), "tokens": totals.get("tokens", 0)}


def _variant(stats: VariantStats) -> dict[str, Any]:
    return {
        "phase": stats.phase.value,
        "pinned": stats.pinned,
        "device_bytes": stats.device_bytes,
        "host_bytes": stats.host_bytes,
        "users": stats.users,
        "waiting": stats.waiting,
        "hits": stats.hits,
        "misses": stats.misses,
        "loads": stats.loads,
        "failures": stats.failures,
        "evictions": stats.evictions,
        "load_seconds": stats.load_seconds,
        "requests_per_second": stats.rate,
    }
