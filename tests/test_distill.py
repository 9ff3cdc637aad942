"""Promises of soupkit.distill: right gradients, never worse, resumable, whole or not at all."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import serving_kit
import torch
from delta_kit import dense
from safetensors.torch import load_file, save_file
from serving_kit import reference_of
from torch.autograd import gradcheck
from typer.testing import CliRunner

from soupkit.bundle import open_family, open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.cli import app
from soupkit.distill import DistillConfig, distill
from soupkit.distill.batches import Batch, batch_at, collate, split
from soupkit.distill.layers import DeltaEmbedding, DeltaLinear, SignLinear, TrainedDelta
from soupkit.distill.models import Teacher, scored_logits
from soupkit.distill.state import STATE_NAME
from soupkit.distill.streamed import StreamedModel
from soupkit.encoding import Encoding, encode
from soupkit.errors import BundleError, CheckpointError, TrainingError
from soupkit.export import export_variant
from soupkit.quality import Example, open_model, open_tokenizer, read_examples, score
from soupkit.quality import encode as encode_rows
from soupkit.restore import restore
from soupkit.verify import verify_family
from soupkit_kernels.bitpack import pack

ENCODINGS = ["row", "matrix", "column", "rank1", "row-x2-refit", "lowrank-2+rank1-x2", "sparse"]
FAST = DistillConfig(steps=6, batch=6, evaluate_every=2)


def write_data(path: Path, count: int = 30) -> Path:
    rows = [{"prompt": f"{i} + {i} =", "answer": f" {2 * i}"} for i in range(count - 4)]
    texts = [{"text": f"the number {i} is {'odd' if i % 2 else 'even'}"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *texts]))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """root/base (tied), root/ft, root/data.jsonl; do not change them."""
    return make_models(tmp_path_factory.mktemp("distill"), tied=True)


def make_models(root: Path, *, tied: bool) -> Path:
    serving_kit.make_base(root / "base", tied=tied)
    serving_kit.make_finetune(root / "base", root / "ft", lambda name: True, seed=1, size=0.05)
    write_data(root / "data.jsonl")
    return root


def make_family(models: Path, folder: Path, encoding: str = "row") -> Path:
    export_variant(
        open_checkpoint(models / "base"),
        open_checkpoint(models / "ft"),
        family=folder,
        name="v",
        encoding=encoding,
        companions=models / "ft",
    )
    return folder


def run(models: Path, family: Path, config: DistillConfig = FAST, **options):
    return distill(
        family,
        "v",
        finetuned=models / "ft",
        data=models / "data.jsonl",
        config=config,
        **options,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def held_out_kl(models: Path, dense_folder: Path, config: DistillConfig) -> float:
    """By soupkit.quality, on the dense model."""
    rows = encode_rows(read_examples(models / "data.jsonl"), open_tokenizer(models / "ft"))
    _, held = split(len(rows), held_out=config.held_out, seed=config.seed)
    teacher, model = open_model(models / "ft"), open_model(dense_folder)
    own = [rows[index] for index in held]
    found = score(model, own, reference=reference_of(teacher, own, models)).kl
    assert found is not None
    return found


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("width", ["row", "matrix"])
@pytest.mark.parametrize("has_columns", [False, True])
def test_gradients_equal_finite_differences(planes, width, has_columns):
    generator = torch.Generator().manual_seed(planes)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, k = 5, 11
    packed = pack(draw(planes, n, k))
    x, weight = draw(2, 3, k).requires_grad_(), draw(n, k)
    scale = draw(planes, n if width == "row" else 1).requires_grad_()
    column = draw(planes, k).requires_grad_() if has_columns else None
    assert gradcheck(
        lambda x, scale, column: SignLinear.apply(x, weight, packed, scale, column),
        (x, scale, column),
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_layers_equal_the_dense_matrix_and_its_gradients(name):
    torch.manual_seed(0)
    encoding = Encoding.parse(name)
    true = torch.randn(6, 13) * (torch.rand(6, 13) < 0.5)
    delta = encode(true, encoding)
    linear, embedding = torch.nn.Linear(13, 6), torch.nn.Embedding(6, 13)
    base, ids = linear.weight.detach(), torch.tensor([[0, 5, 5], [1, 2, 0]])
    # The low-rank part is the caller's.
    low = 0.0 if delta.up is None else (delta.up @ delta.down).double()
    whole = base.double() + torch.from_numpy(dense(delta, (6, 13))) - low
    x = torch.randn(4, 13)

    trained = TrainedDelta(delta, encoding.scale, is_sparse=encoding.is_sparse)
    y = DeltaLinear(linear.requires_grad_(False), trained)(x)
    wanted = x.double() @ whole.T + linear.bias.double()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    embedding.weight = linear.weight
    rows = DeltaEmbedding(embedding, trained)(ids)
    torch.testing.assert_close(rows.double(), whole[ids], rtol=1e-5, atol=1e-6)

    # Both uses of a tied matrix add up, as autograd does it on the dense matrix.
    (y.square().sum() + rows.pow(3).sum()).backward()
    step_row, step_column = trained.row_step, trained.column_step
    signs = np.unpackbits(delta.packed.numpy(), axis=2, count=13, bitorder="little") * 2.0 - 1
    s_row = torch.zeros(1 if encoding.is_sparse else delta.planes, delta.scale.shape[1]).double()
    s_col = torch.zeros(delta.planes, 13).double()
    s_row.requires_grad_(), s_col.requires_grad_()
    total = base.double()
    for plane in range(delta.planes):
        one_row = s_row[0 if encoding.is_sparse else plane]
        scales = delta.scale[plane].double() * (1 + one_row)
        columns = 1.0 if delta.column_scale is None else delta.column_scale[plane].double()
        total = total + scales[:, None] * torch.from_numpy(signs[plane]) * (
            columns * (1 + s_col[plane])
        )
    y = x.double() @ total.T + linear.bias.double()
    (y.square().sum() + total[ids].pow(3).sum()).backward()
    if step_row is not None:
        torch.testing.assert_close(step_row.grad.double(), s_row.grad, rtol=1e-4, atol=1e-4)
    if step_column is not None:
        torch.testing.assert_close(step_column.grad.double(), s_col.grad, rtol=1e-4, atol=1e-4)
    assert (step_row is None) == (encoding.scale == "column")
    assert (step_column is None) == (encoding.scale not in ("column", "rank1"))


@pytest.mark.parametrize("name", ENCODINGS)
def test_held_out_kl_falls_and_what_is_restored_has_it(models, tmp_path, name):
    family = make_family(models, tmp_path / "f", name)
    before = open_variant(open_family(family).folder("v"))
    signs = before.load().deltas
    start = restore(family, "v", out=tmp_path / "start").path
    report = run(models, family)
    assert 0 < report.kl < report.start_kl
    assert report.best_step in (2, 4, 6)
    assert verify_family(family) == []
    after = open_variant(open_family(family).folder("v"))
    assert after.manifest.digest == report.digest != before.manifest.digest
    assert after.manifest.companions == before.manifest.companions
    (event,) = after.manifest.history
    assert (event["event"], event["kl"]) == ("distill", report.kl)
    end = restore(family, "v", out=tmp_path / "end").path
    assert held_out_kl(models, start, FAST) == pytest.approx(report.start_kl, rel=1e-3)
    assert held_out_kl(models, end, FAST) == pytest.approx(report.kl, rel=1e-3)
    # The signs are the old ones, and the stored error is what the numbers say.
    ours, theirs = (load_file(models / one / "model.safetensors") for one in ("ft", "base"))
    for entry in after.manifest.tensors:
        if entry.kind != "delta":
            continue
        delta = after.delta(entry.name)
        assert torch.equal(delta.packed, signs[entry.name].packed)
        true = (ours[entry.name].double() - theirs[entry.name].double()).numpy()
        lost = np.square(true - dense(delta, true.shape)).sum() / np.square(true).sum()
        assert entry.residual_energy == pytest.approx(min(1.0, lost), rel=1e-4)


def test_sparse_zeros_stay_exact(models, tmp_path):
    family = make_family(models, tmp_path / "f", "sparse")
    run(models, family)
    variant = open_variant(open_family(family).folder("v"))
    scales = [variant.delta(entry.name).scale for entry in variant.manifest.tensors if entry.planes]
    assert scales
    assert all(torch.equal(scale[0], scale[1]) for scale in scales)


def test_untied_embeddings_and_norms_are_trained(tmp_path):
    models = make_models(tmp_path, tied=False)
    family = make_family(models, tmp_path / "f")
    before = open_variant(open_family(family).folder("v"))
    config = DistillConfig(steps=6, batch=6, evaluate_every=2, norms=True)
    report = run(models, family, config, out_name="better")
    assert report.kl < report.start_kl
    assert list(open_family(family).variants) == ["better", "v"]
    after = open_variant(open_family(family).folder("better"))
    for entry in after.manifest.tensors:
        if entry.kind == "raw":
            assert not torch.equal(after.raw(entry.name), before.raw(entry.name))
        else:
            assert not torch.equal(after.delta(entry.name).scale, before.delta(entry.name).scale)
    end = restore(family, "better", out=tmp_path / "end").path
    assert held_out_kl(models, end, config) == pytest.approx(report.kl, rel=1e-3)


def test_a_head_that_only_the_fine_tune_untied_is_trained_apart_from_its_input(tmp_path):
    models = make_models(tmp_path / "tied", tied=True)
    untied = make_models(tmp_path / "untied", tied=False)
    shutil.rmtree(models / "ft")
    shutil.copytree(untied / "ft", models / "ft")
    family = make_family(models, tmp_path / "f")
    start = restore(family, "v", out=tmp_path / "start").path
    report = run(models, family)
    assert report.best_step
    assert held_out_kl(models, start, FAST) == pytest.approx(report.start_kl, rel=1e-3)
    end = restore(family, "v", out=tmp_path / "end").path
    assert held_out_kl(models, end, FAST) == pytest.approx(report.kl, rel=1e-3)


@pytest.mark.parametrize("other", ["base", "ft-2"])
def test_another_fine_tune_than_the_variants_is_refused(models, tmp_path, other):
    serving_kit.make_finetune(
        models / "base", tmp_path / "ft-2", lambda name: True, seed=2, size=0.05
    )
    family = make_family(models, tmp_path / "f")
    before = snapshot(family)
    place = models / "base" if other == "base" else tmp_path / other
    with pytest.raises(CheckpointError, match="that the variant was exported from"):
        distill(family, "v", finetuned=place, data=models / "data.jsonl", config=FAST)
    assert snapshot(family) == before


def test_a_token_beyond_the_models_is_refused(models):
    batch = Batch(torch.tensor([[1, 10**6]]), torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2))
    finetuned = open_checkpoint(models / "ft")
    with pytest.raises(ValueError, match="token 1000000: the tokenizer exceeds"):
        scored_logits(open_model(finetuned.path), batch, {})
    with pytest.raises(ValueError, match="token 1000000: the tokenizer exceeds"):
        StreamedModel(finetuned.path, finetuned.tensor).logits(batch)
    row = encode_rows([Example("a", "b", 1)], open_tokenizer(models / "ft"))[0]
    with pytest.raises(ValueError, match="token 1000000: the tokenizer exceeds"):
        score(open_model(finetuned.path), [replace(row, ids=(1, 10**6), start=1)])


@pytest.mark.parametrize("method", ["kl", "gram"])
def test_a_fine_tune_that_is_not_finite_is_refused(models, tmp_path, method):
    broken = shutil.copytree(models / "ft", tmp_path / "ft")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    family = make_family(models, tmp_path / "f")
    with pytest.raises(CheckpointError, match="are not finite"):
        distill(
            family,
            "v",
            finetuned=broken,
            data=models / "data.jsonl",
            config=DistillConfig(method=method),
            out_name="w",
        )
    assert list(open_family(family).variants) == ["v"]


def test_the_start_is_kept_where_every_step_is_worse(models, tmp_path):
    family = make_family(models, tmp_path / "f")
    before = snapshot(family)
    wild = DistillConfig(steps=20, batch=6, evaluate_every=1, learning_rate=1e4, patience=2)
    report = run(models, family, wild)
    assert (report.best_step, report.steps) == (0, 2)
    assert report.kl == report.start_kl
    assert snapshot(family) == before
    assert "the start is kept" in report.line()
    # Under another name it is a copy.
    report = run(models, family, wild, out_name="w")
    assert report.digest == open_family(family).variants["v"].digest


def test_a_resumed_run_equals_an_uninterrupted_one(models, tmp_path):
    whole, cut = make_family(models, tmp_path / "a"), make_family(models, tmp_path / "b")
    config = DistillConfig(steps=6, batch=6, evaluate_every=2, norms=True)
    wanted = run(models, whole, config)
    before, state = snapshot(cut), tmp_path / "state"

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(models, cut, config, state=state, progress=interrupt)
    assert snapshot(cut) == before
    assert [path.name for path in state.iterdir()] == [STATE_NAME]
    seen = []
    found = run(models, cut, config, state=state, progress=lambda *told: seen.append(told[1]))
    assert seen == [5, 6]
    assert found == wanted
    new = open_family(cut).variants["v"]
    assert new.digest == open_family(whole).variants["v"].digest
    assert list(state.iterdir()) == []


def test_a_state_of_another_run_or_damaged_is_refused(models, tmp_path):
    family, state = make_family(models, tmp_path / "f"), tmp_path / "state"

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(models, family, state=state, progress=interrupt)
    other = DistillConfig(steps=6, batch=5, evaluate_every=2)
    with pytest.raises(TrainingError, match="another run: config"):
        run(models, family, other, state=state)
    (state / STATE_NAME).write_bytes(b"\0" * 40)
    with pytest.raises(TrainingError, match="damaged"):
        run(models, family, state=state)


def test_the_teacher_streamed_equals_the_teacher_cached(models):
    rows = encode_rows(read_examples(models / "data.jsonl"), open_tokenizer(models / "ft"))[:7]
    options = {"batch": 3, "device": torch.device("cpu")}
    cached = Teacher(models / "ft", rows, max_bytes=2**30, **options)
    streamed = Teacher(models / "ft", rows, max_bytes=0, **options)
    assert cached.is_cached
    assert not streamed.is_cached
    for indices in ([0, 1, 2], [6, 3]):
        ours, theirs = cached.logits(indices), streamed.logits(indices)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert len(ours) == int(collate([rows[index] for index in indices]).scored.sum())


def test_a_variant_that_was_replaced_meanwhile_is_not_overwritten(models, tmp_path):
    family = make_family(models, tmp_path / "f")
    replaced = []

    def replace_it(what: str, done: int, total: int) -> None:
        if not replaced:
            make_family(models, family, "matrix")
            replaced.append(open_family(family).variants["v"])

    with pytest.raises(BundleError, match="replaced or removed meanwhile"):
        run(models, family, progress=replace_it)
    assert open_family(family).variants["v"] == replaced[0]
    assert verify_family(family) == []


def test_steps_cover_every_row_of_an_epoch_once():
    train, held = split(23, held_out=0.2, seed=3)
    assert sorted([*train, *held]) == list(range(23))
    assert len(held) == 5
    for epoch in range(3):
        seen = [
            row for step in range(3) for row in batch_at(3 * epoch + step, train, size=6, seed=3)
        ]
        assert sorted(seen) == train
    assert split(2, held_out=0.9, seed=0)[0]
    with pytest.raises(ValueError, match="at least two"):
        split(1, held_out=0.5, seed=0)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"learning_rate": 0.0}, {"held_out": 1.0}, {"batch": 0}, {"patience": True}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DistillConfig(**wrong)


def test_nothing_to_train_is_said(models, tmp_path):
    family = make_family(models, tmp_path / "f", "raw")
    with pytest.raises(ValueError, match="no scale to train"):
        run(models, family)


def test_a_distilled_variant_is_served_as_its_restored_model(models, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "base").symlink_to(models / "base")
    make_family(models, root / "family", "lowrank-2+rank1-x2")
    run(models, root / "family")
    model = open_model(restore(root / "family", "v", out=tmp_path / "dense").path)
    prompts = ["1 + 1 =", "abc", "the number"]
    ids = [serving_kit.TOKENIZER(text)["input_ids"] for text in prompts]
    with serving_kit.serving(root) as (_, url):
        answer = serving_kit.client_of(url).completions.create(
            model="v", prompt=prompts, max_tokens=16, temperature=0
        )
    wanted = [
        serving_kit.TOKENIZER.decode(serving_kit.greedy(model, one, 16), skip_special_tokens=True)
        for one in ids
    ]
    assert [choice.text for choice in answer.choices] == wanted


def test_the_command_trains_and_tells(models, tmp_path):
    family = make_family(models, tmp_path / "f")
    command = ["distill", family, "v", "--finetuned", models / "ft"]
    command += ["--data", models / "data.jsonl", "--steps", "2", "--evaluate-every", "1"]

    def call(*more):
        return CliRunner().invoke(app, [str(one) for one in [*command, *more]])

    result = call("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["digest"] == open_family(family).variants["v"].digest
    assert told["kl"] < told["start_kl"]
    result = call("--out-name", "w", "--state", tmp_path / "state")
    assert result.stdout.startswith("w: held-out KL 0.")
    result = call("--device", "none")
    assert result.exit_code == 1
    assert "device 'none'" in result.stderr
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    result = call("--data", tmp_path / "bad.jsonl")
    assert result.exit_code == 1
    assert "line 1" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"hidden_size": "x"},
        {"hidden_act": "no such"},
        {"model_type": ["llama"]},
        {"rope_parameters": 3},
    ],
    ids=str,
)
def test_a_hostile_configuration_is_one_line_with_its_folder(models, tmp_path, change):
    shutil.copytree(models / "base", tmp_path / "bad")
    path = tmp_path / "bad" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for build in (open_model, lambda folder: StreamedModel(folder, lambda name: None)):
        with pytest.raises(CheckpointError, match=r"bad: transformers cannot") as caught:
            build(tmp_path / "bad")
        assert "\n" not in str(caught.value)
    path.write_text("null")
    with pytest.raises(CheckpointError, match="bad: no usable tokenizer: TypeError"):
        open_tokenizer(tmp_path / "bad")


def test_an_interrupted_command_leaves_the_family(models, tmp_path):
    """A real SIGINT, in the middle of training."""
    family, state = make_family(models, tmp_path / "f"), tmp_path / "state"
    before = snapshot(family)
    command = [sys.executable, "-m", "soupkit", "distill", family, "v"]
    command += ["--finetuned", models / "ft", "--data", models / "data.jsonl", "--state", state]
    command += ["--steps", "100000", "--patience", "100000", "--evaluate-every", "1"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    serving_kit.wait_for((state / STATE_NAME).exists, "the first state")
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == (
        f"soupkit: the run so far is kept in {state}: the same command goes on from there\n"
        "soupkit: interrupted; nothing was left half-written\n"
    )
    assert snapshot(family) == before
    assert [path.name for path in state.iterdir()] == [STATE_NAME]
