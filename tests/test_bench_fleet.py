"""The simulated fleet, against times worked out by hand and an engine without strides."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soupkit.bench import fleet, fleet_check
from soupkit.bench.fleet_costs import Piece, Roofline
from soupkit.bench.fleet_sim import Ask, Clock, Fleet, Line, SimReplica, Sizes
from soupkit.node import Layout, Wish, plan_gpu
from soupkit.node_times import Speeds
from soupkit.placement import ModelShape
from soupkit.serving.states import BASE_DIGEST, Limits

LIMITS = Limits(max_running=4, max_queue=8)
SIZES = Sizes(slots=2, slot_bytes=10, host_bytes=0, batch_tokens=16, file_bytes=7)


@dataclass(frozen=True)
class Plain:
    """An iteration takes 1 s, 0.5 s more for each variant and 0.25 s for a token of prompt."""

    load_seconds: float = 3.0
    install_seconds: float = 2.0

    def iteration(self, decoding, variants, prompts):
        return 1.0 + 0.5 * variants + 0.25 * sum(piece.tokens for piece in prompts)

    def load(self, num_bytes):
        assert num_bytes == SIZES.file_bytes
        return self.load_seconds

    def install(self, num_bytes):
        return self.install_seconds


def make(*, replicas=1, nodes=1, sizes=SIZES, limits=LIMITS, costs=None):
    clock, found = Clock(), []
    for _ in range(nodes):
        disk = Line()
        for _ in range(replicas):
            one = SimReplica(clock, costs or Plain(), sizes, limits=limits, disk=disk)
            found.append(one)
    for one in found:
        one.begin(["a", "b", "c"])
    return clock, Fleet(clock, found)


def of_base(at, prompt=4, tokens=3):
    return Ask(BASE_DIGEST, at, prompt, tokens)


def test_one_request_takes_its_prompt_and_a_token_an_iteration():
    _, fleet_ = make()
    ask = of_base(5.0)
    fleet_.ask([ask])
    # Its prompt 1 + 4 / 4 = 2 s, then two tokens of 1 s.
    assert (ask.first, ask.done) == (7.0, 9.0)
    assert fleet_.replicas[0].busy_seconds == 4.0


def test_a_request_in_the_midst_of_a_stride_begins_at_the_next_token():
    _, fleet_ = make()
    long, late = of_base(0.0, tokens=11), of_base(4.5, tokens=2)
    fleet_.ask([long, late])
    # Tokens of `long` at 2, 3, 4, 5; then the prompt of `late` for 2 s with one more of `long`.
    assert long.first == 2.0
    assert (late.first, late.done) == (7.0, 8.0)
    assert long.done == 2.0 + 3 + 2 + 6


def test_a_long_prompt_is_cut_into_batches():
    _, fleet_ = make()
    ask = of_base(0.0, prompt=40, tokens=1)
    fleet_.ask([ask])
    # 16 + 16 + 8 tokens.
    assert ask.first == ask.done == (1 + 4) + (1 + 4) + (1 + 2)


def test_a_cold_variant_is_loaded_once_for_all_who_wait_and_delays_no_other():
    _, fleet_ = make()
    first, second, base = Ask("a", 0.0, 4, 1), Ask("a", 1.0, 4, 1), of_base(1.0, tokens=1)
    fleet_.ask([first, second, base])
    assert base.first == 3.0
    # Loaded at 3, in its slot at 5; both prompts of a variant in one batch: 1 + 0.5 + 8 / 4.
    assert first.first == second.first == 5.0 + 3.5
    assert not first.was_resident
    stats = fleet_.replicas[0].router.stats()["a"]
    assert (stats.loads, stats.misses, stats.hits) == (1, 2, 0)


def test_replicas_of_a_node_share_its_disk():
    """Two variants go to two replicas; on one disk the second is read after the first."""
    for replicas, nodes, second_loaded in ((2, 1, 6.0), (1, 2, 3.0)):
        _, fleet_ = make(replicas=replicas, nodes=nodes)
        asks = [Ask("a", 0.0, 4, 1), Ask("b", 0.0, 4, 1)]
        fleet_.ask(asks)
        assert [one.router.stats()["a"].loads for one in fleet_.replicas].count(1) == 1
        assert asks[0].first == 3.0 + 2.0 + 2.5
        assert asks[1].first == second_loaded + 2.0 + 2.5


def test_a_full_fleet_refuses():
    limits = Limits(max_running=1, max_queue=1)
    _, fleet_ = make(replicas=2, limits=limits)
    asks = [of_base(0.0) for _ in range(5)]
    fleet_.ask(asks)
    assert [ask.refused for ask in asks] == ["", "", "", "", "QueueFull"]


class Stepwise:
    """One engine without strides or events: batches of tokens, one after the other."""

    def __init__(self, asks, costs, *, running, batch_tokens):
        self.first, self.done = {}, {}
        waiting, prompts, decoding, now = list(asks), [], [], 0.0
        left = {ask: ask.prompt for ask in asks}
        queue = []
        while waiting or queue or prompts or decoding:
            if not (queue or prompts or decoding):
                now = max(now, waiting[0].at)
            while waiting and waiting[0].at <= now:
                queue.append(waiting.pop(0))
            while queue and len(prompts) + len(decoding) < running:
                prompts.append(queue.pop(0))
            room, pieces = batch_tokens - len(decoding), []
            for ask in prompts:
                if room > 0:
                    pieces.append((ask, min(room, left[ask])))
                    room -= pieces[-1][1]
            now += costs.iteration(len(decoding), 0, [Piece(n, None) for _, n in pieces])
            for ask in list(decoding):
                left[ask] -= 1
                if not left[ask]:
                    decoding.remove(ask)
                    self.done[ask] = now
            for ask, tokens in pieces:
                left[ask] -= tokens
                if left[ask]:
                    continue
                prompts.remove(ask)
                self.first[ask], left[ask] = now, ask.tokens - 1
                if left[ask]:
                    decoding.append(ask)
                else:
                    self.done[ask] = now


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 12)),
        min_size=1,
        max_size=9,
    )
)
def test_strides_are_the_same_as_step_after_step(drawn):
    # A millisecond each of its own: none comes on the boundary of an iteration, where either may
    # be first.
    found = [of_base(drawn[i][0] / 4 + i / 1000, *drawn[i][1:]) for i in range(len(drawn))]
    asks = sorted(found, key=lambda ask: ask.at)
    _, fleet_ = make(limits=Limits(max_running=4, max_queue=20))
    fleet_.ask(asks)
    expected = Stepwise(asks, Plain(), running=4, batch_tokens=SIZES.batch_tokens)
    for ask in asks:
        assert ask.first == pytest.approx(expected.first[ask], abs=1e-6)
        assert ask.done == pytest.approx(expected.done[ask], abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 30), st.sampled_from(["a", "b", "c", BASE_DIGEST]), st.integers(1, 9)
        ),
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_every_request_ends_or_is_refused_and_nothing_is_left(drawn, replicas):
    asks = [Ask(digest, at, 5, tokens) for at, digest, tokens in drawn]
    clock, fleet_ = make(replicas=replicas)
    fleet_.ask(asks)
    for ask in asks:
        if ask.refused:
            assert math.isnan(ask.first)
        else:
            assert ask.at < ask.first <= ask.done <= clock.now
    for one in fleet_.replicas:
        seen = one.look()
        assert (seen.open, seen.loading) == (0, frozenset())
        assert len(seen.resident) <= SIZES.slots
        assert one.busy_seconds <= clock.now + 1e-9
    loads = Counter()
    for one in fleet_.replicas:
        loads.update({name: stats.loads for name, stats in one.router.stats().items()})
    answered = {ask.digest for ask in asks if not ask.refused} - {BASE_DIGEST}
    assert {name for name, count in loads.items() if count} == answered


def test_an_iteration_moves_the_bytes_that_are_counted_by_hand():
    # Linears of a layer: q 8x8, k and v 4x8, o 8x8, gate and up 16x8, down 8x16; head 10x8.
    shape = ModelShape("tiny", 8, 16, 3, 4, 2, 2, 10, is_tied=True)
    linear = 3 * (64 + 32 + 32 + 64 + 3 * 128)
    plan = plan_gpu(shape, Layout(1, 1, 1), Wish(5, context=16, requests=2), gpu_bytes=10**9)
    speeds = Speeds(disk=100.0, link=50.0, hbm=1000.0, flops=1e12)
    costs = Roofline(shape, plan, speeds, context=7)
    weights, signs = 2 * (linear + 80), (linear + 80) / 8
    kv = 2 * 3 * 2 * 2 * 2  # keys and values, layers, heads, width, bytes
    assert costs.iteration(3, 2, []) == pytest.approx(
        (weights + 2 * signs + 3 * 7 * kv) / 1000, rel=1e-12
    )
    # Few operations a second: products count, twice for what a variant's prompt brings.
    slow = replace(costs, speeds=replace(speeds, hbm=1e12, flops=1000.0))
    pieces = [Piece(6, None), Piece(4, "a")]
    built = (4 * linear + signs) / 1e12
    assert slow.iteration(3, 1, pieces) == pytest.approx(2 * linear * 13 / 1000 + built, rel=1e-12)
    assert costs.load(700) == 7.0
    assert costs.install(0) == plan.slot_bytes / 50


def test_gpu_hours_are_those_of_the_nodes_and_of_a_deployment_for_each_variant():
    case = fleet.Case(fleet.H100, 64, 10_000, 1.0)
    # 141.1 GB of base on GPUs of 80 GB: two. On 141 GB: two, too, by 0.1 GB.
    assert fleet.dedicated_gpus(case) == 2
    assert fleet.dedicated_gpus(replace(case, chip=fleet.H200)) == 2
    small = replace(case, nodes=1, variants=14, seconds=30.0)
    rows = {
        row.name.rpartition(": ")[2]: row
        for row in fleet._rows(small, [fleet.simulate(small, seed=0)], [0])
    }
    hours = rows["GPU-hours an hour"]
    assert (hours.value, hours.ratio) == (8.0, 8 / 28)
    assert rows["refused"].value == 0.0
    assert rows["first token P99"].ratio > rows["first token P50"].ratio >= 1.0


def test_a_trace_and_its_simulation_are_the_same_for_the_same_seed():
    case = fleet.Case(fleet.H100, 2, 40, 20.0)
    assert fleet.simulate(case, seed=3) == fleet.simulate(case, seed=3)
    assert fleet.simulate(case, seed=3) != fleet.simulate(case, seed=4)
    assert len(fleet.trace(case, seed=3)) == 80


def test_what_loads_cost_is_seen_in_first_tokens():
    """Without loads every first token is as soon as that of a resident variant."""
    case = fleet.Case(fleet.H100, 1, 100, 60.0)
    cold, warm = (fleet.simulate(case, seed=0, with_loads=loads) for loads in (True, False))
    shape, plan = fleet.layout_of(case)
    load = Roofline(shape, plan, case.chip.speeds, 1)
    assert cold.p99 > load.load(load.file_bytes) > warm.p99


def test_how_far_the_two_are_apart_is_the_larger_by_the_smaller():
    served, simulated = (
        fleet.Outcome(resident, mean, 0.1, 1.0, 0.0) for resident, mean in ((0.5, 0.2), (0.4, 0.3))
    )
    rows = fleet_check._rows([(served, simulated), (simulated, simulated), (simulated, served)])
    assert [row.ratio for row in rows] == pytest.approx([1.25, 1.5, 1.0])
    assert [row.ok for row in rows] == [False, True, True]
