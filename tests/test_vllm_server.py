"""A family behind vLLM's own OpenAI server, in processes of its own, over HTTP."""

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving_kit import add_to_family, client_of, make_family, metrics_of, wait_for
from vllm_kit import (
    HEAD_DIM,
    NEEDS_VLLM,
    Server,
    Tokens,
    free_port,
    processes_of,
    running_server,
    runs,
    started,
)

from soupkit.serving.vllm.store import Store

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

NAMES = ("linear", "norms", "embed", "matrix", "rich")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Five variants, three slots; loading and unloading over HTTP are allowed."""
    root = make_family(tmp_path_factory.mktemp("served"), head_dim=HEAD_DIM)
    for seed, name in enumerate(("slow", "gone", "rotten", "changing", "waiting"), start=60):
        add_to_family(root, name, lambda n: "_proj" in n, encoding="row", seed=seed)
    with running_server(root, slots=3, SOUPKIT_RUNTIME_LOADS="1") as running:
        yield running
    assert not copies(running)


@pytest.fixture(scope="module")
def oracle(server: Server) -> Tokens:
    return Tokens(server.root)


IDS = {"return_token_ids": True, "ignore_eos": True}


def tokens_of(server: Server, model: str, prompt: str = PROMPT, count: int = 12) -> list[int]:
    made: Any = client_of(server.url).completions.create(
        model=model, prompt=prompt, max_tokens=count, temperature=0, extra_body=IDS
    )
    return list(made.choices[0].token_ids)


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def check_alive(server: Server, oracle: Tokens) -> None:
    for model in ("base", "linear"):
        assert tokens_of(server, model) == oracle(model, PROMPT, 12)


def copies(server: Server) -> list[Path]:
    return list(Path("/dev/shm").glob(f"soupkit-{server.process.pid}-*/*"))


def test_openai_client_lists_all_variants_and_each_answers_as_itself(
    server: Server, oracle: Tokens
) -> None:
    client = client_of(server.url)
    listed = {model.id for model in client.models.list()}
    assert {"base", *NAMES, "slow"} <= listed
    jobs = [(model, f"{PROMPT} {n}") for n in range(4) for model in ("base", *NAMES)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda job: tokens_of(server, *job), jobs))
    assert found == [oracle(model, prompt, 12) for model, prompt in jobs]


def test_chat_streams_with_usage(server: Server, oracle: Tokens) -> None:
    stream = client_of(server.url).chat.completions.create(
        model="norms",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IDS,
    )
    chunks: list[Any] = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    found = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
    assert found == oracle("norms", "<|user|>Who?</s><|assistant|>", 8, special=False)
    assert chunks[-1].usage.completion_tokens == 8
    assert {chunk.model for chunk in chunks} == {"norms"}


def test_an_unknown_model_gets_404(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        tokens_of(server, "nobody")


class Stream(threading.Thread):
    """A stream of the base's tokens, counted as they come, until `stop`."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.count, self.stops = 0, threading.Event()
        self._server = server

    def run(self) -> None:
        while not self.stops.is_set():
            stream = client_of(self._server.url).completions.create(
                model="base", prompt=PROMPT, max_tokens=100, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            for _ in stream:
                self.count += 1
                if self.stops.is_set():
                    break


def test_while_a_load_is_held_open_others_get_tokens_and_it_is_one_load_for_all_who_wait(
    server: Server,
) -> None:
    """E9, E10, SV21: a load of any length stalls nobody."""
    server.hold("slow")
    stream = Stream(server)
    stream.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(tokens_of, server, "slow") for _ in range(6)]
            wait_for(lambda: server.loads("slow") == 1, "the load begins")
            before = stream.count
            # Another variant, cold too, comes and answers meanwhile.
            assert tokens_of(server, "waiting")
            wait_for(lambda: stream.count > before + 150, "the stream goes on")
            assert not any(task.done() for task in waiting)
            server.release("slow")
            assert len({tuple(task.result()) for task in waiting}) == 1
    finally:
        stream.stops.set()
        stream.join()
    assert server.loads("slow") == 1


def test_a_variant_that_vanished_fails_alone(server: Server, oracle: Tokens) -> None:
    """E11."""
    folder = server.root / "family/variants/gone"
    folder.rename(server.root / "gone")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="'gone' cannot be loaded") as raised:
            tokens_of(server, "gone")
        assert raised.value.status_code == 503
        assert str(server.root) not in str(raised.value)
    check_alive(server, oracle)


def test_a_variant_whose_files_went_after_it_was_loaded_is_served_on(
    server: Server, oracle: Tokens
) -> None:
    """E11: taken from a slot, its files gone, asked for again."""
    expected = tokens_of(server, "rich")
    folder = server.root / "family/variants/rich"
    folder.rename(server.root / "rich")
    try:
        for model in ("linear", "norms", "matrix", "embed"):  # takes all slots
            tokens_of(server, model)
        assert tokens_of(server, "rich") == expected == oracle("rich", PROMPT, 12)
    finally:
        (server.root / "rich").rename(folder)


def test_a_rotten_variant_fails_alone(server: Server, oracle: Tokens) -> None:
    file = server.root / "family/variants/rotten/variant.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(tokens_of, server, "rotten") for _ in range(4)]
        for task in tasks:
            with pytest.raises(openai.InternalServerError, match="'rotten' cannot be loaded"):
                task.result()
    assert server.loads("rotten") == 1
    check_alive(server, oracle)


def test_another_content_is_served_at_once_and_from_no_old_block(server: Server) -> None:
    """R1: the same name and prompt, another digest."""
    before = tokens_of(server, "changing")
    add_to_family(server.root, "changing", lambda n: "_proj" in n, encoding="row", seed=999)
    after = Tokens(server.root)
    assert tokens_of(server, "changing") == after("changing", PROMPT, 12) != before


def test_unloading_frees_and_loading_brings_back(server: Server, oracle: Tokens) -> None:
    tokens_of(server, "matrix")
    before = len(copies(server))
    assert post(server, "unload_lora_adapter", lora_name="matrix").status_code == 200
    assert len(copies(server)) == before - 1
    with pytest.raises(openai.NotFoundError):
        tokens_of(server, "matrix")
    assert post(server, "unload_lora_adapter", lora_name="nobody").status_code == 404
    wrong = post(server, "load_lora_adapter", lora_name="matrix", lora_path="/etc")
    assert wrong.status_code == 400
    found = post(server, "load_lora_adapter", lora_name="matrix", lora_path="matrix")
    assert found.status_code == 200
    assert tokens_of(server, "matrix") == oracle("matrix", PROMPT, 12)


def test_metrics_say_which_variants_are_in_host_memory(server: Server) -> None:
    """R11: beside vLLM's own, read from the running server."""
    tokens_of(server, "norms")
    found = metrics_of(server.url)
    size = variant_bytes(server.root, "norms")
    assert found["soupkit_variant_host_bytes,norms"] == size
    assert found["soupkit_variant_phase,norms,host"] == 1
    assert found["soupkit_variant_loads_total,norms"] == server.loads("norms") == 1
    assert found["soupkit_host_cache_budget_bytes"] > found["soupkit_host_cache_used_bytes"] > size
    before = found["soupkit_loads_total"]
    post(server, "unload_lora_adapter", lora_name="norms")
    assert "soupkit_variant_host_bytes,norms" not in metrics_of(server.url)
    post(server, "load_lora_adapter", lora_name="norms", lora_path="norms")
    after = metrics_of(server.url)
    assert after["soupkit_loads_total"] == before + 1 == after["soupkit_load_seconds_count"]
    assert any(name.startswith("vllm:") for name in after)


def test_a_client_that_goes_away_leaves_nothing_in_use(server: Server, oracle: Tokens) -> None:
    """SV22: unloading does not wait for it."""
    body = {"model": "linear", "prompt": PROMPT, "max_tokens": 120, "stream": True}
    body["ignore_eos"] = True
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    assert post(server, "unload_lora_adapter", lora_name="linear").status_code == 200
    post(server, "load_lora_adapter", lora_name="linear", lora_path="linear")
    check_alive(server, oracle)


def test_logprobs_of_prompts_are_the_variants(server: Server) -> None:
    client = client_of(server.url)

    def scores(model: str) -> list[float]:
        made = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=1, logprobs=1, echo=True, temperature=0
        )
        return [found for found in made.choices[0].logprobs.token_logprobs if found is not None]

    assert len({json.dumps(scores(model)) for model in ("base", "embed", "matrix", "norms")}) == 4


def test_the_command_serves_pins_asks_for_a_key_and_closes_the_routes_that_change_what_is_served(
    tmp_path: Path,
) -> None:
    """With a worker in a process of its own, as on GPUs, and room for one copy beside the pin."""
    others = ("norms", "embed", "matrix")
    root = make_family(tmp_path, names=("linear", *others), head_dim=HEAD_DIM)
    sizes = {name: variant_bytes(root, name) for name in ("linear", *others)}
    budget = sizes["linear"] + max(sizes[name] for name in others)
    port = free_port()
    (tmp_path / "key").write_text("secret\n")
    program = [sys.executable, "-m", "soupkit", "serve", str(root / "family"), "--engine", "vllm"]
    program += ["--port", str(port), "--pin", "linear", "--max-running", "4"]
    program += ["--api-key-file", str(tmp_path / "key"), "--host-cache-bytes", str(budget)]
    with started(program, root, port) as running:
        assert len(copies(running)) == 1
        key = {"Authorization": "Bearer secret"}
        body = {"lora_name": "linear", "lora_path": "linear"}
        for route in ("load_lora_adapter", "unload_lora_adapter"):
            url = f"{running.url}/v1/{route}"
            assert httpx.post(url, json=body).status_code == 401
            refused = httpx.post(url, json=body, headers=key)
            assert refused.status_code == 403
            assert "SOUPKIT_RUNTIME_LOADS=1" in refused.text
        check_each_takes_the_others_room(running, ("base", "linear", *others))
        assert len(copies(running)) == 2
        check_nothing_outlives_the_server(running)


def variant_bytes(root: Path, name: str) -> int:
    folder = root / "family/variants" / name
    return sum((folder / file).stat().st_size for file in ("variant.safetensors", "manifest.json"))


def check_each_takes_the_others_room(server: Server, models: tuple[str, ...]) -> None:
    """A copy that goes between the check of its request and its run comes back."""
    oracle, client = Tokens(server.root), client_of(server.url, "secret")

    def ask(model: str) -> list[int]:
        made: Any = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=3, temperature=0, extra_body=IDS
        )
        return list(made.choices[0].token_ids)

    jobs = [model for _ in range(8) for model in models]
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, jobs)) == [oracle(model, PROMPT, 3) for model in jobs]


def check_nothing_outlives_the_server(server: Server) -> None:
    """kill -9: no process lives on, and the next server removes the copies."""
    others = processes_of(server.process.pid) - {server.process.pid}
    assert len(others) >= 2
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(map(runs, others)), "all processes end")
    assert copies(server)
    Store(server.root / "family").close()
    assert not copies(server)
