"""roles/alertmanager.py: the distribution's Alertmanager, told by gpufleet's file."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import listens, owners, packages, services

SERVICE = "prometheus-alertmanager.service"
FILES = {
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
    "/etc/gpufleet/alertmanager": "root:prometheus 750",
    "/etc/gpufleet/alertmanager/alertmanager.yml": "root:prometheus 640",
    "/var/lib/prometheus/alertmanager": "prometheus:prometheus 755",
}


def test_it_runs_also_after_a_boot_as_its_account(gateway_node: Host) -> None:
    assert packages(gateway_node, "prometheus-alertmanager")
    assert services(gateway_node, SERVICE) == {SERVICE: "active enabled"}
    assert gateway_node.check_output(f"systemctl show -P User {SERVICE}") == "prometheus"


def test_it_answers_on_the_loopback_alone(gateway_node: Host) -> None:
    assert [each for each in listens(gateway_node) if each.endswith(":9093")] == ["127.0.0.1:9093"]


def test_who_is_told_is_readable_by_root_and_its_account_alone(gateway_node: Host) -> None:
    assert owners(gateway_node, *FILES) == FILES
    file = "/etc/gpufleet/alertmanager/alertmanager.yml"
    gateway_node.check_output(f"amtool check-config {file}")
