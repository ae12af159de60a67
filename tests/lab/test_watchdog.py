"""
Real vLLM servers that freeze: found in time, dumped, ended as a group, and serving again.

`make test-long` writes what it measured into docs/monitor/watchdog.md.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.group_faults import Replica, wait
from tests.lab.test_replicas_over_nodes import COMPILATION, deploy
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfwd")
PAGE = "monitor/watchdog.md"
HEAD, WORKER = "gpu-01", "gpu-02"
# Longer than the first requests after a start take: at a load of 30 on two cores that was 65 s.
SECONDS, IDLE_SECONDS = 30, 15
# A look every 3 s, and a turn of the loop; systemctl and the journal on two busy cores.
SLACK = 10
DUMP = 30
# RestartSec=, and vLLM's start with two cores for both nodes.
AGAIN = 240
SATURATED_SECONDS = 600

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


@dataclass
class Load:
    """So many clients, each of which asks anew as soon as it was answered."""

    fleet: Fleet
    clients: int
    tokens: int
    answered: list[float] = field(default_factory=list)
    """When, as time.time()."""

    def __enter__(self) -> Load:
        self._over = threading.Event()
        for _ in range(self.clients):
            threading.Thread(target=self._ask_on, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _ask_on(self) -> None:
        while not self._over.is_set():
            if asked(self.fleet, tokens=self.tokens, seconds=600):
                self.answered.append(time.time())
            else:
                self._over.wait(1)


def asked(fleet: Fleet, *, tokens: int = 1, seconds: float = 20) -> bool:
    """Ask for a completion; say whether it came."""
    line = http.client.HTTPConnection(fleet.address(HEAD), 8000, timeout=seconds)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {fleet.key}", "Content-Type": "application/json"}
    try:
        line.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = line.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        line.close()
    return answer.status == 200


class Health:
    """What /health says, every half second, with when it was asked."""

    def __init__(self, fleet: Fleet) -> None:
        self.said: list[tuple[float, int]] = []
        self._address = fleet.address(HEAD)
        self._over = threading.Event()

    def __enter__(self) -> Health:
        threading.Thread(target=self._ask_on, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _ask_on(self) -> None:
        while not self._over.wait(0.5):
            line = http.client.HTTPConnection(self._address, 8000, timeout=5)
            when = time.time()
            try:
                line.request("GET", "/health")
                self.said.append((when, line.getresponse().status))
            except (OSError, http.client.HTTPException):
                self.said.append((when, 0))
            finally:
                line.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with standing(
        LAB_ID, {HEAD: "h100x8", WORKER: "h100x8"}, tmp_path_factory.mktemp("pair")
    ) as found:
        yield found


def declare(fleet: Fleet, *, over_nodes: bool, **watchdog: Any) -> None:
    """Write group_vars: one replica with two ranks, on one node or on two."""
    fleet.reset()
    path = fleet.project / "group_vars/lab.yml"
    data = yaml.safe_load(path.read_text())
    del data["dcgm"]  # which other tests deploy
    data["gpus"] = {"reserved": list(range(1 if over_nodes else 2, 8))}
    tiny = data["serving"]["tiny"]
    tiny |= {"replicas": 1, "tensor_parallel": 2, "watchdog": watchdog}
    if over_nodes:
        del tiny["flags"]["enforce-eager"]
        tiny["flags"]["compilation-config"] = COMPILATION
        tiny |= {"span_nodes": True, "distributed_executor_backend": "mp"}
    path.write_text(yaml.safe_dump(data))


@pytest.fixture(params=["one node", "two nodes"])
def replica(pair: Fleet, request: pytest.FixtureRequest) -> Replica:
    declare(
        pair,
        over_nodes=request.param == "two nodes",
        mode="act",
        seconds=SECONDS,
        idle_seconds=IDLE_SECONDS,
    )
    deploy(pair)
    # So many faults within an hour are no crash loop.
    pair.ssh(HEAD, "systemctl stop gpufleet-watchdog && rm -f /var/lib/gpufleet/watchdog/*")
    pair.ssh(HEAD, "systemctl start gpufleet-watchdog")
    found = Replica(pair, "mp")
    if request.param == "two nodes":
        found.unpause()
    else:
        found.nodes = [HEAD]
    wait(lambda: asked(pair), AGAIN, "it serves")
    return found


def said(fleet: Fleet, since: float, words: str) -> float | None:
    """Return when the watchdog first said this, in seconds since 1970."""
    what = "journalctl -q -o json --output-fields=MESSAGE -u gpufleet-watchdog"
    lines = fleet.ssh(HEAD, f"{what} --since=@{since:.6f}")
    for line in map(json.loads, lines.splitlines()):
        if words in str(line.get("MESSAGE")):
            return int(line["__REALTIME_TIMESTAMP"]) / 1e6
    return None


def metric(fleet: Fleet, name: str) -> float:
    text = fleet.ssh(HEAD, "cat /var/lib/gpufleet/textfile/watchdog.prom")
    found = re.search(rf'^gpufleet_watchdog_{name}{{stage="tiny-0"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


@dataclass(frozen=True)
class Seen:
    """Seconds since the freeze."""

    what: str
    bound: int
    found: float
    dumped: float
    killed: float
    again: float


def suffer(replica: Replica, what: str, node: str, process: str, *, bound: int) -> Seen:
    """Freeze a process; assert that it is found, dumped, ended and replaced; return when."""
    fleet = replica.fleet
    old = replica.all_processes()
    restarts = metric(fleet, "restarts_total")
    frozen = replica.below(node, process)
    with Health(fleet) as health:
        begun = time.time()
        os.kill(frozen, signal.SIGSTOP)
        found = wait(lambda: said(fleet, begun, "is stalled since"), bound + 60, f"{what}: found")
    lied = [status for when, status in health.said if begun + 1 < when < found - 1]
    assert set(lied) == {200}, lied
    assert len(lied) > SECONDS / 2
    killed = wait(lambda: said(fleet, begun, "SIGKILL to the whole"), DUMP + 30, f"{what}: killed")
    wait(lambda: not old & replica.all_processes(), 30, f"{what}: every process of it ended")
    wait(lambda: asked(fleet), AGAIN, f"{what}: it serves again")
    again = time.time()
    assert found - begun <= bound, f"{what}: found after {found - begun:.1f} s"
    assert not replica.others()
    wait(lambda: metric(fleet, "restarts_total") == restarts + 1, 30, "it is counted")
    wait(lambda: not metric(fleet, "stalled"), 60, "it is over")
    dumped = said(fleet, begun, "dumped to")
    assert dumped
    look_into(fleet, frozen_here=node == HEAD)
    return Seen(what, bound, found - begun, dumped - begun, killed - begun, again - begun)


def look_into(fleet: Fleet, *, frozen_here: bool) -> None:
    """Assert what the last dump has, and what it has not."""
    newest = fleet.ssh(HEAD, "ls -d /var/lib/gpufleet/dumps/tiny-0/* | tail -1").strip()
    assert fleet.ssh(HEAD, f"stat -c %a {newest} | sort -u") == "700\n"
    files = fleet.ssh(HEAD, f"cd {newest} && find . -type f -printf '%m %p\\n'")
    assert {line.split()[0] for line in files.splitlines()} == {"600"}
    text = fleet.ssh(HEAD, f"cat {newest}/processes/*.txt")
    assert "vllm" in text
    assert "EngineCore" in text
    stacks = fleet.ssh(HEAD, f"cat {newest}/processes/*.python.txt")
    assert stacks.count("Thread ") > 3
    assert "run_engine_core" in stacks
    if frozen_here:
        assert "State:\tT (stopped)" in text
    assert fleet.ssh(HEAD, f"wc -l < {newest}/journal.txt").strip() != "0"
    assert "vllm:num_requests_running" in fleet.ssh(HEAD, f"cat {newest}/metrics.txt")
    fleet.ssh(HEAD, f"! grep -rF '{fleet.key}' {newest}")


def test_a_worker_frozen_under_load_is_found_and_the_replica_serves_again(
    replica: Replica,
) -> None:
    node = replica.nodes[-1]
    where = "its only node" if len(replica.nodes) == 1 else "the node without the server"
    with Load(replica.fleet, clients=4, tokens=400) as load:
        wait(lambda: len(load.answered) > 4, 120, "the load is answered")
        seen = suffer(
            replica,
            f"a GPU process on {where}, under load",
            node,
            "VLLM::Worker",
            bound=SECONDS + IDLE_SECONDS + SLACK,
        )
    write(seen)


def test_a_worker_frozen_while_idle_is_found_and_the_replica_serves_again(
    replica: Replica,
) -> None:
    node = replica.nodes[-1]
    where = "its only node" if len(replica.nodes) == 1 else "the node without the server"
    time.sleep(5)
    seen = suffer(
        replica,
        f"a GPU process on {where}, while idle",
        node,
        "VLLM::Worker",
        bound=SECONDS + 2 * IDLE_SECONDS + SLACK,
    )
    write(seen)


@pytest.mark.parametrize("replica", ["one node"], indirect=True)
def test_a_frozen_engine_is_found_and_the_replica_serves_again(
    replica: Replica,
) -> None:
    with Load(replica.fleet, clients=4, tokens=400) as load:
        wait(lambda: len(load.answered) > 4, 120, "the load is answered")
        seen = suffer(
            replica,
            "the engine, under load",
            HEAD,
            "VLLM::EngineCore",
            bound=SECONDS + IDLE_SECONDS + SLACK,
        )
    write(seen)


@pytest.mark.parametrize("replica", ["one node"], indirect=True)
def test_a_saturated_server_is_left_alone_for_ten_minutes(
    replica: Replica,
) -> None:
    """Twenty times as many clients as it has places, from the first second to the last."""
    fleet = replica.fleet
    before, stalls = fleet.pids(), metric(fleet, "stalls_total")
    queues = []
    with Load(fleet, clients=160, tokens=256) as load:
        wait(lambda: waiting(fleet) > 100, 120, "the queue is long")
        until = time.monotonic() + SATURATED_SECONDS
        while time.monotonic() < until:
            queues.append(waiting(fleet))
            assert fleet.pids() == before
            time.sleep(10)
    assert min(queues) > 50
    assert load.answered
    assert metric(fleet, "stalls_total") == stalls
    told = f"left alone for {SATURATED_SECONDS // 60} minutes, {min(queues)} or more waiting"
    note(PAGE, "a server with 160 clients and 8 places", told, "-", "-", "-")


def waiting(fleet: Fleet) -> int:
    text = fleet.ssh(HEAD, "curl -sS http://127.0.0.1:8000/metrics", seconds=90)
    found = re.search(r"^vllm:num_requests_waiting\{[^}]*\} (\S+)$", text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def test_mode_warn_says_and_touches_nothing(pair: Fleet) -> None:
    declare(pair, over_nodes=False, mode="warn", seconds=SECONDS, idle_seconds=IDLE_SECONDS)
    deploy(pair)
    replica = Replica(pair, "mp")
    replica.nodes = [HEAD]
    wait(lambda: asked(pair), AGAIN, "it serves")
    old = replica.all_processes()
    frozen = replica.below(HEAD, "VLLM::Worker")
    dumps = pair.ssh(HEAD, "ls /var/lib/gpufleet/dumps/tiny-0 2>/dev/null || :")
    begun = time.time()
    os.kill(frozen, signal.SIGSTOP)
    try:
        bound = SECONDS + 2 * IDLE_SECONDS + SLACK
        wait(lambda: said(pair, begun, "is stalled since"), bound, "it is found")
        time.sleep(40)
        assert metric(pair, "stalled") == 1
        assert old <= replica.all_processes()
        assert pair.ssh(HEAD, "ls /var/lib/gpufleet/dumps/tiny-0 2>/dev/null || :") == dumps
    finally:
        os.kill(frozen, signal.SIGCONT)
    wait(lambda: said(pair, begun, "it moves again"), 60, "it is over")
    assert asked(pair)
    assert old <= replica.all_processes()


def test_another_setting_restarts_the_watchdog_alone_and_without_stages_there_is_none(
    pair: Fleet,
) -> None:
    declare(pair, over_nodes=False, mode="warn", seconds=SECONDS, idle_seconds=IDLE_SECONDS)
    deploy(pair)
    before, watchdog = pair.pids(), pid(pair)
    again = pair.pyinfra("-y", "--json")
    assert again.changed == {}
    assert (pair.pids(), pid(pair)) == (before, watchdog)

    declare(pair, over_nodes=False, mode="act", seconds=60, idle_seconds=0)
    run = pair.pyinfra("-y", "--json")
    assert all("watchdog" in name for name in run.changed), run.changed
    assert pair.pids() == before
    assert pid(pair) != watchdog
    pair.ssh(WORKER, "! systemctl cat gpufleet-watchdog")  # it has no stage

    declare(pair, over_nodes=False, mode="off")
    deploy(pair)
    assert pair.pids() == before
    gone = "! systemctl cat gpufleet-watchdog && ! ls /var/lib/gpufleet/textfile/watchdog.prom"
    pair.ssh(HEAD, gone)


def pid(fleet: Fleet) -> str:
    return fleet.ssh(HEAD, "systemctl show -P MainPID gpufleet-watchdog").strip()


# The table


def write(seen: Seen) -> None:
    """Write a row of docs/monitor/watchdog.md."""
    note(
        PAGE,
        seen.what,
        f"{seen.found:.0f} s ({seen.bound} s)",
        f"{seen.dumped:.0f} s",
        f"{seen.killed:.0f} s",
        f"{seen.again:.0f} s",
    )
