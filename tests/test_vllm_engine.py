"""Variants on vLLM's engine: each one's tokens are those of its dense effective weights.

The oracle is transformers on float32 weights W_base + delta, decoded by numpy (delta_kit).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from serving_kit import add_to_family, dense, greedy, make_base, make_family, make_finetune
from vllm_kit import HEAD_DIM, NEEDS_VLLM, ask, bank_of, offline_engine, prompts

from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import ServingError
from soupkit.export import export_variant
from soupkit.serving.vllm.store import Store

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

ENCODINGS = (
    "row",
    "matrix",
    "column",
    "rank1",
    "row-x4",
    "rank1-x2",
    "column-x3-refit",
    "sparse",
    "lowrank-3",
    "lowrank-5+row",
    "column-x2-refit+lowrank-4",
    "raw",
)
# Each tensor its own: q, k and v are one module of vLLM's.
MIX = {
    "model.embed_tokens.weight": "lowrank-2+column",
    "model.layers.0.self_attn.k_proj.weight": "raw",
    "model.layers.0.self_attn.q_proj.weight": "rank1-x2",
    "model.layers.0.mlp.gate_proj.weight": "raw",
    "model.layers.1.mlp.down_proj.weight": "sparse",
}
SLOTS = 4


class Served(NamedTuple):
    """An engine, and where its family lies."""

    engine: Any
    root: Path
    store: Store

    def request(self, name: str | None, number: int) -> Any:
        from vllm.lora.request import LoRARequest

        if name is None:
            return None
        ref = self.store.refresh().variants[name]
        return LoRARequest(name, number, str(self.store.copy(ref)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tied Llama, and a variant of everything in each encoding; fewer slots than variants."""
    root = tmp_path_factory.mktemp("llama")
    make_base(root / "base", head_dim=HEAD_DIM)
    for seed, encoding in enumerate(ENCODINGS, start=1):
        name = encoding.replace("+", "-and-")
        add_to_family(root, name, lambda _: True, encoding=encoding, seed=seed)
    finetune = make_finetune(root / "base", root / "mixed", lambda _: True, seed=99)
    export_variant(
        open_checkpoint(root / "base"), open_checkpoint(finetune), family=root / "family",
        name="mixed", encoding="row", encodings=MIX, companions=finetune,
    )  # fmt: skip
    store = Store(root / "family")
    with offline_engine(root, slots=SLOTS) as engine:
        yield Served(engine, root, store)
    store.close()


NUMBERS: dict[str | None, int] = {}


def number_of(name: str | None) -> int:
    """Of a name's first content; vLLM wants one for each."""
    return NUMBERS.setdefault(name, len(NUMBERS) + 1)


def check_tokens(served: Served, names: list[str | None], count: int = 10) -> None:
    """All names' requests in one batch, each answering as its dense model."""
    requests = {name: served.request(name, number_of(name)) for name in names}
    jobs = [(name, ids) for ids in prompts(3) for name in names]
    outputs = ask(served.engine, [(requests[name], ids) for name, ids in jobs], count)
    found: dict[Any, list[list[int]]] = {}
    expected: dict[Any, list[list[int]]] = {}
    for name in names:
        model = dense(served.root, name)
        for job, output in zip(jobs, outputs, strict=True):
            if job[0] == name:
                found.setdefault(name, []).append(list(output.outputs[0].token_ids))
                expected.setdefault(name, []).append(greedy(model, job[1], count, stop=None))
    assert found == expected


def test_every_encoding_and_the_base_mixed_in_batches_answer_as_their_dense_models(
    served: Served,
) -> None:
    names: list[str | None] = [None, *served.store.family.variants]
    assert len(names) > SLOTS + 1
    check_tokens(served, names)
    # Slots were taken from some and given to others.
    bank = bank_of(served.engine)
    assert len(bank.resident) == SLOTS
    assert len(bank.numbers) == len(names) - 1


def test_logprobs_of_prompts_are_the_variants_own_also_where_heads_differ(served: Served) -> None:
    names = [None, "row", "rank1"]
    # Two tokens and one request would be as many rows as two requests have.
    ids = prompts(2)[1]
    jobs = [(name, tokens) for name in names for tokens in (ids, ids[:2], ids[:3])]
    requests = {name: served.request(name, 70 + at) for at, name in enumerate(names)}
    outputs = ask(
        served.engine, [(requests[name], tokens) for name, tokens in jobs], 2, prompt_logprobs=0
    )
    for (name, tokens), output in zip(jobs, outputs, strict=True):
        logits = dense(served.root, name)(torch.tensor([tokens])).logits[0]
        table = torch.log_softmax(logits.float(), dim=-1)
        for at in range(1, len(tokens)):
            found = output.prompt_logprobs[at][tokens[at]].logprob
            assert found == pytest.approx(table[at - 1, tokens[at]].item(), abs=2e-4)


def test_logprobs_and_several_answers_are_the_variants_own_in_a_mixed_batch(
    served: Served,
) -> None:
    """The most likely token is drawn, so several answers are one; prompts come in pieces."""
    names = [None, "row", "matrix", "raw", "mixed"]
    requests = {name: served.request(name, number_of(name)) for name in names}
    jobs = [(name, ids) for ids in prompts(2) for name in names]
    outputs = ask(
        served.engine, [(requests[name], ids) for name, ids in jobs], 6,
        n=2, logprobs=1, temperature=1.0, top_k=1,
    )  # fmt: skip
    for (name, ids), output in zip(jobs, outputs, strict=True):
        expected = greedy(dense(served.root, name), ids, 6, stop=None)
        assert [list(answer.token_ids) for answer in output.outputs] == [expected] * 2
        logits = dense(served.root, name)(torch.tensor([ids + expected])).logits[0]
        table = torch.log_softmax(logits.float(), dim=-1)
        for answer in output.outputs:
            for at, found in enumerate(answer.logprobs):
                wanted = table[len(ids) - 1 + at, expected[at]].item()
                assert found[expected[at]].logprob == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_numbers_that_overflow_spoil_their_own_answers_only(
    served: Served, sampling: dict[str, Any]
) -> None:
    """Each number of the bundle is finite, what becomes of them in a forward is not."""
    if "huge" not in served.store.family.variants:
        folder = served.root / "huge"
        make_finetune(served.root / "base", folder, lambda n: "_proj" in n, seed=5, size=1e37)
        export_variant(
            open_checkpoint(served.root / "base"), open_checkpoint(folder),
            family=served.root / "family", name="huge", encoding="row", companions=folder,
        )  # fmt: skip
    huge, other = served.request("huge", 96), served.request("row", number_of("row"))
    jobs = [(request, ids) for ids in prompts(2) for request in (None, huge, other)]
    named = sampling | {"logprobs": 1, "prompt_logprobs": 1}
    for (request, ids), output in zip(jobs, ask(served.engine, jobs, 5, **named), strict=True):
        found = list(output.outputs[0].token_ids)
        assert len(found) == 5
        if request is not huge and not sampling:
            name = None if request is None else "row"
            assert found == greedy(dense(served.root, name), ids, 5, stop=None)
    check_tokens(served, [None, "row"])


def test_a_name_that_has_another_content_gets_other_blocks(served: Served) -> None:
    """SV04, R1: the prefix cache is keyed by content."""
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    class Request(NamedTuple):
        lora_request: Any

    add_to_family(served.root, "changing", lambda n: "_proj" in n, encoding="row", seed=201)
    before = served.request("changing", 81)
    check_tokens_of(served, before, "changing")
    first = _gen_lora_extra_hash_keys(Request(before))
    (served.root / "family/variants/changing").rename(served.root / "old")
    remove(served.root / "family", "changing")
    add_to_family(served.root, "changing", lambda n: "_proj" in n, encoding="row", seed=202)
    after = served.request("changing", 82)
    assert _gen_lora_extra_hash_keys(Request(after)) != first
    # The same prompt, whose blocks are cached for the other content.
    check_tokens_of(served, after, "changing")


def check_tokens_of(served: Served, request: Any, name: str) -> None:
    ids = prompts(1)[0]
    (output,) = ask(served.engine, [(request, ids)], 10)
    assert list(output.outputs[0].token_ids) == greedy(dense(served.root, name), ids, 10, stop=None)


def remove(family: Path, name: str) -> None:
    document = json.loads((family / "family.json").read_text())
    del document["variants"][name]
    (family / "family.json").write_text(json.dumps(document))


def test_what_is_no_checked_copy_is_refused_and_the_engine_goes_on(served: Served) -> None:
    """E11: an adapter that cannot be read stopped the engine."""
    from vllm.lora.request import LoRARequest

    folder = served.store.family.folder("row")
    ids = prompts(1)[0]
    for path in (folder, served.root / "absent"):
        with pytest.raises(ServingError, match="no checked copy"):
            ask(served.engine, [(LoRARequest("x", 90, str(path)), ids)], 4)
    # A number that is another content's.
    with pytest.raises(ServingError, match="give each content a number of its own"):
        ask(served.engine, [(served.request("matrix", number_of("row")), ids)], 4)
    check_tokens(served, [None, "row"])


def test_what_was_removed_leaves_no_memory_and_nothing_of_it_in_its_slot(served: Served) -> None:
    """SV02, R10."""
    bank, core = bank_of(served.engine), served.engine.llm_engine
    check_tokens(served, ["raw", "mixed"])
    numbers = [number for number in bank.numbers if number < 60]
    slots = dict(bank.resident)
    for number in numbers:
        assert core.remove_lora(number)
    assert not bank.numbers & set(numbers)
    assert not set(bank.resident) & set(numbers)
    for slot in (slots[number] for number in numbers if number in slots):
        if slot in bank.resident.values():
            continue
        for site in bank._all_sites():
            assert slot not in site._held
            for arena in getattr(site, "arenas", {}).values():
                assert arena.is_empty(slot)
                size = arena.slot_bytes
                assert not arena.data[slot * size : (slot + 1) * size].any()
    check_tokens(served, [None, "row"])


def test_a_variant_in_use_is_not_removed(served: Served) -> None:
    """SV22, R3."""
    from vllm import SamplingParams

    engine, ids = served.engine.llm_engine, prompts(1)[0]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    request = served.request("matrix", 91)
    engine.add_request("open", {"prompt_token_ids": ids}, params, lora_request=request)
    with pytest.raises(ServingError, match="has 1 requests"):
        engine.remove_lora(91)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    assert tokens == greedy(dense(served.root, "matrix"), ids, 3, stop=None)
    assert engine.remove_lora(91)


def test_the_base_is_not_replaced_under_its_variants(served: Served) -> None:
    """vLLM forgets its adapters then: the next step with one of them stopped the engine."""
    check_tokens(served, [None, "row"])
    with pytest.raises(ServingError, match="restart the server"):
        served.engine.collective_rpc("reload_weights")
    check_tokens(served, [None, "row"])


def test_a_tensor_without_a_place_is_refused_by_name(served: Served) -> None:
    """Another vocabulary; the others are served."""
    bank = bank_of(served.engine)
    variant = open_variant(served.store.copy(served.store.family.variants["raw"])).mapped()
    wide = {"lm_head.weight": torch.zeros(7, 40)}
    with pytest.raises(ServingError, match=r"lm_head\.weight.*another vocabulary"):
        bank.register(95, "wide", replace(variant, deltas={}, raw=wide))
    strange = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(40)}
    with pytest.raises(ServingError, match=r"o_proj\.bias.*no bias"):
        bank.register(95, "biased", replace(variant, deltas={}, raw=strange))
    absent = {"model.vision.weight": torch.zeros(3, 3)}
    with pytest.raises(ServingError, match=r"model\.vision\.weight.*no such parameter"):
        bank.register(95, "absent", replace(variant, deltas={}, raw=absent))
    assert 95 not in bank.numbers
    check_tokens(served, [None, "row"])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_biases_head_norms_and_an_untied_head_act(kind: str, tmp_path: Path) -> None:
    # Qwen2 has biases in q, k and v; Qwen3 norms heads; vLLM's Qwen3 has no biases at all.
    changes: dict[str, Any] = {"head_dim": HEAD_DIM, "attention_bias": False}
    if kind == "qwen2":
        changes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        changes["head_dim"] = HEAD_DIM
    make_family(tmp_path, kind=kind, tied=False, **changes)
    store = Store(tmp_path / "family")
    NUMBERS.clear()
    with offline_engine(tmp_path, slots=3) as engine:
        check_tokens(Served(engine, tmp_path, store), [None, *store.family.variants])
    store.close()


def test_two_ranks_that_share_the_model_answer_as_one(tmp_path: Path) -> None:
    """Each holds its rows or columns of a variant (26 of 52 columns begin inside a byte), and both
    a copy of the one key/value head.
    """
    make_family(tmp_path, head_dim=HEAD_DIM, num_key_value_heads=1)
    store = Store(tmp_path / "family")
    NUMBERS.clear()
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with offline_engine(tmp_path, slots=3, **settings) as engine:
        check_tokens(Served(engine, tmp_path, store), [None, *store.family.variants])
    store.close()
