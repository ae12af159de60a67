"""benchmarks/measure_accuracy: virtual time is exact, and a wrong result would be seen."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from benchmarks.measure_accuracy.loops import outcomes_of
from benchmarks.measure_accuracy.queues import FIXED
from benchmarks.measure_accuracy.run import IDS, Searched
from benchmarks.measure_accuracy.virtual_time import VirtualClients, VirtualLoop, virtual_clients
from benchmarks.measure_client.clients import guidellm_said
from gpufleet.load_test.arrivals import ClosedLoop
from gpufleet.load_test.client_places import CONTROLLER, ClientPlace
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_runs import LevelRuns
from gpufleet.load_test.load_target import Target
from tests.support.queue_server import QueueServer


def test_timers_come_in_their_order_at_their_times() -> None:
    loop = VirtualLoop()
    seen: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, round(loop.time())))

    async def both() -> None:
        await asyncio.gather(note("late", 5000.0), note("early", 1000.0))

    loop.run(both())
    loop.close()

    assert seen == [("early", 1000), ("late", 5000)]


def level(server: QueueServer, clients: VirtualClients, rate: float) -> LevelSummary:
    target = Target("replica queue-0", server.url, "queue", "queue", ("queue-0",), None)
    runs = LevelRuns(
        target, FIXED.contract, FIXED.work, IDS, 1, 1,
        place=ClientPlace(CONTROLLER, 1, clients.start), sleep=clients.sleep,
    )  # fmt: skip
    return runs.run(rate, 40.0)


def test_client_and_server_agree_on_each_request_to_the_microsecond() -> None:
    server = FIXED.server(1)
    with virtual_clients(server) as clients:
        # Above the saturation, so that requests are still under way at the end.
        found = level(server, clients, 20.0)

    assert [each.deviation for each in clients.links] == [0.0]
    assert found.dispatch_lag_p99 < 1e-5
    assert len(server.record) > 400
    assert found.ttft["p99"] > FIXED.contract.ttft_seconds


@pytest.mark.parametrize(("field", "late"), [("arrived", 0.5), ("ended", 0.25)])
def test_a_time_that_is_wrong_shows_in_the_deviation(field: str, late: float) -> None:
    server = FIXED.server(1)
    with virtual_clients(server) as clients:
        level(server, clients, 1.0)
        seen = server.record[3]
        setattr(seen, field, getattr(seen, field) + late)

        assert clients.links[0].compare() == pytest.approx(late, abs=1e-5)

        del server.record[3]
        assert clients.links[0].compare() is None


def test_a_closed_loop_gets_exactly_what_the_server_can() -> None:
    found = outcomes_of(ClosedLoop(4, 0.0), 20.0)

    assert sum(each.done <= 20.001 for each in found if each.done is not None) == 400
    assert max(each.ttft or 0.0 for each in found) == pytest.approx(0.05, abs=1e-5)


def test_the_formula_and_a_simulation_have_the_same_true_rate() -> None:
    assert FIXED.simulated_rate(requests=30_000) == pytest.approx(FIXED.true_rate(), rel=0.04)


@pytest.mark.parametrize(
    ("kept", "missed", "right", "within"),
    [
        (9.5, 10.4, True, True),
        (8.9, 10.4, True, False),
        (9.5, 11.1, True, False),
        (9.5, None, True, False),
        (None, 10.4, True, False),
        (None, None, True, False),
        (10.01, 10.4, False, True),
        (9.0, 9.99, False, True),
        (10.01, None, False, False),
        (None, 9.99, False, False),
    ],
)
def test_a_bracket_is_wrong_if_one_end_excludes_the_true_rate(
    kept: float | None, missed: float | None, right: bool, within: bool
) -> None:
    found = Searched("found", kept, missed, 9, 1000, 3600.0, 0.0)

    assert (found.is_right(10.0), found.is_within(10.0)) == (right, within)
    assert ("right" if right else "WRONG") in found.line(10.0)


def test_guidellms_lateness_counts_from_the_intended_arrival_and_its_latency_from_the_sending() -> (
    None
):
    timings = {
        "targeted_start": 10.0,
        "request_start": 10.5,
        "first_token_iteration": 11.5,
        "last_token_iteration": 13.5,
    }
    requests = {"successful": [{"info": {"timings": timings}}], "errored": [{}]}

    said = guidellm_said({"benchmarks": [{"requests": requests}]}, 7.0)

    assert dataclasses.astuple(said) == (1, [1.0], [3.0], [0.5], 1, 7.0)
