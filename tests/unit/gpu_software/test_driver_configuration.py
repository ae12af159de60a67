"""What the driver's role writes beside its packages."""

from __future__ import annotations

import re
from typing import Any

from gpufleet.converge.desired import Absent, DesiredState, File, Package, PackageSource
from gpufleet.gpu_software.driver_configuration import (
    LOADED_AT_BOOT,
    MODPROBE,
    UNATTENDED,
    desired_driver,
    driver_files,
)
from gpufleet.gpu_software.driver_packages import dcgm_packages
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.node.machine import Machine, System
from gpufleet.settings.node_settings import NodeSettings
from tests.support.package_cases import B200, DEBIAN, GB200, H100, ROCKY, UBUNTU, on
from tests.support.rows import each_row


def node(system: System, machine: Machine = H100, **variables: Any) -> BareNode:
    """A node that the role would be given."""
    lock = {
        "driver": "580.95.05",
        "dcgm": {"version": "1:4.5.3-1", "exporter": "4.8.2-1"},
        **variables.pop("gpu_lock", {}),
    }
    repository = {"url": "https://mirror.example/cuda", "keyring_sha256": "0" * 64}
    settings = NodeSettings.model_validate(
        {"cuda": {"repository": repository, "toolkit": None}, "gpu_lock": lock, **variables}
    )
    return BareNode("gpu-01", system, on(system, machine), settings, {})


def text(bare: BareNode, path: str) -> str:
    (found,) = (each for each in driver_files(bare) if isinstance(each, File) and each.path == path)
    return found.content.decode()


def test_nouveau_is_off_and_the_drivers_modules_load_at_boot() -> None:
    bare = node(DEBIAN["12"])
    assert "blacklist nouveau\noptions nouveau modeset=0\n" in text(bare, MODPROBE)
    assert text(bare, LOADED_AT_BOOT).splitlines()[1:] == ["nvidia", "nvidia-uvm"]


def test_module_options_are_one_line_of_modprobe() -> None:
    options = {"NVreg_RestrictProfilingToAdminUsers": "0", "NVreg_EnableStreamMemOPs": "1"}
    found = text(node(DEBIAN["12"], gpu={"module_options": options}), MODPROBE)
    assert found.splitlines()[-1] == (
        "options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RestrictProfilingToAdminUsers=0"
    )
    assert "options nvidia " not in text(node(DEBIAN["12"]), MODPROBE)


def test_a_racks_trays_get_imexs_channel_unless_the_operator_says_otherwise() -> None:
    system = UBUNTU["24.04"]
    off = {"module_options": {"NVreg_CreateImexChannel0": "0"}}
    assert "NVreg_CreateImexChannel0=1" in text(node(system, GB200), MODPROBE)
    assert "NVreg_CreateImexChannel0=0" in text(node(system, GB200, gpu=off), MODPROBE)
    assert "Imex" not in text(node(system, H100), MODPROBE)


@each_row("driver", ["580.95.05", "595.91.07", "570.124.06"])
@each_row("system", [DEBIAN["12"], UBUNTU["22.04"], UBUNTU["24.04"]], ids=str)
def test_unattended_upgrades_leave_alone_all_that_we_hold(system: System, driver: str) -> None:
    """Its patterns are regular expressions, matched from a name's beginning."""
    bare = node(system, B200, gpu_lock={"driver": driver, "nvlsm": "2025.06.11-1"})
    patterns = re.findall(r'^ +"(.+)";$', text(bare, UNATTENDED), re.MULTILINE)
    values = [*desired_driver(bare), *dcgm_packages(system, bare.lock, bare.machine).wanted]
    held = [each.name for each in values if isinstance(each, Package) and each.hold]

    assert len(held) > 10
    for name in held:
        assert any(re.match(pattern, name) for pattern in patterns), name
    for name in ("openssl", "linux-image-amd64", "libc6", "cudf"):
        assert not any(re.match(pattern, name) for pattern in patterns), name


def test_unattended_upgrades_leave_held_kernels_alone() -> None:
    found = text(node(DEBIAN["12"], gpu_lock={"kernel": "held"}), UNATTENDED)
    assert '"^linux-(image|headers|modules|generic)";' in found


def test_red_hats_systems_have_no_file_of_apts() -> None:
    assert Absent(UNATTENDED) in driver_files(node(ROCKY))


def test_the_drivers_packages_come_with_where_they_come_from() -> None:
    found = desired_driver(node(DEBIAN["12"]))
    assert isinstance(found, DesiredState)
    (source,) = found.values_of(PackageSource)
    assert source.url == "https://mirror.example/cuda"
    assert any(each.name == "nvidia-driver-cuda" for each in found.values_of(Package))
