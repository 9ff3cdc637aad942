"""Shared by the tests that run vLLM: they need the venv of `make test-vllm`, which has no GPU."""

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from serving_kit import TOKENIZER, dense, greedy

from soupkit.serving.vllm.command import command

START_SECONDS = 480  # importing vLLM alone takes 20 on two idle cores

# vLLM's attention on CPUs has no kernel for the odd head sizes of other tests.
HEAD_DIM = 32
# vLLM and what it imports warn a lot; their warnings are not ours to mend.
NEEDS_VLLM = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM has a venv of its own: make test-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # What it found out of models, in a process that imports all of it.
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache" / "vllm"),
    # vLLM compiles some of its sampling with the C++ compiler when it is first used: minutes.
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def offline_engine(root: Path, *, slots: int, **settings: Any) -> Iterator[Any]:
    """A vllm.LLM of root/base that serves root/family, in this process."""
    environment = {**ENVIRONMENT, "SOUPKIT_FAMILY": str(root / "family")}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(key, os.environ.get(key, value) if key == "OMP_NUM_THREADS" else value)
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        engine = LLM(
            model=str(root / "base"),
            **{
                "dtype": "float32",
                "enable_lora": True,
                "max_loras": slots,
                "max_lora_rank": 1,
                "enforce_eager": True,
                "max_model_len": 128,
                "max_num_seqs": 8,
                # Prompts are computed in pieces, of several requests at a time.
                "max_num_batched_tokens": 24,
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "distributed_executor_backend": "uni",
                "seed": 0,
            }
            | settings,
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.llm_engine.engine_core.shutdown()
            del engine
            cleanup_dist_env_and_memory()
            gc.collect()


def prompts(count: int) -> list[list[int]]:
    """Token ids of texts of different lengths that begin alike."""
    texts = [
        "A common beginning, longer than a block of the cache: " + "abc" * n for n in range(count)
    ]
    return [TOKENIZER(text)["input_ids"] for text in texts]


def bank_of(engine: Any) -> Any:
    """The bank in the worker of an engine in this process."""
    core = engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.lora_manager.bank


def ask(
    engine: Any, jobs: Sequence[tuple[Any, list[int]]], count: int, **sampling: Any
) -> list[Any]:
    """Greedy outputs of (LoRARequest or None, prompt ids), all in one call."""
    from vllm import SamplingParams

    return list(
        engine.generate(
            [{"prompt_token_ids": ids} for _, ids in jobs],
            SamplingParams(
                **{"max_tokens": count, "temperature": 0, "ignore_eos": True} | sampling
            ),
            lora_request=[request for request, _ in jobs],
            use_tqdm=False,
        )
    )


class Tokens:
    """What dense models answer. Tokens, as vLLM writes broken characters in a way of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Any] = {}

    def __call__(self, model: str, prompt: str, count: int, *, special: bool = True) -> list[int]:
        if model not in self._models:
            self._models[model] = dense(self._root, None if model == "base" else model)
        ids = TOKENIZER(prompt, add_special_tokens=special)["input_ids"]
        return greedy(self._models[model], ids, count, stop=None)


class Server(NamedTuple):
    """A server in a process of its own."""

    url: str
    root: Path
    gates: Path
    log: Path
    process: "subprocess.Popen[bytes]"

    def hold(self, name: str) -> None:
        """Loads of that variant wait for `release`."""
        (self.gates / f"{name}.hold").touch()

    def release(self, name: str) -> None:
        (self.gates / f"{name}.hold").unlink()

    def loads(self, name: str) -> int:
        """So many loads of that variant began."""
        began = self.gates / f"{name}.began"
        return len(began.read_text().splitlines()) if began.exists() else 0


@contextmanager
def running_server(root: Path, *, slots: int, **environment: str) -> Iterator[Server]:
    """`soupkit serve --engine vllm` of root/family, its loads gated, on a free port."""
    port = free_port()
    found = command(root / "family", base=root / "base", port=port, max_running=8)
    arguments = list(found.arguments)
    arguments[arguments.index("--max-loras") + 1] = str(slots)
    # Without these two, vLLM gives the worker a process of its own, which has to import vLLM too.
    arguments += ["--max-model-len", "160", "--distributed-executor-backend", "uni"]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
    (root / "gates").mkdir()
    program = [sys.executable, str(Path(__file__).with_name("vllm_runs.py")), str(root / "gates")]
    with started([*program, *arguments], root, port, **found.environment, **environment) as server:
        yield server


def processes_of(pid: int) -> set[int]:
    """A process and all that it started, and so on."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= processes_of(int(child))
    return found


def runs(pid: int) -> bool:
    """Whether it lives; one that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(program: list[str], root: Path, port: int, **environment: str) -> Iterator[Server]:
    """A program that serves root/family on a port, once it is healthy."""
    log = root / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            program,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}", root, root / "gates", log, process)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client() as client:
        while True:
            assert server.process.poll() is None, server.log.read_text()[-3000:]
            assert time.monotonic() < deadline, server.log.read_text()[-3000:]
            with suppress(httpx.TransportError):
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
