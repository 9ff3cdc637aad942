"""Processes of replicas that hang and do not end: stopped at odd moments, by SIGSTOP."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving_kit import WAIT, add_to_family, make_base, wait_for
from test_serving_replica_kills import children, fleet, is_alive, long_stream, replicas_of


def early(still: float, hang: float = 30.0) -> str:
    return (
        "from soupkit.serving import fleet\n"
        f"fleet.STILL_SECONDS, fleet.HANG_SECONDS = {still}, {hang}"
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    make_base(root / "base")
    for seed, name in enumerate(("v0", "v1"), start=1):
        add_to_family(root, name, lambda name: "_proj" in name, encoding="row", seed=seed)
    return root


def ask(url: str, **more: object) -> httpx.Response:
    body = {"model": "v1", "prompt": "x", "max_tokens": 4, "temperature": 0} | more
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT * 3)


@pytest.mark.slow
def test_a_stopped_rank_has_its_replica_replaced_slice(root: Path) -> None:
    check_stopped_rank(root, busy=True)


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_nobody_asks_has_its_replica_replaced(root: Path) -> None:
    check_stopped_rank(root, busy=False)


def check_stopped_rank(root: Path, *, busy: bool) -> None:
    with fleet(root, early=early(8.0), replicas=1, tensor_parallel=2, max_running=1) as it:
        front, url = it
        first = ask(url)
        [replica] = children(front.pid)
        [rank] = children(replica)
        with ThreadPoolExecutor(2) as pool:
            if busy:
                begun = threading.Event()
                stream = pool.submit(long_stream, url, "v1", begun)
                assert begun.wait(WAIT)
            os.kill(rank, signal.SIGSTOP)
            waiting = pool.submit(ask, url)  # its batch has no place
            if busy:
                assert json.loads(stream.result())["error"]["code"] == "replica_lost"
            assert waiting.result().json()["choices"] == first.json()["choices"]
        wait_for(lambda: not is_alive(replica), "the replica is gone")
        wait_for(lambda: not is_alive(rank), "and its rank")
        assert [one["restarts"] for one in replicas_of(url)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_replica_that_is_stopped_at_its_start_is_started_again(root: Path, whole: bool) -> None:
    """whole: the first rank, at once; else the second, as soon as there is one."""
    with fleet(root, early=early(6.0, 6.0), replicas=1, tensor_parallel=2) as (front, url):
        first = ask(url)
        [replica] = children(front.pid)
        os.kill(replica, signal.SIGKILL)
        wait_for(lambda: children(front.pid) not in ([], [replica]), "it is started anew")
        [again] = children(front.pid)
        if whole:
            stopped = again
        else:
            wait_for(lambda: children(again), "its second rank is started")
            [stopped] = children(again)
        os.kill(stopped, signal.SIGSTOP)
        assert ask(url).json()["choices"] == first.json()["choices"]
        assert not is_alive(again)
        wait_for(lambda: not is_alive(stopped), "none of its processes is left")
        assert [one["restarts"] for one in replicas_of(url)] == [2]


@pytest.mark.slow
def test_a_front_that_was_stopped_for_long_blames_no_replica(root: Path) -> None:
    with fleet(root, early=early(1.5, 1.5), replicas=2) as (front, url):
        replicas = children(front.pid)
        os.kill(front.pid, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/health", timeout=5.0)
        os.kill(front.pid, signal.SIGCONT)
        assert ask(url).status_code == 200
        assert [one["restarts"] for one in replicas_of(url)] == [0, 0]
        assert children(front.pid) == replicas
