"""roles/node_exporter.py: the distribution's node exporter, which is not root."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent, listens, owners, packages, services

SERVICE = "prometheus-node-exporter.service"
FILES = {
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
    "/var/lib/gpufleet/textfile": "root:root 755",
}


def test_its_package_is_there_with_what_it_asks_systemd_by(any_node: Host) -> None:
    assert packages(any_node, "prometheus-node-exporter", "dbus").keys() == {
        "prometheus-node-exporter",
        "dbus",
    }


def test_it_runs_also_after_a_boot_and_not_as_root(any_node: Host) -> None:
    assert services(any_node, SERVICE) == {SERVICE: "active enabled"}
    assert any_node.check_output(f"systemctl show -P User {SERVICE}") == "prometheus"
    assert "*:9100" in listens(any_node)


def test_its_files_are_roots_and_hold_no_credentials(any_node: Host) -> None:
    assert owners(any_node, *FILES) == FILES
    assert absent(any_node, "/etc/gpufleet/node-exporter/*")
    assert absent(any_node, "/var/lib/gpufleet/textfile/certificate-node-exporter.prom")
