"""A process that vLLM starts ends with the one that started it, though that one was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, os, signal, sys
from soupkit.serving.vllm import parent

def child(ignores):
    parent.GRACE_SECONDS = 0.01
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.follow()
    print(os.getpid(), flush=True)
    while True:
        signal.pause()

if __name__ == "__main__":
    parent.follow()  # nobody's child
    context = multiprocessing.get_context(sys.argv[1])
    context.Process(target=child, args=(sys.argv[2] == "ignores",)).start()
"""


@pytest.mark.parametrize("ignores", ["ends", "ignores"])
@pytest.mark.parametrize("way", ["spawn", "fork"])
def test_the_child_of_a_killed_process_ends(way: str, ignores: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), way, ignores],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    try:
        # Its end comes when nobody has the pipe any more.
        assert process.communicate(timeout=60)[0] == ""
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise
