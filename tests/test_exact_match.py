"""Exact match by one pass against greedy decoding, token by token, of models that say anything."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from soupkit import exact_match
from soupkit.exact_match import SLACK_TOKENS, exact_matches
from soupkit.quality import Example, encode, score

END, SKIPPED = "</s>", "<skip>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Few letters, some in two bytes, and merges: a text has many spellings in tokens."""
    letters = ["a", "b", "\u0120", "\u00c3", "\u00a9"]  # "\u00c3\u00a9" are the bytes of an e acute
    merges = [("a", "b"), ("\u00c3", "\u00a9"), ("\u0120", "a"), ("ab", "a")]
    words = [END, SKIPPED, *letters, *("".join(pair) for pair in merges)]
    fast = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token=END, additional_special_tokens=[SKIPPED]
    )


def talker(seed: int, size: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
        initializer_range=0.6,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def decoded(model: LlamaForCausalLM, prompt: list[int], most: int) -> list[int]:
    """The greedy answer without cache or batch."""
    ids = list(prompt)
    for _ in range(most):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == 0:
            break
        ids.append(token)
    return ids[len(prompt) :]


def asked(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> list[Example]:
    """Prompts, each with what the model answers, near misses of it, and other texts."""
    found = []
    for line, prompt in enumerate(["a", "ab ba", "b\u00e9", " a b", "aab", "bb", "\u00e9\u00e9 a"]):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = tokenizer.decode(decoded(model, ids, 6), skip_special_tokens=True)
        misses = [said[:-1], said + "a", said + " ", " " + said, "b" + said, said[:2] + "b", "ab"]
        found += [Example(prompt, text, line) for text in [said, *misses] if text.strip()]
    return found


def test_it_is_what_decoding_each_row_gives(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided_later: list[int] = []
    greedy = exact_match._greedy
    monkeypatch.setattr(
        exact_match,
        "_greedy",
        lambda model, prompts, *rest: (
            decided_later.append(len(prompts)) or greedy(model, prompts, *rest)
        ),
    )
    rights, count = 0, 0
    for seed in range(3):
        model = talker(seed, len(tokenizer))
        rows = encode(asked(tokenizer, model), tokenizer)
        longest = max(len(row.ids) - row.start for row in rows) + SLACK_TOKENS
        wanted = []
        for row in rows:
            said = decoded(model, list(row.ids[: row.start]), longest)
            text = tokenizer.decode(said, skip_special_tokens=True)
            wanted.append(text.strip() == row.example.answer.strip())
        seen: list[int] = []
        said = score(model, rows).likeliest
        assert exact_matches(model, rows, said, tokenizer, step=seen.append) == wanted
        assert sum(seen) == len(rows)
        rights, count = rights + sum(wanted), count + len(rows)
    assert 0.05 * count < rights < 0.95 * count
    # Both ways were taken.
    assert 0 < sum(decided_later) < count
