"""Run by the Python of a venv with Ray: a family behind Ray Serve, loaded, and a replica killed.

Prints one JSON document: what was answered, where variants were, how streams ended.
"""

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from soupkit.serving.ray_app import family_app
from soupkit.serving.replica_process import ReplicaSettings

WAIT = 120


def replicas() -> list[Any]:
    """Actors of the replicas."""
    found = ray.util.list_named_actors(all_namespaces=True)
    names = [one for one in found if "#FamilyReplica#" in one["name"]]
    return [ray.get_actor(one["name"], namespace=one["namespace"]) for one in names]


class Client:
    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(timeout=WAIT, limits=limits)
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


def held() -> list[list[str]]:
    """What each replica holds, by its own word."""
    told = ray.get([actor.record_routing_stats.remote() for actor in replicas()], timeout=WAIT)
    return [sorted(n for n, phase in one["phases"].items() if phase == "resident") for one in told]


def play(url: str, names: list[str]) -> dict[str, Any]:
    client, rng = Client(url), random.Random(0)
    for name in names:
        client.ask(name, "hello")
    found: dict[str, Any] = {"cold": held()}
    with ThreadPoolExecutor(16) as pool:
        for sent in [pool.submit(client.ask, names[0], "hello") for _ in range(60)]:
            sent.result()
        found["hot"] = held()
        begun = threading.Event()
        stream = pool.submit(client.long, names[-1], begun)
        assert begun.wait(WAIT)
        sent = [
            pool.submit(client.ask, rng.choice(names), rng.choice("ab"), stream=rng.random() < 0.5)
            for _ in range(80)
        ]
        (victim,) = [a for a, there in zip(replicas(), held(), strict=True) if names[-1] in there][
            :1
        ]
        ray.kill(victim, no_restart=True)
        found["long"] = stream.result()
        for one in sent:
            one.result()
    deadline = time.monotonic() + WAIT
    while len(replicas()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    found["replicas"] = len(replicas())
    found["models"] = [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]]
    found["missing"] = httpx.get(f"{url}/nothing").status_code
    return found | {"answers": client.answers}


def main(family: Path, port: int, out: Path) -> None:
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = ReplicaSettings(str(family), max_running=4)
        serve.run(family_app(settings, replicas=2), name="family")
        names = sorted(path.name for path in (family / "variants").iterdir())
        out.write_text(json.dumps(play(f"http://127.0.0.1:{port}", names)))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
