"""Bodies that are wrong, hostile or huge: a client error that names the field, and nothing else."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_kit import CONTEXT, WAIT, make_family, serving, wait_for

from soupkit.serving import gate
from soupkit.serving.gate import MAX_BODY_BYTES


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as (_, address):
        yield address


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
    ("completions", {"prompt": ["x"] * 129}, "prompt"),
    ("completions", {"prompt": ["x"] * 65, "n": 2}, "prompt"),
    ("completions", {"prompt": ["x", [5]]}, "prompt"),
    ("completions", {"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options"),
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


@pytest.mark.parametrize(
    "field",
    [
        '"top_k": 1' + "0" * 400,
        '"temperature": 1e-320',
        '"top_p": 1e-320',
        '"seed": -9223372036854775808, "n": 2',
        '"stop": ["' + "x" * 100_000 + '"]',
    ],
)
def test_extreme_numbers_are_answered(url: str, field: str) -> None:
    text = '{"model": "linear", "prompt": "x", "max_tokens": 3, ' + field + "}"
    header = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=text, headers=header, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{url}/ready").status_code == 200


@pytest.mark.parametrize(
    "prompt",
    ["[" + "5," * 300_000 + '"x"]', "[" + '"x",' * 300_000 + "5]", "[" + "[]," * 300_000 + "[]]"],
)
def test_a_long_wrong_list_costs_no_more_than_its_first_fault(url: str, prompt: str) -> None:
    text = '{"model": "base", "prompt": ' + prompt + "}"
    header = {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=text, headers=header, timeout=WAIT)
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    # A message for each of the entries took ten seconds and a gigabyte.
    assert answer.elapsed.total_seconds() < 5


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_before_it_is_read(url: str, chunked: bool) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(20 * MAX_BODY_BYTES >> 20):
            sent += 1 << 20
            yield b" " * (1 << 20)

    length = {} if chunked else {"content-length": str(20 * MAX_BODY_BYTES)}
    header = {"content-type": "application/json"} | length
    try:
        answer = httpx.post(f"{url}/v1/completions", content=parts(), headers=header, timeout=WAIT)
    except httpx.WriteError:
        pass  # the server closed the connection while the client was still writing
    else:
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/ready").status_code == 200


def test_a_long_text_does_not_hold_up_the_streams_of_others(url: str) -> None:
    body = {"model": "base", "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        long = {"model": "base", "prompt": "a b " * 500_000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            refused = pool.submit(httpx.post, f"{url}/v1/completions", json=long, timeout=WAIT)
            assert list(lines)[-1] == "data: [DONE]"
            assert not refused.done(), "the stream waited for the long text"
        assert refused.result().json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_never_ends_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with serving(root) as (server, url):
        for length in (b"content-length: 1000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n7\r\n"):
            with socket.create_connection(server.address, timeout=WAIT) as client:
                client.sendall(head + length + b'{"model')
                # One whose other end is gone is noticed by the system.
                wait_for(lambda: server.server_state.connections, "it is connected")
                (connection,) = server.server_state.connections
                kept = connection.transport.get_extra_info("socket")
                assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                with client.makefile("rb") as file:
                    answer = file.read()
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert b"did not come within 0.3 seconds" in answer
            wait_for(lambda: not server.server_state.connections, "it is closed")
        # An answer may take longer than that.
        load = server._service.catalog.load
        server._service.catalog.load = lambda ref: (time.sleep(0.6), load(ref))[1]
        body = {"model": "linear", "prompt": "x", "max_tokens": 3}
        for stream in (False, True):
            answer = httpx.post(
                f"{url}/v1/completions", json=body | {"stream": stream}, timeout=WAIT
            )
            assert answer.status_code == 200


def test_a_header_without_end_is_cut_off(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as client:
        client.sendall(b"GET / HTTP/1.1\r\nx: ")
        with pytest.raises(OSError, match="reset by peer|Broken pipe"):  # noqa: RUF043
            client.sendall(b"x" * 50_000_000)
    assert httpx.get(f"{url}/ready").status_code == 200
