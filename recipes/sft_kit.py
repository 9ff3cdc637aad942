"""What the fine-tuning recipes share: flags, data, model, checkpoints, and a CPU to try them on.

Data: JSON lines of {"prompt": ..., "answer": ...}, or a data set of the hub with two such columns.
Prompt and answer are tokenised apart, nothing is added but the end of text, and only answers are
learned: a prompt that needs a first token or a chat template has it written out. The last tenth
(at most 1,000 rows) is held out; it scores every merge.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from soupkit import ExportConfig, SoupConfig

Row = dict[str, list[int]]
# A checkpoint without one of these is half written: the Trainer's last file, and our own.
COMPLETE = ("trainer_state.json", "complete")
# SoupCallback's gate takes the first batches of the held-out data: take them all.
ALL_BATCHES = 1_000


def flags(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--base", required=True, help="model folder or hub id")
    add("--data", required=True, help="JSONL file; or hub id[:configuration], needs `datasets`")
    add("--columns", nargs=2, default=("prompt", "answer"), help="names of prompt and answer")
    add("--family", type=Path, required=True, help="the family that the variant is exported into")
    add("--name", required=True, help="the variant's name, under which it is served")
    add("--encoding", default="row", help="of the variant, as in `soupkit export`")
    add("--out", type=Path, help="checkpoints, soup state, TensorBoard; default: runs/NAME")
    add("--steps", type=int, default=3000, help="optimizer steps")
    add("--batch", type=int, default=8, help="sequences per process")
    add("--accumulate", type=int, default=1, help="batches per optimizer step")
    add("--max-length", type=int, default=1024, help="tokens; longer sequences are cut")
    add("--learning-rate", type=float, default=1e-4)
    add("--schedule", default="constant_with_warmup", help="or cosine, linear, ...")
    add("--lora-rank", type=int, default=0, help="train an adapter of this rank; 0: all weights")
    add("--merge-every", type=int, default=1000, help="optimizer steps")
    add("--method", help="svd_mean, monosoup, mean, or ema")
    add("--rank", type=int, help="singular triplets that svd_mean keeps; default: 64")
    add("--energy", type=float, help="share of the squared singular values instead of a rank")
    add("--gate", default="metric", choices=("metric", "none"), help="none: keep every merge")
    add("--feed-back", action="store_true", help="train on from merged weights")
    add("--save-every", type=int, help="optimizer steps; default: as --merge-every")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    add("--seed", type=int, default=0)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with what can be wrong in them found now and told in one line."""
    options = parser.parse_args()
    options.out = options.out or Path("runs") / options.name
    options.save_every = options.save_every or options.merge_every
    options.warmup = options.steps // 20
    chosen = ("method", "rank", "energy", "gate", "feed_back", "seed")
    merging = {name: getattr(options, name) for name in chosen}
    try:
        options.soup = SoupConfig(
            merge_every_n_steps=options.merge_every,
            gate_batches=ALL_BATCHES,
            # What is not given keeps soupkit's default.
            **{name: value for name, value in merging.items() if value is not None},
        )
        options.export = ExportConfig(options.family, options.name, encoding=options.encoding)
    except ValueError as error:
        parser.error(str(error))
    try:
        AutoConfig.from_pretrained(options.base)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"--base {options.base} is no folder of a model, nor one of the hub: {reason}")
    found = newest_checkpoint(options.out)
    if found and not options.resume:
        parser.error(f"{found} is of an earlier run: add --resume, or choose another --out")
    options.checkpoint = found
    return options


def tell(text: str) -> None:
    """Print on the first process only."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def read(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(prompt, answer) of every example."""
    prompt, answer = options.columns
    path = Path(options.data)
    if path.is_file() or path.suffix == ".jsonl":
        return list(read_lines(path, prompt, answer))
    from datasets import load_dataset

    name, _, configuration = options.data.partition(":")
    rows = load_dataset(name, configuration or None, split="train")
    return [(row[prompt], row[answer]) for row in rows]


def read_lines(path: Path, prompt: str, answer: str) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        raise SystemExit(f"--data {path}: there is no such file")
    # Not splitlines(), which also splits at characters that JSON strings may hold.
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield row[prompt] + "", row[answer] + ""
            except (ValueError, KeyError, TypeError):
                wanted = json.dumps({prompt: "...", answer: "..."})
                raise SystemExit(f"{path}, line {number}: needs {wanted}") from None


def load_rows(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Row], list[Row]]:
    """Token ids and labels (-100 on the prompt) to train on, and those that are held out."""
    rows = []
    pairs = read(options)
    for prompt, answer in pairs:
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        end = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        row = {"input_ids": start + end, "labels": [-100] * len(start) + end}
        if len(start) < options.max_length:
            rows.append({name: ids[: options.max_length] for name, ids in row.items()})
    if len(rows) < len(pairs):
        tell(f"{len(pairs) - len(rows)} prompts leave no answer within --max-length: left out")
    split = min(max(1, len(rows) // 10), 1_000)
    if len(rows) <= split:
        raise SystemExit(f"{options.data} has {len(rows)} usable examples: two are the least")
    return rows[:-split], rows[-split:]


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right."""

    def pad(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad(ids, 0),
        "labels": pad([torch.tensor(row["labels"]) for row in rows], -100),
        "attention_mask": pad([torch.ones_like(one) for one in ids], 0),
    }


def load_model(options: argparse.Namespace) -> PreTrainedModel:
    """In float32: mixed precision keeps these as masters, and a small step would vanish in bf16."""
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    if options.lora_rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapter)
    return model


def newest_checkpoint(out: Path) -> Path | None:
    """The last complete checkpoint-N in `out`."""
    found = [path.parent for name in COMPLETE for path in out.glob(f"checkpoint-*/{name}")]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def mark_complete(checkpoint: Path) -> None:
    """On one process, when all have written their part; only the two newest are kept."""
    (checkpoint / "complete").touch()
    done = sorted((path.parent for path in checkpoint.parent.glob("*/complete")), key=step_of)
    for old in done[:-2]:
        shutil.rmtree(old)


@contextmanager
def nothing_lost(options: argparse.Namespace) -> Iterator[None]:
    """If what follows fails, the export say, tell what is kept and how to go on."""
    try:
        yield
    except Exception:
        if found := newest_checkpoint(options.out):
            rest = "export again" if step_of(found) >= options.steps else "go on from there"
            tell(f"{found} is complete: the same command with --resume will {rest}")
        raise


def without_gpu() -> dict[str, object]:
    """On a machine without a GPU, make Accelerate train what its configuration says; call it first.

    Unless told, it quietly trains one model a process there, or leaves the sharding out. Nothing is
    done, and nothing returned, where there is a GPU.

    Returns:
        Arguments that TrainingArguments needs for the same.
    """
    if torch.accelerator.is_available():
        return {}
    from accelerate import DistributedType, PartialState

    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        without_compiler()
        PartialState(backend="gloo")
    elif is_fsdp:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        PartialState(cpu=True)
    return {
        "accelerator_config": {"use_configured_state": True},
        "use_cpu": not is_fsdp,
        "dataloader_pin_memory": False,
    }


def without_compiler() -> None:
    """DeepSpeed would compile an all-reduce for inference on a CPU, and wait on a lock for it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
