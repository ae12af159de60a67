"""roles/firewall.py: the node's own table of nftables, now and at boot."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, packages, services

SERVICE = "gpufleet-firewall.service"
FILES = {
    "/etc/gpufleet/firewall.nft": "root:root 644",
    f"/etc/systemd/system/{SERVICE}": "root:root 644",
}


def test_the_rules_are_loaded_at_boot(gpu_node: Host) -> None:
    assert packages(gpu_node, "nftables")
    assert services(gpu_node, SERVICE) == {SERVICE: "active enabled"}
    assert owners(gpu_node, *FILES) == FILES


def test_the_kernel_has_the_table_that_the_file_names(gpu_node: Host) -> None:
    table = gpu_node.check_output("nft list table inet gpufleet")
    assert "skuid" in table, "what the user of vLLM answers is guarded by its user"
    assert "table inet gpufleet" in gpu_node.file("/etc/gpufleet/firewall.nft").content_string
