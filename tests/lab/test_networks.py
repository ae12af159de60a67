"""
Ranks on nodes with several networks, real but for vLLM: units, their program, status and logs.

Each node has eth0, by which this machine reaches it, and two further interfaces. One of those
reaches the other node; it has another name on each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from gpufleet.artifacts.release import release
from gpufleet.settings.serving_settings import Vllm
from lab import provisioning_sources
from lab.nodes import Lab
from lab.state import LabState
from tests.lab.conftest import ROOT, Fleet, Run
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfl")
NODES = {"gpu-01": "t4x1", "gpu-02": "t4x1"}
CABLES = {
    "gpu-01": {"eth1": "10.60.1.11/24", "eth2": "10.60.9.11/24"},
    "gpu-02": {"eth1": "10.60.9.12/24", "eth2": "10.60.2.12/24"},
}
REACHES = {"gpu-01": ("eth2", "10.60.9.11"), "gpu-02": ("eth1", "10.60.9.12")}
NOWHERE = {"gpu-01": {"eth1": "10.60.1.11/24"}, "gpu-02": {"eth1": "10.60.2.12/24"}}
DEPLOY = str(Path(__file__).with_name("ranks_alone.py"))
UNIT = "vllm-tiny-0.service"
# CPU's eager mode skips the warm-up that a pipeline needs (measured with 0.32.0).
COMPILATION = {"mode": 2, "backend": "eager"}

# Takes its time before one of its verbs, as a node does that is loaded.
LATE = """\
#!/bin/sh
for word in "$@"; do [ "$word" = {verb} ] && sleep {seconds}; done
exec /usr/bin/systemctl "$@"
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))  # while writing tests
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(NODES, CABLES)
    project = tmp_path_factory.mktemp("networks")
    shutil.copytree(ROOT / "inventories", project / "inventories")
    for folder in ("group_vars", "host_vars"):
        (project / folder).mkdir()
    fleet = Fleet(Lab.open(LAB_ID, print), project)
    settings = {
        "vllm": {
            "version": "0.32.0",
            "device": "cpu",
            "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
            "uv_lock": str(ROOT / "locks/uv.txt"),
            "api_key_file": str(fleet.state.dir / "secrets/api-key"),
            "cluster_key_file": str(fleet.state.dir / "secrets/cluster-key"),
            "allow_unguarded_ports": True,
        },
        "serving": {
            "tiny": {
                "model": "/srv/tiny",
                "tensor_parallel": 1,
                "pipeline_parallel": 2,
                "span_nodes": True,
                "drain_seconds": 1,
            }
        },
    }
    write(fleet, settings)
    vllm = Vllm.model_validate(settings["vllm"])
    build = release(vllm, Path(vllm.lock).read_bytes(), Path(vllm.uv_lock).read_bytes())
    stand_in = Path(__file__).with_name("stand_in.py").read_text()
    for node in NODES:
        program = f"{build.directory}/bin/vllm"
        place = f"mkdir -p {build.directory}/bin /srv/tiny && cat > {program}"
        fleet.ssh(node, f"{place} && chmod 755 {program}", stdin=stand_in)
    deployed(fleet)
    yield fleet
    if not keep:
        lab.purge()


def write(fleet: Fleet, settings: dict[str, Any]) -> None:
    (fleet.project / "group_vars/lab.yml").write_text(yaml.safe_dump(settings))


def declare(fleet: Fleet, **tiny: Any) -> None:
    settings = yaml.safe_load((fleet.project / "group_vars/lab.yml").read_text())
    settings["serving"]["tiny"] |= tiny
    write(fleet, settings)


def deployed(fleet: Fleet, *arguments: str) -> Run:
    run = fleet.pyinfra("-y", *arguments, deploy=DEPLOY, seconds=300)
    assert run.status == 0, run.output
    return run


def rank_of(fleet: Fleet, node: str) -> dict[str, Any]:
    """What the rank on a node says of itself."""
    found: dict[str, Any] = json.loads(fleet.ssh(node, "cat /run/vllm/tiny-0/rank.json"))
    return found


def received(fleet: Fleet, node: str) -> dict[str, int]:
    """Bytes by interface."""
    lines = fleet.ssh(node, "cd /sys/class/net && grep -H . eth*/statistics/rx_bytes").splitlines()
    return {line.partition("/")[0]: int(line.rpartition(":")[2]) for line in lines}


def test_of_three_interfaces_the_one_that_reaches_the_others_is_taken(pair: Fleet) -> None:
    """By the ranks' program, by what it starts, and by every byte that they exchange."""
    plan = pair.gpufleet("plan", pair.inventory)
    assert "communicate over gpu-01 eth2 10.60.9.11, gpu-02 eth1 10.60.9.12" in plan.stdout
    for node, (interface, address) in REACHES.items():
        unit = pair.ssh(node, f"systemctl cat {UNIT}")
        assert f"Environment=VLLM_HOST_IP={address}\n" in unit
        assert f"Environment=GLOO_SOCKET_IFNAME={interface}\n" in unit
        assert "--master-addr 10.60.9.11" in unit
        sockets = pair.ssh(node, "ss -Htn state established").splitlines()
        ranks = [line.split()[2:4] for line in sockets if ":295" in line]
        assert len(ranks) == 2  # the ranks' program and what it starts
        assert all(end.startswith("10.60.9.") for ends in ranks for end in ends)

    before = received(pair, "gpu-01")
    time.sleep(2)
    after = received(pair, "gpu-01")
    grown = {name: after[name] - before[name] for name in after}
    assert grown["eth2"] > 300_000  # the stand-in's 320 kB a second, on a busy machine
    assert grown["eth1"] < 1000


def test_status_and_logs_show_the_ranks_as_one(pair: Fleet) -> None:
    """Then one is killed: both say whose end it was, and the group is a new one."""
    run = pair.gpufleet("status", pair.inventory, "--completion", "--json")
    assert run.status == 0, run.output
    (replica,) = json.loads(run.stdout)["replicas"]
    assert [rank["node"] for rank in replica["ranks"]] == list(NODES)
    assert [rank["state"] for rank in replica["ranks"]] == ["serves", "runs"]
    first = replica["incarnation"]

    pair.ssh("gpu-02", "pkill -KILL -f '^/usr/bin/python3 -I /opt/vllm'")
    replica = serving_again(pair, first)
    assert {rank["incarnation"] for rank in replica["ranks"]} == {replica["incarnation"]}
    for rank in replica["ranks"]:
        assert "rank 1 on gpu-02" in rank["last_restart"]["cause"]
        assert "ended by SIGKILL" in rank["last_restart"]["cause"]
    table = pair.gpufleet("status", pair.inventory)
    assert table.status == 0, table.output
    assert f"tiny-0: 2 ranks of incarnation {replica['ranks'][0]['incarnation_number']}" in (
        table.stdout
    )

    run = pair.gpufleet("logs", pair.inventory, "tiny-0", "--since", "10m", "--json")
    assert run.status == 0, run.output
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert {line["rank"] for line in lines} == {0, 1}
    why = "the group has ended: rank 1 on gpu-02: vllm ended by SIGKILL"
    assert {line["rank"] for line in lines if why in line["message"]} == {0, 1}
    assert pair.key not in run.output


def serving_again(fleet: Fleet, before: str) -> dict[str, Any]:
    """Wait until the replica serves in another incarnation, and return what status says of it."""
    until = time.monotonic() + 60
    while True:
        run = fleet.gpufleet("status", fleet.inventory, "--json")
        (replica,) = json.loads(run.stdout)["replicas"]
        if run.status == 0 and replica["incarnation"] != before:
            found: dict[str, Any] = replica
            return found
        assert time.monotonic() < until, run.output
        time.sleep(1)


@pytest.mark.parametrize(
    ("late", "verb"),
    [
        # Its rank has come back by itself by then, with the new unit.
        ("gpu-02", "reset-failed"),
        pytest.param("gpu-01", "reset-failed", marks=pytest.mark.long),
        # With the old one.
        pytest.param("gpu-02", "daemon-reload", marks=pytest.mark.long),
        pytest.param("gpu-01", "daemon-reload", marks=pytest.mark.long),
    ],
)
def test_a_change_costs_one_new_group_whichever_node_is_late(
    pair: Fleet, late: str, verb: str
) -> None:
    """Ten seconds are longer than a rank takes to come back after the other has ended the group."""
    before = {node: rank_of(pair, node)["counter"] for node in NODES}
    text = LATE.format(verb=verb, seconds=10)
    wrapper = "/usr/local/bin/systemctl"
    pair.ssh(late, f"cat > {wrapper} && chmod 755 {wrapper}", stdin=text)
    declare(pair, flags={"seed": int(time.time())})
    try:
        deployed(pair)
    finally:
        pair.ssh(late, f"rm {wrapper}")

    after = {node: rank_of(pair, node) for node in NODES}
    assert [each["phase"] for each in after.values()] == ["running", "running"]
    assert {node: each["counter"] - before[node] for node, each in after.items()} == {
        "gpu-01": 1,
        "gpu-02": 1,
    }
    again = deployed(pair, "--json")
    assert again.changed == {}


def test_a_rank_is_not_changed_without_the_others(pair: Fleet) -> None:
    pids = pair.pids()
    declare(pair, flags={"seed": int(time.time())})

    limited = pair.pyinfra("-y", "--limit", "gpu-01", deploy=DEPLOY)
    assert limited.status != 0
    assert "tiny-0 is planned on gpu-01, gpu-02, but this run leaves out gpu-02" in limited.output
    serial = pair.pyinfra("-y", "--serial", deploy=DEPLOY)
    assert serial.status != 0
    assert "--serial: tiny-0 must start on gpu-01, gpu-02 at the same time" in serial.output
    assert pair.pids() == pids


@pytest.mark.long
def test_nobody_waits_for_a_rank_whose_node_failed(pair: Fleet) -> None:
    """Repaired, the whole replica comes with the next run, though the other node is done."""
    wrapper = "/usr/local/bin/systemctl"
    text = LATE.replace("sleep {seconds}", "exit 1").format(verb="restart")
    pair.ssh("gpu-02", f"cat > {wrapper} && chmod 755 {wrapper}", stdin=text)
    declare(pair, flags={"seed": int(time.time())})
    began = time.monotonic()

    run = pair.pyinfra("-y", deploy=DEPLOY)
    pair.ssh("gpu-02", f"rm {wrapper}")

    assert run.status != 0
    assert "tiny-0 waits for its rank on gpu-02, which failed in this run" in run.output
    assert time.monotonic() - began < 60  # of the model's 1800 to start in
    deployed(pair)
    assert rank_of(pair, "gpu-01")["phase"] == "running"


def test_a_node_may_not_leave_its_replica(pair: Fleet) -> None:
    shutil.copy(pair.project / "group_vars/lab.yml", pair.project / "group_vars/half.yml")
    half = pair.project / "inventories/half.py"
    text = Path(pair.inventory).read_text()
    assert "_groups = groups()\n" in text
    dropped = "_groups = {name: nodes[:1] for name, nodes in groups().items()}\n"
    half.write_text(text.replace("_groups = groups()\n", dropped))
    pids = pair.pids()

    run = pair.gpufleet("plan", str(half), "--diff")
    assert run.status == 2
    assert (
        "tiny-0 runs on gpu-01, gpu-02 together, but gpu-02 is no longer in the inventory"
        in run.stderr
    )
    assert pair.pids() == pids


def test_where_none_reaches_the_others_the_refusal_says_what_was_tried(pair: Fleet) -> None:
    pair.lab.up(NODES, NOWHERE)

    run = pair.pyinfra("-y", deploy=DEPLOY)

    assert run.status != 0
    said = re.sub(r"\s+", " ", run.output)
    assert "no network connects these nodes" in said
    for tried in ("eth1 10.60.1.11/24 (not on gpu-02)", "eth1 10.60.2.12/24 (not on gpu-01)"):
        assert tried in said
    own = str(LabState.load(LAB_ID).node("gpu-01").address)
    assert f"eth0 {own}/32 (not on gpu-02)" in said


@pytest.mark.long
def test_vllm_itself_talks_over_the_network_that_was_chosen(pair: Fleet) -> None:
    """Its own defaults are the default route and the host's name, which lead to eth0."""
    pair.lab.up(NODES, CABLES)
    provisioning_sources.provide(pair.state, print)
    settings = yaml.safe_load((ROOT / "group_vars/lab.yml").read_text())
    del settings["dcgm"]  # which other tests deploy
    tiny = settings["serving"]["tiny"]
    del tiny["flags"]["enforce-eager"]
    tiny["flags"]["compilation-config"] = COMPILATION
    tiny |= {"replicas": 1, "tensor_parallel": 1, "pipeline_parallel": 2, "span_nodes": True}
    write(pair, settings)
    run = pair.pyinfra("-y", seconds=1500)
    assert run.status == 0, run.output

    before = received(pair, "gpu-02")
    client = openai.OpenAI(
        base_url=f"http://{pair.address('gpu-01')}:8000/v1", api_key=pair.key, timeout=120
    )
    client.completions.create(
        model="tiny", prompt="Hello " * 16, max_tokens=64, extra_body={"ignore_eos": True}
    )
    after = received(pair, "gpu-02")

    sockets = pair.ssh("gpu-02", "ss -Htn state established").replace("[::ffff:", "").splitlines()
    peers = [line.split()[2:4] for line in sockets]
    own = pair.address("gpu-02"), "127."  # SSH, and what is between processes of the node
    ours = [ends for ends in peers if not ends[0].startswith(own)]
    assert len(ours) > 2  # the ranks' program, the store, Gloo's pairs
    assert all(end.startswith("10.60.9.") for ends in ours for end in ends)
    grown = {name: after[name] - before[name] for name in after}
    # 64 steps, each with a hidden state.
    assert grown["eth1"] > 50_000
    assert grown["eth2"] < 1000
