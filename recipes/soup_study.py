"""Does merging while training help? The same fine-tune with every kind of merging and with none.

    python recipes/soup_study.py --out study                 # demo and text; nothing is downloaded
    python recipes/soup_study.py --out study --quick         # the same in small, about a minute
    python recipes/soup_study.py --out study --tasks smollm2 --smollm2 HuggingFaceTB/SmolLM2-135M

Every run is stored in <out>/study.json when it ends; a study that was stopped goes on where it was.
At the end: a table of test losses, differences to no merging with their spread over seeds and
merges refused by the gate, and <out>/study.png where matplotlib is installed.
"""

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Small matrices gain nothing from a second thread, and spinning threads cost a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import soup_study_tasks
import torch
import transformers
from soup_study_runs import PLAIN, SCHEDULES, Run, arms, default_arm, in_scratch
from soup_study_table import plot, table, worse
from soup_study_tasks import Setting

from soupkit.files import atomic_write_json

AMOUNTS = ("ample", "scarce")


class Study:
    """The results so far, in one file."""

    def __init__(self, path: Path, *, quick: bool) -> None:
        """Begin, or go on. Raises SystemExit where the file is of another kind of study."""
        self.path = path
        self.document: dict[str, Any] = {
            "quick": quick,
            "machine": machine(),
            "cpu_seconds": 0.0,
            "runs": {},
        }
        if path.exists():
            self.document = json.loads(path.read_text())
            if self.document["quick"] != quick:
                raise SystemExit(f"{path} is of a study with quick={not quick}: give another --out")

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        return self.document["runs"]

    def add(self, key: str, results: dict[str, Any], seconds: float) -> None:
        self.runs.setdefault(key, {}).update(results)
        self.document["cpu_seconds"] = round(self.document["cpu_seconds"] + seconds, 1)
        atomic_write_json(self.path, self.document)


def machine() -> str:
    """CPU and versions, in a line."""
    names = [platform.processor() or platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0]}, one thread; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def one_case(study: Study, key: str, run: Run, *, few: bool) -> Iterator[str]:
    """Do what is missing of a case; yields the name of each training before it begins."""
    configs = arms(run.setting, few=few)
    done = study.runs.get(key, {})
    beside = {name: config for name, config in configs.items() if not config.feed_back}
    if PLAIN not in done:
        yield "no merging and all side soups"
        started = time.process_time()
        study.add(key, run.shared(beside), time.process_time() - started)
    for name, config in configs.items():
        if config.feed_back and name not in done:
            yield name
            started = time.process_time()
            study.add(key, {name: run.fed_back(name, config)}, time.process_time() - started)


def all_cases(study: Study, settings: dict[str, Setting], options: argparse.Namespace) -> None:
    """Seed after seed, so that a study that is stopped early has all cases."""
    for seed in range(options.seeds):
        for task, setting in settings.items():
            for amount in options.data:
                for schedule in options.schedules:
                    key = f"{task}/{amount}/{schedule}/{seed}"

                    def work(folder: Path, key=key, setting=setting) -> None:
                        _, amount, schedule, seed = key.split("/")
                        run = Run(setting, amount, schedule, int(seed), folder)
                        for name in one_case(study, key, run, few=key.startswith("smollm2")):
                            print(f"{time.strftime('%H:%M:%S')} {key}: {name}", flush=True)

                    in_scratch(options.out, work)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("study"))
    parser.add_argument("--tasks", nargs="+", default=["demo", "text"])
    parser.add_argument("--data", nargs="+", default=list(AMOUNTS), choices=AMOUNTS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smollm2", help="folder or hub id, for --tasks smollm2")
    parser.add_argument("--quick", action="store_true", help="one seed, one case a task, few steps")
    options = parser.parse_args()
    if "smollm2" in options.tasks and not options.smollm2:
        parser.error("--tasks smollm2 needs --smollm2 with a folder or hub id")
    if options.quick:
        options.seeds, options.schedules, options.data = 1, ["constant"], ["scarce"]
    return options


def main() -> None:
    options = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    study = Study(options.out / "study.json", quick=options.quick)
    settings = {}
    for task in options.tasks:
        source = options.smollm2 if task == "smollm2" else options.out
        settings[task] = getattr(soup_study_tasks, task)(source, quick=options.quick)
    # What the soups say of each merge.
    with (options.out / "study.log").open("a") as log, contextlib.redirect_stderr(log):
        all_cases(study, settings, options)
    show(study, settings, options.out)


def show(study: Study, settings: dict[str, Setting], out: Path) -> None:
    minutes = study.document["cpu_seconds"] / 60
    print(f"\n{study.document['machine']}; {minutes:.0f} CPU minutes\n")
    print("Test loss without merging, then differences to it, each +- its spread over seeds.\n")
    for task, setting in settings.items():
        default = default_arm(setting)
        print(table(study.runs, task, default=default), end="\n\n")
        lost = ", ".join(worse(study.runs, task, default)) or "none"
        print(f"cases where the default ends worse by more than the spread: {lost}\n")
    try:
        plot(study.runs, out / "study.png")
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
