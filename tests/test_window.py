"""Promises of soupkit.window and pairs: who reads, how far ahead, and no result depends on it."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from soupkit import pairs
from soupkit.budget import plan_export
from soupkit.checkpoint import open_checkpoint
from soupkit.export import export_variant
from soupkit.window import Job, as_they_end
from soupkit.workers import Workers


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_all_results_come_and_memory_bounds_what_is_under_way(three_threads):
    under_way, most = set(), [0]
    sizes = {name: 1 + name % 4 for name in range(30)} | {7: 99}

    def job(name):
        def begin():
            under_way.add(name)
            most[0] = max(most[0], sum(sizes[one] for one in under_way if sizes[one] < 99))
            assert sizes[name] < 99 or under_way == {name}
            return lambda: name

        return Job(sizes[name], begin)

    seen = []
    with Workers() as workers:
        for name in as_they_end(workers, map(job, range(30)), most_bytes=6):
            seen.append(name)
            under_way.remove(name)
    assert sorted(seen) == list(range(30))
    assert 1 < most[0] <= 6


def test_an_error_is_raised_and_no_more_jobs_begin(three_threads):
    begun = []

    def job(number):
        def begin():
            begun.append(number)
            return lambda: 1 // (number - 2)

        return Job(1, begin)

    with Workers() as workers, pytest.raises(ZeroDivisionError):
        list(as_they_end(workers, map(job, range(99)), most_bytes=10))
    assert len(begun) < 20


@pytest.fixture
def models(tmp_path):
    generator = torch.Generator().manual_seed(1)
    shapes = {f"layers.{number}.weight": (20 + 7 * number % 30, 33) for number in range(12)}
    for folder in ("base", "ft"):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.randn(one, generator=generator) for name, one in shapes.items()}
        save_file(tensors | {"n": torch.ones(5)}, tmp_path / folder / "model.safetensors")
    return open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "ft")


class Run:
    """A source whose weights are no files: it may only be asked in one thread, in order."""

    def __init__(self, checkpoint):
        self._checkpoint, self._thread = checkpoint, threading.get_ident()
        self.names, self.asked = checkpoint.names, []
        self.shape, self.dtype = checkpoint.shape, checkpoint.dtype

    def tensor(self, name):
        assert threading.get_ident() == self._thread
        self.asked.append(name)
        # As a gathered parameter: nothing may be recorded on it.
        return self._checkpoint.tensor(name).clone().requires_grad_()


ENCODINGS = ["row", "matrix-x2", "rank1", "column-x2-refit", "sparse", "lowrank-3+row", "raw"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_threads_and_kind_of_source_change_no_byte(models, tmp_path, encoding, three_threads):
    def exported(name, finetuned, threads):
        torch.set_num_threads(threads)
        options = {"family": tmp_path / "f", "name": name, "encoding": encoding}
        report = export_variant(models[0], finetuned, **options)
        return report.entries, (report.path / "variant.safetensors").read_bytes()

    alone = exported("alone", models[1], 1)
    run = Run(models[1])
    assert exported("three", models[1], 3) == alone
    assert exported("run", run, 3) == alone
    assert run.asked == list(models[1].names)
    assert torch.get_num_threads() == 3


def test_a_run_is_asked_for_few_tensors_ahead(models, tmp_path, three_threads, monkeypatch):
    run, ahead = Run(models[1]), []
    monkeypatch.setattr(pairs, "_MOST_BYTES", 0)
    export_variant(
        models[0], run, family=tmp_path / "f", name="v",
        progress=lambda *_: ahead.append(len(run.asked) - len(ahead)),
    )  # fmt: skip
    assert set(ahead) == {1}


def test_a_plan_does_not_depend_on_threads(models, three_threads):
    three = plan_export(*models)
    torch.set_num_threads(1)
    alone = plan_export(*models)
    assert alone == three
    assert list(alone.survey.energies) == list(three.survey.energies)


def test_what_the_process_shares_is_as_before(models, tmp_path, three_threads):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        export_variant(*models, family=tmp_path / "f", name="v", encoding="lowrank-3+row")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
