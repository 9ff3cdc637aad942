"""Scores of parts of the held-out data, and what they say of a run's end."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_soup import Loop

from soupkit import SoupConfig
from soupkit.errors import TrainingError
from soupkit.training.judge import Judge
from soupkit.training.params import ParamStore
from soupkit.training.ranks import Ranks
from soupkit.training.scoring import Score, Scorer

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


@given(st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=9))
def test_the_standard_error_is_that_of_a_paired_t_test(pairs):
    ours, theirs = (Score(float(np.mean(column)), column) for column in zip(*pairs, strict=True))
    difference, error = ours.less(theirs)
    assert difference == pytest.approx(np.mean(ours.parts) - np.mean(theirs.parts), abs=1e-12)
    differences = np.subtract(ours.parts, theirs.parts)
    expected = differences.std(ddof=1) / len(differences) ** 0.5
    assert error == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "found", [[1.0, 2.0, 4.5], (1.0, 2.0, 4.5), np.array([1, 2, 4.5]), torch.tensor([1, 2, 4.5])]
)
def test_parts_may_come_in_any_kind_of_list(found):
    assert scored(found) == Score(2.5, (1.0, 2.0, 4.5))


@pytest.mark.parametrize("found", [2.5, np.float32(2.5), torch.tensor(2.5), [2.5], "2.5"])
def test_one_score_has_no_parts(found):
    assert scored(found) == Score(2.5)


def test_ranks_count_alike_and_pair_up_where_they_have_as_many_parts():
    assert scored([1.0, 2.0], [3.0, 6.0]) == Score(3.0, (1.0, 2.0, 3.0, 6.0))
    assert scored(1.0, [4.0]) == Score(2.5, (1.0, 4.0))
    assert scored([1.0, 2.0], [4.0]) == Score(2.75)


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
        ((1.0, 2.0), (1.0, 2.0), True),
        # Without parts in pairs, the means alone.
        ((1.3, 1.09, 1.195), (1.0, 1.0), True),
    ],
)
def test_a_run_ends_with_what_is_better_by_more_than_chance(live, beside, ends_with_it):
    live, beside = (Score(sum(parts) / len(parts), parts) for parts in (live, beside))
    assert LESS.ends_with(live, beside)[0] is ends_with_it
    turned = [Score(-score.value, tuple(-part for part in score.parts)) for score in (live, beside)]
    assert MORE.ends_with(*turned)[0] is ends_with_it


@pytest.mark.parametrize(
    ("live", "beside", "ends_with_it"),
    [(math.nan, 1.0, True), (math.inf, 1.0, True), (1.0, math.nan, False), (1.0, 1.0, True)],
)
def test_a_score_that_is_not_finite_never_wins(live, beside, ends_with_it):
    assert LESS.ends_with(Score(live, (live, live)), Score(beside, (beside, beside))) == (
        ends_with_it,
        "",
    )


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
