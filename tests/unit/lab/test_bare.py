"""A machine that came without a driver, as values: what it shows, and what a driver would add."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from gpufleet.errors import FleetError
from lab import active_faults, driver, machine, nvml
from lab.machine import Loaded, Profile, bare_machine, profile_text
from lab.machine.profile import HOPPER
from lab.node_machine import fit_to_host, kernel_tree
from tests.support.rows import each_row

PROFILES = nvml.profiles()
NOUVEAU = Loaded(("nouveau",))
OPEN = Loaded(("nvidia",), "580.95.05", "open")


@each_row("profile", PROFILES)
def test_nothing_of_nvidias_but_the_gpus_is_there(profile: str) -> None:
    whole = machine.of(profile)
    handed_over = bare_machine(whole)
    tree = kernel_tree(handed_over)

    assert all(
        name.startswith("linux-") or name == "unattended-upgrades" for name in handed_over.packages
    )
    assert not [name for name in handed_over.units if "nvidia" in name]
    assert not [name for name in handed_over.modules if "nvidia" in name]
    assert not [path for path in tree if path.startswith(("/proc/driver/", "/sys/module/nvidia"))]
    assert handed_over.library is None
    assert [each.bus_id for each in handed_over.functions] == [
        each.bus_id for each in whole.functions
    ]
    assert "NVRM" not in "".join(text for _, text in handed_over.log)


@each_row("profile", PROFILES)
def test_a_loaded_driver_shows_what_the_delivered_machine_shows(profile: str) -> None:
    """Handed over bare and loaded since, or delivered with it: the PCI bus and /proc are one."""
    whole = machine.of(profile)
    version = whole.profile.driver
    modules = tuple(name for name in whole.modules if name.startswith("nvidia"))

    assert kernel_tree(bare_machine(whole, Loaded(modules, version, whole.flavour))) == kernel_tree(
        whole
    )


@each_row("profile", PROFILES)
def test_nouveau_takes_the_gpus_that_it_knows(profile: str) -> None:
    taken = bare_machine(machine.of(profile), NOUVEAU)
    drivers = {taken.function(taken.gpu_bus_id(0)).driver}

    assert "nouveau" in taken.modules
    assert drivers == ({"nouveau"} if Profile.of(profile).architecture < HOPPER else {None})


def test_what_is_loadable_names_every_gpu_and_no_version_of_its_own() -> None:
    """A node knows nothing of versions: they come with its packages."""
    whole = fit_to_host(machine.of("h100x8"))
    what = driver.loadable(whole, kernel_tree)
    kinds = what["shows"]

    assert set(kinds) == {"nvidia-open", "nvidia-proprietary", "nouveau"}
    assert kinds["nvidia-open"]["/sys/module/nvidia/version"] == "@VERSION@\n"
    assert "Open Kernel Module" in kinds["nvidia-open"]["/proc/driver/nvidia/version"]
    assert "Open" not in kinds["nvidia-proprietary"]["/proc/driver/nvidia/version"]
    assert whole.profile.driver not in str(kinds)
    for index in range(whole.profile.count):
        bus_id = whole.gpu_bus_id(index)
        assert f"/proc/driver/nvidia/gpus/{bus_id}/information" in kinds["nvidia-open"]
    assert (what["gpus"], what["switches"]) == (8, 4)


def test_links_lead_where_the_tree_has_them() -> None:
    """They are put below another root than the one they are named in, so they are relative."""
    whole = fit_to_host(machine.of("a100x4-pcie"))
    links = {
        path: entry["to"]
        for path, entry in driver.loadable(whole, kernel_tree)["shows"]["nvidia-open"].items()
        if isinstance(entry, dict)
    }

    assert len(links) == 4  # one driver a GPU
    for path, to in links.items():
        climbed = len([part for part in PurePosixPath(to).parts if part == ".."])
        assert climbed == len(PurePosixPath(path).parent.parts) - 2  # /sys stays
        assert to.endswith("bus/pci/drivers/nvidia")


def test_its_nvml_finds_out_what_is_loaded() -> None:
    text = profile_text(bare_machine(machine.of("h100x8")))

    assert "system.loaded = /sys/module/nvidia/version\n" in text
    assert "gpu.*.fabric.state = 1\n" in text  # no manager was started
    assert "gpu.*.persistence = 0\n" in text


def test_faults_of_its_hardware_are_faults_of_a_bare_machine() -> None:
    text = profile_text(
        bare_machine(
            active_faults.machine_with("h100x8", [active_faults.Broken("nvlink-dead-link", 3)])
        )
    )

    assert "gpu.3.nvlink.down = 7\n" in text


def test_secure_boot_is_on_and_what_follows_is_found_out() -> None:
    """Whether a module is let in follows from who signed it, not from the fault."""
    locked = bare_machine(
        active_faults.machine_with("h100x8", [active_faults.Broken("secure-boot-unsigned")])
    )

    assert locked.secure_boot
    assert "error.nvmlInitWithFlags" not in profile_text(locked)


@each_row("name", sorted(active_faults.BY_HAND))
def test_faults_of_a_driver_are_not_put_on_a_node_whose_driver_is_its_own(name: str) -> None:
    assert active_faults.parse_fault(name, None, "h100x8").fault == name
    with pytest.raises(FleetError, match=f"The fault {name} .* delivered without a driver"):
        active_faults.parse_fault(name, None, "h100x8", driver=False)


def test_they_go_when_a_node_is_handed_over_anew() -> None:
    have = (active_faults.Broken("mismatch"), active_faults.Broken("disk-full"))

    kept = active_faults.still_possible(have, "h100x8", driver=False)

    assert kept == (active_faults.Broken("disk-full"),)


def test_nodes_of_one_profile_have_gpus_of_their_own():
    first, second = (active_faults.machine_with("h100x8", [], name) for name in ("a", "b"))
    uuids = [one.profile.gpu(gpu, "uuid") for one in (first, second) for gpu in range(8)]

    assert len(set(uuids)) == 16
    assert all(re.fullmatch(r"GPU-\w{8}(-\w{4}){3}-\w{12}", uuid) for uuid in uuids)
    assert f"gpu.7.uuid = {uuids[7]}" in machine.profile_text(first)
