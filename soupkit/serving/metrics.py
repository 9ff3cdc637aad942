"""What Prometheus is told. Labels are model ids of the family only, so that they stay few.

Traffic is counted as it happens; where each variant is, is looked up when it is asked for, for all
variants of the family and not only those with traffic: a router in front can send requests to the
server that holds their variant.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .latency import Latencies
from .states import Phase, VariantStats

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.001, 0.0025, *_SECONDS[:9])

Residents = Callable[[], Mapping[str, VariantStats]]


class Metrics:
    """The counters and gauges of one server; gauges are set when they are asked for."""

    def __init__(self, residents: Residents, reused_tokens: Callable[[], int]) -> None:
        """At the time of a scrape: what to say of each variant, by name, and how many tokens of
        prompts the prefix cache had.
        """
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"soupkit_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"soupkit_{name}", text, registry=registry)

        def histogram(
            name: str, text: str, labels: tuple[str, ...] = (), *, buckets: tuple[float, ...]
        ) -> Histogram:
            return Histogram(f"soupkit_{name}", text, labels, buckets=buckets, registry=registry)

        model = ("model",)
        self.requests = counter("requests", "Sequences asked for", model)
        self.tokens = counter("generated_tokens", "Tokens generated", model)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests", model)
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token",
            model,
            buckets=_SECONDS,
        )
        self.next_token_seconds = histogram(
            "time_per_output_token_seconds",
            "From one token of a sequence to the next",
            model,
            buckets=_TOKEN_SECONDS,
        )
        self._by_model = (
            self.requests,
            self.tokens,
            self.prompt_tokens,
            self.first_token_seconds,
            self.next_token_seconds,
        )
        self._models: frozenset[str] = frozenset()
        self.latencies = Latencies()

        self.errors = counter("errors", "Requests that were answered by an error", ("status",))
        self.hits = counter("cache_hits", "Requests whose variant was resident")
        self.misses = counter("cache_misses", "Requests whose variant was not resident")
        self.loads = counter("loads", "Variants loaded into the cache")
        self.load_failures = counter("load_failures", "Loads that failed")
        self.evictions = counter("evictions", "Variants evicted")
        self.load_seconds = histogram(
            "load_seconds", "From the decision to load to resident", buckets=_SECONDS
        )
        self.used_bytes = gauge("cache_used_bytes", "Device bytes of the slots in use")
        self.budget_bytes = gauge("cache_budget_bytes", "Device bytes the slots may have")
        self.slots = gauge("cache_slots", "Variants that the device has room for")
        self.host_used_bytes = gauge("host_cache_used_bytes", "Bytes of variants in host memory")
        self.host_budget_bytes = gauge("host_cache_budget_bytes", "Bytes they may have there")
        self.arena_bytes = gauge(
            "arena_bytes", "Device memory of the slots of packed deltas, free slots too"
        )
        self.waiting = gauge("requests_waiting", "Requests waiting for a load or their turn")
        self.running = gauge("requests_running", "Requests in the engine")
        self.ready = gauge("ready", "1 if the server can generate")
        registry.register(_Residency(residents, reused_tokens))

    def keep(self, models: Iterable[str]) -> None:
        """Has these model ids as labels, from 0 on, and forgets all others."""
        wanted = frozenset(models)
        for metric in self._by_model:
            for name in sorted(self._models - wanted):
                metric.remove(name)
            for name in sorted(wanted - self._models):
                metric.labels(name)
        self._models = wanted
        self.latencies.keep(wanted)

    def count_request(self, model: str, *, prompt_tokens: int) -> None:
        """A sequence was accepted."""
        # A label that is no longer kept would come back for ever.
        if model in self._models:
            self.requests.labels(model).inc()
            self.prompt_tokens.labels(model).inc(prompt_tokens)

    def count_token(self, model: str, *, seconds: float, first: bool) -> None:
        """A token came so long after its request, or after the token before it."""
        if model in self._models:
            histogram = self.first_token_seconds if first else self.next_token_seconds
            histogram.labels(model).observe(seconds)
            self.tokens.labels(model).inc()
            self.latencies.note(model, seconds, first=first)

    def totals(self) -> dict[str, dict[str, int]]:
        """Requests and tokens so far, by model."""
        found: dict[str, dict[str, int]] = {model: {} for model in self._models}
        named = {"requests": self.requests, "tokens": self.tokens}
        for name, counter in named.items():
            for sample in (sample for metric in counter.collect() for sample in metric.samples):
                if sample.name.endswith("_total"):
                    found[sample.labels["model"]][name] = int(sample.value)
        return found

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Residency(Collector):
    """Where each variant of the family is, and what happened to it; what prompts shared."""

    def __init__(self, residents: Residents, reused_tokens: Callable[[], int]) -> None:
        self._residents, self._reused_tokens = residents, reused_tokens

    def describe(self) -> Iterable[Metric]:
        """Nothing: there is no server to look at while this is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One metric a figure, a label for each variant."""
        found = sorted(self._residents().items())
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"soupkit_variant_{name}", text, labels=("model",))
            for model, stats in found:
                gauge.add_metric((model,), value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"soupkit_variant_{name}", text, labels=("model",))
            for model, stats in found:
                counter.add_metric((model,), value(stats))
            yield counter
        phases = GaugeMetricFamily(
            "soupkit_variant_phase", "1 for the phase it is in", labels=("model", "phase")
        )
        for model, stats in found:
            for phase in Phase:
                phases.add_metric((model, phase.value), float(stats.phase is phase))
        yield phases
        text = "Prompt tokens that were not computed again"
        reused = self._reused_tokens()
        yield CounterMetricFamily("soupkit_prompt_tokens_reused", text, value=reused)


_Figure = tuple[str, str, Callable[[VariantStats], float]]
_GAUGES: tuple[_Figure, ...] = (
    ("resident_bytes", "Device bytes it holds", lambda s: s.device_bytes),
    ("host_bytes", "Host bytes it holds", lambda s: s.host_bytes),
    ("pinned", "1 if it is not evicted", lambda s: s.pinned),
    ("users", "Requests that run or come next", lambda s: s.users),
    ("waiting", "Requests that wait", lambda s: s.waiting),
    ("last_load_seconds", "From the disk to the host, of late", lambda s: s.load_seconds),
    ("last_install_seconds", "From the host to its slot, of late", lambda s: s.install_seconds),
    ("requests_per_second", "Decayed rate of its requests", lambda s: s.rate),
)
_COUNTERS: tuple[_Figure, ...] = (
    ("hits", "Requests that found it resident", lambda s: s.hits),
    ("misses", "Requests that did not", lambda s: s.misses),
    ("loads", "Loads", lambda s: s.loads),
    ("load_failures", "Loads that failed", lambda s: s.failures),
    ("evictions", "Evictions", lambda s: s.evictions),
)
