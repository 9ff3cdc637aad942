"""Supervised fine-tuning by TRL's SFTTrainer: the same callback as Trainer's.

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/trl_sft.py \
        --base base --data train.jsonl --family family --name coder
"""

import os

from datasets import Dataset
from sft_kit import flags, load_model, load_rows, nothing_lost, parse, step_of, without_gpu
from transformers import AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from soupkit.exits import leave
from soupkit.training import SoupCallback


def main() -> None:
    options = parse(flags(__doc__))
    args = SFTConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=False,  # True: less memory, a third more time
        max_length=options.max_length,
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
        seed=options.seed,
        **without_gpu(),
    )
    # Before the model: with ZeRO-3, SFTConfig makes it load in parts.
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    train, held_out = load_rows(options, tokenizer)
    trainer = SFTTrainer(
        model=load_model(options),
        args=args,
        # Tokenised and labelled; text columns "prompt" and "completion" would do as well.
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(held_out),
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
