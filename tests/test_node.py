"""The plan of a node: the document's by hand, parts against what the kernel cuts and allocates."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from soupkit import headroom
from soupkit.cli import app
from soupkit.node import Layout, Wish, advised, layouts, plan_gpu, variant_bytes, variant_items
from soupkit.node_plan import NodePlan, plan_node
from soupkit.node_times import Speeds, times
from soupkit.placement import KNOWN, ModelShape, shape_for, shape_of
from soupkit.serving import memory
from soupkit_kernels import Delta
from soupkit_kernels.slots import Form, form_bytes

LLAMA_70B = shape_for(70e9)
GB = 10**9


def of(items: object) -> dict[str, int]:
    return {item.what: item.total for item in items}  # type: ignore[attr-defined]


def document_node(**settings: object) -> NodePlan:
    wish = Wish(14, **settings)  # type: ignore[arg-type]
    return plan_node(
        LLAMA_70B, wish, gpus=8, gpu_bytes=80 * GB, speeds=Speeds(), prompt=1024, parameters=70e9
    )


def test_the_documents_variant_by_hand() -> None:
    """Llama-3.1-70B: 80 layers, hidden 8192, inner 28672, 8 key-value heads of 128, 128256 words.

    Numbers of a layer: q, o 8192 x 8192 = 67,108,864 each; k, v 1024 x 8192 = 8,388,608 each;
    gate, up, down 28672 x 8192 = 234,881,024 each: 855,638,016, 80 times 68,451,041,280.
    Rows of a layer: 8192 + 1024 + 1024 + 8192 + 28672 + 28672 + 8192 = 83,968.
    """
    assert of(variant_items(LLAMA_70B, Layout(1, 1, 1), heads="sign", is_lane=False)) == {
        "bits of linears": 8_556_380_160,  # 68,451,041,280 / 8
        "scales of linears": 26_869_760,  # 4 x 80 x 83,968
        "bits of embedding, head": 262_668_288,  # 2 x 128,256 x 1024
        "scales of embedding, head": 1_026_048,  # 2 x 4 x 128,256
        "own norms": 2_637_824,  # 2 x (2 x 80 + 1) x 8192
    }
    assert variant_bytes(LLAMA_70B, heads="sign") == 8_849_582_080
    # The linears, and norms and 4 x 128,256 x 8192 bytes, or norms alone.
    assert variant_bytes(LLAMA_70B, heads="raw") == 8_583_249_920 + 2_637_824 + 4_202_692_608
    assert variant_bytes(LLAMA_70B, heads="same") == 8_583_249_920 + 2_637_824


def test_a_gpu_of_the_documents_node_by_hand() -> None:
    """TP 8: an eighth of every matrix; of o and down each rank has all 8192 scales."""
    found = document_node()
    best = found.best
    assert best is not None
    assert best.layout == Layout(1, 8, 1)
    assert best.fits
    items = of(best.items)
    assert items.pop("base linears") == 17_112_760_320  # 2 x 68,451,041,280 / 8
    assert items.pop("base embedding, head") == 525_336_576  # 2 x 2 x 16,032 x 8192
    assert items.pop("base norms") == 2_637_824
    # Rows of a rank: (8192 + 1024 + 1024 + 28672 + 28672) / 8 + 8192 + 8192 = 24,832.
    slot = {
        "bits of linears": 1_069_547_520,
        "scales of linears": 7_946_240,  # 4 x 80 x 24,832
        "bits of embedding, head": 32_833_536,  # 2 x 16,032 x 1024
        "scales of embedding, head": 128_256,  # 2 x 4 x 16,032
        "own norms": 2_637_824,
    }
    assert best.slot_bytes == sum(slot.values()) == 1_113_093_376
    assert {what: items.pop(what) for what in slot} == {w: 14 * n for w, n in slot.items()}
    assert items.pop("free slots") == 3 * 1_113_093_376  # a quarter more
    # 32 requests of 8192 tokens; one key-value head of 128 a rank: 2 x 80 x 1 x 128 x 2 bytes.
    assert items.pop("key-value cache") == 262_144 * 40_960
    # A row of masks for 2048 tokens, keys and values of 8 heads of 128, two bytes each, an index.
    assert items.pop("masks and expanded heads") == 262_144 * (2 * 2048 + 2 * 2 * 8 * 128 + 16)
    # 80e9 - 17,640,734,720 of the base - 17 x 1,113,093,376 = 43,436,677,888.
    assert items.pop("room to work in") == 43_436_677_888 - 34_749_342_310
    assert not items


def test_other_layouts_of_the_documents_node() -> None:
    by_layout = {str(plan.layout): plan for plan in document_node().plans}
    assert "141,107,412,992" in by_layout["8 x TP 1"].refusal
    # By hand, 4 GPUs: 34,225,520,640 + 1,050,673,152 + 2,637,824 of base; 44,721,168,384 left.
    # 16 requests of 8192 tokens at 81,920 + 12,304 bytes need 12,350,128,128, with a fifth to spare
    # 15,437,660,160. In 29,283,508,224 there is room for 13 slots, not for 14:
    # 2,139,095,040 + 4 x 80 x (16,896 + 16,384) + 65,667,072 + 256,512 + 2,637,824 bytes each.
    four = by_layout["2 x TP 4"]
    assert (four.slot_bytes, four.slots, four.kv_tokens) == (2_218_306_048, 13, 16 * 8192)
    assert not four.fits
    # A quarter of the requests leaves room for all 14, and two replicas are advised.
    few = document_node(requests=8).best
    assert few is not None
    assert str(few.layout) == "2 x TP 4"
    assert few.resident == 14


def test_what_the_plan_says_of_the_documents_figures() -> None:
    found = {claim.what: claim for claim in document_node().claims}
    delta, total = found["one delta"], found["base and variants"]
    assert (delta.said, delta.found) == ("8.75 GB", "8.85 GB")
    # 141,107,412,992 + 14 x 8,849,582,080 = 265,001,562,112, and 14 copies 1,975,503,781,888.
    assert (total.said, total.found) == ("262.50 GB", "265.00 GB")
    saved = found["saved against full copies"]
    assert (saved.said, saved.found) == ("86.6%", "86.6%")
    # 8,849,582,080 / 7e9 + 1,113,093,376 / 50e9 = 1.2642 + 0.0223 s; a fifth of a second: 44 GB/s.
    cold = found["cold start"]
    assert (cold.said, cold.found) == ("200 ms", "1286 ms")
    assert "44.25 GB/s" in cold.why
    assert found["embedding and head"].found == "4.20 GB"
    # (139,003,428,864 + 14 x 8,687,714,304) / 139,003,428,864
    assert found["bandwidth of the fused kernel"].found == "1.06x to 1.88x"
    off = {what for what, claim in found.items() if claim.is_off}
    assert off == {*found} - {"embedding and head", "saved against full copies"}
    raw = {claim.what: claim for claim in document_node(heads="raw").claims}
    assert raw["embedding and head"].is_off
    assert raw["one delta"].found == "12.79 GB"


def test_times_by_hand() -> None:
    found = document_node().times
    assert found is not None
    seconds = {figure.what: figure.seconds for figure in found.figures}
    # 2 x 68,451,041,280 x 1024 products over 8 x 989e12 a second.
    base = 140_187_732_541_440 / 7.912e15
    # Weights once: 4 x 68,451,041,280 + 8,556,380,160 + 131,334,144 bytes over 8 x 3.35e12.
    resident = base + 282_491_879_424 / 26.8e12
    host, disk = 1_113_093_376 / 50e9, 8_849_582_080 / 7e9
    expected = {
        "first token, base, 1024 tokens of prompt": base,
        "first token, variant resident": resident,
        "first token, variant in host memory": resident + host,
        "first token, variant on disk": resident + host + disk,
        "token, base": 139_003_428_864 / 26.8e12,
        "token, 14 variants in the batch": (139_003_428_864 + 14 * 8_687_714_304) / 26.8e12,
    }
    assert {what: seconds[what] for what in expected} == pytest.approx(expected)


@pytest.mark.parametrize("prompt", [1, 100, 300, 1000, 3000, 30000])
def test_a_variant_never_costs_more_than_either_way(prompt: int) -> None:
    plan = plan_gpu(LLAMA_70B, Layout(1, 8, 1), Wish(1), gpu_bytes=80 * GB)
    found = times(LLAMA_70B, plan, Speeds(), prompt=prompt)
    ratio = found.first_variant.seconds / found.first_base.seconds
    assert 1.0 < ratio <= 2.0
    assert found.token_one.seconds / found.token_base.seconds == pytest.approx(1 + 1 / 16, abs=1e-3)
    if prompt in (1, 100, 30000):
        assert ratio < 1.07


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_lane", [False, True])
def test_parts_are_what_the_kernel_cuts_and_allocates(ranks: int, is_lane: bool) -> None:
    """Delta.narrow cuts the shards, `form_bytes` says what a slot of the arena takes for them."""
    shape = ModelShape("odd", 256, 384, 1, 8, 4, 32, vocab=128 * ranks, is_tied=True)
    layout = Layout(1, ranks, 1)
    expected = 0
    for name, (rows, columns) in {
        **shape.linears(),
        "embed_tokens": (shape.vocab, shape.hidden),
    }.items():
        whole = Delta(
            rows, columns, torch.zeros(1, rows, columns // 8, dtype=torch.uint8),
            torch.ones(1, rows), None, None, None,
        )  # fmt: skip
        axis = 1 if name in ("o_proj", "down_proj") else 0
        part = whole.narrow(axis, 0, (rows, columns)[axis] // ranks)
        size = (part.out_features, part.in_features)
        expected += form_bytes(Form(1, 0, False), *size, dtype=torch.bfloat16, is_lane=is_lane)
        assert is_lane or expected >= part.nbytes
    items = of(variant_items(shape, layout, heads="sign", is_lane=is_lane))
    assert sum(items.values()) - items["own norms"] == expected


def test_heads_that_are_fewer_than_ranks_lie_on_several() -> None:
    shape = shape_for(8e9)  # 8 key-value heads
    plans = plan_node(
        shape, Wish(2), gpus=16, gpu_bytes=24 * GB, speeds=Speeds(), prompt=8, parameters=8e9
    )
    wide = next(p for p in plans.plans if p.layout == Layout(1, 16, 1))
    assert not wide.refusal
    kv = next(item for item in wide.items if item.what == "key-value cache")
    assert kv.nbytes == 2 * 32 * 1 * 128 * 2
    alone = NodePlan(shape, Wish(2), Speeds(), 8, plans.plans, wide, None, ())
    assert "each head on 2" in alone.needs


@pytest.mark.parametrize(
    ("shape", "layout", "told"),
    [
        (LLAMA_70B, Layout(1, 3, 1), "64 heads do not divide by TP 3"),
        (shape_for(3e9), Layout(1, 12, 1), "8 key-value heads and TP 12"),
        (shape_for(7e9), Layout(1, 16, 1), "11008 columns / TP 16 is no multiple of 32"),
        (LLAMA_70B, Layout(1, 1, 3), "80 layers do not divide by PP 3"),
    ],
)
def test_what_cannot_be_cut_is_refused(shape: ModelShape, layout: Layout, told: str) -> None:
    found = plan_gpu(shape, layout, Wish(1), gpu_bytes=800 * GB)
    assert told in found.refusal
    assert not found.fits


@given(
    st.sampled_from(KNOWN),
    st.sampled_from([1, 2, 4, 8, 12]),
    st.integers(1, 200) | st.integers(10**9, 2 * 10**11),
    st.integers(0, 60),
    st.integers(1, 500),
    st.sampled_from(["sign", "raw", "same"]),
)
def test_no_gpu_is_overfull_and_every_variant_is_somewhere(
    shape: ModelShape, gpus: int, gpu_bytes: int, variants: int, requests: int, heads: str
) -> None:
    wish = Wish(variants, heads, 4096, requests)  # type: ignore[arg-type]
    plans = [plan_gpu(shape, one, wish, gpu_bytes=gpu_bytes) for one in layouts(gpus)]
    for plan in plans:
        layout = plan.layout
        assert layout.replicas * layout.tensor * layout.pipeline == gpus
        if plan.refusal:
            continue
        assert plan.total <= gpu_bytes
        assert 0 <= plan.resident <= variants
        assert 0 <= plan.kv_tokens <= plan.kv_tokens_wanted
        bits = next((i for i in plan.items if i.what == "bits of linears"), None)
        assert (0 if bits is None else bits.count) == plan.resident
        # What all GPUs of a replica hold is at least the base.
        base = sum(i.total for i in plan.items if i.what.startswith("base "))
        assert base * layout.tensor * layout.pipeline >= 2 * shape.parameters
    best = advised(plans)
    if any(plan.fits for plan in plans):
        assert best is not None
        assert best.fits


def test_the_server_shares_memory_like_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its defaults are headroom's: by hand, of 100,000 free bytes."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100_000)
    cpu = torch.device("cpu")
    assert memory.default_cache_bytes(cpu, 1000, 14) == 17_000
    assert memory.default_cache_bytes(cpu, 1000, 60) == 50_000  # half
    config = LlamaConfig(
        vocab_size=32, hidden_size=40, intermediate_size=52, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    found = memory.plan_kv(model, max_running=4, cache_bytes=17_000)
    # A token: 4 x (2 x 2 x 2 x 10 + 256 + 2 x 4 x 10) + 16 = 1680 of 4/5 of 83,000.
    assert found.kv_tokens == 66_400 // 1680
    assert headroom.share_of_tokens(100_000, 17_000) == 66_400


def test_heads_may_be_wider_than_the_model() -> None:
    """heads x head_dim is not hidden for all models."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=40, intermediate_size=52, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    shape = shape_of(config.to_dict(), "wide")
    assert shape.parameters == sum(one.numel() for one in model.parameters())


def run(*args: str):
    return CliRunner().invoke(app, ["plan", *args])


def test_the_command_line_plans_a_node(tmp_path) -> None:
    node = ("--params", "70e9", "--variants", "14", "--gpus", "8", "--gpu-bytes", "80e9")
    told = run(*node)
    assert told.exit_code == 0, told.output
    for text in ("1 x TP 8", "fits, advised", "scales of linears", "cold start", "off:"):
        assert text in told.stdout
    command = "--replicas 1 --tensor-parallel 8 --cache-bytes 19479134080 --max-running 32"
    assert f"soupkit serve FAMILY {command}" in told.stdout
    document = json.loads(run(*node, "--json").stdout)
    best = document["advised"]
    assert best["bytes"] == sum(item["bytes"] for item in best["items"])
    assert (best["resident"], best["cold"], best["cache_bytes"]) == (14, 0, 17 * 1_113_093_376)
    assert len(best["times"]) == 9
    faster = json.loads(run(*node, "--json", "--disk-speed", "14e9").stdout)
    disk = [d["advised"]["times"][0]["seconds"] for d in (document, faster)]
    assert disk[0] == pytest.approx(2 * disk[1])
    assert "the base fits in no layout" in run(
        "--params", "70e9", "--gpus", "1", "--gpu-bytes", "80e9"
    ).stdout  # fmt: skip
    assert run(*node, "--budget-bytes", "1GB").exit_code == 2
    assert run("--params", "7e9", "--gpus", "2").exit_code == 2
    assert run("--params", "7e9", "--gpu-bytes", "2").exit_code == 2
    wrong = run(*node, "--flops", "0")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (1, 1)
    assert math.isfinite(document["parameters"])
