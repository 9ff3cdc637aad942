"""Names by patterns: what PEFT's own matching says, and no pattern takes for ever."""

import re
import string
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key, match_target_against_key

from soupkit import name_patterns
from soupkit.name_patterns import Patience, PatternTable, compiled, does_match

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.experts.12.down_proj",
    "model.visual.blocks.0.attn.qkv",
    "q_proj",
    "modelXlayersX0Xself_attnXq_proj",
    "layers.0.self-attn.Q_PROJ",
    "x.layers.0.self_attn.q_proj",
    "model.layers.0",
    "lm_head",
    "",
    "aab.ba.b",
    "r\u00e9seau.\u0661.\u00df",
    "12.3",
)
PLAIN = (
    "q_proj", "self_attn.q_proj", "^model.layers.0.self_attn.q_proj", r"^model\.layers\.0$", "",
    r"layers\.0\.self\-attn\.Q_PROJ", "proj", "model.layers.0", "^", "$", ".", "..", r"\.", "^.*$",
    "lm_head$", r"r\u00e9seau\..\..",
)  # fmt: skip
PATTERNS = (
    ".*", ".*q_proj", r"layers\.\d+\..*", r"^layers\.(0|1)\..*q_proj$",
    r"^model\.layers\.(0|1)\..*q_proj$",
    r".*\.(q_proj|k_proj|down_proj)", r"model\.layers\.[0-9]{1,2}\.self_attn\.q_proj", r"\w+_proj",
    r"[^.]+\.q_proj", r"(?:.*?(?:language|self_attn|attn|mlp).*?(?:q_proj|qkv|down_proj).*?)",
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    r"^(?!.*visual).*(q_proj|qkv)", r"(?=model)model\..*", r"a)|(model.*", r"(a*)*b", r"(a|aa)+b.*",
    r"(a?){2,3}b\.ba\.b", r"\D+", r"[^\W\d]+\.\d.\w", r"(a|b|\.)*", r"(a+b?\.?)+", r"(\b\w+\b\.?)+",
    r"\Amodel.*0\Z", r"(^model|x)\..*", r"(){1000}q_proj", r"\x61ab.*", r"(q|)_?proj|[q-r]_proj",
    r"(?P<n>q)_proj", r"(.)\1?b.*", r"(?<=l)?.*proj", r"(?i:Q)_PROJ",
    "q_pro[j]", r"experts\.\d{2}\.(up|down)_proj", "()", "a{0}",
)  # fmt: skip


def is_whole(key: str, name: str) -> bool:
    return does_match(compiled(key, key).fullmatch, name, Patience())


def found(key: str, name: str) -> bool:
    return PatternTable({key: True}).of(name, False)


@pytest.mark.parametrize("key", PLAIN + PATTERNS)
def test_a_key_matches_what_it_matches_in_peft(key: str) -> None:
    for name in NAMES:
        expected = {key: True}.get(get_pattern_key([key], name), False)
        assert found(key, name) is expected, name


@pytest.mark.parametrize("key", [one for one in PATTERNS if one != "a)|(model.*"])
def test_a_pattern_of_modules_matches_what_it_matches_in_peft(key: str) -> None:
    for name in NAMES:
        expected = match_target_against_key(key, name) is not None
        assert is_whole(key, name) is expected, name


def test_the_first_key_that_matches_counts() -> None:
    keys = {
        r"\d.*": 0,
        "b": 1,
        ".*b": 2,
        "a.b": 3,
        "^a.b": 4,
        ".": 5,
        "x": 6,
        "c": 7,
        "[c]": 8,
    }
    for some in (keys, dict(reversed(keys.items()))):
        for name in ("b", "a.b", "aXb", "1", "x.a.b", "q", "c", "z.c", "9.c", "cc"):
            expected = some.get(get_pattern_key(list(some), name), -1)
            assert PatternTable(some).of(name, -1) == expected


def test_a_name_that_its_own_pattern_misses_is_found_by_its_text() -> None:
    assert get_pattern_key(["experts[0]"], "experts[0]") == "experts[0]"
    assert PatternTable({"experts[0]": 4}).of("experts[0]", 8) == 4


atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "0", "^", "$", r"\b", r"\w", "()"]
)
patterns = st.recursive(
    atoms,
    lambda some: st.one_of(
        st.tuples(some, some).map("".join),
        st.tuples(some, some).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(some, st.sampled_from(["*", "+", "?", "*?", "{1,2}", "{2}", "{0,}"])).map(
            "({0[0]}){0[1]}".format
        ),
        some.map("(?={0})".format),
        some.map("(?!{0})".format),
    ),
    max_leaves=8,
)


@given(
    st.lists(st.one_of(patterns, st.sampled_from(["a", "a.b", r"^a\.0", "b$"])), max_size=4),
    st.lists(st.text("ab.0", max_size=8), min_size=1, max_size=4),
)
def test_any_table_says_what_peft_says(keys: list[str], names: list[str]) -> None:
    values = {key: index for index, key in enumerate(keys)}
    table = PatternTable(values)
    for name in names:
        assert table.of(name, -1) == values.get(get_pattern_key(keys, name), -1)
        for key in keys:
            expected = match_target_against_key(key, name) is not None
            assert is_whole(key, name) is expected


@given(st.text(string.printable, max_size=12).filter(lambda t: "\n" not in t))
def test_escaped_text_is_a_plain_name(text: str) -> None:
    for key in (re.escape(text), f"^{re.escape(text)}"):
        for name in (text, f"x.{text}", f"x{text}", text[1:]):
            assert found(key, name) is (get_pattern_key([key], name) == key)


@pytest.mark.parametrize("key", ["(a|aa)+$b", "(?=(a|aa)+b)", "(a|a)" * 60 + "b"])
def test_a_pattern_that_takes_for_ever_is_refused_and_holds_up_nobody(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_patterns, "MATCH_SECONDS", 0.2)
    table, ends = PatternTable({"fine": 1, key: 2}), threading.Event()
    counted = 0

    def count() -> None:
        nonlocal counted
        while not ends.is_set():
            counted += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        with pytest.raises(ValueError, match=r"takes too long .* plain names") as caught:
            table.of("a" * 512, 0)
    finally:
        ends.set()
        other.join()
    assert repr(key[:30])[:-1] in str(caught.value)
    assert counted > 1000
    with pytest.raises(ValueError, match="takes too long"):
        table.of("a" * 511, 0)


def test_comparisons_that_are_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "SECONDS", 0.01)
    table = PatternTable({f".*{index}.*": index for index in range(10_000, 20_000)})
    with pytest.raises(ValueError, match=r"^'\.\*1\d+\.\*' takes too long"):
        [table.of(f"{index}" * 50, -1) for index in range(1000)]


@pytest.mark.parametrize("key", ["(", "a{99999999999999}", "(" * 5000 + ")" * 5000, r"(?<=a*)b"])
def test_what_is_no_pattern_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"is no pattern .*; correct it") as caught:
        PatternTable({"fine": 1, key: 2})
    assert repr(key[:30])[:-1] in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_mixture_with_a_rank_for_each_expert_is_looked_up() -> None:
    """20 thousand keys: one after the other that would be 200 million comparisons."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(100) for j in range(200)]
    table = PatternTable({f"^{re.escape(name)}": index for index, name in enumerate(names)})
    assert [table.of(name, -1) for name in names] == list(range(len(names)))
