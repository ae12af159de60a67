"""roles/watchdog.py: the program that looks whether a node's vLLM servers get on."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import listens, owners, services

SERVICE = "gpufleet-watchdog.service"
FILES = {
    "/usr/local/libexec/gpufleet/gpufleet-watchdog": "root:root 755",
    "/etc/gpufleet/watchdog.json": "root:root 644",
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
    "/var/lib/gpufleet/dumps": "root:root 700",
    "/var/lib/gpufleet/watchdog": "root:root 700",
    "/var/lib/gpufleet/textfile/watchdog.prom": "root:root 644",
}


def test_it_runs_where_a_server_is_also_after_a_boot(server_node: Host) -> None:
    assert services(server_node, SERVICE) == {SERVICE: "active enabled"}
    assert "*:8406" in listens(server_node), "gateways ask it"


def test_dumps_of_servers_are_readable_by_root_alone(server_node: Host) -> None:
    assert owners(server_node, *FILES) == FILES


def test_it_is_told_of_a_file_with_the_key_and_not_the_key(server_node: Host) -> None:
    key = server_node.check_output("cat /etc/vllm/credentials/api-key")
    assert key not in server_node.file("/etc/gpufleet/watchdog.json").content_string
