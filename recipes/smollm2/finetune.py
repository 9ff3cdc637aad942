"""Fine-tunes SmolLM2-135M on a JSONL or CSV task, merging as it goes, and exports the variant.

    python recipes/smollm2/finetune.py --base smollm2/base --train a.csv --out smollm2 --name mwp

By default the merges make a side soup that training does not see: at the end the best of it and
the run, by loss on held-out batches, is exported. With --feed-back the run goes on from each merge
that scores better, until the learning rate decays. In a run as short as this one that costs more
progress than it saves noise (README.md has the figures), although every single merge scores better
than the weights before it. Embedding and tied head stay frozen, so that a variant is one bit a
weight for the linears, their scales, and the norms.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from task import collate, encode, load
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from soupkit import ExportConfig, SoupConfig
from soupkit.training import SoupCallback

VALIDATION = 128  # training examples that the gate and the evaluations use instead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder or hub id")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="CSV or JSONL files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the variant's name in the family")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--merge-every", type=int, default=20)
    parser.add_argument("--feed-back", action="store_true", help="train on from merged weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    # Float32 masters under bf16 autocast: a step of 1e-4 would vanish in bf16 weights.
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    model.get_input_embeddings().weight.requires_grad_(False)
    rows = encode(load(options.train), tokenizer)
    generator = torch.Generator().manual_seed(options.seed)
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]

    stable = options.steps * 5 // 8
    args = TrainingArguments(
        output_dir=str(options.out / "runs" / options.name),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=16,
        learning_rate=options.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": options.steps - stable},
        warmup_steps=max(1, options.steps // 20),
        optim="adamw_torch_fused",
        adam_beta2=0.98,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        seed=options.seed,
    )
    soup = SoupCallback(
        SoupConfig(
            merge_every_n_steps=options.merge_every,
            feed_back=options.feed_back,
            stop_after_step=stable if options.feed_back else None,
        ),
        export=ExportConfig(family=options.out / "family", name=options.name),
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows[VALIDATION:],
        eval_dataset=rows[:VALIDATION],
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[soup],
    )
    trainer.train()
    trainer.save_model(str(options.out / "full" / options.name))


if __name__ == "__main__":
    main()
