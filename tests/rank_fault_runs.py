"""Two ranks over gloo that are not alike: threads, errors, replicas. Launched by
test_training_rank_faults.py.

python -m torch.distributed.run --standalone --nproc_per_node 2 tests/rank_fault_runs.py FOLDER
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from soupkit import SoupConfig
from soupkit.errors import MergeError, TrainingError
from soupkit.exits import leave
from soupkit.training import Soup, merging
from soupkit.training.state import SoupFolder

CONFIG = SoupConfig(merge_every_n_steps=1, rank=2, gate="none", feed_back=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(12)))


def step(live: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    live(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def threads(folder: Path) -> dict:
    """Rank 0 has room for more work ahead than rank 1; each matrix is gathered from both."""
    live = model()
    fully_shard(live)
    optimizer = torch.optim.SGD(live.parameters(), lr=0.01)
    soup = Soup(live, config=CONFIG, output_dir=folder)
    torch.set_num_threads(3 if dist.get_rank() == 0 else 1)
    for _ in range(3):
        step(live, optimizer)
        report = soup.step()
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    return {"accepted": report is not None and report.accepted, "threads": found}


def errors(folder: Path) -> dict:
    """Both ranks fail in one merge: rank 0's kind refuses the merge, rank 1's ends the run."""
    live = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(live.parameters(), lr=0.01)
    soup = Soup(live, config=CONFIG, output_dir=folder)
    step(live, optimizer)
    soup.step()
    original = merging.merged_values

    def fail(*args, **kwargs):
        raise MergeError("not finite") if dist.get_rank() == 0 else MemoryError

    merging.merged_values = fail
    step(live, optimizer)
    refused = soup.step()
    merging.merged_values = original
    step(live, optimizer)
    return {"refused": not refused.accepted, "next": soup.step().accepted}


def unpicklable(folder: Path) -> dict:
    """A caller's own kind of error cannot be sent to the other rank."""

    class OwnError(Exception):
        pass

    class OwnValueError(ValueError):
        pass

    found = {}
    for kind, at in ((OwnError, {0, 1}), (OwnError, {1}), (OwnValueError, {0})):

        def evaluate(kind=kind, at=at) -> float:
            if dist.get_rank() in at:
                raise kind("it")
            return 1.0

        soup = Soup(
            DistributedDataParallel(model()),
            config=SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True),
            evaluate=evaluate,
            output_dir=folder / f"{kind.__name__} {len(at)}",
        )
        try:
            soup.step()
        except Exception as error:  # noqa: BLE001 - its kind is what is tested
            found[f"{kind.__name__} {sorted(at)}"] = type(error).__name__
    try:
        soup._preparation.ranks.on_zero(evaluate)
    except ValueError as error:
        found["rank 0's"] = str(error)
    return found


def replicas(folder: Path) -> dict:
    """A weight that FSDP2 leaves whole is another one on each rank, as with parallel experts."""
    live = model()
    with torch.no_grad():
        live[1].weight.add_(dist.get_rank())
    fully_shard(live, ignored_params={live[1].weight})
    before = live[1].weight.detach().clone()
    try:
        Soup(live, config=CONFIG, output_dir=folder / "all")
    except TrainingError as error:
        text = str(error)
    else:
        text = "not refused"
    optimizer = torch.optim.SGD(live.parameters(), lr=0.0)
    soup = Soup(
        live,
        config=SoupConfig(
            merge_every_n_steps=1, rank=2, gate="none", exclude=("1.weight",), feed_back=True
        ),
        output_dir=folder / "others",
    )
    for _ in range(2):
        step(live, optimizer)
        soup.step()
    return {"text": text, "untouched": torch.equal(before, live[1].weight.detach())}


def stages(folder: Path) -> str:
    """Each rank has a layer of its own, sharded or not."""
    live = nn.Sequential(nn.Linear(7, 7))
    live.add_module(f"of rank {dist.get_rank()}", nn.Linear(7, 7))
    fully_shard(live)
    try:
        Soup(live, config=CONFIG, output_dir=folder)
    except TrainingError as error:
        return str(error)
    return "not refused"


def resumed(folder: Path) -> dict:
    """Rank 0 forgets later steps late, and stores the first cuts of a partner that stays."""
    live = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(live.parameters(), lr=0.01)
    scores = iter(range(100))
    options = {
        "config": SoupConfig(merge_every_n_steps=1, rank=2, undo="memory", feed_back=True),
        "evaluate": lambda: float(next(scores)),
        "output_dir": folder,
    }
    soup = Soup(live, **options)
    step(live, optimizer)
    soup.step()
    again = Soup(live, **options)
    again.resume(1)
    original = SoupFolder.forget_after

    def late(self, after: int) -> list[int]:
        time.sleep(1.0)
        return original(self, after)

    SoupFolder.forget_after = late
    step(live, optimizer)
    again.step()
    SoupFolder.forget_after = original
    partner = again._run.state.partner
    files = again._run.journal.folder.cuts_paths(2)
    return {"partner": [partner.step, partner.cuts], "files": len(files)}


def loaded(folder: Path) -> dict:
    """A checkpoint that one rank has loaded wrongly; and weights that part after a checkpoint."""
    live = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(live.parameters(), lr=0.01)
    soup = Soup(live, config=CONFIG, output_dir=folder)
    for _ in range(2):
        step(live, optimizer)
        soup.step()
    run, again = soup._run, Soup(live, config=CONFIG, output_dir=folder)
    if dist.get_rank() == 1:
        with torch.no_grad():
            live.module[0].bias[0] += 1
    found = {}
    for name, act in (
        ("resumed", lambda: again.resume(2)),
        ("saved", lambda: run.journal.mark_changed(2, run.state)),
    ):
        try:
            act()
            found[name] = "nothing"
        except TrainingError as error:
            found[name] = str(error)
        # Nobody waits: the next collective is everybody's.
        dist.barrier()
    return found


def main() -> None:
    # A rank that waits for ever fails the test sooner than that.
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    folder = Path(sys.argv[1])
    mine = {part.__name__: part(folder / part.__name__) for part in PARTS}
    every = [None, None]
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()


PARTS = (threads, errors, unpicklable, replicas, stages, resumed, loaded)

if __name__ == "__main__":
    main()
    leave()
