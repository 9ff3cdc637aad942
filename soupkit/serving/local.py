"""`soupkit serve` for the time of a `with` block: for scripts, notebooks and tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from soupkit.errors import ServingError

# What the server says on stderr once it can answer.
_READY = re.compile(r"^soupkit serves .* on (http://\S+)$", re.MULTILINE)
_POLL_SECONDS = 0.1
_STOP_SECONDS = 30


@contextmanager
def running(
    family: str | Path, *options: str, log: str | Path | None = None, timeout_seconds: float = 300
) -> Iterator[str]:
    """Serve a family from a process of its own on a free port; yield its address, then stop it.

    Args:
        family: folder with family.json.
        options: more of `soupkit serve`'s, as in running("family", "--dtype", "float32").
        log: file for what the server prints; None: a temporary one.
        timeout_seconds: how long loading the base may take.
    Raises:
        ServingError: the server stopped or was not ready in time; the end of its log is quoted.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(log) if log is not None else Path(scratch) / "serve.log"
        command = [sys.executable, "-m", "soupkit", "serve", str(family), "--port", "0", *options]
        with path.open("wb") as sink:
            server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            yield wait_until_ready(server, path, timeout_seconds)
        finally:
            _stop(server)


def wait_until_ready(server: subprocess.Popen[bytes], log: Path, timeout_seconds: float) -> str:
    """The address that the log names, once it does.

    Raises:
        ServingError: the server stopped or did not say so in time; the end of its log is quoted.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        stopped = server.poll() is not None
        text = log.read_text(errors="replace")
        if found := _READY.search(text):
            return found[1]
        if stopped or time.monotonic() > deadline:
            what = f"stopped (exit {server.returncode})" if stopped else "was not ready in time"
            raise ServingError(f"soupkit serve {what}; its last words: {text[-1000:].strip()}")
        time.sleep(_POLL_SECONDS)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, so that open requests end; SIGKILL for a server that does not."""
    server.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(_STOP_SECONDS)
        return
    server.kill()
    server.wait()
