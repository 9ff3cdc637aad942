"""The soak: that its client sees every kind of wrong answer, and a short one."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from soak import Soak  # noqa: E402
from soak_client import Client, Refusal, Server, Wrong  # noqa: E402
from soak_family import Question  # noqa: E402

QUESTION = Question("v01", "abc", ("d", "</s>", "e", "f"))
BODY = {"model": "v01", "prompt": "abc"}


def whole(
    text: str = "de", *, used: int = 3, model: str = "v01", name: str = "1"
) -> httpx.Response:
    answer = {"id": name, "model": model, "choices": [{"text": text}]}
    return httpx.Response(200, json=answer | {"usage": {"completion_tokens": used}})


def stream(
    *texts: str, used: int = 3, done: int = 1, reasons: tuple[str, ...] = ("length",)
) -> Any:
    choices = [{"text": text, "finish_reason": None} for text in texts]
    choices += [{"text": "", "finish_reason": reason} for reason in reasons]
    chunks: list[dict[str, Any]] = [{"id": "1", "choices": [choice]} for choice in choices]
    chunks.append({"id": "1", "choices": [], "usage": {"completion_tokens": used}})
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"] * done
    return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))


def client_of(answer: Callable[[], httpx.Response]) -> Client:
    transport = httpx.MockTransport(lambda _: answer())
    return Client(httpx.AsyncClient(transport=transport, base_url="http://test"))


def ask(answer: Callable[[], httpx.Response], *, streamed: bool, times: int = 1) -> Any:
    async def main() -> Any:
        client = client_of(answer)
        for _ in range(times):
            if streamed:
                found = await client.stream(dict(BODY), QUESTION, 3, leave_after=None)
            else:
                found = await client.whole(dict(BODY), QUESTION, 3)
        return found

    return asyncio.run(main())


def test_the_right_answer_is_counted() -> None:
    assert ask(whole, streamed=False) == "answered"
    assert ask(lambda: stream("d", "e"), streamed=True) == "answered"


@pytest.mark.parametrize(
    "answer",
    [
        lambda: whole("df"),
        lambda: whole("d"),
        lambda: whole(used=2),
        lambda: whole(model="v02"),
    ],
)
def test_a_wrong_answer_is_seen(answer: Callable[[], httpx.Response]) -> None:
    with pytest.raises(Wrong):
        ask(answer, streamed=False)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: stream("d", "f"),
        lambda: stream("d"),
        lambda: stream("d", "e", "f"),
        lambda: stream("d", "e", used=4),
        lambda: stream("d", "e", done=2),
        lambda: stream("d", "e", reasons=()),
        lambda: stream("d", "e", reasons=("length", "length")),
        lambda: stream("d", "e", reasons=("stop",)),
    ],
)
def test_a_wrong_stream_is_seen(answer: Callable[[], httpx.Response]) -> None:
    with pytest.raises(Wrong):
        ask(answer, streamed=True)


def test_an_answer_that_comes_twice_is_seen() -> None:
    with pytest.raises(Wrong, match="twice"):
        ask(whole, streamed=False, times=2)


def test_a_stream_that_breaks_off_is_a_lost_connection() -> None:
    with pytest.raises(httpx.ReadError):
        ask(lambda: stream("d", "e", done=0), streamed=True)


def soak_of(tmp_path: Path) -> Soak:
    server = Server(tmp_path, tmp_path, ())
    return Soak(server, ["v01"], [QUESTION], num_requests=1, seed=0, kills=0)


@pytest.mark.parametrize(
    ("status", "message", "was_changed", "is_broken", "violations"),
    [
        (500, "internal error", True, True, 1),
        (503, "variant 'v01' cannot be loaded", False, False, 1),
        (503, "variant 'v01' cannot be loaded", False, True, 0),
        (503, "no name", False, True, 1),
        (404, "it was unloaded", True, False, 0),
        (404, "unknown", False, False, 1),
        (400, "prompt", True, True, 1),
    ],
)
def test_only_errors_with_a_reason_pass(
    tmp_path: Path,
    status: int,
    message: str,
    was_changed: bool,
    is_broken: bool,
    violations: int,
) -> None:
    soak = soak_of(tmp_path)
    soak.broken = {"v01": "lost"} if is_broken else {}
    refusal = Refusal(status, {"error": {"message": message}})
    assert asyncio.run(soak._refused("v01", refusal, was_changed=was_changed))
    assert len(soak.violations) == violations


def test_a_lost_connection_without_a_kill_is_a_violation(tmp_path: Path) -> None:
    def break_off() -> httpx.Response:
        raise httpx.ReadError("gone")

    async def main() -> None:
        soak.client = client_of(break_off)
        soak.up.set()
        assert await soak._ask_once(random.Random(0), 0)

    soak = soak_of(tmp_path)
    asyncio.run(main())
    assert len(soak.violations) == 1


@pytest.mark.slow
def test_slice_of_the_soak_with_a_kill_has_no_violation(tmp_path: Path) -> None:
    options = ["--requests", "300", "--kills", "1", "--seed", "7", "--out", str(tmp_path / "soak")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "soak.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("open at a kill", "told that it was damaged", "0 violations"):
        assert what in done.stdout
