"""A headless Chromium for tests, spoken to over two pipes: no driver, no port, no package."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
ABSENT = "needs a Chromium: apt-get install chromium"


# Descriptors that may be 3 or 4 themselves become 3 and 4.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page. A call waits for its answer; events in between are kept in `events`."""

    def __init__(self, send: int, receive: BinaryIO | io.RawIOBase) -> None:
        self._send, self._receive = send, receive
        self._left, self._ids = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session = self._call("Target.attachToTarget", attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, params, sessionId=self._session)

    def open(self, url: str, *, width: int, height: int, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 500)
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, as high as it is."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, params: dict[str, Any], **session: str) -> dict[str, Any]:
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": params, **session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._ids:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = self._receive.read(1 << 20)
            assert part, "Chromium has ended"
            self._left += part
        line, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def browsing() -> Iterator[Browser]:
    """A fresh Chromium; it reads commands from descriptor 3 and writes answers to 4."""
    to_read, to_send = os.pipe()
    from_read, from_send = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            sys.executable,
            "-c",
            _LAUNCH,
            str(to_read),
            str(from_send),
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            command,
            pass_fds=(to_read, from_send),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_send)
        try:
            with os.fdopen(from_read, "rb", buffering=0) as receive:
                yield Browser(to_send, receive)
        finally:
            os.close(to_send)
            process.terminate()
            process.wait(20)
