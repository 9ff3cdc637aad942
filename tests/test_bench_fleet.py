"""The simulator: runs that are worked by hand, what always holds, and the real server beside it."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_kit import add_to_family, make_base

from soupkit.bench import fleet, fleet_check
from soupkit.bench.fleet_cost import roofline
from soupkit.bench.fleet_sim import Arrival, Outcome, Room, simulate
from soupkit.node_times import Speeds
from soupkit.placement import shape_for
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


def test_a_node_of_the_bench_by_hand() -> None:
    """TP 8 on H100: 139,003,428,864 bytes of weights over 8 x 3.35e12 a second, as in test_node."""
    shape = shape_for(70e9)
    costs = roofline(shape, fleet.plan_of(shape, 14), Speeds())
    assert costs.step(0, 0) == pytest.approx(139_003_428_864 / 26.8e12)
    # 14 variants, and keys and values of half of 8192 tokens at 327,680 bytes for each sequence.
    moved = 139_003_428_864 + 14 * 8_687_714_304 + 32 * 4096 * 327_680
    assert costs.step(32, 14) == pytest.approx(moved / 26.8e12)
    assert costs.load_seconds == pytest.approx(8_849_582_080 / 7e9)
    assert costs.prompt(1024, is_base=True) == pytest.approx(140_187_732_541_440 / 7.912e15)
    # 141 GB of weights need two GPUs of 80 GB.
    assert fleet.gpus_alone(shape) == 2


def test_the_bench_tells_hits_first_tokens_and_gpus() -> None:
    case = fleet.Case(2, 60, 6.0)
    rows = {row.name.partition(": ")[2]: row for row in fleet._rows(case)}
    assert rows["GPUs"].value == 16
    assert rows["GPUs"].ratio == pytest.approx(16 / (2 * 60))
    assert 0 < rows["requests whose variant was resident"].ratio <= 1
    assert rows["first token, P99"].ratio >= 0.999
    counts = Counter(arrival.model for arrival in fleet.arrivals(fleet.Case(1, 10, 500.0)))
    # Zipf: the first is asked for twice as often as the second, ten times as often as the tenth.
    assert counts["v0"] / counts["v1"] == pytest.approx(2, rel=0.15)
    assert counts["v0"] / counts["v9"] == pytest.approx(10, rel=0.2)


@pytest.mark.slow
def test_the_server_does_what_the_simulator_says(tmp_path: Path) -> None:
    """Counts only: times depend on who else uses the machine."""
    make_base(tmp_path / "base")
    for seed in range(9):
        add_to_family(
            tmp_path, f"v{seed}", lambda name: "_proj" in name, encoding="row", seed=seed + 1
        )
    rows = asyncio.run(fleet_check._check(tmp_path / "family", count=160))
    by_name = {row.name: row for row in rows}
    hits = by_name["server: requests whose variant was resident"]
    assert abs(hits.value - hits.value / hits.ratio) <= 8, "points"
    assert by_name["server: loads"].ratio == pytest.approx(1.0, abs=0.15)
    print(*rows, sep="\n")
