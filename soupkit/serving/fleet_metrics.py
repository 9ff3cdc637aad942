"""What Prometheus is told of several replicas: each sample with its replica, and the front's own.

Sums over replicas are the reader's (`sum without (replica)`): a replica that is started anew counts
from 0, which only a rate of its own survives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


@dataclass(slots=True)
class FrontCounts:
    """What happened at the front."""

    retries: int = 0  # requests that went to another replica, as one was lost or stopping
    lost_streams: int = 0  # that had begun when their replica was lost


def render(
    texts: Mapping[int, str],
    counts: FrontCounts,
    *,
    up: Sequence[bool],
    restarts: Sequence[int],
    open_requests: Sequence[int],
    copies: int,
) -> bytes:
    """The page. texts: those of the replicas that are up, by index; the lists by replica."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    registry.register(_Front(counts, up, restarts, open_requests, copies))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Every family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                kept = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(replica)}
                    kept.add_sample(sample.name, labels, sample.value)
        yield from families.values()


class _Front(Collector):
    def __init__(
        self,
        counts: FrontCounts,
        up: Sequence[bool],
        restarts: Sequence[int],
        open_requests: Sequence[int],
        copies: int,
    ) -> None:
        self._counts, self._copies = counts, copies
        self._up, self._restarts, self._open = up, restarts, open_requests

    def collect(self) -> Iterator[Metric]:
        """The front's own."""
        gauges: tuple[tuple[str, str, Iterable[float]], ...] = (
            ("soupkit_replica_up", "1 if it can generate", self._up),
            ("soupkit_replica_open", "Sequences it was given and has not answered", self._open),
        )
        for name, text, values in gauges:
            gauge = GaugeMetricFamily(name, text, labels=("replica",))
            for replica, value in enumerate(values):
                gauge.add_metric((str(replica),), float(value))
            yield gauge
        counter = CounterMetricFamily(
            "soupkit_replica_restarts", "Times it was started anew", labels=("replica",)
        )
        for replica, value in enumerate(self._restarts):
            counter.add_metric((str(replica),), value)
        yield counter
        counts = self._counts
        for name, text, value in (
            ("retries", "Requests that went to another replica", counts.retries),
            ("lost_streams", "Streams that were cut short with an error", counts.lost_streams),
            ("copies", "Loads of variants that another replica holds", self._copies),
        ):
            yield CounterMetricFamily(f"soupkit_front_{name}", text, value=value)
