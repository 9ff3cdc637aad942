"""How well a causal language model does on held-out data: loss, and KL to another model.

    loss = -mean log p(token)                          over answer tokens, in nats
    KL(p || q) = mean sum_v p(v) (log p(v) - log q(v)) over answer tokens, p the reference

Data are JSON lines of {"prompt", "answer"} or {"text"}. Prompt and answer are tokenised apart and
without the tokenizer's own first and last tokens, as the recipes train them, and the end of text
belongs to the answer; a prompt that needs a first token has it written out. Of a text all tokens
but the first are answer. Log-probabilities are float64 of the model's float32 logits. No files are
written, nothing is judged here; exact match is in soupkit.exact_match.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soupkit.errors import CheckpointError
from soupkit.files import parse_json, refusing_in_one_line

IGNORED = -100
# Of a batch, padding included: its float32 logits take 2048 * 4 bytes a word of the vocabulary.
BATCH_TOKENS = 2048
_POSITIONS = 256

Step = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Example:
    """One line of the data. prompt: "" for a text. answer: the answer, or the text. line: in the
    file, from 1.
    """

    prompt: str
    answer: str
    line: int

    @property
    def is_text(self) -> bool:
        """Whether it has no prompt, so that there is nothing to answer."""
        return not self.prompt


@dataclass(frozen=True, slots=True)
class Row:
    """An example as tokens: ids, of which those from `start` on are answer."""

    ids: tuple[int, ...]
    start: int
    example: Example


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of answers.

    Args:
        loss: in nats an answer token. tokens: how many.
        kl: of the reference to the model, in nats an answer token; None without a reference.
        likeliest: of each row, in order, the likeliest token at each place of its answer.
    """

    loss: float
    tokens: int
    kl: float | None
    likeliest: tuple[tuple[int, ...], ...]


def read_examples(path: str | Path) -> list[Example]:
    """The examples of a JSONL file; empty lines are skipped.

    Raises:
        ValueError: a line, which is named by its number, is no such object; or there is none.
        OSError: the file cannot be read.
    """
    path = Path(path)
    found = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    found.append(_example(parse_json(raw), number))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f'{path} has no example: give lines of {{"prompt": ..., "answer": ...}}')
    return found


def _example(row: Any, number: int) -> Example:
    wanted = 'needs {"prompt": "...", "answer": "..."} or {"text": "..."}'
    if not isinstance(row, dict) or ("text" in row) == ("prompt" in row or "answer" in row):
        raise ValueError(wanted)
    keys = ("text",) if "text" in row else ("prompt", "answer")
    for key in keys:
        if not isinstance(row.get(key), str) or not row[key]:
            raise ValueError(f"{key!r} is {row.get(key)!r}: {wanted}, none of them empty")
        # JSON can write half a surrogate pair, which no tokenizer takes.
        if any("\ud800" <= letter <= "\udfff" for letter in row[key]):
            raise ValueError(f"{key!r} has half a surrogate pair, which is no text: drop the line")
    if "text" in row:
        return Example("", row["text"], number)
    return Example(row["prompt"], row["answer"], number)


def open_model(folder: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """The causal language model of a folder, float32, in eval mode; no code of the folder is run.

    Raises:
        CheckpointError: transformers cannot open it. ImportError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    with refusing_in_one_line(f"{folder}: transformers cannot open the model"), _no_bars():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    # Its own may sample, or punish repetitions; where it ends is kept.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' bars off the terminal, where the caller has its own."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def open_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        CheckpointError: it has none. ImportError: transformers is not installed.
    """
    from transformers import AutoTokenizer

    with refusing_in_one_line(f"{folder}: no usable tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def context_of(model: Any) -> int | None:
    """Tokens that a model takes at a time; None if its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def encode(examples: Sequence[Example], tokenizer: Any, *, most: int | None = None) -> list[Row]:
    """Examples as tokens.

    Args:
        most: tokens that the model takes; None: any number.

    Raises:
        ValueError: an example has no answer token that something precedes, or more than `most`.
    """
    end = tokenizer.eos_token_id
    rows = []
    for example in examples:
        prompt = _ids(tokenizer, example.prompt)
        answer = _ids(tokenizer, example.answer)
        if not example.is_text and end is not None and answer[-1:] != [end]:
            answer.append(end)
        start = max(1, len(prompt))
        ids = (*prompt, *answer)
        if len(ids) <= start or (not example.is_text and not prompt):
            raise ValueError(
                f"line {example.line}: {len(prompt)} tokens of prompt and {len(answer)} of answer "
                "leave nothing to score: drop the line"
            )
        if most is not None and len(ids) > most:
            raise ValueError(
                f"line {example.line}: {len(ids)} tokens, the model takes {most}: shorten the line"
            )
        rows.append(Row(ids, start, example))
    return rows


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


class Reference:
    """The logits of a model on the answers of rows: computed once for many comparisons.

    They lie in a file, [answer tokens, words] float32, as they may exceed the memory.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        """Args: path: of the file to be. tokens: of all answers together."""
        self._path, self._tokens = path, tokens
        self._logits: Tensor | None = None
        self._done = 0

    def keep(self, logits: Tensor) -> None:
        """Store those of the next batch."""
        if self._logits is None:
            size = (self._tokens, logits.shape[1])
            nbytes = 4 * math.prod(size)
            with self._path.open("xb") as file:
                try:
                    # Pages that the disk has no room for would end the process when written.
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                except OSError as error:
                    why = f"{error.strerror}: {nbytes:,} bytes for the logits of {self._tokens:,} "
                    why += "answer tokens; give fewer examples"
                    raise OSError(error.errno, why, str(self._path)) from None
            stored = torch.from_file(
                str(self._path), shared=True, size=math.prod(size), dtype=torch.float32
            )
            self._logits = stored.view(size)
        self._logits[self._done : self._done + len(logits)] = logits.cpu()
        self._done += len(logits)

    def at(self, start: int, like: Tensor) -> Tensor:
        """Those that match `like` [tokens, words], from answer token `start` on, on its device.

        Raises:
            ValueError: another vocabulary.
        """
        assert self._logits is not None
        if self._logits.shape[1] != like.shape[1]:
            raise ValueError(
                f"a vocabulary of {like.shape[1]} against {self._logits.shape[1]} in the "
                "reference: there is no KL between them"
            )
        return self._logits[start : start + len(like)].to(like.device)


@torch.inference_mode()
def score(
    model: Any,
    rows: Sequence[Row],
    *,
    reference: Reference | None = None,
    keep: Reference | None = None,
    step: Step | None = None,
) -> Score:
    """Loss of a model on the answers of `rows`, KL(reference || model) there, what it would say.

    Args:
        reference: logits of a model of the same vocabulary on the same rows, in the same order.
        keep: takes this model's logits.
        step: called with the number of rows that a batch finished.

    Raises:
        ValueError: no row, or another vocabulary in the reference. CheckpointError: logits that are
            not finite. OSError: the disk refused.
    """
    if not rows:
        raise ValueError("no rows to score: give at least one example")
    loss, distance, tokens = 0.0, 0.0, 0
    likeliest: dict[int, tuple[int, ...]] = {}
    for batch in batches(rows):
        ids, labels, mask = padded(batch, model)
        answer = labels[:, 1:] != IGNORED
        wanted = labels[:, 1:][answer]
        ours = model(input_ids=ids, attention_mask=mask).logits[:, :-1][answer].float()
        if keep is not None:
            keep.keep(ours)
        # Blocks of positions bound the float64 copies.
        for at in range(0, len(wanted), _POSITIONS):
            part = slice(at, at + _POSITIONS)
            logs = ours[part].double().log_softmax(-1)
            loss -= float(logs.gather(1, wanted[part, None]).sum())
            if reference is not None:
                theirs = reference.at(tokens + at, ours[part])
                distance += _kl(theirs.double().log_softmax(-1), logs)
        said = ours.argmax(-1).cpu().split([len(row.ids) - row.start for row in batch])
        likeliest |= {id(row): tuple(one.tolist()) for row, one in zip(batch, said, strict=True)}
        tokens += len(wanted)
        if step:
            step(len(batch))
    if not math.isfinite(loss) or not math.isfinite(distance):
        raise CheckpointError(
            f"loss {loss}, KL {distance}: the model's logits are not finite; `soupkit verify` "
            "finds damaged weights"
        )
    return Score(
        loss / tokens,
        tokens,
        None if reference is None else distance / tokens,
        tuple(likeliest[id(row)] for row in rows),
    )


def _kl(p: Tensor, q: Tensor) -> float:
    """sum over rows of KL(p || q) of log-probabilities; rounding may not make it negative."""
    # A logit of -inf in both has no weight.
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
    return max(0.0, float(terms.sum()))


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of like length together, longest first, BATCH_TOKENS or one row at a time."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batch and len(batch[0].ids) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def padded(batch: Sequence[Row], model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels and attention mask [rows, longest] on the model's device; padded on the right
    with 0, which no token before sees.

    Raises:
        ValueError: a token that the model has no embedding for.
    """
    width = max(len(row.ids) for row in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORED)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(batch):
        tokens = torch.tensor(row.ids)
        ids[place, : len(tokens)] = tokens
        labels[place, row.start : len(tokens)] = tokens[row.start :]
        mask[place, : len(tokens)] = 1
    if int(ids.max()) >= (words := model.get_input_embeddings().weight.shape[0]):
        raise ValueError(f"token {int(ids.max())}: the tokenizer exceeds the model's {words}")
    return ids.to(model.device), labels.to(model.device), mask.to(model.device)
