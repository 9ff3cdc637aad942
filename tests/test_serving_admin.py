"""Variants loaded and unloaded by an administrator while others are served."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_kit import (
    CONTEXT,
    VARIANTS,
    WAIT,
    Oracle,
    add_to_family,
    load_variant,
    make_family,
    metrics_of,
    serving,
    wait_for,
)

from soupkit.serving import server as server_module
from soupkit.serving.server import build_service

ADMIN = {"authorization": "Bearer admin-key"}
OPTIONS: dict[str, Any] = {"keys": ("user-key",), "admin_keys": ("admin-key",)}
USER = {"authorization": "Bearer user-key"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[tuple[Any, str]]:
    with serving(root, **OPTIONS) as (server, url):
        yield server._service, url


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


def change(url: str, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{what}_lora_adapter", json=body, headers=ADMIN, timeout=WAIT)


def ask(url: str, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": "ask", "max_tokens": 8, "temperature": 0} | body
    return httpx.post(f"{url}/v1/completions", json=body, headers=USER, timeout=WAIT)


def test_a_variant_is_made_resident_pinned_let_go_and_shown_again(
    served: tuple[Any, str], root: Path, oracle: Oracle
) -> None:
    service, url = served
    folder = root / "family" / "variants" / "linear"
    for path in (None, "variants/linear", str(folder), f"{folder}/", "variants/./linear"):
        loaded = change(url, "load", lora_name="linear", lora_path=path, pinned=True)
        assert loaded.status_code == 200, loaded.text
        answer = loaded.json()
        assert (answer["id"], answer["phase"], answer["pinned"]) == ("linear", "resident", True)
        assert answer["bytes"]["device"] > 0
    assert metrics_of(url).get("soupkit_requests_total,linear", 0) == 0
    assert ask(url, "linear").json()["choices"][0]["text"] == oracle("linear", "ask", 8)

    freed = change(url, "unload", lora_name="linear").json()
    assert freed["freed_bytes"]["device"] == answer["bytes"]["device"]
    assert freed["requests_ended"] == 0
    assert "linear" not in service.router.cache.digests
    gone = ask(url, "linear")
    assert gone.status_code == 404
    assert "was unloaded" in gone.json()["error"]["message"]
    listed = httpx.get(f"{url}/v1/models", headers=USER).json()["data"]
    assert "linear" not in [model["id"] for model in listed]
    assert httpx.get(f"{url}/v1/models/linear", headers=USER).status_code == 404
    assert change(url, "unload", lora_name="linear").status_code == 404

    again = change(url, "load", lora_name="linear").json()
    assert (again["phase"], again["pinned"]) == ("resident", False)
    assert ask(url, "linear").json()["choices"][0]["text"] == oracle("linear", "ask", 8)


# SV13: success was answered for a path that does not exist.
@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "/no/such/folder",
        "",
        ".",
        "variants",
        "variants/norms",
        "variants/linear/manifest.json",
        "variants/../../family/../base",
        "../family/variants/linear",
        "//etc/passwd",
        "variants/linear\0",
        "~/family/variants/linear",
    ],
)
def test_no_other_path_than_the_variants_own_is_taken(served: tuple[Any, str], path: str) -> None:
    refused = change(served[1], "load", lora_name="linear", lora_path=path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert "variants/linear" in refused.json()["error"]["message"]


@pytest.mark.parametrize("what", ["load", "unload"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "missing"}, 404, "lora_name"),
        ({"lora_name": "../linear"}, 404, "lora_name"),
        ({"lora_name": "base"}, 400, "lora_name"),
        ({}, 400, "lora_name"),
        ({"lora_name": 5}, 400, "lora_name"),
        ({"lora_name": "linear", "lora_int_id": 1}, 400, "lora_int_id"),
    ],
)
def test_a_wrong_change_is_named(
    served: tuple[Any, str], what: str, body: dict[str, Any], status: int, param: str
) -> None:
    refused = change(served[1], what, **body)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == param


def test_changes_need_the_admins_own_key(root: Path, served: tuple[Any, str]) -> None:
    _, url = served
    body = {"lora_name": "linear"}
    for what in ("load", "unload"):
        route = f"{url}/v1/{what}_lora_adapter"
        for wrong in ({}, USER, {"authorization": "Basic admin-key"}):
            assert httpx.post(route, json=body, headers=wrong).status_code == 401
    # The admin's key opens nothing else.
    assert httpx.get(f"{url}/v1/models", headers=ADMIN).status_code == 401
    with serving(root) as (_, open_url):
        for headers in ({}, ADMIN):
            refused = httpx.post(
                f"{open_url}/v1/load_lora_adapter", json=body, headers=headers, timeout=WAIT
            )
            assert refused.status_code == 403
            assert "--admin-key-file" in refused.json()["error"]["message"]


def test_one_key_may_not_be_both(root: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    (tmp_path / "admin").write_text("b\n")
    with pytest.raises(ValueError, match="give admins another one"):
        server_module.run(
            root / "family", api_key_file=tmp_path / "keys", admin_key_file=tmp_path / "admin"
        )
    with pytest.raises(ValueError, match=r"admin_key_file=.*none' cannot be read: No such file"):
        server_module.run(root / "family", admin_key_file=tmp_path / "none")


# SV02, SV03, SV22, SV28: memory that stays, a count that never returns to zero.
@pytest.mark.parametrize("stream", [False, True])
def test_unloading_lets_open_requests_end(
    served: tuple[Any, str], oracle: Oracle, stream: bool
) -> None:
    service, url = served
    body = {"model": "norms", "prompt": "long", "max_tokens": CONTEXT - 20, "temperature": 0}
    body |= {"ignore_eos": True, "n": 2, "stream": stream}
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(
            httpx.post, f"{url}/v1/completions", json=body, headers=USER, timeout=WAIT
        )
        wait_for(lambda: service.engine.num_open == 2, "it runs")
        unloaded = change(url, "unload", lora_name="norms").json()
        answer = asked.result()
    assert unloaded["requests_ended"] == 0
    assert unloaded["freed_bytes"]["device"] > 0
    assert answer.status_code == 200
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["usage"]["completion_tokens"] == 2 * (CONTEXT - 20)
    assert change(url, "load", lora_name="norms").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_deadline_open_requests_are_ended_and_told(
    served: tuple[Any, str], stream: bool
) -> None:
    service, url = served
    held, release = threading.Event(), threading.Event()
    submit = service.engine.submit

    def slow(job: Any, slot: int, deliver: Any) -> str:
        def paused(event: Any) -> None:
            held.set()
            assert release.wait(WAIT)
            deliver(event)

        return str(submit(job, slot, paused))

    service.engine.submit = slow
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(ask, url, "norms", max_tokens=100, ignore_eos=True, stream=stream)
            assert held.wait(WAIT)
            leaving = pool.submit(change, url, "unload", lora_name="norms", deadline_seconds=0.1)
            answer = asked.result()
            assert answer.status_code == 503
            assert "was unloaded" in answer.json()["error"]["message"]
            release.set()
            assert leaving.result().json()["requests_ended"] == 1
    finally:
        release.set()
        service.engine.submit = submit
    assert change(url, "load", lora_name="norms").status_code == 200
    assert ask(url, "norms").status_code == 200


def test_what_cannot_be_loaded_stays_hidden_and_unpinned(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear", "norms"])
    with serving(root, **OPTIONS) as (server, url):
        assert change(url, "unload", lora_name="norms").status_code == 200
        weights = root / "family" / "variants" / "norms" / "variant.safetensors"
        kept = weights.read_bytes()
        weights.write_bytes(kept[:-1])
        refused = change(url, "load", lora_name="norms", pinned=True)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "variant_unavailable"
        assert str(tmp_path) not in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(url, "norms").status_code == 404
        assert not server._service.pins
        weights.write_bytes(kept)
        deadline = time.monotonic() + WAIT
        while change(url, "load", lora_name="norms").status_code != 200:
            assert time.monotonic() < deadline
        assert ask(url, "norms").status_code == 200


# R8, SV20: pins for the latency-critical, but never of all slots.
def test_a_pin_too_many_is_refused_and_holds_nothing(root: Path) -> None:
    manifests = [load_variant(root, name).manifest for name in VARIANTS]
    roomy = build_service(root / "family")
    slot_bytes = roomy.engine.slot_bytes(manifests)
    roomy.engine.close()
    with serving(root, cache_bytes=2 * slot_bytes, **OPTIONS) as (server, url):
        assert change(url, "load", lora_name="linear", pinned=True).json()["pinned"]
        refused = change(url, "load", lora_name="norms", pinned=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "pinned"
        assert "of 2 slots" in refused.json()["error"]["message"]
        assert list(server._service.pins) == ["linear"]
        for name in ("norms", "embed", "matrix"):
            assert ask(url, name).status_code == 200
        assert metrics_of(url)["soupkit_variant_pinned,linear"] == 1
        assert metrics_of(url)["soupkit_variant_resident_bytes,linear"] > 0
        assert not change(url, "load", lora_name="linear", pinned=False).json()["pinned"]
        assert change(url, "load", lora_name="norms", pinned=True).json()["pinned"]


def test_two_names_of_one_content_are_let_go_one_by_one(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    file = root / "family" / "family.json"
    document = json.loads(file.read_text())
    document["variants"]["twin"] = document["variants"]["linear"]
    file.write_text(json.dumps(document))
    with serving(root, **OPTIONS) as (_, url):
        assert ask(url, "twin").json()["choices"] == ask(url, "linear").json()["choices"]
        first = change(url, "unload", lora_name="linear").json()
        assert first["freed_bytes"] == {"device": 0, "host": 0}
        assert first["shared_with"] == ["twin"]
        assert ask(url, "linear").status_code == 404
        assert ask(url, "twin").status_code == 200
        second = change(url, "unload", lora_name="twin").json()
        assert second["freed_bytes"]["device"] > 0
        assert second["shared_with"] == []


def test_a_variant_that_leaves_the_family_while_it_is_loaded_is_unknown(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear", "norms"])
    file = root / "family" / "family.json"
    document = json.loads(file.read_text())
    with serving(root, **OPTIONS) as (server, url):
        catalog = server._service.catalog
        load = catalog.load

        def leaving(ref: Any) -> Any:
            loaded = load(ref)
            del document["variants"]["norms"]
            file.write_text(json.dumps(document))
            wait_for(lambda: "norms" not in catalog.variants, "the server sees it")
            return loaded

        catalog.load = leaving
        assert change(url, "load", lora_name="norms").status_code == 404
        catalog.load = load
        assert ask(url, "linear").status_code == 200


def test_a_twin_that_comes_while_the_other_drains_stays(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    moved, encoding = VARIANTS["linear"]
    add_to_family(root, "twin", moved, encoding=encoding, seed=1)
    with serving(root, **OPTIONS) as (server, url), ThreadPoolExecutor(2) as pool:
        engine = server._service.engine
        prepare, go = engine._prepare, threading.Event()

        def held(**batch: Any) -> None:
            assert go.wait(WAIT)
            prepare(**batch)

        assert change(url, "unload", lora_name="twin").status_code == 200
        engine._prepare = held
        answer = pool.submit(ask, url, "linear")
        wait_for(lambda: engine.num_open == 1, "it is generated")
        unloaded = pool.submit(change, url, "unload", lora_name="linear", deadline_seconds=1)
        catalog = server._service.catalog
        wait_for(lambda: catalog.is_hidden("linear"), "it is hidden")
        assert change(url, "load", lora_name="twin").status_code == 200
        go.set()
        assert unloaded.result().json()["shared_with"] == ["twin"]
        assert answer.result().status_code == 200
        assert ask(url, "twin").status_code == 200


# R13, SV17: what was loaded at run time is forgotten by a restart.
def test_a_restart_serves_what_was_unloaded(root: Path) -> None:
    for _ in range(2):
        with serving(root, **OPTIONS) as (_, url):
            assert ask(url, "embed").status_code == 200
            assert change(url, "unload", lora_name="embed").status_code == 200
            assert ask(url, "embed").status_code == 404


# SV28: an unload that raced with a request for the same variant.
def test_loads_and_unloads_at_once_leave_the_variant_served_or_hidden(
    served: tuple[Any, str], oracle: Oracle
) -> None:
    service, url = served
    expected = oracle("matrix", "ask", 8)
    with ThreadPoolExecutor(8) as pool:
        changes = [
            pool.submit(change, url, ("load", "unload")[i % 2], lora_name="matrix")
            for i in range(12)
        ]
        answers = [pool.submit(ask, url, "matrix") for _ in range(12)]
        assert {future.result().status_code for future in changes} <= {200, 404}
        for future in answers:
            answer = future.result()
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == expected
            else:
                assert answer.status_code == 404, answer.text
    assert change(url, "load", lora_name="matrix").status_code == 200
    assert ask(url, "matrix").json()["choices"][0]["text"] == expected
    assert not service._open
    assert service.router.num_running == 0
