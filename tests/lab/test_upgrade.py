"""A fleet is changed while clients ask it: real servers, two real releases, and no request lost.

Four nodes behind our gateway; clients that are not ours (`tests/lab/upgrade_load.py`, and `vllm
bench serve` out of the release on a node) from before each change until after it. Long. With
`make test-long` writes docs/measured/upgrade-under-load.md.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest

from gpufleet.monitoring.metrics import gateway_metrics
from gpufleet.monitoring.rules import gateway_rules
from lab.node_init import MACHINE
from tests.lab.bare_node import DCGM
from tests.lab.upgrade_fleet import (
    GATES,
    GATEWAY,
    NEW,
    OLD,
    PORT,
    RATE,
    SCRAPE_SECONDS,
    UpgradeFleet,
    upgrade_fleet,
)
from tests.lab.upgrade_load import Summary, bench_failures, clients, summary
from tests.support.checkout import own_lab
from tests.support.measured import note
from tests.unit.monitoring import offline

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

LAB_ID, DRIVER_LAB_ID = own_lab("gfup"), own_lab("gfud")
UPGRADES = 5
LEAST_REQUESTS = 5000
# Of the upgrades after the first: the canary, then all that are left. Three of four replicas are
# out at once, which one carries (measured), and it takes half the time.
TOGETHER = {"canary": 1, "waves": [3]}
ONE_BY_ONE = {"canary": 1, "waves": [1]}
BENCH_RATE = 1.0
DRIVERS = ("580.95.05", "580.178.04")


@dataclass(frozen=True)
class Row:
    """One change under load, and what clients saw of it."""

    change: str
    seconds: float
    seen: Summary
    bench: tuple[int, int] | None = None
    """Requests of `vllm bench serve`: how many it made, and how many of them failed."""


ROWS: list[Row] = []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    with upgrade_fleet(LAB_ID, tmp_path_factory.mktemp("up")) as found:
        # Some of this lab's alerts begin to fire in the middle of an upgrade, for reasons that are
        # as old as the lab: they may not be held against it.
        found.declare(upgrade={"gates": {**GATES, "alerts": True}})
        found.deploy()
        yield found


@dataclass
class Bench:
    """`vllm bench serve` on a node, out of the release that was there when it began."""

    fleet: UpgradeFleet
    prompts: int
    out: str = "/root/bench.json"
    _said: list[str] = field(default_factory=list)

    def start(self) -> None:
        """
        Begin; it asks in its own rhythm until it has asked for all of its prompts.

        Greedily: of the first random draw after each start a server on CPUs compiles its sampler,
        and answers nobody meanwhile: half a minute on two busy cores (measured).
        """
        node = self.fleet.gpu_nodes[0]
        argv = self.fleet.ssh(
            node, "tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID vllm-tiny-*)/cmdline"
        ).split("\n")
        vllm = next(word for word in argv if word.endswith("/bin/vllm"))
        model = next(word for word in argv if word.startswith("/var/lib/vllm/models/"))
        url = f"http://{self.fleet.address(GATEWAY)}:{PORT}"
        self.fleet.ssh(node, "cat > /root/bench.key && chmod 600 /root/bench.key", stdin=self.key)
        command = (
            f"rm -f {self.out}; export OPENAI_API_KEY=$(cat /root/bench.key) HF_HUB_OFFLINE=1; "
            f"exec nice -n 5 {vllm} bench serve --backend openai --base-url {url} "
            f"--endpoint /v1/completions --model tiny --tokenizer {model} --dataset-name random "
            f"--random-input-len 32 --random-output-len 16 --num-prompts {self.prompts} "
            f"--request-rate {BENCH_RATE} --temperature 0 --ignore-eos --save-result "
            f"--result-dir /root --result-filename {Path(self.out).name}"
        )
        config = str(self.fleet.state.ssh_config)
        self._process = subprocess.Popen(
            ["ssh", "-F", config, node, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def key(self) -> str:
        return self.fleet.key_of_clients

    def finish(self) -> tuple[int, int]:
        """Wait for its end; return how many requests it made and how many of them failed."""
        said, _ = self._process.communicate(timeout=1200)
        node = self.fleet.gpu_nodes[0]
        text = self.fleet.ssh(node, f"cat {self.out} 2>/dev/null; :")
        assert text, f"it wrote no result: {said[-2000:]}"
        return self.prompts, bench_failures(json.loads(text), self.prompts)


@contextmanager
def changing(
    fleet: UpgradeFleet, change: str, *, bench: int = 0, rate: float = RATE
) -> Iterator[None]:
    """Have clients ask from before a change until after it; none may fail; note the row."""
    name = re.sub(r"\W+", "-", change)
    other = Bench(fleet, bench) if bench else None
    with fleet.load(name, rate) as load:
        if other:
            other.start()
        while len(load.requests()) < 3 * rate:  # before anything is touched
            time.sleep(0.5)
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        time.sleep(5)
        benched = other.finish() if other else None
        load.stop()
        seen = summary(load.requests())
    assert seen.failed == 0, seen.failures
    assert not benched or benched[1] == 0, benched
    row = Row(change, seconds, seen, benched)
    ROWS.append(row)
    write(row)


def test_the_gateway_serves_every_series_that_its_rules_and_panels_ask_for(
    fleet: UpgradeFleet,
) -> None:
    """Real Prometheus scrapes real HAProxy; an expression that errs is found, too."""
    deadline = time.monotonic() + 120
    wanted = {metric.name for metric in gateway_metrics.METRICS}
    assert wanted
    while lacking := {name for name in wanted if not answer(fleet, name)}:
        assert time.monotonic() < deadline, lacking
        time.sleep(SCRAPE_SECONDS)
    for alert in gateway_rules.ALERTS:
        assert answer(fleet, alert.expr) == [], alert.name
        assert offline.names(alert.expr) <= wanted | {"up"}
    assert answer(fleet, 'up{job="gateway"} == 1')


def answer(fleet: UpgradeFleet, expression: str) -> list[object]:
    """Return what Prometheus finds now; raises AssertionError where it calls it a mistake."""
    url = f"http://127.0.0.1:9090/api/v1/query?{urlencode({'query': expression})}"
    found = json.loads(fleet.ssh(GATEWAY, f"curl -sS --max-time 20 {shlex.quote(url)}"))
    assert found["status"] == "success", found
    result: list[object] = found["data"]["result"]
    return result


def test_five_upgrades_between_two_releases_lose_no_request(fleet: UpgradeFleet) -> None:
    """
    To the newer release and back, and again: each with all of its proof and gates.

    The first one by one, the others with the canary alone and then all the rest.
    """
    made = 0
    for number in range(1, UPGRADES + 1):
        before, after = (OLD, NEW) if number % 2 else (NEW, OLD)
        one_by_one = number == 1
        fleet.declare(upgrade=ONE_BY_ONE if one_by_one else TOGETHER)
        how = "one by one" if one_by_one else "the canary, then three"
        with changing(fleet, f"{number}: vLLM {before} to {after}, {how}", bench=200):
            done = fleet.upgrade("--vllm", after)
            assert done.returncode == 0, done.stdout
        assert fleet.declared()["vllm"]["version"] == after
        fleet.wanted["vllm"] |= {"version": after, "lock": fleet.declared()["vllm"]["lock"]}
        fleet.serves(after)
        if number in {1, UPGRADES}:
            fleet.changes_nothing()
        most_at_once(fleet, 1 if one_by_one else 3)
        row = ROWS[-1]
        made += row.seen.requests + (row.bench[0] if row.bench else 0)
    assert made >= LEAST_REQUESTS, made


def most_at_once(fleet: UpgradeFleet, most: int) -> None:
    """Hold that no more groups than that were out at once, as the journal has it."""
    out: set[str] = set()
    for entry in fleet.journal():
        if entry["what"] == "draining":
            out.add(entry["group"])
        elif entry["what"] == "undrained":
            out.discard(entry["group"])
        assert len(out) <= most, out


def test_a_changed_setting_reaches_every_server_and_no_request_is_lost(
    fleet: UpgradeFleet,
) -> None:
    fleet.declare(upgrade=TOGETHER)
    fleet.declare_model(flags={**fleet.wanted["serving"]["tiny"]["flags"], "max-num-seqs": 7})
    with changing(fleet, "a setting (max-num-seqs)"):
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
    for node in fleet.gpu_nodes:
        argv = fleet.ssh(
            node, "tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID vllm-tiny-*)/cmdline"
        ).split("\n")
        assert argv[argv.index("--max-num-seqs") + 1] == "7"


def test_another_revision_of_the_model_is_served_and_no_request_is_lost(
    fleet: UpgradeFleet,
) -> None:
    fleet.declare(upgrade=TOGETHER)
    before = fleet.revision()
    revision = fleet.change_model(f"The same weights, described anew at {time.time():.0f}.\n")
    assert revision != before
    fleet.declare_model(revision=revision)
    with changing(fleet, "the model's revision"):
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
    for node in fleet.gpu_nodes:
        cmdline = "/proc/$(systemctl show -P MainPID vllm-tiny-*)/cmdline"
        assert revision in fleet.ssh(node, f"tr '\\0' ' ' < {cmdline}")


def test_a_load_that_three_replicas_need_is_upgraded_around_one_by_one(
    fleet: UpgradeFleet,
) -> None:
    """Two at once are refused with the numbers, before anything is touched."""
    flags = {**fleet.wanted["serving"]["tiny"]["flags"], "max-num-seqs": 2}
    fleet.declare_model(flags=flags)
    # Nobody asks: it may be down at once.
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output

    out = fleet.project / "together.jsonl"
    fleet.declare_model(flags={**flags, "max-num-batched-tokens": 513})
    fleet.declare(upgrade={"waves": [2], "canary": 0})
    with clients(fleet.url, fleet.key_of_clients, out, together=5) as load:
        while len(load.requests()) < 10:
            time.sleep(0.5)
        refused = fleet.upgrade()
        assert refused.returncode != 0, refused.stdout
        assert "Traceback" not in refused.stdout
        assert re.search(r"\b3\b", refused.stdout), refused.stdout
        assert not fleet.noted("draining")
        fleet.declare(upgrade=ONE_BY_ONE)
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
        load.stop()
    assert summary(load.requests()).failed == 0
    most_at_once(fleet, 1)


_STATISTICS = """\
import socket
there = socket.socket(socket.AF_UNIX)
there.connect("/run/gpufleet-gateway/admin.sock")
there.sendall(b"show stat\\n")
while said := there.recv(65536):
    print(said.decode(), end="")
"""


def behind_the_gateway(fleet: UpgradeFleet) -> dict[str, tuple[str, int]]:
    """Return {server: its state, how many requests it was sent}, as HAProxy says."""
    said = fleet.ssh(GATEWAY, "python3 -", stdin=_STATISTICS).removeprefix("# ")
    return {
        row["svname"]: (row["status"], int(row["stot"]))
        for row in csv.DictReader(said.splitlines())
        if row["svname"].startswith("gpu-")
    }


def test_replicas_that_an_upgrade_takes_and_brings_are_known_to_the_gateway_within_the_wave(
    fleet: UpgradeFleet,
) -> None:
    """Two leave, and two come, each time at once: clients see nothing of it."""
    fleet.declare(upgrade={"canary": 0, "waves": [2]})
    every = len(fleet.gpu_nodes)
    fleet.declare_model(replicas=every - 2)
    with changing(fleet, "two replicas fewer, both at once"):
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
    stayed = behind_the_gateway(fleet)
    assert len(stayed) == every - 2
    assert sum(name != "" for name in fleet.releases().values()) == every - 2

    fleet.declare_model(replicas=every)
    with changing(fleet, "two replicas more, both at once"):
        run = fleet.begin("upgrade")
        fleet.await_entry(run, "undrained", count=2)
        # Before the end, when all of the fleet is deployed in any case.
        new = set(behind_the_gateway(fleet)) - set(stayed)
        assert not fleet.noted("finishing")
        assert len(new) == 2, new
        deadline = time.monotonic() + 30
        while not all(behind_the_gateway(fleet)[name][1] for name in new):
            assert time.monotonic() < deadline, behind_the_gateway(fleet)
            time.sleep(1)
        assert run.wait(timeout=1200) == 0, fleet.said()
    assert {state for state, _ in behind_the_gateway(fleet).values()} == {"UP"}


def test_a_model_with_one_replica_is_changed_without_an_outage_where_there_is_room_for_two(
    fleet: UpgradeFleet,
) -> None:
    """As docs/upgrade/upgrades.md has it: another one comes, both are changed, and one goes."""
    before = fleet.wanted["vllm"]["version"]
    after = OLD if before == NEW else NEW
    fleet.declare(upgrade=TOGETHER)
    fleet.declare_model(replicas=1)
    done = fleet.upgrade()
    assert done.returncode == 0, done.stdout

    refused = fleet.upgrade("--vllm", after)
    assert refused.returncode != 0, refused.stdout
    assert "has room for one more" in refused.stdout, refused.stdout
    assert not fleet.noted("draining")

    with changing(
        fleet,
        f"vLLM {before} to {after}, a model with one replica (asked 2 times a second)",
        rate=2.0,
    ):
        fleet.declare_model(replicas=2)
        run = fleet.pyinfra("-y", seconds=1200)
        assert run.status == 0, run.output
        done = fleet.upgrade("--vllm", after)
        assert done.returncode == 0, done.stdout
        fleet.wanted["vllm"] |= {"version": after, "lock": fleet.declared()["vllm"]["lock"]}
        fleet.declare_model(replicas=1)
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
    assert [name for name in fleet.releases().values() if name] == [after]
    assert len(behind_the_gateway(fleet)) == 1
    fleet.declare_model(replicas=len(fleet.gpu_nodes))
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    """Two nodes that were handed over without a driver, and serve with the first one."""
    nodes = ("gpu-01", "gpu-02")
    with upgrade_fleet(DRIVER_LAB_ID, tmp_path_factory.mktemp("up"), nodes, bare=True) as found:
        found.declare_driver(DRIVERS[0], DCGM)
        run = found.pyinfra("-y", "--limit", "gpu", deploy="deploys/node.py", seconds=1200)
        assert run.status == 0, run.output
        found.deploy()
        yield found


def test_a_driver_is_upgraded_with_reboots_and_no_request_is_lost(bare: UpgradeFleet) -> None:
    """The kernel itself uses a module, as for a console's picture: that takes a reboot."""
    boots = {}
    for node in bare.gpu_nodes:
        boots[node] = bare.ssh(node, "cat /proc/sys/kernel/random/boot_id")
        bare.ssh(node, f"echo 1 > {MACHINE}/sys/module/nvidia/refcnt")
        assert bare.ssh(node, "cat /sys/module/nvidia/refcnt").strip() == "1"
    bare.declare_driver(DRIVERS[1], DCGM)
    with changing(bare, f"the driver's stand-in, {DRIVERS[0]} to {DRIVERS[1]}, with reboots"):
        done = bare.upgrade()
        assert done.returncode == 0, done.stdout
    for node in bare.gpu_nodes:
        assert bare.ssh(node, "cat /proc/sys/kernel/random/boot_id") != boots[node]
        assert bare.ssh(node, "cat /sys/module/nvidia/version").strip() == DRIVERS[1]
    most_at_once(bare, 1)


# The table


def write(row: Row) -> None:
    """Write a row of docs/measured/upgrade-under-load.md."""
    seen = row.seen
    note(
        "measured/upgrade-under-load.md",
        row.change,
        f"{row.seconds:.0f} s",
        str(seen.requests),
        str(seen.failed),
        f"{row.bench[0]}, {row.bench[1]}" if row.bench else "-",
        f"{spoken(seen.ttft_p50)}, {spoken(seen.ttft_p99)}",
        spoken(seen.itl_p99),
        spoken(seen.longest),
        spoken(seen.pause),
    )


def spoken(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
