"""Searches on a real server in virtual time: what ends them, and what a closed loop hides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest

from benchmarks.measure_accuracy.virtual_time import VirtualClients, virtual_clients
from gpufleet.load_test.arrivals import Trace, TraceEntry
from gpufleet.load_test.client_places import CONTROLLER, ClientPlace
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelObserver, LevelRuns
from gpufleet.load_test.level_search import LevelSearch, interrupted_search, single_level
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.rate_search import RateSearch
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length
from tests.support.queue_server import QueueServer
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import level

SLOTS, REQUEST_SECONDS = 4, 0.2
WORK = Workload("four", fixed_length(32), fixed_length(4), "four tokens of 0.05 s")
CONTRACT = Contract(ttft_seconds=0.5)


@pytest.fixture
def clients() -> Iterator[VirtualClients]:
    server = QueueServer(slots=SLOTS, first_seconds=0.05, token_seconds=0.05)
    with virtual_clients(server) as found:
        yield found


def search(clients: VirtualClients, *observers: LevelObserver) -> LevelSearch:
    url = clients._server.url
    target = Target("replica q-0", url, "q", "q", ("q-0",), 1)
    place = ClientPlace(CONTROLLER, 1, clients.start)
    runs = LevelRuns(
        target, CONTRACT, WORK, TokenRange(100, 1000), 1, 1,
        place=place, sleep=clients.sleep, observers=observers,
    )  # fmt: skip
    return LevelSearch(runs, 20.0, REQUEST_SECONDS)


@each_row("start", [1.0, 40.0])
def test_the_concurrency_that_a_closed_loop_keeps_is_found_from_both_sides(start: float) -> None:
    """
    Of c clients on 4 slots each waits (c - 4) / 4 requests of 0.2 s, and 0.05 s for its first
    token: 13 wait 0.45 s, 14 do 0.5 s.
    """
    with virtual_clients(QueueServer(slots=SLOTS, first_seconds=0.05, token_seconds=0.05)) as there:
        found = search(there).concurrency(start, most_rate=1000.0)

    assert found.found.status == "found"
    assert found.found.kept in (12, 13)
    assert found.found.missed in (13, 14)
    assert found.best is not None
    # All slots are busy: it answers all that the server can, and its queue shows in no latency.
    assert found.best.answered_per_second == pytest.approx(SLOTS / REQUEST_SECONDS, rel=0.02)
    assert all(each.concurrency == each.load for each in found.levels)


def test_a_closed_loop_ends_at_what_its_clients_can_send(clients: VirtualClients) -> None:
    found = search(clients).concurrency(1.0, most_rate=8.0)

    assert [each.load for each in found.levels] == [1.0, 2.0]
    assert (found.found.kept, found.found.missed, found.found.status) == (2.0, None, "ceiling")
    assert "2 concurrent requests were answered at" in found.found.why


def test_a_load_far_above_a_servers_limit_is_missed_however_short_levels_are() -> None:
    """It answers 5 of 64 a second; within 20 s all others are younger than their 30 s."""
    with virtual_clients(QueueServer(slots=1, first_seconds=0.05, token_seconds=0.05)) as there:
        slow = search(there)
        slow.runs.contract = Contract(ttft_seconds=3.0, e2e_seconds=30.0, share=0.5)
        found = slow._search(RateSearch(64.0, 256.0))

    assert [(each.load, each.verdict) for each in found.levels] == [(64.0, "missed")]


def test_a_search_says_which_levels_it_begins_and_ends(clients: VirtualClients) -> None:
    class Seen(LevelObserver):
        def __init__(self) -> None:
            self.said: list[tuple[str, float]] = []
            self.requests = 0

        def began(self, load: float, /) -> None:
            self.said.append(("began", load))

        def outcome(self, _outcome, /) -> None:
            self.requests += 1

        def ended(self, run, /) -> None:
            self.said.append(("ended", run.sent))

    seen = Seen()
    found = search(clients, seen).single(4.0)

    assert seen.said[0] == ("began", 4.0)
    assert [name for name, _ in seen.said] == ["began", "ended"]
    assert found.levels[0].requests <= seen.requests <= seen.said[1][1]


MISSED = level(8.0, 100, 200, (0.4, 0.6), "missed")


@each_row(
    "of, status, kept, missed",
    [
        (level(2.0, 200, 200, (0.97, 1.0), "kept"), "ceiling", 2.0, None),
        (MISSED, "missed", None, 8.0),
        (level(8.0, 190, 200, (0.9, 0.98), "not known"), "not known", None, None),
        (replace(MISSED, rate=None, concurrency=8), "missed", None, 8.0),
        # Only of one request at a time it is true that not even one keeps it.
        (replace(MISSED, rate=None, concurrency=1), "not even one", None, 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_one_level_alone_says_no_more_than_it_shows(
    of: LevelSummary, status: str, kept: float | None, missed: float | None
) -> None:
    found = single_level(of)

    assert (found.status, found.kept, found.missed) == (status, kept, missed)


def test_an_interrupted_search_keeps_what_it_knows() -> None:
    kept = level(4.0, 400, 400, (0.98, 1.0), "kept")

    assert interrupted_search([kept, MISSED], "users wait").kept == 4.0
    assert interrupted_search([MISSED], "users wait").status == "not known"


@each_row("trace", [None, Trace(tuple(TraceEntry(n / 50, 32, 4) for n in range(60)))], ids=str)
def test_no_more_requests_than_a_guests_share_are_ever_at_the_server(trace: Trace | None) -> None:
    server = QueueServer(slots=SLOTS, first_seconds=0.05, token_seconds=0.05)
    with virtual_clients(server) as clients:
        runs = search(clients).runs
        runs.most_in_flight, runs.trace = 2, trace
        level = runs.run(30.0, 20.0)

    ends = [(each.arrived, 1) for each in server.record]
    ends += [(each.ended, -1) for each in server.record if each.ended is not None]
    under_way = list(accumulate(change for _, change in sorted(ends)))
    assert max(under_way) == 2
    # What waited in the client counts from when it was due.
    assert level.verdict != "kept"
    assert level.ttft["p99"] > 0.5
