"""Run by the Python of a venv with Ray: a family behind Ray Serve, loaded, replicas killed.

Writes one JSON document: how it answers beside a single process, what was answered, where variants
were, how streams ended, what an administrator was told.
"""

import asyncio
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from serving_kit import metrics_of, serving
from test_serving_front_routes import ADMIN, METHODS, PATHS, SECRET, told

from recipes.serve.ray_family import app
from soupkit.errors import SoupkitError
from soupkit.serving.ray_app import family_app
from soupkit.serving.replica_process import ReplicaSettings

WAIT = 120
KEY, ADMIN_KEY = ({"authorization": f"Bearer {key}"} for key in (SECRET, ADMIN))


def actors(deployment: str) -> dict[str, Any]:
    """Actors of a deployment's replicas by their names."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return {
        one["name"].rpartition("#")[2]: ray.get_actor(one["name"], namespace=one["namespace"])
        for one in found
        if f"#{deployment}#" in one["name"]
    }


def kill(actor: Any) -> None:
    """As the system does it when memory is short."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT), signal.SIGKILL)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for what Ray does in its own time."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


def get(url: str) -> Any:
    return httpx.get(url, headers=KEY, timeout=WAIT).json()


class Client:
    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(timeout=WAIT, limits=limits, headers=KEY)
        self.answers: list[dict[str, Any]] = []

    def ask(self, model: str, prompt: str, *, stream: bool = False, **more: Any) -> dict[str, Any]:
        """Sends one; notes and returns what came."""
        body = {"model": model, "prompt": prompt, "temperature": 0, "stream": stream}
        body |= {"max_tokens": 16} | more
        got = self._client.post(f"{self._url}/v1/completions", json=body)
        found = {"model": model, "prompt": prompt, "status": got.status_code, "end": "whole"}
        if stream:
            *events, last = [p.removeprefix("data: ") for p in got.text.split("\n\n") if p]
            texts = [json.loads(event)["choices"][0]["text"] for event in events]
            found |= {"text": "".join(texts), "events": len(events), "end": last}
        else:
            found["text"] = got.json()["choices"][0]["text"] if got.status_code == 200 else got.text
        self.answers.append(found)
        return found

    def long(self, model: str, begun: threading.Event) -> str:
        """How a stream of many tokens ends."""
        body = {
            "model": model, "prompt": "x", "max_tokens": 170, "ignore_eos": True, "stream": True,
            "temperature": 0,
        }  # fmt: skip
        last = ""
        url = f"{self._url}/v1/completions"
        with self._client.stream("POST", url, json=body) as answer:
            for line in filter(None, answer.iter_lines()):
                begun.set()
                last = line.removeprefix("data: ")
        return last


def held(url: str) -> dict[str, list[str]]:
    """What each replica holds, by its own word."""
    handle = serve.get_deployment_handle("FamilyReplica", "family").options(stream=True)
    found = {}
    for name in actors("FamilyReplica"):
        _, body = list(handle.answer.remote(name, "GET", b"/status", b""))
        models = [one for one in json.loads(body)["models"] if one["variant"]]
        found[name] = [m["name"] for m in models if m["variant"]["phase"] == "resident"]
    return found


def restarts(url: str) -> list[int]:
    return [one["restarts"] for one in get(f"{url}/status")["replicas"]]


def is_whole(url: str, before: list[int], *, replaced: int) -> bool:
    """Whether the front has two replicas, and so many in the place of those of before."""
    told = get(f"{url}/status")["replicas"]
    others = [one["restarts"] > then for one, then in zip(told, before, strict=True)]
    return all(one["state"] == "ready" for one in told) and sum(others) >= replaced


def play(url: str, names: list[str]) -> dict[str, Any]:
    client, rng = Client(url), random.Random(0)
    for name in names:
        client.ask(name, "hello")
    found: dict[str, Any] = {"cold": list(held(url).values())}
    with ThreadPoolExecutor(16) as pool:
        for sent in [pool.submit(client.ask, names[0], "hello") for _ in range(60)]:
            sent.result()
        found["hot"] = list(held(url).values())
        begun = threading.Event()
        stream = pool.submit(client.long, names[-1], begun)
        assert begun.wait(WAIT)
        sent = [
            pool.submit(client.ask, rng.choice(names), rng.choice("ab"), stream=rng.random() < 0.5)
            for _ in range(80)
        ]
        victim = next(one for one, there in held(url).items() if names[-1] in there)
        kill(actors("FamilyReplica")[victim])
        found["long"] = stream.result()
        for one in sent:
            one.result()
    until(
        lambda: is_whole(url, [0, 0], replaced=1),
        "a replica in the place of the one that was killed",
    )
    found["models"] = [m["id"] for m in get(f"{url}/v1/models")["data"]]
    found["metrics"] = metrics_of(url)
    return found | {"answers": client.answers}


def administrate(url: str, gone: str, stays: str) -> dict[str, Any]:
    """An unload and a pin outlive the replicas that they were told to."""
    client = Client(url)

    def tell(route: str, name: str, **body: Any) -> Any:
        path = f"{url}/v1/{route}_lora_adapter"
        answer = httpx.post(path, json={"lora_name": name, **body}, headers=ADMIN_KEY, timeout=WAIT)
        return [answer.status_code, answer.json()]

    def statuses(count: int) -> list[int]:
        return [client.ask(gone, "hello")["status"] for _ in range(count)]

    found = {"unloaded": tell("unload", gone), "again": tell("unload", gone)}
    found |= {"pin": tell("load", stays, pinned=True), "hidden": statuses(1)}
    before = restarts(url)
    for actor in actors("FamilyReplica").values():
        kill(actor)
    until(lambda: is_whole(url, before, replaced=2), "two other replicas")
    found["hidden"] += statuses(4)
    found["listed"] = [m["id"] for m in get(f"{url}/v1/models")["data"]]
    models = {one["name"]: one["variant"] for one in get(f"{url}/status")["models"]}
    found["pinned"] = models[stays]["pinned"]
    found |= {"loaded": tell("load", gone), "shown": statuses(4), "last": tell("unload", gone)}
    (ingress,) = actors("Ingress").values()
    kill(ingress)
    until(lambda: statuses(1) == [200], "an ingress that knows of no unload")
    return found


def refusals(family: str) -> list[str]:
    """What the recipe says to words that it cannot use."""
    found = []
    for words in (
        {}, {"family": "f", "keys": "k"}, {"family": "f", "replicas": "two"},
        {"family": "f", "num_gpus": "-1"}, {"family": "f", "replicas": 0},
        {"family": "f", "max_wait_seconds": "long"}, {"family": "nowhere"},
        {"family": family, "pin": "none"}, {"family": family, "api_key_file": "nowhere"},
    ):  # fmt: skip
        try:
            app(words)
        except (ValueError, SoupkitError) as error:
            found.append(str(error))
    return found


async def compare(url: str, alone: str) -> list[Any]:
    """Requests that are answered in another way than by a single process."""
    found = []

    async with httpx.AsyncClient(timeout=WAIT) as client:
        for key in ("", SECRET, ADMIN):
            for path in PATHS:
                for method in METHODS:
                    one, other = [
                        re.sub(
                            r'"created":\d+', "", repr(await told(client, at, method, path, key))
                        )
                        for at in (alone, url)
                    ]
                    if one != other:
                        found.append([method, path, key, one[:999], other[:999]])
    return found


def main(family: Path, port: int, out: Path) -> None:
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
    )
    files = {}
    for name, key in (("api_key_file", SECRET), ("admin_key_file", ADMIN)):
        (out.parent / name).write_text(key)
        files[name] = str(out.parent / name)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = ReplicaSettings(str(family), max_running=4)
        serve.run(family_app(settings, replicas=2, **files), name="family")
        names = sorted(path.name for path in (family / "variants").iterdir())
        url = f"http://127.0.0.1:{port}"
        with serving(family.parent, keys=(SECRET,), admin_keys=(ADMIN,)) as (_, alone):
            found = {"differ": asyncio.run(compare(url, alone)), "refused": refusals(str(family))}
        found |= play(url, names)
        out.write_text(json.dumps(found | {"admin": administrate(url, *names[:2])}))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
