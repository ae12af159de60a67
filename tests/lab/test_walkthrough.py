"""What an operator does with a fleet, once, in order, on one lab: from bare nodes to a bundle.

Each test takes the fleet as the one before has left it. What is told apart in detail is told apart
by the other tests here; this is the path that has to work before anything else is looked at.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import yaml

from lab.state import PROXY_PORT
from tests.lab.bare_node import archives
from tests.lab.upgrade_fleet import FLAGS, GATEWAY
from tests.lab.upgrade_load import summary
from tests.lab.walk import DRIVER, NODES, RATE, UNI_FLAGS, TlsFleet

UNIT = "vllm-tiny-{}.service"
# Seconds within which a log or a server has to say what is waited for.
PATIENCE = 60


@pytest.fixture(scope="module")
def fleet(walk: TlsFleet) -> TlsFleet:
    return walk


def test_bare_nodes_become_checked_gpu_nodes(fleet: TlsFleet) -> None:
    for node in NODES:
        fleet.ssh(node, "! test -e /sys/module/nvidia && ! dpkg -s libnvidia-ml1 2>/dev/null")

    run = fleet.pyinfra("-y", "--limit", "gpu", deploy="deploys/node.py")

    assert run.status == 0, run.output
    for node in NODES:
        assert fleet.ssh(node, "cat /sys/module/nvidia/version").strip() == DRIVER
        assert fleet.ssh(node, "dpkg --audit") == ""
    report = fleet.gpufleet("check", fleet.inventory, "--json")
    assert report.status == 0, report.output
    assert json.loads(report.stdout)["fit"]


def test_the_main_deploy_serves_the_model(fleet: TlsFleet) -> None:
    run = fleet.pyinfra("-y")

    assert run.status == 0, run.output
    assert set(fleet.pids()) == {f"{node} {UNIT.format(n)}" for n, node in enumerate(NODES)}
    for node in NODES:
        with openai.OpenAI(
            base_url=f"http://{fleet.address(node)}:8000/v1", api_key=fleet.key, max_retries=0
        ) as client:
            answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
        assert answer.usage
        assert answer.usage.completion_tokens == 8


def test_a_second_run_changes_nothing_and_restarts_nothing(fleet: TlsFleet) -> None:
    fleet.changes_nothing_at_all("deploys/vllm.py")


def test_clients_with_a_key_are_answered_over_tls_and_others_are_not(fleet: TlsFleet) -> None:
    run = fleet.pyinfra("-y", deploy="deploys/gateway.py")

    assert run.status == 0, run.output
    assert len(fleet.completion()) == 8
    with fleet.client("another") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_every_target_is_watched(fleet: TlsFleet) -> None:
    run = fleet.pyinfra("-y", deploy="deploys/monitoring.py")

    assert run.status == 0, run.output
    wanted = {
        *((job, node) for job in ("node", "dcgm", "vllm") for node in NODES),
        *((job, GATEWAY) for job in ("node", "gateway", "prometheus", "alertmanager")),
    }
    deadline = time.monotonic() + PATIENCE
    while answering(fleet) != wanted:
        assert time.monotonic() < deadline, answering(fleet)
        time.sleep(1)


def answering(fleet: TlsFleet) -> set[tuple[str, str]]:
    """Return (job, instance) of every target that answers, as Prometheus says."""
    url = "http://127.0.0.1:9090/api/v1/query?query=up"
    text = fleet.ssh(GATEWAY, f"curl -sS --max-time 20 '{url}'")
    return {
        (each["metric"]["job"], each["metric"]["instance"])
        for each in json.loads(text)["data"]["result"]
        if each["value"][1] == "1"
    }


def test_what_somebody_changes_on_a_node_is_found(fleet: TlsFleet) -> None:
    path = "/etc/sysctl.d/99-gpufleet.conf"
    clean = fleet.gpufleet("drift", fleet.inventory, "--json", seconds=300)
    assert (clean.status, json.loads(clean.stdout)["drift"]) == (0, "clean"), clean.output

    fleet.ssh("gpu-02", f"cp -a {path} /root/kept && echo vm.swappiness=60 >> {path}")
    found = fleet.gpufleet("drift", fleet.inventory, "--json", seconds=300)
    fleet.ssh("gpu-02", f"mv /root/kept {path}")

    assert found.status == 1, found.output
    moved = {
        node: [each["what"] for each in nodes["moved"]]
        for node, nodes in json.loads(found.stdout)["nodes"].items()
    }
    assert [node for node, what in moved.items() if what] == ["gpu-02"], moved
    assert path in moved["gpu-02"][0]


def test_an_upgrade_of_a_setting_fails_no_request(fleet: TlsFleet) -> None:
    fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": 7})
    with asked(fleet, "upgrade"):
        done = fleet.upgrade()
        assert done.returncode == 0, done.stdout
    assert set(fleet.seqs().values()) == {"7"}


def test_its_rollback_fails_no_request(fleet: TlsFleet) -> None:
    with asked(fleet, "rollback"):
        run = fleet.begin("rollback")
        assert run.wait(timeout=900) == 0, fleet.said()
    assert set(fleet.seqs().values()) == {"8"}
    fleet.declare_model(flags=UNI_FLAGS)


@contextmanager
def asked(fleet: TlsFleet, name: str) -> Iterator[None]:
    """Have clients ask from before a change until after it; none of them may fail."""
    with fleet.load(name, rate=RATE) as load:
        while len(load.requests()) < 10:  # before anything is touched
            time.sleep(0.2)
        yield
        after = time.time()
        while not load.requests(since=after):
            time.sleep(0.2)
        load.stop()
        seen = summary(load.requests())
    assert seen.failed == 0, seen.failures


def test_a_deploy_killed_in_the_middle_leaves_what_serves(fleet: TlsFleet) -> None:
    """The change is the next test's: one replica over both nodes."""
    fleet.declare_model(
        replicas=1,
        span_nodes=True,
        tensor_parallel=2,
        distributed_executor_backend="mp",
        flags=FLAGS,
    )
    run = fleet.popen()
    deadline = time.monotonic() + PATIENCE
    while "stages" not in fleet.log.read_text(errors="replace"):
        assert run.poll() is None, fleet.log.read_text()
        assert time.monotonic() < deadline, fleet.log.read_text()
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=10)


def test_the_next_deploy_makes_one_replica_over_two_nodes(fleet: TlsFleet) -> None:
    run = fleet.pyinfra("-y", seconds=1200)

    assert run.status == 0, run.output
    assert set(fleet.pids()) == {f"{node} {UNIT.format(0)}" for node in NODES}
    ranks = [json.loads(fleet.ssh(node, "cat /run/vllm/tiny-0/rank.json")) for node in NODES]
    assert [rank["phase"] for rank in ranks] == ["running"] * 2
    # Each node notes by its own clock since when.
    ours, theirs = ({**rank["incarnation"], "since": 0} for rank in ranks)
    assert ours == theirs
    assert len(fleet.completion()) == 8
    fleet.changes_nothing_at_all("deploys/vllm.py")


def test_a_bundle_has_everything_that_these_nodes_download(
    fleet: TlsFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's packages come by the lab's proxy, which keeps them."""
    monkeypatch.setenv("http_proxy", f"http://{fleet.state.machine}:{PROXY_PORT}")
    monkeypatch.setenv("no_proxy", str(fleet.state.machine))
    mirror = {"url": "http://192.0.2.9", "archives": archives(fleet)}
    variables = fleet.project / "group_vars/all.yml"
    variables.write_text(yaml.safe_dump({"offline": True, "mirror": mirror}))
    out = fleet.project / "bundle"

    done = fleet.gpufleet("bundle", fleet.inventory, "-o", str(out), seconds=600)
    variables.unlink()

    assert done.status == 0, done.output
    manifest = (out / "MANIFEST").read_text()
    subprocess.run(
        ["sha256sum", "--quiet", "--check", "MANIFEST"], cwd=out, check=True, timeout=120
    )
    for wanted in (f"nvidia-driver-cuda_{DRIVER}", "vllm-", "torch-", "model.safetensors"):
        assert wanted in manifest, manifest[-3000:]
