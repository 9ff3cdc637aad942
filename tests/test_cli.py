"""Promises of the command line: exit codes, one JSON document, one line, nothing half-written."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.cli.console import parse_bytes, parse_weights, show_progress, size_of
from soupkit.export import export_variant
from soupkit.version import __version__

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    "merge",
    "export",
    "restore",
    "inspect",
    "verify",
    "lora",
    "remove",
    "serve",
    "bench",
    "distill",
    "report",
    "plan",
]


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def document(*arguments):
    """Run with --json; the whole of stdout is one JSON document and stderr is empty."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def complaint(*arguments, code=1):
    """Run what must fail; returns the one line on stderr, stdout stays empty."""
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    if code == 1:
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("soupkit: ")
    return result.stderr


@pytest.fixture
def family(base_folder, finetuned_folder, tmp_path):
    folder = tmp_path / "family"
    assert run("export", base_folder, finetuned_folder, "--family", folder).exit_code == 0
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: soupkit {command} " in " ".join(result.stdout.split())


def test_no_command_and_unknown_options_are_usage():
    assert run().exit_code == 2
    assert run("nothing").exit_code == 2
    for command in COMMANDS:
        assert run(command).exit_code == 2
        assert run(command, "--nothing").exit_code == 2
    assert "--method" in complaint("merge", "a", "b", "--out", "c", "--method", "ties", code=2)
    assert run("merge", "a", "b", "--out", "c", "--config", "x").exit_code == 2


def test_export_names_variants_after_their_folders(base_folder, finetuned_folder, tmp_path):
    (one,) = document("export", base_folder, finetuned_folder, "--family", tmp_path / "f")
    assert one["name"] == "finetuned"
    assert one["replaced"] is False
    assert one["bytes"]["total"] == sum(path.stat().st_size for path in Path(one["path"]).iterdir())
    two = document(
        "export", base_folder, finetuned_folder, base_folder, "--family", tmp_path / "f",
        "--name", "a", "--name", "b", "--encoding", "lowrank-2+matrix-x2",
    )  # fmt: skip
    assert [report["name"] for report in two] == ["a", "b"]
    assert two[0]["bytes"]["factors"] > 0
    result = run("export", base_folder, finetuned_folder, "--family", tmp_path / "f")
    assert "of the model in bfloat16; it replaced the variant of that name" in result.stdout


def test_an_encoding_is_seen_by_inspect_and_taken_by_the_other_commands(
    base_folder, finetuned_folder, tmp_path
):
    family = tmp_path / "f"
    encoding = "lowrank-2+rank1"
    document("export", base_folder, finetuned_folder, "--family", family, "--encoding", encoding)
    told = run("inspect", family / "variants" / "finetuned").stdout
    assert encoding in told
    assert "factors" in run("inspect", family).stdout
    assert document("verify", family) == {"ok": True, "faults": []}
    document("restore", family, "finetuned", "--out", tmp_path / "dense")
    report = document("lora", family, "finetuned", "--out", tmp_path / "lora")
    assert report["exact"] is False
    moved = shutil.copytree(base_folder, tmp_path / "moved")
    document("lora", family, "finetuned", "--base", moved, "--out", tmp_path / "lora2")
    assert "--base" in complaint(
        "lora", base_folder, finetuned_folder, "--base", moved, "--out", tmp_path / "lora3"
    )


def test_a_budget_prints_choices_and_frontier_and_is_kept(base_folder, finetuned_folder, tmp_path):
    models = "export", base_folder, finetuned_folder, "--family", tmp_path / "f"
    auto = *models, "--encoding", "auto"
    (row,) = document(*models, "--name", "row")
    (one,) = document(*auto, "--name", "a")
    assert one["budget"]["budget_bytes"] == row["bytes"]["weights"]
    assert one["budget"]["lost_energy"] <= one["budget"]["row"]["lost_energy"]
    (two,) = document(*auto, "--name", "b", "--budget-bytes", "30kB")
    assert two["budget"]["bytes"] == two["bytes"]["weights"] <= 30_000
    assert sum(group["tensors"] for group in two["budget"]["choices"]) == 15
    assert "budget" not in row
    told = run(*auto, "--name", "b", "--budget-bytes", "30kB").stdout
    for word in ("variant.safetensors", "what a budget buys", "30.0 kB *", "row scales"):
        assert word in told
    assert "what a budget buys" in run("inspect", one["path"]).stdout
    shown = document("inspect", one["path"])["budget"]
    assert shown["frontier"] == one["budget"]["frontier"]
    assert document("verify", tmp_path / "f") == {"ok": True, "faults": []}


def test_budgets_that_cannot_be_are_refused(base_folder, finetuned_folder, tmp_path):
    models = "export", base_folder, finetuned_folder, "--family", tmp_path / "f"
    auto = *models, "--encoding", "auto", "--budget-bytes"
    assert "give at least budget_bytes=" in complaint(*auto, "1kB")
    assert "no number of bytes" in complaint(*auto, "many")
    assert "--encoding auto" in complaint(*models, "--budget-bytes", "1MB")
    assert not (tmp_path / "f").exists()


def test_a_budget_too_small_for_one_keeps_no_other_out(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        # Not one bit of it is the base's: nothing of it is small.
        tensors["model.embed_tokens.weight"] = torch.ones(150, 24)

    large = make_finetune(tmp_path / "large", base_folder, edit=edit, config={"vocab_size": 150})
    ordinary = make_finetune(tmp_path / "ordinary", base_folder)
    result = run(
        "export", base_folder, large, ordinary, tmp_path / "large", "--name", "a", "--name", "b",
        "--name", "c", "--family", tmp_path / "f", "--encoding", "auto", "--budget-bytes", "16kB",
    )  # fmt: skip
    assert result.exit_code == 1
    assert list(json.loads((tmp_path / "f" / "family.json").read_text())["variants"]) == ["b"]
    first, *_, last = result.stderr.splitlines()
    assert first.startswith("soupkit: a: budget_bytes=16,000: ")
    assert last == "soupkit: 2 of 3 not exported: a, c"
    assert result.stdout.startswith("b: ")


def test_a_wrong_encoding_is_told_once(base_folder, finetuned_folder, tmp_path):
    models = base_folder, finetuned_folder, base_folder, "--name", "a", "--name", "b"
    complaint("export", *models, "--family", tmp_path / "f", "--encoding", "none")
    assert not (tmp_path / "f").exists()


def test_an_interrupted_large_export_says_that_it_goes_on(
    base_folder, finetuned_folder, tmp_path, monkeypatch
):
    from soupkit import partial

    models = "export", base_folder, finetuned_folder, "--family", tmp_path / "f", "--name", "v"
    real = partial.VariantSpool.add

    def stop(spool, one):
        real(spool, one)
        raise KeyboardInterrupt

    monkeypatch.setattr(partial, "LEAST_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(partial.VariantSpool, "add", stop)
        result = run(*models)
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr == (
        "soupkit: v: what is done is kept: the same command goes on from there\n"
        "soupkit: interrupted; nothing was left half-written\n"
    )
    result = run(*models)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"; \d+% had been done before\n$", result.stdout)
    (again,) = document(*models)
    assert (again["replaced"], again["resumed"]) == (True, 0.0)


def test_progress_in_bytes_shows_them_and_the_speed(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with show_progress("exporting v", is_bytes=True) as progress:
        for done in range(50, 101, 10):
            progress("a.weight", done * 10**9, 10**11)
    told = capsys.readouterr().err
    assert "100.0/100.0 GB" in told
    assert "/s" in told


def test_a_base_that_is_exported_as_its_own_variant_is_told(base_folder, tmp_path):
    found = run("export", base_folder, base_folder, "--family", tmp_path / "family", "--name", "x")
    assert found.exit_code == 0
    told = found.output.rstrip()
    assert told.endswith("of the model in bfloat16; no weight differs from the base's")


def test_export_checks_all_names_before_it_writes(base_folder, tmp_path):
    family = tmp_path / "f"
    for names in (
        ["--name", "a"],
        ["--name", "a", "--name", "a"],
        ["--name", "a", "--name", "x/y"],
    ):
        assert "name" in complaint(
            "export", base_folder, base_folder, base_folder, "--family", family, *names
        )
    assert "'base'" in complaint("export", base_folder, base_folder, "--family", family)
    assert not family.exists()


def test_restore_and_merge_write_folders_that_agree(
    family, base_folder, finetuned_folder, tmp_path
):
    told = document("restore", family, "finetuned", "--out", tmp_path / "dense")
    assert told == {"path": str(tmp_path / "dense"), "dtype": "float32", "rounding_loss": 0.0}
    merged = document(
        "merge", base_folder, tmp_path / "dense", finetuned_folder, "--out", tmp_path / "merged",
        "--method", "mean", "--weights", "1,3",
    )  # fmt: skip
    assert merged["rule"]["weights"] == [0.25, 0.75]
    parts = [load_file(tmp_path / "dense" / "model.safetensors")]
    parts.append(load_file(finetuned_folder / "model.safetensors"))
    for name, found in load_file(tmp_path / "merged" / "model.safetensors").items():
        wanted = 0.25 * parts[0][name] + 0.75 * parts[1][name]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    told = run("restore", family, "finetuned", "--out", tmp_path / "half", "--dtype", "bfloat16")
    assert "rounding moves the weights by" in told.stdout
    told = run("merge", base_folder, finetuned_folder, "--out", tmp_path / "m2", "--rank", "2")
    assert "svd_mean of 1 checkpoint in" in told.stdout


def test_inspect_tells_families_variants_and_checkpoints(family, base_folder):
    told = document("inspect", family)
    assert told["kind"] == "family"
    variant = told["variants"]["finetuned"]
    assert variant["bytes"]["signs"] > 0
    assert {one["kind"] for one in variant["tensors"]} == {"delta", "raw", "tied"}
    assert document("inspect", family / variant["path"])["kind"] == "variant"
    checkpoint = document("inspect", base_folder)
    assert checkpoint["fingerprint"] == told["base"]["fingerprint"]
    for path, word in (
        (family, "lost energy"),
        (family / variant["path"], "tied to"),
        (base_folder, "fingerprint"),
    ):
        result = run("inspect", path)
        assert result.exit_code == 0
        assert word in result.stdout
    (family / variant["path"] / "manifest.json").write_text("{}")
    fault = document("inspect", family)["variants"]["finetuned"]["fault"]
    assert "manifest.json" in fault
    result = run("inspect", family)
    assert result.exit_code == 0
    assert f"\nfinetuned: {fault}\n" in result.stdout
    assert "damaged" in result.stdout


def test_names_in_tables_are_whole(family, monkeypatch):
    variant = family / "variants" / "finetuned"
    names = [entry["name"] for entry in document("inspect", variant)["tensors"]]
    assert all(name in run("inspect", variant).stdout for name in names)
    # On a narrow terminal they are folded, none of their letters is dropped.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    text = run("inspect", variant).stdout
    assert "\u2026" not in text
    assert all(len(re.sub("\x1b.*?m", "", line)) <= 80 for line in text.splitlines()[1:-1])


def test_history_is_told_in_four_digits_without_what_is_unknown(
    base_folder, finetuned_folder, tmp_path
):
    report = export_variant(
        open_checkpoint(base_folder),
        open_checkpoint(finetuned_folder),
        family=tmp_path / "f",
        name="v",
        history=[{"step": 40, "cosine": 0.9578834951732371, "reason": "", "metric": None}],
        metrics={"best_score": 2.4315323352813722},
    )
    told = run("inspect", report.path).stdout
    assert "\nstep=40 cosine=0.9579\n" in told
    assert "\nmetrics best_score=2.432\n" in told


def test_family_without_variants_is_told(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"][0] = float("nan")

    finetuned = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    line = complaint("export", base_folder, finetuned, "--family", tmp_path / "f")
    assert line.startswith(f"soupkit: {finetuned}: model.norm.weight: nan at")
    assert "no variants yet" in run("inspect", tmp_path / "f").stdout


def test_version_is_told():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"soupkit {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "{base}", "{base}", "--name", "v", "--family", ""),
        ("restore", "", "v", "--out", "{tmp}/out"),
        ("restore", "{tmp}", "v", "--out", ""),
        ("merge", "{base}", "{base}", "--out", ""),
        ("lora", "{base}", "{base}", "--out", ""),
        ("inspect", ""),
        ("verify", ""),
        ("serve", ""),
    ],
)
def test_empty_path_is_not_the_present_folder(base_folder, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    filled = [one.format(base=base_folder, tmp=tmp_path) for one in arguments]
    assert "an empty path" in complaint(*filled, code=2)
    assert list(tmp_path.iterdir()) == []


def test_empty_base_is_no_model(family, base_folder, tmp_path):
    for arguments in (
        ("export", "", base_folder, "--name", "v", "--family", tmp_path / "f"),
        ("export", base_folder, "", "--name", "v", "--family", tmp_path / "f"),
        ("restore", family, "finetuned", "--out", tmp_path / "out", "--base", ""),
        ("verify", family, "--base", ""),
    ):
        assert "an empty path is no model" in complaint(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["family"]


def test_verify_exits_with_one_and_the_faults(family):
    assert document("verify", family) == {"ok": True, "faults": []}
    assert "all is well" in run("verify", family).stdout
    path = family / "variants" / "finetuned" / "variant.safetensors"
    os.truncate(path, 50)
    result = run("verify", family, "--json")
    assert result.exit_code == 1
    assert result.stderr == ""
    told = json.loads(result.stdout)
    assert told["ok"] is False
    assert "truncated" in told["faults"][0]
    result = run("verify", family)
    assert result.exit_code == 1
    assert "truncated" in result.stdout


def test_lora_tells_what_it_loses_and_what_cannot_travel(base_folder, finetuned_folder, tmp_path):
    told = document("lora", base_folder, finetuned_folder, "--out", tmp_path / "a", "--rank", "3")
    assert set(told["ranks"].values()) == {3}
    assert 0 < told["lost_energy"] < 1
    assert "model.embed_tokens.weight" in told["left_out"]
    result = run("lora", base_folder, finetuned_folder, "--out", tmp_path / "b", "--rank", "3")
    assert "loses" in result.stdout
    assert "cannot travel" in result.stdout
    assert "model.norm.weight" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "{base}", "{tmp}/gone", "--out", "{tmp}/out"),
        ("merge", "{base}", "{base}", "--out", "{tmp}/out", "--rank", "0"),
        ("merge", "{base}", "{base}", "--out", "{tmp}/out", "--rank", "2", "--energy", "0.5"),
        ("merge", "{base}", "{base}", "--out", "{tmp}/out", "--weights", "a,b"),
        ("merge", "{base}", "{base}", "--out", "{tmp}/out", "--weights", "1,2"),
        ("merge", "{base}", "{base}", "--out", "{base}"),
        ("export", "{tmp}/gone", "{base}", "--family", "{tmp}/out", "--name", "v"),
        ("export", "{base}", "{base}", "--family", "{tmp}/out", "--name", "v", "--encoding", "9"),
        ("restore", "{tmp}/gone", "v", "--out", "{tmp}/out"),
        ("inspect", "{tmp}/gone"),
        ("verify", "{tmp}/gone"),
        ("lora", "{base}", "{base}", "--out", "{tmp}/out"),
        ("lora", "{base}", "{base}", "--out", "{tmp}/out", "--rank", "-1"),
        ("serve", "{tmp}/gone", "--cache-bytes", "many"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_one(base_folder, tmp_path, arguments):
    filled = [one.format(base=base_folder, tmp=tmp_path) for one in arguments]
    assert complaint(*filled)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "command", "extras"),
    [
        ("fastapi", "serve {family}", ["serve"]),
        ("transformers", "distill {family} {name} --finetuned x --data x", ["train", "serve"]),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    family, tmp_path, module, command, extras
):
    """In a process of its own, that has imported nothing yet."""
    start = f"import sys; sys.modules[{module!r}] = None; from soupkit.cli import main; main()"
    name = next(iter(document("inspect", family)["variants"]))
    arguments = command.format(family=family, name=name).split()
    found = subprocess.run(
        [sys.executable, "-c", start, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    remedy = " or ".join(f'pip install "soupkit[{extra}]"' for extra in extras)
    assert (found.returncode, found.stderr) == (
        1,
        f"soupkit: {module} is not installed: {remedy}\n",
    )


@pytest.mark.parametrize(
    ("method", "option"), [("mean", "--rank"), ("mean", "--energy"), ("monosoup", "--rank")]
)
def test_what_a_method_does_not_look_at_is_refused(base_folder, tmp_path, method, option):
    models = ("merge", base_folder, base_folder, "--method", method, "--out", tmp_path / "x")
    assert f"{option} is for --method svd_mean" in complaint(*models, option, "1", code=2)
    assert not (tmp_path / "x").exists()


def test_full_disk_is_one_line(base_folder, finetuned_folder, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    line = complaint("merge", base_folder, finetuned_folder, "--out", tmp_path / "out")
    assert line == f"soupkit: {tmp_path / 'out'}: No space left on device\n"
    family = tmp_path / "family"
    line = complaint("export", base_folder, finetuned_folder, "--family", family)
    assert line == f"soupkit: {family}: No space left on device\n"
    shutil.rmtree(family)
    assert list(tmp_path.iterdir()) == []


def test_serve_passes_its_options_on(family, monkeypatch):
    from soupkit.serving import server

    calls = []
    monkeypatch.setattr(server, "run", lambda path, **options: calls.append((path, options)))
    assert run("serve", family).exit_code == 0
    # Left to the server, which knows the defaults.
    assert calls[0][1]["max_queue"] is None
    result = run(
        "serve", family, "--port", "0", "--cache-bytes", "2GB", "--pin", "a", "--pin", "b",
        "--dtype", "float32", "--max-queue", "3", "--max-running", "2", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0
    path, options = calls[1]
    assert path == family
    assert options["cache_bytes"] == 2_000_000_000
    assert list(options["pin"]) == ["a", "b"]
    wanted = {"port": 0, "host": "127.0.0.1", "dtype": "float32", "device": "cpu", "base": None}
    assert {key: options[key] for key in wanted} == wanted
    assert (options["max_queue"], options["max_running"]) == (3, 2)


def test_serve_passes_its_options_on_to_replicas(family, monkeypatch, tmp_path):
    from soupkit.serving import front_app

    missing = run("serve", tmp_path / "none", "--replicas", "2", "--port", "0")
    assert (missing.exit_code, len(missing.stderr.splitlines())) == (1, 1)
    assert run("serve", family, "--replicas", "0").exit_code == 2
    calls = []
    monkeypatch.setattr(front_app, "run", lambda path, **options: calls.append((path, options)))
    assert run("serve", family, "--replicas", "3", "--max-running", "2").exit_code == 0
    path, options = calls[0]
    assert path == family
    assert (options["replicas"], options["max_running"]) == (3, 2)


def test_interrupt_is_one_line_and_leaves_nothing(
    base_folder, finetuned_folder, tmp_path, monkeypatch
):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("soupkit.shards.TensorFileWriter", interrupt)
    result = run("merge", base_folder, finetuned_folder, "--out", tmp_path / "out")
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr == "soupkit: interrupted; nothing was left half-written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_process_that_is_told_to_end_leaves_nothing(
    base_folder, finetuned_folder, tmp_path, number
):
    # A parent that ignores the signal, as nohup does, hands that down; soupkit leaves it so.
    code = f"""
import os
import signal
signal.signal({int(number)}, signal.SIG_DFL)
import soupkit.shards
from soupkit.cli import main

soupkit.shards.TensorFileWriter = lambda *_, **__: os.kill(os.getpid(), {int(number)})
main()
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    arguments = ["merge", str(base_folder), str(finetuned_folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 128 + number
    assert done.stderr == "soupkit: ended by a signal; nothing was left half-written\n"
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_terminal_cannot_show_are_escaped(family, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "PYTHONIOENCODING": "ascii",
    }
    other = family.rename(tmp_path / "f\xfcnf")
    done = subprocess.run(
        [sys.executable, "-m", "soupkit", "verify", str(other)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("f\\xfcnf: all is well\n")


def test_real_process_prints_json_and_faults_on_stdout_only(family):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "soupkit", "verify", str(family), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"ok": True, "faults": []}
    shutil.rmtree(family / "variants")
    done = subprocess.run(command[:-1], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "No such file" in done.stdout


BYTES = {
    "20GB": 20 * 10**9,
    "512MiB": 512 * 2**20,
    "1000": 1000,
    "1.5k": 1500,
    "2 TB": 2 * 10**12,
    "0": 0,
    "7B": 7,
    None: None,
}


@pytest.mark.parametrize(("text", "value"), BYTES.items())
def test_bytes_are_read_with_their_unit(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1e", "inf", "nan", "1 2"])
def test_other_text_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match="no number of bytes"):
        parse_bytes(text)


def test_weights_are_numbers_with_commas():
    assert parse_weights("0.7, 0.3") == (0.7, 0.3)
    assert parse_weights(None) is None
    with pytest.raises(ValueError, match="--weights"):
        parse_weights("1;2")


def test_sizes_in_tables_are_short():
    sizes = [0, 999, 1000, 17_752_752, 8_750_000_000, 2 * 10**12]
    told = ["0 B", "999 B", "1.0 kB", "17.8 MB", "8.8 GB", "2000.0 GB"]
    assert [size_of(one) for one in sizes] == told


def test_remove_takes_one_variant_out_and_leaves_the_rest(family, base_folder, finetuned_folder):
    assert run("export", base_folder, finetuned_folder, "--family", family, "--name", "other")
    result = run("remove", family, "finetuned")
    assert (result.exit_code, result.stdout) == (0, f"{family}: finetuned is removed\n")
    assert [one.name for one in (family / "variants").iterdir()] == ["other"]
    assert list(json.loads((family / "family.json").read_text())["variants"]) == ["other"]
    assert run("verify", family).exit_code == 0


def test_a_variant_whose_folder_is_gone_can_be_removed(family):
    shutil.rmtree(family / "variants" / "finetuned")
    assert run("verify", family).exit_code == 1
    assert run("remove", family, "finetuned").exit_code == 0
    assert run("verify", family).exit_code == 0


def test_remove_of_an_unknown_variant_changes_nothing(family):
    before = (family / "family.json").read_bytes()
    assert "it has: finetuned" in complaint("remove", family, "coder")
    assert (family / "family.json").read_bytes() == before
    assert run("verify", family).exit_code == 0


def test_a_removal_that_cannot_be_written_keeps_the_variant(family, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("soupkit.family_write.atomic_write_json", full)
        assert "No space left" in complaint("remove", family, "finetuned")
    assert run("verify", family).exit_code == 0


def test_bench_prints_one_document_or_a_table(monkeypatch):
    from soupkit.bench import kernel
    from soupkit.bench.rows import Row

    row = Row("9x17", 2.0, "ms", "F.linear", 2.0, 1.0, 3.0, 1.5)
    monkeypatch.setattr(kernel, "run", lambda *, quick: [row])
    found = document("bench", "kernel", "--quick")
    assert found["bench"] == "kernel"
    assert found["rows"][0]["ok"] is False
    assert "9x17" in run("bench", "kernel").stdout


@pytest.mark.parametrize("what", ["kernel", "merge", "export", "serve", "load", "cache"])
def test_every_bench_takes_what_the_command_gives_it(family, monkeypatch, what):
    import importlib
    import inspect

    from soupkit.bench.rows import Row

    module = importlib.import_module(f"soupkit.bench.{what}")
    given, takes = [], inspect.signature(module.run)

    def measured(*args, **options):
        given.append(takes.bind(*args, **options).arguments)
        return [Row("a figure", 1.0, "ms", "a baseline", 1.0, 0.9, 1.1)]

    monkeypatch.setattr(module, "run", measured)
    if what == "kernel":
        monkeypatch.setattr(module, "model", lambda *, quick: [])
    folder = [family] if what in ("serve", "load") else []
    assert document("bench", what, *folder, "--quick")["rows"][0]["name"] == "a figure"
    assert given[0]["quick"] is True
    assert not folder or given[0]["family"] == Path(family)


def test_bench_serve_and_load_and_no_other_take_a_family(family):
    assert "give a family" in complaint("bench", "serve")
    assert "give a family" in complaint("bench", "load")
    assert "and to no other" in complaint("bench", "kernel", family)
