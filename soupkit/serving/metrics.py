"""What Prometheus is told. Labels are model ids of the family only, so that they stay few."""

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters and gauges of one server; gauges are set when they are asked for."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"soupkit_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"soupkit_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Sequences asked for", ("model",))
        self.tokens = counter("generated_tokens", "Tokens generated", ("model",))
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of accepted requests", ("model",)
        )
        self.hits = counter("cache_hits", "Requests whose variant was resident")
        self.misses = counter("cache_misses", "Requests whose variant was not resident")
        self.loads = counter("loads", "Variants loaded into the cache")
        self.load_failures = counter("load_failures", "Loads that failed")
        self.evictions = counter("evictions", "Variants evicted")
        self.load_seconds = Histogram(
            "soupkit_load_seconds",
            "From the decision to load to resident",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "soupkit_time_to_first_token_seconds",
            "From arrival to the first token",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.resident = gauge(
            "variant_resident_bytes", "Bytes a variant holds in the cache", ("model",)
        )
        self.used_bytes = gauge("cache_used_bytes", "Bytes of resident variants")
        self.arena_bytes = gauge(
            "arena_bytes", "Device memory of the slots of packed deltas, free slots too"
        )
        self.budget_bytes = gauge("cache_budget_bytes", "Bytes the cache may hold")
        self.waiting = gauge("requests_waiting", "Requests waiting for a load or their turn")
        self.running = gauge("requests_running", "Requests in the engine")
        self.ready = gauge("ready", "1 if the server can generate")

    def render(self) -> bytes:
        return generate_latest(self._registry)
