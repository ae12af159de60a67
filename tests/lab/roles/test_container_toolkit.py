"""roles/container_toolkit.py: where `gpu.container_toolkit` is not set, none of its files."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent


def test_a_node_without_the_setting_has_nothing_of_it(gpu_node: Host) -> None:
    assert absent(
        gpu_node,
        "/etc/udev/rules.d/71-gpufleet-nvidia-dev-char.rules",
        "/etc/gpufleet/keys/nvidia-container-toolkit.*",
        "/usr/bin/nvidia-ctk",
    )
