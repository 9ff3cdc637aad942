"""The front before replicas that do as the test says: who is asked, what is retried and told."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from browser_kit import ABSENT, CHROMIUM, browsing
from front_kit import ADMIN, NAMES, Fake, Stage, Transport, stage
from prometheus_client.parser import text_string_to_metric_families
from serving_kit import wait_for

from soupkit.errors import ServingError
from soupkit.serving import fleet as fleet_module
from soupkit.serving import front as front_module
from soupkit.serving.fleet import Fleet
from soupkit.serving.front import MAX_LOST
from soupkit.serving.front_app import FrontServer
from soupkit.serving.replica_process import ReplicaSettings

LEAVING = (503, {"message": "the server is stopping", "code": "unavailable"})


def play(scene: Callable[[Stage], Awaitable[None]], count: int = 2, **settings: Any) -> None:
    async def run() -> None:
        async with stage(count, **settings) as found:
            await scene(found)

    asyncio.run(asyncio.wait_for(run(), 60))


def events(answer: httpx.Response) -> list[Any]:
    parts = [part for part in answer.text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts), answer.text
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def test_a_model_is_asked_where_it_is() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[1].phases["b"] = "resident"
        await it.sees()
        assert [(await it.ask("b")).json()["from"] for _ in range(3)] == [1, 1, 1]
        first = (await it.ask("a")).json()["from"]
        assert {(await it.ask("a")).json()["from"] for _ in range(3)} == {first}

    play(scene)


def test_followers_go_to_the_load_before_the_replica_has_told_of_it() -> None:
    async def scene(it: Stage) -> None:
        held = asyncio.Event()
        for fake in it.fakes:
            fake.hold = held
        asked = [asyncio.create_task(it.ask("a")) for _ in range(6)]
        while sum(len(fake.asked) for fake in it.fakes) < 6:
            await asyncio.sleep(0)
        # More than a batch of two: but the load is still under way, and no second one begins.
        assert sorted(len(fake.asked) for fake in it.fakes) == [0, 6]
        held.set()
        assert {(await one).status_code for one in asked} == {200}

    play(scene)


def test_a_hot_model_is_copied_and_then_shared() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        await it.sees()
        held = asyncio.Event()
        for fake in it.fakes:
            fake.hold = held
        asked = [asyncio.create_task(it.ask("a")) for _ in range(4)]
        while sum(len(fake.asked) for fake in it.fakes) < 4:
            await asyncio.sleep(0)
        assert [len(fake.asked) for fake in it.fakes] == [2, 2]
        assert it.fleet.copies == 1
        held.set()
        await asyncio.gather(*asked)

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_replica_is_lost_goes_to_another(stream: bool) -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].lose = 1
        await it.sees()
        answer = await it.ask("a", stream=stream)
        assert answer.status_code == 200
        assert it.fakes[1].asked == ["a"]
        if stream:
            assert events(answer) == [{"n": 0}, {"n": 1}, {"n": 2}, "[DONE]"]

    play(scene)


def test_a_stream_that_was_lost_before_its_first_event_goes_to_another() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].cut = 0
        await it.sees()
        assert events(await it.ask("a", stream=True))[-1] == "[DONE]"
        assert [fake.asked for fake in it.fakes] == [["a"], ["a"]]

    play(scene)


def test_a_stream_that_had_begun_ends_with_a_clean_error() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].cut = 2  # in the middle of the third event
        await it.sees()
        *begun, last = events(await it.ask("a", stream=True))
        assert begun == [{"n": 0}, {"n": 1}]
        assert (last["error"]["code"], last["error"]["type"]) == ("replica_lost", "server_error")
        assert it.fakes[1].asked == []
        metrics = (await it.client.get("/metrics")).text
        assert "soupkit_front_lost_streams_total 1.0" in metrics

    play(scene)


def test_a_request_that_kills_replicas_does_not_kill_them_all() -> None:
    async def scene(it: Stage) -> None:
        for fake in it.fakes:
            fake.lose = 1
        answer = await it.ask("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert sum(fake.lose for fake in it.fakes) == len(it.fakes) - MAX_LOST
        assert (await it.ask("base")).status_code in (200, 503)

    play(scene, MAX_LOST + 2)


def test_a_replica_that_leaves_is_passed_by() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].refuse = LEAVING
        await it.sees()
        assert (await it.ask("a")).json()["from"] == 1
        it.fakes[1].refuse = LEAVING
        answer = await it.ask("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")

    play(scene)


def test_a_request_waits_if_all_others_are_down_when_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.2)

    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        await it.sees()
        it.fakes[0].refuse, it.fakes[0].then = LEAVING, "draining"
        it.fakes[1].over.set()
        it.fleet.note_fault(it.fleet.members[1])
        assert (await it.ask("a")).json() == {"from": 1, "model": "a"}
        assert it.fakes[0].asked == ["a"]

    play(scene)


@pytest.mark.parametrize(
    ("status", "code"), [(400, None), (404, "model_not_found"), (429, "queue_full")]
)
def test_what_a_replica_refuses_is_no_other_ones(status: int, code: str | None) -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].phases["a"] = "resident"
        it.fakes[0].refuse = (status, {"message": "no", "code": code})
        await it.sees()
        answer = await it.ask("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert it.fakes[1].asked == []

    play(scene)


def test_bodies_that_are_none_are_a_replicas_to_refuse() -> None:
    async def scene(it: Stage) -> None:
        for fake in it.fakes:
            fake.refuse = (400, {"message": "no", "code": None})
        for body in (b"[1]", b"{", b'{"model": 3}', b'{"model": "zzz", "n": "many", "prompt": []}'):
            answer = await it.client.post("/v1/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no")

    play(scene)


def test_one_that_ends_is_started_again_and_requests_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        it.fakes[0].over.set()
        assert (await it.ask("a")).json() == {"from": 0, "model": "a"}
        assert len(it.fakes) == 2
        assert it.fleet.members[0].restarts == 1
        # One whose engine has stopped is replaced, too.
        it.fakes[1].state = "cannot generate"
        it.fakes[1].refuse = LEAVING
        while len(it.fakes) < 3:
            it.fleet.members[0].ask_now.set()
            await asyncio.sleep(0)
        assert (await it.ask("a")).status_code == 200

    play(scene, 1)


def test_unloading_hides_a_model_on_all_and_loading_shows_it() -> None:
    async def scene(it: Stage) -> None:
        for fake in it.fakes:
            fake.phases["a"] = "resident"
        await it.sees()
        body = {"lora_name": "a"}
        told = await it.client.post("/v1/unload_lora_adapter", json=body, headers=ADMIN)
        assert told.json() == {
            "id": "a", "freed_bytes": {"device": 20, "host": 0}, "shared_with": [],
            "requests_ended": 2, "seconds": 0.2,
        }  # fmt: skip
        assert [fake.hidden for fake in it.fakes] == [{"a"}, {"a"}]
        listed = (await it.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["base", "b", "c"]
        refused = await it.ask("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await it.client.get("/v1/models/a")).status_code == 404
        again = await it.client.post("/v1/unload_lora_adapter", json=body, headers=ADMIN)
        assert again.status_code == 404
        # One replica loads it; another one does before it first answers for it.
        await it.client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert sorted(len(fake.loads) for fake in it.fakes) == [0, 1]
        (there,) = [i for i, fake in enumerate(it.fakes) if fake.loads]
        assert (await it.ask("a")).json()["from"] == there
        it.fakes[there].refuse = LEAVING
        assert (await it.ask("a")).json()["from"] == 1 - there
        assert [len(fake.loads) for fake in it.fakes] == [1, 1]

    play(scene)


def test_a_hidden_model_stays_hidden_when_a_replica_is_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        await it.client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=ADMIN)
        it.fakes[0].over.set()
        assert (await it.ask("b")).status_code == 200
        assert "a" not in it.fakes[1].hidden
        assert (await it.ask("a")).status_code == 404
        assert "a" not in [m["name"] for m in (await it.client.get("/status")).json()["models"]]

    play(scene, 1)


def test_an_unload_that_all_refuse_hides_nothing() -> None:
    async def scene(it: Stage) -> None:
        answer = await it.client.post(
            "/v1/unload_lora_adapter", json={"lora_name": "none"}, headers=ADMIN
        )
        assert answer.status_code == 404
        assert (await it.ask("a")).status_code == 200

    play(scene)


def test_pins_are_shared_out_and_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)

    async def scene(it: Stage) -> None:
        assert [fake.line["settings"]["pin"] for fake in it.fakes] == [["a", "c"], ["b"]]

        async def pin(name: str, pinned: bool) -> None:
            body = {"lora_name": name, "pinned": pinned}
            told = await it.client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
            assert told.json() == {"id": name, "pinned": pinned}
            await it.sees()

        await pin("c", False)  # where it is pinned
        assert [fake.pinned for fake in it.fakes] == [{"a"}, {"b"}]
        await pin("b", True)
        assert [fake.pinned for fake in it.fakes] == [{"a"}, {"b"}]
        it.fakes[0].over.set()
        while len(it.fakes) < 3 or not it.fleet.members[0].is_up:
            await asyncio.sleep(0)
        assert it.fakes[2].line["settings"]["pin"] == ["a"]

    play(scene, pin=("a", "b", "c"))


def test_status_and_metrics_are_of_all_replicas() -> None:
    async def scene(it: Stage) -> None:
        it.fakes[1].phases["a"] = "resident"
        it.fakes[0].phases["a"] = "failed"
        await it.sees()
        told = (await it.client.get("/status")).json()
        assert (told["state"], told["queue"]["max_running"], told["device"]["slots"]) == (
            "ready", 4, 4,
        )  # fmt: skip
        (a,) = [model for model in told["models"] if model["name"] == "a"]
        assert (a["requests"], a["first_token_p99"]) == (6, 0.2)
        assert (a["variant"]["phase"], a["variant"]["misses"]) == ("resident", 4)
        assert [one["resident"] for one in told["replicas"]] == [[], ["a"]]
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families((await it.client.get("/metrics")).text)
            for sample in family.samples
        }
        assert found["soupkit_loads_total", "0"] == found["soupkit_loads_total", "1"] == 2
        assert found["soupkit_replica_up", "1"] == 1
        it.fakes[0].over.set()
        it.fakes[1].over.set()
        await it.sees()
        assert (await it.client.get("/ready")).status_code == 503
        assert (await it.client.get("/status")).json()["state"] == "cannot generate"
        assert (await it.client.get("/health")).status_code == 200
        assert "soupkit_replica_up" in (await it.client.get("/metrics")).text

    play(scene)


def test_keys_are_asked_for_at_the_front() -> None:
    async def scene(it: Stage) -> None:
        assert (await it.ask("a")).status_code == 401
        it.client.headers["authorization"] = "Bearer secret"
        assert (await it.ask("a")).status_code == 200
        body = {"lora_name": "a"}
        assert (await it.client.post("/v1/load_lora_adapter", json=body)).status_code == 401
        assert it.fakes[0].line["keys"] == ["secret"]
        missing = await it.client.get("/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")

    play(scene, keys=("secret",))


def test_a_client_that_goes_takes_its_request_with_it() -> None:
    async def scene(it: Stage) -> None:
        for fake in it.fakes:
            fake.hold = asyncio.Event()  # never set
        body = [
            {"type": "http.request", "body": b'{"model": "a", "prompt": "x"}'},
            {"type": "http.disconnect"},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            while len(body) == 1 and not any(fake.asked for fake in it.fakes):
                await asyncio.sleep(0)
            return body.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
            "raw_path": b"/v1/completions", "query_string": b"", "server": ("front", 80),
        }  # fmt: skip
        await it.app(scope, receive, send)
        assert sent[0]["status"] == 499

    play(scene)


def test_no_request_waits_for_ever_or_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(it: Stage) -> None:
        it.fakes[0].over.set()
        await it.sees()
        it.fleet._max_wait_seconds = 0.0
        answer = await it.ask("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        it.fleet._max_wait_seconds = 3600.0
        waiting = asyncio.create_task(it.ask("a"))
        while not it.fleet._changed._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        it.fleet.terminate()
        assert "is stopping" in (await waiting).json()["error"]["message"]

    play(scene, 1)


def test_a_replica_that_cannot_start_is_told_at_once_and_ends_the_others() -> None:
    started: list[Fake] = []

    async def spawn(line: str) -> Fake:
        if json.loads(line)["index"] == 1:
            raise ServingError("no such family")
        started.append(Fake(json.loads(line), url="http://replica0"))
        return started[-1]

    async def run() -> None:
        async with httpx.AsyncClient(transport=Transport({})) as client:
            fleet = Fleet(
                ReplicaSettings("family"), count=2, client=client, spawn=spawn, max_wait_seconds=1
            )
            with pytest.raises(ServingError, match="no such family"):
                await fleet.start()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert [fake.over.is_set() for fake in started] == [True]


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_while_replicas_come_and_go(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered once, by its own model, or told that its stream was lost."""
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "MAX_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(front_module, "MAX_LOST", 50)
    rng = random.Random(seed)
    found: Counter[str] = Counter()

    async def one(it: Stage) -> None:
        name, stream = rng.choice(["base", *NAMES]), rng.random() < 0.5
        answer = await it.ask(name, stream=stream)
        assert answer.status_code == 200, answer.text
        if not stream:
            assert answer.json()["model"] == name
            found["whole"] += 1
            return
        *begun, last = events(answer)
        assert begun == [{"n": n} for n in range(len(begun))]
        if last == "[DONE]":
            assert len(begun) == 3
        else:
            assert last["error"]["code"] == "replica_lost"
            assert begun
        found["cut" if last != "[DONE]" else "stream"] += 1

    async def scene(it: Stage) -> None:
        tasks = []
        for number in range(150):
            tasks.append(asyncio.create_task(one(it)))
            if number % 25 == 24:
                rng.choice(it.fakes[-3:]).over.set()
            living = [fake for fake in it.fakes if not fake.over.is_set()]
            for fake in living:
                fake.cut = rng.choice([None, None, None, 0, 1, 2])
            if number % 10 == 0 and living:
                rng.choice(living).lose = 1
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert len(it.fakes) > 3

    play(scene, 3)
    assert found.total() == 150
    assert min(found["whole"], found["stream"], found["cut"]) > 0


@pytest.mark.skipif(not CHROMIUM, reason=ABSENT)
def test_a_browser_shows_all_replicas() -> None:
    cards = "[...document.querySelectorAll('#cards section')].map((card) => card.innerText)"

    def look(url: str) -> list[str]:
        with browsing() as browser:
            browser.open(f"{url}/", width=1280, height=800)
            wait_for(lambda: browser.run("document.querySelectorAll('#models tr').length"), "rows")
            found: list[str] = browser.run(cards)
            return found

    async def scene(it: Stage) -> None:
        server = FrontServer(it.app, it.fleet, host="127.0.0.1", port=0)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        it.fakes[0].phases["a"] = "resident"
        it.fakes[1].state = "draining"
        await it.sees()
        host, port = server.address
        told = await asyncio.to_thread(look, f"http://{host}:{port}")
        assert [text.split() for text in told if "Replicas" in text] == [
            ["Replicas", "1", "of", "2", "ready,", "0", "restarts"]
        ]
        server.should_exit = True
        await serving

    play(scene)
