"""Sampling against exact distributions, and text that streams to the same string as decoding at
once.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_kit import SPECIAL, make_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from soupkit.serving.sampling import Chooser, Sampling, Token, choose, describe
from soupkit.serving.text import TextStream

TOKENIZER = make_tokenizer()


def shares(logits: list[float], sampling: Sampling, *, draws: int = 4000) -> torch.Tensor:
    """How often each token is chosen."""
    chooser = Chooser(sampling)
    rows = torch.tensor(logits).expand(draws, -1)
    ids, _ = choose(rows, [chooser] * draws)
    return torch.bincount(ids, minlength=len(logits)).float() / draws


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(seed=1), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(seed=1, top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(seed=1, top_p=0.79), [0.625, 0.375, 0, 0]),
        (Sampling(seed=1, top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(seed=1, top_k=3, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(seed=1, temperature=0.5), [0.25, 0.09, 0.0225, 0.0025]),
        (Sampling(seed=1, temperature=1e-6), [1, 0, 0, 0]),
        (Sampling(temperature=0.0), [1, 0, 0, 0]),
        (Sampling(seed=1, top_p=1e-9), [1, 0, 0, 0]),
        (Sampling(seed=1, top_p=1e-320), [1, 0, 0, 0]),
        (Sampling(seed=1, temperature=1e-320), [1, 0, 0, 0]),
        (Sampling(seed=1, temperature=1e-40, top_k=2), [1, 0, 0, 0]),
        (Sampling(seed=1, top_k=10**400), [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_tokens_are_drawn_with_the_right_shares(sampling: Sampling, expected: list[float]) -> None:
    target = torch.tensor(expected) / sum(expected)
    # The best is not the first, so that a fault that falls back to position 0 shows.
    target, logits = target.flip(0), torch.tensor([0.05, 0.15, 0.3, 0.5]).log().tolist()
    # Four standard errors of 4000 draws.
    assert (shares(logits, sampling) - target).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    settings = [Sampling(seed=i, top_p=0.8 if i % 2 else 1.0, temperature=i / 3) for i in range(6)]
    together = choose(logits, [Chooser(s) for s in settings])[0].tolist()
    alone = [int(choose(logits[i : i + 1], [Chooser(s)])[0]) for i, s in enumerate(settings)]
    assert together == alone


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0), Sampling(top_k=1)])
def test_a_row_that_overflowed_is_told_apart(value: float, sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, value], [2.0, 1.0]])
    greedy, broken = Chooser(Sampling(0.0)), Chooser(sampling)
    ids, tokens = choose(logits, [greedy, broken, greedy])
    assert tokens == [Token(1), None, Token(0)]
    assert ids.tolist() == [1, 0, 0]


def test_a_log_probability_is_a_number_that_json_has() -> None:
    token = describe(torch.tensor([0.0, -math.inf]), 1, 2)
    assert token == Token(1, -9999.0, ((0, 0.0), (1, -9999.0)))


def test_every_seed_and_choice_draws_its_own_numbers() -> None:
    settings = [Sampling(seed=seed, choice=choice) for seed in (-1, 0, 1, 2) for choice in (0, 1)]
    assert len({Chooser(sampling).numbers.random() for sampling in settings}) == len(settings)
    assert Chooser(Sampling(seed=3)).numbers.random() == Chooser(Sampling(seed=3)).numbers.random()


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"logprobs": 21}]
)
def test_sampling_checks_itself(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


TEXTS = st.text(st.sampled_from("abAB \n.é漢🙂\u0301"), max_size=30)


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_whole_text(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    text=TEXTS, stops=st.lists(st.text("abAB .漢", min_size=1, max_size=4), min_size=1, max_size=3)
)
@settings(max_examples=200, deadline=None)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    stream, got = TextStream(TOKENIZER, stop=stops), ""
    for token in ids:
        got += stream.push(token)
        # What was given out can be kept: it never contains a stop string or has to be taken back.
        assert text.startswith(got)
        assert not any(stop in got for stop in stops)
        if stream.stopped:
            break
    got += stream.finish()
    # The first moment any stop string is complete decides, as in a generation that ends there.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stream.stopped is bool(ends)
    if ends:
        seen = text[: min(ends)]
        assert got == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    else:
        assert got == text


def test_half_a_character_at_the_end_is_given_out_as_it_is() -> None:
    ids = TOKENIZER("é", add_special_tokens=False)["input_ids"]
    stream = TextStream(TOKENIZER)
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\ufffd"


def make_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma have it: what is no word is spelled by tokens of one byte."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "."]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


FALLBACK = make_fallback_tokenizer()


def spelled(text: str) -> list[int]:
    """A token for each byte."""
    return [FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


def streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


# Of four emojis in a row the fourth came out as replacement characters.
@given(text=st.text(st.sampled_from("é漢🙂𝄞"), max_size=12), word=st.sampled_from(["▁a", "b"]))
@settings(max_examples=100, deadline=None)
def test_characters_spelled_in_bytes_come_whole_and_at_once(text: str, word: str) -> None:
    ids = [*spelled(text), FALLBACK.convert_tokens_to_ids(word), *spelled(text)]
    pieces = streamed(FALLBACK, ids)
    assert "".join(pieces) == FALLBACK.decode(ids)
    assert [piece for piece in pieces if piece][: len(text)] == list(text)


def test_bytes_that_are_no_text_take_nothing_back() -> None:
    stray = FALLBACK.convert_tokens_to_ids("<0xFF>")
    pieces = streamed(FALLBACK, [*spelled("🙂"), stray, FALLBACK.convert_tokens_to_ids("b")])
    assert "".join(pieces) == "🙂\ufffdb"


@given(ids=st.lists(st.integers(len(SPECIAL), len(TOKENIZER) - 1), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_join_to_what_they_are_at_once(ids: list[int]) -> None:
    assert "".join(streamed(TOKENIZER, ids)) == TOKENIZER.decode(ids)


class Counting:
    """Counts the tokens that are decoded."""

    tokens = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.tokens += len(token_ids)
        return str(TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens))


# Thousands of them held the event loop for minutes, and their client got nothing until the end.
@pytest.mark.parametrize("text", ["\ufffd", "\u00e9"])
@pytest.mark.parametrize("part", ["all", "last byte", "end of text"])
def test_what_is_no_text_yet_is_not_decoded_again_and_again(text: str, part: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    again = {"all": ids, "last byte": ids[-1:], "end of text": [TOKENIZER.eos_token_id]}[part]
    ids, tokenizer = (ids + again * 500), Counting()
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert tokenizer.tokens < 60 * len(ids)
    wanted = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) + stream.finish() == wanted
    assert len("".join(pieces)) >= len(wanted) - 4


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_special_tokens_inside_a_character_do_not_cut_it(count: int) -> None:
    """They have no text, so however many there are they decide nothing about the bytes before."""
    special = [0, 2, 3][: 1 + count % 3] * count
    for text in (" ǰf", "x😀y", "é"):
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        for at in range(1, len(ids)):
            mixed = ids[:at] + special[:count] + ids[at:]
            stream = TextStream(TOKENIZER)
            pieces = [stream.push(token) for token in mixed] + [stream.finish()]
            assert "".join(pieces) == TOKENIZER.decode(mixed, skip_special_tokens=True) == text
