"""Two ranks: the same bits on each, the same weights as one process, and resumes that are exact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soup_runs import load, rows, saved_base, weights_of

from soupkit import SoupConfig
from soupkit.training import Soup
from soupkit.verify import verify_family

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def ddp(base, tmp_path_factory):
    """(results, folder) of one launch of two processes, which every test here reads."""
    folder = tmp_path_factory.mktemp("ddp")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = str(ROOT / "tests" / "ddp_runs.py")
    command = [sys.executable, *launch, script, str(folder), str(base)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "results.json").read_text()), folder


def test_two_ranks_equal_one_process_given_the_same_gradients(ddp, base, tmp_path):
    results, folder = ddp
    plain = results["plain"]
    assert plain["different_data"]
    assert plain["equal"]
    assert plain["same_reports"]
    model = load(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    held_out = torch.tensor([row["input_ids"] for row in rows(4, seed=2)])
    soup = Soup(
        model,
        optimizer=optimizer,
        config=SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True),
        evaluate=lambda: float(model(input_ids=held_out, labels=held_out).loss),
        output_dir=tmp_path,
    )
    batches = [row["input_ids"] for row in rows(12, seed=1)]
    for step in range(6):
        batch = torch.tensor(batches[2 * step : 2 * step + 2])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        soup.step()
    assert len(plain["reports"]) == len(soup.reports) == 2
    for (accepted, current, merged), report in zip(plain["reports"], soup.reports, strict=True):
        assert accepted == report.accepted
        assert current == pytest.approx(report.metric_current, rel=1e-5)
        assert merged == pytest.approx(report.metric_merged, rel=1e-5)
    two = torch.load(folder / "plain" / "weights.pt")
    for name, value in weights_of(model).items():
        torch.testing.assert_close(two[name], value, rtol=2e-5, atol=2e-6)


def test_a_merge_that_fails_on_one_rank_is_refused_on_all(ddp):
    results, _ = ddp
    assert results["failing_merge"] == {
        "accepted": [False, False],
        "named": True,
        "restored": [True, True],
    }


def test_ranks_with_different_weights_are_refused(ddp):
    assert ddp[0]["differing"]["refused"] == [True, True]


def test_the_strategy_in_force_is_told_not_the_one_that_was_asked_for(ddp):
    """TB19."""
    assert ddp[0]["ignored_fsdp"] == {"said": "DDP", "is": True}
    # Whoever takes a model out of its wrapper, or has none, is told what is seen.
    assert ddp[0]["plain"]["named"] == ["DDP", "DDP", "unwrapped replicas"]


@pytest.mark.parametrize("part", ["failing_file", "failing_evaluation"])
def test_a_fault_of_one_rank_reaches_all(ddp, part):
    """TB07: nobody waits for a rank that has left."""
    assert ddp[0][part]["everywhere"] == [True, True]


@pytest.mark.parametrize(("part", "merges"), [("accelerate", [4, 6]), ("trainer", [4, 6, 8])])
def test_a_resume_on_two_ranks_is_exact_and_exports(ddp, part, merges):
    """TB07, TB21: nobody waits for a rank that does not come; both hold the same bits."""
    results, folder = ddp
    assert results[part] == {
        "different_data": True,
        "equal": True,
        "resumed": [True, True],
        "merges": merges,
    }
    assert verify_family(folder / part / "family") == []
