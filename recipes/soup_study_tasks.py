"""What the study trains on: batches, held-out sets and a base, made from nothing but this machine.

demo      the ciphers of demo.py: words of eight random letters, the base knows other tasks
text      bytes of Python: the base reads docstrings of the standard library, the fine-tune its code
smollm2   the same code, as tokens of SmolLM2-135M (a folder or hub id that the caller names)
"""

import ast
import random
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from demo import VARIANTS, Task, encode, make_model, train_base
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

Batch = dict[str, Tensor]
WIDTH = 64  # tokens of a text example


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of training, as the study repeats it.

    Args:
        base: folder or hub id that every run starts from.
        examples: how many or how much there is to learn from, by the name of the amount.
        batches: an endless stream of training batches, of (amount, seed).
        gate: batches that score merges, of a seed: chance in them is part of the spread.
        test: batches that judge what a run ends with; drawn as the gate's are, and none of them.
    """

    base: str
    steps: int
    merge_every: int
    learning_rate: float
    examples: dict[str, int]
    batches: Callable[[int, int], Iterator[Batch]]
    gate: Callable[[int], list[Batch]]
    test: list[Batch]

    def model(self) -> PreTrainedModel:
        """The base in float32, ready to be fine-tuned, its tied embedding frozen."""
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model.get_input_embeddings().weight.requires_grad_(False)
        return model.train()


@torch.no_grad()
def losses(model: torch.nn.Module, batches: list[Batch]) -> list[float]:
    """Negative log likelihood of each example, in nats; their mean is that of a learned token. The
    model's mode stays.
    """
    was_training = model.training
    model.eval()
    sums, counts = [], []
    for batch in batches:
        labels = batch["labels"][:, 1:]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        sums.append(cross_entropy(logits.float(), labels, reduction="none").double().sum(1))
        counts.append((labels != -100).sum(1).double())
    model.train(was_training)
    found: list[float] = (torch.cat(sums) / torch.cat(counts).mean()).tolist()
    return found


def demo(folder: Path, *, quick: bool) -> Setting:
    """The demo's base, and its caesar cipher; scarce: two dozen words, again and again."""
    base = folder / "demo" / "base"
    if not (base / "config.json").exists():
        train_base(base)
    task = Task("caesar", VARIANTS["caesar"])

    def batches(amount: int, seed: int) -> Iterator[Batch]:
        rows = encode(task.examples(amount, seed=100 + seed))
        rng = random.Random(seed)
        while True:
            yield stacked(rng.sample(rows, 16))

    return Setting(
        base=str(base),
        steps=12 if quick else 60,
        merge_every=4 if quick else 10,
        learning_rate=3e-3,
        examples={"ample": 2000, "scarce": 24},
        batches=batches,
        gate=lambda seed: chunks(encode(task.examples(128, seed=2 + 1000 * seed)), 64),
        test=chunks(encode(task.examples(500, seed=1)), 100),
    )


def stacked(rows: list[dict[str, Tensor]]) -> Batch:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def chunks(rows: list[dict[str, Tensor]], size: int) -> list[Batch]:
    return [stacked(rows[i : i + size]) for i in range(0, len(rows), size)]


def split_source(source: str) -> tuple[str, str]:
    """The docstrings of a Python file, and the rest of it without them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in old files
        tree = ast.parse(source)
    lines, texts = source.splitlines(), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            text, first = ast.get_docstring(node), node.body[0]
            if text:
                texts.append(text)
                for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                    lines[number] = ""
    return "\n\n".join(texts), "\n".join(line for line in lines if line.strip())


def library_texts() -> tuple[str, str]:
    """Docstrings and code of this Python's standard library, its files in a fixed random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.glob("*.py") if path.stat().st_size > 2000)
    random.Random(0).shuffle(paths)
    both = [split_source(path.read_text(encoding="utf-8", errors="replace")) for path in paths]
    docs, code = ("\n".join(part) for part in zip(*both, strict=True))
    return docs, code


def to_bytes(text: str) -> Tensor:
    """Ids of a text, one an ASCII character; others are "?"."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def windows(ids: Tensor, *, seed: int, size: int) -> Iterator[Batch]:
    """Endless batches of windows at random places."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - WIDTH, (size,), generator=generator)
        rows = torch.stack([ids[start : start + WIDTH] for start in starts.tolist()])
        yield {"input_ids": rows, "labels": rows}


class HeldOut:
    """Windows that training does not see: the first in a random order are the test's."""

    def __init__(self, ids: Tensor, *, test: int, gate: int) -> None:
        """Args: test, gate: how many windows, of the one test and of a seed's gate."""
        rows = ids[: len(ids) // WIDTH * WIDTH].view(-1, WIDTH)
        self._rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        self._test, self._gate = test, gate

    def test(self) -> list[Batch]:
        return self._batches(0, self._test)

    def gate(self, seed: int) -> list[Batch]:
        """The windows of a seed; IndexError where there are not enough for so many seeds."""
        return self._batches(self._test + seed * self._gate, self._gate)

    def _batches(self, start: int, count: int) -> list[Batch]:
        if start + count > len(self._rows):
            raise IndexError(f"{len(self._rows)} held-out windows: too few for so many seeds")
        parts = torch.split(self._rows[start : start + count], 16)
        return [{"input_ids": part, "labels": part} for part in parts]


def _code_batches(ids: Tensor, size: int) -> Callable[[int, int], Iterator[Batch]]:
    def batches(amount: int, seed: int) -> Iterator[Batch]:
        # Each seed of the scarce runs has other text to go by.
        start = (seed * 7919 * WIDTH) % max(1, len(ids) - amount)
        return windows(ids[start : start + amount], seed=seed, size=size)

    return batches


def text(folder: Path, *, quick: bool) -> Setting:
    """The demo's model, trained on docstrings, fine-tuned on code; scarce: a few pages of it."""
    base, (docs, code) = folder / "text-base", library_texts()
    if not (base / "config.json").exists():
        train_on_text(to_bytes(docs), base, steps=20 if quick else 300)
    ids = to_bytes(code)
    cut = len(ids) * 9 // 10
    held_out = HeldOut(ids[cut:], test=80 if quick else 320, gate=32 if quick else 128)
    return Setting(
        base=str(base),
        steps=12 if quick else 150,
        merge_every=4 if quick else 25,
        learning_rate=2e-3,
        examples={"ample": min(900_000, cut), "scarce": 6_000},
        batches=_code_batches(ids[:cut], 4),
        gate=held_out.gate,
        test=held_out.test(),
    )


def train_on_text(ids: Tensor, base: Path, *, steps: int) -> None:
    model = make_model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10, 1.05 - step / steps)
    )
    stream = windows(ids, seed=0, size=16)
    for _ in range(steps):
        model(**next(stream)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    model.save_pretrained(base)


def smollm2(source: str, *, quick: bool) -> Setting:
    """SmolLM2-135M, or another model of that place, on code."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    code = library_texts()[1][:1_500_000]
    cut = len(code) * 9 // 10

    def ids(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    held_out = HeldOut(ids(code[cut:]), test=8 if quick else 64, gate=8 if quick else 32)
    return Setting(
        base=source,
        steps=6 if quick else 24,
        merge_every=2 if quick else 6,
        learning_rate=1e-4,
        examples={"ample": 10**9, "scarce": 1_000},
        batches=_code_batches(ids(code[:cut]), 4),
        gate=held_out.gate,
        test=held_out.test(),
    )
