"""The server as clients written by others see it.

`openai` and `schemathesis` are in the dev extra. litellm and lm-eval bring much of their own, so
they run from a venv of theirs, which `make clients` makes; their tests are skipped without it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import TypeAdapter
from serving_kit import (
    CONTEXT,
    TOKENIZER,
    VARIANTS,
    WAIT,
    Oracle,
    chat_text,
    client_of,
    dense,
    make_family,
    serving,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from soupkit.bundle import create_or_open_family
from soupkit.checkpoint import open_checkpoint
from soupkit.serving import bodies

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = Path(os.environ.get("SOUPKIT_CLIENTS", ROOT / ".clients")) / "bin"
DEMO = Path(os.environ.get("SOUPKIT_DEMO", ROOT / "demo"))


def program(name: str) -> str:
    """A program of this Python or of the clients' venv; the test is skipped without it."""
    for folder in (Path(sys.executable).parent, CLIENTS):
        if (folder / name).exists():
            return str(folder / name)
    pytest.skip(f"needs {name}: `make clients`, or the dev extra for schemathesis")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as (_, address):
        yield address


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root)


# SV01, SV10: another one's answer, without any error.
def test_forty_at_once_over_five_variants_get_one_text_each(url: str, oracle: Oracle) -> None:
    names = sorted(VARIANTS)
    assert len(names) == 5

    def ask(at: int) -> tuple[str, str]:
        model = names[at % 5]
        messages: Any = [{"role": "user", "content": "same"}]
        settings: Any = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        with client_of(url) as client:
            if at % 2:
                whole = client.chat.completions.create(**settings)
                return model, whole.choices[0].message.content or ""
            stream = client.chat.completions.create(
                **settings, stream=True, stream_options={"include_usage": True}
            )
            parts = list(stream)
            assert parts[-1].usage is not None
            return model, "".join(p.choices[0].delta.content or "" for p in parts[:-1])

    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(ask, range(40)))
    texts = {name: {text for model, text in found if model == name} for name in names}
    expected = {name: {oracle(name, chat_text("same"), 24, special=False)} for name in names}
    assert texts == expected
    assert len(set.union(*texts.values())) == 5


def test_answers_and_errors_are_as_the_document_says(url: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    text = {"prompt": ["x", "y"], "echo": True}
    short: dict[str, Any] = {"model": "linear", "max_tokens": 3}
    for route, body, kind in (
        ("completions", short | text, bodies.Completion),
        ("completions", short | text | {"logprobs": 2}, bodies.Completion),
        ("chat/completions", short | chat, bodies.ChatCompletion),
        ("chat/completions", short | chat | {"logprobs": True}, bodies.ChatCompletion),
    ):
        answer = httpx.post(f"{url}/v1/{route}", json=body, timeout=WAIT)
        TypeAdapter(kind).validate_json(answer.content, strict=True)
    listed = httpx.get(f"{url}/v1/models").content
    TypeAdapter(bodies.ModelList).validate_json(listed, strict=True)
    document = httpx.get(f"{url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert operation["responses"]["200"], path
            assert "422" not in operation["responses"], path
            refused = httpx.request(method, f"{url}{path}", content=b"[", timeout=WAIT)
            if method == "post":
                assert str(refused.status_code) in operation["responses"], path
                TypeAdapter(bodies.ErrorBody).validate_json(refused.content, strict=True)
    wrong = httpx.delete(f"{url}/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    TypeAdapter(bodies.ErrorBody).validate_json(wrong.content, strict=True)


def test_schemathesis_finds_no_fault(root: Path, tmp_path: Path) -> None:
    schemathesis = program("schemathesis")
    with serving(root, keys=("the-key",), admin_keys=("an-admin-key",)) as (_, url):
        document = httpx.get(f"{url}/openapi.json").json()
        # Names that exist, or nearly every answer would be 404; loads, too, by the admin's key.
        names = {"enum": ["base", *sorted(VARIANTS), "missing"]}
        for body in document["components"]["schemas"].values():
            for field in ("model", "lora_name"):
                if field in body.get("properties", {}) and "additionalProperties" in body:
                    body["properties"][field] = names
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        for key, only in (("the-key", "/completions$|/models"), ("an-admin-key", "adapter$")):
            command = [
                schemathesis,
                "run",
                str(tmp_path / "openapi.json"),
                f"--url={url}",
                f"--header=Authorization: Bearer {key}",
                f"--include-path-regex={only}",
                "--max-examples=15",
                "--seed=1",
                "--generation-deterministic",
                # Rules between fields (top_logprobs needs logprobs) have no place in a schema.
                "--exclude-checks=positive_data_acceptance",
                "--request-timeout=60",
                "--no-color",
            ]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=tmp_path, timeout=300
            )
            assert done.returncode == 0, done.stdout[-4000:]
            print([line for line in done.stdout.splitlines() if "generated" in line])
        assert httpx.get(f"{url}/ready").status_code == 200


@pytest.mark.slow
def test_litellm_maps_answers_and_errors(tmp_path: Path) -> None:
    python = str(Path(program("litellm")).parent / "python3")
    root = make_family(tmp_path, names=["linear", "norms"])
    weights = root / "family" / "variants" / "norms" / "variant.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with serving(root, keys=("user-key",)) as (_, url):
        command = [python, str(ROOT / "tests" / "client_runs.py"), url, "user-key", str(CONTEXT)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    oracle = Oracle(root, names=["linear"])
    assert found["chat"] == oracle("linear", chat_text("hello"), 12, special=False)
    assert found["stream"] == found["chat"]
    assert found["text"] == oracle("linear", "hello", 12)
    kinds = {what: fault["kind"] for what, fault in found["faults"].items()}
    assert kinds == {
        "unknown model": "NotFoundError",
        "bad field": "BadRequestError",
        "too long": "ContextWindowExceededError",
        "wrong key": "AuthenticationError",
        "damaged variant": "ServiceUnavailableError",
    }


def lm_eval(url: str, model: str, *, tokenizer: Path, task: dict[str, Any], out: Path) -> Path:
    """The folder of what lm-evaluation-harness found of a served model, of each sample, too.

    lm_eval run --model local-completions --tasks TASK --include_path FOLDER --log_samples \\
        --model_args model=MODEL,base_url=URL/v1/completions,tokenizer=BASE,tokenized_requests=True
    """
    name = task["task"]
    shared = {"dataset_path": "json", "test_split": "test", "target_delimiter": ""}
    out.mkdir(parents=True)
    (out / f"{name}.yaml").write_text(json.dumps(shared | task))  # YAML, too
    settings = f"model={model},base_url={url}/v1/completions,tokenizer={tokenizer}"
    command = [program("lm_eval"), "run", "--model", "local-completions", "--tasks", name]
    command += ["--model_args", f"{settings},tokenized_requests=True,num_concurrent=4"]
    command += ["--include_path", str(out), "--output_path", str(out), "--log_samples"]
    environment = {**os.environ, "HF_HOME": str(out / "hf"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.slow
def test_lm_eval_scores_a_variant_as_the_dense_model_does(
    root: Path, url: str, tmp_path: Path
) -> None:
    rows = [
        {"question": f"{a} plus {b} is", "choices": [f" {a + b}", f" {a + b + 1}"], "gold": 0}
        for a in range(2, 6)
        for b in range(3, 5)
    ]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "sums",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval(url, "linear", tokenizer=root / "base", task=task, out=tmp_path / "out")
    samples = next(found.rglob("samples_sums_*.jsonl")).read_text().splitlines()
    assert len(samples) == len(rows)
    model = dense(root, "linear")
    for sample in map(json.loads, samples):
        doc = sample["doc"]
        for choice, (reply, *_) in zip(doc["choices"], sample["resps"], strict=True):
            expected = loglikelihood(model, doc["question"], choice)
            assert float(reply[0]) == pytest.approx(expected, abs=1e-3)


def loglikelihood(model: Any, context: str, continuation: str) -> float:
    """Sum of the log-probabilities of the continuation's tokens; lm-eval adds no special ones."""
    ids = TOKENIZER(context + continuation, add_special_tokens=False)["input_ids"]
    start = len(TOKENIZER(context, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return float(sum(logprobs[at - 1, ids[at]] for at in range(start, len(ids))))


@pytest.mark.slow
def test_lm_eval_of_a_full_fine_tune_and_its_one_bit_variant(tmp_path: Path) -> None:
    """A cipher of `make demo` on unseen words: one bit a weight loses at most half a point."""
    cipher, count = "caesar", 200
    if not (DEMO / "full" / cipher).is_dir():
        pytest.skip("needs `make demo`")
    rows = (DEMO / "heldout" / f"{cipher}.jsonl").read_text().splitlines()[:count]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    task = {
        "task": "cipher",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "loglikelihood",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        # Of loglikelihoods `acc` is the share of answers that greedy decoding would give.
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    full = DEMO / "full" / cipher
    create_or_open_family(tmp_path / "family", open_checkpoint(full))
    models = {
        "full": (tmp_path, "base", AutoModelForCausalLM.from_pretrained(full, dtype=torch.float32)),
        "1 bit": (DEMO, cipher, dense(DEMO, cipher)),
    }
    scores = {}
    for what, (root, name, model) in models.items():
        with serving(root) as (_, url):
            found = lm_eval(url, name, tokenizer=full, task=task, out=tmp_path / what)
        results = json.loads(next(found.rglob("results_*.json")).read_text())
        scores[what] = {k: results["results"]["cipher"][f"{k},none"] for k in ("acc", "perplexity")}
        expected = exact_match(model, AutoTokenizer.from_pretrained(full), rows)
        assert scores[what] == pytest.approx(expected, rel=1e-3), what
    print(scores)
    assert scores["full"]["acc"] > 0.9, "the fine-tune has learned its cipher"
    assert scores["1 bit"]["acc"] >= scores["full"]["acc"] - 0.005


def exact_match(model: Any, tokenizer: Any, rows: list[str]) -> dict[str, float]:
    """Of answers by greedy decoding, and the perplexity of a whole answer, one row at a time."""
    is_right, losses = [], []
    for row in map(json.loads, rows):
        ids = tokenizer(row["prompt"] + row["answer"], return_tensors="pt").input_ids
        start = tokenizer(row["prompt"], return_tensors="pt").input_ids.shape[1]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        answer = ids[0, start:]
        is_right.append(bool((logprobs.argmax(-1) == answer).all()))
        losses.append(-float(logprobs.gather(1, answer[:, None]).sum()))
    mean = sum(losses) / len(losses)
    return {"acc": sum(is_right) / len(rows), "perplexity": math.exp(mean)}
