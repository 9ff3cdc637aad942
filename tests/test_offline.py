"""Promises of soupkit.offline: the merge in memory, on disk, loadable by transformers."""

import errno
import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from soupkit import mean, merger
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import CheckpointError, MergeError
from soupkit.merge import MergeRule, merge_deltas
from soupkit.offline import REPORT_NAME, merge_checkpoints

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="session")
def fine_tunes(base_folder, make_finetune, tmp_path_factory):
    root = tmp_path_factory.mktemp("fine_tunes")
    return [make_finetune(root / f"ft{seed}", base_folder, seed=seed) for seed in (1, 2, 3)]


def merge(base, checkpoints, out, rule, **options):
    opened = [open_checkpoint(one) for one in checkpoints]
    return merge_checkpoints(open_checkpoint(base), opened, out=out, rule=rule, **options)


def weights(folder):
    return load_file(folder / "model.safetensors")


RULES = {
    "mean": MergeRule("mean"),
    "weighted mean": MergeRule("mean", weights=(3.0, 1.0, 0.5)),
    "svd_mean": MergeRule("svd_mean", rank=3),
    "svd_mean by energy": MergeRule("svd_mean", energy=0.7, weights=(1.0, 2.0, 1.0)),
    "monosoup": MergeRule("monosoup"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_result_is_the_merge_in_memory(base_folder, fine_tunes, tmp_path, rule):
    report = merge(base_folder, fine_tunes, tmp_path / "out", rule)
    base, found = weights(base_folder), weights(tmp_path / "out")
    assert set(found) == set(base)
    for name, start in base.items():
        deltas = [weights(folder)[name] - start for folder in fine_tunes]
        wanted = start + merge_deltas(name, deltas, rule)[0]
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-7)
    assert [matrix.name for matrix in report.matrices] == sorted(base)


def test_mean_and_full_rank_are_the_average_of_the_weights(base_folder, fine_tunes, tmp_path):
    merge(base_folder, fine_tunes[:2], tmp_path / "mean", MergeRule("mean"))
    merge(base_folder, fine_tunes[:2], tmp_path / "full", MergeRule("svd_mean", rank=999))
    one, other = (weights(folder) for folder in fine_tunes[:2])
    for out in ("mean", "full"):
        for name, found in weights(tmp_path / out).items():
            torch.testing.assert_close(found, (one[name] + other[name]) / 2, rtol=1e-5, atol=1e-6)


def test_transformers_loads_the_result(base_folder, fine_tunes, tmp_path):
    merge(base_folder, fine_tunes, tmp_path / "out", MergeRule("svd_mean", rank=4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings is True
    assert torch.equal(model.lm_head.weight, weights(tmp_path / "out")[EMBEDDING])
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8).reshape(1, 8)).logits).all()


@pytest.fixture
def threads():
    """A function that sets torch's threads, put back in the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("entries", [24, 100])
def test_blocks_change_nothing(base_folder, fine_tunes, tmp_path, monkeypatch, entries):
    """TB67: a merge of any size is made of small pieces."""
    rule = MergeRule("mean", weights=(1.0, 2.0, 3.0))
    whole = merge(base_folder, fine_tunes, tmp_path / "whole", rule)
    for module in (mean, merger):
        monkeypatch.setattr(module, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(merger, "_JOB_ENTRIES", 3 * entries + 1)
    cut = merge(base_folder, fine_tunes, tmp_path / "cut", rule)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for before, after in zip(whole.matrices, cut.matrices, strict=True):
        assert after.shape == before.shape
        assert after.delta_norms == pytest.approx(before.delta_norms, rel=1e-6)
        assert after.merged_norm == pytest.approx(before.merged_norm, rel=1e-6)
        assert after.cosine == pytest.approx(before.cosine, abs=1e-6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_number_of_threads_changes_no_bit(
    base_folder, fine_tunes, tmp_path, monkeypatch, threads, rule
):
    monkeypatch.setattr(mean, "BLOCK_ENTRIES", 64)
    monkeypatch.setattr(merger, "_JOB_ENTRIES", 200)
    reports = []
    for count in (1, 3):
        threads(count)
        report = merge(base_folder, fine_tunes, tmp_path / str(count), rule)
        assert torch.get_num_threads() == count
        reports.append([replace(matrix, seconds=0.0) for matrix in report.matrices])
    assert reports[0] == reports[1]
    one, three = (tmp_path / count / "model.safetensors" for count in ("1", "3"))
    assert one.read_bytes() == three.read_bytes()


def test_norms_and_cosine_are_those_of_float64(tmp_path):
    """Whatever the scale: squares beyond float32's range, or lost in it, count as well."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (300, 1100), "b.weight": (3, 5), "c": (7,), "d": (), "same": (4, 4)}
    sizes = {"a.weight": 1e-3, "b.weight": 1e30, "c": 1e-30, "d": 1.0, "same": 0.0}
    models = []
    for folder in ("base", "one", "two"):
        size = {name: 0.0 if folder == "base" else one for name, one in sizes.items()}
        # A constant part of the delta: naive float32 sums of it drift.
        tensors = {
            name: size[name] * (torch.randn(shape, generator=generator) + 1.0)
            for name, shape in shapes.items()
        }
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        models.append({name: one.double() for name, one in tensors.items()})
    rule = MergeRule("mean", weights=(2.0, 1.0))
    report = merge(tmp_path / "base", [tmp_path / "one", tmp_path / "two"], tmp_path / "out", rule)
    base, *ours = models
    for matrix in report.matrices:
        deltas = [one[matrix.name] - base[matrix.name] for one in ours]
        norms = [float(delta.norm()) for delta in deltas]
        merged = (2 * deltas[0] + deltas[1]) / 3
        cosine = float((deltas[0] * deltas[1]).sum()) / (norms[0] * norms[1]) if norms[0] else 0.0
        assert matrix.delta_norms == pytest.approx(norms, rel=1e-6)
        assert matrix.merged_norm == pytest.approx(float(merged.norm()), rel=1e-6)
        assert matrix.cosine == pytest.approx(cosine, abs=1e-6)
        assert matrix.shape == shapes[matrix.name]
    assert len(report.matrices) == len(shapes)


def test_default_dtype_of_the_caller_is_not_the_means(base_folder, fine_tunes, tmp_path):
    merge(base_folder, fine_tunes, tmp_path / "one", MergeRule("mean"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        merge(base_folder, fine_tunes, tmp_path / "two", MergeRule("mean"))
    finally:
        torch.set_default_dtype(torch.float32)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("count", [1, 3])
def test_full_disk_is_told_with_the_folder_and_leaves_nothing(
    base_folder, fine_tunes, tmp_path, monkeypatch, threads, count
):
    threads(count)

    def refuse(descriptor, data, offset):
        if offset > 9000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        merge(base_folder, fine_tunes, tmp_path / "out", MergeRule("mean"))
    assert caught.value.filename == str(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3])
def test_interrupt_stops_at_once_and_leaves_nothing(
    base_folder, fine_tunes, tmp_path, monkeypatch, threads, count
):
    threads(count)
    monkeypatch.setattr(merger, "_JOB_ENTRIES", 10)
    seen = []

    def interrupt(name, done, total):
        seen.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base_folder, fine_tunes, tmp_path / "out", MergeRule("mean"), progress=interrupt)
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == count


@pytest.mark.parametrize("count", [1, 3])
def test_memory_bounds_how_many_matrices_are_in_work(
    base_folder, fine_tunes, tmp_path, monkeypatch, threads, count
):
    threads(count)
    at_work, most = [], []
    original = merger.merge_deltas

    def watched(name, deltas, rule):
        at_work.append(name)
        most.append(len(at_work))
        found = original(name, deltas, rule)
        at_work.remove(name)
        return found

    monkeypatch.setattr(merger, "merge_deltas", watched)
    monkeypatch.setattr(merger, "_MOST_BYTES", 1)
    merge(base_folder, fine_tunes, tmp_path / "out", MergeRule("svd_mean", rank=3))
    assert max(most) == 1


def test_dtype_of_the_result_is_the_bases_or_the_one_asked_for(make_llama, make_finetune, tmp_path):
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    ft = make_finetune(tmp_path / "ft", base)
    merge(base, [ft], tmp_path / "same", MergeRule("mean"))
    assert {one.dtype for one in weights(tmp_path / "same").values()} == {torch.bfloat16}
    # One checkpoint's mean is itself, through float32 and back.
    ours = weights(ft)
    assert all(torch.equal(one, ours[name]) for name, one in weights(tmp_path / "same").items())
    merge(base, [ft], tmp_path / "wide", MergeRule("mean"), dtype=torch.float32)
    assert {one.dtype for one in weights(tmp_path / "wide").values()} == {torch.float32}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def resize(rows, fill):
    def edit(tensors):
        tensors[EMBEDDING] = torch.cat([tensors[EMBEDDING], torch.full((rows, 24), fill)])

    return edit


def test_rows_beyond_the_bases_vocabulary_are_averaged(base_folder, make_finetune, tmp_path):
    fine_tunes = [
        make_finetune(tmp_path / f"ft{i}", base_folder, seed=i, edit=resize(2, fill))
        for i, fill in ((1, 1.0), (2, 5.0))
    ]
    rule = MergeRule("svd_mean", rank=2, weights=(3.0, 1.0))
    merge(base_folder, fine_tunes, tmp_path / "out", rule)
    found = weights(tmp_path / "out")[EMBEDDING]
    base = weights(base_folder)[EMBEDDING]
    deltas = [weights(folder)[EMBEDDING][:99] - base for folder in fine_tunes]
    common = base + merge_deltas(EMBEDDING, deltas, rule)[0]
    torch.testing.assert_close(found[:99], common, rtol=1e-6, atol=1e-7)
    assert torch.equal(found[99:], torch.full((2, 24), 2.0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == 101


def test_extra_rows_that_are_not_finite_are_refused(base_folder, make_finetune, tmp_path):
    ft = make_finetune(tmp_path / "ft", base_folder, edit=resize(2, float("nan")))
    told = rf"{ft}: {EMBEDDING}: nan at index \(99, 0\) of shape \(101, 24\)"
    with pytest.raises(MergeError, match=told):
        merge(base_folder, [ft], tmp_path / "out", MergeRule("mean"))


def test_weights_beyond_float16_are_refused_not_made_infinite(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors[GATE][0, 0] = 1e6

    ft = make_finetune(tmp_path / "ft", base_folder, edit=edit)
    with pytest.raises(MergeError, match=rf"{GATE}: .* beyond the range of torch.float16"):
        merge(base_folder, [ft], tmp_path / "out", MergeRule("mean"), dtype=torch.float16)


@pytest.mark.parametrize("method", ["mean", "monosoup"])
def test_float64_base_merged_with_itself_is_the_same_to_the_bit(tmp_path, method):
    generator = torch.Generator().manual_seed(0)
    tensors = {"a.weight": torch.randn(5, 4, generator=generator, dtype=torch.float64)}
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    merge(tmp_path / "base", [tmp_path / "base"], tmp_path / "out", MergeRule(method))
    assert torch.equal(weights(tmp_path / "out")["a.weight"], tensors["a.weight"])


def test_smaller_vocabularies_merge_their_common_rows(base_folder, make_finetune, tmp_path):
    def shrink(tensors):
        tensors[EMBEDDING] = tensors[EMBEDDING][:90]

    ft = make_finetune(tmp_path / "ft", base_folder, edit=shrink)
    merge(base_folder, [ft], tmp_path / "out", MergeRule("mean"))
    torch.testing.assert_close(weights(tmp_path / "out")[EMBEDDING], weights(ft)[EMBEDDING])


def test_vocabularies_that_differ_are_refused_with_their_sizes(
    base_folder, make_finetune, tmp_path
):
    """TB61."""
    one = make_finetune(tmp_path / "one", base_folder, edit=resize(1, 0.0))
    two = make_finetune(tmp_path / "two", base_folder, edit=resize(2, 0.0))
    with pytest.raises(CheckpointError, match=r"one \(100, 24\), two \(101, 24\).*\(99, 24\)"):
        merge(base_folder, [one, two], tmp_path / "out", MergeRule("mean"))
    assert not (tmp_path / "out").exists()


def test_untied_head_is_merged_against_the_tied_matrix(base_folder, make_finetune, tmp_path):
    def edit(tensors):
        tensors[HEAD] = tensors[EMBEDDING] + 1.0

    untied = make_finetune(
        tmp_path / "ft", base_folder, edit=edit, config={"tie_word_embeddings": False}
    )
    merge(base_folder, [untied, base_folder], tmp_path / "out", MergeRule("mean"))
    found = weights(tmp_path / "out")[HEAD]
    wanted = (weights(untied)[HEAD] + weights(base_folder)[EMBEDDING]) / 2
    torch.testing.assert_close(found, wanted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, found)


def test_faults_leave_nothing_behind(base_folder, fine_tunes, make_finetune, tmp_path):
    def edit(tensors):
        tensors[GATE][1, 1] = float("inf")

    broken = make_finetune(tmp_path / "broken", base_folder, edit=edit)
    with pytest.raises(MergeError, match=f"^{broken}: {GATE}: "):
        merge(base_folder, [fine_tunes[0], broken], tmp_path / "out", MergeRule("mean"))
    with pytest.raises(ValueError, match="2 weights for 3 deltas"):
        merge(base_folder, fine_tunes, tmp_path / "out", MergeRule("mean", weights=(1.0, 2.0)))
    with pytest.raises(ValueError, match="no checkpoints"):
        merge(base_folder, [], tmp_path / "out", MergeRule("mean"))
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_companions_are_the_checkpoints_where_they_agree(base_folder, make_finetune, tmp_path):
    folders = [make_finetune(tmp_path / name, base_folder) for name in ("one", "two")]
    for folder in folders:
        (folder / "chat_template.jinja").write_text("same")
        (folder / "tokenizer_config.json").write_text(folder.name)
    (folders[0] / "merges.txt").write_text("only here")
    report = merge(base_folder, folders, tmp_path / "out", MergeRule("mean"))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "same"
    theirs = (base_folder / "tokenizer_config.json").read_text()
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == theirs
    assert not (tmp_path / "out" / "merges.txt").exists()
    assert report.companions["tokenizer_config.json"] == str(base_folder)


def test_report_on_disk_tells_the_rule_and_every_matrix(base_folder, fine_tunes, tmp_path):
    rule = MergeRule("svd_mean", rank=2, weights=(1.0, 1.0, 2.0))
    seen = []
    merge(
        base_folder,
        fine_tunes,
        tmp_path / "out",
        rule,
        progress=lambda name, done, total: seen.append((done, total)),
    )
    document = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert document["base"] == str(base_folder)
    assert document["checkpoints"] == [str(folder) for folder in fine_tunes]
    assert document["rule"]["weights"] == [0.25, 0.25, 0.5]
    assert {matrix["name"] for matrix in document["matrices"]} == set(weights(base_folder))
    assert all(len(matrix["delta_norms"]) == 3 for matrix in document["matrices"])
    nbytes = sum(one.nbytes for folder in fine_tunes for one in weights(folder).values())
    assert seen[-1] == (nbytes, nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
