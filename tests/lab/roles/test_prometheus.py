"""roles/prometheus.py: the distribution's Prometheus with gpufleet's rules and targets."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import account, listens, owners, packages, services

SERVICE = "prometheus.service"
FILES = {
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
    "/etc/gpufleet/prometheus": "root:prometheus 750",
    "/etc/gpufleet/prometheus/prometheus.yml": "root:root 644",
    "/etc/gpufleet/prometheus/rules": "root:root 755",
    "/etc/gpufleet/prometheus/targets": "root:root 755",
    "/etc/gpufleet/prometheus/own-rules": "root:root 755",
    "/etc/gpufleet/prometheus/own-targets": "root:root 755",
    "/etc/gpufleet/prometheus/credentials": "root:prometheus 750",
    "/var/lib/prometheus/metrics2": "prometheus:prometheus 755",
}


def test_it_runs_also_after_a_boot_as_its_account(gateway_node: Host) -> None:
    assert packages(gateway_node, "prometheus")
    assert account(gateway_node, "prometheus").startswith("prometheus /var/lib/prometheus ")
    assert services(gateway_node, SERVICE) == {SERVICE: "active enabled"}
    assert gateway_node.check_output(f"systemctl show -P User {SERVICE}") == "prometheus"


def test_it_answers_on_the_loopback_alone(gateway_node: Host) -> None:
    assert [each for each in listens(gateway_node) if each.endswith(":9090")] == ["127.0.0.1:9090"]


def test_its_own_account_cannot_change_what_it_is_told(gateway_node: Host) -> None:
    assert owners(gateway_node, *FILES) == FILES
    gateway_node.check_output("promtool check config /etc/gpufleet/prometheus/prometheus.yml")
