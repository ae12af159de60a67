"""What is done on which system in which state: the cases of tests/data/golden/packages.

`python -m tests.support.package_cases` writes them anew; the diff is what a change of code does to
nodes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpufleet.converge.desired import DesiredState, Lockstep, NoPackage, Package
from gpufleet.converge.package_commands import commands, files
from gpufleet.converge.package_plan import VERSIONLOCK, packages
from gpufleet.converge.snapshot import PackageState, Snapshot
from gpufleet.gpu_software.driver_packages import dcgm_packages, driver_packages
from gpufleet.gpu_software.repository import (
    VENDOR,
    package_source,
    repository_path,
    vendor_repository,
)
from gpufleet.node.machine import Kernel, Machine, System
from gpufleet.settings.cuda_settings import Repository
from gpufleet.settings.gpu_lock import GpuLock, LockedDcgm
from tests.support.checkout import ROOT

GOLDEN = ROOT / "tests/data/golden/packages"
WIDTH = 100

UBUNTU = {each: System("ubuntu", each, "x86_64") for each in ("22.04", "24.04", "26.04")}
DEBIAN = {each: System("debian", each, "x86_64") for each in ("12", "13")}
ROCKY, ALMA = System("rocky", "9.6", "x86_64"), System("almalinux", "10.0", "x86_64")
SYSTEMS = (*UBUNTU.values(), *DEBIAN.values(), ROCKY, ALMA)

KERNELS = {
    "ubuntu": ("6.8.0-90-generic",),
    "debian": ("6.1.0-41-amd64",),
    "rocky": ("5.14.0-570.42.2.el9_6.x86_64",),
    "almalinux": ("6.12.0-55.9.1.el10_0.x86_64",),
}
H100 = Machine(gpus=(0x2330,) * 8, nvswitch=True)
B200 = Machine(gpus=(0x2901,) * 8, nvswitch=True, nvlink5=True)
GB200 = Machine(gpus=(0x2941,) * 4, imex=True, grace=True)
L40S = Machine(gpus=(0x26B9,) * 8)
V100 = Machine(gpus=(0x1DB5,) * 8)
# A driver of Ubuntu's own archive, whose modules Canonical has built and signed.
ARCHIVE = (
    "libnvidia-cfg1-570-server",
    "libnvidia-compute-570-server",
    "linux-modules-nvidia-570-server-open-6.8.0-90-generic",
    "linux-objects-nvidia-570-server-open-6.8.0-90-generic",
    "nvidia-compute-utils-570-server",
    "nvidia-fabricmanager-570",
    "nvidia-firmware-570-server-570.195.03",
    "nvidia-headless-570-server-open",
    "nvidia-kernel-common-570-server",
    "nvidia-kernel-source-570-server-open",
    "nvidia-utils-570-server",
)


@dataclass(frozen=True)
class Case:
    """A node's system and machine, what it shall run, and the packages that it has."""

    name: str
    system: System
    lock: GpuLock
    machine: Machine = H100
    installed: Mapping[str, str] = field(default_factory=dict)
    held: bool = True


def lock(driver: str, **more: object) -> GpuLock:
    return GpuLock.model_validate({"driver": driver, **more})


def on(system: System, machine: Machine) -> Machine:
    """The machine with the kernel that its system has, unless it has kernels already."""
    if machine.kernels:
        return machine
    *older, newest = KERNELS[system.id]
    kernels = (*map(Kernel, older), Kernel(newest, running=True, newest=True))
    return replace(machine, kernels=kernels)


def wanted(case: Case) -> DesiredState:
    machine = on(case.system, case.machine)
    repository = Repository(
        url=f"{VENDOR}/{repository_path(case.system)}",
        keyring="D42D0685.pub" if case.system.is_red_hat else "cuda-keyring_1.1-1_all.deb",
        keyring_sha256=vendor_repository(case.system).keyring_sha256 or "0" * 64,
    )
    found = driver_packages(case.system, case.lock, machine).wanted
    found += dcgm_packages(case.system, case.lock, machine).wanted
    return DesiredState(package_source(repository), *found)


def has(system: System, driver: GpuLock, machine: Machine = H100) -> dict[str, str]:
    """The packages of a node that runs a lock, with the revisions that the vendor gives them."""
    if system.is_red_hat:
        revision = f"1.el{system.major}"
    else:
        branched = int(driver.branch) < 590
        revision = {"debian": "1", "ubuntu": "0ubuntu1" if branched else "1ubuntu1"}[system.id]
    epoch = "3:" if system.is_red_hat else ""
    names = [
        each
        for each in driver_packages(system, driver, on(system, machine)).wanted
        if isinstance(each, Package)
    ]
    return {
        each.name: f"{epoch}{driver.driver}-{revision}"
        if each.version and each.name != "nvlsm"
        else "1.0-1"
        for each in names
    }


def snapshot(case: Case) -> Snapshot:
    """What the node would say of what is wanted."""
    values = wanted(case)
    names = [VERSIONLOCK, *(each.name for each in values.values_of(Package))]
    names += [name for lockstep in values.values_of(Lockstep) for name in lockstep.names]
    patterns = [each.pattern for each in values.values_of(NoPackage)]
    matched = {
        pattern: frozenset(
            name
            for name in case.installed
            if NoPackage(pattern).matches(name)
        )
        for pattern in patterns
    }  # fmt: skip
    return Snapshot(
        package_manager="dnf" if case.system.is_red_hat else "apt",
        packages={
            name: PackageState(case.installed[name], installed=True, held=case.held)
            if name in case.installed
            else None
            for name in names
        },
        packages_like=matched,
        streams={"nvidia-driver": None},
    )


def rendered(case: Case) -> str:
    """The decisions, the changes and every command line of one case."""
    machine = on(case.system, case.machine)
    found = packages(wanted(case), snapshot(case))
    why = (
        *driver_packages(case.system, case.lock, machine).why,
        *dcgm_packages(case.system, case.lock, machine).why,
    )
    parts = [f"# {case.name}: {case.system}", "", *(f"why: {each}" for each in why), ""]
    parts += [f"change: {each}" for each in found.changes] or ["change: none"]
    parts += [f"problem: {each}" for each in found.problems]
    if found.plan:
        for name, text in files(found.plan).items():
            if "source" in name or "repo" in name:
                parts += ["", f"## {name}", text.rstrip()]
        parts += ["", "## commands", *(_folded(argv) for argv in commands(found.plan))]
    return "\n".join(parts) + "\n"


def _folded(argv: tuple[str, ...]) -> str:
    """A command line, its words wrapped as a shell would take them."""
    rows, row = [], ""
    for word in map(shlex.quote, argv):
        if row and len(row) + len(word) > WIDTH - 3:
            rows.append(row)
            row = "   "
        row = f"{row} {word}" if row else word
    return " \\\n".join([*rows, row])


def _cases() -> list[Case]:
    old, new = lock("580.178.04"), lock("595.91.07")
    every = [
        case
        for system in SYSTEMS
        for name in [f"{system.id}-{system.major}"]
        for case in (
            Case(f"{name}-bare", system, lock("580.95.05")),
            Case(f"{name}-patch", system, old, installed=has(system, lock("580.95.05"))),
            Case(f"{name}-branch-up", system, new, installed=has(system, old)),
            Case(f"{name}-branch-down", system, old, installed=has(system, new)),
        )
    ]
    debian, ubuntu = DEBIAN["12"], UBUNTU["24.04"]
    open_, closed = lock("580.95.05"), lock("580.95.05", modules="proprietary")
    dcgm = LockedDcgm(version="1:4.5.3-1", exporter="4.8.2-1")
    archive = dict.fromkeys(ARCHIVE, "570.195.03-0ubuntu0.24.04.1")
    two = tuple(Kernel(f"5.14.0-{each}.el9_6.x86_64", running=i == 0, newest=i == 1)
                for i, each in enumerate(("570.42.2", "570.58.1")))  # fmt: skip
    special = [
        Case("debian-12-no-change", debian, open_, installed=has(debian, open_)),
        Case("debian-12-without-nvswitch", debian, open_, L40S),
        Case("debian-12-any-of-a-branch", debian, lock("580"), installed=has(debian, old)),
        Case("debian-12-to-proprietary", debian, closed, V100, has(debian, open_, V100)),
        Case("debian-12-last-branch", debian, lock("615.71.09"), installed=has(debian, new)),
        Case("ubuntu-24.04-nvlink5", ubuntu, lock("580.95.05", nvlsm="2025.06.11-1"), B200),
        Case("ubuntu-24.04-rack", replace(ubuntu, arch="aarch64"), lock("580.105.08"), GB200),
        Case("ubuntu-24.04-dcgm", ubuntu, lock("580.95.05", dcgm=dcgm), L40S, has(ubuntu, open_)),
        Case("ubuntu-24.04-from-its-archive", ubuntu, open_, installed=archive, held=False),
        Case("ubuntu-24.04-to-open", ubuntu, open_, installed=has(ubuntu, closed)),
        Case("ubuntu-24.04-to-open-unbranched", ubuntu, new,
             installed=has(ubuntu, lock("595.91.07", modules="proprietary"))),
        Case("ubuntu-22.04-from-570", UBUNTU["22.04"], open_,
             installed=has(UBUNTU["22.04"], lock("570.124.06"))),
        Case("rocky-9-two-kernels", ROCKY, open_, replace(L40S, kernels=two)),
        Case("rocky-9-to-proprietary", ROCKY, closed, V100, has(ROCKY, open_, V100)),
    ]  # fmt: skip
    return every + special


CASES = {case.name: case for case in _cases()}


def main() -> None:
    """Write every case; files of cases that are gone go."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for stale in GOLDEN.glob("*.txt"):
        stale.unlink()
    for name, case in CASES.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        (GOLDEN / f"{name}.txt").write_text(rendered(case))


if __name__ == "__main__":
    main()
