"""Supervised fine-tuning in an Accelerate loop, with merges while it trains and a 1-bit export.

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/sft.py \
        --base base --data train.jsonl --family family --name coder

Data: JSON lines of {"prompt": ..., "answer": ...}; only answers are learned. The last tenth of the
file is held out: it scores every merge, and one that is not better is undone.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.progress import Progress
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from soupkit import ExportConfig, SoupConfig
from soupkit.training import Soup


def encode(line: str, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids, labels) of one JSON line; labels are -100 on the prompt."""
    row = json.loads(line)
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
    answer = [*answer, tokenizer.eos_token_id]
    return torch.tensor(prompt + answer), torch.tensor([-100] * len(prompt) + answer)


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*rows, strict=True)
    return {
        "input_ids": pad_sequence(list(ids), batch_first=True),
        "labels": pad_sequence(list(labels), batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def endless(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder or hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: prompt, answer")
    parser.add_argument("--family", type=Path, required=True, help="the family to export into")
    parser.add_argument("--name", required=True, help="the variant's name")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"), help="soup state goes here")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--merge-every", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    set_seed(options.seed)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=options.accumulate,
        project_dir=str(options.out),
    )
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    rows = [encode(line, tokenizer) for line in options.data.read_text().splitlines() if line]
    split = max(1, len(rows) // 10)
    generator = torch.Generator().manual_seed(options.seed)
    train = DataLoader(
        rows[:-split], options.batch, shuffle=True, collate_fn=collate, generator=generator
    )
    held_out = DataLoader(rows[-split:], options.batch, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = get_scheduler("constant_with_warmup", optimizer, options.steps // 20)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        model, optimizer, train, held_out, scheduler
    )

    @torch.no_grad()
    def held_out_loss() -> float:
        """Mean loss over the held-out batches of all processes."""
        model.eval()
        losses = torch.stack([model(**batch).loss for batch in held_out])
        model.train()
        return accelerator.gather(losses).mean().item()

    soup = Soup(
        model,
        optimizer=optimizer,
        base=options.base,
        config=SoupConfig(merge_every_n_steps=options.merge_every, rank=options.rank),
        accelerator=accelerator,
        evaluate=held_out_loss,
    )
    model.train()
    with Progress(disable=not accelerator.is_main_process) as progress:
        bar = progress.add_task("training", total=options.steps)
        for batch in endless(train):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                soup.step()
                progress.advance(bar)
                if progress.finished:
                    break
    soup.finish(export=ExportConfig(family=options.family, name=options.name))
    accelerator.end_training()


if __name__ == "__main__":
    main()
    # DDP's reference cycle keeps gloo's threads alive; one that still runs when Python ends aborts
    # the process (pytorch/pytorch#190489).
    gc.collect()
