"""Every code block of README.md runs, in order, in one empty folder, as a newcomer would run it.

Set-up lines (`make`, `pip install`) are checked instead of run: the tests themselves run inside
what they set up. Numbers of steps and the port are replaced so that it takes a minute.
"""

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import serving_kit
import typer

from soupkit.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a newcomer has before the first block: data sets for the Trainer.
PRELUDE = """
import torch
torch.set_num_threads(1)
row = {"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)}
train = held_out = [row] * 8
"""
SHORTER = {
    "max_steps=3000": "max_steps=4, report_to='none', use_cpu=True, save_strategy='no'",
    "merge_every_n_steps=1000": "merge_every_n_steps=2",
    "--name chat": "--name chat --steps 4 --merge-every 2 --batch 2",
    "ddp.yaml": "ddp_cpu.yaml",
    "recipes/": f"{ROOT}/recipes/",
}


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(README) if kind == language]


def shortened(text: str, port: int) -> str:
    for old, new in SHORTER.items():
        text = text.replace(old, new)
    return text.replace("8000", str(port))


def test_every_block_has_a_language_that_is_run_or_shown() -> None:
    assert README.count("```") % 2 == 0
    assert {kind for kind, _ in BLOCK.findall(README)} <= {"bash", "python", "text"}
    assert len(BLOCK.findall(README)) == README.count("```") // 2
    assert all(any(old in README for old in (key,)) for key in SHORTER)


def test_commands_that_are_only_shown_take_these_options() -> None:
    """They are run by nobody here; their options must be there at least."""
    known = {
        name: {flag for option in command.params for flag in option.opts}
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    shown = "\n".join(blocks("text")).replace('", "', " ")
    found = re.findall(r"soupkit (serve|plan|bench)\b([^\n]*)", shown)
    flags = [(name, flag) for name, rest in found for flag in re.findall(r"(?<!\S)--[a-z-]+", rest)]
    assert ("serve", "--replicas") in flags
    assert [flag for flag in flags if flag[1] not in known[flag[0]]] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`base`, a fine-tune of it and some data, as the README's reader has them."""
    base = serving_kit.make_base(tmp_path / "base")
    serving_kit.make_finetune(base, tmp_path / "finetuned", lambda name: True, seed=1)
    tokenizer = serving_kit.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(base)
    rows = [{"prompt": f"{i} + {i} =", "answer": f" {2 * i}"} for i in range(40)]
    for name, part in {"train": rows, "heldout": rows[:4]}.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def set_up_line(line: str) -> bool:
    """Checks a line that installs or builds; False if the line is to be run."""
    if line.startswith("make "):
        target = line.split()[1]
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
        return True
    if line.startswith("pip install"):
        (extra,) = re.findall(r'"soupkit\[(\w+)\]"', line)
        assert extra in importlib.metadata.metadata("soupkit").get_all("Provides-Extra")
        return True
    return False


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "soupkit serve stopped"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    pytest.fail("soupkit serve was not ready within two minutes")


def environment() -> dict[str, str]:
    bins = Path(sys.executable).parent
    path = f"{bins}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for server in running:
        server.terminate()
        server.wait(timeout=30)


def test_the_readme_runs_from_top_to_bottom(
    folder: Path, servers: list[subprocess.Popen[bytes]]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs: list[str] = []
    for kind, text in BLOCK.findall(README):
        if kind == "python":
            code = PRELUDE + shortened(text, port)
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=folder, env=environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            outputs.append(done.stdout)
        for line in text.splitlines() if kind == "bash" else ():
            command = shortened(line.split("  #")[0].strip(), port)
            if not command or set_up_line(command):
                continue
            if command.startswith("soupkit serve"):
                servers.append(subprocess.Popen(command.split(), cwd=folder, env=environment()))
                wait_until_ready(port, servers[-1])
                continue
            done = subprocess.run(
                command, shell=True,
                cwd=folder, env=environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    # The client asked the base and the three variants that the blocks before it made.
    asked, resolved = outputs[-2:]
    assert all(name in asked for name in ("base", "coder", "chat", "legal"))
    assert (Path(resolved.splitlines()[-1]) / "adapter_model.safetensors").exists()
    assert (folder / "dense" / "model.safetensors").exists()
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert (folder / "merged" / "model.safetensors").exists()
    assert (folder / "report" / "index.html").exists()
