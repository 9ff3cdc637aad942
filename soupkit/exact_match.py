"""Exact match: is a model's greedy answer to a prompt, as text, the given one?

    y_i = argmax_v p(v | prompt, y_1 .. y_{i-1})      up to a token that ends the answer

Up to where the two part, the greedy answer is the given one, so the pass over prompt and given
answer that measures the loss tells it: if all of it is the likeliest, it is right; if it parts with
a token whose text is not the answer's, it is wrong. Only what parts with the same text (other
tokens, white space) is decoded, token by token, until its text parts. A model's own settings for
sampling are ignored. White space around an answer does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from soupkit.quality import Row, Step, context_of

DECODE_BATCH = 16
# A rambling model is cut this many tokens after the longest answer.
SLACK_TOKENS = 8


def exact_matches(
    model: Any,
    rows: Sequence[Row],
    likeliest: Sequence[Sequence[int]],
    tokenizer: Any,
    *,
    step: Step | None = None,
) -> list[bool]:
    """For each row with a prompt, in order: whether the greedy answer is the given one, as text
    without white space around it.

    Args:
        likeliest: of each row, as soupkit.quality.score found them for this model.
        step: called with the number of rows that are told at a time.
    """
    ends = sorted({*_end_tokens(model.generation_config), *_end_tokens(tokenizer)})
    asked = [(row, said) for row, said in zip(rows, likeliest, strict=True) if row.example.prompt]
    right = [_verdict(row, said, tokenizer, ends) for row, said in asked]
    if step:
        step(len(right) - right.count(None))
    longest = max((len(row.ids) - row.start for row, _ in asked), default=0) + SLACK_TOKENS
    for group in _same_length([i for i, found in enumerate(right) if found is None], asked):
        batch = [asked[i][0] for i in group]
        prompts = torch.tensor([row.ids[: row.start] for row in batch])
        answers = [row.example.answer for row in batch]

        def have_parted(
            said: Sequence[Sequence[int]], answers: Sequence[str] = answers
        ) -> list[bool]:
            pairs = zip(said, answers, strict=True)
            return [_has_parted(tokenizer, tokens, answer) for tokens, answer in pairs]

        told = _greedy(model, prompts, longest, ends, have_parted)
        for i, said, answer in zip(group, told, answers, strict=True):
            right[i] = _text(tokenizer, said).strip() == answer.strip()
        if step:
            step(len(group))
    return [bool(found) for found in right]


def _verdict(
    row: Row, likeliest: Sequence[int], tokenizer: Any, ends: Sequence[int]
) -> bool | None:
    """Whether the greedy answer is right, by the likeliest token at each place of the given one;
    None: that does not tell.
    """
    wanted = row.ids[row.start :]
    for place, (said, given) in enumerate(zip(likeliest, wanted, strict=True)):
        if said in ends:
            text = _text(tokenizer, wanted[:place])
            return text.strip() == row.example.answer.strip()
        if said != given:
            tokens = [*wanted[:place], said]
            return False if _has_parted(tokenizer, tokens, row.example.answer) else None
    return None


def _has_parted(tokenizer: Any, tokens: Sequence[int], answer: str) -> bool:
    """Whether an answer that begins with these tokens is not the given one, whatever follows."""
    # Part of a letter is written as U+FFFD, and decoders move white space.
    text = "".join(_text(tokenizer, tokens).rstrip("\ufffd").split())
    return not "".join(answer.split()).startswith(text)


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def _same_length(
    left: Sequence[int], asked: Sequence[tuple[Row, Sequence[int]]]
) -> list[list[int]]:
    """Batches of places in `asked` whose prompts are of one length, so that none is padded."""
    found = []
    for _, same in groupby(
        sorted(left, key=lambda i: asked[i][0].start), lambda i: asked[i][0].start
    ):
        group = list(same)
        found += [group[at : at + DECODE_BATCH] for at in range(0, len(group), DECODE_BATCH)]
    return found


def _end_tokens(owner: Any) -> list[int]:
    end = owner.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


@torch.inference_mode()
def _greedy(
    model: Any,
    prompts: Tensor,
    most: int,
    ends: Sequence[int],
    have_parted: Callable[[Sequence[Sequence[int]]], list[bool]],
) -> list[list[int]]:
    """The likeliest next tokens after each prompt, up to one of `ends` (left out) or `most`, or
    to where `have_parted`, which is told the tokens of all rows so far, says so of a row.
    """
    from transformers import StoppingCriteriaList

    def parted(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        # A row that has ended is filled up, and its text stays what it is or parts.
        return torch.tensor(have_parted(ids[:, start:].tolist()), device=ids.device)

    start = prompts.shape[1]
    prompts = prompts.to(model.device)
    context = context_of(model)
    if context is not None:
        most = min(most, context - prompts.shape[1])
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(ends) or None,
        # It only fills rows that have ended.
        pad_token_id=ends[0] if ends else 0,
        stopping_criteria=StoppingCriteriaList([parted]),
    )
    answers = []
    for row in out[:, prompts.shape[1] :].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:stop])
    return answers
