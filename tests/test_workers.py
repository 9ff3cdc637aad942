"""Threads side by side: order, how far they run ahead, errors, and the caller's own threads."""

import threading

import pytest
import torch

from soupkit.workers import Workers


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_stream_gives_results_in_order_and_draws_items_as_needed(threads):
    drawn = []

    def items():
        for one in range(20):
            drawn.append(one)
            yield one

    with Workers() as workers:
        assert workers.count == threads
        seen = []
        for result in workers.stream(lambda one: one * one, items()):
            seen.append(result)
            # One in hand, and as many as may wait.
            assert len(drawn) <= len(seen) + threads + 1
    assert seen == [one * one for one in range(20)]
    assert torch.get_num_threads() == threads


def test_stream_runs_in_threads_of_one_core_each(threads):
    with Workers() as workers:
        told = list(
            workers.stream(lambda _: (torch.get_num_threads(), threading.get_ident()), range(8))
        )
    assert {count for count, _ in told} == {1}
    is_caller = {ident == threading.get_ident() for _, ident in told}
    assert is_caller == {threads == 1}


def test_stream_raises_an_error_in_its_turn_and_drops_what_has_not_begun(threads):
    begun, seen = [], []

    def act(one):
        begun.append(one)
        if one == 4:
            raise ValueError("four")
        return one

    def consume():
        with Workers() as workers:
            for one in workers.stream(act, range(100)):
                seen.append(one)

    with pytest.raises(ValueError, match="four"):
        consume()
    assert seen == [0, 1, 2, 3]
    assert max(begun) <= 4 + threads + 1
    assert torch.get_num_threads() == threads
