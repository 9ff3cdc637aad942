"""What a person and what Prometheus sees of a server: the status page, its JSON, the metrics."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_kit import ABSENT, CHROMIUM, browsing
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from serving_kit import VARIANTS, WAIT, add_to_family, make_family, metrics_of, serving, wait_for

from soupkit.serving.latency import KEPT, Latencies
from soupkit.serving.status_page import PAGE, SCRIPT


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root, pin=("norms",), cache_bytes=10_000_000) as (_, address):
        yield address


def ask(url: str, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": "ask", "max_tokens": 8, "ignore_eos": True} | body
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)


def test_the_document_has_every_model_with_its_traffic(url: str) -> None:
    before = {m["name"]: m for m in httpx.get(f"{url}/status").json()["models"]}
    assert ask(url, "linear", n=2).status_code == 200
    assert ask(url, "base").status_code == 200
    status = httpx.get(f"{url}/status").json()
    models = {model["name"]: model for model in status["models"]}
    assert list(models) == ["base", *sorted(VARIANTS)]
    assert status["state"] == "ready"
    assert models["base"]["variant"] is None
    linear, norms = models["linear"]["variant"], models["norms"]["variant"]
    assert models["linear"]["requests"] - before["linear"]["requests"] == 2
    assert models["linear"]["tokens"] - before["linear"]["tokens"] == 16
    assert 0 < models["linear"]["next_token_p50"] <= models["linear"]["next_token_p99"]
    assert (linear["phase"], linear["pinned"]) == ("resident", False)
    assert linear["hits"] + linear["misses"] >= 2
    assert linear["loads"] >= 1
    assert linear["load_seconds"] > 0
    assert linear["requests_per_second"] > 0
    wait_for(lambda: metrics_of(url)["soupkit_variant_resident_bytes,norms"] > 0, "the pin loads")
    assert norms["pinned"]
    assert status["device"]["budget_bytes"] == 10_000_000
    json.dumps(status, allow_nan=False)


# R11, SV18: metrics showed what has traffic, not what is resident.
def test_metrics_tell_of_every_variant_and_add_up(url: str) -> None:
    for name in ("linear", "embed"):
        assert ask(url, name).status_code == 200
    text = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.get("model", "base") in {"base", *VARIANTS}
    values = metrics_of(url)
    for figure in ("hits_total", "misses_total", "evictions_total", "users", "waiting", "pinned"):
        labels = {s.labels["model"] for f in families.values() for s in f.samples
                  if s.name == f"soupkit_variant_{figure}"}  # fmt: skip
        assert labels == set(VARIANTS), figure
    for total, each in (
        ("soupkit_cache_used_bytes", "soupkit_variant_resident_bytes"),
        ("soupkit_loads_total", "soupkit_variant_loads_total"),
        ("soupkit_cache_hits_total", "soupkit_variant_hits_total"),
        ("soupkit_cache_misses_total", "soupkit_variant_misses_total"),
    ):
        assert values[total] == sum(values[f"{each},{name}"] for name in VARIANTS), total
    assert values["soupkit_variant_pinned,norms"] == 1
    assert values["soupkit_variant_phase,linear,resident"] == 1
    assert values["soupkit_variant_phase,linear,disk"] == 0
    assert values["soupkit_variant_last_load_seconds,linear"] > 0
    assert values["soupkit_cache_slots"] >= 2
    for name in ("linear", "embed"):
        requests = values[f"soupkit_requests_total,{name}"]
        tokens = values[f"soupkit_generated_tokens_total,{name}"]
        assert values[f"soupkit_time_to_first_token_seconds_count,{name}"] == requests
        assert values[f"soupkit_time_per_output_token_seconds_count,{name}"] == tokens - requests


def test_errors_are_counted_by_status(url: str) -> None:
    before = metrics_of(url)
    assert ask(url, "missing").status_code == 404
    assert ask(url, "base", temperature=-1).status_code == 400
    after = metrics_of(url)
    for status in (400, 404):
        name = f"soupkit_errors_total,{status}"
        assert after[name] - before.get(name, 0) == 1


def test_labels_come_and_go_with_the_family(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    with serving(root, cache_bytes=10_000_000) as (server, url):
        assert metrics_of(url)["soupkit_requests_total,linear"] == 0
        assert ask(url, "linear").status_code == 200
        add_to_family(root, "fresh", lambda name: "_proj" in name, encoding="row", seed=3)
        assert metrics_of(url)["soupkit_requests_total,fresh"] == 0
        family = json.loads((root / "family" / "family.json").read_text())
        del family["variants"]["linear"]
        (root / "family" / "family.json").write_text(json.dumps(family))
        server._service.metrics.count_token("linear", seconds=0.1, first=False)
        assert ask(url, "missing").status_code == 404
        assert ask(url, "linear").status_code == 404
        assert not [key for key in metrics_of(url) if "linear" in key or "missing" in key]
        assert [m["name"] for m in httpx.get(f"{url}/status").json()["models"]] == ["base", "fresh"]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_times_that_were_seen(times: list[float]) -> None:
    kept = Latencies()
    for seconds in times:
        kept.note("m", seconds, first=True)
    found = kept.summary("m")
    for percent in (50, 99):
        value = found[f"first_token_p{percent}"]
        assert value in times
        assert 100 * sum(t <= value for t in times) >= percent * len(times)
        assert 100 * sum(t < value for t in times) < percent * len(times)
    assert found["next_token_p50"] is None


def test_only_the_latest_times_count() -> None:
    kept = Latencies()
    for seconds in [9.0] * 50 + [1.0] * KEPT:
        kept.note("m", seconds, first=False)
    assert kept.summary("m")["next_token_p99"] == 1.0
    kept.keep(["other"])
    assert kept.summary("m")["next_token_p99"] is None


def test_the_page_asks_nothing_of_anyone_else_and_runs_no_other_script(url: str) -> None:
    answer = httpx.get(f"{url}/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    assert not re.search(r"https?:|//\w|@import|url\(", PAGE)
    assert "innerHTML" not in SCRIPT
    policy = answer.headers["content-security-policy"]
    script = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason=ABSENT)
ROWS = (
    "[...document.querySelectorAll('#models tr')]"
    ".map((row) => [...row.children].map((cell) => cell.innerText))"
)


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_a_browser_shows_the_family_live(url: str, tmp_path: Path, width: int) -> None:
    for name in ("linear", "norms", "base"):
        assert ask(url, name).status_code == 200
    with browsing() as browser:
        browser.open(f"{url}/", width=width, height=800)
        wait_for(lambda: browser.run("document.querySelectorAll('#models tr').length") == 6, "rows")
        rows = {row[0]: row for row in browser.run(ROWS)}
        assert list(rows) == ["base", *sorted(VARIANTS)]
        assert "on device, pinned" in rows["norms"][1]
        assert "on device" in rows["linear"][1]
        assert browser.run("document.getElementById('state').innerText") == "ready"
        before = int(rows["linear"][8])
        assert ask(url, "linear").status_code == 200
        wait_for(lambda: int(browser.run(ROWS)[2][8]) == before + 8, "the page follows")
        # Nothing to scroll sideways: neither the page nor a cell in it.
        assert browser.run("document.documentElement.scrollWidth") <= width
        cells = "[...document.querySelectorAll('td, p')]"
        assert browser.run(f"{cells}.filter((c) => c.scrollWidth > c.clientWidth + 1).length") == 0
        asked = [
            event["params"]["request"]["url"]
            for event in browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert {one for one in asked if not one.startswith("data:")} == {f"{url}/", f"{url}/status"}
        faults = [e for e in browser.events if e["method"] in _FAULTS]
        assert not faults, faults
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size < 300_000


_FAULTS = ("Runtime.exceptionThrown", "Log.entryAdded")


@needs_chromium
def test_a_name_is_text_and_a_server_that_is_gone_is_said(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    hostile = "<img src=x onerror=\"document.title='owned'\">"
    with browsing() as browser:
        with serving(root) as (server, url):
            service = server._service
            residents, totals = service.residents, service.metrics.totals
            # No variant may be called so; the page does not rely on that.
            service.residents = lambda: {hostile: residents()["linear"]}
            service.metrics.totals = lambda: {hostile: totals()["linear"]}
            browser.open(f"{url}/", width=800, height=600)
            wait_for(lambda: browser.run("document.querySelectorAll('#models tr').length"), "rows")
            assert browser.run(ROWS)[1][0] == hostile
            assert browser.run("document.querySelectorAll('img').length") == 0
            assert browser.run("document.title") == "soupkit"
        said = "document.getElementById('when').innerText"
        wait_for(lambda: "no answer" in browser.run(said), "the page says that the server is gone")
