"""kill -9 while a server works: nothing on disk changes, and the next server serves all of it."""

import hashlib
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_kit import (
    CONTEXT,
    WAIT,
    Oracle,
    load_variant,
    make_family,
    metrics_of,
    serving,
    start_python,
    wait_for,
)

ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


def digest_of(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def start(root: Path, tmp_path: Path) -> tuple[subprocess.Popen[str], str]:
    """A server process whose loads take a while, and its address."""
    (tmp_path / "admin").write_text("admin-key")
    code = (
        "import time; from soupkit.serving import catalog, server; load = catalog.Catalog.load\n"
        "def slow(self, ref): found = load(self, ref); time.sleep(0.5); return found\n"
        "catalog.Catalog.load = slow\n"
        f"server.run({str(root / 'family')!r}, port=0, admin_key_file={str(tmp_path / 'admin')!r})"
    )
    process, lines = start_python(code)
    line = next((line for line in lines if line.startswith("soupkit serves")), "")
    assert line, "the server did not start"
    return process, line.split()[-1]


@pytest.mark.slow
def test_kills_leave_a_family_as_it_was_slice(root: Path, tmp_path: Path) -> None:
    before, oracle = digest_of(root / "family"), Oracle(root)

    def post(url: str, route: str, body: dict[str, Any]) -> int | None:
        try:
            answer = httpx.post(f"{url}/v1/{route}", json=body, headers=ADMIN, timeout=WAIT)
        except httpx.HTTPError:
            return None
        return answer.status_code

    def during_a_load(pool: ThreadPoolExecutor, url: str) -> Any:
        body = {"model": "norms", "prompt": "x", "max_tokens": 4}
        asked = pool.submit(post, url, "completions", body)
        wait_for(lambda: metrics_of(url)["soupkit_variant_phase,norms,loading"] == 1, "it loads")
        return asked

    def during_an_admin_load(pool: ThreadPoolExecutor, url: str) -> Any:
        asked = pool.submit(post, url, "load_lora_adapter", {"lora_name": "rich", "pinned": True})
        wait_for(lambda: metrics_of(url)["soupkit_variant_phase,rich,loading"] == 1, "it loads")
        return asked

    def during_an_unload(pool: ThreadPoolExecutor, url: str) -> Any:
        body = {"model": "linear", "prompt": "x", "max_tokens": CONTEXT - 10, "ignore_eos": True}
        asked = [pool.submit(post, url, "completions", body | {"n": 8}) for _ in range(4)]
        wait_for(lambda: metrics_of(url)["soupkit_variant_users,linear"] > 0, "it runs")
        asked.append(pool.submit(post, url, "unload_lora_adapter", {"lora_name": "linear"}))
        wait_for(lambda: "linear" not in httpx.get(f"{url}/v1/models").text, "it is hidden")
        return asked[-1]

    moments: list[Callable[[ThreadPoolExecutor, str], Any]] = [
        during_a_load,
        during_an_admin_load,
        during_an_unload,
    ]
    for moment in moments:
        process, url = start(root, tmp_path)
        try:
            with ThreadPoolExecutor(6) as pool:
                asked = moment(pool, url)
                process.send_signal(signal.SIGKILL)
                assert asked.result() is None, "a request open at a kill fails at the client"
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        assert digest_of(root / "family") == before, moment
    for name in ("linear", "norms", "rich"):
        assert load_variant(root, name).digest
    with serving(root) as (_, url):
        for name in ("linear", "norms", "rich"):
            body = {"model": name, "prompt": "ask", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)
            assert answer.json()["choices"][0]["text"] == oracle(name, "ask", 8)
