"""Base, full fine-tune and 1-bit variant on held-out data: loss, exact match, bytes.

    python recipes/smollm2/evaluate.py --out smollm2 --name mwp --train a.csv --data dev.csv

Loss is the mean negative log-likelihood of answer tokens; exact match is greedy; all in float32.
The 1-bit answers are asked over HTTP from `soupkit serve --dtype float32`, and again from the dense
model that `soupkit restore` writes; every answer must be the same, token for token.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from openai import OpenAI
from rich.console import Console
from rich.progress import track
from rich.table import Table
from task import MAX_ANSWER_TOKENS, Example, collate, encode, held_out, load
from transformers import AutoModelForCausalLM, AutoTokenizer

from soupkit.serving.local import running

console = Console()


@torch.inference_mode()
def loss_of(model, tokenizer, examples: Sequence[Example]) -> float:
    """Mean negative log-likelihood of an answer token, in nats."""
    total, tokens = 0.0, 0
    for at in range(0, len(examples), 16):
        batch = collate(encode(examples[at : at + 16], tokenizer))
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += float(model(**batch).loss) * count
        tokens += count
    return total / tokens


@torch.inference_mode()
def answers_of(model, tokenizer, examples: Sequence[Example], label: str) -> list[list[int]]:
    """Greedy answers as token ids; prompts of one length go together, so that none is padded."""
    prompts = [tokenizer(e.prompt, add_special_tokens=False)["input_ids"] for e in examples]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups = [list(same) for _, same in groupby(order, key=lambda i: len(prompts[i]))]
    batches = [group[at : at + 16] for group in groups for at in range(0, len(group), 16)]
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in track(batches, description=label, console=console):
        ids = torch.tensor([prompts[i] for i in batch])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
        )
        for i, row in zip(batch, out, strict=True):
            answers[i] = row[ids.shape[1] :].tolist()
    return answers


def served_answers(url: str, model: str, tokenizer, examples: Sequence[Example]) -> list[str]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    prompts = [tokenizer(e.prompt, add_special_tokens=False)["input_ids"] for e in examples]

    def ask(prompt: list[int]) -> str:
        done = client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_ANSWER_TOKENS, temperature=0
        )
        return done.choices[0].text

    with ThreadPoolExecutor(16) as pool:
        asked = pool.map(ask, prompts)
        return list(track(asked, f"{model}, served", total=len(prompts), console=console))


def interval(share: float, count: int) -> str:
    """The share with its 95 % half-width (normal approximation)."""
    half = 1.96 * math.sqrt(share * (1 - share) / count)
    return f"{share:.1%} +- {half:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder finetune.py wrote")
    parser.add_argument("--base", help="folder or hub id; default: OUT/base")
    parser.add_argument("--name", required=True)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="held-out files")
    parser.add_argument("--limit", type=int, help="use only the first N held-out examples")
    options = parser.parse_args()
    base = options.base or str(options.out / "base")
    family = options.out / "family"
    examples = held_out(load(options.train), load(options.data))[: options.limit]
    tokenizer = AutoTokenizer.from_pretrained(base)

    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        dense = Path(scratch) / "dense"
        restore = ["restore", str(family), options.name, "--out", str(dense), "--dtype", "float32"]
        subprocess.run([sys.executable, "-m", "soupkit", *restore], check=True)
        folders = {"base": base, "full": options.out / "full" / options.name, "1 bit": dense}
        rows, texts = {}, {}
        for label, folder in folders.items():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            loss = loss_of(model, tokenizer, examples)
            ids = answers_of(model, tokenizer, examples, label)
            texts[label] = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
            right = [e.is_right(text) for e, text in zip(examples, texts[label], strict=True)]
            rows[label] = (loss, right)
            parameters = sum(p.numel() for p in model.parameters())
            del model

    with running(family, "--dtype", "float32") as url:
        served = served_answers(url, options.name, tokenizer, examples)
    equal = sum(a == b for a, b in zip(served, texts["1 bit"], strict=True))

    table = Table(title=f"{options.name}: {len(examples)} held-out prompts")
    for column in ("weights", "loss", "exact match", "right only here / only in full"):
        table.add_column(column, justify="right" if column != "weights" else "left")
    for label, (loss, right) in rows.items():
        full = rows["full"][1]
        here = sum(a and not b for a, b in zip(right, full, strict=True))
        there = sum(b and not a for a, b in zip(right, full, strict=True))
        share = interval(sum(right) / len(right), len(right))
        table.add_row(label, f"{loss:.4f}", share, f"{here} / {there}")
    console.print(table)
    variants = json.loads((family / "family.json").read_text())["variants"]
    size = (family / variants[options.name]["path"] / "variant.safetensors").stat().st_size
    console.print(f"variant.safetensors: {size:,} bytes, 1/{2 * parameters / size:.2f} of bf16")
    console.print(f"served answers equal to the restored model's: {equal} of {len(examples)}")
    if equal != len(examples):
        sys.exit(1)


if __name__ == "__main__":
    main()
