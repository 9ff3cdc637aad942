"""Loading a variant: from a cold disk against a raw read, and what others notice of it.

The file is of the size that a large model's variant has. The kernel's cached pages of it are
dropped before each read; on a file system in memory that has no effect, and both reads are warm.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from soupkit.bench.rows import Row
from soupkit.bench.streams import ask, serving
from soupkit.bundle import LoadedVariant, VariantRef, open_variant
from soupkit.family import open_family
from soupkit.files import atomic_write_json
from soupkit.fingerprint import num_threads, tensor_digest
from soupkit.manifest import MANIFEST_NAME, WEIGHTS_NAME, Manifest, TensorEntry
from soupkit.serving.admin import Admin, LoadRequest, UnloadRequest
from soupkit.serving.catalog import load_threads
from soupkit.serving.service import Service
from soupkit.tensorfile import TensorFileWriter, as_bytes

COLD_GOAL = 0.9  # of the speed of a raw read
GAP_GOAL, GAP_GOAL_SECONDS = 3.0, 0.05  # of the longest gap without a load; the larger counts
SIDE = 4096  # of a matrix, 2 MiB of signs
PIECE_BYTES = 4 << 20
STREAMS = 4


def run(family: Path, *, quick: bool) -> list[Row]:
    """Rows of cold loads, and of the gaps in streams of the family's base during one.

    Raises:
        BundleError: no family. ServingError: it cannot be served.
        ValueError: the family has no variant.
    """
    names = sorted(open_family(family).variants)
    if not names:
        raise ValueError(f"{family} has no variant to load; `soupkit export` adds one")
    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch) / "large"
        write_variant(large, matrices=16 if quick else 128)
        rows = cold_rows(large, repeats=3 if quick else 9)
        seconds, repeats = (1.0, 1) if quick else (4.0, 3)
        gaps = _gap_row(family, names[0], large, seconds=seconds, repeats=repeats)
        return [*rows, asyncio.run(gaps)]


def write_variant(folder: Path, *, matrices: int) -> None:
    """A variant with random signs, as large as asked for, synced to the disk."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    entries = tuple(
        TensorEntry(
            f"layers.{i:03}.weight",
            "delta",
            (SIDE, SIDE),
            "BF16",
            planes=1,
            scale_axis="row",
            bytes=SIDE * SIDE // 8 + 4 * SIDE,
            encoding="row",
        )
        for i in range(matrices)
    )
    specs = {name: spec for entry in entries for name, spec in entry.stored_specs().items()}
    tensors = {
        name: torch.randint(256, spec.shape, dtype=torch.uint8, generator=generator)
        if spec.dtype == torch.uint8
        else torch.rand(spec.shape, generator=generator)
        for name, spec in specs.items()
    }
    writer = TensorFileWriter(folder / WEIGHTS_NAME, specs)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    with (folder / WEIGHTS_NAME).open("rb") as file:
        os.fsync(file.fileno())
    manifest = Manifest("large", "sha256:" + "0" * 64, tensor_digest(tensors), entries)
    atomic_write_json(folder / MANIFEST_NAME, manifest.to_json())


def forget(path: Path) -> None:
    """Drops the kernel's cached pages of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(path: Path) -> None:
    """Reads a file from its start to its end, into one small buffer."""
    piece = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def cold_rows(folder: Path, *, repeats: int) -> list[Row]:
    """Cold loads and hashing alone, against raw reads in turn with them; MB/s."""
    path = folder / WEIGHTS_NAME
    megabytes = path.stat().st_size / 1e6
    variant = open_variant(folder)
    loaded = variant.load()
    tensors = [part for delta in loaded.deltas.values() for part in (delta.packed, delta.scale)]
    parts = [as_bytes(part) for part in tensors if part is not None]
    threads, few = num_threads(), load_threads()
    pool = ThreadPoolExecutor(threads)
    acts: dict[str, Callable[[], object]] = {
        "raw": lambda: read_raw(path),
        f"cold load, {megabytes:.0f} MB": variant.load,
        f"cold load as in a server, {few} {'thread' if few == 1 else 'threads'}": lambda: (
            variant.load(threads=few)
        ),
        f"hashing alone, in memory, {threads} threads": lambda: list(
            pool.map(lambda part: hashlib.sha256(part).digest(), parts)
        ),
    }
    speeds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats):
        for name, act in acts.items():
            forget(path)
            started = time.perf_counter()
            act()
            speeds[name].append(megabytes / (time.perf_counter() - started))
    pool.shutdown()
    raw = speeds.pop("raw")
    rows = [
        _ratio_row(name, found, raw, goal=COLD_GOAL if i == 0 else None)
        for i, (name, found) in enumerate(speeds.items())
    ]
    if rows[-1].ratio < COLD_GOAL:
        rows[-1] = replace(rows[-1], name=f"{rows[-1].name}: it limits")
    return rows


def _ratio_row(name: str, found: Sequence[float], raw: Sequence[float], goal: float | None) -> Row:
    ratios = [mine / theirs for mine, theirs in zip(found, raw, strict=True)]
    return Row(
        name=name,
        value=median(found),
        unit="MB/s",
        baseline=f"raw cold read, {median(raw):.0f} MB/s",
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        goal=goal,
        better="higher",
    )


async def _gap_row(family: Path, name: str, large: Path, *, seconds: float, repeats: int) -> Row:
    """The longest gap in streams of the base while a variant loads for so many seconds."""
    with_load: list[float] = []
    without: list[float] = []
    async with serving(family) as service:
        admin = Admin(service)
        _slow_down(service, large, seconds)
        await longest_gap(service, asyncio.sleep(seconds / 4))
        for _ in range(repeats):
            without.append(await longest_gap(service, asyncio.sleep(seconds)))
            load = admin.load(LoadRequest(lora_name=name, lora_path=None, pinned=None))
            with_load.append(await longest_gap(service, load))
            await admin.unload(UnloadRequest(lora_name=name))
    ratios = [mine / alone for mine, alone in zip(with_load, without, strict=True)]
    return Row(
        name=f"longest gap of other streams, {seconds:g} s load",
        value=1e3 * median(with_load),
        unit="ms",
        baseline=f"without a load, {1e3 * median(without):.1f} ms",
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        goal=max(GAP_GOAL, GAP_GOAL_SECONDS / median(without)),
    )


def _slow_down(service: Service, large: Path, seconds: float) -> None:
    """Has each load of a variant read, hash and check a large one, cold, over and over first."""
    original = service.catalog.load

    def load(ref: VariantRef) -> LoadedVariant:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            forget(large / WEIGHTS_NAME)
            open_variant(large).load(threads=load_threads())
        return original(ref)

    setattr(service.catalog, "load", load)  # noqa: B010 - of this instance


async def longest_gap(service: Service, work: Any) -> float:
    """Seconds of the longest gap between tokens of streams that run until `work` is done."""
    task = asyncio.ensure_future(work)
    tokens = max(2, min(64, service.engine.max_context - 32))

    async def stream(number: int) -> float:
        longest = 0.0
        while True:
            found = await ask(service, "base", tokens=tokens, salt=number)
            longest = max(longest, *found.gaps)
            if task.done():
                return longest

    longest = max(await asyncio.gather(*(stream(i) for i in range(STREAMS))))
    await task
    return longest
