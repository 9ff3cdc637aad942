"""A process of a group ends with 0, whatever gloo's threads do at that time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Rank 1 ends while a thread of gloo still holds a tensor of Python's, as happens to a collective
# that is over where the thread is slow to let go. Without `leave` this process hangs or aborts.
RANK = """
import atexit, os, sys, torch, torch.distributed as dist
from soupkit.exits import leave

rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 0:
    sys.stdin.read()
    os._exit(0)
atexit.register(lambda: print("a logger wrote what it held"))

def begin():
    tensor = torch.ones(3)
    dist.broadcast(tensor, 0, async_op=True)
    sys.held = dist.group.WORLD, tensor.untyped_storage()

begin()
print("done")
leave()
"""


def start(rank: int, port: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_ends_with_0_while_a_thread_of_gloo_holds_a_tensor() -> None:
    first = start(0, "0")
    try:
        assert first.stdout is not None
        second = start(1, first.stdout.readline())
        printed, _ = second.communicate(timeout=120)
        assert (second.returncode, printed) == (0, "done\na logger wrote what it held\n")
    finally:
        first.communicate("")


SCRIPTS = [
    path
    for folder in ("soupkit", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.startswith("test_")
    if path.name.endswith("sft.py") or "dist.destroy_process_group()\n\n\n" in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_process_of_a_group_leaves(path: Path) -> None:
    assert "    leave()\n" in path.read_text()


def test_the_scripts_are_found() -> None:
    assert len(SCRIPTS) == 13
