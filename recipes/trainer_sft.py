"""Supervised fine-tuning by Hugging Face's Trainer: one callback merges and exports.

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/trainer_sft.py \
        --base base --data train.jsonl --family family --name coder
"""

import os

from sft_kit import (
    collate,
    flags,
    load_model,
    load_rows,
    nothing_lost,
    parse,
    step_of,
    without_gpu,
)
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from soupkit.exits import leave
from soupkit.training import SoupCallback


def main() -> None:
    options = parse(flags(__doc__))
    args = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.schedule,
        warmup_steps=options.warmup,
        bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",
        eval_strategy="steps",
        eval_steps=options.merge_every,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=10,
        report_to="tensorboard",
        remove_unused_columns=False,
        seed=options.seed,
        **without_gpu(),
    )
    # Before the model: with ZeRO-3, TrainingArguments make it load in parts.
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    train, held_out = load_rows(options, tokenizer)
    trainer = Trainer(
        model=load_model(options),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[SoupCallback(options.soup, export=options.export, base=options.base)],
    )
    if options.checkpoint and step_of(options.checkpoint) >= options.steps:
        # Trained to the end, not exported: else the Trainer would take one more step.
        args.max_steps, args.num_train_epochs = -1, 0
    with nothing_lost(options):
        trainer.train(resume_from_checkpoint=options.checkpoint and str(options.checkpoint))


if __name__ == "__main__":
    main()
    leave()
