"""The whole story on a laptop: train a tiny base, fine-tune three variants with merges in the loop,
export them at one bit per weight, serve the family, and ask every variant the same question.

    python recipes/demo.py --out demo

It keeps the full fine-tunes in demo/full and unseen words in demo/heldout, for `soupkit report`.

Everything is generated: words of eight random letters, one token a letter. The base learns to copy,
upper-case and shift by one; each variant learns one cipher that the base does not know.
"""

import argparse
import json
import logging
import os
import random
import shutil
import string
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Matrices of 192 columns gain nothing from a second thread, and spinning threads cost a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from openai import OpenAI
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from soupkit import ExportConfig, SoupConfig
from soupkit.serving.local import running
from soupkit.training import SoupCallback

LETTERS = string.ascii_lowercase
LENGTH = 8
END = "\n"
LEET = str.maketrans("aeiostbglz", "4310578612")

BASE_TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "up": str.upper,
    "next": lambda word: shift(word, 1),
}
VARIANTS: dict[str, Callable[[str], str]] = {
    "caesar": lambda word: shift(word, 5),
    "mirror": lambda word: "".join(LETTERS[25 - LETTERS.index(c)] for c in word),
    "leet": lambda word: word.translate(LEET),
}
console = Console()


def shift(word: str, by: int) -> str:
    return "".join(LETTERS[(LETTERS.index(c) + by) % 26] for c in word)


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts `name:word>` and the answers a model should give."""

    name: str
    answer: Callable[[str], str]

    def examples(self, count: int, seed: int) -> list[tuple[str, str]]:
        rng = random.Random(f"{self.name}-{seed}")
        words = ("".join(rng.choices(LETTERS, k=LENGTH)) for _ in range(count))
        return [(f"{self.name}:{word}>", self.answer(word) + END) for word in words]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a token's id is its ASCII code."""
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\x01"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="\x00", eos_token=END, unk_token="\x01"
    )
    fast.chat_template = "{{ messages[-1]['content'] }}"
    return fast


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        # The default of 0.02 needs three times the steps at this width.
        initializer_range=0.07,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=0,
        eos_token_id=ord(END),
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def encode(examples: list[tuple[str, str]]) -> list[dict[str, torch.Tensor]]:
    """Prompt and answer as ids, padded to one length; only the answer is learned."""
    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    rows = []
    for prompt, answer in examples:
        pad = width - len(prompt) - len(answer)
        ids = [ord(c) for c in prompt + answer] + [0] * pad
        labels = [-100] * len(prompt) + [ord(c) for c in answer] + [-100] * pad
        mask = [1] * (width - pad) + [0] * pad
        rows.append(
            {
                "input_ids": torch.tensor(ids),
                "labels": torch.tensor(labels),
                "attention_mask": torch.tensor(mask),
            }
        )
    return rows


@torch.no_grad()
def exact_match(model: torch.nn.Module, task: Task, count: int) -> float:
    """Share of unseen words answered right: every arg-max right means greedy decoding is right."""
    rows = encode(task.examples(count, seed=1))
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    best = model.eval()(input_ids=ids).logits[:, :-1].argmax(-1)
    return ((best == labels) | (labels == -100)).all(1).float().mean().item()


def train(
    model: LlamaForCausalLM,
    tasks: list[Task],
    *,
    out: Path,
    steps: int,
    learning_rate: float,
    schedule: str,
    callbacks: list[SoupCallback],
) -> None:
    per_task = steps * 32 // len(tasks)
    examples = [example for task in tasks for example in task.examples(per_task, seed=0)]
    held_out = [example for task in tasks for example in task.examples(128, seed=2)]
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=learning_rate,
        lr_scheduler_type=schedule,
        warmup_steps=8,
        adam_beta2=0.98,
        weight_decay=0.01,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encode(examples),
        eval_dataset=encode(held_out),
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )
    trainer.train()


def train_base(folder: Path) -> None:
    console.rule("1. a base that copies, upper-cases and shifts by one")
    model = make_model(seed=0)
    tasks = [Task(name, answer) for name, answer in BASE_TASKS.items()]
    train(
        model,
        tasks,
        out=folder.parent / "runs" / "base",
        steps=120,
        learning_rate=3e-3,
        schedule="linear",
        callbacks=[],
    )
    scores = ", ".join(f"{task.name} {exact_match(model, task, 200):.1%}" for task in tasks)
    console.print(f"base tasks, exact match on unseen words: {scores}")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def train_variant(task: Task, *, base: Path, family: Path, out: Path, full: Path) -> float:
    """Fine-tunes the base on one cipher, exports it and keeps the dense model in `full`; returns
    the fine-tune's exact match.
    """
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.get_input_embeddings().weight.requires_grad_(False)
    soup = SoupCallback(
        SoupConfig(merge_every_n_steps=10, rank=64),
        export=ExportConfig(family=family, name=task.name),
    )
    train(
        model,
        [task],
        out=out,
        steps=60,
        # High and constant: a run that bounces around is one that merges help.
        learning_rate=3e-3,
        schedule="constant",
        callbacks=[soup],
    )
    model.save_pretrained(full)
    make_tokenizer().save_pretrained(full)
    return exact_match(model, task, 500)


def write_held_out(task: Task, path: Path) -> None:
    """A thousand unseen words as JSON lines of prompt and answer."""
    rows = ({"prompt": prompt, "answer": answer} for prompt, answer in task.examples(1000, seed=1))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(client: OpenAI, model: str, prompt: str) -> str:
    done = client.completions.create(
        model=model, prompt=prompt, max_tokens=LENGTH + 1, temperature=0
    )
    return done.choices[0].text.strip()


def served_exact_match(client: OpenAI, model: str, task: Task, count: int) -> float:
    """Exact match of answers that come over HTTP, sixteen requests at a time."""
    examples = task.examples(count, seed=1)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda example: ask(client, model, example[0]), examples))
    right = [got == want.strip() for got, (_, want) in zip(answers, examples, strict=True)]
    return sum(right) / count


def size_of(family: Path, name: str) -> int:
    variants = json.loads((family / "family.json").read_text())["variants"]
    return (family / variants[name]["path"] / "variant.safetensors").stat().st_size


def merges_of(run: Path) -> str:
    """`accepted/tried` of a run, from the state that the callback leaves in soup/."""
    states = sorted((run / "soup").glob("state-*.json"))
    history = json.loads(states[-1].read_text())["history"] if states else []
    tried = [merge for merge in history if merge["partner_step"] is not None]
    return f"{sum(merge['accepted'] for merge in tried)} of {len(tried)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    out = parser.parse_args().out
    logging.getLogger("transformers").setLevel(logging.ERROR)
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    base, family = out / "base", out / "family"
    tasks = [Task(name, answer) for name, answer in VARIANTS.items()]

    train_base(base)
    full: dict[str, float] = {}
    for number, task in enumerate(tasks, start=2):
        console.rule(f"{number}. fine-tune {task.name}, merging every 10 steps, and export it")
        full[task.name] = train_variant(
            task,
            base=base,
            family=family,
            out=out / "runs" / task.name,
            full=out / "full" / task.name,
        )
        write_held_out(task, out / "heldout" / f"{task.name}.jsonl")

    console.rule("5. serve the family and ask every variant the same word")
    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    bf16_bytes = 2 * sum(p.numel() for p in plain.parameters())
    table = Table(title=f"one base of {bf16_bytes / 1e6:.2f} MB (bf16) and its 1-bit variants")
    columns = (
        "model",
        "base",
        "full",
        "1 bit, served",
        "merges kept",
        "bytes",
        "of bf16",
        "soupkit ->",
    )
    for column in columns:
        table.add_column(column, justify="right" if column != "model" else "left")
    with running(family, log=out / "serve.log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for task in tasks:
            size = size_of(family, task.name)
            table.add_row(
                task.name,
                f"{exact_match(plain, task, 500):.1%}",
                f"{full[task.name]:.1%}",
                f"{served_exact_match(client, task.name, task, 100):.1%}",
                merges_of(out / "runs" / task.name),
                f"{size:,}",
                f"1/{bf16_bytes / size:.1f}",
                ask(client, task.name, f"{task.name}:soupkits>"),
            )
        table.add_row("base", "", "", "", "", "", "", ask(client, "base", "copy:soupkits>"))
    console.print(table)
    console.print(f"exact match on unseen words; {time.monotonic() - started:.0f} s in all")
    console.print(f"try it: soupkit serve {family}")
    name = tasks[0].name
    console.print(
        f"measure it: soupkit report {family} --variant {name}={out / 'full' / name} "
        f"--data {out / 'heldout' / name}.jsonl --encoding row-x2 --out {out / 'report'}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
