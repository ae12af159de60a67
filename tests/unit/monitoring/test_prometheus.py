"""What Prometheus scrapes, and that its own program takes it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpufleet.converge.desired import File
from gpufleet.monitoring import prometheus, render, server_files
from gpufleet.monitoring.metrics.metric import Job
from gpufleet.monitoring.rules.files import all_groups
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving import servers
from gpufleet.settings.monitoring_settings import Monitoring
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.unit.monitoring.programs import program

GOLDEN = Path(__file__).parent / "golden"
CUDA = {
    "repository": {"url": "https://apt.example.net/cuda", "keyring_sha256": "0" * 64},
    "toolkit": "13-0",
    "version": "13.0.3-1",
}
DCGM = {"version": "1:4.6.0-1", "exporter_version": "4.8.2-1"}
VLLM = {"version": "0.32.0", "lock": "x.txt", "allow_unauthenticated": True}
SECURED = {
    "tls": {"certificate_file": "{node}.pem", "key_file": "{node}.key", "ca_file": "ca.pem"},
    "basic_auth": {"password_file": "password"},
}


@dataclass(frozen=True)
class Node:
    """A node of the inventory, without the inventory."""

    name: str
    address: str
    settings: NodeSettings


def node(name: str, address: str, **settings: Any) -> Node:
    return Node(name, address, parse_settings(settings))


def fleet(*nodes: Node) -> dict[str, Node]:
    return {each.name: each for each in nodes}


GPU_01 = node("gpu-01", "192.0.2.11", cuda=CUDA, dcgm=DCGM, vllm=VLLM)
GPU_02 = node("gpu-02", "2001:db8::2", cuda=CUDA, vllm=VLLM, exporters=SECURED)
MON_01 = node("mon-01", "mon.example.net", gpu_node=False, monitoring={}, dcgm=None)
FLEET = fleet(GPU_01, GPU_02, MON_01)
SERVERS = (
    servers.Server("gpu-01", "tiny-0", 0, "tiny", 8000),
    servers.Server("gpu-02", "big-0", 1, "big", 8100),
    servers.Server("gpu-02", "big-0", 2, "big", 8101),
)


def told(found: tuple[prometheus.Scrape, ...], job: Job) -> dict[str, dict[str, str]]:
    """Return {address: labels} of a job's targets, whatever its configurations are called."""
    return {
        each["targets"][0]: each["labels"]
        for wanted in found
        if wanted.job is job
        for each in wanted.targets
    }


def test_a_target_is_called_after_its_node_whatever_its_address() -> None:
    found = prometheus.scrapes(FLEET, SERVERS, "mon-01")
    assert told(found, Job.NODE) == {
        "192.0.2.11:9100": {"instance": "gpu-01", "job": "node"},
        "[2001:db8::2]:9100": {"instance": "gpu-02", "job": "node"},
        "mon.example.net:9100": {"instance": "mon-01", "job": "node"},
    }
    assert set(told(found, Job.DCGM)) == {"192.0.2.11:9400"}, "the others have no DCGM"


def test_servers_of_one_stage_are_told_apart() -> None:
    found = told(prometheus.scrapes(FLEET, SERVERS, "mon-01"), Job.VLLM)
    assert found["192.0.2.11:8000"] == {
        "instance": "gpu-01",
        "job": "vllm",
        "stage": "tiny-0",
        "model": "tiny",
    }
    assert [labels.get("server") for labels in found.values()] == [None, "1", "2"]
    assert len({json.dumps(each, sort_keys=True) for each in found.values()}) == 3


def test_what_is_planned_and_what_runs_are_the_same_targets() -> None:
    """Else each of the two deploys that write them would undo what the other has written."""
    alone = Stage("tiny", 0, "gpu-01", (0,), ("GPU-0",), 8000, 1)
    many = Stage(
        *("big", 0, "gpu-02", (0, 1), ("GPU-1", "GPU-2"), 8100, 1),
        data_parallel=4,
        node_rank=1,
        nodes=("gpu-01", "gpu-02"),
        balancing="external",
    )
    found = (
        Running("tiny", 0, "gpu-01", ("GPU-0",), 8000),
        Running(
            *("big", 0, "gpu-02", ("GPU-1", "GPU-2"), 8100, 1),
            arguments=(
                "--node gpu-01=192.0.2.11",
                "-- /opt/vllm/releases/x/bin/vllm serve",
                "--data-parallel-size-local 2",
                "--data-parallel-multi-port-external-lb",
            ),
        ),
    )
    assert servers.running_servers(found) == servers.planned_servers((alone, many)) == SERVERS


def test_a_rank_without_a_server_is_no_target() -> None:
    headless = ("-- /opt/vllm/releases/x/bin/vllm serve", "--headless")
    ray = ("--node gpu-01=192.0.2.11",)
    for arguments in (headless, ray):
        rank = Running("big", 0, "gpu-02", ("GPU-1",), 8100, 1, arguments=arguments)
        assert servers.running_servers([rank]) == ()


def test_a_server_that_only_its_own_node_reaches_is_named_and_left_out() -> None:
    own = {**VLLM, "listen": "127.0.0.1"}
    here = node("gpu-01", "192.0.2.11", vllm=own, monitoring={})
    for home, targets in (("mon-01", set()), ("gpu-01", {"127.0.0.1:8000"})):
        nodes = fleet(here, MON_01)
        assert set(told(prometheus.scrapes(nodes, SERVERS[:1], home), Job.VLLM)) == targets
        said = prometheus.unreachable_servers(nodes, SERVERS[:1], home)
        assert bool(said) is (not targets)
        assert all("vllm.listen" in each and "gpu-01" in each for each in said)


def test_a_monitoring_node_is_watched_by_itself_and_by_those_that_reach_it() -> None:
    open_one = node(
        "mon-02", "192.0.2.9", gpu_node=False, monitoring={"prometheus": {"listen": "0.0.0.0"}}
    )
    nodes = fleet(MON_01, open_one)
    assert set(told(prometheus.scrapes(nodes, (), "mon-01"), Job.PROMETHEUS)) == {
        "127.0.0.1:9090",
        "192.0.2.9:9090",
    }
    assert set(told(prometheus.scrapes(nodes, (), "mon-02"), Job.PROMETHEUS)) == {"127.0.0.1:9090"}


def test_a_gateway_is_watched_at_the_port_of_its_metrics() -> None:
    """Not at that of its clients."""
    wanted = {"allow_unauthenticated": True, "allow_plain_http": True, "metrics_port": 8500}
    gateway = node("gw-01", "192.0.2.9", gpu_node=False, gateway=wanted)
    found = prometheus.scrapes(FLEET | fleet(gateway), SERVERS, "mon-01")

    assert told(found, Job.GATEWAY) == {
        "192.0.2.9:8500": {"instance": "gw-01", "job": "gateway"},
    }
    assert told(prometheus.scrapes(FLEET, SERVERS, "mon-01"), Job.GATEWAY) == {}


def test_a_silent_nodes_servers_stay_and_no_others() -> None:
    """A server that is down must go on being seen to be down; one that has gone must not."""
    before = {each.file: each.targets for each in prometheus.scrapes(FLEET, SERVERS, "mon-01")}
    now = prometheus.scrapes(FLEET, (), "mon-01")
    found = told(prometheus.keep_silent_targets(now, before, {"gpu-02"}), Job.VLLM)
    assert {labels["instance"] for labels in found.values()} == {"gpu-02"}
    assert len(found) == 2
    assert told(prometheus.keep_silent_targets(now, before, {"gpu-02"}), Job.NODE) == told(
        now, Job.NODE
    )


def test_a_password_goes_only_to_nodes_that_ask_for_it() -> None:
    found = {each.name: each for each in prometheus.scrapes(FLEET, SERVERS, "mon-01")}
    assert {each["labels"]["instance"] for each in found["node"].targets} == {"gpu-01", "mon-01"}
    assert {each["labels"]["instance"] for each in found["node-tls-auth"].targets} == {"gpu-02"}
    assert dict(found["node"].secrets) == {}
    assert dict(found["node-tls-auth"].secrets) == {
        "credentials/node-tls-auth.password": "password",
        "credentials/node-tls-auth.ca.pem": "ca.pem",
    }


def test_rules_are_those_of_the_parts_that_are_there() -> None:
    alone = render.rule_settings(Monitoring(alertmanager=None), FLEET)
    assert alone.settings == set()
    assert render.rule_settings(Monitoring(), FLEET).settings == {"alertmanager"}


def test_a_fleet_that_has_every_part_gets_every_alert_that_needs_one() -> None:
    """What an alert needs has to be known of fleets, or no fleet ever gets it."""
    watched = {"llama": {"model": "/srv/llama", "watchdog": {"mode": "warn"}}}
    whole = {**FLEET, "gpu-09": node("gpu-09", "192.0.2.19", cuda=CUDA, vllm=VLLM, serving=watched)}
    there = render.rule_settings(Monitoring(), whole).settings
    needed = {each for group in all_groups() for alert in group.alerts for each in alert.needs}
    assert needed == there


def test_a_servers_credentials_are_no_one_elses_and_in_no_diff() -> None:
    (file,) = (
        each
        for each in server_files.credentials("/etc/x", {"credentials/key": b"k"})
        if isinstance(each, File)
    )
    assert file.secret
    assert file.mode == 0o640


def test_a_node_more_changes_no_configuration() -> None:
    """Its targets are read without a reload."""
    third = node("gpu-03", "192.0.2.13", cuda=CUDA, dcgm=DCGM, vllm=VLLM)
    monitoring = Monitoring()
    before = prometheus.scrapes(FLEET, SERVERS, "mon-01")
    after = prometheus.scrapes({**FLEET, "gpu-03": third}, SERVERS, "mon-01")
    assert render.prometheus(monitoring, FLEET, before) == render.prometheus(
        monitoring, {**FLEET, "gpu-03": third}, after
    )
    assert render.targets(before) != render.targets(after)


def test_the_configuration_is_the_one_that_was_looked_at() -> None:
    """Golden: a change of it restarts nothing, but everybody's Prometheus reads it."""
    monitoring = Monitoring(external_labels={"fleet": "prod"})
    text = prometheus.prometheus_yml(monitoring, prometheus.scrapes(FLEET, SERVERS, "mon-01"))
    assert text == (GOLDEN / "prometheus.yml").read_text()


def test_prometheus_own_program_takes_configuration_rules_and_targets(tmp_path: Path) -> None:
    wanted = prometheus.scrapes(FLEET, SERVERS, "mon-01")
    files = render.prometheus(Monitoring(), FLEET, wanted) | render.targets(wanted)
    for each in wanted:
        files |= {path: b"secret" for path, _ in each.secrets}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    promtool = program("prometheus", "usr/bin/promtool")
    good = _checked(promtool, tmp_path)
    assert good.returncode == 0, good.stdout
    assert f"{len(list(tmp_path.glob('rules/*.yml')))} rule files found" in good.stdout
    (tmp_path / wanted[0].file).write_text('[{"targets": 1}]')
    assert _checked(promtool, tmp_path).returncode != 0


def _checked(promtool: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool, "check", "config", folder / "prometheus.yml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "gpu-01.example.net"])
def test_only_ipv6_is_written_in_brackets(host: str) -> None:
    assert prometheus.host_port(host, 1) == f"{host}:1"
