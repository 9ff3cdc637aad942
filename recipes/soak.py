"""A long rough day of a server: thousands of requests to many variants with room for a few, while
clients go away, variants are loaded, unloaded, damaged and lost, and the server is killed.

    python recipes/soak.py --requests 10000 --seed 0 --out soak

Every answer must be the oracle's for its variant (soak_family.py), token for token in float32; no
request may be lost or answered twice. Those that are open when the server is killed fail at the
client, which asks again once it is back. What fails without a reason that this script gave is a
violation: they are listed, and the exit code is 1.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The model is tiny: threads that spin for work would take the cores that others need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
from soak_client import ADMIN_KEY, WAIT_SECONDS, Client, Refusal, Server, Wrong
from soak_family import Question, make_family, make_questions

from soupkit.serving.server import build_service

VARIANTS, SLOTS = 20, 6
PROMPTS = 10
CLIENTS = 24
# Of the resident memory of the last life, from its first quarter to its end.
MOST_GROWTH, MOST_GROWTH_BYTES = 0.05, 8 << 20


@dataclass
class Soak:
    """The requests of a run, what was done to the server meanwhile, and what came of them."""

    server: Server
    names: list[str]
    questions: list[Question]
    num_requests: int
    seed: int
    kills: int
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)  # name -> what was done to it
    hidden: set[str] = field(default_factory=set)
    changes: Counter[str] = field(default_factory=Counter)  # of being hidden, by name
    memory: list[tuple[int, int, int]] = field(default_factory=list)  # life, done, bytes
    admin: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)  # of all answers of all lives
    life: int = 0
    done: int = 0
    open: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)
    client: Client = field(init=False)

    def violate(self, what: str) -> None:
        self.violations.append(what)
        print(f"VIOLATION: {what}", flush=True)

    async def begin_life(self) -> None:
        await asyncio.to_thread(self.server.start)
        self.life += 1
        self.hidden.clear()
        self.changes.update(self.names)
        http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.server.port}",
            timeout=WAIT_SECONDS,
            limits=httpx.Limits(max_connections=4 * CLIENTS),
        )
        self.client = Client(http, self.ids)
        self.up.set()

    async def kill(self) -> None:
        """kill -9 with requests open, and a start on the same folder and port."""
        while not self.open:
            await asyncio.sleep(0)
        self.up.clear()
        self.outcomes["open at a kill"] += self.open
        self.server.kill()
        old = self.client
        await self.begin_life()
        await old.http.aclose()

    async def run(self) -> None:
        await self.begin_life()
        numbers = deque(range(self.num_requests))
        clients = [asyncio.create_task(self._ask_all(numbers)) for _ in range(CLIENTS)]
        others = [asyncio.create_task(self._watch()), asyncio.create_task(self._administer())]
        await asyncio.gather(self._misfortunes(), *clients)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._check_end()
        await self.client.http.aclose()

    async def _ask_all(self, numbers: deque[int]) -> None:
        while numbers:
            number = numbers.popleft()
            rng = random.Random(f"{self.seed}/{number}")
            while not await self._ask_once(rng, number):
                pass
            self.done += 1
            if self.done % (self.num_requests // 10 or 1) == 0:
                print(f"{self.done} requests", flush=True)

    async def _ask_once(self, rng: random.Random, number: int) -> bool:
        """Whether the request came to its end; it is asked again after a kill or a 429."""
        await self.up.wait()
        # The first fifth of the variants get most of the requests.
        popular = rng.random() < 0.6
        pool = self.questions[: len(self.questions) // 4] if popular else self.questions
        question = rng.choice(pool)
        life, changes = self.life, self.changes[question.model]
        was_hidden = question.model in self.hidden
        self.open += 1
        try:
            outcome = await self.client.ask(rng, question)
        except httpx.TransportError as error:
            if self.up.is_set() and life == self.life:
                self.violate(f"request {number} to {question.model}: {error!r}")
                return True
            self.outcomes["failed at a kill"] += 1
            return False
        except TimeoutError:
            outcome = "cancelled"
        except Wrong as error:
            self.violate(f"request {number} to {question.model}: {error}")
            return True
        finally:
            self.open -= 1
        if isinstance(outcome, str):
            self.outcomes[outcome] += 1
            return True
        was_changed = was_hidden or changes != self.changes[question.model]
        return await self._refused(question.model, outcome, was_changed=was_changed)

    async def _refused(self, model: str, refusal: Refusal, *, was_changed: bool) -> bool:
        """Whether that is the end of a request that got an error: of one there is a reason for."""
        status = refusal.status
        if status == 429:
            self.outcomes["429, asked again"] += 1
            await asyncio.sleep(0.05)
            return False
        if status in (404, 503) and was_changed:
            self.outcomes["told that it was unloaded"] += 1
        elif self._is_broken(model, refusal):
            self.outcomes[f"told that it was {self.broken[model]}"] += 1
        else:
            self.violate(f"{model}: {refusal}")
        return True

    def _is_broken(self, model: str, refusal: Refusal) -> bool:
        """Whether a client was told, by name, that a variant cannot be loaded which was broken."""
        return refusal.status == 503 and model in self.broken and model in refusal.message

    async def _watch(self) -> None:
        while True:
            if self.up.is_set():
                with contextlib.suppress(OSError, IndexError):
                    self.memory.append((self.life, self.done, self.server.resident_bytes))
            await asyncio.sleep(0.25)

    async def _misfortunes(self) -> None:
        """One variant rots, one is lost, and the server is killed, at fixed shares of the run."""
        events: list[tuple[float, Callable[[], Any]]] = [
            (0.12, lambda: self._rot(self.names[len(self.names) // 2])),
            (0.37, lambda: self._lose(self.names[-2])),
        ]
        events += [(0.25 * (1 + number), self.kill) for number in range(self.kills)]
        for share, act in sorted(events, key=lambda event: event[0]):
            while self.done < share * self.num_requests:
                await asyncio.sleep(0.002)
            found = act()
            if found is not None:
                await found

    def _rot(self, name: str) -> None:
        self.broken[name] = "damaged"
        with (self.server.family / "variants" / name / "variant.safetensors").open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte[0] ^ 0x40]))

    def _lose(self, name: str) -> None:
        self.broken[name] = "lost"
        shutil.rmtree(self.server.family / "variants" / name)

    async def _administer(self) -> None:
        """Loads and unloads variants, one after the other, about every 40th request."""
        rng = random.Random(self.seed)
        next_at = 0
        while True:
            while self.done < next_at or not self.up.is_set():
                await asyncio.sleep(0.005)
            next_at = self.done + rng.randint(10, 70)
            name, life = rng.choice(self.names), self.life
            try:
                if rng.random() < 0.5:
                    await self._unload(name, rng.choice([0.0, 5.0]))
                await self._load(name)
            except httpx.TransportError as error:
                if self.up.is_set() and life == self.life:
                    self.violate(f"administration of {name}: {error!r}")
                self.admin["cut off by a kill"] += 1

    async def _unload(self, name: str, deadline: float) -> None:
        was_hidden = name in self.hidden  # as after a load that failed
        self.changes[name] += 1
        self.hidden.add(name)
        done = await self.client.administer("unload", lora_name=name, deadline_seconds=deadline)
        self.admin[f"unload {done.status}"] += 1
        if done.status != (404 if was_hidden else 200):
            self.violate(f"unload {name}: {done}")

    async def _load(self, name: str) -> None:
        done = await self.client.administer("load", lora_name=name)
        self.admin[f"load {done.status}"] += 1
        if done.status == 200:
            self.hidden.discard(name)
            self.changes[name] += 1
        elif not self._is_broken(name, done):
            self.violate(f"load {name}: {done}")

    async def _check_end(self) -> None:
        """Nothing is left open, and every variant answers as it should, alone."""
        for name in self.hidden - set(self.broken):
            await self._load(name)
        deadline = time.monotonic() + 30
        while left := await self.client.left_open():
            if time.monotonic() > deadline:
                self.violate(f"still in use after the end: {left}")
                break
            await asyncio.sleep(0.1)
        for name in ("base", *self.names):
            question = next(one for one in self.questions if one.model == name)
            body = {"model": name, "prompt": question.prompt, "temperature": 0, "ignore_eos": True}
            count = len(question.tokens)
            try:
                outcome = await self.client.whole(body | {"max_tokens": count}, question, count)
            except Wrong as error:
                self.violate(f"at the end, {name}: {error}")
                continue
            is_hidden = name in self.hidden and name in self.broken
            if isinstance(outcome, Refusal) and not (
                self._is_broken(name, outcome) or (is_hidden and outcome.status == 404)
            ):
                self.violate(f"at the end, {name}: {outcome}")
        code = await asyncio.to_thread(self.server.stop)
        if code not in (0, -signal.SIGTERM):
            self.violate(f"the server stopped with exit code {code}")

    def growth(self) -> tuple[int, int]:
        """Resident bytes of the last life after its first quarter and at its end, by medians."""
        mine = [(done, size) for life, done, size in self.memory if life == self.life]
        first, last = mine[0][0], self.num_requests
        span = (last - first) / 10
        early = [size for done, size in mine if first + 2.5 * span <= done <= first + 4.5 * span]
        late = [size for done, size in mine if done >= last - 2 * span]
        middle = [sorted(part)[len(part) // 2] if part else 0 for part in (early, late)]
        return middle[0], middle[1]


def slot_bytes_of(family: Path) -> int:
    """Device bytes of a slot that takes any variant of the family."""
    service = build_service(family)
    return service.engine.slot_shape(service.catalog.manifests().values()).nbytes


def report(soak: Soak, seconds: float) -> None:
    asked, counts = soak.num_requests, soak.outcomes
    ended = sum(counts.values()) - sum(
        counts[key] for key in ("open at a kill", "failed at a kill", "429, asked again")
    )
    print(f"{asked} requests to {VARIANTS} variants and the base, {SLOTS} slots, {seconds:.0f} s")
    for what, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:6} {what}")
    print(f"  administration: {dict(sorted(soak.admin.items()))}")
    early, late = soak.growth()
    print(f"  memory of the last life: {early / 2**20:.1f} -> {late / 2**20:.1f} MiB")
    if ended + len(soak.violations) < asked:
        soak.violate(f"{asked - ended} requests are lost")
    if counts["open at a kill"] != counts["failed at a kill"]:
        print("  some requests open at a kill had been answered already")
    if late - early > max(MOST_GROWTH * early, MOST_GROWTH_BYTES):
        soak.violate(f"memory grew by {(late - early) / 2**20:.1f} MiB")
    print(f"{len(soak.violations)} violations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2, help="kill -9 of the server; at most 3")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    given = parser.parse_args()
    work = given.out.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    names = make_family(work, variants=VARIANTS, seed=given.seed)
    questions = make_questions(work, names, prompts=PROMPTS, seed=given.seed)
    print(f"{len(questions)} questions; the oracle has answered them", flush=True)
    (work / "admin.key").write_text(ADMIN_KEY)
    cache = str(SLOTS * slot_bytes_of(work / "family"))
    options = ("--cache-bytes", cache, "--admin-key-file", str(work / "admin.key"))
    server = Server(work / "family", work, (*options, "--device", "cpu", "--dtype", "float32"))
    started = time.monotonic()
    soak = Soak(server, names, questions, given.requests, given.seed, given.kills)
    try:
        asyncio.run(soak.run())
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
    report(soak, time.monotonic() - started)
    raise SystemExit(bool(soak.violations))


if __name__ == "__main__":
    main()
