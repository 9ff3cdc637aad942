"""vLLM's OpenAI server, as `python -m` starts it, with loads that a test can hold open.

    python tests/vllm_runs.py GATES --model BASE ...

A load writes GATES/<name>.began and goes on when there is no GATES/<name>.hold.
"""

import runpy
import sys
import time
from pathlib import Path

from soupkit.family import VariantRef
from soupkit.serving.vllm.store import Store

SERVER = "vllm.entrypoints.openai.api_server"
HELD_SECONDS = 60


def gate(folder: Path) -> None:
    copy = Store.copy

    def held(self: Store, ref: VariantRef) -> Path:
        with (folder / f"{ref.name}.began").open("a") as file:
            file.write("load\n")
        deadline = time.monotonic() + HELD_SECONDS
        while (folder / f"{ref.name}.hold").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return copy(self, ref)

    Store.copy = held  # type: ignore[method-assign]


if __name__ == "__main__":
    gate(Path(sys.argv[1]))
    sys.argv = [SERVER, *sys.argv[2:]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=False)
