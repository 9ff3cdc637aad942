"""Kills a Trainer run with SIGKILL at random points and resumes it; launched by
test_training_kill.py.

    python tests/kill_runs.py FOLDER SEED COUNT

Every life is a fork of this process, which has imported everything and trained nothing. What counts
as a point: each write of a live weight, each tensor written to a file, each rename, each training
step, each part of a checkpoint. Prints one JSON object a kill: the point and what differed.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from soup_runs import make_trainer, optimizer_state, saved_base, weights_of
from transformers import Trainer

from soupkit import ExportConfig, SoupConfig
from soupkit.family import open_family
from soupkit.tensorfile import TensorFileWriter
from soupkit.training import SoupCallback
from soupkit.training.params import ParamStore
from soupkit.training.state import SoupFolder
from soupkit.verify import verify_family

CONFIG = SoupConfig(merge_every_n_steps=2, rank=3, gate_batches=2)


class Counter:
    """Counts the points and dies at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.count = kill_at, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            self()
            return original(*args, **kwargs)

        setattr(owner, name, watched)


def last_complete_checkpoint(folder: Path) -> str | None:
    """The Trainer writes trainer_state.json last; a folder without it was being written."""
    complete = [p.parent for p in folder.glob("checkpoint-*/trainer_state.json")]
    complete.sort(key=lambda path: int(path.name.split("-")[1]))
    return str(complete[-1]) if complete else None


def live(base: Path, folder: Path, *, kill_at: int, result: Path) -> None:
    """One life of the run: from its last checkpoint to its end, or to the kill."""
    counter = Counter(kill_at)
    for owner, name in (
        (ParamStore, "write"),
        (TensorFileWriter, "write"),
        (SoupFolder, "write_state"),
        (SoupFolder, "clean"),
        (os, "replace"),
        (os, "rename"),
        (Trainer, "training_step"),
        (Trainer, "_save_optimizer_and_scheduler"),
        (Trainer, "_save_rng_state"),
    ):
        counter.watch(owner, name)
    export = ExportConfig(family=folder / "family", name="x")
    trainer = make_trainer(
        base,
        folder,
        [SoupCallback(CONFIG, export=export)],
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=100,
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder))
    state = sorted((folder / "soup").glob("state-*.json"))[-1]
    history = json.loads(state.read_text())["history"]
    torch.save(
        {
            "weights": weights_of(trainer.model),
            "optimizer": optimizer_state(trainer.optimizer),
            "history": [{k: v for k, v in m.items() if "seconds" not in k} for m in history],
            "count": counter.count,
        },
        result,
    )


def forked(**kwargs) -> int:
    """The wait status of a child that lives one life."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(**kwargs)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def difference(first: dict, second: dict) -> list[str]:
    found = [n for n, v in first["weights"].items() if not torch.equal(v, second["weights"][n])]
    pairs = zip(first["optimizer"], second["optimizer"], strict=True)
    found += [f"moment {i}" for i, pair in enumerate(pairs) if not torch.equal(*pair)]
    return found + ["history"] * (first["history"] != second["history"])


def main() -> None:
    work, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base = saved_base(work / "base", dropout=0.1)
    status = forked(base=base, folder=work / "whole", kill_at=0, result=work / "whole.pt")
    assert status == 0, status
    whole = torch.load(work / "whole.pt")
    points = sorted(random.Random(seed).sample(range(1, whole["count"] + 1), count))
    for point in points:
        folder, result = work / f"killed-{point}", work / f"killed-{point}.pt"
        killed = forked(base=base, folder=folder, kill_at=point, result=result)
        died = os.WIFSIGNALED(killed) and os.WTERMSIG(killed) == signal.SIGKILL
        listed = (folder / "family" / "family.json").exists()
        # Old or new, never half.
        early = list(open_family(folder / "family").variants) if listed else []
        status = forked(base=base, folder=folder, kill_at=0, result=result)
        report = {
            "point": point,
            "of": whole["count"],
            "died": died,
            "family": early,
            "status": status,
            "differs": difference(whole, torch.load(result)) if status == 0 else None,
            "faults": verify_family(folder / "family"),
            "left": sorted(p.name for p in (folder / "soup").iterdir() if p.name[0] == "."),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
