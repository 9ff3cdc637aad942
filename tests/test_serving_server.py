"""The server as its clients see it: the openai package, plain HTTP, and a process that is told to
stop.
"""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from serving_kit import (
    CONTEXT,
    TOKENIZER,
    VARIANTS,
    WAIT,
    Oracle,
    chat_text,
    client_of,
    dense,
    greedy,
    make_family,
    metrics_of,
    serving,
    start_python,
    wait_for,
)

from soupkit.errors import ServingError
from soupkit.serving import listening
from soupkit.serving import server as server_module
from soupkit.serving.jobs import End, Generation
from soupkit.serving.sampling import Token


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


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


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
    assert values["soupkit_arena_bytes"] > 0
    assert values["soupkit_generated_tokens_total,matrix"] >= 1
    assert values["soupkit_time_to_first_token_seconds_count,matrix"] >= 1


def test_a_client_that_goes_away_stops_its_generation(root: Path) -> None:
    with serving(root, max_running=1) as (server, url):
        engine = server._service.engine
        prepare = engine._prepare

        def slowly(**batch: Any) -> None:
            # However busy the machine is, the client goes first.
            time.sleep(0.01)
            prepare(**batch)

        engine._prepare = slowly
        body = {"model": "base", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as stream:
            next(stream.iter_raw())
            assert engine.num_open == 1
        wait_for(lambda: engine.num_open == 0, "the stream's job ends")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body, timeout=0.05)
        wait_for(lambda: engine.num_open == 0, "the plain request's job ends")
        wait_for(lambda: metrics_of(url)["soupkit_requests_running"] == 0, "the router knows")
        assert metrics_of(url)["soupkit_generated_tokens_total,base"] < 2 * (CONTEXT - 10)


def test_a_prompt_as_long_as_the_context_can_be_scored(client: openai.OpenAI) -> None:
    settings: Any = {"model": "base", "prompt": [5] * CONTEXT, "echo": True, "logprobs": 0}
    answer = client.completions.create(**settings, max_tokens=0)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == CONTEXT
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        client.completions.create(**settings, max_tokens=1)


def test_nothing_is_scored_for_a_client_that_is_gone(root: Path) -> None:
    with serving(root) as (server, url):
        service, gate, scored = server._service, threading.Event(), []
        cancel, cancelled = service.cancel, threading.Event()

        def noticed(generation: Generation) -> None:
            cancel(generation)
            cancelled.set()

        def score(tokens: tuple[int, ...], slot: int, *, num_top: int) -> list[Token]:
            scored.append(tokens)
            assert gate.wait(WAIT)
            return [Token(token) for token in tokens]

        service.engine.score, service.cancel = score, noticed
        body = {"model": "base", "max_tokens": 0, "echo": True, "logprobs": 0}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(
                httpx.post, f"{url}/v1/completions", json=body | {"prompt": [5]}, timeout=WAIT
            )
            wait_for(lambda: scored, "the first is scored")
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=body | {"prompt": [6]}, timeout=0.2)
            assert cancelled.wait(WAIT), "the server notices that the second client is gone"
            gate.set()
            assert first.result().status_code == 200
        wait_for(lambda: service.router.num_running == 0, "both are over")
        assert scored == [(5,)]


# R12: a queue that grows without end, and nobody told to come back.
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


def test_keys_are_asked_for(root: Path) -> None:
    with serving(root, keys=("first-key", "second-key")) as (_, url):
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, "second-key") as client:
            assert list(client.models.list())
        assert httpx.get(f"{url}/health").status_code == 200


# R12: health that does not know whether anything can be generated.
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


def test_a_process_says_when_it_is_ready_and_drains_on_sigterm(root: Path) -> None:
    family = str(root / "family")
    code = f"from soupkit.serving.server import run; run({family!r}, port=0, pin=['norms'])"
    process, told = start_python(code)
    try:
        line = next(line for line in told if line.startswith("soupkit serves"))
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


# Cut connections tell nobody why.
def test_what_a_stop_does_not_wait_for_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "DRAIN_SECONDS", 0.3)
    release, seen = threading.Event(), threading.Event()
    with serving(root) as (server, url), ThreadPoolExecutor(2) as pool:
        service = server._service
        load, submit = service.catalog.load, service.engine.submit

        def slow_load(ref: Any) -> Any:
            seen.set()
            assert release.wait(WAIT)
            return load(ref)

        def endless(job: Any, slot: int, deliver: Any) -> str:
            return submit(job, slot, lambda event: isinstance(event, End) or deliver(event))

        service.catalog.load, service.engine.submit = slow_load, endless
        body = {"model": "linear", "prompt": "x", "max_tokens": 100, "temperature": 0}
        body["ignore_eos"] = True
        waiting = [
            pool.submit(
                httpx.post, f"{url}/v1/completions", json=body | {"stream": stream}, timeout=WAIT
            )
            for stream in (False, True)
        ]
        assert seen.wait(WAIT)
        wait_for(lambda: service.router.num_waiting == 2, "both wait")
        body |= {"model": "base", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert next(lines).startswith("data: ")
            server.handle_exit(signal.SIGTERM, None)
            assert "the server is stopping" in list(lines)[-1]
        for future in waiting:
            assert future.result().status_code == 503
            assert "the server is stopping" in future.result().json()["error"]["message"]
        release.set()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_running": 0}, "max_running=0: must be at least 1"),
        ({"max_queue": 0}, "max_queue=0: must be at least 1"),
        ({"device": "gpu0"}, "device='gpu0' is no device"),
        ({"device": "cuda:99"}, "device='cuda:99': torch sees"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_a_wrong_option_is_said_before_the_base_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(server_module, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=re.escape(message)):
        server_module.run(root / "family", port=0, **option)


def test_a_port_in_use_is_said_before_the_base_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=f"cannot listen on 127.0.0.1 port {port}"):
            server_module.run(root / "family", port=port)
    with pytest.raises(ServingError, match=r"cannot listen on no\.such\.host"):
        server_module.run(root / "family", host="no.such.host.invalid")


def test_a_key_file_that_is_no_text_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"keys' is no ASCII text"):
        server_module.run(root / "family", api_key_file=tmp_path / "keys")
