"""Promises of soupkit.partial: an interrupted export goes on, to the bytes of one that was not."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soupkit import partial
from soupkit.bundle import open_family
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import BundleError, MergeError
from soupkit.export import export_variant
from soupkit.family_write import has_partial, kept_folder, remove_variant
from soupkit.verify import verify_family

KEPT = Path("variants") / ".partial-v"
SHAPES = {"embed.weight": (60, 20), "norm": (20,)} | {
    f"layers.{number}.weight": (30, 20) for number in range(6)
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with `base` and `ft`, worth going on with whatever their size."""
    monkeypatch.setattr(partial, "LEAST_BYTES", 0)
    generator = torch.Generator().manual_seed(1)
    for folder in ("base", "ft"):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.randn(one, generator=generator) for name, one in SHAPES.items()}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    return tmp_path


def export(root: Path, family: str = "family", name: str = "v", **options):
    base, finetuned = open_checkpoint(root / "base"), open_checkpoint(root / "ft")
    return export_variant(base, finetuned, family=root / family, name=name, **options)


def stop_after(count: int, error: BaseException):
    """A progress that raises after so many tensors."""
    seen = []

    def progress(name, done, total):
        seen.append(name)
        if len(seen) == count:
            raise error

    return progress


def interrupt(root: Path, count: int = 5, **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(root, progress=stop_after(count, KeyboardInterrupt()), **options)
    assert has_partial(root / "family", "v")
    assert verify_family(root / "family") == []


def written(report) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in report.path.iterdir()}


def check_like_new(root: Path, report, **options) -> None:
    """Assert that an export wrote what one without an interruption does, and left nothing else."""
    assert written(report) == written(export(root, "fresh", **options))
    assert [one.name for one in (root / "family" / "variants").iterdir()] == [report.path.name]
    assert verify_family(root / "family") == []


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupted_export_goes_on_with_the_same_bytes(models, count, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        interrupt(models, count)
        seen = []
        report = export(models, progress=lambda *one: seen.append(one))
    finally:
        torch.set_num_threads(before)
    assert seen[0][0] == "done before"
    assert len(seen) == 1 + len(SHAPES) - count
    assert report.resumed == seen[0][1] / seen[0][2] > 0
    assert "had been done before" in report.line()
    check_like_new(models, report)


def test_an_export_may_be_interrupted_again_and_again(models):
    for _ in SHAPES:
        # What was done before is told first, save the first time.
        interrupt(models, 1 if not has_partial(models / "family", "v") else 2)
    assert export(models).resumed == 1.0


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def cut(path: Path, length: int) -> None:
    os.truncate(path, path.stat().st_size + length if length < 0 else length)


DAMAGE = {
    "first byte of the spool": lambda kept: flip(kept / "spool", 0),
    "last byte of the spool": lambda kept: flip(kept / "spool", -1),
    "spool cut": lambda kept: cut(kept / "spool", -3),
    "spool empty": lambda kept: cut(kept / "spool", 0),
    "spool longer": lambda kept: cut(kept / "spool", (kept / "spool").stat().st_size + 999),
    "spool gone": lambda kept: (kept / "spool").unlink(),
    "journal cut": lambda kept: cut(kept / "journal", -1),
    "journal cut in a line": lambda kept: cut(kept / "journal", -40),
    "journal empty": lambda kept: cut(kept / "journal", 0),
    "journal gone": lambda kept: (kept / "journal").unlink(),
    "journal of zeros": lambda kept: (kept / "journal").write_bytes(bytes(500)),
    "a digit of the journal": lambda kept: flip(kept / "journal", -90),
    "its first line": lambda kept: flip(kept / "journal", 25),
    "zeros behind the journal": lambda kept: cut(
        kept / "journal", (kept / "journal").stat().st_size + 99
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_a_power_loss_damaged_is_done_anew(models, damage):
    interrupt(models)
    damage(models / "family" / KEPT)
    report = export(models)
    assert 0 <= report.resumed < 1
    check_like_new(models, report)


def test_only_what_follows_the_damage_is_lost(models):
    interrupt(models)
    flip(models / "family" / KEPT / "spool", -1)
    assert export(models).resumed > 0.5


def test_a_journal_does_not_grow_by_being_cut(models):
    interrupt(models, 3)
    journal = models / "family" / KEPT / "journal"
    lines = journal.read_bytes().splitlines()
    cut(journal, -1)
    interrupt(models, 2)
    again = journal.read_bytes().splitlines()
    assert again[:-1] == lines[:-1]
    assert export(models).resumed > 0


def change_content(root: Path) -> None:
    tensors = load_file(root / "ft" / "model.safetensors")
    tensors["layers.0.weight"] = tensors["layers.0.weight"] + 1
    save_file(tensors, root / "ft" / "model.safetensors")


def change_secretly(root: Path) -> None:
    path = root / "ft" / "model.safetensors"
    stat = path.stat()
    flip(path, -4)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def touch(root: Path) -> None:
    os.utime(root / "ft" / "model.safetensors", ns=(1, 1))


@pytest.mark.parametrize("change", [change_content, change_secretly, touch])
def test_another_fine_tune_starts_anew(models, change):
    interrupt(models)
    change(models)
    report = export(models)
    assert report.resumed == 0
    check_like_new(models, report)


@pytest.mark.parametrize(
    "options", [{"encoding": "row-x2"}, {"encodings": {"layers.5.weight": "sparse"}}]
)
def test_another_encoding_starts_anew(models, options):
    interrupt(models)
    report = export(models, **options)
    assert report.resumed == 0
    check_like_new(models, report, **options)


def test_another_version_starts_anew(models, monkeypatch):
    interrupt(models)
    monkeypatch.setattr(partial, "__version__", "0")
    assert export(models).resumed == 0


def test_a_full_disk_keeps_what_is_done(models, monkeypatch):
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            export(models)
    report = export(models)
    assert 0 < report.resumed < 1
    check_like_new(models, report)


def test_an_error_that_would_come_again_leaves_nothing(models):
    tensors = load_file(models / "ft" / "model.safetensors")
    tensors["norm"][3] = float("nan")
    save_file(tensors, models / "ft" / "model.safetensors")
    with pytest.raises(MergeError, match="norm"):
        export(models)
    assert list((models / "family" / "variants").iterdir()) == []


def test_an_export_beside_a_live_one_of_that_name_shares_nothing(models):
    interrupt(models)
    with kept_folder(models / "family", "v") as held:
        assert held is not None
        before = {path.name: path.read_bytes() for path in held.iterdir()}
        report = export(models)
        assert report.resumed == 0
        assert {path.name: path.read_bytes() for path in held.iterdir()} == before
        assert written(report) == written(export(models, "fresh"))
        assert export(models, name="w").resumed == 0
    assert not has_partial(models / "family", "v")


def test_a_later_export_of_the_name_removes_what_was_left(models, monkeypatch):
    interrupt(models)
    monkeypatch.setattr(partial, "LEAST_BYTES", 2**40)
    report = export(models)
    assert report.resumed == 0
    check_like_new(models, report)


def test_other_names_and_removals_leave_it(models):
    interrupt(models)
    export(models, name="w")
    remove_variant(models / "family", "w")
    assert has_partial(models / "family", "v")
    assert open_family(models / "family").variants == {}
    assert export(models).resumed > 0


def test_removing_a_variant_removes_what_was_left_of_its_next_one(models):
    export(models)
    interrupt(models, encoding="row-x2")
    remove_variant(models / "family", "v")
    assert list((models / "family" / "variants").iterdir()) == []


def test_what_was_left_of_a_first_export_can_be_removed(models):
    interrupt(models)
    for name in ("w", "", "v/../../..", "v/spool", "*"):
        with pytest.raises(BundleError, match="has no variant"):
            remove_variant(models / "family", name)
    with kept_folder(models / "family", "v"), pytest.raises(BundleError, match="has no variant"):
        remove_variant(models / "family", "v")
    interrupt(models)
    remove_variant(models / "family", "v")
    assert list((models / "family" / "variants").iterdir()) == []


def test_small_fine_tunes_leave_nothing(models, monkeypatch):
    monkeypatch.setattr(partial, "LEAST_BYTES", 2**40)
    with pytest.raises(KeyboardInterrupt):
        export(models, progress=stop_after(3, KeyboardInterrupt()))
    assert list((models / "family" / "variants").iterdir()) == []


def test_a_copied_family_with_a_partial_is_whole(models):
    interrupt(models)
    shutil.copytree(models / "family", models / "copy")
    assert verify_family(models / "copy") == []
