"""The soak's server, in a process of its own, and the client that judges each of its answers."""

import asyncio
import json
import random
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from soak_family import Question

from soupkit.serving.local import wait_until_ready

ADMIN_KEY = "soak-admin"
WAIT_SECONDS = 120.0


class Wrong(Exception):
    """An answer that is not the oracle's, or not whole, or not the only one."""


def need(condition: bool, complaint: str) -> None:
    if not condition:
        raise Wrong(complaint)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("message", "")) if isinstance(error, dict) else ""


@dataclass
class Server:
    """`soupkit serve` in a process of its own, on one port in all its lives."""

    family: Path
    folder: Path
    options: tuple[str, ...]
    lives: int = 0
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    def start(self) -> None:
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        self.lives += 1
        log = self.folder / f"serve-{self.lives}.log"
        command = [sys.executable, "-m", "soupkit", "serve", str(self.family)]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.options],
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        wait_until_ready(self.process, log, 300)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    @property
    def resident_bytes(self) -> int:
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(text.split("VmRSS:")[1].split()[0])


@dataclass
class Client:
    """Asks, and raises Wrong for any answer that should not be."""

    http: httpx.AsyncClient
    ids: set[str] = field(default_factory=set)  # of all answers

    async def ask(self, rng: random.Random, question: Question) -> str | Refusal:
        """One request: what came of it, or the error it got."""
        count = rng.randint(1, len(question.tokens))
        body = {
            "model": question.model,
            "prompt": question.prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
        }
        kind = rng.random()
        if kind < 0.15:
            stop_after = rng.randint(0, count) if kind < 0.1 else None
            return await self.stream(body, question, count, leave_after=stop_after)
        if kind < 0.35:
            return await self.stream(body, question, count, leave_after=None)
        if kind < 0.42:
            whole = self.whole(body, question, count)
            return await asyncio.wait_for(whole, rng.uniform(0.001, 0.15))
        return await self.whole(body | {"n": 2 if kind < 0.5 else 1}, question, count)

    async def whole(self, body: dict[str, Any], question: Question, count: int) -> Any:
        answer = await self.http.post("/v1/completions", json=body)
        found = answer.json()
        if answer.status_code != 200:
            return Refusal(answer.status_code, found)
        wanted, n = question.answer(count), body.get("n", 1)
        texts = [choice["text"] for choice in found["choices"]]
        need(texts == [wanted] * n, f"{question.prompt!r}: {texts}, not {wanted!r}")
        used = found["usage"]["completion_tokens"]
        need(used == n * count, f"{used} tokens, not {n * count}")
        need(found["model"] == question.model, f"the answer names {found['model']}")
        self._note_id(found["id"])
        return "answered"

    def _note_id(self, found: str) -> None:
        need(found not in self.ids, f"the answer {found} came twice")
        self.ids.add(found)

    async def stream(
        self, body: dict[str, Any], question: Question, count: int, *, leave_after: int | None
    ) -> Any:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        wanted, text, reasons, used, is_over = question.answer(count), "", [], None, False
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return Refusal(answer.status_code, json.loads(await answer.aread()))
            chunks = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    need(not line, f"a stray line {line!r}")
                    continue
                need(not is_over, f"more after [DONE]: {line}")
                if line == "data: [DONE]":
                    is_over = True
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Refusal(503, chunk)
                for choice in chunk["choices"]:
                    text += choice["text"]
                    reasons += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
                used = (chunk.get("usage") or {}).get("completion_tokens", used)
                need(wanted.startswith(text), f"{question.prompt!r}: {text!r}, not {wanted!r}")
                chunks += 1
                if leave_after is not None and chunks > leave_after:
                    return "cancelled"
            if not is_over:
                raise httpx.ReadError("the stream ended early")
        need(text == wanted, f"{question.prompt!r}: {text!r}, not {wanted!r}")
        need((reasons, used) == (["length"], count), f"ended {reasons} after {used} of {count}")
        self._note_id(chunk["id"])
        return "answered"

    async def administer(self, what: str, **body: Any) -> Refusal:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        answer = await self.http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)
        return Refusal(answer.status_code, answer.json())

    async def left_open(self) -> list[str]:
        lines = (await self.http.get("/metrics")).text.splitlines()
        names = ("requests_waiting", "requests_running", "variant_users{", "variant_waiting{")
        mine = [line for line in lines if line.startswith(tuple(f"soupkit_{n}" for n in names))]
        need(len(mine) >= 2, "the metrics have other names")
        return [line for line in mine if not line.endswith(" 0.0")]
