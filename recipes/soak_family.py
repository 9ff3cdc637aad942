"""What the soak serves: a tiny random base, its variants in every kind of encoding, and what each
of them must answer, by plain transformers on the restored dense models in float32.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.restore import restore

LETTERS = string.ascii_letters + string.digits
MOST_TOKENS = 16
# A token is only asked for where the runner-up is further away than sums in another order move it.
LEAST_MARGIN = 1e-3

# Which parameters a fine-tune moves, and their encoding.
KINDS: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda name: "_proj" in name, "row"),
    (lambda name: "_proj" in name or "norm" in name, "row-x2"),
    (lambda name: "_proj" in name or "embed" in name, "row"),
    (lambda name: True, "matrix-x3"),
    (lambda name: "norm" not in name, "lowrank-2+rank1-x2"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for one model, and the tokens that the oracle answers, special ones too."""

    model: str
    prompt: str
    tokens: tuple[str, ...]

    def answer(self, count: int) -> str:
        """The text of the first tokens."""
        return "".join(token for token in self.tokens[:count] if token in LETTERS)


def make_family(work: Path, *, variants: int, seed: int) -> list[str]:
    """work/base and work/family; the names of its variants."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 2,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    base = LlamaForCausalLM(config)
    _save(base, work / "base")
    names = [f"v{number:02}" for number in range(variants)]
    for number, name in enumerate(names):
        moved, encoding = KINDS[number % len(KINDS)]
        model = LlamaForCausalLM.from_pretrained(work / "base", dtype=torch.float32)
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if moved(parameter):
                    weight.add_(0.12 * torch.randn_like(weight))
        _save(model, work / "full" / name)
        export_variant(
            open_checkpoint(work / "base"),
            open_checkpoint(work / "full" / name),
            family=work / "family",
            name=name,
            encoding=encoding,
        )
    return names


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    words = {token: number for number, token in enumerate(["<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def make_questions(work: Path, names: list[str], *, prompts: int, seed: int) -> list[Question]:
    """Questions for the base and each variant; all models are asked the same prompts.

    Prompts begin alike, so that what a server shares between them is put to the test.
    """
    rng = random.Random(seed)
    heads = ["".join(rng.choices(LETTERS, k=length)) for length in (0, 24, 40)]
    texts = [
        rng.choice(heads) + "".join(rng.choices(LETTERS, k=rng.randint(1, 30)))
        for _ in range(prompts)
    ]
    found: list[Question] = []
    for name in ("base", *names):
        folder = work / "base"
        if name != "base":
            folder = restore(work / "family", name, out=work / "restored" / name).path
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        asked = [Question(name, text, tokens) for text in texts if (tokens := _answer(model, text))]
        if len(asked) < prompts // 2:
            raise RuntimeError(f"{name} is undecided on most prompts: choose another --seed")
        found += asked
    return found


def _answer(model: Any, prompt: str) -> tuple[str, ...]:
    """The greedy tokens up to the first that is too close a call; none if that is too early."""
    words = ["<s>", "</s>", *LETTERS]
    ids = torch.tensor([[words.index(letter) for letter in prompt]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MOST_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens: list[str] = []
    for logits in out.logits:
        best = logits[0].topk(2)
        if float(best.values[0] - best.values[1]) < LEAST_MARGIN:
            break
        tokens.append(words[int(best.indices[0])])
    return tuple(tokens) if len(tokens) >= 2 else ()
