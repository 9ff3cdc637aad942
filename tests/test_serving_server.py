"""The server as its clients see it: the openai package, plain HTTP, and a process that is told to
stop.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving_kit import (
    CONTEXT,
    VARIANTS,
    add_to_family,
    dense,
    greedy,
    load_variant,
    make_base,
    make_family,
    make_finetune,
    make_tokenizer,
)

from soupkit.bundle import create_or_open_family
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import ServingError
from soupkit.export import export_variant
from soupkit.serving.assemble import build_service
from soupkit.serving.server import Server, make_server

WAIT = 60
TOKENIZER = make_tokenizer()


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


@contextmanager
def serving(
    root: Path, *, keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[tuple[Server, str]]:
    """A real server on a free port, in a thread."""
    service = build_service(root / "family", **({"max_running": 8} | settings))
    server = make_server(service, host="127.0.0.1", port=0, keys=keys)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), "the server starts")
        host, port = server.address
        yield server, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WAIT)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as (_, address):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as found:
        yield found


class Oracle:
    """Texts of the dense models."""

    def __init__(self, root: Path) -> None:
        self._models = {name: dense(root, name) for name in VARIANTS} | {"base": dense(root, None)}

    def __call__(self, model: str, prompt: str, count: int, *, special: bool = True) -> str:
        ids = TOKENIZER(prompt, add_special_tokens=special)["input_ids"]
        return str(
            TOKENIZER.decode(greedy(self._models[model], ids, count), skip_special_tokens=True)
        )


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


def chat_text(question: str) -> str:
    return f"<|user|>{question}</s><|assistant|>"


def test_the_openai_client_lists_the_family(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == ["base", *sorted(VARIANTS)]
    assert client.models.retrieve("norms").id == "norms"


def test_twenty_mixed_requests_at_once_get_their_own_models_answers(
    url: str, oracle: Oracle
) -> None:
    names = ["base", "linear", "embed", "matrix"]
    asked = [(names[i % 4], f"question {i // 4}", i % 3) for i in range(20)]

    def ask(item: tuple[str, str, int]) -> str:
        model, prompt, way = item
        with client_of(url) as client:
            if way == 0:
                done = client.completions.create(
                    model=model, prompt=prompt, max_tokens=20, temperature=0
                )
                return done.choices[0].text
            messages: Any = [{"role": "user", "content": prompt}]
            if way == 1:
                chat = client.chat.completions.create(
                    model=model, messages=messages, max_tokens=20, temperature=0
                )
                return chat.choices[0].message.content or ""
            chunks = client.chat.completions.create(
                model=model, messages=messages, max_tokens=20, temperature=0, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, asked))
    expected = [
        oracle(model, prompt, 20)
        if way == 0
        else oracle(model, chat_text(prompt), 20, special=False)
        for model, prompt, way in asked
    ]
    assert answers == expected
    assert len(set(answers)) > 15


def test_a_stream_ends_with_usage_and_done(url: str, oracle: Oracle) -> None:
    body = {
        "model": "norms",
        "prompt": "abc",
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == oracle("norms", "abc", 12)
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["choices"] == []
    count = len(TOKENIZER("abc")["input_ids"])
    assert chunks[-1]["usage"]["prompt_tokens"] == count
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_n_choices_and_several_prompts_and_token_ids(client: openai.OpenAI, oracle: Oracle) -> None:
    ids = [TOKENIZER(text)["input_ids"] for text in ("one", "two")]
    by_ids = client.completions.create(model="embed", prompt=ids, max_tokens=8, temperature=0, n=2)
    by_text = client.completions.create(
        model="embed", prompt=["one", "two"], max_tokens=8, temperature=0, n=2
    )
    expected = [oracle("embed", text, 8) for text in ("one", "one", "two", "two")]
    for answer in (by_ids, by_text):
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == expected


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model="linear", prompt="x", max_tokens=16, n=3, seed=seed, extra_body={"top_k": 100}
        )
        return [choice.text for choice in answer.choices]

    assert ask(5) == ask(5)
    assert len(set(ask(5))) == 3
    assert ask(5) != ask(6)


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, oracle: Oracle) -> None:
    whole = oracle("base", "stop here", 30)
    stop = whole[6:9]
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="base", prompt="stop here", max_tokens=30, temperature=0, stop=stop, stream=stream
        )
        parts = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in parts) == whole[: whole.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_echo_and_logprobs_are_the_dense_models(client: openai.OpenAI, root: Path) -> None:
    answer = client.completions.create(
        model="norms", prompt="echo", max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    only = client.completions.create(
        model="norms", prompt="echo", max_tokens=0, echo=True, logprobs=2
    )
    ids = TOKENIZER("echo")["input_ids"]
    model = dense(root, "norms")
    all_ids = ids + greedy(model, ids, 4, stop=None)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([all_ids])).logits[0].log_softmax(-1)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert choice.text.startswith("echo")
    assert found.token_logprobs[0] is None
    for at, value in enumerate(found.token_logprobs[1:]):
        assert value == pytest.approx(float(expected[at, all_ids[at + 1]]), abs=1e-4)
    assert found.text_offset is not None
    assert found.tokens is not None
    assert found.text_offset[3] == len("".join(found.tokens[:3]))
    assert only.choices[0].text == "echo"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[: len(ids)]
    chat = client.chat.completions.create(
        model="norms",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert all(item.top_logprobs[0].logprob == item.logprob for item in content)


BAD_FIELDS: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"nonsense": 1}, "nonsense"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"best_of": 3}, "best_of"),
    ("completions", {"logit_bias": {"5": 1.0}}, "logit_bias"),
    ("completions", {"presence_penalty": 0.5}, "presence_penalty"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ""}, None),  # one special token: fine
    ("completions", {"prompt": [5, 99999]}, "prompt"),
    ("completions", {"prompt": "x" * 300}, "prompt"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": CONTEXT}, "max_tokens"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"stop": [""]}, "stop"),
    ("completions", {"n": 129}, "n"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ("chat/completions", {"tools": [{}]}, "tools"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"max_completion_tokens": 1000}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("route", "changes", "param"), BAD_FIELDS)
def test_a_bad_field_is_named(
    url: str, route: str, changes: dict[str, Any], param: str | None
) -> None:
    body: dict[str, Any] = {"model": "base", "max_tokens": 3}
    if route == "completions":
        body["prompt"] = "x"
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    answer = httpx.post(f"{url}/v1/{route}", json=body | changes, timeout=WAIT)
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    if param in ("prompt", "max_tokens") and error["code"] == "context_length_exceeded":
        assert str(CONTEXT) in error["message"]


def test_fields_that_ask_for_nothing_pass(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        max_completion_tokens=2,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        user="me",
    )


def test_an_unknown_model_is_404_and_never_the_base(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="'missing' does not exist") as caught:
        client.completions.create(model="missing", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("missing")
    for wrong in (httpx.get(f"{url}/v1/nowhere"), httpx.get(f"{url}/v1/completions")):
        assert wrong.json()["error"]["message"]
    broken = httpx.post(
        f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400
    assert "not JSON" in broken.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "base", "prompt": "\\ud800"}',
        '{"model": "base", "prompt": "x", "temperature": NaN}',
        '{"model": "base", "prompt": "x", "top_p": Infinity}',
        '{"model": "base", "prompt": "x", "n": true}',
        '{"model": "base", "prompt": "x", "seed": 99999999999999999999}',
        '{"model": "base", "prompt": [[]]}',
        '{"model": "base", "prompt": [-1]}',
        '{"model": "../../etc", "prompt": "x"}',
        '{"model": "base\\u0000", "prompt": "x"}',
        '{"model": "base", "prompt": "x", "stop": [1]}',
        '{"model": "base", "prompt": "x", "stream_options": {"odd": 1}, "stream": true}',
        "[]",
        "null",
        '"text"',
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_hostile_bodies_get_a_client_error_in_openais_shape(
    url: str, route: str, text: str
) -> None:
    header = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/{route}", content=text, headers=header, timeout=WAIT)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{url}/ready").status_code == 200


def test_health_ready_and_metrics(url: str, client: openai.OpenAI) -> None:
    client.completions.create(model="matrix", prompt="x", max_tokens=2, temperature=0)
    assert httpx.get(f"{url}/health").json() == {"status": "alive"}
    assert httpx.get(f"{url}/ready").status_code == 200
    values = metrics_of(url)
    assert values["soupkit_ready"] == 1
    assert values["soupkit_cache_misses_total"] >= 1
    assert values["soupkit_loads_total"] >= 1
    assert values["soupkit_load_seconds_count"] == values["soupkit_loads_total"]
    assert values["soupkit_requests_running"] == 0
    assert values["soupkit_variant_resident_bytes,matrix"] > 0
    assert values["soupkit_generated_tokens_total,matrix"] >= 1
    assert values["soupkit_time_to_first_token_seconds_count,matrix"] >= 1


def metrics_of(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[",".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def test_a_client_that_goes_away_stops_its_generation(root: Path) -> None:
    with serving(root, max_running=1) as (server, url):
        engine = server._service.engine
        body = {"model": "base", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as stream:
            next(stream.iter_raw())
            assert engine.num_open == 1
        wait_for(lambda: engine.num_open == 0, "the stream's job ends")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.05)
        wait_for(lambda: engine.num_open == 0, "the plain request's job ends")
        assert engine.num_tokens < 2 * (CONTEXT - 10)
        wait_for(lambda: metrics_of(url)["soupkit_requests_running"] == 0, "the router knows")


def test_a_full_queue_is_429_with_retry_after(root: Path) -> None:
    with serving(root, max_running=1, max_queue=1) as (server, url):
        body = {"model": "base", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            open_ones = [
                pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=WAIT)
                for _ in "ab"
            ]
            wait_for(lambda: server._service.router.num_waiting == 1, "one waits")
            refused = httpx.post(f"{url}/v1/completions", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert [f.result().status_code for f in open_ones] == [200, 200]


def test_a_small_cache_serves_all_variants_and_evicts(root: Path, oracle: Oracle) -> None:
    sizes = build_sizes(root)
    with serving(root, cache_bytes=max(sizes) + 1000, pin=()) as (server, url):
        with client_of(url) as client:
            for _ in range(2):
                for name in VARIANTS:
                    answer = client.completions.create(
                        model=name, prompt="evict", max_tokens=8, temperature=0
                    )
                    assert answer.choices[0].text == oracle(name, "evict", 8)
        values = metrics_of(url)
        assert values["soupkit_evictions_total"] >= 4
        assert values["soupkit_cache_used_bytes"] <= values["soupkit_cache_budget_bytes"]
        assert len(server._service.engine._bank.slots) == len(server._service.router.cache)


def build_sizes(root: Path) -> list[int]:
    return [load_variant(root, name).nbytes for name in VARIANTS]


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
            add_to_family(
                root, "fresh", lambda name: "_proj" in name, scale="row", planes=1, seed=seed
            )
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


def test_keys_are_asked_for(root: Path) -> None:
    with serving(root, keys=("first-key", "second-key")) as (_, url):
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, "second-key") as client:
            assert list(client.models.list())
        assert httpx.get(f"{url}/health").status_code == 200


def test_if_the_engine_dies_ready_says_so_and_requests_get_503(root: Path) -> None:
    with serving(root) as (server, url), client_of(url) as client:
        engine = server._service.engine
        engine._bank.set_batch = None
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="base", prompt="x")
        wait_for(lambda: not engine.alive, "the engine's thread ends")
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="linear", prompt="x")
        assert caught.value.status_code == 503


def test_an_unknown_pin_is_refused(root: Path) -> None:
    with pytest.raises(ServingError, match="--pin nobody"):
        build_service(root / "family", pin=("nobody",))


def test_a_process_says_when_it_is_ready_and_drains_on_sigterm(root: Path) -> None:
    family = str(root / "family")
    code = f"from soupkit.serving.server import run; run({family!r}, port=0, pin=['norms'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "kernels"])}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("soupkit serves"))
        assert "base, embed, linear, matrix, norms" in line
        url = line.split()[-1]
        wait_for(
            lambda: metrics_of(url)["soupkit_variant_resident_bytes,norms"] > 0, "the pin loads"
        )
        body = {
            "model": "norms",
            "prompt": "x",
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [text for text in lines if text][-1] == "data: [DONE]", "an open request was cut"
        assert process.wait(WAIT) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
