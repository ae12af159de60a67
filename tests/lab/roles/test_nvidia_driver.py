"""roles/nvidia_driver.py: the driver's packages, held, and the settings of its modules."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import owners, packages
from tests.lab.walk import DRIVER

FILES = {
    "/etc/modprobe.d/gpufleet-nvidia.conf": "root:root 644",
    "/etc/modules-load.d/gpufleet-nvidia.conf": "root:root 644",
    "/etc/apt/apt.conf.d/52gpufleet-unattended-upgrades": "root:root 644",
}
PARTS = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libnvidia-ml1", "nvidia-persistenced")


def test_every_part_of_the_driver_has_its_version_and_is_held(gpu_node: Host) -> None:
    for name, version in packages(gpu_node, *PARTS).items():
        assert version.startswith(f"{DRIVER}-"), name
        assert version.endswith(" held"), name


def test_its_files_are_roots(gpu_node: Host) -> None:
    assert owners(gpu_node, *FILES) == FILES


def test_nouveau_is_never_loaded_and_the_driver_at_each_boot(gpu_node: Host) -> None:
    modprobe, loaded, unattended = (gpu_node.file(path).content_string for path in FILES)
    assert "blacklist nouveau\n" in modprobe
    assert {"nvidia", "nvidia-uvm"} <= {*loaded.splitlines()}
    assert '"^nvidia-"' in unattended


def test_a_module_is_built_for_the_kernel_that_runs(gpu_node: Host) -> None:
    built = gpu_node.check_output("dkms status -k $(uname -r)")
    assert DRIVER in built
    assert built.endswith("installed")
