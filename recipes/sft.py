"""Supervised fine-tuning in an Accelerate loop, with merges while it trains and a 1-bit export.

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/sft.py \
        --base base --data train.jsonl --family family --name coder

Every strategy of recipes/accelerate_configs; README.md there has the commands.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    set_seed,
)
from rich.progress import Progress
from sft_kit import (
    collate,
    flags,
    load_model,
    load_rows,
    mark_complete,
    nothing_lost,
    parse,
    without_gpu,
)
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, get_scheduler

from soupkit.exits import leave
from soupkit.training import Soup


def batches(loader: DataLoader, accelerator: Accelerator, start: int) -> Iterator[dict]:
    """Epoch after epoch, from batch `start` on, in the order of a run that was not interrupted."""
    epoch, skipped = divmod(start, len(loader))
    while True:
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)
        yield from rest
        epoch, skipped = epoch + 1, 0


def main() -> None:
    options = parse(flags(__doc__))
    without_gpu()
    accelerator = Accelerator(
        log_with="tensorboard",
        project_config=ProjectConfiguration(str(options.out), str(options.out / "runs")),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            options.accumulate, sync_with_dataloader=False
        ),
        # Once an optimizer step, however many processes there are.
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=options.seed
        ),
    )
    accelerator.init_trackers("train")
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    train_rows, held_out_rows = load_rows(options, tokenizer)
    model = load_model(options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    scheduler = get_scheduler(options.schedule, optimizer, options.warmup, options.steps)
    train = DataLoader(train_rows, options.batch, shuffle=True, collate_fn=collate)
    held_out = DataLoader(held_out_rows, options.batch, collate_fn=collate)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        model, optimizer, train, held_out, scheduler
    )

    def held_out_loss() -> list[float]:
        """Of each batch of this process's share: soupkit takes the mean over all processes."""
        return [model(**batch).loss.item() for batch in held_out]

    soup = Soup(
        model,
        optimizer=optimizer,
        base=options.base,
        config=options.soup,
        accelerator=accelerator,
        evaluate=held_out_loss if options.gate == "metric" else None,
        processing_class=tokenizer,
    )
    if options.checkpoint:
        accelerator.load_state(str(options.checkpoint))

    def save() -> None:
        folder: Path = options.out / f"checkpoint-{soup.num_steps}"
        accelerator.save_state(str(folder))  # soup.num_steps with it
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            mark_complete(folder)

    def train_to_the_end() -> None:
        model.train()
        with Progress(disable=not accelerator.is_main_process) as progress:
            bar = progress.add_task("training", total=options.steps, completed=soup.num_steps)
            for batch in batches(train, accelerator, soup.num_steps * options.accumulate):
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                scheduler.step()
                soup.step()
                scalars = {"loss": loss.item(), "learning_rate": scheduler.get_last_lr()[0]}
                accelerator.log(scalars, step=soup.num_steps)
                progress.update(bar, completed=soup.num_steps)
                if soup.num_steps % options.save_every == 0 or soup.num_steps == options.steps:
                    save()
                if soup.num_steps == options.steps:
                    return

    with nothing_lost(options):
        if soup.num_steps < options.steps:
            train_to_the_end()
        soup.finish(export=options.export)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    leave()
