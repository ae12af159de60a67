"""roles/fabric_manager.py: on a node without NVSwitches, nothing of it.

Nodes with NVSwitches are those of tests/lab/test_node_deploy.py.
"""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent, services

SERVICE = "nvidia-fabricmanager.service"


def test_it_does_not_run_where_there_is_no_nvswitch(gpu_node: Host) -> None:
    assert services(gpu_node, SERVICE) == {SERVICE: "inactive"}
    assert absent(
        gpu_node, f"/etc/systemd/system/{SERVICE}.d", "/etc/modules-load.d/gpufleet-fabric.conf"
    )
