"""Faults of the world while a server runs: files that go, rot or change, waits without end, kills.

That one variant's fault stays its own is asserted by asking another after each.
"""

import json
import logging
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_kit import (
    TOKENIZER,
    VARIANTS,
    WAIT,
    add_to_family,
    dense,
    greedy,
    make_base,
    make_family,
    serving,
    wait_for,
)

from soupkit.errors import BundleError, ServingError
from soupkit.serving.reasons import Reasons
from soupkit.serving.server import build_service

ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


def ask(url: str, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": "ask", "max_tokens": 8, "temperature": 0} | body
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)


def change(url: str, what: str, name: str) -> httpx.Response:
    route = f"{url}/v1/{what}_lora_adapter"
    return httpx.post(route, json={"lora_name": name}, headers=ADMIN, timeout=WAIT)


def text_of(root: Path, name: str) -> str:
    ids = greedy(dense(root, name), TOKENIZER("ask")["input_ids"], 8)
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def lose_weights(folder: Path) -> None:
    (folder / "variant.safetensors").unlink()


def shrink(folder: Path) -> None:
    os.truncate(folder / "variant.safetensors", 3000)


def empty(folder: Path) -> None:
    for name in ("variant.safetensors", "manifest.json"):
        os.truncate(folder / name, 0)


def rot(folder: Path) -> None:
    with (folder / "variant.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("norms", "other"))


def change_base(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parents[2] / "of-another-base", folder)


def become_a_link(folder: Path) -> None:
    weights = folder / "variant.safetensors"
    weights.rename(folder.parent / "elsewhere")
    weights.symlink_to(folder.parent / "elsewhere")


def lead_out(folder: Path) -> None:
    folder.rename(folder.parents[2] / "outside")
    folder.symlink_to(folder.parents[2] / "outside")


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def become_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


FAULTS = [
    vanish,
    lose_weights,
    shrink,
    empty,
    rot,
    edit_manifest,
    change_base,
    become_a_link,
    lead_out,
    lose_manifest,
    become_a_folder,
]


# SV11, SV12, SV37: one bad adapter takes the server, or all others, with it.
def test_files_that_fail_a_running_server_fail_their_own_variant_only(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear", "norms"])
    make_base(tmp_path / "strange" / "base", seed=5)
    add_to_family(tmp_path / "strange", "norms", lambda name: True, encoding="row", seed=5)
    shutil.copytree(tmp_path / "strange/family/variants/norms", tmp_path / "of-another-base")
    folder, kept = root / "family" / "variants" / "norms", tmp_path / "kept"
    shutil.copytree(folder, kept)
    expected = {name: text_of(root, name) for name in ("linear", "norms")}
    with serving(root, admin_keys=("admin-key",), cache_bytes=1_000_000) as (_, url):
        for fault in FAULTS:
            assert ask(url, "norms").json()["choices"][0]["text"] == expected["norms"], fault
            fault(folder)
            # What is resident needs no files.
            assert ask(url, "norms").json()["choices"][0]["text"] == expected["norms"], fault
            assert change(url, "unload", "norms").status_code == 200
            refused = change(url, "load", "norms")
            assert refused.status_code == 503, (fault, refused.text)
            message = refused.json()["error"]["message"]
            assert "norms" in message, fault
            assert str(tmp_path) not in refused.text, fault
            # Only paths inside the family.
            assert not re.search(r"(?<!variants)(?<!norms)/", message), (fault, message)
            assert ask(url, "linear").json()["choices"][0]["text"] == expected["linear"], fault
            assert httpx.get(f"{url}/ready").status_code == 200
            if folder.is_symlink():
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
            for stray in (folder.parent / "elsewhere", root / "outside"):
                shutil.rmtree(stray, ignore_errors=True)
                stray.unlink(missing_ok=True)
            shutil.copytree(kept, folder)
            assert change(url, "load", "norms").status_code == 200


# SV04, SV26: a name used anew kept the old buffer, or what was computed with it.
def test_a_replaced_variant_is_served_anew_and_never_mixed(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    done = threading.Event()
    with serving(root, cache_bytes=1_000_000) as (_, url), ThreadPoolExecutor(3) as pool:
        add_to_family(root, "fresh", lambda name: "_proj" in name, encoding="row", seed=1)
        texts = {text_of(root, "fresh")}

        def keep_asking() -> list[httpx.Response]:
            found = []
            while not done.is_set():
                found.append(ask(url, "fresh"))
            return found

        asking = [pool.submit(keep_asking) for _ in range(3)]
        for seed in (2, 3, 4):
            add_to_family(root, "fresh", lambda name: "_proj" in name, encoding="row", seed=seed)
            texts.add(text_of(root, "fresh"))
            assert ask(url, "fresh").json()["choices"][0]["text"] == text_of(root, "fresh")
        done.set()
        answers = [answer for future in asking for answer in future.result()]
        assert len(texts) == 4
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] in texts
            else:
                # It was asked for by a digest that was gone by its turn.
                assert answer.status_code in (404, 503), answer.text


def test_family_json_that_turns_bad_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_family(tmp_path, names=["linear"])
    file = root / "family" / "family.json"
    good = file.read_text()
    other = json.loads(good)
    other["base"]["fingerprint"] = other["base"]["fingerprint"][:-4] + "0000"
    with serving(root) as (server, url), caplog.at_level(logging.WARNING):
        catalog = server._service.catalog
        for bad in ("{", json.dumps(other), "[]", ""):
            caplog.clear()
            file.write_text(bad)
            for _ in range(3):
                assert not catalog.refresh()
            assert ask(url, "linear").status_code == 200
            file.write_text(good)
            wait_for(lambda: not catalog._complained, "the good one is read")
            assert len([r for r in caplog.records if "family.json" in r.message]) == 1, bad
        # The file itself put back, its stamp as before, is as good.
        for _ in range(2):
            caplog.clear()
            file.rename(tmp_path / "aside")
            assert not catalog.refresh()
            (tmp_path / "aside").rename(file)
            assert not catalog.refresh()
            assert len([r for r in caplog.records if "family.json" in r.message]) == 1
        file.unlink()
        assert ask(url, "linear").status_code == 200


# SV30, SV34: budgets that count something else than bytes, or do not say what fits.
def test_a_cache_too_small_for_any_variant_is_refused_with_what_is_needed(root: Path) -> None:
    with pytest.raises(ServingError, match=r"--cache-bytes 1000 is too small for any") as caught:
        build_service(root / "family", cache_bytes=1000)
    needed = int(str(caught.value).split(" needs ")[1].split(",")[0])
    assert needed > 1000
    with pytest.raises(ServingError, match="too small"):
        build_service(root / "family", cache_bytes=needed - 1)
    service = build_service(root / "family", cache_bytes=needed)
    service.engine.close()


def test_a_family_without_variants_has_room_for_the_first(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    document = json.loads((root / "family" / "family.json").read_text())
    (root / "family" / "family.json").write_text(json.dumps(document | {"variants": {}}))
    with serving(root) as (_, url):
        assert ask(url, "linear").status_code == 404
        (root / "family" / "family.json").write_text(json.dumps(document))
        assert ask(url, "linear").json()["choices"][0]["text"] == text_of(root, "linear")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_wait_seconds": 0.0}, "max_wait_seconds=0.0: must be above 0"),
        ({"max_wait_seconds": float("nan")}, "max_wait_seconds=nan"),
        ({"host_cache_bytes": -1}, "host_cache_bytes=-1: must be at least 0"),
        ({"auto_pin": -1}, "auto_pin=-1: must be at least 0"),
    ],
)
def test_a_wrong_option_is_named(root: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        build_service(root / "family", **option)


# SV15: waits without end.
def test_a_wait_has_an_end_and_the_engine_goes_on(root: Path) -> None:
    settings: dict[str, Any] = {"max_running": 1, "max_wait_seconds": 0.3}
    with serving(root, **settings) as (server, url), ThreadPoolExecutor(1) as pool:
        engine, release = server._service.engine, threading.Event()
        submit = engine.submit

        def slow(*args: Any, **named: Any) -> Any:
            deliver = args[-1]

            def held(event: Any) -> None:
                assert release.wait(WAIT)
                deliver(event)

            return submit(*args[:-1], held, **named)

        engine.submit = slow
        first = pool.submit(ask, url, "base")
        wait_for(lambda: server._service.router.num_running == 1, "it runs")
        for stream in (False, True):
            refused = ask(url, "linear", stream=stream)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "0.3 seconds" in refused.json()["error"]["message"]
        release.set()
        assert first.result().status_code == 200
        assert ask(url, "linear").status_code == 200
        assert not server._service._open


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BundleError("/srv/my family/variants/a/b.json: No such file"), "variants/a/b.json: No"),
        (BundleError("/tmp/overlay-x/tokenizer.json: is bad"), "tokenizer.json: is bad"),
        (FileNotFoundError(2, "No such file", "/srv/other/x"), "x: No such file"),
        (ServingError("use 1/2 of https://x/y and /v1"), "use 1/2 of https://x/y and /v1"),
        (ServingError("'/srv/deep/er' and \"/srv/q/r\""), "'er' and \"r\""),
        (RuntimeError("/srv/secret"), "internal error (RuntimeError)"),
    ],
)
def test_a_reason_names_no_folder_of_the_server(error: Exception, told: str) -> None:
    assert Reasons(["/srv/my family", ".", "org/model"]).of(error).startswith(told)


def test_a_variant_that_is_the_base_in_all_is_served_as_the_base(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=[])
    add_to_family(root, "same", lambda _: False, encoding="row", seed=9)
    with serving(root) as (_, url):
        # It is alone in its family, takes no bytes, and stands in nobody's way.
        base = ask(url, "base").json()["choices"][0]["text"]
        assert ask(url, "same").json()["choices"][0]["text"] == base
        moved, encoding = VARIANTS["linear"]
        add_to_family(root, "linear", moved, encoding=encoding, seed=1)
        assert ask(url, "linear").json()["choices"][0]["text"] == text_of(root, "linear")
        assert ask(url, "same").json()["choices"][0]["text"] == base


@pytest.mark.parametrize("lost", ["linear", "twin"])
def test_of_two_names_of_one_content_one_is_enough(tmp_path: Path, lost: str) -> None:
    root = make_family(tmp_path, names=["linear"])
    moved, encoding = VARIANTS["linear"]
    add_to_family(root, "twin", moved, encoding=encoding, seed=1)
    wanted = text_of(root, "linear")
    with serving(root) as (server, url):
        variants = server._service.catalog.variants
        assert variants["linear"].digest == variants["twin"].digest
        shutil.rmtree(root / "family" / variants[lost].path)
        left = {"linear": "twin", "twin": "linear"}[lost]
        assert ask(url, left).json()["choices"][0]["text"] == wanted
