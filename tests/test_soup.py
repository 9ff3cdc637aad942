"""Soup in a plain loop: when it merges, with whom, what stays, and that nothing else is touched."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from soup_runs import (
    assert_equal_weights,
    load,
    optimizer_state,
    random_states,
    reference_merge,
    rows,
    saved_base,
    weights_of,
)
from torch import nn

from soupkit import ExportConfig, SoupConfig
from soupkit.bundle import open_variant
from soupkit.checkpoint import open_checkpoint
from soupkit.errors import TrainingError
from soupkit.family import open_family
from soupkit.tensorfile import TensorFileWriter
from soupkit.tracking import ScalarWriter
from soupkit.training import MergeReport, Soup
from soupkit.training import snapshot as snapshot_module
from soupkit.training.guards import held_interrupts
from soupkit.training.snapshot import Snapshot
from soupkit.training.state import SoupFolder
from soupkit.verify import verify_family

UNGATED = {"gate": "none", "rank": 2, "feed_back": True}


class Loop:
    """A plain PyTorch loop over one tiny Llama with a Soup in it."""

    def __init__(
        self, tmp_path, config, *, evaluate=None, name="run", dtype=torch.float32, **kwargs
    ):
        base = tmp_path / "base"
        if not base.exists():
            saved_base(base)
        self.base = base
        self.folder = tmp_path / name
        self.model = kwargs.pop("model", None) or load(base, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = [torch.tensor([row["input_ids"]]) for row in rows(64, seed=1)]
        self.done = 0
        self.soup = Soup(
            self.model,
            optimizer=self.optimizer,
            config=config,
            evaluate=evaluate,
            output_dir=self.folder,
            **kwargs,
        )

    def train(self) -> None:
        """One optimizer step, without the soup's."""
        batch = self.batches[self.done % len(self.batches)]
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def steps(self, count: int, **kwargs) -> list[MergeReport | None]:
        found = []
        for _ in range(count):
            self.train()
            found.append(self.soup.step(**kwargs))
        return found

    def state(self) -> dict:
        return json.loads(sorted((self.folder / "soup").glob("state-*.json"))[-1].read_text())


@pytest.fixture
def ctrl_c():
    """Python's own handler of SIGINT, which a shell's background jobs start without."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("weight", [0.5, 0.3])
def test_a_merge_is_the_documented_rule(tmp_path, weight):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, weight=weight, **UNGATED))
    assert loop.steps(2) == [None, None]
    partner = weights_of(loop.model)
    loop.steps(1)
    loop.train()
    current = weights_of(loop.model)
    report = loop.soup.step()
    assert report is not None
    assert (report.step, report.partner_step, report.accepted) == (4, 2, True)
    base = open_checkpoint(loop.base)
    worst = 0.0
    for name in base.names:
        expected = reference_merge(
            base.tensor(name), current[name], partner[name], rank=2, weight=weight
        )
        worst = max(worst, float(np.abs(weights_of(loop.model)[name].numpy() - expected).max()))
    print(f"largest deviation from float64: {worst:.1e}")
    assert worst < 2e-6
    # Tied embeddings are one parameter, merged once, and still tied.
    assert loop.model.lm_head.weight is loop.model.model.embed_tokens.weight
    assert [m.name for m in report.matrices] == list(base.names)
    assert 0 < report.kept_energy < 1
    assert -1 <= report.cosine <= 1
    assert report.delta_norm_after < report.delta_norm_before * 1.01
    json.dumps(report.to_json(), allow_nan=False)


def test_the_first_merge_point_only_captures(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=3, **UNGATED))
    loop.steps(2)
    loop.train()
    before, moments = weights_of(loop.model), optimizer_state(loop.optimizer)
    assert loop.soup.step() is None
    assert_equal_weights(before, weights_of(loop.model))
    assert all(map(torch.equal, moments, optimizer_state(loop.optimizer)))
    assert loop.state()["partner"] == {"step": 3, "score": None, "cuts": None, "parts": []}


def test_merge_points_are_every_n_steps_after_start_and_until_stop(tmp_path):
    config = SoupConfig(merge_every_n_steps=2, start_after_step=3, stop_after_step=8, **UNGATED)
    loop = Loop(tmp_path, config)
    reports = loop.steps(12)
    # 4 captures, 6 and 8 merge; 2 is before the start and 10 after the stop.
    assert [report.step for report in reports if report] == [6, 8]


def test_a_refused_merge_is_undone_bit_for_bit(tmp_path):
    scores = iter([3.0, 2.0, 2.5])
    loop = Loop(
        tmp_path,
        SoupConfig(merge_every_n_steps=2, rank=1, feed_back=True),
        evaluate=lambda: next(scores),
        dtype=torch.bfloat16,
    )
    loop.steps(3)
    loop.train()
    before, moments = weights_of(loop.model), optimizer_state(loop.optimizer)
    report = loop.soup.step()
    assert not report.accepted
    assert (report.metric_current, report.metric_merged) == (2.0, 2.5)
    assert_equal_weights(before, weights_of(loop.model))
    assert all(map(torch.equal, moments, optimizer_state(loop.optimizer)))
    # What the run goes on with beats the partner's 3.0, so it is the new one.
    assert loop.state()["partner"] == {"step": 4, "score": 2.0, "cuts": 4, "parts": [[2.0]]}
    assert not (loop.folder / "soup" / "undo").exists()


@pytest.mark.parametrize(
    ("current", "merged", "accepted"),
    [
        (2.0, 2.0, True),
        (2.0, 1.0, True),
        (2.0, 3.0, False),
        (2.0, float("nan"), False),
        (2.0, float("-inf"), False),
        (float("nan"), 5.0, True),
        (float("nan"), float("nan"), False),
    ],
)
def test_a_merge_stays_iff_it_scores_at_least_as_well(tmp_path, current, merged, accepted):
    scores = iter([3.0, current, merged])
    loop = Loop(
        tmp_path,
        SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True),
        evaluate=lambda: next(scores),
    )
    loop.steps(1)
    loop.train()
    before = weights_of(loop.model)
    report = loop.soup.step()
    assert report.accepted is accepted
    changed = any(not torch.equal(v, before[n]) for n, v in weights_of(loop.model).items())
    assert changed is accepted
    json.dumps(report.to_json(), allow_nan=False)


def test_greater_is_better_turns_the_gate_around(tmp_path):
    scores = iter([0.5, 0.4, 0.6])
    config = SoupConfig(merge_every_n_steps=1, rank=2, greater_is_better=True, feed_back=True)
    loop = Loop(tmp_path, config, evaluate=lambda: next(scores))
    assert loop.steps(2)[1].accepted
    assert loop.state()["partner"] == {"step": 2, "score": 0.6, "cuts": 2, "parts": [[0.6]]}


def test_the_partner_is_the_best_so_far(tmp_path):
    # Scores of: capture at 1; current, merged at 2, at 3, at 4.
    scores = iter([1.0, 2.0, 1.5, 0.5, 0.9, 0.7, 0.6])
    loop = Loop(
        tmp_path,
        SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True),
        evaluate=lambda: next(scores),
    )
    reports = loop.steps(4)
    # At 2 the accepted merge scores 1.5 and does not beat step 1; at 3 the refused one leaves 0.5.
    assert [report.partner_step for report in reports[1:]] == [1, 1, 3]
    assert [report.accepted for report in reports[1:]] == [True, False, True]
    assert loop.state()["partner"] == {"step": 3, "score": 0.5, "cuts": 3, "parts": [[0.5]]}


def test_without_a_gate_metrics_choose_the_partner(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=4, **UNGATED))
    for metric in (0.9, 0.4, float("nan"), 0.7):
        loop.steps(1, metric=metric)
    # Step 2 was the best when step 4 merged, and stays it.
    assert loop.soup.reports[0].partner_step == 2
    assert loop.state()["partner"] == {"step": 2, "score": 0.4, "cuts": 4, "parts": []}
    loop.steps(3)
    loop.train()
    before = weights_of(loop.model)
    assert loop.soup.step(metric=0.1) is not None
    # The metric was of the weights before the merge, so these are captured.
    captured = Snapshot(loop.folder / "soup" / "partner-00000008.safetensors")
    for name in captured.names:
        assert torch.equal(captured.tensor(name), before[name])


def test_without_gate_and_metric_the_last_merge_point_is_the_partner(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, **UNGATED))
    reports = [report for report in loop.steps(8) if report]
    assert [report.partner_step for report in reports] == [2, 4, 6]


def test_a_side_soup_leaves_the_run_as_it_would_be_without(tmp_path):
    plain = Loop(tmp_path, SoupConfig(merge_every_n_steps=100, **UNGATED), name="plain")
    plain.steps(6)
    side = Loop(
        tmp_path, SoupConfig(merge_every_n_steps=2, **{**UNGATED, "feed_back": False}), name="side"
    )
    side.steps(6)
    assert_equal_weights(weights_of(plain.model), weights_of(side.model))
    side.soup.finish(export=ExportConfig(family=tmp_path / "family", name="side"))
    variant = open_variant(open_family(tmp_path / "family").path / "variants" / "side").load()
    soup = Snapshot(side.folder / "soup" / "partner-00000006.safetensors")
    # Norm vectors are stored whole, so they show which weights were exported.
    name = "model.norm.weight"
    assert torch.equal(variant.raw[name], soup.tensor(name))
    assert not torch.equal(soup.tensor(name), weights_of(plain.model)[name])
    # What is exported is what the model holds then, unless load_at_end says otherwise.
    for name, value in side.model.named_parameters():
        assert torch.equal(value, soup.tensor(name)), name


@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_moments_are_kept_or_start_anew(tmp_path, policy):
    """TB46: "keep" leaves every bit of them."""
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, optimizer_state=policy, **UNGATED))
    loop.steps(3)
    loop.train()
    before = optimizer_state(loop.optimizer)
    assert loop.soup.step().accepted
    after = optimizer_state(loop.optimizer)
    if policy == "keep":
        assert all(map(torch.equal, before, after))
    else:
        assert not any(value.any() for value in after)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_a_reset_optimizer_steps_like_a_new_one(tmp_path, kind, settings):
    """Zero is no start for every optimizer: Rprop and ASGD keep step sizes in their state."""
    ends = []
    for policy in ("reset", "keep"):
        torch.manual_seed(0)
        model, batch = nn.Linear(5, 4), torch.randn(8, 5)
        optimizer = kind(model.parameters(), **settings)
        config = SoupConfig(
            merge_every_n_steps=2,
            method="mean",
            gate="none",
            optimizer_state=policy,
            feed_back=True,
        )
        soup = Soup(model, optimizer=optimizer, config=config, output_dir=tmp_path / policy)
        for step in range(7):
            if step == 4 and policy == "keep":
                optimizer = kind(model.parameters(), **settings)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 4:
                soup.step()
        ends.append(weights_of(model))
    assert_equal_weights(*ends)


def test_generators_and_modes_are_left_as_they_were(tmp_path):
    def evaluate() -> float:
        assert not loop.model.training
        assert not torch.is_grad_enabled()
        torch.rand(3), np.random.rand(2)
        return 1.0

    loop = Loop(
        tmp_path, SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True), evaluate=evaluate
    )
    loop.model.train()
    loop.model.model.norm.eval()
    loop.train()
    for _ in range(2):
        before = random_states()
        loop.soup.step()
        assert random_states() == before
    assert loop.model.training
    assert not loop.model.model.norm.training


@pytest.mark.parametrize("returned", [None, {"eval_loss": 1.0}, torch.ones(2, 1), [1.0, None]])
def test_an_evaluation_that_returns_no_number_is_named(tmp_path, returned):
    config = SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True)
    loop = Loop(tmp_path, config, evaluate=lambda: returned)
    with pytest.raises(TrainingError, match=f"evaluate= returned a {type(returned).__name__}"):
        loop.steps(1)


def test_an_interrupt_in_the_middle_of_a_merge_leaves_the_old_weights(tmp_path, ctrl_c):
    calls = []

    def evaluate() -> float:
        calls.append(1)
        # The third scoring is of merged weights.
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    loop = Loop(
        tmp_path, SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True), evaluate=evaluate
    )
    loop.steps(1)
    loop.train()
    before, state = weights_of(loop.model), loop.state()
    with pytest.raises(KeyboardInterrupt):
        loop.soup.step()
    assert_equal_weights(before, weights_of(loop.model))
    assert loop.state() == state


@pytest.mark.parametrize("feed_back", [True, False], ids=["merge", "side soup"])
def test_a_full_disk_at_any_point_leaves_the_weights_that_belong_to_the_state(
    tmp_path, monkeypatch, feed_back
):
    """Each write of a merge point fails in turn: the partner's, the report's, the state's, ..."""
    config = SoupConfig(merge_every_n_steps=1, rank=2, feed_back=feed_back)
    points = [
        (TensorFileWriter, "check_complete"),
        (snapshot_module, "fsync_path"),
        (SoupFolder, "write_report"),
        (SoupFolder, "write_state"),
        (SoupFolder, "clean"),
    ]
    for number, (owner, name) in enumerate(points):
        scores = iter([3.0, 2.0, 1.0])
        loop = Loop(tmp_path, config, evaluate=lambda s=scores: next(s), name=f"run-{number}")
        loop.steps(1)
        loop.soup.save(tmp_path / f"mine-{number}")
        loop.train()
        before = weights_of(loop.model)
        # The undo file is written before anything is changed.
        calls = iter([] if name != "check_complete" else [None])
        original = getattr(owner, name)

        def full(*args, calls=calls, original=original):
            try:
                next(calls)
            except StopIteration:
                raise OSError(28, "No space left on device") from None
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space left"):
                loop.soup.step()
        old = all(torch.equal(v, before[n]) for n, v in weights_of(loop.model).items())
        state = loop.state()
        assert old is (state["step"] == 1 or not feed_back), name
        assert loop.soup._run.state.step == state["step"], name
        assert (
            loop.folder / "soup" / f"partner-{state['partner']['step']:08d}.safetensors"
        ).exists()


def test_scalars_that_cannot_be_written_do_not_stop_the_run(tmp_path, monkeypatch, capfd):
    def full(self, step, scalars):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ScalarWriter, "add", full)
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=1, **UNGATED))
    assert [report.step for report in loop.steps(3)[1:]] == [2, 3]
    assert capfd.readouterr().err.count("no more scalars") == 1


def test_held_interrupts_come_after_the_block(ctrl_c):
    done = []

    def block() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["block"]


def test_a_weight_that_is_not_finite_refuses_the_merge_by_name(tmp_path):
    """TB51: one infinity gives no error in an SVD, only NaN."""
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, **UNGATED))
    loop.steps(3)
    loop.train()
    with torch.no_grad():
        loop.model.model.layers[1].mlp.up_proj.weight[2, 3] = float("inf")
    before = weights_of(loop.model)
    report = loop.soup.step()
    assert not report.accepted
    assert "model.layers.1.mlp.up_proj.weight" in report.reason
    assert_equal_weights(before, weights_of(loop.model))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"rank": 2}, 'or try method="mean" or a higher rank'),
        ({"rank": 64}, 'or try method="mean"'),
        ({"method": "mean"}, "or try a smaller weight"),
    ],
)
def test_three_refusals_in_a_row_give_one_line_of_advice(tmp_path, capfd, settings, advice):
    scores = iter([1.0] + [1.0, 2.0] * 5)
    config = SoupConfig(merge_every_n_steps=1, **settings, feed_back=True)
    loop = Loop(tmp_path, config, evaluate=lambda: next(scores))
    loop.steps(6)
    (line,) = (one for one in capfd.readouterr().err.splitlines() if "stop_after_step" in one)
    assert line.endswith(advice)


def test_include_and_exclude_choose_the_parameters(tmp_path):
    config = SoupConfig(merge_every_n_steps=2, include=("mlp",), exclude=(r"layers\.0",), **UNGATED)
    model = load(saved_base(tmp_path / "base"))
    model.model.layers[1].mlp.gate_proj.weight.requires_grad_(False)
    loop = Loop(tmp_path, config, model=model)
    loop.steps(3)
    loop.train()
    before = weights_of(loop.model)
    report = loop.soup.step()
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "up")]
    assert [matrix.name for matrix in report.matrices] == names
    changed = [n for n, v in weights_of(loop.model).items() if not torch.equal(v, before[n])]
    assert sorted(changed) == names


class Odd(nn.Module):
    """No config and no save_pretrained; shapes that are no plain matrices; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv1d(3, 5, 3)
        self.experts = nn.Parameter(torch.randn(2, 7, 4))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scalar = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(5)
        self.wide = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x):
        flat = self.norm(self.conv(x)).mean() * self.scalar + self.wide.sum().float()
        return (flat + self.experts.square().sum() + self.empty.sum()) ** 2


def test_any_module_can_be_merged_and_exported(tmp_path):
    """TB54, TB55, TB69: buffers are not merged; vectors, scalars, empty tensors, convolutions,
    experts.
    """
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    soup = Soup(
        model,
        config=SoupConfig(merge_every_n_steps=2, gate="none", rank=9, feed_back=True),
        output_dir=tmp_path,
    )
    start, kept = weights_of(model), []
    for _ in range(4):
        model(torch.randn(4, 3, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(weights_of(model))
        report = soup.step()
    assert report.accepted
    after = weights_of(model)
    for name, parameter in model.named_parameters():
        # Rank 9 is more than any of these has: the merge is the plain mean.
        mean = (kept[1][name].double() + kept[3][name].double()) / 2
        assert parameter.dtype == start[name].dtype
        torch.testing.assert_close(after[name].double(), mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(after["norm.running_mean"], kept[3]["norm.running_mean"])
    soup.finish(export=ExportConfig(family=tmp_path / "family", name="odd"))
    assert verify_family(tmp_path / "family") == []


def test_arithmetic_is_float32_and_rounds_once(tmp_path):
    """TB47: arithmetic in bfloat16 rounds each update away; here the error is one rounding."""
    model = nn.Linear(7, 33, bias=False).to(torch.bfloat16)
    config = SoupConfig(
        merge_every_n_steps=1, method="mean", weight=0.3, gate="none", feed_back=True
    )
    soup = Soup(model, config=config, output_dir=tmp_path)
    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            model.weight.add_(torch.randn(33, 7).to(torch.bfloat16))
        kept.append(model.weight.detach().double())
        soup.step()
    exact = 0.7 * kept[1] + 0.3 * kept[0]
    half_spacing = torch.exp2(exact.abs().log2().floor() - 8)
    error = (model.weight.detach().double() - exact).abs()
    assert bool((error <= half_spacing * 1.001).all())


@pytest.mark.parametrize("method", ["monosoup", "mean"])
def test_the_other_methods_run_too(tmp_path, method):
    loop = Loop(
        tmp_path, SoupConfig(merge_every_n_steps=2, method=method, gate="none", feed_back=True)
    )
    loop.steps(3)
    loop.train()
    before = weights_of(loop.model)
    assert loop.soup.step().method == method
    assert any(not torch.equal(v, before[n]) for n, v in weights_of(loop.model).items())


def test_the_callers_mistakes_are_value_errors(tmp_path):
    with pytest.raises(ValueError, match=r'evaluate=.*gate="none"'):
        Loop(tmp_path, SoupConfig(feed_back=True))
    with pytest.raises(ValueError, match="optimizer="):
        Soup(nn.Linear(2, 2), config=SoupConfig(optimizer_state="reset", **UNGATED))
    loop = Loop(tmp_path, SoupConfig(feed_back=True), evaluate=lambda: 1.0)
    with pytest.raises(ValueError, match="metric="):
        loop.soup.step(metric=1.0)
    side = Loop(tmp_path, SoupConfig(**{**UNGATED, "feed_back": False}), name="side")
    with pytest.raises(ValueError, match="feed_back=False"):
        side.soup.step(metric=1.0)


def test_soup_is_built_before_training_begins(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, **UNGATED))
    loop.train()
    late = Soup(
        loop.model, optimizer=loop.optimizer, config=SoupConfig(**UNGATED), output_dir=tmp_path
    )
    with pytest.raises(TrainingError, match="build Soup before"):
        late.step()


def test_an_evaluation_that_fails_leaves_the_old_weights(tmp_path):
    """TB27."""
    scores = iter([1.0, 1.0, None])
    loop = Loop(
        tmp_path,
        SoupConfig(merge_every_n_steps=1, rank=2, feed_back=True),
        evaluate=lambda: next(scores),
    )
    loop.steps(1)
    loop.train()
    before = weights_of(loop.model)
    with pytest.raises(TrainingError, match="no number"):
        loop.soup.step()
    assert_equal_weights(before, weights_of(loop.model))


def test_what_a_merge_finds_of_the_next_partner_is_kept_and_used(tmp_path):
    """The partner of the next merge is not decomposed again, whichever of the three it is."""
    for scores, which in ((None, "merged"), ([1, 0, 1, 2, 3, 4], "partner")):
        folder = tmp_path / which
        evaluate = None if scores is None else list(map(float, scores)).__iter__().__next__
        gate = {"gate": "none"} if scores is None else {}
        loop = Loop(
            folder,
            SoupConfig(merge_every_n_steps=2, rank=2, **gate, feed_back=True),
            evaluate=evaluate,
        )
        loop.steps(4)
        kept = sorted(path.name for path in (loop.folder / "soup").glob("cuts-*"))
        assert kept == ["cuts-00000004-00000-of-00001.safetensors"]
        loop.steps(2)
        solvers = {m.name: m.solver for m in loop.soup.reports[-1].matrices if m.rank}
        assert solvers
        assert all("known" in solver for solver in solvers.values()), solvers


def test_a_warm_merge_is_the_cold_one(tmp_path):
    """The stored truncation takes the place of one that is computed: same result, to rounding."""
    ends = []
    for name in ("warm", "cold"):
        loop = Loop(
            tmp_path / name, SoupConfig(merge_every_n_steps=2, rank=2, gate="none", feed_back=True)
        )
        loop.steps(4)
        if name == "cold":
            run = loop.soup._run
            run.state = dataclasses.replace(
                run.state, partner=dataclasses.replace(run.state.partner, cuts=None)
            )
        loop.steps(2)
        ends.append(weights_of(loop.model))
    warm, cold = ends
    for name, value in warm.items():
        torch.testing.assert_close(value, cold[name], rtol=1e-5, atol=1e-6)


def test_a_merge_does_not_depend_on_the_number_of_threads(tmp_path):
    ends, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            loop = Loop(tmp_path / str(count), SoupConfig(merge_every_n_steps=1, **UNGATED))
            torch.set_num_threads(1)
            loop.train()
            loop.soup.step()
            loop.train()
            torch.set_num_threads(count)
            loop.soup.step()
            assert torch.get_num_threads() == count
            ends.append(weights_of(loop.model))
    finally:
        torch.set_num_threads(threads)
    assert_equal_weights(*ends)


def test_a_finished_soup_counts_no_further(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=5, **UNGATED))
    loop.steps(1)
    loop.soup.finish()
    with pytest.raises(TrainingError, match="finish"):
        loop.soup.step()


@pytest.mark.parametrize("method", ["mean", "ema"])
def test_load_at_end_makes_the_live_weights_what_the_run_ends_with(tmp_path, method):
    config = SoupConfig(
        merge_every_n_steps=2, method=method, feed_back=False, gate="none", load_at_end=True
    )
    loop = Loop(tmp_path, config)
    loop.steps(5)
    live = weights_of(loop.model)
    run = loop.soup._run
    expected = run.final().instead
    values = {name: expected.tensor(name).clone() for name in expected.names}
    loop.soup.finish()
    after = weights_of(loop.model)
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert any(not torch.equal(after[name], value) for name, value in live.items())


def test_load_at_end_rounds_a_side_soup_of_other_dtypes(tmp_path):
    config = SoupConfig(
        merge_every_n_steps=2,
        method="mean",
        feed_back=False,
        gate="none",
        load_at_end=True,
        stop_after_step=4,
    )
    loop = Loop(tmp_path, config)
    loop.steps(5)
    loop.soup.save(tmp_path / "checkpoint")
    loop.model.to(torch.bfloat16)
    again = Soup(loop.model, config=config, output_dir=loop.folder, base=loop.base)
    again.load(tmp_path / "checkpoint")
    expected = again._run.final().instead
    again.finish()
    after = weights_of(loop.model)
    assert all(value.dtype == torch.bfloat16 for value in after.values())
    assert all(torch.equal(after[n], expected.tensor(n).bfloat16()) for n in expected.names)


def test_a_side_soup_that_was_never_merged_is_no_end(tmp_path):
    config = SoupConfig(merge_every_n_steps=3, feed_back=False, gate="none", rank=2)
    loop = Loop(tmp_path, config)
    loop.steps(4)
    assert loop.soup._run.final().instead is None
    loop.steps(2)
    assert loop.soup._run.final().instead is not None


def test_a_resume_with_other_parameters_is_told_so(tmp_path):
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, **UNGATED))
    loop.steps(4)
    loop.soup.save(tmp_path / "checkpoint")
    fewer = SoupConfig(merge_every_n_steps=2, include=("mlp",), **UNGATED)
    again = Soup(loop.model, config=fewer, output_dir=loop.folder, base=loop.base)
    with pytest.raises(TrainingError, match=r"other parameters.*include="):
        again.load(tmp_path / "checkpoint")


def test_other_weights_between_merge_points_are_refused(tmp_path):
    """TB43: a fresh adapter, or another run's checkpoint, would train on unseen."""
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=2, **UNGATED))
    loop.steps(5)
    loop.soup.save(tmp_path / "checkpoint")
    right = loop.model.model.norm.weight.detach().clone()
    with torch.no_grad():
        loop.model.model.norm.weight[0] += 1
    again = Soup(loop.model, config=loop.soup.config, output_dir=loop.folder, base=loop.base)
    with pytest.raises(TrainingError, match=r"weights-00000005\.json"):
        again.load(tmp_path / "checkpoint")
    with torch.no_grad():
        loop.model.model.norm.weight.copy_(right)
    again = Soup(loop.model, config=loop.soup.config, output_dir=loop.folder, base=loop.base)
    again.load(tmp_path / "checkpoint")


def test_cuts_of_another_rank_are_replaced_by_those_of_the_present_one(tmp_path):
    config = SoupConfig(merge_every_n_steps=2, rank=2, gate="none", feed_back=False)
    loop = Loop(tmp_path, config)
    loop.steps(4)
    loop.soup.save(tmp_path / "checkpoint")
    changed = dataclasses.replace(config, rank=3)
    loop.soup = Soup(loop.model, config=changed, output_dir=loop.folder, base=loop.base)
    loop.soup.load(tmp_path / "checkpoint")
    loop.steps(4)
    solvers = [[m.solver for m in report.matrices if m.rank] for report in loop.soup.reports]
    assert not any("known" in solver for solver in solvers[0])
    assert all("known" in solver for solver in solvers[1])
