"""How much of many LoRA adapters K slots keep: the score S of the K-Merge paper (arXiv 2510.13537).

    python recipes/pool_study.py --out pool-study

Trains one PEFT LoRA adapter a task on the demo's tiny base (recipes/demo.py), lets them in seeded
orders into K = 1..5 slots, and prints for every way to merge

    S = mean over tasks of metric(slot that serves the task) / metric(the task's own adapter)

The metric is the share of answer tokens that are right. Slots are chosen alike, by cosine, and
have one rank. history_mean, opcm and ties are AdapterPool's; linear is PEFT's, of factors, at
(1/2, 1/2); of newest a slot holds only the last adapter that came. What --out has already is not
trained again.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# As in recipes/demo.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from demo import BASE_TASKS, VARIANTS, Task, encode, make_model, shift, train
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from soupkit.adapter_folder import Module, open_adapter
from soupkit.alike import similarity
from soupkit.factored import Pair
from soupkit.kmerge import PoolRule
from soupkit.pool import AdapterPool

TASKS: dict[str, Callable[[str], str]] = {
    **VARIANTS,
    "alt": lambda word: "".join(c.upper() if i % 2 else c for i, c in enumerate(word)),
    "rot": lambda word: shift(word, 13),
    "back": lambda word: shift(word, -1),
}
RANK = 16
METHODS = ("history_mean", "opcm", "ties", "linear", "newest")
SLOTS = (1, 2, 3, 4, 5)
Modules = dict[str, Module]
console = Console()


@dataclass(frozen=True, slots=True)
class Size:
    """How long the study trains and how much it asks."""

    tasks: int
    base_steps: int
    steps: int
    words: int


FULL, QUICK = Size(len(TASKS), 120, 40, 50), Size(3, 6, 4, 8)


def train_base(folder: Path, size: Size) -> None:
    model = make_model(seed=0)
    train(
        model,
        [Task(name, answer) for name, answer in BASE_TASKS.items()],
        out=folder.parent / "runs",
        steps=size.base_steps,
        learning_rate=3e-3,
        schedule="linear",
        callbacks=[],
    )
    model.save_pretrained(folder)


def train_adapter(task: Task, base: Path, folder: Path, size: Size) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    adapted = get_peft_model(model, lora)
    train(
        adapted,
        [task],
        out=folder.parent.parent / "runs",
        steps=size.steps,
        learning_rate=5e-3,
        schedule="linear",
        callbacks=[],
    )
    adapted.save_pretrained(folder)


class Judge:
    """The metric of adapters on tasks; asks the model once for the same bits."""

    def __init__(self, base: Path, tasks: dict[str, Task], words: int) -> None:
        self.model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.rows = {name: encode(task.examples(words, seed=1)) for name, task in tasks.items()}
        self.known: dict[tuple[str, str], float] = {}

    @torch.no_grad()
    def scores(self, modules: Modules, tasks: tuple[str, ...]) -> dict[str, float]:
        digest = digest_of(modules)
        missing = [task for task in tasks if (digest, task) not in self.known]
        if missing:
            weights = {name: self.model.get_submodule(name).weight for name in modules}
            before = {name: weight.clone() for name, weight in weights.items()}
            for name, weight in weights.items():
                weight.add_(modules[name].pair.matrix())
            for task in missing:
                self.known[digest, task] = self._right(self.rows[task])
            for name, weight in weights.items():
                weight.copy_(before[name])
        return {task: self.known[digest, task] for task in tasks}

    def _right(self, rows: list[dict[str, torch.Tensor]]) -> float:
        ids = torch.stack([row["input_ids"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])[:, 1:]
        best = self.model(input_ids=ids).logits[:, :-1].argmax(-1)
        asked = labels != -100
        return ((best == labels) & asked).sum().item() / asked.sum().item()


def digest_of(modules: Modules) -> str:
    found = hashlib.sha256()
    for name, module in sorted(modules.items()):
        pair = module.pair
        found.update(f"{name} {pair.scale}".encode())
        for factor in (pair.a, pair.b):
            found.update(factor.contiguous().numpy().tobytes())
    return found.hexdigest()


def pooled(
    adapters: dict[str, Path], order: list[str], slots: int, method: str
) -> Iterator[tuple[tuple[str, ...], Modules]]:
    """(tasks, adapter) of each slot of an AdapterPool that the adapters came into."""
    rule = PoolRule(capacity_bytes=10**9, slots=slots, merge=method, rank=RANK)
    with tempfile.TemporaryDirectory() as folder:
        pool = AdapterPool.create(Path(folder) / "pool", rule)
        for task in order:
            pool.add(adapters[task], task=task)
        for slot in pool.slots:
            yield slot.tasks, open_adapter(pool.resolve(slot.tasks[0])).load()


def plain(
    adapters: dict[str, Path], order: list[str], slots: int, method: str
) -> Iterator[tuple[tuple[str, ...], Modules]]:
    """The same of slots that are merged by `linear`, or hold the newest adapter."""
    held: list[tuple[tuple[str, ...], Modules]] = []
    for task in order:
        comes = open_adapter(adapters[task]).load()
        if len(held) < slots:
            held.append(((task,), comes))
            continue
        alike = [similarity(pairs_of(comes), pairs_of(modules)) for _, modules in held]
        nearest = alike.index(max(alike))
        tasks, modules = held[nearest]
        merged = comes if method == "newest" else linear(modules, comes)
        held[nearest] = (*tasks, task), merged
    yield from held


def pairs_of(modules: Modules) -> dict[str, Pair]:
    return {name: module.pair for name, module in modules.items()}


def linear(first: Modules, second: Modules) -> Modules:
    """PEFT's add_weighted_adapter(combination_type="linear") at (1/2, 1/2): factors are averaged,
    each by itself, so that products of one adapter's with the other's come in.
    """
    merged = {}
    for name in first:
        sides = [side[name].pair for side in (first, second)]
        a, b = (
            sum((side.scale / 2) ** 0.5 * getattr(side, factor) for side in sides)
            for factor in ("a", "b")
        )
        merged[name] = Module(first[name].kind, Pair(a, b, 1.0))
    return merged


def study(judge: Judge, adapters: dict[str, Path], orders: list[list[str]]) -> list[dict]:
    """One row for each method and K: S of each order, and how many adapters were merged."""
    own = {
        task: judge.scores(open_adapter(folder).load(), (task,))[task]
        for task, folder in adapters.items()
    }
    rows = []
    for method in METHODS:
        fill = plain if method in ("linear", "newest") else pooled
        for slots in SLOTS:
            scores, merges = [], 0
            for order in orders:
                ratios = []
                for tasks, modules in fill(adapters, order, slots, method):
                    found = judge.scores(modules, tasks)
                    ratios += [found[task] / own[task] for task in tasks]
                    merges += len(tasks) - 1
                scores.append(statistics.fmean(ratios))
            rows.append({"method": method, "slots": slots, "S": scores, "merges": merges})
    return rows


def print_table(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    table.add_column("merged by")
    for slots in SLOTS:
        table.add_column(f"K = {slots}", justify="right")
    for method in METHODS:
        found = {
            row["slots"]: statistics.fmean(row["S"]) for row in rows if row["method"] == method
        }
        table.add_row(method, *(f"{found[slots]:.3f}" for slots in SLOTS))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pool-study"))
    parser.add_argument("--seed", type=int, default=0, help="of the first order")
    parser.add_argument("--orders", type=int, default=1, help="S is the mean over so many orders")
    parser.add_argument("--quick", action="store_true", help="an untrained toy, to see it run")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    started, size = time.process_time(), QUICK if given.quick else FULL
    tasks = {name: Task(name, TASKS[name]) for name in list(TASKS)[: size.tasks]}
    base = given.out / "base"
    if not base.exists():
        train_base(base, size)
    adapters = {name: given.out / "adapters" / name for name in tasks}
    for name, folder in adapters.items():
        if not folder.exists():
            train_adapter(tasks[name], base, folder, size)
    shutil.rmtree(given.out / "runs", ignore_errors=True)

    orders = []
    for seed in range(given.seed, given.seed + given.orders):
        orders.append(list(tasks))
        random.Random(seed).shuffle(orders[-1])
    judge = Judge(base, tasks, size.words)
    rows = study(judge, adapters, orders)
    alone = {task: judge.scores({}, (task,))[task] for task in tasks}
    own = {
        task: judge.scores(open_adapter(folder).load(), (task,))[task]
        for task, folder in adapters.items()
    }
    document = {"seed": given.seed, "orders": orders, "own": own, "base": alone, "rows": rows}
    (given.out / "study.json").write_text(json.dumps(document, indent=2) + "\n")
    print_table(rows, f"S of {len(tasks)} adapters of rank {RANK} in K slots, {len(orders)} orders")
    bare = statistics.fmean(alone[task] / own[task] for task in tasks)
    console.print(f"the base without an adapter: {bare:.3f}; the adapters: {min(own.values()):.1%}")
    console.print(f"{time.process_time() - started:.0f} CPU seconds; {given.out / 'study.json'}")


if __name__ == "__main__":
    main()
