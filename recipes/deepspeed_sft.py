"""Supervised fine-tuning on a DeepSpeed engine of one's own, without Accelerate.

    torchrun --nproc_per_node 8 recipes/deepspeed_sft.py --stage 3 \
        --base base --data train.jsonl --family family --name coder
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from rich.progress import Progress
from sft_kit import (
    collate,
    flags,
    load_model,
    load_rows,
    mark_complete,
    nothing_lost,
    parse,
    without_compiler,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, get_scheduler, set_seed
from transformers.integrations import HfDeepSpeedConfig

from soupkit.exits import leave
from soupkit.training import Soup

HAS_GPU = torch.accelerator.is_available()


def deepspeed_config(options: argparse.Namespace) -> dict:
    zero = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if options.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    if not HAS_GPU:
        # Else a model that is tiny enough for a CPU is never cut.
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": HAS_GPU},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": HAS_GPU,
        "tensorboard": {
            "enabled": True,
            "output_path": str(options.out / "runs"),
            "job_name": "train",
        },
    }


def make_optimizer(options: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if options.offload and HAS_GPU:
        # Steps in the host's memory; compiled at the first start.
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(trained, lr=options.learning_rate)
    return torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)


def batches(loader: DataLoader, device: torch.device, start: int) -> Iterator[dict]:
    """Epoch after epoch, from batch `start` on, in the order of a run that was not interrupted."""
    epoch, skipped = divmod(start, len(loader))
    while True:
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skipped:
                yield {name: tensor.to(device) for name, tensor in batch.items()}
        epoch, skipped = epoch + 1, 0


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--offload", action="store_true", help="keep what ZeRO cuts in host memory")
    options = parse(parser)
    if HAS_GPU:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    else:
        without_compiler()
    deepspeed.init_distributed()
    config = deepspeed_config(options)
    # While it lives, stage 3 loads the model in parts.
    alive = HfDeepSpeedConfig(config) if options.stage == 3 else None
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    train_rows, held_out_rows = load_rows(options, tokenizer)
    model = load_model(options)
    optimizer = make_optimizer(options, model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=get_scheduler(options.schedule, optimizer, options.warmup, options.steps),
        config=config,
    )
    del alive
    sampler = DistributedSampler(train_rows, seed=options.seed)
    train = DataLoader(train_rows, options.batch, sampler=sampler, collate_fn=collate)
    held_out_sampler = DistributedSampler(held_out_rows, shuffle=False)
    held_out = DataLoader(
        held_out_rows, options.batch, sampler=held_out_sampler, collate_fn=collate
    )

    def held_out_loss() -> list[float]:
        """Of each batch of this process's share: soupkit takes the mean over all processes."""
        losses = [
            engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            for batch in held_out
        ]
        return torch.stack(losses).tolist()

    soup = Soup(
        engine,
        base=options.base,
        config=options.soup,
        evaluate=held_out_loss if options.gate == "metric" else None,
        output_dir=options.out,
        processing_class=tokenizer,
    )
    if options.checkpoint:
        engine.load_checkpoint(str(options.out), tag=options.checkpoint.name)
        soup.load(options.checkpoint)

    def save() -> None:
        folder: Path = options.out / f"checkpoint-{soup.num_steps}"
        engine.save_checkpoint(str(options.out), tag=folder.name)
        soup.save(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            mark_complete(folder)

    def train_to_the_end() -> None:
        engine.train()
        with Progress(disable=dist.get_rank() > 0) as progress:
            bar = progress.add_task("training", total=options.steps, completed=soup.num_steps)
            start = soup.num_steps * options.accumulate
            for batch in batches(train, engine.device, start):
                engine.backward(engine(**batch).loss)
                is_boundary = engine.is_gradient_accumulation_boundary()
                engine.step()
                soup.step()
                if not is_boundary:
                    continue
                progress.update(bar, completed=soup.num_steps)
                if soup.num_steps % options.save_every == 0 or soup.num_steps == options.steps:
                    save()
                if soup.num_steps == options.steps:
                    return

    with nothing_lost(options):
        if soup.num_steps < options.steps:
            train_to_the_end()
        soup.finish(export=options.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
