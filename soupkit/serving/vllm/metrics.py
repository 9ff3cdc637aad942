"""What of a family's variants vLLM's /metrics says beside vLLM's own: which lie checked in host
memory, and what happened to them.

Names, texts and units are those of `soupkit serve` (soupkit.serving.metrics) where they mean the
same. Which slots hold what is known to the workers only and is not told; vLLM's own metrics count
requests and tokens. vLLM shows what is registered in prometheus_client's registry, unless it is
told to join the files of several processes (PROMETHEUS_MULTIPROC_DIR).
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from soupkit.serving.states import Phase

from .copies import Copies
from .held import Copy
from .tally import Counts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHASES = (Phase.DISK, Phase.QUEUED, Phase.LOADING, Phase.HOST, Phase.DRAINING, Phase.FAILED)


class VariantMetrics(Collector):
    """The variants of one server; reads them at each scrape, on whatever thread that is."""

    def __init__(self, copies: Copies) -> None:
        """Counts loads from now on."""
        self._copies = copies
        # Of its own, so that it can be made twice in a process.
        self._own = CollectorRegistry()
        seconds = Histogram(
            "soupkit_load_seconds",
            "From the decision to load to resident",
            buckets=_SECONDS,
            registry=self._own,
        )
        copies.tally.on_load = seconds.observe

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is is looked up when it is asked for."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics of all variants together, then of each one."""
        copies = self._copies
        held, total = copies.held, copies.tally.total
        yield from self._own.collect()
        for name, text, count in _TOTALS:
            yield CounterMetricFamily(f"soupkit_{name}", text, value=count(total))
        used = sum(copy.nbytes for copy in held)
        for name, text, value in (
            ("host_cache_used_bytes", "Bytes of variants in host memory", used),
            ("host_cache_budget_bytes", "Bytes they may have there", copies.store.budget),
        ):
            yield GaugeMetricFamily(f"soupkit_{name}", text, value=value)
        names = sorted({*copies.names(), *(copy.ref.name for copy in held)})
        by_name = {name: [c for c in held if c.ref.name == name] for name in names}
        yield from self._of_each(by_name)

    def _of_each(self, held: dict[str, list[Copy]]) -> Iterator[Metric]:
        copies, label = self._copies, ("model",)
        gauges: tuple[tuple[str, str, Callable[[str], float]], ...] = (
            ("host_bytes", "Host bytes it holds", lambda n: sum(c.nbytes for c in held[n])),
            ("pinned", "1 if it is not evicted", lambda n: n in copies.pins),
            (
                "users",
                "Requests that run or come next",
                lambda n: sum(sum(c.users.values()) for c in held[n]),
            ),
            ("waiting", "Requests that wait", lambda n: _counts(copies, n).waiting),
            (
                "last_load_seconds",
                "From the disk to the host, of late",
                lambda n: _counts(copies, n).seconds,
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"soupkit_variant_{name}", text, labels=label)
            for model in held:
                gauge.add_metric((model,), value(model))
            yield gauge
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(f"soupkit_variant_{name}", text, labels=label)
            for model in held:
                counter.add_metric((model,), count(_counts(copies, model)))
            yield counter
        yield self._phases(held)

    def _phases(self, held: dict[str, list[Copy]]) -> Metric:
        loading, failing = self._copies.loading(), self._copies.failing()
        found = GaugeMetricFamily(
            "soupkit_variant_phase", "1 for the phase it is in", labels=("model", "phase")
        )
        for model, mine in held.items():
            if any(not copy.is_leaving for copy in mine):
                now = Phase.HOST
            elif model in loading:
                now = Phase.LOADING if loading[model] else Phase.QUEUED
            elif mine:
                now = Phase.DRAINING
            else:
                now = Phase.FAILED if model in failing else Phase.DISK
            for phase in _PHASES:
                found.add_metric((model, phase.value), float(phase is now))
        return found


def show(copies: Copies) -> None:
    """Has vLLM's /metrics tell of these variants, in the process that answers it."""
    REGISTRY.register(VariantMetrics(copies))


_Count = tuple[str, str, Callable[[Counts], float]]
_TOTALS: tuple[_Count, ...] = (
    ("loads", "Variants loaded into the cache", lambda c: c.loads),
    ("load_failures", "Loads that failed", lambda c: c.failures),
    ("evictions", "Variants evicted", lambda c: c.evictions),
)
_COUNTERS: tuple[_Count, ...] = (
    ("loads", "Loads", lambda c: c.loads),
    ("load_failures", "Loads that failed", lambda c: c.failures),
    ("evictions", "Evictions", lambda c: c.evictions),
)


def _counts(copies: Copies, name: str) -> Counts:
    """Zeros for a variant that nobody asked for; adds none."""
    return copies.tally.by_name.get(name) or Counts()
