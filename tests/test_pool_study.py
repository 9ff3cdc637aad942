"""recipes/pool_study.py: its invariants from start to end, and its linear merge against PEFT's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soup_runs import tiny_llama

from soupkit.adapter_folder import open_adapter

peft = pytest.importorskip("peft")
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# PEFT 0.21.2 reads an attribute that transformers deprecates.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_pool_study_slice_scores_one_where_every_adapter_has_a_slot(tmp_path):
    command = [sys.executable, str(RECIPES / "pool_study.py"), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += ["--orders", "2", "--seed", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((tmp_path / "study.json").read_text())

    assert len(found["orders"]) == 2
    assert all(sorted(order) == sorted(found["own"]) for order in found["orders"])
    rows = found["rows"]
    assert len(rows) == 5 * 5
    for row in rows:
        assert len(row["S"]) == 2
        if row["slots"] >= 3:
            assert row["merges"] == 0
            assert row["S"] == [1.0, 1.0]
        else:
            assert row["merges"] == 2 * (3 - row["slots"])
            assert all(score >= 0 for score in row["S"])
        assert row["method"] in done.stdout


def test_linear_is_what_peft_calls_linear(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import pool_study

    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(tiny_llama(), lora)
    model.add_adapter("second", lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", "linear")
    model.save_pretrained(tmp_path)
    first, second, wanted = (
        open_adapter(tmp_path / part).load() for part in (".", "second", "both")
    )
    merged = pool_study.linear(first, second)
    assert merged.keys() == wanted.keys()
    for name, module in merged.items():
        torch.testing.assert_close(module.pair.matrix(), wanted[name].pair.matrix())
