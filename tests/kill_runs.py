"""Kills a Trainer run at random points and resumes it; launched by test_training_kill.py.

    python tests/kill_runs.py FOLDER SEED COUNT METHOD SIGNAL

Every life is a fork of this process, which has imported everything and trained nothing. What counts
as a point: each write of a live weight, each tensor written to a file, each rename, each training
step, each part of a checkpoint. SIGTERM comes where soupkit writes, which may hold it back for the
end of a merge; it must have ended the process before the next training step. Prints one JSON object
a kill: the point and what differed.
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
from soupkit.bundle import open_variant
from soupkit.family import open_family
from soupkit.tensorfile import TensorFileWriter
from soupkit.training import SoupCallback
from soupkit.training.average import Average
from soupkit.training.params import ParamStore
from soupkit.training.state import SoupFolder
from soupkit.verify import verify_family

CONFIGS = {
    "svd_mean": SoupConfig(merge_every_n_steps=2, rank=3, gate_batches=2, feed_back=True),
    "ema": SoupConfig(merge_every_n_steps=2, method="ema", ema_decay=0.8, gate_batches=2),
}


LIVES_ON = 3


class Counter:
    """Counts the points and dies at one of them."""

    def __init__(self, kill_at: int, number: signal.Signals) -> None:
        self.kill_at, self.number = kill_at, number
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self.kill_at:
            signal.raise_signal(self.number)
        elif 0 < self.kill_at < len(self.names) and name == "training_step":
            os._exit(LIVES_ON)

    def watch(self, owner, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            self(name)
            return original(*args, **kwargs)

        setattr(owner, name, watched)


def last_complete_checkpoint(folder: Path) -> str | None:
    """The Trainer writes trainer_state.json last; a folder without it was being written."""
    complete = [p.parent for p in folder.glob("checkpoint-*/trainer_state.json")]
    complete.sort(key=lambda path: int(path.name.split("-")[1]))
    return str(complete[-1]) if complete else None


def live(
    base: Path, folder: Path, *, method: str, number: signal.Signals, kill_at: int, result: Path
) -> None:
    """One life of the run: from its last checkpoint to its end, or to the kill."""
    counter = Counter(kill_at, number)
    for owner, name in (
        (ParamStore, "write"),
        (Average, "update"),
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
        [SoupCallback(CONFIGS[method], export=export)],
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
            "exported": open_variant(folder / "family" / "variants" / "x").manifest.digest,
            "optimizer": optimizer_state(trainer.optimizer),
            "history": [{k: v for k, v in m.items() if "seconds" not in k} for m in history],
            "points": counter.names,
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
    return found + [key for key in ("history", "exported") if first[key] != second[key]]


def main() -> None:
    work, seed, count, method = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    number = signal.Signals[sys.argv[5]]
    base = saved_base(work / "base", dropout=0.1)
    shared = {"base": base, "method": method, "number": number}
    status = forked(**shared, folder=work / "whole", kill_at=0, result=work / "whole.pt")
    assert status == 0, status
    whole = torch.load(work / "whole.pt")
    names = whole["points"]
    # Where soupkit writes, for a signal that may be held back there.
    wanted = {*names} if number == signal.SIGKILL else {"write", "write_state", "update"}
    known = [point for point, name in enumerate(names, 1) if name in wanted]
    points = sorted(random.Random(seed).sample(known, count))
    for point in points:
        folder, result = work / f"killed-{point}", work / f"killed-{point}.pt"
        killed = forked(**shared, folder=folder, kill_at=point, result=result)
        died = os.WIFSIGNALED(killed) and os.WTERMSIG(killed) == number
        listed = (folder / "family" / "family.json").exists()
        # Old or new, never half.
        early = list(open_family(folder / "family").variants) if listed else []
        status = forked(**shared, folder=folder, kill_at=0, result=result)
        report = {
            "point": point,
            "of": len(names),
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
