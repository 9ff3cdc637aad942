"""Tensor parallelism over two processes: sliced variants equal the dense models."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving_kit import make_family

SCRIPT = Path(__file__).with_name("serving_ranks.py")
SECONDS = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# R14, SV09: a variant that host memory held was subtly wrong when it came back to several ranks.
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_two_ranks_equal_the_dense_models(tmp_path: Path, kind: str) -> None:
    root = make_family(tmp_path, kind=kind, tied=kind == "llama")
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, root],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
