"""mergekit as a baseline, in a venv of its own: its linear merge of model folders.

Its options are its best ones here: no tokenizer is copied, as there is none, and shards are written
while the next is computed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SOUPKIT_MERGEKIT"
OPTIONS = ("--quiet", "--no-copy-tokenizer", "--async-write", "--out-shard-size", "1B")
HOW = (
    "mergekit is not measured: make a venv of its own (python3 -m venv mergekit-venv; "
    "mergekit-venv/bin/pip install mergekit) and give --mergekit mergekit-venv/bin/mergekit-yaml, "
    f"or set {VARIABLE} to that"
)


@dataclass(frozen=True, slots=True)
class Mergekit:
    """An installed mergekit, by the path of its mergekit-yaml."""

    program: Path

    @property
    def label(self) -> str:
        """What a row is against: with the version, where the venv tells it."""
        found = self.program.parent.parent.glob("lib/python*/site-packages/mergekit-*.dist-info")
        versions = [re.sub(r"^mergekit-|\.dist-info$", "", one.name) for one in found]
        return " ".join(["mergekit", *versions[:1], "linear"])

    def command(self, config: Path, out: Path) -> tuple[str, ...]:
        """The command line of a merge."""
        return (str(self.program), str(config), str(out), *OPTIONS)


def find(given: str | None = None) -> Mergekit | None:
    """The mergekit that was named, or that the environment names; None if neither does.

    Args:
        given: path of mergekit-yaml, or of the Python of its venv.

    Raises:
        ValueError: there is none at that path.
    """
    named = given or os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named).absolute()
    program = path.parent / "mergekit-yaml" if path.name.startswith("python") else path
    if not os.access(program, os.X_OK) or program.is_dir():
        raise ValueError(f"{program} is no program: give the path of mergekit-yaml")
    return Mergekit(program)


def write_config(path: Path, models: Sequence[Path]) -> Path:
    """Write the config of a linear merge with equal weights; JSON is YAML."""
    listed = [{"model": str(model), "parameters": {"weight": 1.0}} for model in models]
    document = {"merge_method": "linear", "models": listed, "dtype": "bfloat16"}
    path.write_text(json.dumps(document))
    return path
