"""`soupkit report`: what is measured against float64 and by hand, the paired interval, the page."""

import copy
import errno
import html
import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import serving_kit
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving_kit import reference_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from soupkit import exact_match, quality, report
from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.errors import BundleError, CheckpointError
from soupkit.exact_match import exact_matches
from soupkit.export import export_variant
from soupkit.family import open_family
from soupkit.paired import Z, paired_interval, verdict
from soupkit.quality import Example, encode, read_examples, score
from soupkit.report import make_report
from soupkit.report_figures import kl_limit
from soupkit.report_page import TITLES, cells, render
from soupkit.rewrite import rewrite_variant

ROOT = Path(__file__).resolve().parents[1]
LINES = [
    {"prompt": "2 + 2 =", "answer": " 4"},
    {"text": "hello there, all"},
    {"prompt": "say it:", "answer": " a longer answer"},
    {"prompt": "x", "answer": "y"},
    {"prompt": "12 + 30 =", "answer": " 42"},
]
TOKENIZER = serving_kit.make_tokenizer()


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, family (linear, norms), ft-linear-1, ft-norms-2, data.jsonl; do not change it."""
    folder = tmp_path_factory.mktemp("report")
    serving_kit.make_family(folder, names=("linear", "norms"))
    write_lines(folder / "data.jsonl", LINES)
    return folder


@pytest.fixture(scope="module")
def made(root: Path) -> tuple[Path, dict]:
    """A report of both variants, one with its fine-tune and other encodings."""
    document = make_report(
        root / "family",
        data=root / "data.jsonl",
        out=root / "report",
        variants={"linear": str(root / "ft-linear-1"), "norms": None},
        encodings=["row", "row-x2", "raw"],
    )
    return root / "report", document


def result_of(document: dict, variant: str, model: str) -> dict:
    (found,) = (one for one in document["variants"] if one["name"] == variant)
    (result,) = (one for one in found["results"] if one["model"] == model)
    return result


# The paired interval


@pytest.mark.parametrize("questions", [1, 20, 765, 1000])
def test_without_any_difference_the_interval_is_the_one_worked_by_hand(questions: int) -> None:
    # q = 0 there, so T(d)^2 = n d / (1 - d) = z^2 at d = z^2 / (n + z^2).
    width = Z**2 / (questions + Z**2)
    assert paired_interval(0, 0, questions) == pytest.approx((0, -width, width), abs=1e-12)


def test_half_a_point_needs_hundreds_of_prompts() -> None:
    assert verdict(*paired_interval(0, 0, 1000)[1:], limit=-0.005) == "met"
    assert verdict(*paired_interval(0, 0, 400)[1:], limit=-0.005) == "undecided"


def constrained_score(d: float, here: int, there: int, n: int) -> float:
    """Tango's statistic with its nuisance parameter found on a grid of the likelihood."""
    low, high = max(0.0, -d), (1 - d) / 2
    for _ in range(12):
        q = numpy.linspace(low, high, 401)
        with numpy.errstate(divide="ignore", invalid="ignore"):
            terms = [
                count * numpy.log(numpy.clip(p, 0, 1)) if count else numpy.zeros_like(q)
                for count, p in ((here, q + d), (there, q), (n - here - there, 1 - d - 2 * q))
            ]
        best = int(numpy.nanargmax(sum(terms)))
        low, high = q[max(0, best - 1)], q[min(400, best + 1)]
    return (here - there - n * d) / math.sqrt(n * (2 * q[best] + d - d * d))


@pytest.mark.parametrize("counts", [(12, 2, 50), (22, 41, 400), (0, 5, 60), (7, 7, 30), (1, 0, 9)])
def test_the_statistic_at_both_limits_is_1_96_by_a_grid_of_the_likelihood(
    counts: tuple[int, int, int],
) -> None:
    difference, low, high = paired_interval(*counts)
    assert difference == pytest.approx((counts[0] - counts[1]) / counts[2])
    assert constrained_score(low, *counts) == pytest.approx(Z, rel=1e-4)
    assert constrained_score(high, *counts) == pytest.approx(-Z, rel=1e-4)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 200))
def test_the_interval_holds_the_difference_and_turns_with_the_sides(
    here: int, there: int, same: int
) -> None:
    questions = max(1, here + there + same)
    difference, low, high = paired_interval(here, there, questions)
    assert -1 <= low <= difference <= high <= 1
    turned = paired_interval(there, here, questions)
    assert turned == pytest.approx((-difference, -high, -low))
    assert paired_interval(here, there, questions + 500)[2] <= high + 1e-12 or difference < 0


@pytest.mark.parametrize("counts", [(0, 0, 0), (-1, 0, 5), (3, 3, 5), (6, 0, 5), (True, 0, 5)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"questions|only_"):
        paired_interval(*counts)


def test_a_verdict_is_undecided_where_the_interval_spans_the_limit() -> None:
    assert verdict(-0.005, 0.1, limit=-0.005) == "met"
    assert verdict(-0.006, 0.1, limit=-0.005) == "undecided"
    assert verdict(-0.006, -0.005, limit=-0.005) == "undecided"
    assert verdict(-0.1, -0.0051, limit=-0.005) == "not met"


# The data


def test_empty_lines_are_skipped_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b", "id": 7}\n\n  \n{"text": "c"}')
    assert read_examples(path) == [Example("a", "b", 1), Example("", "c", 4)]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "7", '{"prompt": "a"}', '{"answer": "a"}', '{"text": 5}', '{"text": ""}',
     '{"prompt": "", "answer": "a"}', '{"prompt": "a", "answer": ""}',
     '{"prompt": "a", "answer": "b", "text": "c"}', '{"text": "a", "text": "b"}',
     r'{"text": "half \ud83d of a pair"}'],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: "):
        read_examples(path)


def test_data_without_an_example_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="has no example"):
        read_examples(tmp_path / "data.jsonl")
    with pytest.raises(FileNotFoundError):
        read_examples(tmp_path / "none.jsonl")


def test_the_end_of_text_belongs_to_the_answer_and_nothing_is_put_in_front() -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])

    rows = encode(
        [Example("ab", "c", 1), Example("ab", "c</s>", 2), Example("", "abc", 3)], TOKENIZER
    )
    assert [row.ids for row in rows] == [(*ids("abc"), 1), (*ids("abc"), 1), ids("abc")]
    assert [row.start for row in rows] == [2, 2, 1]


def test_a_line_that_does_not_fit_the_model_is_named() -> None:
    with pytest.raises(ValueError, match="line 9: 4 tokens, the model takes 3"):
        encode([Example("ab", "c", 9)], TOKENIZER, most=3)
    with pytest.raises(ValueError, match=r"line 8: .* nothing to score"):
        encode([Example("", "a", 8)], TOKENIZER)


# Loss and KL


def answer_logits(model: torch.nn.Module, row: quality.Row) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, wanted) of one row's answer tokens; one row at a time, in float64."""
    model = model.double()
    logits = model(torch.tensor([row.ids])).logits[0, row.start - 1 : -1]
    return logits, torch.tensor(row.ids[row.start :])


@torch.no_grad()
def test_loss_and_kl_are_those_of_torch_in_float64(root: Path, tmp_path: Path) -> None:
    rows = encode(read_examples(root / "data.jsonl"), TOKENIZER)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        for name in ("base", "ft-linear-1")
    )
    found = score(ours, rows, reference=reference_of(theirs, rows, tmp_path))
    pairs = [answer_logits(ours, row) for row in rows]
    logits, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    others = torch.cat([answer_logits(theirs, row)[0] for row in rows])
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    logs, other_logs = logits.log_softmax(-1), others.log_softmax(-1)
    kl = torch.nn.functional.kl_div(logs, other_logs, log_target=True, reduction="batchmean")
    assert found.tokens == len(wanted)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.kl == pytest.approx(kl.item(), rel=1e-4)
    assert found.kl > 0.1


def test_kl_of_a_model_to_itself_is_zero_and_batches_do_not_matter(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = encode(read_examples(root / "data.jsonl"), TOKENIZER)
    model = quality.open_model(root / "base")
    found = score(model, rows, reference=reference_of(model, rows, tmp_path))
    assert found.kl == 0.0
    assert score(model, rows).kl is None
    monkeypatch.setattr(quality, "BATCH_TOKENS", 1)
    monkeypatch.setattr(quality, "_POSITIONS", 3)
    seen: list[int] = []
    own = reference_of(model, rows, tmp_path)
    alone = score(model, rows, reference=own, step=seen.append)
    assert seen == [1] * len(rows)
    assert (alone.loss, alone.kl) == pytest.approx((found.loss, 0.0), rel=1e-6)


def test_what_cannot_be_scored_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = encode(read_examples(root / "data.jsonl"), TOKENIZER)
    model = quality.open_model(root / "base")
    with pytest.raises(ValueError, match="no rows"):
        score(model, [])
    other = quality.open_model(root / "base")
    other.resize_token_embeddings(300, mean_resizing=False)
    with pytest.raises(ValueError, match="vocabulary of 261 against 300"):
        score(model, rows, reference=reference_of(other, rows, tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space.*bytes for the logits of .* give fewer examples"):
        reference_of(model, rows, tmp_path)
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        score(model, rows)
    with pytest.raises(CheckpointError, match="cannot open"):
        quality.open_model(root / "nowhere")


# Exact match


@pytest.fixture(scope="module")
def alphabet() -> LlamaForCausalLM:
    """Says the alphabet on from the last letter, and ends after d; its layers add nothing."""
    size = len(TOKENIZER)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=264,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            eos_token_id=1,
        )
    )
    (first,), (last,) = (TOKENIZER(c, add_special_tokens=False)["input_ids"] for c in "az")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight.fill_diagonal_(1.0)
        for token in range(first, last):
            model.lm_head.weight[token + 1, token] = 1.0
        model.lm_head.weight[:, first + 3] = 0.0
        model.lm_head.weight[1, first + 3] = 1.0
    return model.eval()


def matches(model: torch.nn.Module, rows: list[quality.Row], **rest: object) -> list[bool]:
    return exact_matches(model, rows, score(model, rows).likeliest, TOKENIZER, **rest)


def test_exact_match_of_a_model_worked_by_hand(
    alphabet: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        ("a", "bcd", True),
        ("xyz c", "d", True),
        ("b", " cd\n", True),  # white space around it does not count
        ("a", "bc", False),  # it goes on
        ("a", "bcde", False),  # it ends before
        ("e", "fgh", False),  # it never ends
        ("zd", "d", False),  # it says nothing
    ]
    rows = encode(
        [Example("", "a text is not asked", 1)]
        + [Example(prompt, answer, 2) for prompt, answer, _ in asked],
        TOKENIZER,
    )
    wanted = [right for _, _, right in asked]
    assert matches(alphabet, rows) == wanted
    # Neither sampling nor batches change it.
    monkeypatch.setattr(exact_match, "DECODE_BATCH", 1)
    seen: list[int] = []
    assert matches(alphabet, rows, step=seen.append) == wanted
    assert sum(seen) == len(asked)
    assert matches(alphabet, rows[:1]) == []


def test_decoding_stays_within_the_context(alphabet: LlamaForCausalLM) -> None:
    rows = encode([Example("e" * 30, "f", 1), Example("a", "b" * 20, 2)], TOKENIZER, most=32)
    assert matches(alphabet, rows) == [False, False]


def test_a_models_own_sampling_is_put_aside_and_its_ends_are_kept(
    alphabet: LlamaForCausalLM, tmp_path: Path
) -> None:
    alphabet.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 9.0, "repetition_penalty": 5.0, "eos_token_id": [1, 2]}'
    )
    model = quality.open_model(tmp_path)
    assert model.generation_config.eos_token_id == [1, 2]
    assert model.generation_config.repetition_penalty in (None, 1.0)
    rows = encode([Example("abc", "d", 1)], TOKENIZER)
    assert matches(model, rows) == [True]


# The report


def test_the_document_tells_each_model_of_each_variant(made: tuple[Path, dict], root: Path) -> None:
    folder, document = made
    assert json.loads((folder / "report.json").read_text()) == document
    assert sorted(path.name for path in folder.iterdir()) == ["index.html", "report.json"]
    assert document["schema"] == 1
    assert (document["data"]["examples"], document["data"]["prompts"]) == (5, 4)
    linear, norms = document["variants"]
    models = [one["model"] for one in linear["results"]]
    assert models == ["base", "full", "stored", "row", "row-x2", "raw"]
    assert [one["model"] for one in norms["results"]] == ["base", "stored"]
    assert norms["spectra"] == {}
    assert len(linear["spectra"]) == 4
    weights = root / "family" / "variants" / "linear" / "variant.safetensors"
    stored = result_of(document, "linear", "stored")
    assert stored["bytes"] == weights.stat().st_size
    assert stored["share"] == stored["bytes"] / linear["model_bf16_bytes"]
    assert set(stored["layers"]) == {"0", "1"}
    for result in (*linear["results"], *norms["results"]):
        assert set(result) == set(stored)
        assert len(cells(result)) == len(TITLES)


def test_the_figures_are_those_of_the_dense_models(
    made: tuple[Path, dict], root: Path, tmp_path: Path
) -> None:
    _, document = made
    rows = encode(read_examples(root / "data.jsonl"), TOKENIZER)
    full = reference_of(quality.open_model(root / "ft-linear-1"), rows, tmp_path)
    for model, oracle in {"base": None, "stored": "linear"}.items():
        wanted = score(serving_kit.dense(root, oracle), rows, reference=full)
        found = result_of(document, "linear", model)
        assert (found["loss"], found["kl"]) == pytest.approx((wanted.loss, wanted.kl), rel=1e-5)
    assert result_of(document, "linear", "full")["kl"] is None
    # The family stores "row", so that trying it again gives the same; whole tensors lose nothing.
    stored, row = (result_of(document, "linear", model) for model in ("stored", "row"))
    assert {**row, "model": "stored"} == stored
    assert (row["kl_of_row"], row["kl_verdict"]) == (1.0, None)
    two = result_of(document, "linear", "row-x2")
    assert two["kl_of_row"] == two["kl"] / row["kl"]
    assert two["kl_verdict"] == ("met" if two["kl"] <= row["kl"] / 4 else "not met")
    raw, full_result = (result_of(document, "linear", model) for model in ("raw", "full"))
    assert (raw["kl"], raw["loss"]) == (0.0, full_result["loss"])
    assert raw["encoding"] == "none"
    assert result_of(document, "linear", "row-x2")["kl"] < row["kl"]
    assert raw["verdict"] == "undecided"  # four prompts prove nothing
    assert result_of(document, "norms", "stored")["kl"] is None


@pytest.mark.parametrize(
    ("encoding", "limit"),
    [("row, distilled", 0.5), ("matrix, distilled", 0.5), ("row-x2", 0.25), ("row-x2-refit", 0.25),
     ("row", None), ("row-x3", None), ("row-x2, distilled", None), ("sparse", None),
     ("lowrank-4+row-x2", None), ("none", None), ("matrix, row, distilled", None)],
)  # fmt: skip
def test_the_goal_for_kl_is_for_a_distilled_plane_and_for_two(
    encoding: str, limit: float | None
) -> None:
    assert kl_limit(encoding) == limit


@pytest.mark.parametrize(("best_step", "told"), [(5, "row, distilled"), (0, "row")])
def test_a_distilled_variant_is_told_from_plain_row_scales(
    root: Path, tmp_path: Path, best_step: int, told: str
) -> None:
    family = shutil.copytree(root / "family", tmp_path / "family")
    found = open_family(family)
    variant = open_variant(found.folder("linear"))
    rewrite_variant(
        found, variant, source="linear", name="linear", deltas={}, raw={}, residual_energy={},
        event={"event": "distill", "best_step": best_step},
    )  # fmt: skip
    document = make_report(
        family, data=root / "data.jsonl", out=tmp_path / "out", encodings=["row"],
        variants={"linear": str(root / "ft-linear-1")},
    )  # fmt: skip
    stored, row = (result_of(document, "linear", model) for model in ("stored", "row"))
    assert (stored["encoding"], row["encoding"]) == (told, "row")
    # Nothing was distilled in truth, so KL is the same, which is twice the goal.
    judged = "not met" if best_step else None
    assert (stored["kl_of_row"], stored["kl_verdict"]) == (1.0, judged)


def test_exact_match_is_paired_with_the_full_fine_tune(
    alphabet: LlamaForCausalLM, tmp_path: Path
) -> None:
    (first,) = TOKENIZER("a", add_special_tokens=False)["input_ids"]
    full = copy.deepcopy(alphabet)
    with torch.no_grad():
        # The base ends after d, the fine-tune after f.
        full.lm_head.weight[[1, first + 4], first + 3] = torch.tensor([0.0, 1.0])
        full.lm_head.weight[[first + 6, 1], first + 5] = torch.tensor([0.0, 1.0])
    for name, model in {"base": alphabet, "full": full}.items():
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    base, finetuned = (open_checkpoint(tmp_path / name) for name in ("base", "full"))
    # Each row moved by 0 or +-1 only, which "sparse" holds exactly.
    export_variant(base, finetuned, family=tmp_path / "f", name="longer", encoding="sparse")
    pairs = [("c", "def"), ("e", "f"), ("c", "d"), ("a", "z")]
    data = write_lines(tmp_path / "d.jsonl", [{"prompt": p, "answer": a} for p, a in pairs])
    document = make_report(
        tmp_path / "f", data=data, out=tmp_path / "out", variants={"longer": str(tmp_path / "full")}
    )
    told = {
        model: tuple(
            result_of(document, "longer", model)[key]
            for key in ("right", "exact_match", "only_here", "only_full", "difference", "verdict")
        )
        for model in ("base", "full", "stored")
    }
    assert told == {
        "base": (1, 0.25, 1, 2, -0.25, None),
        "full": (2, 0.5, None, None, None, None),
        "stored": (2, 0.5, 0, 0, 0.0, "undecided"),
    }
    assert result_of(document, "longer", "base")["interval"] == list(paired_interval(1, 2, 4)[1:])
    assert result_of(document, "longer", "stored")["kl"] == 0.0


def test_the_page_shows_every_figure_and_asks_no_network(made: tuple[Path, dict]) -> None:
    folder, document = made
    page = (folder / "index.html").read_text()
    for variant in document["variants"]:
        for result in variant["results"]:
            colour = {"met": "met", "not met": "not", "undecided": "open"}
            row = "".join(
                f'<td class="{colour[text]}">{text}</td>'
                if text in colour
                else f"<td>{html.escape(text)}</td>"
                for text in cells(result)
            )
            assert f"<tr>{row}</tr>" in page
        for name in variant["spectra"]:
            assert name in page
    assert page.count("<img ") == 4  # the variant without a fine-tune has its layers only
    assert page.count('src="data:image/svg+xml;base64,') == 4
    for word in ("http", "<script", "<link", "@import", "url("):
        assert word not in page


def test_a_hostile_name_stays_text(made: tuple[Path, dict]) -> None:
    _, document = made
    document = json.loads(json.dumps(document))
    document["data"]["path"] = "<script>alert(1)</script>.jsonl"
    assert "<script" not in render(document)


def test_the_same_input_gives_the_same_bytes(made: tuple[Path, dict], root: Path) -> None:
    folder, _ = made
    again = root / "again"
    make_report(
        root / "family",
        data=root / "data.jsonl",
        out=again,
        variants={"linear": str(root / "ft-linear-1"), "norms": None},
        encodings=["row", "row-x2", "raw"],
    )
    for name in ("report.json", "index.html"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_without_matplotlib_the_page_has_its_tables(
    made: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = render(made[1])
    assert "matplotlib is not installed" in page
    assert "<img" not in page
    assert "Singular values" in page


def test_one_model_at_a_time_is_in_memory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    most = 0

    def counted(folder: Path, *, device: str) -> object:
        nonlocal most
        model = quality.open_model(folder, device=device)
        alive.add(model)
        most = max(most, len(alive))
        return model

    monkeypatch.setattr(report, "open_model", counted)
    ticks: list[tuple[int, int]] = []
    make_report(
        root / "family", data=root / "data.jsonl", out=tmp_path / "out",
        variants={"linear": str(root / "ft-linear-1"), "norms": str(root / "ft-norms-2")},
        encodings=["matrix"], progress=lambda what, done, total: ticks.append((done, total)),
    )  # fmt: skip
    assert most == 1
    assert ticks[-1] == (8 * 9, 8 * 9)


def test_a_fine_tune_with_more_words_is_reported_without_its_base(
    root: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "ft-linear-1", dtype=torch.float32)
    model.resize_token_embeddings(270, mean_resizing=False)
    model.save_pretrained(tmp_path / "more")
    TOKENIZER.save_pretrained(tmp_path / "more")
    base, more = open_checkpoint(root / "base"), open_checkpoint(tmp_path / "more")
    export_variant(base, more, family=tmp_path / "f", name="more", companions=more.path)
    ticks: list[tuple[int, int]] = []
    document = make_report(
        tmp_path / "f", data=root / "data.jsonl", out=tmp_path / "out",
        variants={"more": str(more.path)},
        progress=lambda what, done, total: ticks.append((done, total)),
    )  # fmt: skip
    models = [one["model"] for one in document["variants"][0]["results"]]
    assert models == ["full", "stored"]
    assert ticks[-1] == (3 * 9, 3 * 9)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"variants": {"nobody": None}}, BundleError, "no variant 'nobody'"),
        ({"variants": {"linear": "nowhere"}}, CheckpointError, "nowhere"),
        ({"family": "nowhere"}, BundleError, "nowhere is no family"),
        ({"encodings": ["row"]}, ValueError, "--variant linear=FOLDER"),
        ({"encodings": ["row-x9"]}, ValueError, "row-x9"),
        ({"encodings": ["row", "row"]}, ValueError, "each once"),
    ],
)
def test_what_cannot_be_reported_leaves_nothing(
    root: Path, tmp_path: Path, change: dict, error: type[Exception], told: str
) -> None:
    given = {"family": root / "family", "data": root / "data.jsonl", **change}
    with pytest.raises(error, match=told):
        make_report(given.pop("family"), out=tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_report_does_not_overwrite(made: tuple[Path, dict], root: Path) -> None:
    before = (made[0] / "report.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        make_report(root / "family", data=root / "data.jsonl", out=made[0])
    assert (made[0] / "report.json").read_bytes() == before


# The command


def run(*arguments: object) -> object:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_prints_the_tables_and_the_page(root: Path, tmp_path: Path) -> None:
    shared = (root / "family", "--data", root / "data.jsonl", "--encoding", "matrix")
    shared = (*shared, "--variant", f"linear={root / 'ft-linear-1'}")
    told = run(*shared, "--out", tmp_path / "a")
    assert told.exit_code == 0, told.output
    for word in (*TITLES, "stored", "matrix", "full", "undecided", "value 16", "layer", "Tango"):
        assert word in told.stdout
    assert told.stdout.endswith(f"{tmp_path / 'a' / 'index.html'}\n")
    machine = run(*shared, "--out", tmp_path / "b", "--json")
    assert machine.stderr == ""
    document = json.loads((tmp_path / "b" / "report.json").read_text())
    assert json.loads(machine.stdout) == document
    assert document == json.loads((tmp_path / "a" / "report.json").read_text())


def test_auto_is_tried_with_the_bytes_of_row_scales_and_its_frontier_is_shown(
    root: Path, tmp_path: Path
) -> None:
    told = run(
        root / "family", "--data", root / "data.jsonl", "--variant",
        f"linear={root / 'ft-linear-1'}", "--encoding", "row", "--encoding", "auto",
        "--out", tmp_path / "a",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    document = json.loads((tmp_path / "a" / "report.json").read_text())
    auto, row = (result_of(document, "linear", one) for one in ("auto", "row"))
    assert auto["bytes"] <= row["bytes"]
    assert row["frontier"] == []
    assert row["bytes"] in [point["budget_bytes"] for point in auto["frontier"]]
    page = (tmp_path / "a" / "index.html").read_text()
    assert "What a budget buys" in page
    for point in auto["frontier"]:
        assert f"<td>{point['bytes']:,}</td>" in page
        assert f"{point['bytes']:,}" in told.stdout


def test_the_commands_mistakes_are_one_line(root: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text"}\n')
    data = root / "data.jsonl"
    for arguments, told in {
        (root / "family", "--data", bad): "line 2",
        (root / "family", "--data", data, "--variant", "linear="): "NAME=FOLDER",
        (root / "family", "--data", data, "--variant", "=x"): "NAME=FOLDER",
        (root / "family", "--data", data, "--variant", "a", "--variant", "a=b"): "once",
        (tmp_path, "--data", data): "is no family",
    }.items():
        result = run(*arguments, "--out", tmp_path / "out")
        assert (result.exit_code, result.stdout) == (1, "")
        assert told in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
    help_text = " ".join(run("--help").stdout.split())
    assert "Example: soupkit report family " in help_text


# recipes/eval.sh


def test_eval_sh_asks_lm_eval_for_both_models(tmp_path: Path) -> None:
    script = ROOT / "recipes" / "eval.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", str(script), "ft", "family", "coder", str(tmp_path / "scores")]
    missing = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert missing.returncode == 1
    assert "lm_eval" in missing.stderr
    for name in ("lm_eval", "soupkit"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(command, env={**environment, "TASKS": "gsm8k,humaneval"}, check=True)
    restored, *asked = (tmp_path / "asked").read_text().splitlines()
    assert restored.startswith(f"soupkit restore family coder --out {tmp_path}/scores/")
    assert len(asked) == 2
    assert "pretrained=ft," in asked[0]
    for line in asked:
        assert line.startswith("lm_eval ")
        assert "--tasks gsm8k,humaneval " in line
        assert "--confirm_run_unsafe_code" in line
    usage = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
