"""Variants on disk while they are served: evicted, slow, replaced, damaged, of their own texts."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving_kit import (
    TOKENIZER,
    VARIANTS,
    WAIT,
    Oracle,
    add_to_family,
    client_of,
    dense,
    greedy,
    load_variant,
    make_base,
    make_family,
    make_finetune,
    make_tokenizer,
    metrics_of,
    serving,
    wait_for,
)

from soupkit.bundle import create_or_open_family
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import ServingError
from soupkit.export import export_variant
from soupkit.serving.server import build_service


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


# R7: the budget is in bytes.
def test_a_small_cache_serves_all_variants_and_evicts(root: Path, oracle: Oracle) -> None:
    manifests = [load_variant(root, name).manifest for name in VARIANTS]
    roomy = build_service(root / "family")
    slot_bytes = roomy.engine.slot_bytes(manifests)
    roomy.engine.close()
    with serving(root, cache_bytes=slot_bytes) as (server, url):
        with client_of(url) as client:
            for _ in range(2):
                for name in VARIANTS:
                    answer = client.completions.create(
                        model=name, prompt="evict", max_tokens=8, temperature=0
                    )
                    assert answer.choices[0].text == oracle(name, "evict", 8)
        values = metrics_of(url)
        assert values["soupkit_cache_slots"] == 1
        assert values["soupkit_evictions_total"] >= 4
        assert values["soupkit_cache_used_bytes"] <= values["soupkit_cache_budget_bytes"]
        assert len(server._service.engine._bank.slots) == len(server._service.router.cache)


# R5, R6, SV21, SV28, SV32: loads that hold up the engine, or each other, or are made twice.
def test_a_slow_load_delays_no_other_model_and_is_made_once(root: Path, oracle: Oracle) -> None:
    gate, loads = threading.Event(), []
    with serving(root) as (server, url), ThreadPoolExecutor(6) as pool:
        catalog, router = server._service.catalog, server._service.router
        load = catalog.load

        def slow(ref: Any) -> Any:
            loads.append(ref.name)
            assert ref.name != "norms" or gate.wait(WAIT)
            return load(ref)

        catalog.load = slow  # type: ignore[method-assign]

        def ask(model: str) -> str:
            body = {"model": model, "prompt": "slow", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
            return str(answer.json()["choices"][0]["text"])

        waiting = [pool.submit(ask, "norms") for _ in range(6)]
        wait_for(lambda: router.num_waiting == 6, "all wait for one load")
        for model in ("base", "linear", "matrix"):
            assert ask(model) == oracle(model, "slow", 8)
        assert not any(future.done() for future in waiting)
        gate.set()
        assert {future.result() for future in waiting} == {oracle("norms", "slow", 8)}
        assert loads.count("norms") == 1


# SV10: wrong answers after a dynamic load.
def test_a_variant_exported_while_serving_appears_and_a_new_version_replaces_it(
    tmp_path: Path,
) -> None:
    root = make_family(tmp_path, names=["linear"])
    with serving(root) as (_, url), client_of(url) as client:

        def ask(model: str) -> str:
            answer = client.completions.create(
                model=model, prompt="q", max_tokens=10, temperature=0
            )
            return answer.choices[0].text

        for seed in (8, 9):
            add_to_family(root, "fresh", lambda name: "_proj" in name, encoding="row", seed=seed)
            ids = TOKENIZER("q")["input_ids"]
            expected = TOKENIZER.decode(
                greedy(dense(root, "fresh"), ids, 10), skip_special_tokens=True
            )
            assert ask("fresh") == expected
        assert [model.id for model in client.models.list()] == ["base", "fresh", "linear"]


def test_a_damaged_variant_answers_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear", "norms"])
    weights = next((root / "family" / "variants" / "norms").glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with serving(root) as (_, url), client_of(url) as client:
        with pytest.raises(openai.InternalServerError, match="norms") as caught:
            client.completions.create(model="norms", prompt="x", max_tokens=2)
        assert caught.value.status_code == 503
        assert caught.value.code == "variant_unavailable"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError, match="digest"):
            client.completions.create(model="norms", prompt="x", max_tokens=2, stream=True)
        shutil.rmtree(root / "family" / "variants" / "norms")
        with pytest.raises(openai.InternalServerError, match="norms"):
            client.completions.create(model="norms", prompt="x", max_tokens=2)
        assert client.completions.create(model="linear", prompt="x", max_tokens=2).choices
        assert httpx.get(f"{url}/ready").status_code == 200


def test_a_variants_own_tokenizer_and_template_are_used(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    folder = make_finetune(root / "base", root / "ft", lambda name: "q_proj" in name, seed=4)
    own = make_tokenizer()
    own.chat_template = "Q: {{ messages[0].content }} A:"
    own.save_pretrained(folder)
    base = open_checkpoint(root / "base")
    finetuned = open_checkpoint(folder)
    export_variant(base, finetuned, family=root / "family", name="own", companions=folder)
    with serving(root) as (_, url), client_of(url) as client:
        messages: Any = [{"role": "user", "content": "why"}]
        answer = client.chat.completions.create(
            model="own", messages=messages, max_tokens=9, temperature=0
        )
        ids = TOKENIZER("Q: why A:", add_special_tokens=False)["input_ids"]
        expected = greedy(dense(root, "own"), ids, 9)
        assert answer.choices[0].message.content == TOKENIZER.decode(
            expected, skip_special_tokens=True
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)


def test_chat_without_a_template_is_a_clear_400(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    create_or_open_family(tmp_path / "family", open_checkpoint(tmp_path / "base"))
    with serving(tmp_path) as (_, url), client_of(url) as client:
        messages: Any = [{"role": "user", "content": "why"}]
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            client.chat.completions.create(model="base", messages=messages)
        assert client.completions.create(model="base", prompt="why", max_tokens=1).choices


def test_a_variant_with_another_architecture_setting_is_refused_by_name(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=[])
    folder = make_finetune(root / "base", root / "ft", lambda name: "q_proj" in name, seed=4)
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    base = open_checkpoint(root / "base")
    export_variant(
        base, open_checkpoint(folder), family=root / "family", name="odd", companions=folder
    )
    refused = pytest.raises(openai.InternalServerError, match="rms_norm_eps")
    with serving(root) as (_, url), client_of(url) as client, refused:
        client.completions.create(model="odd", prompt="x", max_tokens=2)


def test_an_unknown_pin_is_refused(root: Path) -> None:
    with pytest.raises(ServingError, match="--pin nobody"):
        build_service(root / "family", pin=("nobody",))


def test_a_template_that_raises_is_a_400_of_its_own_requests(tmp_path: Path) -> None:
    root = make_family(tmp_path, names=["linear"])
    (root / "base" / "chat_template.jinja").write_text("{{ messages[0].content / 0 }}")
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    with serving(root) as (_, url):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
        assert answer.status_code == 400
        assert "chat template" in answer.json()["error"]["message"]


def test_a_variant_named_like_the_bases_folder_is_never_answered_by_the_base(
    tmp_path: Path,
) -> None:
    root = make_family(tmp_path, names=["linear"])
    family = root / "family" / "family.json"
    (root / "base").rename(root / "tiny")
    family.write_text(family.read_text().replace(str(root / "base"), str(root / "tiny")))
    (root / "base").symlink_to(root / "tiny")
    with serving(root) as (_, url), client_of(url) as client:

        def ask(model: str) -> str:
            answer = client.completions.create(
                model=model, prompt="q", max_tokens=10, temperature=0
            )
            return answer.choices[0].text

        plain = ask("tiny")
        assert plain == ask("base")
        moved, encoding = VARIANTS["linear"]
        add_to_family(root, "tiny", moved, encoding=encoding, seed=5)
        expected = greedy(dense(root, "tiny"), TOKENIZER("q")["input_ids"], 10)
        assert ask("tiny") == TOKENIZER.decode(expected, skip_special_tokens=True)
        assert ask("base") == plain
        assert [model.id for model in client.models.list()] == ["base", "linear", "tiny"]


def test_one_reading_of_a_variants_texts_however_many_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_family(tmp_path, names=["linear"])
    with serving(root) as (server, url), ThreadPoolExecutor(8) as pool:
        texts, readings, gate = server._service.texts, [], threading.Event()
        read = texts._read_variant

        def slow(ref: Any) -> Any:
            readings.append(ref)
            assert gate.wait(WAIT)
            if len(readings) == 1:
                raise OSError("the disk is tired")
            return read(ref)

        asked, of = [], texts.of

        async def counted(ref: Any) -> Any:
            asked.append(ref)
            return await of(ref)

        monkeypatch.setattr(texts, "_read_variant", slow)
        monkeypatch.setattr(texts, "of", counted)
        body = {"model": "linear", "prompt": "x", "max_tokens": 1}

        def ask() -> int:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT).status_code

        with pytest.raises(httpx.ReadTimeout):
            # A client that goes away takes nobody's reading with it.
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.2)
        asking = [pool.submit(ask) for _ in range(8)]
        wait_for(lambda: len(asked) == 9, "all have asked")
        gate.set()
        assert {future.result() for future in asking} == {503}
        assert len(readings) == 1
        # A failure is not kept.
        assert ask() == 200
