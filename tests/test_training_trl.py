"""A script of TRL's SFTTrainer with one import and one line of soupkit: whole weights and LoRA,
stopped and resumed.
"""

from pathlib import Path

import pytest
import torch
from soup_runs import VOCABULARY, load, rows, saved_base, weights_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.training import SoupCallback
from soupkit.verify import verify_family

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
# TRL and PEFT read attributes that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = [f"w{number}" for number in range(VOCABULARY)]
UNGATED = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
GATED = SoupConfig(merge_every_n_steps=2, rank=3, gate_batches=2, feed_back=True)
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Without a tokenizer, so that the variant has to bring its own."""
    return saved_base(tmp_path_factory.mktemp("base") / "base")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=WORDS[0],
        eos_token=WORDS[1],
        pad_token=WORDS[2],
        chat_template="{{ messages[0]['content'] }}",
    )


def texts(count: int, seed: int):
    lines = [" ".join(WORDS[i] for i in row["input_ids"]) for row in rows(count, seed=seed)]
    return datasets.Dataset.from_list([{"text": line} for line in lines])


def sft(base: Path, folder: Path, callback: SoupCallback, *, lora: bool, stop: int = 8):
    """7 batches an epoch, accumulation 2."""
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        max_steps=stop,
        max_length=12,
        save_strategy="steps",
        save_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    return trl.SFTTrainer(
        model=load(base),
        args=args,
        train_dataset=texts(14, seed=1),
        eval_dataset=texts(6, seed=2),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None,
        callbacks=[callback],
    )


@pytest.mark.parametrize(
    ("lora", "config"), [(False, UNGATED), (True, GATED)], ids=["whole", "lora, gate"]
)
def test_a_resumed_sft_run_is_the_uninterrupted_one(base, tmp_path, lora, config):
    whole = sft(base, tmp_path / "whole", SoupCallback(config), lora=lora)
    assert isinstance(whole.model, peft.PeftModel) == lora
    whole.train()
    sft(base, tmp_path / "run", SoupCallback(config), lora=lora, stop=5).train()
    callback = SoupCallback(config)
    resumed = sft(base, tmp_path / "run", callback, lora=lora)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert [report.step for report in callback.reports] == [4, 6, 8]
    if not lora:
        assert all(report.accepted for report in callback.reports)
    expected = weights_of(whole.model)
    assert all(torch.equal(v, expected[name]) for name, v in weights_of(resumed.model).items())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_an_sft_run_is_exported_with_its_tokenizer(base, tmp_path, lora):
    """TB64: tokenizer and chat template are those of the training checkpoint, byte for byte."""
    export = ExportConfig(family=tmp_path / "family", name="x")
    trainer = sft(base, tmp_path / "run", SoupCallback(UNGATED, export=export), lora=lora, stop=4)
    trainer.train()
    assert verify_family(tmp_path / "family") == []
    variant, checkpoint = tmp_path / "family" / "variants" / "x", tmp_path / "run" / "checkpoint-4"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (variant / name).read_bytes() == (checkpoint / name).read_bytes(), name
    stored = open_variant(variant).load().manifest
    assert [merge["step"] for merge in stored.history] == [4]
