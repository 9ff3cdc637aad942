"""Two ranks over gloo under every sharding strategy; launched by test_training_sharded.py.

    python -m torch.distributed.run --standalone --nproc_per_node 2 \
        tests/sharded_runs.py FOLDER RUN...

A RUN is "<model>/<strategy>", as "odd/ZeRO-3". Each asserts the strategy that it means to test and
leaves, on every rank, a record of the weights as the framework itself gathers them.
"""

import gc
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_strategies import MODELS, STRATEGIES, Plain, odd_llama, without_compiler
from soup_runs import rows

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.exits import leave
from soupkit.tensorfile import TensorFileWriter
from soupkit.training import Soup, params, weights
from soupkit.training.finish import finish_run

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True)
MERGES = (4, 6)
SAVED = 6
REFUSED, FAULT_OF_ONE, FAULT_OF_ZERO = 8, 10, 12
# Of each model: never trained, so never merged, but part of the checkpoint.
FROZEN = "model.layers.0.mlp.gate_proj.weight"


class Rows:
    """This rank's share of the data: all of it where there is one process."""

    def __init__(self) -> None:
        is_launched = dist.is_initialized()
        self.rank = dist.get_rank() if is_launched else 0
        self.share = slice(self.rank, self.rank + 1) if is_launched else slice(0, 2)
        self._train = torch.tensor([row["input_ids"] for row in rows(32, seed=1)])
        self._held_out = torch.tensor([row["input_ids"] for row in rows(4, seed=2)])

    def batch(self, step: int) -> torch.Tensor:
        """Of optimizer step 1, 2, ...: one row a rank."""
        return self._train[2 * step : 2 * step + 2][self.share]

    @property
    def held_out(self) -> torch.Tensor:
        return self._held_out.reshape(2, 2, -1)[self.share].flatten(0, 1)


class Judge:
    """The gate's score: real forwards, whose losses are recorded, and a verdict as told."""

    def __init__(self, strategy: Plain, data: Rows) -> None:
        self.strategy, self.data = strategy, data
        self.losses: list[float] = []
        self.trend = -1.0
        self.fails_at_call: int | None = None

    def __call__(self) -> float:
        self.losses.append(float(self.strategy.loss(self.data.held_out).detach()))
        if self.fails_at_call is not None:
            self.fails_at_call -= 1
            # After the forward, which is collective: the other ranks are not left in it.
            if self.fails_at_call == 0 and self.data.rank == 1:
                raise RuntimeError("out of memory")
        return self.trend * len(self.losses)


@contextmanager
def full_disk(rank: int):
    """Rank 0 cannot write, in the middle of what all ranks gather for it."""
    original, left = TensorFileWriter.write, [3]

    def write(self, *args, **kwargs):
        left[0] -= 1
        if rank == 0 and left[0] == 0:
            raise OSError("disk full")
        return original(self, *args, **kwargs)

    TensorFileWriter.write = write
    try:
        yield
    finally:
        TensorFileWriter.write = original


class Wholes:
    """How much of what soupkit gathers is in this rank's memory at one time, at most."""

    def __init__(self) -> None:
        self.now = self.peak = self.largest = 0

    def watch(self, module) -> None:
        original = module.assemble

        def assemble(*args, **kwargs):
            whole = original(*args, **kwargs)
            nbytes = whole.numel() * whole.element_size()
            self.now += nbytes
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, nbytes)
            weakref.finalize(whole, self.forget, nbytes)
            return whole

        module.assemble = assemble

    def forget(self, nbytes: int) -> None:
        self.now -= nbytes


def same_bits(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value.nan_to_num(), second[name].nan_to_num()) for name, value in first.items()
    )


def run(strategy: Plain, folder: Path, config: SoupConfig = CONFIG) -> dict:
    """Steps 1..7 with accepted merges at 4 and 6; then, under a launcher, one merge that is refused
    and two that fail on one rank.
    """
    data = Rows()
    strategy.assert_in_force()
    judge = Judge(strategy, data)
    record = {"start": strategy.whole(), "before": {}, "after": {}, "copies": {}, "restored": {}}
    soup = Soup(
        strategy.model,
        optimizer=strategy.optimizer,
        config=config,
        evaluate=judge,
        output_dir=folder,
    )

    def step(number: int) -> bool:
        strategy.step(data.batch(number))
        with torch.no_grad():
            # The user's own evaluation, after which FSDP2's root is not sharded.
            strategy.loss(data.held_out)
        record["before"][number] = strategy.whole()
        report = soup.step()
        if number == SAVED:
            soup.save(folder / "checkpoint")
        record["after"][number] = strategy.whole()
        record["copies"][number] = strategy.copies()
        return report is not None and report.accepted

    def fail(number: int) -> str:
        try:
            step(number)
        except (TrainingError, RuntimeError, OSError) as error:
            record["restored"][number] = strategy.whole()
            return str(error)
        return ""

    record["accepted"] = [number for number in range(1, 8) if step(number)]
    strategy.assert_in_force()
    record["losses"] = list(judge.losses)
    if dist.is_initialized():
        record["faults"] = faults(step, fail, judge)
        record["is_kept"] = is_kept(strategy, data)
        record["end"] = strategy.whole()
        # What finish() does, without ending the run: two passes over weights that ranks share.
        auto = ExportConfig(family=folder / "family", name="auto", encoding="auto")
        finish_run(soup._run, auto, step=soup.num_steps, save_companions=lambda _: None)
        soup.finish(export=ExportConfig(family=folder / "family", name="end", encoding="row-x4"))
    return record


def faults(step, fail, judge: Judge) -> dict:
    """Steps whose merges do not stay, so that the weights have to be the old ones, bit for bit."""
    found: dict = {}
    judge.trend = 1.0
    found["refused"] = not step(REFUSED)
    step(REFUSED + 1)
    judge.fails_at_call = 2
    found["one"] = fail(FAULT_OF_ONE)
    judge.fails_at_call = None
    step(FAULT_OF_ONE + 1)
    with full_disk(judge.data.rank):
        found["zero"] = fail(FAULT_OF_ZERO)
    return found


def is_kept(strategy: Plain, data: Rows) -> bool:
    """Whether a step at learning rate 0 leaves the masters and their copies as they are."""
    before, copies = strategy.whole(), strategy.copies()
    strategy.set_learning_rate(0.0)
    strategy.step(data.batch(13))
    return same_bits(before, strategy.whole()) and same_bits(copies, strategy.copies())


def named(run_name: str) -> Plain:
    """The strategy of "<model>/<strategy>"; "frozen" is "odd" with a frozen part."""
    model, kind = run_name.split("/")
    inner = MODELS.get(model, odd_llama)()
    if model == "frozen":
        inner.get_parameter(FROZEN).requires_grad_(False)
    return STRATEGIES.get(kind, Plain)(inner)


def config_of(run_name: str) -> SoupConfig:
    """A model called "reset" is "odd", whose momentum begins anew after a merge."""
    is_reset = run_name.startswith("reset/")
    return replace(CONFIG, optimizer_state="reset" if is_reset else "keep")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if any("ZeRO" in name for name in names):
        try:
            without_compiler()
        except ImportError as error:
            (folder / "no-deepspeed.txt").write_text(str(error))
            names = [name for name in names if "ZeRO" not in name]
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, Rows().batch(1).tolist())
    assert len(seen) == 2
    assert seen[0] != seen[1]
    wholes = Wholes()
    wholes.watch(params)
    wholes.watch(weights)
    for name in names:
        own = folder / name.replace("/", " ")
        wholes.peak = wholes.largest = 0
        record = run(named(name), own, config_of(name))
        record["wholes"] = {"peak": wholes.peak, "largest": wholes.largest, "left": wholes.now}
        torch.save(record, f"{own} {rank}.pt")
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
