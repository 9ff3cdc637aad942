"""Turns of a conversation come to the replica whose prefix cache has the last one."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from front_kit import stage
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_kit import TOKENIZER, add_to_family, make_base, metrics_of
from test_serving_front_routes import fronting, serve
from test_serving_replicas import VARIANTS, fleets, replica

from soupkit.serving.app import create_app
from soupkit.serving.asking import beginning_of, model_of, parsed
from soupkit.serving.engine import PAGE_TOKENS
from soupkit.serving.listening import Server
from soupkit.serving.replicas import PARTS, Replica, choose
from soupkit.serving.server import build_service
from soupkit.serving.states import Phase


def chat(*contents: str) -> dict[str, Any]:
    """A system's message, then those of user and assistant in turn."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    pairs = zip(roles, ("Be brief. " * 500, *contents), strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_turns_of_a_conversation_begin_alike_and_others_do_not() -> None:
    assert beginning_of(chat("hello")) == beginning_of(chat("hello", "hi", "and you?"))
    assert beginning_of(chat("hello")) != beginning_of(chat("hullo"))
    text = "once upon a time there was a house in which nobody had ever lived, "
    assert beginning_of({"prompt": text}) == beginning_of({"prompt": text + "until one day"})
    assert beginning_of({"prompt": text}) != beginning_of({"prompt": "twice" + text})
    ids = list(range(20))
    assert beginning_of({"prompt": ids}) == beginning_of({"prompt": [*ids, 7]})
    assert beginning_of({"prompt": [ids, [1]]}) == beginning_of({"prompt": ids})
    assert beginning_of({"prompt": [text]}) == beginning_of({"prompt": text})
    assert beginning_of({}) == b""


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(["model", "n", "prompt", "messages", "x"]), anything))
def test_any_body_has_a_beginning(fields: dict[str, Any]) -> None:
    found = parsed(json.dumps(fields).encode())
    assert isinstance(beginning_of(found), bytes)
    assert isinstance(model_of(found)[0], str)
    messages = {"messages": [{"role": "user", "content": "\ud800"}]}
    assert beginning_of(messages) == beginning_of(messages)


@settings(deadline=None, max_examples=150)
@given(fleets, st.sampled_from([None, *VARIANTS]), st.binary(max_size=2))
def test_never_at_the_price_of_balance(
    fleet: list[Replica], variant: str | None, beginning: bytes
) -> None:
    """The same as without, or one that holds the variant as well and is about as busy."""
    plain, found = choose(fleet, variant), choose(fleet, variant, beginning=beginning)
    assert (plain is None) == (found is None)
    if plain is None or found is None or plain == found:
        return
    one, other = fleet[plain], fleet[found]
    assert int(PARTS * one.load) == int(PARTS * other.load)
    assert one.is_busy == other.is_busy
    if variant is not None and one.holds(variant):
        assert other.holds(variant)
        assert one.loads(variant) == other.loads(variant)


def test_conversations_spread_and_come_back() -> None:
    there = replica(phases={"a": Phase.RESIDENT}, max_running=16)
    fleet = [there, replace(there, open=3, open_for={"a": 3}), replace(there, open=1)]
    first = {i: choose(fleet, "a", beginning=f"conversation {i}".encode()) for i in range(300)}
    assert min(Counter(first.values())[i] for i in range(3)) >= 70
    # A replica that is gone for a while moves its own conversations only.
    fewer = [fleet[0], replace(fleet[1], is_up=False), fleet[2]]
    for i, chosen in first.items():
        again = choose(fewer, "a", beginning=f"conversation {i}".encode())
        assert again == chosen or chosen == 1
    # One that has a quarter of a batch more gets none of them.
    busier = [replace(there, open=4), there, there]
    assert {choose(busier, "a", beginning=f"{i}".encode()) for i in range(50)} == {1, 2}


def test_a_front_sends_a_conversation_where_it_was() -> None:
    async def run() -> None:
        async with stage(3) as it:
            for fake in it.fakes:
                fake.phases["a"] = "resident"
            await it.sees()
            for i in range(12):
                turns = [f"conversation {i}, which is long enough to be told from all the others: "]
                turns += [f"{turns[0]} and then", f"{turns[0]} and then again"]
                asked = [(await it.ask("a", prompt=turn)).json()["from"] for turn in turns]
                assert len(set(asked)) == 1
            assert min(len(fake.asked) for fake in it.fakes) > 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_follow_up_turns_hit_the_prefix_cache_of_real_replicas(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    add_to_family(tmp_path, "v", lambda name: "_proj" in name, encoding="row", seed=1)
    talks = [f"talk {i}: " + "what is it that you would like to hear?" * 2 for i in range(18)]

    async def one(client: httpx.AsyncClient, url: str, number: int) -> int:
        """A turn of a conversation; how many tokens of its prompt came in whole blocks before."""
        body = {
            "model": "v" if number > 15 else "base", "prompt": talks[number], "max_tokens": 4,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = await client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        before = len(TOKENIZER(talks[number])["input_ids"])
        talks[number] += f" And {number}?"
        return before // PAGE_TOKENS * PAGE_TOKENS

    async def scene() -> None:
        started, urls = [], []
        for _ in range(2):
            service = build_service(tmp_path / "family", device="cpu", max_running=64)
            server = Server(create_app(service), service, host="127.0.0.1", port=0)
            serving, url = await serve(server)
            started.append((server, serving))
            urls.append(url)
        async with fronting(urls, []) as front, httpx.AsyncClient(timeout=60) as client:
            expected = 0
            for turn in range(4):
                whole = await asyncio.gather(*(one(client, front, i) for i in range(len(talks))))
                expected += sum(whole) if turn < 3 else 0
            told = [await asyncio.to_thread(metrics_of, url) for url in urls]
        for server, serving in started:
            server.should_exit = True
            await serving
        assert sum(one["soupkit_prompt_tokens_reused_total"] for one in told) >= expected
        # And both have had some of the conversations.
        served = [one["soupkit_requests_total,base"] for one in told]
        assert sum(served) == 64
        assert min(served) >= 16

    asyncio.run(asyncio.wait_for(scene(), 100))
