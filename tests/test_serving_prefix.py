"""The prefix cache: what prompts have in common is computed once, for one content of weights."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_kit import dense, greedy, load_variant, make_family

from soupkit.serving.engine import PAGE_TOKENS, Engine
from soupkit.serving.jobs import End, Job
from soupkit.serving.memory import KVPlan
from soupkit.serving.patches import BASE_SLOT
from soupkit.serving.pretrained import load_model
from soupkit.serving.sampling import Sampling, Token

NAMES = ("linear", "matrix", "rich")
COUNT = 8
Box = queue.Queue[Token | End]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("prefix"), names=NAMES)


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    model = load_model(root / "base", device="cpu", dtype=torch.float32)
    engine = Engine(model, max_running=16, plan=KVPlan(kv_tokens=2048, batch_tokens=64))
    for slot, name in enumerate(NAMES):
        engine.load(slot, load_variant(root, name))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracles(root: Path) -> dict[str, Any]:
    return {name: dense(root, None if name == "base" else name) for name in ("base", *NAMES)}


def ask(engine: Engine, tokens: list[int], slot: int, **sampling: Any) -> Box:
    box: Box = queue.Queue()
    settings = Sampling(**({"temperature": 0.0} | sampling))
    engine.submit(Job(tuple(tokens), COUNT, frozenset(), settings), slot, box.put)
    return box


def ids_of(box: Box) -> list[int]:
    found = []
    while not isinstance(event := box.get(timeout=60), End):
        found.append(event.id)
    assert event.reason == "length", event
    return found


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 260, (count,), generator=generator).tolist()


def twenty(seed: int) -> list[tuple[str, list[int]]]:
    """Five prompts that begin alike, each for the base and every variant, variants in turn."""
    common = random_tokens(3 * PAGE_TOKENS, seed)
    prompts = [common + random_tokens(1 + 3 * i, seed + i + 1) for i in range(5)]
    return [(name, prompt) for prompt in prompts for name in ("base", *NAMES)]


def wrong_of(engine: Engine, oracles: dict[str, Any], *, at_once: bool) -> int:
    slots = {"base": BASE_SLOT} | {name: slot for slot, name in enumerate(NAMES)}
    asked, boxes, answers = twenty(seed=1), [], []
    for name, prompt in asked:
        boxes.append(ask(engine, prompt, slots[name]))
        if not at_once:
            answers.append(ids_of(boxes[-1]))
    if at_once:
        answers = [ids_of(box) for box in boxes]
    expected = [greedy(oracles[name], prompt, COUNT, stop=None) for name, prompt in asked]
    return sum(found != right for found, right in zip(answers, expected, strict=True))


# R1, SV04, SV06: blocks of a prompt that served another adapter, or the base.
@pytest.mark.parametrize("at_once", [True, False])
def test_no_variant_reads_what_another_computed(
    engine: Engine, oracles: dict[str, Any], at_once: bool
) -> None:
    assert wrong_of(engine, oracles, at_once=at_once) == 0
    # All but the first of each model found the three blocks.
    assert engine.prefixes.reused_tokens == 4 * len(oracles) * 3 * PAGE_TOKENS


def test_without_the_salt_it_would(
    engine: Engine, oracles: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.prefixes, "_salt_of", lambda _: b"")
    assert wrong_of(engine, oracles, at_once=False) >= 5


# SV04, SV26: what came back under an old name or place.
def test_a_variant_that_takes_the_place_of_another_starts_anew(
    root: Path, engine: Engine, oracles: dict[str, Any]
) -> None:
    """Same slot, other content; and the first one again finds its own."""
    prompt = random_tokens(50, 7)
    for name in ("linear", "matrix", "linear"):
        before = engine.prefixes.reused_tokens
        engine.free(0)
        engine.load(0, load_variant(root, name))
        assert ids_of(ask(engine, prompt, 0)) == greedy(oracles[name], prompt, COUNT, stop=None)
        reused = engine.prefixes.reused_tokens - before
    assert reused == 3 * PAGE_TOKENS


def test_choices_of_one_prompt_share_it_and_stay_their_own(engine: Engine) -> None:
    prompt = random_tokens(100, 3)
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    boxes = [ask(engine, prompt, 1, choice=i, **settings) for i in range(6)]
    together = [ids_of(box) for box in boxes]
    assert engine.prefixes.reused_tokens == 5 * 96
    assert len({tuple(ids) for ids in together}) == 6
    alone = [ids_of(ask(engine, prompt, 1, choice=i, **settings)) for i in range(6)]
    assert alone == together


def test_what_overflowed_is_not_shared(root: Path, engine: Engine, oracles: dict[str, Any]) -> None:
    """Its keys and values lie in the cache as zeros: a second request must not read them."""
    good = load_variant(root, "linear")
    prompt = random_tokens(60, 9)
    norm = "model.layers.0.input_layernorm.weight"
    bad = replace(good, deltas={}, raw={norm: torch.full((40,), float("inf"))}, digest="sha256:bad")
    engine.load(5, bad)
    for _ in range(2):
        boxes = [ask(engine, prompt, 5) for _ in range(3)]
        for box in boxes:
            event = box.get(timeout=60)
            assert isinstance(event, End)
            assert event.reason == "error"
            assert "overflowed" in str(event.error)
    assert engine.prefixes.reused_tokens == 0
    assert ids_of(ask(engine, prompt, 0)) == greedy(oracles["linear"], prompt, COUNT, stop=None)


def test_a_full_cache_gives_up_what_nobody_uses(root: Path, oracles: dict[str, Any]) -> None:
    """Many prompts through a small cache: blocks kept for later go before anyone waits."""
    model = load_model(root / "base", device="cpu", dtype=torch.float32)
    engine = Engine(model, max_running=4, plan=KVPlan(kv_tokens=192, batch_tokens=64))
    engine.load(0, load_variant(root, "linear"))
    engine.start()
    try:
        asked = [random_tokens(90, seed) for seed in (1, 2, 3, 1, 2, 3)]
        boxes = [ask(engine, prompt, 0) for prompt in asked]
        expected = [greedy(oracles["linear"], prompt, COUNT, stop=None) for prompt in asked]
        assert [ids_of(box) for box in boxes] == expected
        assert engine.alive
    finally:
        engine.close()
