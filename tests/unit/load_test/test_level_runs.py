"""Levels on a real server: what it carries is found, and what cannot be measured is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.measure_accuracy.virtual_time import VirtualClients, virtual_clients
from gpufleet.errors import FleetError
from gpufleet.load_test import workloads
from gpufleet.load_test.arrivals import Trace, TraceEntry
from gpufleet.load_test.client_places import CONTROLLER, ClientPlace, this_machine
from gpufleet.load_test.level import Level
from gpufleet.load_test.level_runs import (
    MOST_CLIENT_SHARE,
    LevelRuns,
    blame_client,
    give_up_seconds,
    measure_client,
)
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.outcomes import Contract, Outcome
from tests.support.queue_server import QueueServer
from tests.support.rows import each_row

IDS = workloads.TokenRange(100, 1000)
WORK = workloads.Workload(
    "short", workloads.fixed_length(32), workloads.fixed_length(4), "short answers"
)
# Far beyond what the server takes idle, and what a busy machine adds.
EASY = Contract(ttft_seconds=5.0, share=0.5)


@pytest.fixture
def server() -> Iterator[QueueServer]:
    with QueueServer(slots=4, first_seconds=0.01, token_seconds=0.002, key="sesame") as found:
        yield found


@pytest.fixture
def key(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    return str(file)


def runs(server: QueueServer, contract: Contract, key_file: str | None) -> LevelRuns:
    target = Target("replica tiny-0", server.url, "tiny", "tiny", ("tiny-0",), 1, key_file)
    return LevelRuns(target, contract, WORK, IDS, 1, 1)


def test_a_rate_far_below_the_capacity_is_kept_and_each_request_was_the_servers(
    server: QueueServer, key: str
) -> None:
    measured = runs(server, EASY, key)

    level = measured.run(20.0, 10.0)

    assert (level.verdict, level.rate, level.errors) == ("kept", 20.0, {})
    assert len(server.record) >= level.requests
    assert {each.headers["authorization"] for each in server.record} == {"Bearer sesame"}
    assert not measured.stopped


def test_a_rate_above_the_capacity_is_missed(key: str) -> None:
    """40 arrive in a second, 10 are served: soon all of them wait longer than was promised."""
    contract = Contract(ttft_seconds=0.2, e2e_seconds=0.5, share=0.9)
    with QueueServer(slots=1, first_seconds=0.04, token_seconds=0.02, key="sesame") as server:
        level = runs(server, contract, key).run(40.0, 10.0)

    # A busy machine may make the client late, which is no miss of the server's.
    assert level.verdict != "kept"
    assert level.kept < 0.5 * level.requests


@each_row(
    "contract, requests",
    [
        (Contract(ttft_seconds=0.005, e2e_seconds=0.5), 3),
        (Contract(ttft_seconds=0.005, e2e_seconds=0.5, share=0.5), 10),
    ],
    ids=str,
)
def test_objectives_that_no_request_meets_alone_are_refused_with_the_numbers(
    contract: Contract, requests: int
) -> None:
    with virtual_clients(QueueServer(slots=4, first_seconds=0.2, token_seconds=0.1)) as clients:
        with pytest.raises(FleetError) as refused:
            alone(clients, contract).check_alone()
        sent = len(clients._server.record)

    assert sent >= requests
    assert str(refused.value).startswith(
        "not even one request at a time meets the objectives of tiny: none of"
    )
    assert "TTFT is 0.2 s at best, but the objective is 0.005 s; E2E is 0.5 s at best" in str(
        refused.value
    )
    assert "`serving.tiny.objectives`" in str(refused.value)


def test_one_request_that_meets_them_is_enough() -> None:
    contract = Contract(ttft_seconds=0.3)
    with virtual_clients(QueueServer(slots=4, first_seconds=0.2, token_seconds=0.1)) as clients:
        alone(clients, contract).check_alone()
        # A client is asked once a second.
        assert len(clients._server.record) <= 4


def test_a_failure_of_every_request_is_named() -> None:
    server = QueueServer(slots=4, faults=("500",) * 20)
    with (
        virtual_clients(server) as clients,
        pytest.raises(FleetError, match=r"none of 3 requests met them \(failures: 500\)"),
    ):
        alone(clients, Contract(ttft_seconds=0.3)).check_alone()


def alone(clients: VirtualClients, contract: Contract) -> LevelRuns:
    target = Target("replica tiny-0", clients._server.url, "tiny", "tiny", ("tiny-0",), 1)
    place = ClientPlace(CONTROLLER, 1, clients.start)
    return LevelRuns(target, contract, WORK, IDS, 1, 1, place=place, sleep=clients.sleep)


@each_row(
    "promised, ttft, lag, verdict",
    [
        (0.2, 0.21, 0.05, "missed"),
        (0.2, 0.21, 0.06, "not known"),
        (2.0, 2.05, 0.1, "missed"),
        (2.0, 2.05, 0.11, "not known"),
        (2.0, 1.0, 9.0, "kept"),
        # Ten seconds late, and not because of a client that is a quarter of a second late.
        (1.5, 10.0, 0.25, "missed"),
        (1.5, 10.0, 9.0, "not known"),
    ],
)
@pytest.mark.parametrize("concurrency", [None, 5], ids=["open loop", "closed loop"])
def test_a_late_client_takes_back_a_miss_by_less_than_its_lag_and_no_other_verdict(
    promised: float, ttft: float, lag: float, verdict: str, concurrency: int | None
) -> None:
    contract = Contract(ttft_seconds=promised)
    level = Level(contract, None if concurrency else 10.0, 600, 60, concurrency=concurrency)
    for due in (0.1 * number for number in range(6000)):
        level.add(Outcome(due, due, due + ttft, due + ttft, 100, 10, (), ""))
    level.decide(700.0, [])
    assert blame_client(level, lag, contract).verdict == verdict


@pytest.mark.parametrize(
    ("faults", "with_key", "words"),
    [
        ((), False, "(401): the server does not accept the key"),
        (("429",), True, "(429): this client's requests are limited"),
    ],
)
def test_a_first_request_that_fails_is_explained_before_any_load(
    key: str, faults, with_key: bool, words: str
) -> None:
    with QueueServer(slots=1, key="sesame", faults=faults) as server:
        measured = runs(server, EASY, key if with_key else None)
        with pytest.raises(FleetError) as refused:
            measured.try_largest()

    assert words in str(refused.value)
    assert "sesame" not in str(refused.value)


def test_the_largest_request_is_tried_first(server: QueueServer, key: str) -> None:
    measured = runs(server, EASY, key)
    measured.work = workloads.Workload(
        "talk",
        workloads.uniform_lengths(8, 16),
        workloads.uniform_lengths(2, 4),
        "two turns",
        10,
        turns=2,
    )

    measured.try_largest()

    seen = server.record[0]
    assert len(seen.prompt) + seen.tokens == measured.work.most_tokens


def test_the_turns_of_a_conversation_share_the_header_of_the_gateways_affinity(
    server: QueueServer, key: str
) -> None:
    measured = runs(server, EASY, key)
    measured.target = dataclasses.replace(measured.target, session_header="x-talk")
    measured.work = dataclasses.replace(WORK, turns=4)

    measured.run(2, 5.0, closed=True)

    first: dict[str, list[int]] = {}
    for each in server.record:
        first.setdefault(each.headers["x-talk"], []).append(len(each.prompt))
    assert len(first) > 5
    assert any(len(lengths) > 1 for lengths in first.values())
    assert all(lengths == sorted(set(lengths)) for lengths in first.values())


def test_a_reason_from_outside_ends_a_level_without_a_verdict(
    server: QueueServer, key: str
) -> None:
    measured = runs(server, EASY, key)
    measured.stop_reason = lambda in_flight: "others wait" if in_flight >= 0 else ""

    level = measured.run(20.0, 60.0)

    assert (level.verdict, level.why, measured.stopped) == (
        "not known", "others wait", "others wait",
    )  # fmt: skip


def test_a_trace_is_replayed_once_with_its_lengths_at_another_rate(
    server: QueueServer, key: str
) -> None:
    measured = runs(server, EASY, key)
    measured.trace = Trace(tuple(TraceEntry(float(n), 20 + n, 1 + n) for n in range(8)))

    level = measured.run(8.0, 10.0)

    assert level.rate == 8.0
    assert [(len(each.prompt), each.tokens) for each in server.record] == [
        (20 + n, 1 + n) for n in range(8)
    ]
    arrived = [each.arrived for each in server.record]
    assert arrived[-1] - arrived[0] < 2.0  # 7 s in the trace


@pytest.mark.parametrize("text", [None, ""])
def test_a_key_file_that_has_no_key_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)

    with pytest.raises(FleetError, match=str(file)):
        LevelRuns(
            Target("gateway lb", "http://127.0.0.1:9", "m", "m", ("m-0",), 1, str(file)),
            EASY, WORK, IDS, 1, 1,
        )  # fmt: skip


def test_what_the_client_itself_can_send_is_measured_and_halved() -> None:
    found = measure_client(WORK, 1, this_machine())

    assert found.rate_at(MOST_CLIENT_SHARE) > 0
    assert found.rate_at(MOST_CLIENT_SHARE) * found.cpu_seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("contract", "seconds"),
    [(Contract(ttft_seconds=1.0), 30.0), (Contract(e2e_seconds=60.0), 600.0)],
)
def test_a_request_is_given_up_long_after_its_promise(contract: Contract, seconds: float) -> None:
    assert give_up_seconds(contract) == seconds
