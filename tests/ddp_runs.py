"""Two ranks over gloo; launched by test_training_ddp.py through torch.distributed.run.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/ddp_runs.py FOLDER BASE

Each part asserts the strategy that it means to test, and leaves its weights in FOLDER for the test
to compare. Parts: a plain DDP loop, a merge that fails, ranks that differ, Accelerate, Trainer,
a Trainer that leaves FSDP out.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState
from soup_runs import AccelerateLoop, load, make_trainer, optimizer_state, rows, weights_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
from soupkit.exits import leave
from soupkit.training import Soup, SoupCallback
from soupkit.training.ranks import Ranks
from soupkit.training.weights import strategy_name

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, feed_back=True)


def equal_on_all_ranks(model: nn.Module) -> bool:
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, [v.numpy().tobytes() for v in weights_of(model).values()])
    return all(digest == digests[0] for digest in digests)


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def plain_loop(base: Path, folder: Path) -> dict:
    """SGD on the mean over ranks: what one process does with both ranks' rows in one batch."""
    rank = dist.get_rank()
    inner = load(base)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    held_out = torch.tensor([row["input_ids"] for row in rows(4, seed=2)])

    def evaluate() -> float:
        own = held_out[2 * rank : 2 * rank + 2]
        return float(inner(input_ids=own, labels=own).loss)

    soup = Soup(model, optimizer=optimizer, config=CONFIG, evaluate=evaluate, output_dir=folder)
    batches = [torch.tensor([row["input_ids"]]) for row in rows(12, seed=1)]
    seen, equal = [], []
    for step in range(6):
        batch = batches[2 * step + rank]
        seen.append(batch.tolist())
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        soup.step()
        equal.append(equal_on_all_ranks(inner))
    if rank == 0:
        torch.save(weights_of(inner), folder / "weights.pt")
    soup.finish()
    return {
        "named": [strategy_name(layer) for layer in (model, torch.compile(model), inner)],
        "equal": all(equal),
        "different_data": gathered(seen)[0] != gathered(seen)[1],
        "reports": [[r.accepted, r.metric_current, r.metric_merged] for r in soup.reports],
        "same_reports": len({str(r) for r in gathered([r.to_json() for r in soup.reports])}) == 1,
    }


def failing_merge(base: Path, folder: Path) -> dict:
    """One rank's matrix cannot be merged: every rank refuses and has its old weights back."""
    inner = load(base)
    soup = Soup(
        DistributedDataParallel(inner),
        config=SoupConfig(merge_every_n_steps=1, gate="none", rank=2, feed_back=True),
        output_dir=folder,
    )
    soup.step()
    with torch.no_grad():
        inner.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    before = weights_of(inner)
    report = soup.step()
    same = [
        torch.equal(v.nan_to_num(), before[n].nan_to_num()) for n, v in weights_of(inner).items()
    ]
    return {
        "accepted": gathered(report.accepted),
        "named": all("up_proj" in reason for reason in gathered(report.reason)),
        "restored": gathered(all(same)),
    }


def differing_ranks(folder: Path) -> dict:
    """Not wrapped, so each rank has weights of its own."""
    torch.manual_seed(dist.get_rank())
    try:
        Soup(nn.Linear(3, 3), config=SoupConfig(gate="none", feed_back=True), output_dir=folder)
    except TrainingError as error:
        return {"refused": gathered("different weights" in str(error))}
    return {"refused": gathered(False)}


def failing_file(folder: Path) -> dict:
    """TB07: what fails on rank 0 alone fails everywhere, so nobody waits for ever."""
    ranks = Ranks.current()

    def write() -> None:
        raise OSError("disk full")

    try:
        ranks.on_zero(write)
    except TrainingError as error:
        return {"everywhere": gathered("disk full" in str(error))}
    return {"everywhere": gathered(False)}


def accelerate_loop(base: Path, folder: Path) -> dict:
    whole = AccelerateLoop(base, folder / "whole", CONFIG)
    assert whole.accelerator.distributed_type == DistributedType.MULTI_CPU
    assert whole.accelerator.num_processes == 2
    assert isinstance(whole.model, DistributedDataParallel)
    whole.train(7)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    first = AccelerateLoop(base, folder / "run", CONFIG)
    first.train(6, save_at=(3, 5))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    second = AccelerateLoop(base, folder / "run", CONFIG)
    second.accelerator.load_state(str(folder / "run" / "checkpoints" / "checkpoint_0"))
    second.train(7, start=3)
    same = [torch.equal(v, weights_of(second.inner)[n]) for n, v in weights_of(whole.inner).items()]
    moments = zip(optimizer_state(whole.optimizer), optimizer_state(second.optimizer), strict=True)
    second.soup.finish(export=ExportConfig(family=folder / "family", name="two"))
    return {
        "different_data": gathered(whole.seen)[0] != gathered(whole.seen)[1],
        "equal": equal_on_all_ranks(whole.inner),
        "resumed": gathered(all(same) and all(torch.equal(*pair) for pair in moments)),
        "merges": [report.step for report in second.soup.reports],
    }


class FailsOnRank1(Trainer):
    """The second score's first batch fails on one rank only, as running out of memory would."""

    def prediction_step(self, *args, **kwargs):
        result = super().prediction_step(*args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        if dist.get_rank() == 1 and self.calls == 4:
            raise RuntimeError("out of memory")
        return result


def failing_evaluation(base: Path, folder: Path) -> dict:
    config = SoupConfig(merge_every_n_steps=1, rank=3, gate_batches=2, feed_back=True)
    trainer = make_trainer(base, folder, [SoupCallback(config)], trainer_class=FailsOnRank1)
    try:
        trainer.train()
    except (TrainingError, RuntimeError) as error:
        return {"everywhere": gathered("out of memory" in str(error))}
    return {"everywhere": gathered(False)}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Watching(Trainer):
    """Notes what data this rank sees."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), inputs["input_ids"].tolist()]
        assert isinstance(model, DistributedDataParallel)
        return super().training_step(model, inputs, *args, **kwargs)


def trainer_run(base: Path, folder: Path) -> dict:
    settings = {"trainer_class": Watching, "save_strategy": "steps", "save_steps": 1}
    export = ExportConfig(family=folder / "family", name="two")
    whole = make_trainer(base, folder / "whole", [SoupCallback(CONFIG, export=export)], **settings)
    assert whole.args.world_size == 2
    whole.train()
    make_trainer(base, folder / "run", [SoupCallback(CONFIG), StopAt(5)], **settings).train()
    again = SoupCallback(CONFIG)
    resumed = make_trainer(base, folder / "run", [again], **settings)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    same = [
        torch.equal(v, weights_of(resumed.model)[n]) for n, v in weights_of(whole.model).items()
    ]
    return {
        "different_data": gathered(whole.seen)[0] != gathered(whole.seen)[1],
        "equal": equal_on_all_ranks(whole.model),
        "resumed": gathered(all(same)),
        "merges": [report.step for report in again.reports],
    }


class Strategy(TrainerCallback):
    """What soupkit says of the run, and what the run is."""

    def __init__(self, callback: SoupCallback) -> None:
        self.callback = callback

    def on_step_end(self, args, state, control, **kwargs):
        store = self.callback._run.store
        self.said = store.strategy
        self.is_plain = all(type(p) is nn.Parameter for p in store.model.parameters())
        self.is_ddp = isinstance(store.model, DistributedDataParallel)


def ignored_fsdp(base: Path, folder: Path) -> dict:
    """On a CPU Trainer leaves fsdp= out in silence."""
    callback = SoupCallback(CONFIG)
    strategy = Strategy(callback)
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    settings = {"fsdp": True, "fsdp_config": fsdp, "max_steps": 2}
    make_trainer(base, folder, [callback, strategy], **settings).train()
    return {"said": strategy.said, "is": strategy.is_plain and strategy.is_ddp}


def main() -> None:
    folder, base = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    results = {
        "plain": plain_loop(base, folder / "plain"),
        "failing_merge": failing_merge(base, folder / "failing"),
        "differing": differing_ranks(folder / "differing"),
        "failing_file": failing_file(folder),
        "failing_evaluation": failing_evaluation(base, folder / "failing_evaluation"),
        "accelerate": accelerate_loop(base, folder / "accelerate"),
        "trainer": trainer_run(base, folder / "trainer"),
        "ignored_fsdp": ignored_fsdp(base, folder / "ignored_fsdp"),
    }
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
