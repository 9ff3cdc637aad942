"""Weights on device meshes of two axes: replicas are not summed, boxes are found, all is merged."""

import json

import pytest
from test_training_sharded import launch


@pytest.mark.slow
def test_slice_of_meshes(tmp_path):
    """TB10: DTensor and plain weights side by side; hybrid FSDP2, tensor parallel, both."""
    launch("mesh_runs.py", str(tmp_path), folder=tmp_path, timeout=300, ranks=4)
    every = json.loads((tmp_path / "results.json").read_text())
    assert len(every) == 4
    for of_rank in every:
        assert len(of_rank) == 4
        assert {kind: all(found.values()) for kind, found in of_rank.items()} == dict.fromkeys(
            of_rank, True
        ), of_rank
