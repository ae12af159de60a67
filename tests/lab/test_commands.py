"""What an operator types at a fleet that serves: each command once, on the lab of the walk.

The walk has left one replica over two nodes; alone, these tests run the deploys first, and each
node has its own replica.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.remote.session import LOADER
from tests.lab.gateway_pair import until
from tests.lab.upgrade_fleet import GATEWAY
from tests.lab.walk import DRIVER, NODES, TlsFleet
from tests.support.checkout import ROOT

CHANGE = "/var/lib/gpufleet/change"


@pytest.fixture(scope="module")
def fleet(walk: TlsFleet) -> TlsFleet:
    walk.finish()
    return walk


def answer(fleet: TlsFleet, *words: str) -> Any:
    """Return what a command prints with --json; it has to end with 0."""
    run = fleet.gpufleet(*words, "--json")
    assert run.status == 0, run.output
    return json.loads(run.stdout)


def test_probe_says_what_the_nodes_are(fleet: TlsFleet) -> None:
    found = answer(fleet, "probe", fleet.inventory, "--limit", "gpu")

    assert found.keys() == {*NODES}
    for node, document in found.items():
        machine = fleet.ssh(node, "cat /etc/machine-id").strip()
        assert (document["hostname"], document["machine_id"]) == (node, machine)


def test_topology_says_how_the_gpus_are_joined(fleet: TlsFleet) -> None:
    run = fleet.gpufleet("topology", fleet.inventory, NODES[0])

    assert run.status == 0, run.output
    assert "NVLink island 0-1: 2 GPUs" in run.stdout


def test_inventory_says_which_file_set_a_value(fleet: TlsFleet) -> None:
    found = answer(fleet, "inventory", fleet.inventory, NODES[0])

    driver = found["nodes"][NODES[0]]["values"]["gpu_lock.driver"]
    assert driver["value"] == DRIVER
    assert driver["set_in"].startswith("group_vars/up.yml:")


def test_plan_is_what_runs(fleet: TlsFleet) -> None:
    found = answer(fleet, "plan", fleet.inventory)

    planned = {f"{stage['node']} {stage['unit']}" for stage in found["stages"]}
    assert planned == set(fleet.pids())


def test_status_asks_every_replica_for_a_token(fleet: TlsFleet) -> None:
    found = answer(fleet, "status", fleet.inventory, "--completion")

    assert found["serves"]
    ranks = [rank["node"] for replica in found["replicas"] for rank in replica["ranks"]]
    assert sorted(ranks) == sorted(name.split()[0] for name in fleet.pids())


def test_logs_are_those_of_the_replicas_nodes_without_its_key(fleet: TlsFleet) -> None:
    run = fleet.gpufleet("logs", fleet.inventory, "tiny-0", "--json")

    assert run.status == 0, run.output
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    serving = {name.split()[0] for name in fleet.pids() if "vllm-tiny-0." in name}
    assert {line["node"] for line in lines} == serving
    assert fleet.key not in run.output


def test_a_lock_is_what_the_nodes_run(fleet: TlsFleet) -> None:
    """They were made by one: without it, the command writes it again."""
    declared = fleet.wanted.pop("gpu_lock")
    fleet.declare()
    written = fleet.project / "group_vars/gpu.lock.yml"
    try:
        run = fleet.gpufleet("lock", fleet.inventory, "--group", "gpu")
        assert run.status == 0, run.output
        lock = yaml.safe_load(written.read_text())["gpu_lock"]
    finally:
        written.unlink(missing_ok=True)
        fleet.declare(gpu_lock=declared)
    assert lock["driver"] == DRIVER
    assert lock["dcgm"]["version"] == declared["dcgm"]["version"]


def test_a_cordon_is_on_the_node_until_it_is_lifted(fleet: TlsFleet) -> None:
    before = fleet.pids()
    run = fleet.gpufleet("cordon", fleet.inventory, NODES[1], "--why", "disk makes noises")
    assert run.status == 0, run.output
    mark = json.loads(fleet.ssh(NODES[1], f"cat {CHANGE}/cordon.json"))
    assert "disk makes noises" in str(mark)
    assert answer(fleet, "status", fleet.inventory)["cordoned"], "status shows it"

    run = fleet.gpufleet("uncordon", fleet.inventory, NODES[1])
    assert run.status == 0, run.output
    fleet.ssh(NODES[1], f"! test -e {CHANGE}/cordon.json")
    assert fleet.pids() == before, "what runs there stays"


def test_monitoring_is_rendered_for_servers_of_others(fleet: TlsFleet) -> None:
    out = fleet.project / "rendered"
    run = fleet.gpufleet("monitoring", "render", str(out), fleet.inventory)

    assert run.status == 0, run.output
    targets = "".join(file.read_text() for file in out.rglob("*.json"))
    for node in (*NODES, GATEWAY):
        assert fleet.address(node) in targets, "nodes were asked what runs there"


@pytest.fixture
def bench(fleet: TlsFleet) -> Iterator[tuple[str, ...]]:
    """The command that measures the model at four requests a second; its objectives are for it."""
    key = fleet.project / "bench-key"
    key.write_text(fleet.key_of_clients)
    model = fleet.wanted["serving"]["tiny"]
    fleet.declare_model(objectives={"ttft_p99_seconds": 20, "e2e_p99_seconds": 40})
    yield (
        "measure", fleet.inventory, "tiny", "--key-file", str(key), "--rate", "4",
        "--lengths", "64,8", "--share", "0.5", "--seconds", "10", "--json",
    )  # fmt: skip
    fleet.declare(serving={"tiny": model})
    shutil.rmtree(fleet.project / "measurements", ignore_errors=True)


def test_measure_asks_through_the_gateway_and_leaves_nothing_but_its_files(
    fleet: TlsFleet, bench: tuple[str, ...]
) -> None:
    """What the servers counted is the other route; whether 10 s are enough, the data says."""
    before, answered = fleet.pids(), finished(fleet)
    run = fleet.gpufleet(*bench, seconds=300)

    assert run.status in (0, 1), run.output
    found = json.loads(run.stdout)
    (level,) = found["levels"]
    assert found["target"] == f"gateway {GATEWAY}"
    assert found["replicas"] == found["replicas_of"] == len(replicas(fleet))
    assert (found["found"]["kept"] == 4.0) == (level["verdict"] == "kept") == (run.status == 0)
    assert level["errors"] == {}
    assert finished(fleet) - answered >= level["requests"] == level["kept"] >= 20
    assert fleet.pids() == before
    # The servers were looked at meanwhile, and every request stands in the run's time.
    series = found["series"]
    assert [each for each in series["running"] if each is not None]
    assert sum(series["rate"]) * series["step_seconds"] >= level["requests"]
    files = sorted((fleet.project / "measurements").iterdir())
    assert len(files) == 3
    assert not [each for each in files if fleet.key_of_clients in each.read_text()]


@pytest.mark.long
def test_measure_from_a_node_leaves_nothing_there(fleet: TlsFleet, bench: tuple[str, ...]) -> None:
    """The node is asked by ps and find."""
    mark = new_files_from_now(fleet)
    answered = finished(fleet)
    run = fleet.gpufleet(*bench, "--from", NODES[0], seconds=300)

    assert run.status in (0, 1), run.output
    found = json.loads(run.stdout)
    (level,) = found["levels"]
    assert found["client"]["place"] == NODES[0]
    assert found["client"]["ceiling"] > 1
    assert any("the load clients use processor time" in each for each in found["notes"])
    assert level["errors"] == {}
    assert finished(fleet) - answered >= level["requests"] == level["kept"] >= 20
    assert load_clients(fleet) == []
    assert new_files(fleet, mark, fleet.key_of_clients) == []
    kept = "/var/cache/gpufleet/code/"
    assert not [e for e in new_files(fleet, mark, "client_group") if not e.startswith(kept)]


def test_measure_that_is_killed_leaves_nothing_on_the_node_of_its_clients(
    fleet: TlsFleet, bench: tuple[str, ...]
) -> None:
    """With SIGKILL, while its clients have requests under way."""
    mark, answered = new_files_from_now(fleet), finished(fleet)
    command = Path(sys.executable).with_name("gpufleet")
    process = subprocess.Popen(
        [command, *bench, "--from", NODES[0], "--processes", "2"],
        cwd=ROOT, env=fleet.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        # The first request has been answered: what runs now has the key.
        until(
            lambda: finished(fleet) > answered and len(load_clients(fleet)) >= 3,
            "two load clients on the node, and what started them",
            150,
        )
        # A program's text has the key, packed: what a client was started with is its loader alone.
        here = load_clients(fleet)
        assert all(each.endswith(LOADER) for each in here)
        pids = ",".join(each.split()[0] for each in here)
        sizes = fleet.ssh(NODES[0], f"cat /proc/{{{pids},self}}/environ 2>/dev/null | wc -c || :")
        assert int(sizes) < 4096 * (len(here) + 1)
    finally:
        process.kill()
        said, _ = process.communicate()
    until(lambda: load_clients(fleet) == [], "their end", 20)
    assert new_files(fleet, mark, fleet.key_of_clients) == [], said


@pytest.mark.long
def test_what_is_left_in_a_wave_is_measured_with_a_node_drained(
    fleet: TlsFleet, bench: tuple[str, ...]
) -> None:
    """Alone: the walk leaves one replica over both nodes."""
    assert len(replicas(fleet)) == 2
    run = fleet.gpufleet("drain", fleet.inventory, NODES[1], "--why", "what is left in a wave")
    assert run.status == 0, run.output
    answered = finished(fleet)
    try:
        run = fleet.gpufleet(*bench, seconds=300)
    finally:
        undrained = fleet.gpufleet("undrain", fleet.inventory, NODES[1])
    assert undrained.status == 0, undrained.output

    assert run.status in (0, 1), run.output
    found = json.loads(run.stdout)
    assert (found["replicas"], found["replicas_of"]) == (1, 2)
    assert found["subject"]["nodes"] == [NODES[0]]
    assert any("got no requests: drained by" in each for each in found["notes"])
    assert finished(fleet) - answered >= found["levels"][0]["requests"] >= 20


def replicas(fleet: TlsFleet) -> set[str]:
    """Return the units of all replicas; those of a replica's nodes have one name."""
    return {name.split()[1] for name in fleet.pids()}


def load_clients(fleet: TlsFleet) -> list[str]:
    """Return the processes on the first node that run a program of gpufleet."""
    # A pattern that does not match itself.
    found = fleet.ssh(NODES[0], "ps -eo pid,args | grep '[i]nt(b.readline' || :")
    return found.splitlines()


def new_files_from_now(fleet: TlsFleet) -> str:
    """Make a file on the first node that all later ones are newer than."""
    return fleet.ssh(NODES[0], "mktemp -p /run").strip()


def new_files(fleet: TlsFleet, mark: str, words: str) -> list[str]:
    """Return the files on the first node that are newer than a mark and have these words."""
    found = fleet.ssh(
        NODES[0],
        f"find / -path /proc -prune -o -path /sys -prune -o -type f -newer {mark} "
        f"-exec grep -lsF -e '{words}' {{}} + || :",
    )
    return found.splitlines()


def preflight(fleet: TlsFleet, *words: str) -> list[dict[str, str]]:
    """Return the lines of a preflight, which has to take less than a minute."""
    began = time.monotonic()
    run = fleet.gpufleet("preflight", fleet.inventory, *words, "--json")
    assert time.monotonic() - began < 60
    assert run.status in (0, 1, 2), run.output
    lines: list[dict[str, str]] = json.loads(run.stdout)["lines"]
    print(f"{time.monotonic() - began:.1f} s", *lines, sep="\n")
    failed = [line for line in lines if line["status"] == "FAIL"]
    unknown = [line for line in lines if line["status"] == "UNKNOWN"]
    assert run.status == (1 if failed else 2 if unknown else 0), lines
    return lines


def worst(lines: list[dict[str, str]]) -> dict[str, str]:
    """Return the worst status of each check."""
    order = ("OK", "WARN", "UNKNOWN", "FAIL")
    found: dict[str, str] = {}
    for line in lines:
        before = found.get(line["check"], "OK")
        found[line["check"]] = max(before, line["status"], key=order.index)
    return found


def test_preflight_says_what_is_ready_and_finds_what_is_broken(fleet: TlsFleet) -> None:
    """Alertmanager stopped, a model's file gone, a name that leads to another machine."""
    key = fleet.project / "preflight-key"
    key.write_text(fleet.key_of_clients)
    page = fleet.project / "preflight.html"
    pids = fleet.pids()
    unit = "prometheus-alertmanager.service"
    model = fleet.ssh(NODES[0], "ls -d /var/lib/vllm/models/*/*").split()[0]
    lines = preflight(fleet, "--key-file", str(key), "-o", str(page))
    fleet.ssh(GATEWAY, f"systemctl stop {unit}")
    fleet.ssh(NODES[0], f"mv {model}/config.json /root/config.json")
    # The first entry of a name counts, or all of them: nsswitch.conf's and the C library's choice.
    first = f"echo 203.0.113.9 {NODES[0]}; cat /root/hosts"
    fleet.ssh(NODES[1], f"cp /etc/hosts /root/hosts; {{ {first}; }} >/etc/hosts")
    try:
        broken = preflight(fleet, "--key-file", str(key))
    finally:
        fleet.ssh(GATEWAY, f"systemctl start {unit}")
        fleet.ssh(NODES[0], f"mv /root/config.json {model}/config.json")
        fleet.ssh(NODES[1], "cat /root/hosts >/etc/hosts")

    sound = worst(lines)
    good = ("plan", "driver", "release", "sources", "disk", "names", "clocks", "refusal", "key")
    assert {check: sound[check] for check in good} == dict.fromkeys(good, "OK")
    # No lock of models, a certificate that lasts two days, no receiver for pages.
    assert [sound[check] for check in ("model-files", "tls", "alerts")] == ["WARN", "WARN", "FAIL"]
    assert sound["services"] != "FAIL"
    text = page.read_text()
    assert fleet.key_of_clients not in text + json.dumps([*lines, *broken])

    amiss = [(e["check"], e["status"], e["subject"], e["proof"]) for e in broken]

    def is_found(check: str, status: str, subject: str, proof: str) -> bool:
        return any(
            (one, two) == (check, status) and subject in where and proof in said
            for one, two, where, said in amiss
        )

    assert is_found("alerts", "FAIL", GATEWAY, "refused"), amiss
    assert is_found("services", "FAIL", GATEWAY, "monitoring.alertmanager.port"), amiss
    assert is_found("model-files", "FAIL", NODES[0], "config.json"), amiss
    assert is_found("names", "WARN", NODES[1], "203.0.113.9"), amiss
    assert fleet.pids() == pids, "it only reads"


def finished(fleet: TlsFleet) -> float:
    """Return the requests that all servers have finished; a replica's second node has none."""
    pages = [
        fleet.ssh(node, f"curl -s http://{fleet.address(node)}:8000/metrics || :") for node in NODES
    ]
    lines = [line for page in pages for line in page.splitlines()]
    counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
    assert counts
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_doctor_names_the_gateway_that_stopped_and_nothing_else(fleet: TlsFleet) -> None:
    def hurts() -> list[tuple[str, str]]:
        run = fleet.gpufleet("doctor", fleet.inventory, "--json")
        assert run.status in (0, 1, 2), run.output
        found = json.loads(run.stdout)["problems"]
        return [
            (each["subject"], each["impact"])
            for each in found
            if each["impact"] in ("outage", "degraded")
        ]

    assert hurts() == []
    fleet.ssh(GATEWAY, "systemctl stop gpufleet-gateway")
    try:
        assert hurts() == [(f"gateway {GATEWAY}", "outage")]
    finally:
        fleet.ssh(GATEWAY, "systemctl start gpufleet-gateway")


def test_report_shows_the_fleet_as_it_is_and_no_secret(fleet: TlsFleet) -> None:
    page, manifest = fleet.project / "report.html", fleet.project / "fleet.json"
    run = fleet.gpufleet(
        "report", fleet.inventory, "--json", "-o", str(page), "--manifest", str(manifest)
    )

    assert run.status in (0, 1), run.output
    found = json.loads(run.stdout)
    assert (run.status == 1) == bool(found["unknown"])
    nodes = {each["name"]: each for each in found["nodes"]}
    assert nodes.keys() == {*NODES, GATEWAY}
    assert [each["silent"] for each in nodes.values()] == ["", "", ""]
    told = json.loads(manifest.read_text())["nodes"]
    for name in NODES:
        loaded = fleet.ssh(name, "cat /sys/module/nvidia/version").strip()
        assert told[name]["versions"]["driver"] == loaded
        units = fleet.ssh(name, "systemctl list-units --no-legend --plain 'vllm-*-[0-9]*.service'")
        running = {f"vllm-{e}.service" for g in nodes[name]["gpus"] for e in g["replicas"]}
        assert running == {line.split()[0] for line in units.splitlines()}
    (front,) = [e for e in found["certificates"] if e["server"] == f"{GATEWAY} gateway.port"]
    assert front["status"] == "WARN", "it lasts two days"
    assert front["ends"]
    assert fleet.key_of_clients not in run.stdout + page.read_text() + manifest.read_text()


def test_prepare_brings_what_a_change_needs_and_touches_nothing_that_runs(fleet: TlsFleet) -> None:
    """The unit lies beside the one that runs; with the old declaration it is gone again."""
    before = fleet.pids()
    unit = next(name.split()[1] for name in before if name.startswith(NODES[0]))
    model = fleet.wanted["serving"]["tiny"]
    fleet.declare_model(environment={**model.get("environment", {}), "VLLM_LOGGING_PREFIX": "new "})
    try:
        run = fleet.pyinfra("-y", deploy="deploys/prepare.py")
        assert run.status == 0, run.output
    finally:
        fleet.declare(serving={"tiny": model})

    there = f"{CHANGE}/next"
    assert "VLLM_LOGGING_PREFIX" in fleet.ssh(NODES[0], f"cat $(find {there} -name {unit})")
    assert "VLLM_LOGGING_PREFIX" not in fleet.ssh(NODES[0], f"cat /etc/systemd/system/{unit}")
    assert fleet.pids() == before
