"""One training run under one strategy, timed by its own ranks; launched by strategies.py.

    python -m soupkit.bench.strategy ZeRO-3 --layers 30 --ranks 2 --out figures.json

A Llama with the matrices of SmolLM2-135M on random tokens, AdamW, 1,024 tokens a step. Merge points
are the even steps: the first captures, the second merges from nothing, later ones start from what
the one before found. Rank 0 writes seconds and bytes as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soupkit.config import SoupConfig
from soupkit.exits import leave
from soupkit.training import Soup

STRATEGIES = ("one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
TOKENS, LENGTH = 1024, 128
_SAMPLE_SECONDS = 0.002


def llama(layers: int) -> Any:
    """SmolLM2-135M's shapes, with that many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class Run:
    """A model under a strategy, and its step."""

    def __init__(self, strategy: str, layers: int, rows: int, device: torch.device) -> None:
        """Args: rows: sequences a rank and step."""
        inner: Any = llama(layers).to(device)
        if strategy == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            for layer in inner.model.layers:
                fully_shard(layer)
            fully_shard(inner)
        optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
        self.model: Any = inner
        self.optimizer: Any = optimizer
        if strategy == "DDP":
            self.model = DistributedDataParallel(inner)
        if strategy.startswith("ZeRO"):
            self.model = _engine(inner, optimizer, stage=int(strategy[-1]), rows=rows)
            self.optimizer = self.model.optimizer
        self._is_engine = strategy.startswith("ZeRO")

    def step(self, tokens: Tensor) -> None:
        """One optimizer step."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        if self._is_engine:
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def _engine(model: nn.Module, optimizer: Any, *, stage: int, rows: int) -> nn.Module:
    import deepspeed
    import deepspeed.ops

    if not torch.cuda.is_available():
        # Its shared-memory all-reduce for inference would be compiled, and is not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    engine: nn.Module = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine


class Peak:
    """The most bytes in use inside a `with` block beyond those at its start, in `found`.

    Device memory on CUDA; on the CPU the process's own pages (mapped files are none), sampled.
    """

    def __init__(self, device: torch.device) -> None:
        """Args: device: of the model."""
        self._device = device
        self._stop = threading.Event()
        self._is_paused = False
        self._thread: threading.Thread | None = None
        self.found = 0

    def __enter__(self) -> Peak:
        """Begin."""
        self._before = self._highest = self._in_use()
        self._begin()
        if self._device.type != "cuda":
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self._take()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.found = self._highest - self._before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look inside the block: the forwards of a gate are not the merge's memory."""
        self._take()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._begin()

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _take(self) -> None:
        if self._device.type == "cuda":
            self._highest = max(self._highest, torch.cuda.max_memory_allocated(self._device))

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            if not self._is_paused:
                self._highest = max(self._highest, self._in_use())

    def _in_use(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _own_pages()


def _own_pages() -> int:
    """Bytes of the process that are backed by no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(strategy: str, *, layers: int, merges: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step, of every merge and of its scoring, and bytes; the same on all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    rows = max(1, TOKENS // LENGTH // ranks)
    run = Run(strategy, layers, rows, device)
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randint(0, 49152, (2 * merges + 6, rows, LENGTH), generator=generator)
    batches = batches.to(device)

    peak = Peak(device)

    def evaluate() -> float:
        with peak.paused():
            return float(run.model(input_ids=batches[0], labels=batches[0]).loss)

    soup = Soup(
        run.model,
        optimizer=run.optimizer,
        config=SoupConfig(merge_every_n_steps=2, rank=64, feed_back=True),
        evaluate=evaluate,
        output_dir=folder,
    )
    steps, extra = [], []
    for index, batch in enumerate(batches[2:]):
        started = time.perf_counter()
        run.step(batch)
        steps.append(time.perf_counter() - started)
        peak = Peak(device)
        with peak:
            soup.step()
        if index % 2:
            extra.append(peak.found)
    soup.finish()
    matrices = soup.reports[-1].matrices
    cut = [matrix for matrix in matrices if matrix.rank]
    return {
        "strategy": strategy,
        "ranks": ranks,
        "device": device.type,
        "step_seconds": statistics.median(steps[1:]),
        "steps": steps[1:],
        "merges": [report.seconds - report.score_seconds for report in soup.reports],
        "scores": [report.score_seconds for report in soup.reports],
        "extra_bytes": max(extra[1:]),
        "largest_bytes": 4 * max(math.prod(matrix.shape) for matrix in matrices),
        # Three truncations of each matrix wait in host memory for the verdict.
        "factor_bytes": sum(3 * 4 * matrix.rank * sum(matrix.shape) for matrix in cut) // ranks,
        "solvers": sorted({matrix.solver for matrix in matrices}),
    }


def main() -> None:
    """Run one strategy and write its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--merges", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_launched:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    shared = options.out.parent / "run"
    figures = measure(options.strategy, layers=options.layers, merges=options.merges, folder=shared)
    if not is_launched or dist.get_rank() == 0:
        options.out.write_text(json.dumps(figures))
    if is_launched:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
