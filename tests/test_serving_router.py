"""The router, one promise at a time; SV.. are rows, R.. rules of what others met: CONTRIBUTING."""

from dataclasses import replace

import pytest
from router_kit import LIMITS, NEEDS, Fake, make

from soupkit.serving.router import Router
from soupkit.serving.states import (
    BASE_DIGEST,
    NotServed,
    Phase,
    QueueFull,
    Ticket,
    VariantUnavailable,
    WaitedTooLong,
)


def ask(router: Router, *digests: str) -> list[Ticket]:
    """One request each, one after the other."""
    tickets = [Ticket(digest) for digest in digests]
    for ticket in tickets:
        router.submit([ticket])
    return tickets


def running(fake: Fake) -> list[Ticket]:
    return [ticket for ticket, _ in fake.running]


def test_r6_sv28_a_burst_of_misses_makes_one_load_and_runs_in_order() -> None:
    router, fake, _ = make()
    tickets = ask(router, *"aaaaa")
    assert fake.loading == ["a"]
    fake.arrives("a")
    assert running(fake) == tickets[:3]
    for ticket in tickets[:3]:
        fake.ends(ticket)
    assert running(fake) == tickets[3:]
    assert fake.num_loads["a"] == 1


def test_sv21_sv32_sv37_a_slow_load_delays_no_other_variant() -> None:
    router, fake, _ = make()
    _, quick, base = ask(router, "a", "b", BASE_DIGEST)
    assert fake.loading == ["a", "b"]
    fake.arrives("b")
    assert running(fake) == [base, quick]
    assert router.phase("a") is Phase.LOADING


def test_r6_loads_run_side_by_side_up_to_the_bound_first_come_first() -> None:
    router, fake, _ = make()
    ask(router, "a", "b", "c")
    assert fake.loading == ["a", "b"]
    fake.loads("b")
    assert fake.loading == ["a"], "b is held until it is in its slot"
    fake.settles()
    assert fake.loading == ["a", "c"]


def test_r5_sv37_a_failed_load_fails_its_waiters_only_and_backs_off() -> None:
    router, fake, clock = make()
    *doomed, _ = ask(router, "a", "a", "b")
    fake.loading.remove("a")
    router.load_failed("a", "the file is gone")
    assert [t for t, _ in fake.failed] == doomed
    with pytest.raises(VariantUnavailable, match="the file is gone") as caught:
        ask(router, "a")
    assert caught.value.retry_seconds == 1.0
    clock.now += 1.0
    ask(router, "a")
    fake.loading.remove("a")
    router.load_failed("a", "still gone")
    clock.now += 1.5
    with pytest.raises(VariantUnavailable):
        ask(router, "a")
    clock.now += 0.5
    ask(router, "a")
    fake.arrives("b")
    fake.arrives("a")
    assert len(fake.running) == 2


def test_r7_sv11_nothing_goes_before_what_takes_its_place_was_read() -> None:
    router, fake, _ = make(slot_bytes=50)
    old = ask(router, "a", "b")
    fake.arrives("a")
    fake.arrives("b")
    for ticket in old:
        fake.ends(ticket)
    ask(router, "c")
    assert sorted(fake.holds.values()) == ["a", "b"]
    fake.loading.remove("c")
    router.load_failed("c", "broken")
    assert sorted(fake.holds.values()) == ["a", "b"]


def test_r4_an_idle_variant_goes_and_a_used_one_never() -> None:
    router, fake, clock = make(slot_bytes=50)
    used, idle = ask(router, "a", "b")
    fake.arrives("a")
    fake.arrives("b")
    fake.ends(idle)
    clock.now += 1000.0
    ask(router, "c")
    fake.arrives("c")
    assert set(router.cache.digests) == {"a", "c"}
    assert running(fake)[0] is used


def test_sv20_a_pinned_variant_is_loaded_at_once_and_never_evicted() -> None:
    router, fake, _ = make(slot_bytes=50)
    router.set_family(NEEDS, pinned=["a"])
    assert fake.loading == ["a"]
    fake.arrives("a")
    for digest in "bcdb":
        (ticket,) = ask(router, digest)
        fake.arrives(digest)
        fake.ends(ticket)
        assert "a" in router.cache


def test_sv20_a_pin_that_cannot_be_loaded_gives_its_place_to_the_next() -> None:
    router, fake, clock = make(slot_bytes=50)
    router.set_family(NEEDS, pinned=["a", "b"])
    assert fake.loading == ["a"]
    fake.loading.remove("a")
    router.load_failed("a", "the file is gone")
    router.tick()
    assert fake.loading == ["b"]
    fake.arrives("b")
    clock.now += 10.0
    # A try alone changes nothing, a success does.
    ask(router, "a")
    router.tick()
    assert router.cache.pinned == ("b",)
    fake.arrives("a")
    router.tick()
    assert router.cache.pinned == ("a",)


def test_sv20_the_most_asked_for_is_pinned_and_does_not_flap() -> None:
    router, fake, clock = make(replace(LIMITS, auto_pin=1), slot_bytes=50)
    for digest in "aab":
        (ticket,) = ask(router, digest)
        if digest in fake.loading:
            fake.arrives(digest)
        fake.ends(ticket)
    router.tick()
    assert router.cache.pinned == ("a",)
    for ticket in ask(router, "b"):
        fake.ends(ticket)
    router.tick()
    assert router.cache.pinned == ("a",), "two each: no clear difference"
    for ticket in ask(router, "b", "b"):
        fake.ends(ticket)
    router.tick()
    assert router.cache.pinned == ("b",)
    clock.now += 1e5
    router.tick()
    assert router.stats()["b"].pinned, "silence of all changes nothing"


def test_sv34_a_variant_larger_than_the_budget_is_refused_with_both_numbers() -> None:
    router, fake, _ = make()
    ask(router, "huge")
    fake.loads("huge")
    assert "a slot of 140 bytes, the cache has 100" in str(fake.failed[0][1])
    assert not fake.held


def test_a_larger_variant_makes_the_slots_grow_and_the_others_go_on() -> None:
    router, fake, _ = make(slot_bytes=20)
    users = ask(router, "a", "b", "c")
    for digest in "abc":
        fake.arrives(digest)
    ask(router, "f")
    fake.loads("f")
    # Of five slots of 20 bytes two of 50 are left: c, in the third, has to end first.
    assert (router.phase("c"), fake.growing) == (Phase.DRAINING, None)
    (late,) = ask(router, "c")
    fake.ends(users[2])
    assert fake.growing == (2, 50)
    fake.settles()
    assert sorted(router.cache.digests) == ["a", "b"], "those in the slots that stay stay"
    fake.ends(users[0])
    fake.settles()
    assert router.phase("f") is Phase.RESIDENT
    fake.ends(users[1])
    fake.arrives("c")
    assert late in running(fake)


def test_slots_that_cannot_grow_fail_only_the_variant_that_needed_it() -> None:
    router, fake, _ = make(slot_bytes=20)
    (fine,) = ask(router, "a")
    fake.arrives("a")
    (doomed,) = ask(router, "f")
    fake.loads("f")
    fake.growing, fake.shape = None, 20
    router.grow_failed("no memory")
    assert [t for t, _ in fake.failed] == [doomed]
    assert not fake.held
    assert running(fake) == [fine]
    assert router.cache.num_slots == 5


def test_r12_a_full_queue_refuses_all_or_nothing() -> None:
    router, fake, _ = make()
    router.submit([Ticket(BASE_DIGEST) for _ in range(3 + 5)])
    with pytest.raises(QueueFull, match="5 requests wait, the limit is 6"):
        router.submit([Ticket(BASE_DIGEST), Ticket(BASE_DIGEST)])
    assert router.num_waiting == 5
    router.submit([Ticket(BASE_DIGEST)])
    assert len(fake.running) == 3


def test_r12_one_variant_cannot_fill_the_queue_of_all() -> None:
    router, _fake, _ = make(replace(LIMITS, max_variant_queue=2))
    ask(router, *[BASE_DIGEST] * 5)
    with pytest.raises(QueueFull, match="2 requests for this model wait, the limit is 2"):
        ask(router, BASE_DIGEST)
    ask(router, "a")
    assert router.num_waiting == 3


def test_sv15_a_request_that_waits_too_long_is_answered() -> None:
    router, fake, clock = make(replace(LIMITS, max_wait_seconds=10.0))
    *_, ready = ask(router, *[BASE_DIGEST] * 4)
    clock.now += 5.0
    (later,) = ask(router, "a")
    clock.now += 5.0
    router.tick()
    assert [t for t, _ in fake.failed] == [ready]
    clock.now += 5.0
    router.tick()
    assert [t for t, _ in fake.failed] == [ready, later]
    error = fake.failed[0][1]
    assert isinstance(error, WaitedTooLong)
    assert error.retry_seconds == 10.0
    assert len(fake.running) == 3, "those that run are not touched"


def test_r9_sv24_neither_base_nor_residents_keep_one_from_its_turn() -> None:
    router, fake, _ = make()
    (first,) = ask(router, "a")
    fake.arrives("a")
    flood = ask(router, *[BASE_DIGEST] * 6)
    (late,) = ask(router, "a")
    assert running(fake) == [first, *flood[:2]]
    fake.ends(first)
    fake.ends(flood[0])
    assert late in running(fake), "the base had one turn in between, not four"


def test_r9_sv14_sv19_a_starving_variant_drains_a_resident() -> None:
    router, fake, clock = make(slot_bytes=60)
    (first,) = ask(router, "e")
    fake.arrives("e")
    ask(router, "c")
    fake.loads("c")
    # Requests for e keep coming and overlap, so that e is never idle.
    (second,) = ask(router, "e")
    fake.ends(first)
    clock.now += LIMITS.starve_seconds
    router.tick()
    (late,) = ask(router, "e")
    assert router.phase("e") is Phase.DRAINING
    fake.ends(second)
    fake.settles()
    assert router.phase("c") is Phase.RESIDENT
    assert [t.digest for t in running(fake)] == ["c"]
    fake.ends(running(fake)[0])
    fake.arrives("e")
    assert running(fake) == [late]


@pytest.mark.parametrize("flooded", [BASE_DIGEST, "a"])
def test_r9_no_one_waits_longer_than_the_bound_under_a_flood(flooded: str) -> None:
    router, fake, clock = make(slot_bytes=60)
    if flooded == "a":
        ask(router, "a")
        fake.arrives("a")
    (cold,) = ask(router, "b")
    fake.loads("b")
    fake.settles()
    for _ in range(10):  # every second one ends and two come, as far as the queue takes them
        clock.now += 1.0
        router.tick()
        for _ in range(2):
            if router.num_waiting < LIMITS.max_queue - 1:
                ask(router, flooded)
        if cold in running(fake):
            break
        if fake.running:
            fake.ends(running(fake)[0])
        fake.settles()
    # Draining starts after starve_seconds; then only those that hold a end, one a second.
    assert cold in running(fake)
    assert clock.now <= LIMITS.starve_seconds + LIMITS.max_running + LIMITS.max_queue


def test_a_copy_in_host_memory_needs_no_second_load() -> None:
    router, fake, _ = make(host_bytes=40, slot_bytes=60)
    for digest in "ab":
        (ticket,) = ask(router, digest)
        fake.arrives(digest)
        fake.ends(ticket)
    assert (router.phase("a"), router.phase("b")) == (Phase.HOST, Phase.RESIDENT)
    assert router.stats()["a"].host_bytes == 9
    ask(router, "a")
    fake.settles()
    assert router.phase("a") is Phase.RESIDENT
    assert fake.num_loads["a"] == 1


def test_sv02_one_that_left_the_family_goes_when_its_last_request_ends() -> None:
    router, fake, _ = make(host_bytes=40)
    (ticket,) = ask(router, "a")
    fake.arrives("a")
    router.set_family([d for d in NEEDS if d != "a"])
    with pytest.raises(NotServed, match="left the family"):
        ask(router, "a")
    assert "a" in router.cache
    fake.ends(ticket)
    assert "a" not in router.cache
    assert not fake.held
    assert "a" not in router.stats()


def test_r10_sv02_sv03_unload_hides_drains_and_frees_both_tiers() -> None:
    router, fake, _ = make(host_bytes=40)
    users = ask(router, *"aaaaa")
    fake.arrives("a")
    router.unload("a", deadline_seconds=5.0)
    with pytest.raises(NotServed, match="unloaded"):
        ask(router, "a")
    for ticket in users:
        assert "a" in router.cache
        fake.ends(ticket)
    assert not fake.holds
    assert not fake.held
    assert not fake.failed
    router.set_family(NEEDS)
    ask(router, "a")
    assert fake.loading == ["a"]


def test_r10_sv22_at_the_deadline_of_an_unload_its_requests_are_stopped() -> None:
    router, fake, clock = make()
    users = ask(router, *"aaaa", BASE_DIGEST)
    fake.arrives("a")
    router.unload("a", deadline_seconds=5.0)
    clock.now += 4.9
    router.tick()
    assert not fake.halted
    clock.now += 0.1
    router.tick()
    router.tick()
    of_a = [t for t in running(fake) if t.digest == "a"]
    assert fake.halted == of_a, "each once, and no other's"
    assert [t for t, _ in fake.failed] == [t for t in users[:4] if t not in of_a]
    for ticket in of_a:
        fake.ends(ticket)
    assert not fake.holds
    assert running(fake) == [users[4]]


def test_r11_sv18_the_statistics_say_what_is_where_and_what_happened() -> None:
    router, fake, clock = make(host_bytes=40, slot_bytes=50)
    ask(router, "a")
    clock.now += 3.0
    fake.loads("a")
    clock.now += 0.5
    fake.settles()
    ask(router, "a", "b")
    found = router.stats()
    assert found.keys() == NEEDS.keys()
    a = found["a"]
    assert (a.phase, a.users, a.waiting, a.device_bytes, a.host_bytes) == (
        Phase.RESIDENT, 2, 0, 50, 9,
    )  # fmt: skip
    assert (a.hits, a.misses, a.loads, a.evictions, a.failures) == (1, 1, 1, 0, 0)
    assert (a.load_seconds, a.install_seconds) == (3.0, 0.5)
    assert a.rate > found["b"].rate > 0.0
    assert (found["b"].phase, found["b"].waiting) == (Phase.LOADING, 1)


class Unwalked(dict):
    """Variants that are looked up one by one only."""

    def __iter__(self):
        raise AssertionError("a walk over all variants")

    def items(self):
        return iter(self)

    values = keys = items


def test_no_event_of_a_request_walks_over_the_whole_family() -> None:
    """Of thousands of variants a few are in use."""
    router, fake, clock = make(host_bytes=40)
    router._residency.variants = Unwalked(router._residency.variants)
    tickets = ask(router, "a", "b", BASE_DIGEST)
    fake.loads("a")
    fake.settles()
    clock.now += 1.0
    router.tick()
    for ticket in running(fake):
        fake.ends(ticket)
    assert not router.cancel(tickets[0])
    assert router.cancel(tickets[1])
