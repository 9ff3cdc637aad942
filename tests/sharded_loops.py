"""Loops without a framework over a DeepSpeed engine or FSDP2, with checkpoints of their own: parts
of sharded_frameworks.py.
"""

from pathlib import Path

from ddp_runs import gathered
from sharded_runs import Judge, Rows, same_bits
from sharded_strategies import STRATEGIES, DeepSpeed
from soup_runs import tiny_llama
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict

from soupkit import ExportConfig, SoupConfig
from soupkit.training import Soup


def save_checkpoint(strategy, folder: Path) -> None:
    if isinstance(strategy, DeepSpeed):
        strategy.model.save_checkpoint(str(folder), tag="here")
        return
    model, optimizer = state_dict.get_state_dict(strategy.model, strategy.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder))


def load_checkpoint(strategy, folder: Path) -> None:
    if isinstance(strategy, DeepSpeed):
        strategy.model.load_checkpoint(str(folder), tag="here")
        return
    model, optimizer = state_dict.get_state_dict(strategy.model, strategy.optimizer)
    states = {"model": model, "optimizer": optimizer}
    checkpoint.load(states, checkpoint_id=str(folder))
    state_dict.set_state_dict(
        strategy.model,
        strategy.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def own_loop(kind: str, folder: Path, mark: Path, *, start: int, stop: int):
    """Steps start + 1 .. stop of a loop without a framework; a checkpoint at step 3 in `mark`."""
    strategy, data = STRATEGIES[kind](tiny_llama()), Rows()
    strategy.assert_in_force()
    judge = Judge(strategy, data)
    soup = Soup(
        strategy.model,
        optimizer=strategy.optimizer,
        config=SoupConfig(merge_every_n_steps=2, rank=3, gate="none"),
        output_dir=folder,
    )
    if start:
        load_checkpoint(strategy, mark)
        soup.load(mark)
    for step in range(start + 1, stop + 1):
        strategy.step(data.batch(step))
        soup.step()
        judge()
        if step == 3 and not start:
            save_checkpoint(strategy, mark)
            soup.save(mark)
    return strategy, soup


def own_part(kind: str, base: Path, folder: Path) -> dict:
    whole, _ = own_loop(kind, folder / "whole", folder / "unused", start=0, stop=7)
    own_loop(kind, folder / "run", folder / "mark", start=0, stop=5)
    second, soup = own_loop(kind, folder / "run", folder / "mark", start=3, stop=7)
    found = second.whole()
    soup.finish(export=ExportConfig(family=folder / "family", name="two"))
    return {
        "different_data": len({str(ids) for ids in gathered(Rows().batch(1).tolist())}) == 2,
        "equal": all(same_bits(found, other) for other in gathered(found)),
        "resumed": gathered(same_bits(whole.whole(), found)),
        "merges": [report.step for report in soup.reports if report.accepted],
    }


def accumulating_part(kind: str, base: Path, folder: Path) -> dict:
    """The engine counts micro-batches itself, so soup.step follows every call of engine.step."""
    strategy, data = STRATEGIES[kind](tiny_llama(), accumulation=3), Rows()
    strategy.assert_in_force()
    config = SoupConfig(merge_every_n_steps=2, rank=3, gate="none")
    soup = Soup(strategy.model, config=config, output_dir=folder)
    counted, moved = [], []
    for micro_step in range(1, 14):
        before = strategy.whole()
        strategy.step(data.batch(micro_step))
        moved.append(not same_bits(before, strategy.whole()))
        soup.step()
        counted.append(soup.num_steps)
    return {
        "counted": counted,
        "moved": [micro_step for micro_step, has_moved in enumerate(moved, 1) if has_moved],
        "merges": [report.step for report in soup.reports],
    }
