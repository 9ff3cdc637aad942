"""`soupkit bench kernel`: its rows, and its check of a GPU as far as a CPU runs it; no times."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from soupkit.bench import findings, kernel, kernel_gpu, kernel_sanitizer, roofline, rows, workers
from soupkit.bench.findings import Finding, Part, Report
from soupkit.cli import app
from soupkit_kernels import configs
from soupkit_kernels.arena import arena_of
from soupkit_kernels.configs import Config

CPU = torch.device("cpu")
GPU = kernel_gpu.Gpu(
    "NVIDIA H200", CPU, l2_bytes=1000, memory_bytes=1 << 20, bandwidth=4e12, is_hopper=True
)


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs that call once; the n-th that is captured takes n seconds. Counts of their calls."""
    counts: list[int] = []

    def capture(call: Callable[[int], Tensor], count: int) -> Callable[[], float]:
        call(0)
        call(count - 1)
        counts.append(count)
        seconds = float(len(counts))
        return lambda: seconds

    monkeypatch.setattr(kernel_gpu, "capture", capture)
    return counts


def test_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SHAPES", ((9, 17), (11, 13)))
    monkeypatch.setattr(kernel, "ROTATED_BYTES", 1000)
    names = [found.name for found in kernel.run(quick=True)]
    assert any(name.startswith("9x17 bf16 M=8 V=4 ") for name in names)
    assert len(names) == len(set(names)) == 8


def test_without_a_gpu_a_model_is_told_as_such() -> None:
    found = kernel.model(quick=True)
    assert found
    assert all("(model)" in row.name for row in found)
    document = rows.document("kernel", [], found)
    assert len(document["model"]) == len(found)
    assert "model" not in rows.document("kernel", [])


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, fake_graphs: list[int]) -> None:
    monkeypatch.setattr(kernel_gpu, "QUICK_SHAPES", ((32, 16), (64, 40)))
    monkeypatch.setattr(kernel_gpu, "QUICK_TOKENS", (1, 8, 80))
    found = list(kernel_gpu.measure(GPU, quick=True))
    assert (found[0].name, found[0].baseline, found[0].better) == (
        "copy", "datasheet 4.8 TB/s", "higher",
    )  # fmt: skip
    assert found[0].ratio == pytest.approx(4 / 4.8)
    against = [row for row in found if row.baseline == "F.linear"]
    # V=0, 1 of one token; V=0, 1, 4 of eight; all of eighty. Two shapes.
    assert len(against) == 2 * (2 + 3 + 4)
    first = against[0]
    assert first.name.startswith("32x16 bf16 M=1 V=0 ")
    # The baseline's graph came first, the candidate's second.
    assert (first.ratio, first.goal) == (2.0, kernel_gpu.SLACK)
    assert first.value == 2e6
    least = [row for row in found if row.baseline == "bytes at 4.00 TB/s"]
    assert len(least) == 2 * (2 + 3)
    moved = roofline.layer_bytes(32, 16, variants=0, tokens=1)
    assert least[0].ratio == pytest.approx(2.0 / max(moved / 4e12, 1e-9))
    # 32 x 16 bf16 is 1024 bytes: four copies exceed four times the cache, forty calls go around.
    assert fake_graphs[0] == 40
    assert fake_graphs[-1] == 2


def test_layers_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_gpu, "QUICK_SHAPES", ((4096, 4096),))
    assert [row.name for row in kernel_gpu.measure(GPU, quick=True)] == ["copy"]


@pytest.mark.parametrize(
    ("tokens", "variants", "limit"),
    [
        (1, 0, 1.15), (64, 16, 2.3), (16, 4, 1.4375), (65, 1, 2.0), (1023, 1, 2.0), (1024, 1, 1.4),
        (4096, 1, 1.1), (8192, 1, 1.1), (8192, 4, None),
    ],
)  # fmt: skip
def test_goals_are_those_of_the_goals_page(tokens: int, variants: int, limit: float | None) -> None:
    assert kernel_gpu.goal(tokens, variants) == (limit and pytest.approx(limit))


def test_all_rows_of_a_gpu_have_names_of_their_own() -> None:
    shapes = (*kernel_gpu.SHAPES_8B, *kernel_gpu.SHAPES_70B)
    assert len(set(shapes)) == len(shapes) == 8
    assert set(kernel_gpu.QUICK_SHAPES) < set(shapes)
    assert set(kernel_gpu.QUICK_TOKENS) < set(kernel_gpu.TOKENS)
    assert set(kernel_gpu.QUICK_VARIANTS) < set(kernel_gpu.VARIANTS)


# -- findings --


def finding(name: str, status: findings.Status = "ok", detail: str = "") -> Finding:
    return Finding(name, status, detail)


def test_a_part_is_cut_at_its_budget_and_says_so() -> None:
    now = [0.0]

    def slow() -> Iterator[Finding]:
        for i in range(9):
            now[0] += 4
            yield finding(str(i))

    report, told = Report(), []
    parts = [Part("slow", slow, 7), Part("next", lambda: iter([finding("a")]), 1)]
    findings.collect(report, parts, clock=lambda: now[0], progress=lambda *said: told.append(said))
    assert [(part, one.name, one.status) for part, one in report.found] == [
        ("slow", "0", "ok"), ("slow", "1", "ok"), ("slow", "the rest", "not run"),
        ("next", "a", "ok"),
    ]  # fmt: skip
    assert told == [("slow: 0", 4, 8), ("slow: 1", 7, 8), ("next: a", 7, 8)]
    assert not report.failed


def test_an_exception_fails_its_part_alone_and_cuda_errors_end_all() -> None:
    def broken(said: str) -> Iterator[Finding]:
        yield finding("before")
        raise RuntimeError(said)

    report = Report()
    parts = [
        Part("a", lambda: broken("no such thing"), 9),
        Part("b", lambda: iter([finding("x")]), 9),
        Part("c", lambda: broken("CUDA error: misaligned address"), 9),
        Part("d", lambda: iter([finding("y")]), 9),
    ]
    findings.collect(report, parts)
    statuses = [(part, one.status) for part, one in report.found]
    assert statuses == [
        ("a", "ok"), ("a", "FAILED"), ("b", "ok"), ("c", "ok"), ("c", "FAILED"), ("d", "not run"),
    ]  # fmt: skip
    assert report.failed


def test_an_error_of_cuda_in_another_process_ends_nothing() -> None:
    def part() -> Iterator[Finding]:
        yield finding("a", "FAILED", "AcceleratorError: CUDA error: misaligned address")
        yield finding("b")

    report = Report()
    parts = [Part("apart", part, 9, is_apart=True), Part("here", part, 9), Part("then", part, 9)]
    findings.collect(report, parts)
    assert [(part, one.name, one.status) for part, one in report.found] == [
        ("apart", "a", "FAILED"), ("apart", "b", "ok"), ("here", "a", "FAILED"),
        ("then", "all", "not run"),
    ]  # fmt: skip


def test_who_interrupts_has_what_came_before() -> None:
    def part() -> Iterator[Finding]:
        yield finding("before")
        raise KeyboardInterrupt

    report = Report()
    with pytest.raises(KeyboardInterrupt):
        findings.collect(report, [Part("a", part, 9)])
    assert [one.name for _, one in report.found] == ["before"]


# -- processes --


SHARES = """
import os, time
from soupkit.bench.findings import Finding

def share(first, step):
    for i in range(first, 5, step):
        yield Finding(str(i), "ok")
    if first:
        os._exit(3)
    time.sleep(600)
"""


def test_processes_share_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shares_of_processes.py").write_text(SHARES)
    monkeypatch.syspath_prepend(str(tmp_path))
    share = importlib.import_module("shares_of_processes").share
    running = workers.run_parallel(share, workers=2, seconds=60)
    found = list(itertools.islice(running, 6))
    # One still sleeps; it is ended with the iterator.
    running.close()
    assert sorted(one.name for one in found if one.status == "ok") == list("01234")
    assert [one.detail for one in found if one.status == "FAILED"] == ["ended with exit code 3"]
    assert not multiprocessing.active_children()


# -- the sanitizer --


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", "ok"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "ok"),
        (77, "========= Invalid read, an Error\n========= ERROR SUMMARY: 3 errors\n", "FAILED"),
        (0, "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", "FAILED"),
        (1, "wrong result: linear: 3 off\n========= ERROR SUMMARY: 0 errors\n", "FAILED"),
        (255, "========= Error: Device not supported\n", "not run"),
        (0, "nothing at all\n", "not run"),
        (1, "========= ERROR SUMMARY: 0 errors\n", "not run"),
    ],
)
def test_only_a_clean_summary_of_the_sanitizer_is_ok(code: int, output: str, status: str) -> None:
    assert kernel_sanitizer.judge("memcheck", code, output).status == status


def test_a_missing_sanitizer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel_sanitizer, "PLACES", (str(tmp_path / "cuda"),))
    found = list(kernel_sanitizer.check_sanitizer(1))
    assert [one.status for one in found] == ["not run"] * 2
    assert "compute-sanitizer is neither on PATH" in found[0].detail


def test_the_sanitizer_runs_the_small_cases_in_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        '#!/bin/sh\necho "$*" > "$LOG"\necho "$PYTHONPATH" >> "$LOG"\n'
        'echo "ERROR SUMMARY: 0 errors"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    assert [one.status for one in kernel_sanitizer.check_sanitizer(60)] == ["ok", "ok"]
    command, path = (tmp_path / "log").read_text().splitlines()
    assert command.startswith("--tool memcheck --error-exitcode 77 ")
    assert "--kernel-name" not in command
    assert command.endswith("from soupkit.bench.kernel_sanitizer import small; small()")
    assert str(Path(kernel.__file__).parents[2]) in path


# -- with Triton's interpreter (or a GPU) --

pytest.importorskip("triton")
import triton_bfloat16  # noqa: E402

from soupkit.bench import kernel_cases, kernel_check, kernel_graphs, kernel_results, kernel_tune  # noqa: E402
from soupkit.bench.kernel_cases import ALL, FP16, FP32, ONE, Case  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton_bfloat16.IS_INTERPRETED, reason="on a GPU `--check` itself says more"
)


def test_racecheck_watches_a_kernel_that_there_is() -> None:
    from soupkit_kernels.triton_linear import delta_linear_kernel

    # A name of no kernel would be found clean.
    assert delta_linear_kernel.__name__ == kernel_sanitizer.KERNEL


@interpreted
def test_every_tiny_case_is_right() -> None:
    found = list(kernel_results.check_all(kernel_cases.tiny_cases(), CPU))
    assert [one for one in found if one.status != "ok"] == []
    assert len({one.name for one in found}) == len(found) == len(kernel_cases.tiny_cases())


def test_cases_for_a_gpu_reach_every_path() -> None:
    cases = kernel_cases.gpu_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.what for case in cases} == {"linear", "add", "embedding"}
    assert {case.of for case in cases} == {"mixed", "one", "base", "outside"}
    assert {case.dtype for case in cases} == set(kernel_cases.SHORT)
    assert {1, 2, 64, 65, 200} <= {case.tokens for case in cases}
    assert any(case.out_features == 152064 and case.what == "linear" for case in cases)
    assert max(one.planes for case in cases for one in case.slots) == 4


@interpreted
@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("linear", "value"), ("add", "value"), ("embedding", "value"), ("linear", "sign"),
        ("linear", "nan"), ("add", "unwritten"), ("linear", "later"), ("embedding", "later"),
    ],
)  # fmt: skip
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, what: str, fault: str) -> None:
    case = Case(9, 32, 5, (ONE, ALL), dtype=FP32, what=what)  # type: ignore[arg-type]
    layer = kernel_results.make(case, CPU, 0)
    right, calls = kernel_results.call, []

    def call(*arguments: object) -> Tensor:
        y = right(*arguments)  # type: ignore[arg-type]
        calls.append(y)
        at = y[3, 4]
        if fault == "value":
            at += 0.05 * y[3].abs().mean()
        elif fault == "sign":
            at *= -1
        elif fault == "nan":
            at.fill_(torch.nan)
        elif fault == "unwritten":
            at.copy_(torch.empty(()))
        elif len(calls) == 3:
            at.copy_(torch.nextafter(at, at + 1))
        return y

    assert kernel_results.check(case, layer).status == "ok"
    monkeypatch.setattr(kernel_results, "call", call)
    found = kernel_results.check(case, layer)
    assert found.status == "FAILED"
    assert ("different bits" in found.detail) == (fault == "later")


def test_the_reference_is_the_meaning_of_naive() -> None:
    from soupkit_kernels import naive

    case = Case(9, 20, 6, (ONE, ALL, kernel_cases.EMPTY), dtype=FP16, has_bias=True)
    layer = kernel_results.make(case, CPU, 0)
    bias = layer.bias.double() if layer.bias is not None else None
    want = naive.delta_linear(
        layer.x.double(), layer.weight.double(), layer.deltas, layer.index, bias
    )
    found = kernel_results.reference(case, layer, layer.index)
    torch.testing.assert_close(found, want, equal_nan=True)
    assert set(layer.index.tolist()) == {-1, 0, 1, 2}
    outside = layer.index.clone()
    outside[2] = 3
    assert bool(kernel_results.reference(case, layer, outside)[2].isnan().all())


def test_memory_is_poisoned_within_and_only_within() -> None:
    with kernel_results.poisoned():
        assert bool(torch.empty(3, 5).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


@interpreted
def test_torch_compile_is_checked() -> None:
    found = list(kernel_graphs.check_compile(CPU, out=8, width=32))
    assert [one.status for one in found] == ["ok"] * 2


class Replayed:
    """A CUDA graph's outline: the same call again, into the tensors that it returned at first."""

    def __init__(self, run: Callable[[], list[Tensor]]) -> None:
        self.run, self.outputs = run, run()

    def replay(self) -> None:
        for output, new in zip(self.outputs, self.run(), strict=True):
            output.copy_(new)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(run: Callable[[], list[Tensor]]) -> tuple[Replayed, list[Tensor]]:
        graph = Replayed(run)
        return graph, graph.outputs

    monkeypatch.setattr(kernel_graphs, "_captured", captured)
    monkeypatch.setattr(kernel_graphs, "SIZES", (5,))
    monkeypatch.setattr(kernel_graphs, "ROUNDS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


@interpreted
@pytest.mark.usefixtures("fake_cuda")
def test_graphs_and_streams_are_checked() -> None:
    found = list(kernel_graphs.check_graphs(CPU, out=8, width=32))
    assert [one.status for one in found] == ["ok"] * 2
    assert [one.status for one in kernel_graphs.check_streams(CPU, out=8, width=32)] == ["ok"] * 2


@interpreted
@pytest.mark.usefixtures("fake_cuda")
def test_a_replay_that_keeps_old_variants_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[Tensor]] = []

    def replay(self: Replayed) -> None:
        kept.append([one.clone() for one in self.run()])
        for output, old in zip(self.outputs, kept[0], strict=True):
            output.copy_(old)

    monkeypatch.setattr(Replayed, "replay", replay)
    found = next(kernel_graphs.check_graphs(CPU, out=8, width=32))
    assert found.status == "FAILED"
    assert found.detail.startswith("replay 1: ")


@interpreted
def test_the_check_says_what_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = kernel_cases.tiny_cases()[:2]
    monkeypatch.setattr(kernel_cases, "tiny_cases", lambda: tiny)
    monkeypatch.setattr(kernel_graphs, "check_compile", lambda *_, **__: iter([finding("c")]))
    check = kernel_check.Check()
    kernel_check.run(check)
    verdicts = {part: one.status for part, one in check.report.found}
    on_cpu = {"results": "ok", "torch.compile": "ok"}
    assert verdicts == {**dict.fromkeys(kernel_check.SECONDS, "not run"), **on_cpu}
    document = json.loads(json.dumps(kernel_check.document(check)))
    assert document["complete"] is True
    assert len(document["findings"]) == 2 + 1 + 5
    kernel_check.show(check, on_stderr=False)
    printed = capsys.readouterr().out
    assert "3 ok, 0 FAILED, 5 not run" in printed
    assert printed.count("needs a GPU") == 5


def test_the_check_fits_in_ten_minutes() -> None:
    assert sum(kernel_check.SECONDS.values()) < 570


@interpreted
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("not run", 0), ("FAILED", 1)])
def test_the_exit_code_says_whether_a_result_was_wrong(
    monkeypatch: pytest.MonkeyPatch, status: findings.Status, code: int
) -> None:
    parts = [Part("part", lambda: iter([finding("case", status, "why")]), 9)]
    monkeypatch.setattr(kernel_check, "_parts", lambda _: parts)
    done = CliRunner().invoke(app, ["bench", "kernel", "--check", "--json"])
    assert done.exit_code == code
    assert json.loads(done.stdout)["findings"][0]["status"] == status
    assert "why" in done.stderr
    assert "why" in CliRunner().invoke(app, ["bench", "kernel", "--check"]).stdout


@interpreted
def test_an_interrupted_check_shows_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> Iterator[Finding]:
        yield finding("before")
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_check, "_parts", lambda _: [Part("part", part, 9)])
    done = CliRunner().invoke(app, ["bench", "kernel", "--check"])
    assert done.exit_code == 130
    assert "interrupted" in done.stdout
    assert "before" in done.stdout


@pytest.mark.parametrize("arguments", [("merge", "--check"), ("kernel", "--check", "--quick")])
def test_check_is_for_the_kernel_alone(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 1
    assert "give --check to `bench kernel`" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_and_interpreter_the_check_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernel_check.run(kernel_check.Check())


# -- tuning --


def test_candidates_fit_and_the_nearest_come_first() -> None:
    for key, present in configs._TABLE.items():
        if key[2] == 2:
            found = list(kernel_tune.candidates(key, present))
            assert present not in found
            assert len(set(found)) == len(found) > 20
            assert all(one.block_n >= 16 * one.num_warps for one in found)
    near = list(kernel_tune.candidates((16, 1, 2), Config(64, 128, 4, 4)))[:5]
    assert near == [
        Config(64, 128, 4, 4, 1), Config(64, 128, 4, 4, 3), Config(64, 128, 4, 4, 4),
        Config(64, 128, 4, 3), Config(64, 128, 4, 5),
    ]  # fmt: skip


def test_a_batch_of_each_kind_of_group_is_found() -> None:
    assert kernel_tune.batch_of((16, 1, 2)) == (16, 1)
    assert kernel_tune.batch_of((16, 4, 2)) == (16, 4)
    assert kernel_tune.batch_of((3, 4, 2)) is None
    assert all(kernel_tune.batch_of(key) for key in configs._TABLE)


@interpreted
def test_a_tuning_pass_prints_the_table_of_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    present, best = Config(64, 128, 4, 4), Config(128, 128, 4, 3, 1)
    table = {(16, 1, 2): present, (16, 2, 2): present, (3, 1, 2): present, (16, 1, 4): present}
    monkeypatch.setattr(configs, "_TABLE", dict(table))
    monkeypatch.setattr(kernel_tune, "SHAPES", ((32, 256),))
    monkeypatch.setattr(kernel_tune, "candidates", lambda *_: iter([Config(64, 128, 8, 2), best]))
    monkeypatch.setattr(kernel_tune, "run_parallel", lambda *_, **__: iter([finding("", "info")]))
    monkeypatch.setattr(kernel_gpu, "arena_of", functools.partial(arena_of, is_lane=True))

    def capture(call: Callable[[int], Tensor], count: int) -> Callable[[], float]:
        call(0)
        seconds = 0.5 if configs._TABLE[16, 2, 2] == best else 0.99
        return lambda: seconds

    monkeypatch.setattr(kernel_gpu, "capture", capture)
    tuner = kernel_tune.Tuner(GPU, dtype=FP16)
    found = list(tuner.run())
    assert [one for one in found if one.status == "FAILED"] == []
    assert [one.name for one in found][:2] == ["M=3 terms=1", "compiled ahead"]
    assert table == configs._TABLE
    text = tuner.text("triton 3.9.0", "2026-11-30")
    assert "# Tuned on NVIDIA H200, triton 3.9.0, 2026-11-30, 4 candidates:" in text
    assert "(16, 2, 2): Config(128, 128, 4, 3, 1),  # 0.51 of before" in text
    scope: dict[str, object] = {"Config": Config}
    exec(text, scope)
    assert scope["_TABLE"] == {**table, (16, 2, 2): best}


@interpreted
def test_another_chip_is_tuned_in_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from soupkit_kernels import gpu

    hopper, old, new = Config(64, 256, 4, 2), Config(64, 128, 4, 2), Config(32, 128, 4, 2)
    monkeypatch.setattr(gpu, "chip", lambda _: (108, 80))
    monkeypatch.setattr(configs, "_TABLE", {(16, 8, 2): hopper, (16, 4, 2): hopper})
    monkeypatch.setattr(configs, "_NOT_HOPPER", {(16, 8, 2): old})
    tuner = kernel_tune.Tuner(GPU, best=kernel_tune.present_of(CPU))
    assert tuner.best == {(16, 8, 2): old, (16, 4, 2): hopper}
    for key in tuner.best:
        with kernel_tune.using(CPU, key, new):
            assert configs.config(*key, 80) == new
            assert configs.config(*key, 90) == hopper
        assert configs.config(*key, 80) == tuner.best[key]
    assert {(16, 8, 2): old} == configs._NOT_HOPPER
    assert "_NOT_HOPPER = {\n    (16, 8, 2): Config(64, 128, 4, 2),\n}" in tuner.text("", "")


@interpreted
def test_a_candidate_with_another_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_TABLE", {(16, 1, 2): Config(64, 128, 4, 4)})
    monkeypatch.setattr(kernel_tune, "SHAPES", ((16, 128),))
    monkeypatch.setattr(kernel_gpu, "capture", lambda *_: lambda: 1.0)
    monkeypatch.setattr(kernel_gpu, "arena_of", functools.partial(arena_of, is_lane=True))
    trials = kernel_tune.trials_of(GPU, FP16, is_timed=True)
    tuner, trial = kernel_tune.Tuner(GPU, dtype=FP16), trials[16, 1, 2]
    assert tuner._try(trial, Config(64, 128, 4, 3)).status == "info"
    right = kernel_tune.delta_linear
    monkeypatch.setattr(kernel_tune, "delta_linear", lambda *given: right(*given) * 1.05)
    assert tuner._try(trial, Config(64, 128, 4, 3)).status == "FAILED"
    monkeypatch.setattr(kernel_tune, "delta_linear", None)
    assert "TypeError" in tuner._try(trial, Config(64, 128, 4, 3)).detail


@interpreted
def test_candidates_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_TABLE", {(16, 1, 2): Config(64, 128, 4, 4)})
    monkeypatch.setattr(kernel_tune, "SHAPES", ((16, 128),))
    monkeypatch.setattr(kernel_gpu, "arena_of", functools.partial(arena_of, is_lane=True))
    taken, right = [], kernel_tune.delta_linear

    def call(*given: object) -> Tensor:
        taken.append(configs._TABLE[16, 1, 2])
        return right(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_tune, "delta_linear", call)
    every = [Config(64, 128, 4, 3), Config(64, 128, 4, 5), Config(128, 128, 4, 4)]
    monkeypatch.setattr(kernel_tune, "candidates", lambda *_: iter(every))
    told = [list(kernel_tune.compile_share(i, 2, dtype=FP16)) for i in range(2)]
    assert list(map(len, told)) == [2, 1]
    assert taken == [every[0], every[2], every[1]]
