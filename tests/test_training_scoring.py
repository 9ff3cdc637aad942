"""Scores of parts of the held-out data, and what they say of a run's end."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_soup import Loop

from soupkit import SoupConfig
from soupkit.errors import TrainingError
from soupkit.training.judge import Judge
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.scoring import Batches, Score, Scorer

LESS = Judge(feed_back=False, is_gated=True, greater_is_better=False)
MORE = Judge(feed_back=False, is_gated=True, greater_is_better=True)
SCORES = st.floats(-10, 10)


@dataclass(frozen=True, slots=True)
class OtherRanks(Ranks):
    """This rank, and others whose scores are told."""

    others: tuple[list[float], ...] = ()

    def gather(self, value):
        return [value, *self.others]


def scored(found, *others):
    model = torch.nn.Linear(2, 3)
    scorer = Scorer(lambda: found, store=ParamStore(model), ranks=OtherRanks(0, 1, others), seed=0)
    return scorer.score()


PAIRS = st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=9)


def sized(scores, examples):
    return Batches(tuple(scores), tuple(examples))


@given(PAIRS)
def test_the_standard_error_is_that_of_a_paired_t_test(pairs):
    ours, theirs = zip(*pairs, strict=True)
    difference, error = Score.of([ours]).less(Score.of([theirs]))
    assert difference == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-12)
    differences = np.subtract(ours, theirs)
    expected = differences.std(ddof=1) / len(differences) ** 0.5
    assert error == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(PAIRS, st.data())
def test_the_standard_error_of_batches_of_any_size_is_that_of_a_ratio(pairs, data):
    """Cochran's, of sums of losses over sums of examples, with the rows shared out over ranks."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    cut = data.draw(st.integers(1, len(pairs) - 1))
    ours, theirs = (
        Score.of([sized(column[:cut], sizes[:cut]), sized(column[cut:], sizes[cut:])])
        for column in zip(*pairs, strict=True)
    )
    assert ours.value == pytest.approx(np.average([one for one, _ in pairs], weights=sizes))
    difference, error = ours.less(theirs)
    gaps = np.subtract(*zip(*pairs, strict=True))
    ratio = np.average(gaps, weights=sizes)
    assert difference == pytest.approx(ratio, abs=1e-12)
    sums = np.multiply(gaps, sizes)
    variance = np.var(sums - ratio * np.array(sizes), ddof=1) / len(sums) / np.mean(sizes) ** 2
    one, other = (
        list(zip(gaps[part], sizes[part], strict=True)) for part in (slice(cut), slice(cut, None))
    )
    if one != other:
        assert error == pytest.approx(variance**0.5, rel=1e-6, abs=1e-9)


def test_a_smaller_last_batch_is_no_chance():
    """Better by 0.1 in every example: of ten rows in batches of eight, too."""
    live, beside = (Score.of([sized([a, a + 0.3], [8, 2])]) for a in (1.1, 1.0))
    assert live.less(beside) == (pytest.approx(0.1), pytest.approx(0, abs=1e-12))
    assert LESS.ends_with(live, beside) == (True, "")


def test_ranks_that_score_the_same_data_are_one_sample():
    """As of tensor parallelism, and of a loop that gives each rank all of the held-out data."""
    live, beside = [1.3, 1.09], [1.0, 1.0]
    alone = Score.of([live]).less(Score.of([beside]))
    assert Score.of([live] * 8).less(Score.of([beside] * 8)) == pytest.approx(alone)
    # Two pairs of ranks, each pair with data of its own.
    pairs = [live, live, [2.0, 2.5], [2.0, 2.5]], [beside, beside, [1.5, 2.5], [1.5, 2.5]]
    halves = [live, [2.0, 2.5]], [beside, [1.5, 2.5]]
    of_pairs, of_halves = (
        Score.of(ours).less(Score.of(theirs)) for ours, theirs in (pairs, halves)
    )
    assert of_pairs == pytest.approx(of_halves)
    # Each tells the mean over all: how much of that is chance is not known.
    assert Score.of([[1.3]] * 4).less(Score.of([[1.0]] * 4))[1] is None


def test_ranks_may_have_different_numbers_of_parts():
    """The mean of the ranks' means; the third part counts as much as the first two."""
    live, beside = Score.of([[1.3, 1.1], [1.2]]), Score.of([[1.0, 1.0], [1.0]])
    error = (3 / 2 * (2 * (0.1 / 4) ** 2)) ** 0.5
    assert live.less(beside) == (pytest.approx(0.2), pytest.approx(error))


@pytest.mark.parametrize(
    "found", [[1.0, 2.0, 4.5], (1.0, 2.0, 4.5), np.array([1, 2, 4.5]), torch.tensor([1, 2, 4.5])]
)
def test_parts_may_come_in_any_kind_of_list(found):
    score = scored(found)
    assert (score.value, score.parts) == (2.5, ((1.0, 2.0, 4.5),))


@pytest.mark.parametrize("found", [2.5, np.float32(2.5), torch.tensor(2.5), [2.5], "2.5"])
def test_one_score_says_nothing_of_chance(found):
    score = scored(found)
    assert score.value == 2.5
    assert score.less(Score.of([[2.0]])) == (0.5, None)


def test_ranks_count_alike_whatever_the_number_of_their_parts():
    assert scored([1.0, 2.0], [3.0, 6.0]).value == 3.0
    assert scored(1.0, [4.0]).value == 2.5
    assert scored([1.0, 2.0], [4.0]).value == 2.75


@pytest.mark.parametrize("found", [[torch.ones(2)], [[1.0]], None, "many", [1.0, None]])
def test_what_is_no_number_is_named(found):
    with pytest.raises(TrainingError, match=f"evaluate= returned a {type(found).__name__}, which"):
        scored(found)


def test_a_rank_without_held_out_data_is_named():
    with pytest.raises(TrainingError, match="no score"):
        scored([])


@pytest.mark.parametrize(
    ("live", "beside", "ends_with_it"),
    [
        # Differences 0.3, 0.1: mean 0.2, standard error 0.1, so two of them are not more than it.
        ((1.3, 1.1), (1.0, 1.0), True),
        # 0.3, 0.09: mean 0.195, standard error 0.105.
        ((1.3, 1.09), (1.0, 1.0), False),
        ((1.0, 1.0), (1.3, 1.1), False),
        # The same weights, perhaps: nothing is better.
        ((1.0, 2.0), (1.0, 2.0), False),
        # Without parts in pairs, the means alone.
        ((1.3, 1.09, 1.195), (1.0, 1.0), True),
    ],
)
def test_a_run_ends_with_what_is_better_by_more_than_chance(live, beside, ends_with_it):
    assert LESS.ends_with(Score.of([live]), Score.of([beside]))[0] is ends_with_it
    turned = [Score.of([[-part for part in parts]]) for parts in (live, beside)]
    assert MORE.ends_with(*turned)[0] is ends_with_it


@pytest.mark.parametrize(
    ("live", "beside", "ends_with_it"),
    [(math.nan, 1.0, True), (math.inf, 1.0, True), (1.0, math.nan, False), (1.0, math.inf, False)],
)
def test_a_score_that_is_not_finite_never_wins(live, beside, ends_with_it):
    ended = LESS.ends_with(Score.of([[1.0, live]]), Score.of([[1.0, beside]]))
    assert ended == (ends_with_it, "")


@pytest.mark.parametrize("method", ["svd_mean", "ema"])
@pytest.mark.parametrize("gain", [0.09, 0.1])
def test_the_end_of_a_run_asks_for_more_than_chance(tmp_path, capfd, method, gain):
    """The soup is better in one batch by 0.3, in the other by `gain`."""
    parts = {"live": [1.3, 1.0 + gain], "soup": [1.0, 1.0]}
    # Of svd_mean: captured at 1; at 2 before and after the merge; at the end. An average is scored
    # beside the run, at each merge point and at the end.
    calls = {"svd_mean": ["live", "live", "soup", "live"], "ema": ["live", "soup"] * 3}[method]
    scores = iter([parts[name] for name in calls])
    config = SoupConfig(merge_every_n_steps=1, method=method)
    loop = Loop(tmp_path, config, evaluate=lambda: next(scores))
    loop.steps(2)
    live = [value.detach().clone() for value in loop.model.parameters()]
    loop.soup.finish()
    assert next(scores, None) is None
    ended = list(loop.model.parameters())
    is_live = all(torch.equal(*pair) for pair in zip(live, ended, strict=True))
    assert is_live is (gain < 0.1)
    told = capfd.readouterr().err
    assert ("chance alone may differ by 0.21" in told) is is_live
    assert told.rstrip().endswith("live weights") is is_live


def test_a_run_that_ends_at_its_best_step_ends_with_the_live_weights(tmp_path, capfd):
    """The weights of the last merge point, whose merge was refused, lie beside the run, too."""
    scores = iter([[3.0, 3.1], [2.0, 2.1], [2.5, 2.6], [2.0, 2.1]])
    loop = Loop(tmp_path, SoupConfig(merge_every_n_steps=1), evaluate=lambda: next(scores))
    loop.steps(2)
    loop.soup.finish()
    told = capfd.readouterr().err
    assert told.rstrip().endswith("the run ends with the live weights")
    assert "of the weights of step 2 2.05" in told


@pytest.mark.parametrize(
    "former", ["other batches", "fewer batches", "no parts", "one list", "no gate"]
)
def test_a_soup_of_before_a_resume_is_scored_on_the_batches_of_now(tmp_path, former):
    """Then it had a score that none of today's batches could beat."""
    config = SoupConfig(merge_every_n_steps=1, gate="none" if former == "no gate" else "metric")
    scores = iter([[0.2, 0.2], [0.2, 0.2], [0.1, 0.1]])
    evaluate = None if former == "no gate" else lambda: next(scores)
    loop = Loop(tmp_path, config, evaluate=evaluate)
    loop.steps(2)
    loop.soup.save(tmp_path / "checkpoint")
    path = next(loop.folder.glob("soup/state-00000002.json"))
    state = json.loads(path.read_text())
    if former == "no parts":
        del state["partner"]["parts"]
    elif former == "one list":
        state["partner"]["parts"] = [0.1, 0.1]
    path.write_text(json.dumps(state))
    soup = load_file(loop.folder / "soup" / "partner-00000002.safetensors")
    live = {name: value.detach().clone() for name, value in loop.model.named_parameters()}

    calls = []

    def today() -> list[float]:
        now = dict(again.model.named_parameters())
        calls.append("soup" if all(torch.equal(now[name], soup[name]) for name in now) else "live")
        score = 2.0 if calls[-1] == "soup" else 1.0
        return [score, score + 0.1] + [score] * (former != "other batches")

    del loop
    again = Loop(tmp_path, SoupConfig(merge_every_n_steps=1), evaluate=today)
    again.model.load_state_dict(live, strict=False)
    again.soup.load(tmp_path / "checkpoint")
    again.soup.finish()
    assert calls == ["live", "soup"]
    ended = dict(again.model.named_parameters())
    assert all(torch.equal(ended[name], live[name]) for name in live)
    assert not list(again.folder.glob("soup/undo/*"))
