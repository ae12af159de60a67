"""roles/kernel_tuning.py: settings of the kernel, now and at boot, and the GPUs' device files."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, services

FILES = {
    "/etc/sysctl.d/99-gpufleet.conf": "root:root 644",
    "/etc/systemd/system/gpufleet-gpu-devices.service": "root:root 644",
    "/etc/systemd/system/vllm-.service.d/gpufleet-gpu-devices.conf": "root:root 644",
}
DEVICES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")


def test_its_files_are_roots(gpu_node: Host) -> None:
    assert owners(gpu_node, *FILES) == FILES


def test_the_kernel_runs_with_the_settings(gpu_node: Host) -> None:
    assert gpu_node.sysctl("vm.swappiness") == 10
    assert gpu_node.sysctl("vm.max_map_count") >= 1_048_576
    assert gpu_node.sysctl("fs.nr_open") >= 1_048_576


def test_device_files_are_made_at_boot_and_are_there(gpu_node: Host) -> None:
    unit = "gpufleet-gpu-devices.service"
    assert services(gpu_node, unit)[unit].endswith("enabled")
    assert len(owners(gpu_node, *DEVICES)) == len(DEVICES)
