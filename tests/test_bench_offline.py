"""The offline benchmarks: their rows, models and processes on tiny folders. Never a time."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from soupkit.bench import export, merge, mergekit, offline, offline_merge, offline_models, processes
from soupkit.bench.offline_models import LLAMA, SMOL, TINY, check_space, write_model
from soupkit.bench.processes import Spent, Way, run, soupkit
from soupkit.bench.rows import Row
from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.errors import SoupkitError
from soupkit.merge import MergeRule
from soupkit.offline import merge_checkpoints

# What a mergekit-yaml does as far as the benchmark can tell, and what it was called with.
FAKE = """#!{python}
import json, pathlib, shutil, sys
config, out = sys.argv[1:3]
told = json.loads(pathlib.Path(config).read_text())
with open({record!r}, "a") as file:
    file.write(json.dumps([told, sys.argv[3:]]) + "\\n")
shutil.copytree(told["models"][0]["model"], out)
"""


def fake_mergekit(venv: Path) -> Path:
    (venv / "bin").mkdir(parents=True)
    (venv / "lib/python3.11/site-packages/mergekit-9.8.dist-info").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    program = venv / "bin/mergekit-yaml"
    program.write_text(FAKE.format(python=sys.executable, record=str(venv / "record")))
    program.chmod(0o755)
    return program


def in_this_process(way: Way, environment: Mapping[str, str]) -> Spent:
    """A stand-in for processes.run that spares soupkit's start-up; the rest runs as it does."""
    if way.command[:3] != soupkit():
        return run(way, environment)
    for path in (way.out, *way.forgotten):
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = CliRunner().invoke(app, list(way.command[3:]))
    assert done.exit_code == 0, done.output
    return Spent(4.0, 5.0, 3.0, 300_000_000)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny models, and the folder that the benchmark's own one is made in."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(processes, "run", in_this_process)
    monkeypatch.setattr(offline, "QUICK", ((replace(TINY, vocab=300), 300_000),))
    monkeypatch.setattr(offline, "TIMED_BYTES", 100_000)
    return folder


def test_export_restore_and_verify_are_measured(scratch: Path) -> None:
    seen: list[str] = []
    found = export.run(quick=True, progress=lambda what, done, total: seen.append(what))
    case = offline.cases(quick=True, large=False)[0].label
    tools = ("export", "export from a new base", "restore", "verify")
    endings = ("", ", less start-up", ", synced", ", RssAnon")
    assert [one.name for one in found] == [f"{t}, {case}{e}" for t in tools for e in endings]
    assert [one.baseline for one in found] == ["cp", "cp", "cp + fsync", "1.5 GB"] * 4
    exported, rest = found[:8], found[8:]
    assert [one.goal for one in exported] == [2.0, 2.0, None, 1.0] * 2
    assert [one.goal for one in rest] == [None, None, None, 1.0] * 2
    assert found[0].value == 4.0
    assert found[1].value == 0.0  # all of it is start-up: the tiny model "took" as long
    assert (found[3].value, found[3].ratio) == (300.0, 0.2)
    assert "cp of base and variant" in seen
    assert list(scratch.iterdir()) == []


def test_merges_are_measured_against_mergekit(scratch: Path, tmp_path: Path) -> None:
    program = fake_mergekit(tmp_path / "venv")
    found = offline_merge.rows(
        quick=True, large=False, program=str(program), progress=offline.silent
    )
    told = [(one.name.split(",")[0], one.baseline, one.goal) for one in found]
    other = "mergekit 9.8 linear"
    times = [(other, 1.0), (other, 1.0), (f"{other} + fsync", None), (other, None)]
    assert told == [
        *(("merge of two", against, None) for against in ("cp", "cp", "cp + fsync")),
        ("merge of two", "1.5 GB", 1.0),
        ("merge with a base", "1.5 GB", 1.0),
        *(("merge of two", *one) for one in times),
        *(("merge with a base", *one) for one in times),
        (other, "1.5 GB", None),
    ]
    assert len({(one.name, one.baseline) for one in found}) == len(found)
    calls = (tmp_path / "venv/record").read_text().splitlines()
    assert len(calls) == 2
    assert all("--quiet" in call and '"merge_method": "linear"' in call for call in calls)
    assert list(scratch.iterdir()) == []


def test_without_mergekit_it_is_told_how_to_get_it(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(mergekit.VARIABLE, raising=False)
    found = offline_merge.rows(quick=True, large=False, program=None, progress=offline.silent)
    assert {one.baseline for one in found} == {"cp", "cp + fsync", "1.5 GB"}
    said = capsys.readouterr().err
    assert "pip install mergekit" in said
    assert "--mergekit" in said


def test_an_interrupt_leaves_nothing_behind(scratch: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "export":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export.run(quick=True, progress=interrupt)
    assert list(scratch.iterdir()) == []


def test_large_models_are_merged_by_twos(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "LARGE", ((TINY, 10_000),))
    found = offline_merge.rows(quick=False, large=True, program=None, progress=offline.silent)
    assert {one.name.split(",")[0] for one in found} == {"merge of two"}


def test_small_models_have_no_goal_for_time(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "TIMED_BYTES", 900_000_000)
    found = export.run(quick=True)
    assert [one.name for one in found if "less" in one.name] == []
    assert {one.goal for one in found if one.unit == "s"} == {None}


def test_the_sizes_are_those_of_the_goals() -> None:
    def sizes(**kind: bool) -> list[tuple[int, int]]:
        return [(one.shapes.hidden, one.num_bytes) for one in offline.cases(**kind)]

    [quick] = sizes(quick=True, large=False)
    usual = sizes(quick=False, large=False)
    [large] = sizes(quick=False, large=True)
    wanted = [(576, 0.1e9), (576, 1e9), (4096, 2e9), (4096, 8e9)]
    for (width, size), (wanted_width, about) in zip([quick, *usual, large], wanted, strict=True):
        assert width == wanted_width
        assert abs(size / about - 1) < 0.05


def test_models_open_and_a_fine_tune_moves_matrices_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_models, "SHARD_BYTES", 30_000)
    monkeypatch.setattr(offline_models, "TILE", 1000)
    base, tune = (
        open_checkpoint(write_model(tmp_path / str(tuned), TINY, 2, tuned=tuned))
        for tuned in range(2)
    )
    assert len(base.weight_files) > 2
    assert base.names == tune.names
    assert len(base.names) == 2 + 2 * 9
    assert sum(base.tensor(name).nbytes for name in base.names) == TINY.num_bytes(2)
    for name in base.names:
        one, other = base.tensor(name), tune.tensor(name)
        assert torch.equal(one, other) == (one.ndim == 1)
        assert float((one.float() - other.float()).norm() / one.float().norm()) < 0.02


@pytest.mark.parametrize("shapes", [SMOL, LLAMA, TINY])
def test_heads_divide_widths(shapes: offline_models.Shapes) -> None:
    assert shapes.hidden % shapes.head == shapes.kv % shapes.head == 0


def test_a_small_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"needs 1000000000\.0 GB: set TMPDIR"):
        check_space(tmp_path, 10**18)


def test_a_process_is_measured_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import hashlib, pathlib; held = bytearray(b'1') * 120_000_000; "
        f"[hashlib.sha256(held) for _ in range(3)]; folder = pathlib.Path({str(out)!r}); "
        "folder.mkdir(); (folder / 'x').write_bytes(held[:1000])"
    )
    spent = run(Way((sys.executable, "-c", code), out), {})
    assert (out / "x").stat().st_size == 1000
    assert 120_000_000 <= spent.anonymous_bytes < 300_000_000
    assert spent.synced_seconds >= spent.seconds > 0
    assert spent.cpu_seconds > 0


def test_a_command_that_fails_is_told_with_its_last_line() -> None:
    code = "import sys; print('before'); sys.exit('no such thing')"
    with pytest.raises(SoupkitError, match="exit code 1: no such thing"):
        run(Way((sys.executable, "-c", code)), {})


def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes]) -> int:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_watched", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Way(("sleep", "600")), {})
    assert started[0].returncode == -9


def test_runs_alternate_after_one_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def one(way: Way, environment: Mapping[str, str]) -> Spent:
        order.append(way.command[0])
        return Spent(float(len(order)), 0.0, 0.0, 0)

    monkeypatch.setattr(processes, "run", one)
    seen: list[tuple[str, int, int]] = []
    found = processes.alternate(
        {"a": Way(("a",)), "b": Way(("b",))},
        environment={},
        repeats=2,
        warms_up=True,
        progress=lambda *told: seen.append(told),
    )
    assert order == ["a", "b"] * 3
    assert [spent.seconds for spent in found["a"]] == [3.0, 5.0]
    assert seen[-1] == ("b", 5, 6)


def test_mergekit_is_found_by_its_program_its_python_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(mergekit.VARIABLE, raising=False)
    assert mergekit.find() is None
    program = fake_mergekit(tmp_path / "venv")
    for named in (program, program.with_name("python")):
        found = mergekit.find(str(named))
        assert found is not None
        assert found.program == program
    monkeypatch.setenv(mergekit.VARIABLE, str(program))
    assert mergekit.find() == mergekit.Mergekit(program)
    with pytest.raises(ValueError, match="nothing is no program: give the path"):
        mergekit.find(str(tmp_path / "nothing"))


@pytest.mark.slow
def test_slice_of_the_offline_benchmarks_runs_as_a_user_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "QUICK", ((TINY, 300_000),))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = export.run(quick=True)
    assert all(one.ok for one in found if one.name.endswith("RssAnon"))
    assert all(one.value > 0 for one in found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_means_equal_mergekits_linear_merge(tmp_path: Path) -> None:
    program = mergekit.find()
    if program is None:
        pytest.skip(mergekit.HOW)
    shapes = replace(TINY, vocab=199, wide=192)
    pair = [write_model(tmp_path / str(n), shapes, 3, tuned=n) for n in (1, 2)]
    config = mergekit.write_config(tmp_path / "linear.yml", pair)
    run(Way(program.command(config, tmp_path / "theirs")), {"HF_HUB_OFFLINE": "1"})
    run(Way(soupkit("merge", "--config", config, "--out", tmp_path / "ours")), {})
    base = open_checkpoint(write_model(tmp_path / "0", shapes, 3, tuned=0))
    rule = MergeRule(method="mean")
    merge_checkpoints(base, list(map(open_checkpoint, pair)), out=tmp_path / "deltas", rule=rule)
    theirs = open_checkpoint(tmp_path / "theirs")
    for name in ("ours", "deltas"):
        merged = open_checkpoint(tmp_path / name)
        assert merged.names == theirs.names
        for one in theirs.names:
            # A step of bfloat16: both round once, of sums that differ in float32's last bits.
            torch.testing.assert_close(
                merged.tensor(one).float(), theirs.tensor(one).float(), rtol=2**-7, atol=1e-8
            )


def test_the_command_takes_large_and_mergekit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    def note(**options: object) -> list[Row]:
        given.append(options)
        return []

    monkeypatch.setattr(merge, "run", note)
    monkeypatch.setenv(mergekit.VARIABLE, "one")
    run_cli = CliRunner().invoke
    assert run_cli(app, ["bench", "merge", "--large"]).exit_code == 0
    assert (given[0]["large"], given[0]["program"]) == (True, "one")
    for refused in (["kernel", "--large"], ["export", "--large", "--quick"]):
        assert run_cli(app, ["bench", *refused]).exit_code == 1
