"""Loops without a framework over a DeepSpeed engine or FSDP2, with checkpoints of their own: parts
of sharded_frameworks.py. Plain ones give it what one process does.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_runs import gathered
from sharded_runs import Judge, Rows, same_bits
from sharded_strategies import STRATEGIES, DeepSpeed, Plain, odd_llama
from soup_runs import reference_merge, tiny_llama
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict

from soupkit import ExportConfig, SoupConfig
from soupkit.errors import TrainingError
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
        config=SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True),
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
    config = SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True)
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


def plain_soup(strategy, folder: Path, **kwargs) -> Soup:
    return Soup(
        strategy.model,
        optimizer=strategy.optimizer,
        config=SoupConfig(merge_every_n_steps=2, rank=3, gate="none", feed_back=True),
        output_dir=folder,
        **kwargs,
    )


def one_process(folder: Path) -> list[int]:
    """In `folder`: the soup and the weights of one process after step 4, and those after step 7."""
    strategy, data = Plain(odd_llama()), Rows()
    soup = plain_soup(strategy, folder / "run")
    for step in range(1, 8):
        strategy.step(data.batch(step))
        soup.step()
        if step == 4:
            soup.save(folder / "run" / "mark")
            torch.save(strategy.whole(), folder / "saved.pt")
            # Two ranks begin without momentum, too.
            strategy.optimizer.state.clear()
            shutil.copytree(folder / "run", folder / "saved")
    torch.save(strategy.whole(), folder / "end.pt")
    return [report.step for report in soup.reports]


def far_from(found: dict, expected: dict, *, atol: float = 2e-6) -> list[str]:
    """Names of what is not the same within float32's rounding."""
    return [
        name
        for name, value in expected.items()
        if not torch.allclose(found[name].double(), value.double(), rtol=2e-5, atol=atol)
    ]


def one_part(kind: str, base: Path, folder: Path) -> dict:
    """Two ranks go on from the state and the weights of one_process."""
    inner, data = odd_llama(), Rows()
    weights = torch.load(folder / "saved.pt")
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            parameter.copy_(weights[name])
    strategy = STRATEGIES[kind](inner)
    strategy.assert_in_force()
    other = STRATEGIES[kind](odd_llama(seed=1))
    try:
        plain_soup(other, folder / "saved").load(folder / "saved" / "mark")
        refused = ""
    except TrainingError as error:
        refused = str(error)
    soup = plain_soup(strategy, folder / "saved")
    soup.load(folder / "saved" / "mark")
    for step in range(5, 8):
        strategy.step(data.batch(step))
        soup.step()
    return {
        "merges": [report.step for report in soup.reports],
        "refused": "not those of" in refused,
        "differs": far_from(strategy.whole(), torch.load(folder / "end.pt")),
    }


def foreign_part(kind: str, base: Path, folder: Path) -> dict:
    """A run that had three steps without soupkit."""
    first, data = STRATEGIES[kind](odd_llama()), Rows()
    start = first.whole()
    for step in (1, 2, 3):
        first.step(data.batch(step))
    save_checkpoint(first, folder / "mark")
    if data.rank == 0:
        odd_llama().save_pretrained(folder / "start")
    dist.barrier()
    refused = ""
    blind = STRATEGIES[kind](odd_llama())
    soup = plain_soup(blind, folder / "blind")
    load_checkpoint(blind, folder / "mark")
    try:
        soup.resume(3)
    except TrainingError as error:
        refused = str(error)
    strategy = STRATEGIES[kind](odd_llama())
    soup = plain_soup(strategy, folder / "run", base=folder / "start")
    load_checkpoint(strategy, folder / "mark")
    soup.resume(3)
    strategy.assert_in_force()
    kept = {}
    for step in range(4, 7):
        strategy.step(data.batch(step))
        kept[step] = strategy.whole()
        soup.step()
    merged = {
        name: torch.from_numpy(
            reference_merge(value, kept[6][name], kept[4][name], rank=3, weight=0.5)
        )
        for name, value in start.items()
    }
    return {
        "refused": gathered("base=" in refused),
        "merges": [report.step for report in soup.reports],
        "differs": far_from(strategy.whole(), merged),
    }


def skipping_part(kind: str, base: Path, folder: Path) -> dict:
    """Gradients overflow at the steps that are True; bfloat16, because a CPU has no fp16."""
    strategy, data = STRATEGIES[kind](tiny_llama(), checks_overflow=True), Rows()
    strategy.assert_in_force()
    soup = plain_soup(strategy, folder)
    counted, moved = [], []
    for step, overflows in enumerate((True, False, False, True, True, False, False), 1):
        before = strategy.whole()
        loss = strategy.loss(data.batch(step))
        strategy.model.backward(loss * float("inf") if overflows else loss)
        strategy.model.step()
        moved.append(not same_bits(before, strategy.whole()))
        soup.step()
        counted.append(soup.num_steps)
    return {
        "overflows": strategy.model.skipped_steps,
        "counted": counted,
        "moved": moved,
        "merges": [report.step for report in soup.reports],
    }
