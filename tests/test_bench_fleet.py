"""The simulator: runs that are worked by hand, what always holds, and the real server beside it."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.bench.fleet_sim import Arrival, Outcome, Room, simulate
from soupkit.serving.states import BASE_DIGEST, Limits


@dataclass(frozen=True)
class Plain:
    """A prompt takes 1 s, a step 0.1 s and 0.1 s for each sequence."""

    load_seconds: float = 10.0
    install_seconds: float = 2.0

    def prompt(self, tokens: int, *, is_base: bool) -> float:
        return 1.0

    def step(self, sequences: int, variants: int) -> float:
        return 0.1 + 0.1 * sequences


def run(arrivals: list[Arrival], *, replicas: int = 1, slots: int = 2, **room: int) -> Outcome:
    return simulate(
        arrivals,
        replicas=replicas,
        costs=Plain(),
        room=Room(slots, slot_bytes=10, file_bytes=10, **room),
        limits=Limits(max_running=4, max_queue=1000),
    )


def test_one_request_by_hand() -> None:
    """A load 10, an install 2, a prompt 1; four more tokens of 0.2."""
    found = run([Arrival(5.0, "a", 8, 5)])
    assert found.first == pytest.approx([13.0])
    assert found.whole == pytest.approx([13.8])
    assert (found.hits, found.misses, found.loads) == (0, 1, 1)


def test_followers_wait_for_one_load_and_share_the_engine() -> None:
    found = run([Arrival(0.0, "a", 8, 5), Arrival(0.0, "a", 8, 5), Arrival(0.0, BASE_DIGEST, 8, 1)])
    # The base at once; the two prompts one after the other, then four steps of 0.3 together.
    assert found.first == pytest.approx([1.0, 13.0, 14.0])
    assert found.whole == pytest.approx([1.0, 15.2, 15.2])
    assert found.loads == 1


def test_a_prompt_holds_up_the_sequences_that_run() -> None:
    """From 1 on steps of 0.2; at 1.4 two of ten are done; a prompt until 2.4; then steps of 0.3."""
    found = run([Arrival(0.0, BASE_DIGEST, 8, 11), Arrival(1.4, BASE_DIGEST, 8, 4)])
    assert found.first == pytest.approx([1.0, 1.0])
    # Three steps of 0.3 end the second at 3.3; five of 0.2 are left of the first.
    assert found.whole == pytest.approx([1.9, 4.3])


def test_a_disk_reads_one_after_the_other_and_hits_do_not_wait() -> None:
    found = run([Arrival(0.0, "a", 8, 1), Arrival(0.0, "b", 8, 1), Arrival(40.0, "a", 8, 1)])
    assert found.first == pytest.approx([13.0, 23.0, 1.0])
    assert (found.hits, found.misses) == (1, 2)


def test_what_does_not_fit_is_evicted_and_host_memory_needs_no_disk() -> None:
    asked = [Arrival(50.0 * i, name, 8, 1) for i, name in enumerate("abca")]
    assert run(asked).loads == 4
    found = run(asked, host_bytes=100)
    assert found.loads == 3
    assert found.first == pytest.approx([13.0, 13.0, 13.0, 3.0])


def test_replicas_share_the_variants_and_a_hot_one_is_copied() -> None:
    asked = [Arrival(50.0 * i, name, 8, 1) for i, name in enumerate("abcdabcd")]
    found = run(asked, replicas=2)
    assert (found.loads, found.hits) == (4, 4)
    assert found.per_replica == [4, 4]
    # Nine at a time where a batch is four: the second replica loads it too.
    hot = [Arrival(0.0, "a", 8, 2), *[Arrival(100.0, "a", 8, 50) for _ in range(9)]]
    assert run(hot, replicas=2).loads == 2


arrivals = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 200),
        st.sampled_from([BASE_DIGEST, *"abcdef"]),
        st.integers(1, 20),
        st.integers(1, 20),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(arrivals, st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 30]))
def test_every_request_is_answered_once(
    asked: list[Arrival], replicas: int, slots: int, host_bytes: int
) -> None:
    asked = sorted(asked, key=lambda one: one.at)
    found = run(asked, replicas=replicas, slots=slots, host_bytes=host_bytes)
    assert len(found.first) == len(found.whole) == len(asked)
    assert sum(found.per_replica) == len(asked)
    assert found.hits + found.misses == sum(one.model != BASE_DIGEST for one in asked)
    assert found.loads <= found.misses
    assert all(first >= 1.0 - 1e-9 for first in found.first)
    assert found.refused == 0
    again = run(asked, replicas=replicas, slots=slots, host_bytes=host_bytes)
    assert again == found
    distinct = len({one.model for one in asked} - {BASE_DIGEST})
    if distinct <= slots and replicas == 1:
        assert found.loads == distinct


def test_a_full_queue_refuses_and_a_warm_up_counts_nothing() -> None:
    asked = [Arrival(0.0, "a", 8, 1)] * 30
    found = simulate(
        asked, replicas=1, costs=Plain(), room=Room(1, 10, 10),
        limits=Limits(max_running=2, max_queue=10),
    )  # fmt: skip
    assert (len(found.first), found.refused) == (12, 18)
    warm = simulate(
        [Arrival(0.0, "a", 8, 1), Arrival(30.0, "a", 8, 1)], replicas=1, costs=Plain(),
        room=Room(1, 10, 10), limits=Limits(max_running=2, max_queue=10), warm_until=20.0,
    )  # fmt: skip
    assert (warm.first, warm.loads, warm.hits, warm.misses) == (pytest.approx([1.0]), 0, 1, 0)
