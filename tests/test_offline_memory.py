"""Promises of the offline tools: the memory of their own does not grow with the model.

Only RssAnon counts: pages of mapped files are the system's to take back. Each tool runs in a
process of its own, which looks at itself every few milliseconds.
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from soupkit.files import atomic_write_json
from soupkit.shards import ShardWriter
from soupkit.tensorfile import TensorSpec

THREADS = 2
MB = 2**20
# What a tool may take: its modules and reports, what the allocator keeps, and for each thread some
# blocks and the packed rows of a matrix. 2-core AMD EPYC: merge 40 MB, export 54, restore 12,
# verify 26. The embedding alone is more, as it is stored, already in the small model.
MOST = 96 * MB


def shapes_of(rows: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a model: an embedding of `rows` and matrices of 32 MB in bfloat16."""
    matrices = {f"model.layers.{index}.mlp.up_proj.weight": (4096, 4096) for index in range(layers)}
    return {
        "model.embed_tokens.weight": (rows, 4096),
        **matrices,
        "model.norm.weight": (4096,),
    }


PROBE = """
import sys, threading, time
from pathlib import Path
import torch
import soupkit.offline, soupkit.export, soupkit.restore, soupkit.verify
from soupkit.checkpoint import open_checkpoint
from soupkit.merge import MergeRule

tool, root = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(int(sys.argv[3]))


def own():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def merge():
    base, ours = open_checkpoint(root / "base"), open_checkpoint(root / "ft")
    soupkit.offline.merge_checkpoints(
        base, [ours, base], out=root / "merged", rule=MergeRule("mean")
    )


def export():
    base, ours = open_checkpoint(root / "base"), open_checkpoint(root / "ft")
    soupkit.export.export_variant(base, ours, family=root / "family", name="v")


def restore():
    soupkit.restore.restore(root / "family", "v", out=root / "dense", dtype=torch.bfloat16)


def verify():
    assert soupkit.verify.verify_family(root / "family") == []


def watch():
    global most
    while not ended.wait(0.005):
        most = max(most, own())


torch.ones(100, 100) @ torch.ones(100, 100)
before = most = own()
ended = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
try:
    {"merge": merge, "export": export, "restore": restore, "verify": verify}[tool]()
finally:
    ended.set()
    watcher.join()
print(max(most, own()) - before)
"""


def write_model(folder: Path, step: float, shapes: dict[str, tuple[int, ...]]) -> None:
    """A model of one block of entries over and over, `step` beside those of another."""
    folder.mkdir()
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(2**20, generator=generator) * 0.02
    block += step * torch.randn(2**20, generator=generator)
    block = block.bfloat16()
    with closing(ShardWriter(folder, specs, max_shard_bytes=300 * MB)) as writer:
        for name, spec in specs.items():
            entries = spec.nbytes // 2
            for start in range(0, entries, len(block)):
                writer.write(name, block[: entries - start], first_entry=start)
        writer.finish()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": shapes[next(iter(shapes))][0]}
    atomic_write_json(folder / "config.json", config)


def growth(tool: str, root: Path) -> int:
    """Bytes of RssAnon that a tool needed at most, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, tool, str(root), str(THREADS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("rows", "layers"),
    [
        pytest.param(16384, 4, id="0.25 GB"),
        # Half a minute of CPU time.
        pytest.param(65536, 16, id="1 GB", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_model(tmp_path, rows, layers):
    shapes = shapes_of(rows, layers)
    write_model(tmp_path / "base", 0.0, shapes)
    write_model(tmp_path / "ft", 0.002, shapes)
    # A restore and a verify need the family that the export makes.
    found = {tool: growth(tool, tmp_path) for tool in ("merge", "export", "restore", "verify")}
    assert max(found.values()) < MOST < 2 * 4096 * rows, {
        tool: f"{nbytes / MB:.0f} MB" for tool, nbytes in found.items()
    }
