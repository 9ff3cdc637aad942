"""Small adapters and checks of a whole pool on disk, shared by the tests of the pool."""

import hashlib
import json
from pathlib import Path

import torch

from soupkit.adapter_folder import Module, open_adapter, write_adapter
from soupkit.factored import Pair
from soupkit.pool import AdapterPool
from soupkit.pool_manifest import PROVENANCE_NAME

SHAPES = {"m.q": (6, 9), "m.v": (4, 9), "m.o": (9, 6)}
# About the bytes of an adapter here, as a slot.
ONE = 1700


def make_adapter(
    folder: Path,
    seed: int,
    *,
    ranks: tuple[int, int] = (2, 2),
    names=tuple(SHAPES),
    base: str = "org/base",
    revision: str | None = None,
    scale: float = 2.0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for name in names:
        rows, columns = SHAPES[name]
        rank = int(torch.randint(ranks[0], ranks[1] + 1, (), generator=generator))
        a = torch.randn(rank, columns, generator=generator)
        b = torch.randn(rows, rank, generator=generator) * size
        modules[name] = Module("linear", Pair(a.to(dtype), b.to(dtype), scale))
    return write_adapter(folder, modules, base=base, revision=revision)


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """Dense, float64, of every module that is there."""
    return {
        name: module.pair.scale * (module.pair.b.double() @ module.pair.a.double())
        for name, module in open_adapter(folder).load().items()
    }


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder with its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_pool(folder: Path, *, is_clean: bool = True) -> AdapterPool:
    """Assert all that must hold of a pool at any time (4.7.4)."""
    pool = AdapterPool.open(folder)
    manifest = pool.read()
    assert manifest.nbytes <= manifest.rule.capacity_bytes
    assert manifest.rule.slots is None or len(manifest.slots) <= manifest.rule.slots
    assert sum(len(slot.tasks) for slot in manifest.slots) == len(manifest.tasks)
    for slot in manifest.slots:
        path = folder / "slots" / slot.folder
        files = list(path.iterdir())
        assert sum(file.stat().st_size for file in files) == slot.nbytes
        adapter = open_adapter(path)
        adapter.load()
        assert adapter.info.digest() == slot.digest
        told = json.loads((path / PROVENANCE_NAME).read_text())
        assert [item["task"] for item in told["history"]] == [item.task for item in slot.history]
        assert {slot.number} == {manifest.tasks[task] for task in slot.tasks}
        assert {pool.resolve(task) for task in slot.tasks} == {path.absolute()}
    if is_clean:
        listed = {slot.folder for slot in manifest.slots}
        assert {path.name for path in (folder / "slots").iterdir()} == listed
        assert {path.name for path in folder.iterdir()} == {"pool.json", "slots", ".lock"}
    return pool
