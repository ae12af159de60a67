"""roles/rdma.py: where `gpu.rdma` is not set, none of its files."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent


def test_a_node_without_the_setting_has_nothing_of_it(gpu_node: Host) -> None:
    assert absent(
        gpu_node,
        "/etc/modules-load.d/gpufleet-rdma.conf",
        "/etc/modprobe.d/gpufleet-rdma.conf",
        "/etc/security/limits.d/90-gpufleet-rdma.conf",
    )
