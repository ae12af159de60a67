"""
`gpufleet measure` at a fleet that serves: beside another client, and a setting tried on one node.

Two nodes with a replica each, behind a gateway with TLS. `make test-long PART=measure` writes what
it measured into docs/measured/measure-fleet.md.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.lab.gateway_pair import until
from tests.lab.upgrade_fleet import GATEWAY
from tests.lab.upgrade_load import Request, summary
from tests.lab.walk import NODES, UNI_FLAGS, TlsFleet, gateway_fleet
from tests.support.checkout import ROOT, own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfms")
PAGE = "measured/measure-fleet.md"
RATE = 1.0
OBJECTIVES = {"ttft_p99_seconds": 3, "e2e_p99_seconds": 30}
"""Long enough for two cores that do other things, too."""
STALL_SECONDS, STALL_EVERY_SECONDS = 2.5, 10.0
"""Four users a second: some wait longer than a second, and fewer than the slots come together."""
SHORT = ("--lengths", "64,8", "--share", "0.5")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFleet]:
    project = tmp_path_factory.mktemp("measuring")
    flags = {**UNI_FLAGS, "max-num-seqs": 1}  # of the first test
    with gateway_fleet(LAB_ID, project, flags=flags, objectives=OBJECTIVES) as found:
        (project / "bench-key").write_text(found.key_of_clients)
        yield found


def serve(fleet: TlsFleet, seqs: int) -> None:
    """Have both nodes serve with so many sequences at once."""
    fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": seqs})
    if {*fleet.seqs().values()} != {str(seqs)}:
        run = fleet.pyinfra("-y", seconds=1800)
        assert run.status == 0, run.output
    until(lambda: bool(fleet.completion()), "the gateway sees servers", 120)


def measured(fleet: TlsFleet, *words: str, seconds: int = 900) -> dict[str, Any]:
    """Return the result of a measurement; whether its time was enough, the data says."""
    run = fleet.gpufleet("measure", fleet.inventory, *words, "--json", seconds=seconds)
    print(run.stderr)
    assert run.status in (0, 1), run.output
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def answered(fleet: TlsFleet, node: str) -> float:
    """Return how many requests a node's server has finished, by its own counter."""
    page = fleet.ssh(node, f"curl -sf http://{fleet.address(node)}:8000/metrics")
    lines = [each for each in page.splitlines() if each.startswith("vllm:request_success_total{")]
    return sum(float(each.rpartition(" ")[2]) for each in lines)


def results(fleet: TlsFleet) -> list[Path]:
    """Return the stored results, the oldest first."""
    files = [*(fleet.project / "measurements").glob("*.json")]
    return sorted(
        (each for each in files if not each.name.endswith(".report.json")),
        key=lambda file: file.stat().st_mtime,
    )


def late(requests: list[Request], objectives: Mapping[str, float] = OBJECTIVES) -> list[Request]:
    """Return the requests that did not keep the model's objectives, as their client saw them."""
    ttft, e2e = (objectives.get(f"{each}_p99_seconds", math.inf) for each in ("ttft", "e2e"))
    return [
        each
        for each in requests
        if each.first is None or each.first - each.asked > ttft or each.ended - each.asked > e2e
    ]


def tuned(most: float = 4) -> tuple[str, ...]:
    """Return what makes `gpufleet measure` try settings on the second node's replica."""
    return ("--tune", "--replica", "tiny-1", "--seconds", "20", "--most", f"{most:g}", *SHORT)


def test_tune_gives_the_commands_of_the_page_and_puts_all_back(fleet: TlsFleet) -> None:
    """
    One sequence at a time is declared, so that eight may carry more: the results' own brackets say
    whether they do, and the proposal has to be the same.
    """
    serve(fleet, 1)
    before, seqs, known = fleet.pids(), fleet.seqs(), results(fleet)
    first, second = (f"{node} vllm-tiny-{number}.service" for number, node in enumerate(NODES))
    # Other clients lose no request: the other replica serves.
    with fleet.load("tuned", rate=0.5) as users:
        run = fleet.gpufleet(
            "measure", fleet.inventory, "tiny", *tuned(),
            "--try", "max-num-seqs=8,100000", "--json",
            seconds=2400,
        )  # fmt: skip
    print(run.stderr)
    assert run.status in (0, 1), run.output
    found = json.loads(run.stdout)
    declared, eight = found["trials"]
    files = [each for each in results(fleet) if each not in known]

    assert (declared["settings"], eight["settings"]) == ({}, {"max-num-seqs": 8})
    assert "not tried: max-num-seqs 100000" in run.stderr, "what no plan takes is not deployed"
    assert [each["file"] for each in found["trials"]] == [*map(str, files)]
    stored = [json.loads(file.read_text()) for file in files]
    said = [" ".join(each["subject"]["arguments"]) for each in stored]
    assert "--max-num-seqs 1 " in f"{said[0]} "
    assert "--max-num-seqs 8 " in f"{said[1]} "
    low, high = (each["found"] for each in stored)
    more = None not in (low["missed"], high["kept"]) and low["missed"] <= high["kept"]
    assert (found["proposal"] is not None) is more
    print(f"1 sequence: {low}; 8: {high}; proposed: {more}")
    assert fleet.seqs() == seqs, "it runs as it is declared"
    assert fleet.pids()[first] == before[first], "the other node was not touched"
    assert fleet.pids()[second] != before[second]
    assert fleet.drained() == {node: [] for node in NODES}
    assert summary(users.requests()).failed == 0
    fleet.changes_nothing()


def test_a_closed_loop_is_measured_beside_the_open_one(fleet: TlsFleet) -> None:
    """
    One sequence at a time, so that each loop has a limit within seconds.

    The other routes: what the server counted, and Little's law. In a closed loop as many requests
    are in the system as it has clients, and an open one keeps no rate far above the closed one's.
    """
    serve(fleet, 1)
    before = answered(fleet, NODES[1])
    # A level lasts at least twice as long as a request may take.
    fleet.declare_model(objectives={**OBJECTIVES, "e2e_p99_seconds": 10})

    try:
        found = measured(
            fleet, "--replica", "tiny-1", "--closed-loop", "--seconds", "20", *SHORT, seconds=2400
        )
    finally:
        fleet.declare_model(objectives=OBJECTIVES)

    counted = answered(fleet, NODES[1]) - before
    opened, closed = found["levels"], found["closed"]["levels"]
    print(found["found"], found["closed"]["found"])
    assert found["loop"] == "open"
    assert opened
    assert all(each["concurrency"] is None for each in opened)
    assert closed
    assert all(each["rate"] is None for each in closed)
    assert counted >= sum(each["requests"] for each in (*opened, *closed) if not each["errors"])
    known = [each for each in closed if each["verdict"] != "not known"]
    assert known
    for each in known:
        clients = each["concurrency"]
        assert each["mean_concurrency"] == pytest.approx(clients, rel=0.5, abs=1), each
    kept, most = found["found"]["kept"], max(each["requests"] / each["seconds"] for each in known)
    assert kept is None or kept <= 2 * most
    [file] = results(fleet)[-1:]
    assert json.loads(file.read_text())["closed"] == found["closed"]
    page = file.with_suffix(".html").read_text()
    assert "requests/s" in page
    assert "concurrent" in page


def test_another_client_beside_a_guest_loses_nothing_and_keeps_its_objectives(
    fleet: TlsFleet,
) -> None:
    """An OpenAI client beside `--guest 0.3`; what the servers finished is the other route."""
    serve(fleet, 8)
    key = str(fleet.project / "bench-key")
    with fleet.load("alone", rate=RATE) as users:
        until(lambda: len(users.requests()) >= 60, "users without a guest", 300)
    alone = summary(users.requests())
    with fleet.load("beside", rate=RATE) as users:
        until(lambda: len(users.requests()) >= 5, "users", 120)
        began = time.time()
        found = measured(
            fleet, "tiny", "--gateway", GATEWAY, "--key-file", key, "--guest", "0.3",
            "--seconds", "40", "--most", "4", *SHORT,
        )  # fmt: skip
        ended = time.time()
    requests = users.requests(since=began, until=ended)
    beside = summary(requests)

    guests = sum(level["requests"] for level in found["levels"])
    row = [
        f"{guests}", f"{max(level['rate'] for level in found['levels']):g}",
        f"{beside.requests}", f"{beside.failed}", f"{len(late(requests))}",
        f"{alone.ttft_p50:.3f}, {alone.ttft_p99:.3f} s",
        f"{beside.ttft_p50:.3f}, {beside.ttft_p99:.3f} s",
    ]  # fmt: skip
    print(" | ".join(row), found["found"], flush=True)
    note(PAGE, "beside users", *row)
    assert found["target"] == f"gateway {GATEWAY}"
    assert guests >= 20, "the guest did put load on"
    assert beside.requests >= 60
    assert beside.failed == 0, beside.failures
    assert len(late(requests)) <= 0.01 * beside.requests, "its objectives are for 99 of 100"


@contextmanager
def stalls(fleet: TlsFleet) -> Iterator[None]:
    """
    Have all engines stand still for `STALL_SECONDS`, again and again, while this lasts.

    Only the engines: a server that stands still itself counts a request from when it reads it.
    """
    engine, over = "'[V]LLM::EngineCore'", threading.Event()  # not this command itself
    signals = f"pkill -STOP -f {engine}; sleep {STALL_SECONDS}; pkill -CONT -f {engine}"

    def stall(node: str) -> None:
        while not over.wait(STALL_EVERY_SECONDS):
            fleet.ssh(node, signals)

    threads = [threading.Thread(target=stall, args=(node,)) for node in NODES]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in threads:
            each.join()


@pytest.mark.parametrize(
    ("objectives", "said", "stalled"),
    [
        # One of twenty of the users' requests has 240 tokens; the guest's have 8.
        ({"e2e_p99_seconds": 0.3}, "requests took longer than 0.3 s", False),
        ({"ttft_p99_seconds": 1}, "requests waited longer than 1 s", True),
    ],
    ids=["end to end", "first token"],
)
def test_a_guest_stops_because_others_are_late_and_they_lose_nothing(
    fleet: TlsFleet, objectives: dict[str, float], said: str, stalled: bool
) -> None:
    """By the servers' histograms; the users' own times are the other route."""
    serve(fleet, 8)
    fleet.declare_model(objectives=objectives)
    key = str(fleet.project / "bench-key")
    try:
        with fleet.load("late", rate=4.0) as users:
            until(lambda: len(users.requests()) >= 5, "users", 120)
            began = time.time()
            with stalls(fleet) if stalled else nullcontext():
                found = measured(
                    fleet, "tiny", "--gateway", GATEWAY, "--key-file", key, "--guest", "0.3",
                    "--seconds", "60", "--most", "4", *SHORT,
                )  # fmt: skip
            ended = time.time()
    finally:
        fleet.declare_model(objectives=OBJECTIVES)
    requests = users.requests(since=began, until=ended)
    last = found["levels"][-1]
    print(last["why"], summary(requests))

    # Also if only users' and guest's requests together are late more often than the alert allows.
    assert last["why"].startswith("stopped as a guest: ")
    assert said in last["why"]
    assert found["found"]["why"] == last["why"]
    assert found["found"]["missed"] is None
    assert summary(requests).failed == 0, summary(requests).failures
    assert late(requests, objectives)


def test_a_tune_that_is_killed_is_put_right_by_the_commands_that_it_names(fleet: TlsFleet) -> None:
    """With SIGKILL while a tried setting runs; then by a deploy, and by the next --tune."""
    second = f"{NODES[1]} vllm-tiny-1.service"
    declared = fleet.seqs()
    # One level of a search is enough.
    tune = ("measure", fleet.inventory, "tiny", *tuned(most=0.5), "--try", "max-num-seqs=6")

    def kill_while_it_is_tried() -> None:
        gpufleet = str(Path(sys.executable).with_name("gpufleet"))
        process = subprocess.Popen(
            [gpufleet, *tune], cwd=ROOT, env=fleet.env(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            until(
                lambda: process.poll() is not None or fleet.seqs().get(second) == "6",
                "the replica with 6", 1200,
            )  # fmt: skip
            assert process.poll() is None, "it ended before it tried 6"
        finally:
            process.kill()
            print(process.communicate()[0])
        # A deploy that it had begun goes on to its end.
        busy = ["pgrep", "-f", "--", f"--data .*{fleet.inventory} .*vllm.py"]
        until(lambda: subprocess.run(busy, check=False).returncode == 1, "its deploy's end", 300)
        assert fleet.drained()[NODES[1]] == ["tiny-1", "cordon"]

    kill_while_it_is_tried()
    run = fleet.gpufleet(*tune, "--json", seconds=2400)
    assert run.status in (0, 1), run.output
    assert "was interrupted, so gpufleet first deploys the declared settings" in run.stderr
    trials = json.loads(run.stdout)["trials"]
    assert [each["settings"] for each in trials] == [{}, {"max-num-seqs": 6}]
    assert fleet.seqs() == declared
    assert not fleet.drained()[NODES[1]]

    kill_while_it_is_tried()
    run = fleet.pyinfra("-y", "--limit", NODES[1], seconds=1800)
    assert run.status == 0, run.output
    assert "gpufleet measure --tune: settings are tried on tiny-1" in run.output
    assert fleet.seqs() == declared
    assert fleet.drained()[NODES[1]] == ["tiny-1", "cordon"]
    run = fleet.gpufleet("undrain", fleet.inventory, NODES[1])
    assert run.status == 0, run.output
    assert not fleet.drained()[NODES[1]]
    fleet.changes_nothing()


def test_a_setting_is_tried_on_one_replica_by_the_commands_of_the_page(fleet: TlsFleet) -> None:
    """docs/operate/measure.md, typed: the other node is not touched, and all is as before."""
    serve(fleet, 8)
    before, seqs = fleet.pids(), fleet.seqs()
    first, second = (f"{node} vllm-tiny-{number}.service" for number, node in enumerate(NODES))
    assert set(before) == {first, second}
    here, deploy = (fleet.inventory, NODES[1]), ("deploy", "vllm", fleet.inventory, "-y")

    def typed(*words: str) -> str:
        run = fleet.gpufleet(*words, seconds=900)
        assert run.status == 0, run.output
        return run.stdout

    one = measured(fleet, "--replica", "tiny-1", "--rate", "1", "--seconds", "40", *SHORT)
    typed("drain", *here, "--why", "try max-num-seqs 12")
    typed(*deploy, "--limit", NODES[1], "--data", "serving.tiny.flags.max-num-seqs=12")
    tried = fleet.seqs()
    other = measured(fleet, "--replica", "tiny-1", "--rate", "1", "--seconds", "40", *SHORT)
    typed(*deploy, "--limit", NODES[1])
    typed("undrain", *here)
    compared = json.loads(typed("measure", "--compare", *map(str, results(fleet)[-2:]), "--json"))

    assert tried == {**seqs, second: "12"}
    assert one["subject"]["nodes"] == other["subject"]["nodes"] == [NODES[1]]
    assert one["fingerprint"] != other["fingerprint"]
    assert compared["changed"] == ["arguments --max-num-seqs 8, now --max-num-seqs 12"]
    assert fleet.seqs() == seqs
    assert fleet.pids()[first] == before[first], "the other node was not touched"
    assert not fleet.drained()[NODES[1]]
    fleet.changes_nothing()
