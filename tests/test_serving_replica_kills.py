"""Three replicas under mixed load over 12 variants, and one of them is killed; then all of them."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving_kit import (
    WAIT,
    Oracle,
    add_to_family,
    make_base,
    metrics_of,
    start_python,
    wait_for,
)

from soupkit.errors import ServingError
from soupkit.serving import rank_process
from soupkit.serving.front_app import run
from soupkit.serving.pretrained import load_model
from soupkit.serving.rank_process import Place, start_ranks

NAMES = [f"v{i}" for i in range(12)]
TOKENS = 24
PROMPTS = ("hello", "once", "1 + 1 =", "z" * 40)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    make_base(root / "base")
    for seed, name in enumerate(NAMES, start=1):
        add_to_family(root, name, lambda name: "_proj" in name, encoding="row", seed=seed)
    return root


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def fleet(
    root: Path, *, early: str = "", **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The front's process, which does `early` first, and its address; with it all replicas end."""
    code = (
        f"{early}\n"
        "from soupkit.serving.front_app import run\n"
        f"run({str(root / 'family')!r}, port=0, device='cpu', **{settings!r})"
    )
    process, lines = start_python(code)
    started = next((line for line in lines if line.startswith("soupkit serves")), "")
    # Nobody may wait for a pipe that is full; pytest shows what it said when a test fails.
    reader = threading.Thread(target=lambda: sys.stdout.write(lines.read()))
    reader.start()
    replicas = children(process.pid)
    try:
        assert started, "the front did not start"
        yield process, started.split()[-1]
    finally:
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_alive, replicas)), "its replicas end with it")
        reader.join(WAIT)
        lines.close()


class Asker:
    """Sends requests and holds every answer against the dense model's."""

    def __init__(self, url: str, expected: dict[tuple[str, str], str]) -> None:
        self._url, self._expected = url, expected
        self._client = httpx.Client(timeout=WAIT, limits=httpx.Limits(max_connections=None))
        self.found: Counter[str] = Counter()

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: Any) -> None:
        self._client.close()

    def __call__(self, name: str, prompt: str, stream: bool) -> None:
        body = {
            "model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "stream": stream,
        }  # fmt: skip
        expected, url = self._expected[name, prompt], f"{self._url}/v1/completions"
        if not stream:
            answer = self._client.post(url, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
            self.found["whole"] += 1
            return
        with self._client.stream("POST", url, json=body) as answer:
            told = answer.read().decode()
        assert answer.status_code == 200, told
        *events, last = [part.removeprefix("data: ") for part in told.split("\n\n") if part]
        texts = [json.loads(event)["choices"][0]["text"] for event in events]
        if last == "[DONE]":
            assert "".join(texts) == expected
            self.found["stream"] += 1
            return
        assert json.loads(last)["error"]["code"] == "replica_lost", last
        assert events, "a stream that had not begun is answered by another replica"
        assert expected.startswith("".join(texts))
        self.found["cut"] += 1


def long_stream(url: str, name: str, begun: threading.Event) -> str:
    """How a stream of many tokens ends: its last event."""
    body = {
        "model": name, "prompt": "x", "max_tokens": 170, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as answer:
        for line in filter(None, answer.iter_lines()):
            begun.set()
            last = line.removeprefix("data: ")
    return last


def replicas_of(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/status", timeout=WAIT).json()["replicas"]
    return found


@pytest.mark.slow
def test_a_killed_replica_loses_no_request_that_had_not_begun_slice(root: Path) -> None:
    oracle = Oracle(root, names=NAMES)
    expected = {(n, p): oracle(n, p, TOKENS) for n in (*NAMES, "base") for p in PROMPTS}
    rng = random.Random(0)
    with (
        fleet(root, replicas=3, max_running=4, max_queue=200) as (front, url),
        Asker(url, expected) as asker,
        ThreadPoolExecutor(24) as pool,
    ):

        def send(count: int, names: list[str]) -> list[Any]:
            return [
                pool.submit(asker, rng.choice(names), rng.choice(PROMPTS), rng.random() < 0.5)
                for _ in range(count)
            ]

        # One of each, one after the other: every variant is loaded once, on the replicas in turn.
        for name in NAMES:
            asker(name, PROMPTS[0], False)
        metrics = metrics_of(url)
        loads = [metrics[f"soupkit_loads_total,{i}"] for i in range(3)]
        assert sum(loads) == len(NAMES)
        assert min(loads) >= 2
        # A hot one is copied, as its batch is full.
        for sent in [pool.submit(asker, "v0", PROMPTS[i % 4], False) for i in range(60)]:
            sent.result()
        wait_for(
            lambda: sum("v0" in one["resident"] for one in replicas_of(url)) >= 2,
            "the hot variant is on two replicas",
        )
        assert metrics_of(url)["soupkit_front_copies_total"] >= 1
        # Streams of what one replica alone holds, on each of them; then mixed load, and one dies.
        held = [one["resident"] for one in replicas_of(url)]
        alone = [next(v for v in names if sum(v in there for there in held) == 1) for names in held]
        begun = [threading.Event() for _ in alone]
        with ThreadPoolExecutor(3) as others:
            pairs = zip(alone, begun, strict=True)
            streams = [others.submit(long_stream, url, *pair) for pair in pairs]
            assert all(event.wait(WAIT) for event in begun)
            sent = send(240, [*NAMES, *["v0"] * 6, "base"])
            wait_for(lambda: sum(one["open"] for one in replicas_of(url)) > 20, "it is busy")
            os.kill(children(front.pid)[0], signal.SIGKILL)
            ends = sorted(stream.result() for stream in streams)
        assert ends[:2] == ["[DONE]", "[DONE]"]
        assert json.loads(ends[2])["error"]["code"] == "replica_lost"
        for one in sent:
            one.result()
        assert asker.found.total() == len(NAMES) + 60 + 240
        assert asker.found["cut"] <= 4, "more than its batch"
        # It comes back, and answers.
        wait_for(
            lambda: (
                [one["restarts"] for one in replicas_of(url)].count(1) == 1
                and all(one["state"] == "ready" for one in replicas_of(url))
            ),
            "the replica is back",
        )
        for one in send(60, NAMES):
            one.result()
        assert len(children(front.pid)) == 3
        # kill -9 of the front itself takes its replicas along: `fleet` asks.
    print(dict(asker.found))


@pytest.mark.slow
def test_a_stop_answers_what_is_open_and_leaves_no_process(root: Path) -> None:
    with fleet(root, replicas=2, max_running=4) as (front, url):
        replicas = children(front.pid)
        body = {"model": "v1", "prompt": "x", "max_tokens": 150, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as stream:
            lines = stream.iter_lines()
            next(lines)
            front.send_signal(signal.SIGTERM)
            assert [text for text in lines if text][-1] == "data: [DONE]", "an open one was cut"
        assert front.wait(WAIT) in (0, -signal.SIGTERM)
        assert not any(map(is_alive, replicas))


@pytest.mark.slow
def test_two_ranks_of_a_replica_answer_as_one_and_end_together_slice(root: Path) -> None:
    names, oracle = [*NAMES[:3], "base"], Oracle(root, names=NAMES[:3])
    expected = {(n, p): oracle(n, p, TOKENS) for n in names for p in PROMPTS[:2]}
    with (
        fleet(root, replicas=1, tensor_parallel=2, cache_bytes=8000) as (front, url),
        Asker(url, expected) as asker,
    ):
        # Three variants in two slots of a rank's part each: all go, and come back.
        for prompt in PROMPTS[:2]:
            for number, name in enumerate(names):
                asker(name, prompt, number % 2 == 0)
        assert metrics_of(url)["soupkit_loads_total,0"] > 3
        [replica] = children(front.pid)
        [rank] = children(replica)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not is_alive(replica), "the replica ends with its rank")
        asker("v0", PROMPTS[0], False)
        [replica] = children(front.pid)
        [rank] = children(replica)
    # kill -9 of the front took its replica along.
    wait_for(lambda: not is_alive(rank), "the rank ends with its replica")


def test_what_ranks_cannot_share_is_refused_in_a_line(root: Path) -> None:
    with pytest.raises(ServingError, match=r"--tensor-parallel 3: the base has 4 heads and 2 key"):
        load_model(root / "base", device="cpu", dtype=torch.float32, tensor_parallel=3)
    place = Place(0, 2, gpu=0)
    with pytest.raises(ServingError, match="--device cuda:1 is one device"):
        start_ranks({"device": "cuda:1"}, place)
    with pytest.raises(ValueError, match="tensor_parallel=0"):
        run(root / "family", replicas=1, tensor_parallel=0)


@pytest.mark.slow
def test_a_replica_that_hangs_is_replaced_and_what_it_held_is_answered(root: Path) -> None:
    early = "from soupkit.serving import fleet; fleet.HANG_SECONDS = 3.0"
    with fleet(root, early=early, replicas=2, max_running=4) as (front, url):
        body = {"model": "v1", "prompt": "x", "max_tokens": 4, "temperature": 0}
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
        os.kill(children(front.pid)[0], signal.SIGSTOP)
        os.kill(children(front.pid)[1], signal.SIGSTOP)
        again = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT * 3)
        assert again.json()["choices"] == first.json()["choices"]
        assert [one["restarts"] for one in replicas_of(url)].count(1) >= 1


def test_a_rank_that_was_told_to_end_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end while the first still closes its connections."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for code in (0, 1, -9):
        child = subprocess.Popen([sys.executable, "-c", "pass"])
        child.wait()
        monkeypatch.setattr(child, "wait", lambda code=code: code)
        rank_process._follow_child(child)  # type: ignore[arg-type]
    assert ended == [1, 1]
