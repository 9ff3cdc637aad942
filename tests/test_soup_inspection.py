"""`soupkit inspect` of the folder where a run keeps the state of its merges."""

import json
import shutil

import pytest
from soup_runs import AccelerateLoop, saved_base
from typer.testing import CliRunner

from soupkit import SoupConfig
from soupkit.cli import app
from soupkit.training.inspection import describe_soup


def run(*args: object):
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory):
    """The output_dir of a run with a merge that is better and one that is worse."""
    folder = tmp_path_factory.mktemp("run")
    loop = AccelerateLoop(saved_base(folder / "base"), folder / "out", SoupConfig(
        merge_every_n_steps=2, rank=2, feed_back=True,
    ))  # fmt: skip
    scores = iter([5.0, 4.0, 3.5, 3.0, 9.0])
    loop.soup._evaluate = lambda: next(scores)
    loop.train(6)
    loop.soup.finish()
    return folder / "out"


def test_a_run_is_told_by_its_output_dir_or_its_soup_folder(out) -> None:
    found = json.loads(run(out, "--json").stdout)
    assert found == json.loads(run(out / "soup", "--json").stdout)
    assert (found["kind"], found["step"], found["refused_in_a_row"]) == ("soup", 6, 1)
    told = [
        (merge["step"], merge["partner_step"], merge["accepted"], merge["metric_merged"])
        for merge in found["merges"]
    ]
    assert told == [(4, 2, True, 3.5), (6, 4, False, 9.0)]
    report = json.loads((out / "soup" / "report-00000006.json").read_text())
    assert found["matrices"] == report["matrices"]
    assert found["bytes"] == sum(
        path.stat().st_size for path in (out / "soup").rglob("*") if path.is_file()
    )


def test_the_table_has_every_merge_and_what_lost_most(out) -> None:
    lines = run(out).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines]
    merges = {row[0]: row[1:5] for row in rows if row and row[0].isdigit()}
    assert merges == {"4": ["2", "kept", "4", "3.5"], "6": ["4", "refused", "3", "9"]}
    matrices = json.loads(run(out, "--json").stdout)["matrices"]
    worst = sorted((one for one in matrices if one["rank"]), key=lambda one: one["kept_energy"])
    named = [row[0] for row in rows if row and row[0].endswith(".weight")]
    assert named == [one["name"] for one in worst[:5]]


def test_a_run_without_its_report_is_told_still(out, tmp_path) -> None:
    folder = tmp_path / "soup"
    shutil.copytree(out / "soup", folder)
    for path in folder.glob("report-*.json"):
        path.unlink()
    found = describe_soup(folder)
    assert found is not None
    assert found["matrices"] == []
    assert run(folder).exit_code == 0


@pytest.mark.parametrize("name", ["state-00000006.json", "report-00000006.json"])
def test_damage_is_told_in_one_line(out, tmp_path, name: str) -> None:
    folder = tmp_path / "soup"
    shutil.copytree(out / "soup", folder)
    (folder / name).write_text("[1")
    result = run(folder)
    assert result.exit_code == 1
    assert name in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_is_no_run_is_left_to_others(tmp_path) -> None:
    base = saved_base(tmp_path / "base")
    assert describe_soup(tmp_path) is None
    assert describe_soup(base) is None
    (tmp_path / "soup").mkdir()
    assert describe_soup(tmp_path) is None
    assert run(base).stdout.startswith("checkpoint ")
