"""What vLLM's /metrics says of variants, without vLLM: the stand-in engine of test_vllm_copies."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving_kit import make_family
from test_vllm_copies import Engine, Held, run, until

from soupkit.errors import ServingError
from soupkit.serving.metrics import Metrics
from soupkit.serving.vllm.copies import Copies
from soupkit.serving.vllm.metrics import VariantMetrics

NAMES = ("linear", "norms", "rich")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"), names=NAMES) / "family"


def reader(copies: Copies) -> Callable[[], dict[str, float]]:
    """What a scrape finds, "name" or "name,label,...": on another thread, as vLLM's is."""
    registry = CollectorRegistry()
    registry.register(VariantMetrics(copies))

    def read() -> dict[str, float]:
        texts: list[bytes] = []
        thread = threading.Thread(target=lambda: texts.append(generate_latest(registry)))
        thread.start()
        thread.join()
        return {
            ",".join([sample.name, *sample.labels.values()]): sample.value
            for found in text_string_to_metric_families(texts[0].decode())
            for sample in found.samples
        }

    return read


def test_a_scrape_says_where_each_variant_is_and_what_happened_to_it(family: Path) -> None:
    """R11."""

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        read = reader(copies)
        sizes = {name: store.size(ref) for name, ref in store.family.variants.items()}

        def phase(name: str) -> str:
            (found,) = [
                key.rpartition(",")[2]
                for key, value in read().items()
                if key.startswith(f"soupkit_variant_phase,{name},") and value
            ]
            return found

        assert {phase(name) for name in NAMES} == {"disk"}
        assert read()["soupkit_host_cache_budget_bytes"] == store.budget
        store.gates["linear"] = threading.Event()
        waiting = [asyncio.create_task(copies.take("linear")) for _ in range(3)]
        await until(lambda: store.began == ["linear"])
        assert phase("linear") == "loading"
        assert read()["soupkit_variant_waiting,linear"] == 3
        store.gates["linear"].set()
        request = (await asyncio.gather(*waiting))[0]
        async with copies.using(request, "same"), copies.using(request, "same"):
            found = read()
            assert phase("linear") == "host"
            assert found["soupkit_variant_host_bytes,linear"] == sizes["linear"]
            assert found["soupkit_host_cache_used_bytes"] == sizes["linear"]
            assert found["soupkit_variant_users,linear"] == 2
            assert found["soupkit_variant_waiting,linear"] == 0
            assert found["soupkit_variant_pinned,linear"] == 1
            assert found["soupkit_variant_pinned,rich"] == 0
            unloading = asyncio.create_task(copies.unload("linear"))
            await until(lambda: "linear" not in copies.names())
            assert phase("linear") == "draining"
        await unloading
        assert not [key for key in read() if "linear" in key]
        engine.refuses = True
        for _ in range(2):
            with pytest.raises(ServingError):
                await copies.take("norms")
        assert phase("norms") == "failed"
        found = read()
        assert found["soupkit_load_failures_total"] == 1
        assert found["soupkit_variant_load_failures_total,norms"] == 1
        assert found["soupkit_loads_total"] == found["soupkit_load_seconds_count"] == 1
        assert found["soupkit_variant_loads_total,rich"] == 0
        assert found["soupkit_host_cache_used_bytes"] == 0

    run(family, story, pins=frozenset({"linear"}))


def test_what_gave_way_to_another_is_counted_once(family: Path) -> None:
    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        read = reader(copies)
        refs = store.family.variants
        store.budget = max(store.size(refs[name]) for name in ("linear", "norms"))
        for name in ("linear", "norms", "linear"):
            await copies.take(name)
        found = read()
        assert found["soupkit_evictions_total"] == 2
        assert found["soupkit_variant_evictions_total,linear"] == 1
        assert found["soupkit_variant_loads_total,linear"] == 2
        assert found["soupkit_loads_total"] == 3

    run(family, story)


def test_names_texts_and_kinds_are_those_of_soupkits_own_server(family: Path) -> None:
    own = {
        found.name: (found.documentation, found.type)
        for found in text_string_to_metric_families(Metrics(dict, int).render().decode())
    }

    async def story(copies: Copies, engine: Engine, store: Held) -> None:
        mine = {
            found.name: (found.documentation, found.type)
            for found in VariantMetrics(copies).collect()
        }
        assert len(mine) == 15
        for name, meaning in mine.items():
            assert own[name] == meaning

    run(family, story)
