"""The engine: mixed batches equal dense models token for token, and nothing one job does harms
another.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_kit import CONTEXT, VARIANTS, dense, greedy, load_variant, make_family
from torch.utils._python_dispatch import TorchDispatchMode

from soupkit.errors import ServingError
from soupkit.serving.engine import Engine
from soupkit.serving.guard import KeyValueGuard
from soupkit.serving.jobs import Deliver, End, Job
from soupkit.serving.memory import KVPlan, plan_kv
from soupkit.serving.patches import BASE_SLOT
from soupkit.serving.pretrained import load_model, load_text_setup
from soupkit.serving.sampling import Sampling, Token

WAIT = 60
GREEDY = Sampling(temperature=0.0)
STOP = frozenset({1})


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(
        tmp_path_factory.mktemp(request.param), kind=request.param, tied=request.param == "llama"
    )


def start(root: Path, plan: KVPlan, *, max_running: int = 20) -> tuple[Engine, dict[str, int]]:
    model = load_model(root / "base", device="cpu", dtype=torch.float32)
    engine = Engine(model, max_running=max_running, plan=plan)
    engine.start()
    slots = {"base": BASE_SLOT}
    for slot, name in enumerate(VARIANTS):
        engine.load(slot, load_variant(root, name))
        slots[name] = slot
    return engine, slots


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[tuple[Engine, dict[str, int]]]:
    # Batches of 24 tokens: longer prompts are prefilled in pieces beside others that decode.
    engine, slots = start(root, KVPlan(kv_tokens=4096, batch_tokens=24))
    yield engine, slots
    engine.close()


class Inbox:
    """Collects the events of one job."""

    def __init__(self) -> None:
        self.events: queue.Queue[Token | End] = queue.Queue()

    def __call__(self, event: Token | End) -> None:
        self.events.put(event)

    def all(self) -> tuple[list[Token], End]:
        tokens: list[Token] = []
        while True:
            event = self.events.get(timeout=WAIT)
            if isinstance(event, End):
                assert self.events.empty(), "an event after the end"
                return tokens, event
            tokens.append(event)

    def ids(self) -> list[int]:
        return [token.id for token in self.all()[0]]


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 70, (count,), generator=generator).tolist()
    return [torch.randint(5, 260, (n,), generator=generator).tolist() for n in lengths]


def submit(
    engine: Engine, tokens: list[int], slot: int, *, deliver: Deliver, **changes: Any
) -> str:
    settings: Any = {"max_tokens": 24, "stop_tokens": STOP, "sampling": GREEDY} | changes
    return engine.submit(Job(tuple(tokens), **settings), slot, deliver)


def test_a_mixed_batch_equals_dense_models_token_for_token(
    root: Path, served: tuple[Engine, dict[str, int]]
) -> None:
    engine, slots = served
    names = list(slots)
    # Pairs of prompts are the same for different variants: what one cached must not serve another.
    asked = [
        (names[i % len(names)], prompt, 5 + 2 * i)
        for i, prompt in enumerate(prompts(10) + prompts(10))
    ]
    asked = [
        (names[(i + i // 10) % len(names)], prompt, count)
        for i, (_, prompt, count) in enumerate(asked)
    ]
    boxes = []
    for name, prompt, count in asked:
        boxes.append(Inbox())
        submit(engine, prompt, slots[name], max_tokens=count, deliver=boxes[-1])
    answers = [box.ids() for box in boxes]
    oracles = {name: dense(root, None if name == "base" else name) for name in names}
    expected = [greedy(oracles[name], prompt, count) for name, prompt, count in asked]
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) == len(answers), "variants must differ"
    assert sum(map(len, answers)) > 100


# SV38: bugs of continuous batching's own state.
def test_a_full_key_value_cache_changes_no_answer(root: Path) -> None:
    """Sequences that no longer fit are put back and computed again."""
    engine, slots = start(root, KVPlan(kv_tokens=CONTEXT, batch_tokens=32), max_running=6)
    try:
        asked = [
            (name, prompt) for name, prompt in zip(slots, prompts(len(slots), seed=5), strict=True)
        ]
        boxes = []
        for name, prompt in asked:
            boxes.append(Inbox())
            submit(
                engine,
                prompt,
                slots[name],
                max_tokens=90,
                stop_tokens=frozenset(),
                deliver=boxes[-1],
            )
        for (name, prompt), box in zip(asked, boxes, strict=True):
            model = dense(root, None if name == "base" else name)
            assert box.ids() == greedy(model, prompt, 90, stop=None)
        assert engine.alive
    finally:
        engine.close()


def test_stop_token_and_length_end_a_job(served: tuple[Engine, dict[str, int]]) -> None:
    engine, slots = served
    box = Inbox()
    submit(engine, [9, 8, 7], slots["norms"], max_tokens=6, stop_tokens=frozenset(), deliver=box)
    tokens, end = box.all()
    assert (len(tokens), end.reason) == (6, "length")
    again = Inbox()
    third = tokens[2].id
    submit(
        engine,
        [9, 8, 7],
        slots["norms"],
        max_tokens=6,
        stop_tokens=frozenset({third}),
        deliver=again,
    )
    first = [token.id for token in tokens].index(third)
    assert again.ids() == [token.id for token in tokens[:first]]


# R3, R4, SV35, SV38: a slot that is taken while it is used; a cancel that nobody is told of.
def test_a_cancelled_job_ends_once_and_its_slot_can_be_freed(root: Path) -> None:
    engine, slots = start(root, KVPlan(kv_tokens=1024, batch_tokens=32))
    try:
        begun = threading.Event()
        box = Inbox()

        def deliver(event: Token | End) -> None:
            begun.set()
            box(event)

        slot = slots["embed"]
        long: Any = {"max_tokens": CONTEXT - 2, "stop_tokens": frozenset()}
        key = submit(engine, [5, 6], slot, deliver=deliver, **long)
        assert begun.wait(WAIT)
        with pytest.raises(ServingError, match=f"slot {slot} is used by 1 jobs"):
            engine.free(slot)
        other = Inbox()
        submit(engine, [5, 6], slots["linear"], deliver=other)
        engine.cancel(key)
        tokens, end = box.all()
        assert end.reason == "cancelled"
        assert len(tokens) < CONTEXT - 2
        engine.free(slot)
        with pytest.raises(ValueError, match="holds no variant"):
            submit(engine, [5, 6], slot, deliver=Inbox(), **long)
        assert other.ids() == greedy(dense(root, "linear"), [5, 6], 24)
        # At once after submission, too: the cancel may overtake the request inside the manager.
        for _ in range(20):
            box = Inbox()
            engine.cancel(submit(engine, [5], BASE_SLOT, max_tokens=150, deliver=box))
            assert box.all()[1].reason == "cancelled"
        assert engine.num_open == 0
    finally:
        engine.close()


# R2, SV10, SV21: wrong answers after a load while others are served, or none until it is done.
def test_slots_change_while_others_generate(
    root: Path, served: tuple[Engine, dict[str, int]]
) -> None:
    engine, slots = served
    prompt = [40, 41, 42]
    expected = greedy(dense(root, None), prompt, 120, stop=None)
    box = Inbox()
    submit(engine, prompt, BASE_SLOT, max_tokens=120, stop_tokens=frozenset(), deliver=box)
    for _ in range(3):
        engine.load(9, load_variant(root, "matrix"))
        inner = Inbox()
        submit(engine, prompt, 9, deliver=inner)
        assert inner.ids() == greedy(dense(root, "matrix"), prompt, 24)
        engine.free(9)
    assert box.ids() == expected
    assert slots["matrix"] in engine._bank.slots


def test_bad_jobs_are_refused_before_they_reach_the_engine_thread(
    served: tuple[Engine, dict[str, int]],
) -> None:
    engine, _ = served
    for (tokens, slot, count), message in [
        (([], BASE_SLOT, 1), "empty"),
        (([5, 100_000], BASE_SLOT, 1), "100000 is outside the vocabulary of 261"),
        (([5], BASE_SLOT, CONTEXT), f"at most {CONTEXT}"),
        (([5], 77, 1), "slot 77 holds no variant"),
    ]:
        with pytest.raises(ValueError, match=message):
            submit(engine, tokens, slot, max_tokens=count, deliver=Inbox())
    box = Inbox()
    submit(engine, [5], BASE_SLOT, max_tokens=3, deliver=box)
    assert box.all()[1].reason in ("stop", "length")


def test_log_probabilities_are_the_models(
    root: Path, served: tuple[Engine, dict[str, int]]
) -> None:
    engine, slots = served
    prompt = [30, 31, 32, 33, 34, 35]
    box = Inbox()
    sampling = Sampling(temperature=0.0, logprobs=4)
    submit(engine, prompt, slots["norms"], max_tokens=5, sampling=sampling, deliver=box)
    generated, _ = box.all()
    scored = engine.score(tuple(prompt), slots["norms"], num_top=4)
    ids = prompt + [token.id for token in generated]
    with torch.no_grad():
        logits = dense(root, "norms")(input_ids=torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)
    assert scored[0] == Token(prompt[0])
    for at, token in enumerate([*scored, *generated][1:]):
        assert token.id == ids[at + 1]
        assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=1e-4)
        values, order = expected[at].topk(4)
        assert [i for i, _ in token.top] == order.tolist()
        assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_text_in_any_company(served: tuple[Engine, dict[str, int]]) -> None:
    engine, slots = served
    seeded = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=11)

    def run(company: int) -> list[int]:
        boxes = [Inbox() for _ in range(company + 1)]
        for number, box in enumerate(boxes[1:]):
            other = Sampling(temperature=1.3, seed=number)
            submit(engine, [50 + number], slots["linear"], sampling=other, deliver=box)
        submit(engine, [60, 61], slots["embed"], sampling=seeded, deliver=boxes[0])
        answers = [box.ids() for box in boxes]
        return answers[0]

    assert run(0) == run(7) == run(3)


# SV11: a bad adapter took the server with it at generation time.
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_variant_that_overflows_fails_alone(root: Path, value: float) -> None:
    """A mask cannot undo NaN: without the guard the sequences beside it would be spoiled."""
    engine, slots = start(root, KVPlan(kv_tokens=1024, batch_tokens=32))
    try:
        prompt = [5, 6, 7]
        bad = load_variant(root, "norms")
        norms = {name: torch.full_like(raw, value) for name, raw in bad.raw.items()}
        engine.load(8, replace(bad, deltas={}, raw=norms, digest="sha256:bad"))
        names = [*slots, *slots]
        boxes = [Inbox() for _ in names]
        spoiled = [Inbox() for _ in names]
        # Some are under way when the bad ones come, some come after them.
        for name, box, broken in zip(names, boxes, spoiled, strict=True):
            submit(engine, prompt, slots[name], deliver=box)
            submit(engine, prompt * 4, 8, deliver=broken)
        for broken in spoiled:
            tokens, end = broken.all()
            assert (tokens, end.reason) == ([], "error")
            assert "overflowed" in str(end.error)
        with pytest.raises(ServingError, match="overflowed"):
            engine.score(tuple(prompt), 8, num_top=1)
        for name, box in zip(names, boxes, strict=True):
            assert box.ids() == greedy(dense(root, None if name == "base" else name), prompt, 24)
        assert engine.alive
        assert engine.num_open == 0
    finally:
        engine.close()


def test_if_the_thread_dies_every_open_job_is_told_and_new_ones_are_refused(root: Path) -> None:
    engine, slots = start(root, KVPlan(kv_tokens=1024, batch_tokens=32))
    try:
        box = Inbox()
        submit(engine, [5], slots["linear"], max_tokens=150, stop_tokens=frozenset(), deliver=box)
        engine._bank.set_batch = None  # type: ignore[assignment,method-assign]  # a fault in the loop
        assert box.all()[1].reason == "error"
        engine._manager._generation_thread.join(WAIT)
        assert not engine.alive
        with pytest.raises(ServingError, match="stopped"):
            submit(engine, [5], slots["linear"], deliver=Inbox())
    finally:
        engine.close()


def test_the_plan_fits_the_memory_and_one_full_context(root: Path) -> None:
    model = load_model(root / "base", device="cpu", dtype=torch.float32)
    plan = plan_kv(model, max_running=4, cache_bytes=1)
    assert plan.kv_tokens == 4 * CONTEXT
    with pytest.raises(ValueError, match="lower cache_bytes"):
        plan_kv(model, max_running=4, cache_bytes=1 << 60)


def test_text_setup_needs_a_tokenizer(root: Path, tmp_path: Path) -> None:
    setup = load_text_setup(root / "base")
    assert setup.stop_tokens == STOP
    (tmp_path / "config.json").write_text((root / "base" / "config.json").read_text())
    with pytest.raises(ServingError, match="no tokenizer files"):
        load_text_setup(tmp_path)


def test_the_guard_remembers_tokens_of_every_layer_until_the_next_batch() -> None:
    """`begin` runs on another stream than the forward, so it may put nothing on the device."""

    class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
        def __torch_dispatch__(self, func: Any, *_: Any, **__: Any) -> Any:
            raise AssertionError(func)

    cache = SimpleNamespace(update=lambda keys, values, *_, **__: (keys, values))
    guard = KeyValueGuard(cache)
    ranks: Any = SimpleNamespace(alone=True, any=lambda flags: flags)

    def broken_tokens() -> list[int]:
        return guard.broken_tokens(ranks, 3, torch.device("cpu"))

    fine = torch.ones(1, 2, 3, 4)
    for position, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        with Nothing():  # type: ignore[no-untyped-call]
            guard.begin()
        assert broken_tokens() == []
        broken = fine.clone()
        broken[0, 1, position, 2] = bad
        keys, values = cache.update(fine, broken, 0, {})
        for stored in (keys, values):
            assert [bool(stored[0, :, token].any()) for token in range(3)] == [
                token != position for token in range(3)
            ]
        cache.update(fine, fine, 1, {})
        broken = fine.clone()
        broken[0, 0, 0, 0] = bad
        cache.update(broken, fine, 2, {})
        assert broken_tokens() == sorted({0, position})
