"""A guest takes a share of what is idle, and ends as soon as others would notice it."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.guest import (
    Allowance,
    ServerLoad,
    allowance,
    busy_replicas,
    most_in_flight,
    stop_reason,
    subtract_own_load,
)


def load(
    running: float = 0, waiting: float = 0, kv: float = 0.0, slots: int | None = 64
) -> ServerLoad:
    return ServerLoad("tiny-0", running, waiting, kv, slots)


@pytest.mark.parametrize(
    ("loads", "share", "most"),
    [
        ([load()], 0.5, 32),
        ([load(running=44)], 0.5, 10),
        ([load(running=44), load(running=60)], 0.5, 12),  # 20 and 4 are idle
        ([load(running=4, kv=0.75)], 0.5, 8),  # the KV cache is fuller than the slots
        ([load(running=64, waiting=9), load()], 0.25, 16),  # a queue makes nothing negative
    ],
)
def test_it_takes_a_share_of_idle_slots_or_of_the_idle_kv_cache(loads, share, most) -> None:
    assert most_in_flight(loads, share) == most


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([load(), "tiny-1: its metrics cannot be read"], "tiny-1: its metrics cannot be read"),
        ([load(slots=None)], "set `flags.max-num-seqs`"),
        ([load(running=63)], "room for 1 more requests, of which a guest may use 50%"),
    ],
)
def test_what_is_not_known_or_not_idle_is_refused(loads, words) -> None:
    with pytest.raises(FleetError) as refused:
        most_in_flight(loads, 0.5)

    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([load(running=64, kv=0.9)], ""),
        ([load(), load(waiting=2)], "2 requests wait for tiny-0"),
        ([load(kv=0.91)], "91% of tiny-0's KV cache is in use"),
        ([load(), "tiny-1: no answer in time"], "no longer knows the load of a replica"),
    ],
)
def test_it_stops_when_a_request_waits_or_the_kv_cache_is_full(loads, words) -> None:
    assert words in stop_reason(loads)
    assert bool(words) == bool(stop_reason(loads))


def behind(running: float, gateway_slots: int, replica: str = "tiny-0") -> ServerLoad:
    """Return the load of a replica of 64 slots that the gateway lets fewer requests through to."""
    return ServerLoad(replica, running, 0, 0.0, 64, gateway_slots)


def test_what_the_gateway_lets_through_limits_a_guest_too() -> None:
    assert most_in_flight([behind(4, 16)], 0.5) == 6
    assert most_in_flight([behind(4, 200)], 0.5) == 30
    with pytest.raises(FleetError, match=r"set `flags\.max-num-seqs`"):
        most_in_flight([ServerLoad("tiny-0", 0, 0, 0.0, None, 16)], 0.5)


def test_it_stops_when_others_may_wait_in_the_gateway_where_vllm_has_no_queue() -> None:
    full, free = behind(16, 16), behind(15, 16, "tiny-1")

    assert "(`gateway.per_server`), so requests of other clients may wait" in stop_reason([full])
    assert stop_reason([full, free]) == "", "the gateway sends the next one to the other"
    assert stop_reason([]) == ""


def test_replicas_with_requests_of_others_are_named() -> None:
    assert busy_replicas([load(), ServerLoad("tiny-1", 2, 1, 0.1, 8), "tiny-2: unknown"]) == {
        "tiny-1": 3
    }


@pytest.mark.parametrize(
    ("loads", "own", "left"),
    [
        ([load(running=8, kv=0.5)], 4, [(4, 0.25)]),
        ([load(running=6), load(running=2)], 4, [(3, 0), (1, 0)]),
        ([load(running=8, waiting=2, kv=0.4)], 10, [(0, 0)]),
        ([load(running=3)], 9, [(0, 0)]),  # some are at the gateway, or ended meanwhile
        ([load()], 0, [(0, 0)]),
    ],
)
def test_its_own_requests_are_the_same_part_of_each_replicas(loads, own, left) -> None:
    found = subtract_own_load([*loads, "tiny-9: unknown"], own)

    assert found[-1] == "tiny-9: unknown"
    assert [(each.running, each.kv_usage) for each in found[:-1]] == left


@pytest.mark.parametrize(
    ("loads", "own", "most", "words"),
    [
        ([load(running=10)], 10, 32, ""),  # its own take nothing away from it
        ([load(running=30, waiting=2)], 10, 0, "2 requests wait for tiny-0"),
        ([load(running=30, waiting=2)], 32, 32, ""),  # none of others is there
        ([load(running=10, kv=0.95)], 10, 0, "95% of tiny-0's KV cache is in use"),
        ([load(running=63)], 0, 0, "room for 1 more requests, of which a guest may use 50%"),
        ([load(), "tiny-1: no answer in time"], 0, 0, "no longer knows the load"),
    ],
)
def test_a_guest_that_stays_has_nothing_under_way_while_others_wait(
    loads, own, most, words
) -> None:
    found = allowance(loads, own, 0.5)

    assert found.most == most
    assert words in found.why
    assert bool(words) == bool(found.why)


def test_a_replica_whose_limit_is_not_known_is_refused() -> None:
    with pytest.raises(FleetError, match=r"set `flags\.max-num-seqs`"):
        allowance([load(slots=None)], 0, 0.5)
    assert allowance([load()], 0, 0.5) == Allowance(32)
