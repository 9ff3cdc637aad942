"""Ranks that are not alike, or fail each in its own way: none waits for ever, nothing is lost."""

import json

import pytest
import torch
from soup_runs import load, saved_base
from test_training_sharded import launch

from soupkit import SoupConfig
from soupkit.errors import TrainingError
from soupkit.training import Soup


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    launch("rank_fault_runs.py", str(folder), folder=folder, timeout=200)
    return json.loads((folder / "results.json").read_text())


def test_ranks_with_other_numbers_of_threads_gather_in_one_order(found):
    assert [of_rank["threads"]["accepted"] for of_rank in found] == [True, True]
    assert [of_rank["threads"]["threads"] for of_rank in found] == [3, 1]


def test_ranks_that_fail_together_agree_on_the_kind_of_fault(found):
    assert [of_rank["errors"] for of_rank in found] == [{"refused": True, "next": True}] * 2


def test_an_error_that_cannot_be_sent_leaves_no_rank_waiting(found):
    zero, one = (of_rank["unpicklable"] for of_rank in found)
    assert zero["OwnError [0, 1]"] == one["OwnError [0, 1]"] == "OwnError"
    assert (zero["OwnError [1]"], one["OwnError [1]"]) == ("TrainingError", "OwnError")
    assert (zero["OwnValueError [0]"], one["OwnValueError [0]"]) == (
        "OwnValueError",
        "TrainingError",
    )
    assert zero["rank 0's"] == one["rank 0's"] == "it"


def test_weights_left_whole_that_differ_between_ranks_are_refused_by_name(found):
    for of_rank in found:
        assert "1.weight is held by several ranks" in of_rank["replicas"]["text"]
        assert of_rank["replicas"]["untouched"]


def test_pipeline_stages_are_refused_on_every_rank(found):
    for of_rank in found:
        assert "not every rank has of rank 0.bias: pipeline stages" in of_rank["stages"]


def test_no_rank_deletes_what_another_has_just_written(found):
    """The first merge of a resumed run, where later steps are forgotten late."""
    assert [of_rank["resumed"] for of_rank in found] == [{"partner": [1, 2], "files": 2}] * 2


def test_weights_of_one_rank_that_are_others_are_told_on_all(found):
    """TB07: a checksum of replicas is each rank's own, so no rank may decide by it alone."""
    for of_rank in found:
        assert "different weights" in of_rank["loaded"]["resumed"]
        assert "different weights" in of_rank["loaded"]["saved"]


@pytest.mark.parametrize("fault", ["gone", "truncated"])
def test_cuts_that_are_gone_or_damaged_are_refused_before_anything_is_deleted(tmp_path, fault):
    base = saved_base(tmp_path / "base")
    config = SoupConfig(merge_every_n_steps=1, rank=2, gate="none", feed_back=True)
    soup = Soup(load(base), config=config, output_dir=tmp_path)
    for _ in range(3):
        soup.step()
    folder = soup._run.journal.folder
    (path,) = folder.cuts_paths(2)
    # As one of two ranks' files, of which the other is there.
    path.rename(folder.cuts_path(2, 1, 2))
    if fault == "truncated":
        folder.cuts_path(2, 0, 2).write_bytes(b"1234")
    again = Soup(load(base), config=config, output_dir=tmp_path)
    with pytest.raises(TrainingError, match=f"cuts-00000002-00000-of-00002.*{fault}"):
        again.resume(2)
    assert folder.steps() == [0, 1, 2, 3]


def test_the_callers_precision_survives_the_threads_of_a_merge(tmp_path):
    """They all put the process's setting back to what they found."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has one setting, which is read otherwise")
    before, threads = matmul.fp32_precision, torch.get_num_threads()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(24)))
    soup = Soup(
        model,
        config=SoupConfig(merge_every_n_steps=1, rank=32, gate="none", feed_back=True),
        output_dir=tmp_path,
    )
    try:
        torch.set_num_threads(4)
        for _ in range(5):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            matmul.fp32_precision = "bf16"
            soup.step()
            assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
        torch.set_num_threads(threads)
