"""roles/nvidia_repository.py: the vendor's key, for gpufleet's own runs of apt alone."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.roles.node_state import absent, owners, packages
from tests.lab.walk import TlsFleet

FILES = {
    "/etc/gpufleet/keys": "root:root 755",
    "/etc/gpufleet/keys/nvidia-cuda.gpg": "root:root 644",
    "/var/lib/gpufleet/keys": "root:root 755",
    "/var/lib/gpufleet/keys/nvidia-cuda.deb": "root:root 644",
}


def test_its_key_is_a_file_that_root_alone_writes(gpu_node: Host) -> None:
    assert owners(gpu_node, *FILES) == FILES
    assert packages(gpu_node, "ca-certificates")


def test_the_nodes_own_apt_knows_nothing_of_the_vendor(gpu_node: Host, walk: TlsFleet) -> None:
    vendor = walk.wanted["cuda"]["repository"]["url"]
    assert gpu_node.run(f"grep -r {vendor} /etc/apt").stdout == ""
    assert absent(gpu_node, "/etc/apt/sources.list.d/cuda-*", "/etc/apt/preferences.d/*cuda*")
