"""The moving average on two ranks over gloo; launched by test_training_average.py.

    python -m torch.distributed.run --standalone --nproc_per_node 2 \
        tests/average_runs.py FOLDER RUN...

A RUN is "<model>/<strategy>" of sharded_strategies.py. What the framework gathers by its own calls
is averaged by numpy and compared, bit for bit.
"""

import gc
import json
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from sharded_runs import Rows, named
from sharded_strategies import Plain, without_compiler
from torch import Tensor

from soupkit.errors import SoupkitError
from soupkit.exits import leave
from soupkit.training.average import Average
from soupkit.training.ema import decay_of_update
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.served import on_zero_reading
from soupkit.training.snapshot import Snapshot, write_tensors

STEPS = 6
STORED_AFTER = 3
PLACES = ("device", "host", "disk")


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether `second` has all of `first`, in the same bits."""
    return all(torch.equal(bits(value), bits(second[name])) for name, value in first.items())


def read(average: Average) -> dict[str, Tensor]:
    return {name: average.read(name).clone() for name in average.names}


class Expected:
    """The average of whole float32 weights, by numpy."""

    def __init__(self) -> None:
        self.values: dict[str, numpy.ndarray] = {}
        self.num_updates = 0

    def update(self, weights: dict[str, Tensor]) -> None:
        share = numpy.float32(1 - decay_of_update(0.9, self.num_updates))
        for name, weight in weights.items():
            live = weight.float().numpy()
            mine = self.values.get(name)
            self.values[name] = live.copy() if mine is None else mine + share * (live - mine)
        self.num_updates += 1

    def tensors(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(self.values[name]) for name in names}


def swaps(strategy: Plain, average: Average, data: Rows, ranks: Ranks) -> dict[str, bool]:
    """Scores inside, which end well, fail on one rank, or are interrupted on one rank."""
    found: dict[str, bool] = {}
    held = read(average)
    for end in ("well", "fault", "interrupt"):
        before, copies = strategy.whole(), strategy.copies()

        def score(end: str = end) -> float:
            loss = float(strategy.loss(data.held_out).detach())
            if end == "fault" and ranks.rank == 1:
                raise RuntimeError("out of memory")
            return loss

        raised = ""
        try:
            with torch.no_grad(), average.swapped():
                inside, inside_copies = strategy.whole(), strategy.copies()
                ranks.on_each(score)
                if end == "interrupt" and ranks.rank == 1:
                    raise KeyboardInterrupt
        except (RuntimeError, SoupkitError, KeyboardInterrupt) as error:
            raised = type(error).__name__
        rounded = {name: value.to(inside_copies[name].dtype) for name, value in held.items()}
        found[f"{end}: the average was in"] = same(held, inside) and same(rounded, inside_copies)
        found[f"{end}: the weights are back"] = same(before, strategy.whole())
        found[f"{end}: their copies are back"] = same(copies, strategy.copies())
        wanted = {"fault": True, "interrupt": ranks.rank == 1}.get(end, False)
        found[f"{end}: raised where it should be"] = bool(raised) == wanted
    return found


def run(name: str, folder: Path) -> dict[str, bool]:
    """A few steps with averages in all places, against the same steps without any."""
    data, ranks = Rows(), Ranks.current()
    alone = named(name)
    for number in range(1, STEPS + 1):
        alone.step(data.batch(number))
    unseen = alone.whole()
    del alone
    strategy, expected = named(name), Expected()
    strategy.assert_in_force()
    store = ParamStore(strategy.model)
    averages = {place: Average(store, ranks=ranks, place=place, folder=folder) for place in PLACES}
    found: dict[str, bool] = {}
    path = folder / "average.safetensors"
    for number in range(1, STEPS + 1):
        strategy.step(data.batch(number))
        expected.update(strategy.whole())
        for average in averages.values():
            average.update(decay_of_update(0.9, average.num_updates))
        if number == STORED_AFTER:
            on_zero_reading(
                ranks, averages["disk"], lambda served: write_tensors(path, served, durable=False)
            )
            resumed = Average(store, ranks=ranks, place="host")
            resumed.load(Snapshot(path), num_updates=number)
            averages["resumed"] = resumed
            found.update(swaps(strategy, averages["host"], data, ranks))
    wanted = expected.tensors(store.names)
    for place, average in averages.items():
        found[f"{place}: equals numpy's"] = same(wanted, read(average))
    rounded = averages["device"].rounded()
    found["a rank 0 file"] = on_zero_reading(
        ranks, rounded, lambda served: same({n: served.tensor(n) for n in served.names}, wanted)
    )
    found["training did not see it"] = same(unseen, strategy.whole())
    found["it was sharded"] = store.is_whole or averages["host"].nbytes < 0.9 * store.nbytes
    return found


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    results: dict[str, object] = {}
    if any("ZeRO" in name for name in names):
        try:
            without_compiler()
        except ImportError as error:
            results["no DeepSpeed"] = str(error)
            names = [name for name in names if "ZeRO" not in name]
    for index, name in enumerate(names):
        place = folder / f"run-{index}"
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        found = run(name, place)
        seen: list = [None, None]
        dist.all_gather_object(seen, found)
        results[name] = {key: [one[key] for one in seen] for key in found}
        gc.collect()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
