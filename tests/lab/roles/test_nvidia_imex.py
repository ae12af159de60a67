"""roles/nvidia_imex.py: on a node whose memory no other node maps, nothing of it."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent, services

SERVICE = "nvidia-imex.service"


def test_it_does_not_run_outside_a_rack_of_one_fabric(gpu_node: Host) -> None:
    assert services(gpu_node, SERVICE) == {SERVICE: "inactive"}
    assert absent(gpu_node, f"/etc/systemd/system/{SERVICE}.d", "/etc/nvidia-imex")
