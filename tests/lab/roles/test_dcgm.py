"""roles/dcgm.py: the DCGM host engine on the loopback, its exporter, both of one version, held."""

from __future__ import annotations

from testinfra.host import Host

from tests.lab.bare_node import DCGM
from tests.lab.roles.node_state import absent, listens, owners, packages, services

ENGINE, EXPORTER = "nvidia-dcgm.service", "nvidia-dcgm-exporter.service"
FILES = {
    "/etc/dcgm-exporter/gpufleet-counters.csv": "root:root 644",
    f"/etc/systemd/system/{ENGINE}.d/gpufleet.conf": "root:root 644",
    f"/etc/systemd/system/{EXPORTER}.d/gpufleet.conf": "root:root 644",
}


def test_the_packages_have_the_locks_versions_and_are_held(gpu_node: Host) -> None:
    wanted = {
        "datacenter-gpu-manager-4-core": f"{DCGM['version']} held",
        "datacenter-gpu-manager-4-cuda13": f"{DCGM['version']} held",
        "datacenter-gpu-manager-exporter": f"{DCGM['exporter']} held",
    }
    assert packages(gpu_node, *wanted) == wanted


def test_engine_and_exporter_run_also_after_a_boot(gpu_node: Host) -> None:
    wanted = dict.fromkeys((ENGINE, EXPORTER), "active enabled")
    assert services(gpu_node, *wanted) == wanted


def test_only_the_exporter_is_reached_from_outside(gpu_node: Host) -> None:
    found = {each for each in listens(gpu_node) if each.endswith((":5555", ":9400"))}
    assert found == {"127.0.0.1:5555", "*:9400"}


def test_its_files_are_roots_and_hold_no_credentials(gpu_node: Host) -> None:
    assert owners(gpu_node, *FILES) == FILES
    assert absent(gpu_node, "/etc/gpufleet/dcgm-exporter/*")
    assert absent(gpu_node, "/var/lib/gpufleet/textfile/certificate-dcgm-exporter.prom")
