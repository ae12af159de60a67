"""Which packages a node gets, on every system; what a transaction does stands in golden files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.converge.desired import DesiredState, Lockstep, ModuleStream, NoPackage, Package
from gpufleet.converge.package_plan import packages
from gpufleet.converge.snapshot import Snapshot
from gpufleet.errors import FleetError
from gpufleet.gpu_software.driver_packages import dcgm_packages, driver_packages, kernel_headers
from gpufleet.node.machine import Kernel, Machine, System
from gpufleet.on_node.packages import outcome
from gpufleet.on_node.packages.installed import rpm
from gpufleet.settings.gpu_lock import GpuLock, LockedDcgm
from tests.support.package_cases import (
    ALMA,
    B200,
    CASES,
    DEBIAN,
    GB200,
    GOLDEN,
    H100,
    L40S,
    ROCKY,
    SYSTEMS,
    UBUNTU,
    V100,
    Case,
    has,
    lock,
    on,
    rendered,
    snapshot,
    wanted,
)
from tests.support.rows import each_row

LOCKS = {
    "580": lock("580.95.05"),
    "580 proprietary": lock("580.95.05", modules="proprietary"),
    "595": lock("595.91.07"),
    "595 proprietary": lock("595.91.07", modules="proprietary"),
    "615": lock("615.71.09"),
}
EVERY = [pytest.param(each, id=f"{each.id}-{each.major}") for each in SYSTEMS]


def versioned(system: System, wanted_lock: GpuLock, machine: Machine = H100) -> set[str]:
    """The names that have the driver's version."""
    found = driver_packages(system, wanted_lock, on(system, machine)).wanted
    return {
        each.name
        for each in found
        if isinstance(each, Package) and each.version and each.name != "nvlsm"
    }


@each_row("name", CASES)
def test_what_is_done_is_what_a_reviewer_has_read(name: str) -> None:
    """`python -m tests.support.package_cases` writes the files again. Read the diff."""
    assert rendered(CASES[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


@each_row("system", EVERY)
@each_row("which", LOCKS)
def test_a_node_that_runs_its_lock_gets_no_transaction(system: System, which: str) -> None:
    """Of the same packages, held: a second run changes nothing."""
    case = Case("again", system, LOCKS[which], installed=has(system, LOCKS[which]))
    found = packages(wanted(case), with_its_stream(case))

    left = [each for each in found.changes if "versionlock" not in each]
    assert left == []


def with_its_stream(case: Case) -> Snapshot:
    """The node's snapshot with the dnf module's stream enabled that the case wants."""
    streams = {each.name: each.stream for each in wanted(case).values_of(ModuleStream)}
    return replace(snapshot(case), streams=streams)


@each_row("system", EVERY)
@each_row("before", LOCKS)
@each_row("after", LOCKS)
def test_no_package_of_another_driver_stays(system: System, before: str, after: str) -> None:
    """Whatever a node ran before: in the end it has the lock's packages, and goes nowhere half."""
    case = Case("moved", system, LOCKS[after], installed=has(system, LOCKS[before]))
    found = packages(wanted(case), snapshot(case))
    old, new = versioned(system, LOCKS[before]), versioned(system, LOCKS[after])

    assert found.problems == ()
    removed = set(found.plan.remove) if found.plan else set()
    assert removed == old - new
    installed = {each.name for each in found.plan.install} if found.plan else set()
    if LOCKS[before].driver != LOCKS[after].driver:
        assert new <= installed


@each_row("system", EVERY)
@each_row("which", LOCKS)
def test_everything_of_the_drivers_version_goes_in_lockstep_and_is_held(
    system: System, which: str
) -> None:
    values = DesiredState(*driver_packages(system, LOCKS[which], on(system, B200)).wanted)
    (lockstep,) = values.values_of(Lockstep)
    members = {each.name: each for each in values.values_of(Package) if each.name in lockstep.names}

    assert set(lockstep.names) == versioned(system, LOCKS[which], B200)
    assert {each.version for each in members.values()} == {f"{LOCKS[which].driver}-*"}
    assert all(each.hold for each in members.values())


@each_row("system", EVERY)
def test_only_compute_is_installed(system: System) -> None:
    """A display server on a GPU server costs memory of a GPU, and an attack surface."""
    for each in LOCKS.values():
        for name in versioned(system, each):
            assert not any(part in name for part in ("xorg", "-gl", "settings", "egl", "vulkan"))


@each_row("system", EVERY)
@each_row(
    ("machine", "there"),
    [
        (L40S, set()),
        (H100, {"nvidia-fabricmanager", "libnvidia-nscq"}),
        (B200, {"nvidia-fabricmanager", "libnvidia-nscq", "libnvsdm"}),
        (GB200, {"nvidia-imex"}),
    ],
    ids=["no fabric", "NVSwitch", "NVLink 5", "rack"],
)
def test_the_fabrics_software_is_where_its_switches_are(
    system: System, machine: Machine, there: set[str]
) -> None:
    """The fabric manager fails where it has nothing to do, and a unit that failed is an alert."""
    fabric = {"nvidia-fabricmanager", "libnvidia-nscq", "libnvsdm", "nvidia-imex"}
    assert versioned(system, LOCKS["580"], machine) & fabric == there


def test_nvlink_5_is_managed_by_nvlsm_of_its_own_version() -> None:
    system = UBUNTU["24.04"]
    exact = lock("580.95.05", nvlsm="2025.06.11-1")
    values = driver_packages(system, exact, on(system, B200)).wanted
    assert Package("nvlsm", "2025.06.11-1", hold=True) in values
    assert Package("infiniband-diags") in values
    assert not any("nvlsm" in str(value) for value in driver_packages(system, exact, H100).wanted)


def test_the_library_of_nvlink_5_switches_is_not_published_for_arm() -> None:
    arm = replace(UBUNTU["24.04"], arch="aarch64")
    assert "libnvsdm" not in versioned(arm, LOCKS["580"], B200)


def test_before_580_the_fabrics_software_had_the_branch_in_its_name() -> None:
    names = versioned(UBUNTU["22.04"], lock("570.124.06"))
    assert {"nvidia-fabricmanager-570", "libnvidia-nscq-570"} <= names
    assert "nvidia-fabric-manager" in versioned(ROCKY, lock("570.124.06"))


def test_without_persistence_there_is_no_daemon() -> None:
    for system in SYSTEMS:
        assert "nvidia-persistenced" in versioned(system, LOCKS["580"])
        assert "nvidia-persistenced" not in versioned(system, lock("580.95.05", persistence=False))


def test_a_branch_alone_accepts_any_of_its_versions() -> None:
    system = DEBIAN["12"]
    values = DesiredState(*driver_packages(system, lock("580"), on(system, H100)).wanted)
    driver = next(each for each in values.values_of(Package) if each.name == "nvidia-driver-cuda")
    assert [driver.accepts(each) for each in ("580.95.05-1", "580.178.04-1", "595.91.07-1")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("modules", "stream"), [("open", "580-open"), ("proprietary", "580-dkms")])
def test_on_red_hat_9_the_branch_is_a_stream(modules: str, stream: str) -> None:
    found = driver_packages(ROCKY, lock("580.95.05", modules=modules), on(ROCKY, L40S)).wanted
    assert ModuleStream("nvidia-driver", stream) in found
    ten = driver_packages(ALMA, lock("580.95.05", modules=modules), on(ALMA, L40S)).wanted
    assert not any(isinstance(value, ModuleStream) for value in ten)


@pytest.mark.parametrize("name", ["debian 11", "rocky 8.9", "sles 15.6", "ubuntu 25.10"])
def test_another_system_is_refused_with_those_that_are_not(name: str) -> None:
    system = System(*name.split(), "x86_64")  # type: ignore[arg-type]
    with pytest.raises(FleetError, match=rf"{name} .*debian 12, .*almalinux 10"):
        driver_packages(system, LOCKS["580"], H100)


# Kernels


def test_every_installed_kernel_gets_the_headers_that_dkms_builds_with() -> None:
    kernels = (Kernel("6.1.0-40-amd64", running=True), Kernel("6.1.0-41-amd64", newest=True))
    machine = replace(H100, kernels=kernels, kernel_packages=("linux-image-amd64",))
    assert kernel_headers(DEBIAN["12"], machine) == (
        "linux-headers-6.1.0-40-amd64",
        "linux-headers-6.1.0-41-amd64",
        "linux-headers-amd64",
    )


def test_headers_follow_the_flavour_that_follows_new_kernels() -> None:
    """Else the next kernel comes without headers, and boots without a driver."""
    names = (
        "linux-image-6.8.0-90-generic",
        "linux-image-generic-hwe-24.04",
        "linux-image-unsigned-6.8.0-90-generic",
    )
    machine = replace(H100, kernel_packages=names)
    assert kernel_headers(UBUNTU["24.04"], machine) == ("linux-headers-generic-hwe-24.04",)


def test_held_kernels_stay_and_others_are_as_the_operator_left_them() -> None:
    names = ("linux-headers-6.1.0-41-amd64", "linux-image-6.1.0-41-amd64", "linux-image-amd64")
    machine = replace(on(DEBIAN["12"], H100), kernel_packages=names)

    def holds(kernel: str) -> dict[str, bool | None]:
        values = driver_packages(DEBIAN["12"], lock("580.95.05", kernel=kernel), machine).wanted
        found = {each.name: each.hold for each in values if isinstance(each, Package)}
        return {name: found.get(name) for name in names}

    assert holds("held") == dict.fromkeys(names, True)
    assert holds("follow") == dict.fromkeys(names)


def test_headers_of_two_kernels_are_told_apart_where_they_have_one_name() -> None:
    """rpm installs several versions of kernel-devel side by side."""
    rows = "".join(
        f"kernel-devel\tx86_64\t5.14.0-{each}.el9_6\n" for each in ("570.42.2", "570.58.1")
    )
    known, twice = rpm(lambda *_: rows)
    two = CASES["rocky-9-two-kernels"]
    names = kernel_headers(two.system, two.machine)

    assert len(names) == 2
    assert twice == []
    assert all(known[name]["installed"] for name in names)
    changes = [outcome.Change("kernel-devel", None, "5.14.0-570.58.1.el9_6")]
    assert names[1] in outcome.outcome(changes, {})
    assert names[0] not in outcome.outcome(changes, {})


# DCGM


def dcgm(system: System, driver: str, machine: Machine = H100) -> dict[str, str | None]:
    locked = LockedDcgm(version="1:4.5.3-1", exporter="4.8.2-1")
    found = dcgm_packages(system, lock(driver, dcgm=locked), machine).wanted
    return {each.name: each.version for each in found if isinstance(each, Package)}


def test_dcgm_is_for_the_cuda_that_the_driver_serves() -> None:
    assert dcgm(DEBIAN["12"], "580.95.05") == {
        "datacenter-gpu-manager-4-core": "1:4.5.3-1",
        "datacenter-gpu-manager-4-cuda13": "1:4.5.3-1",
        "datacenter-gpu-manager-exporter": "4.8.2-1",
    }
    assert "datacenter-gpu-manager-4-cuda12" in dcgm(DEBIAN["12"], "570.124.06")


def test_old_gpus_need_dcgm_for_cuda_12_beside_that_for_13() -> None:
    names = set(dcgm(DEBIAN["12"], "580.95.05", V100))
    assert {"datacenter-gpu-manager-4-cuda12", "datacenter-gpu-manager-4-cuda13"} <= names


def test_dcgm_for_another_cuda_goes() -> None:
    locked = LockedDcgm(version="1:4.5.3-1", exporter=None)
    found = dcgm_packages(DEBIAN["12"], lock("580.95.05", dcgm=locked), H100).wanted
    patterns = [each for each in found if isinstance(each, NoPackage)]
    assert any(each.matches("datacenter-gpu-manager-4-cuda12") for each in patterns)
    assert not any(each.matches("datacenter-gpu-manager-4-cuda13") for each in patterns)
    assert any(each.matches("datacenter-gpu-manager") for each in patterns)


def test_dcgm_is_refused_where_there_is_none() -> None:
    with pytest.raises(FleetError, match="publishes no DCGM for debian 13"):
        dcgm(DEBIAN["13"], "580.95.05")


def test_dcgm_is_refused_for_a_branch_whose_cuda_is_not_known() -> None:
    with pytest.raises(FleetError, match="R640"):
        dcgm(DEBIAN["12"], "640.10.01")


def test_without_a_lock_of_it_there_is_no_dcgm() -> None:
    assert dcgm_packages(DEBIAN["13"], LOCKS["580"], H100).wanted == ()
