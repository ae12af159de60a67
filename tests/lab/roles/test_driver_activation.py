"""roles/driver_activation.py: the driver on the disk is loaded, and the node was checked."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent, owners
from tests.lab.walk import DRIVER

GUARD = "/etc/systemd/system/vllm-.service.d/gpufleet-unchecked.conf"


def test_module_and_library_are_the_drivers(gpu_node: Host) -> None:
    assert gpu_node.check_output("cat /sys/module/nvidia/version") == DRIVER
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    assert gpu_node.check_output(query).splitlines() == [DRIVER] * 2


def test_stages_would_not_start_on_a_node_that_nobody_checked(gpu_node: Host) -> None:
    assert owners(gpu_node, GUARD) == {GUARD: "root:root 644"}
    assert "/var/lib/gpufleet/unchecked" in gpu_node.file(GUARD).content_string


def test_the_node_was_checked(gpu_node: Host) -> None:
    assert absent(gpu_node, "/var/lib/gpufleet/unchecked")
