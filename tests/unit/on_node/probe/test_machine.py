"""What the probe says of the machine around the GPUs, on machines that the lab builds.

What must be found is read from the lab's description of the machine, never from the probe.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.on_node.common import linux_facts, package_facts, processes, system
from gpufleet.on_node.common.answers import read
from lab import machine, nvml
from lab.machine.parts import Kernel, Package, Process, Unit, Upgrades, with_nvml_lines, with_unit
from tests.support.record_node import probe, probe_machine

pytestmark = pytest.mark.slow

ACS_BITS = {  # PCI Express base specification, ACS control register
    "source validation": 0x01,
    "translation blocking": 0x02,
    "upstream forwarding": 0x10,
    "direct translated": 0x40,
}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The directory of the simulated libnvidia-ml.so.1."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def found(library):
    """`found("t4x1", uptime=5)`: the document of a profile's machine with other parts."""

    def run(profile, **parts):
        return probe_machine(library, replace(machine.of(profile), **parts))

    return run


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty tree that the probe's parts read instead of this machine."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    return tmp_path


def put(root, name, script):
    """Write a program."""
    at = write(root, f"usr/bin/{name}", f"#!/bin/sh\n{script}\n")
    at.chmod(0o755)


def write(root, path, text):
    """Write a file, and what it lies in."""
    at = root / path
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    at.write_text(text)
    return at


@pytest.mark.parametrize("profile", nvml.profiles())
def test_every_machine_is_described_as_it_is_built(library, profile):
    built = machine.of(profile)

    told = probe_machine(library, built)

    about = told["system"]
    assert told["errors"] == []
    assert told["user"] == {"uid": built.uid}
    assert (about["uptime_seconds"], about["cmdline"]) == (built.uptime, built.cmdline)
    assert about["modules"] == sorted(built.modules)
    assert about["clock"] == {"synchronized": True, "max_error_us": 1200}
    assert (about["shm"]["size_mib"], about["shm"]["free_mib"]) == built.shm
    assert about["memory_available_mib"] == built.memory_available
    assert (about["hugepages"]["total"], about["hugepages"]["free"]) == built.hugepages
    assert about["disks"]["/"]["free_mib"] == built.disks[0].free
    wanted = {name: {"version": p.version, "held": p.held} for name, p in built.packages.items()}
    assert {name: about["packages"].get(name) for name in wanted} == wanted
    for name, unit in built.units.items():
        assert about["units"][name]["load"] == unit.load
        assert about["units"][name]["active"] == unit.active
    assert told["driver"]["disk"]["version"] == built.loaded
    assert told["driver"]["library"]["version"] == built.library.version
    kept = [[round(at, 6), text] for at, text in built.log if re.match("NVRM|nvidia", text)]
    assert [line for line in kept if line not in told["kernel_log"]["lines"]] == []
    assert told["kernel_log"]["complete"] is True


@pytest.mark.parametrize("state", [True, False])
def test_secure_boot_is_what_the_firmware_says(found, state):
    assert found("t4x1", secure_boot=state)["system"]["secure_boot"] is state


def test_a_machine_that_does_not_boot_by_efi_has_no_secure_boot(found):
    assert found("t4x1", secure_boot=None)["system"]["secure_boot"] == {"missing": "absent"}


def test_iommu_groups_are_counted_by_type(found):
    about = found("l40sx8", iommu="DMA-FQ")["system"]["iommu"]

    assert about["groups"] > 8
    assert about["types"] == {"DMA-FQ": about["groups"]}


# --- access control services


def bridges_with(bits):
    """The h100x8 machine with these bits in the ACS control register of every bridge."""
    built = machine.of("h100x8")
    return tuple(
        replace(each, acs=bits) if each.class_code == 0x060400 else each for each in built.functions
    )


@pytest.mark.parametrize("bits", [0x04, 0x08, 0x20, 0x1D, 0x5F])
def test_a_bridge_that_redirects_peer_traffic_is_told(found, bits):
    """P2P request redirect, completion redirect, egress control, alone or among others."""
    told = found("h100x8", functions=bridges_with(bits))["system"]["acs"]

    assert len(told) == 24  # three above each GPU
    assert all(bridge["redirect"] is True for bridge in told)


@pytest.mark.parametrize("bits", [None, 0, *ACS_BITS.values()])
def test_a_bridge_that_checks_without_redirecting_is_not(found, bits):
    told = found("h100x8", functions=bridges_with(bits))["system"]["acs"]

    assert {bridge["redirect"] for bridge in told} == {False}


def test_without_root_nobody_knows_what_bridges_do(found):
    """Linux shows others the first 64 bytes of a function's configuration."""
    assert found("h100x8", uid=1000)["system"]["acs"]["missing"] == "no_permission"


def test_a_bridge_that_fell_off_the_bus_says_nothing_of_the_others(tmp_path):
    """All its bytes read as ones, which would look like an endless list of capabilities."""
    (tmp_path / "config").write_bytes(b"\xff" * 4096)

    assert system.redirects(str(tmp_path)) == {"missing": "lost", "detail": tmp_path.name}


def test_a_list_of_capabilities_that_leads_back_to_itself_ends():
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x100 << 20 | 1).to_bytes(4, "little")

    assert system.acs_control(bytes(circle)) == 0


# --- units and packages


def test_a_unit_is_told_with_how_it_ended(library):
    failed = Unit("loaded", "failed", "failed", "enabled", "exit-code")
    built = with_unit(machine.of("h100x8"), "nvidia-fabricmanager.service", failed)

    units = probe_machine(library, built)["system"]["units"]

    assert units["nvidia-fabricmanager.service"] == {
        "load": "loaded",
        "active": "failed",
        "sub": "failed",
        "enabled": "enabled",
        "result": "exit-code",
    }
    assert units["nvidia-imex.service"]["load"] == "not-found"
    assert units["nvidia-imex.service"]["enabled"] == {"missing": "absent"}


def test_a_held_package_is_told(library):
    built = machine.of("h100x8")
    held = {**built.packages, "nvidia-dkms-570-open": Package("570.124.06-0ubuntu1", held=True)}

    told = probe_machine(library, replace(built, packages=held))["system"]["packages"]

    assert [name for name, package in told.items() if package["held"]] == ["nvidia-dkms-570-open"]


@pytest.mark.parametrize(
    ("installed", "enabled", "wanted"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_upgrades_are_unattended_only_with_package_and_timer(library, installed, enabled, wanted):
    built = machine.of("h100x8")
    packages = {name: p for name, p in built.packages.items() if name != "unattended-upgrades"}
    if installed:
        packages["unattended-upgrades"] = Package("2.9.1")
    upgrades = Upgrades(enabled, ("Ubuntu:noble-security",), ("nvidia-",))

    told = probe_machine(library, replace(built, packages=packages, upgrades=upgrades))

    assert told["system"]["unattended_upgrades"] == {
        "enabled": wanted,
        "origins": ["Ubuntu:noble-security"],
        "blacklist": ["nvidia-"],
    }


def rows(*lines):
    """A script that prints these lines."""
    return "cat <<'END'\n" + "\n".join(lines) + "\nEND"


@pytest.mark.parametrize(
    ("status", "held"),
    [("ii ", False), ("hi ", True), ("iF ", False), ("iU ", False), ("rc ", None), ("un ", None)],
)
def test_a_package_that_left_its_configuration_is_not_installed(tree, status, held):
    """dpkg's letters: what is wanted, then what is; half-configured is there all the same."""
    put(tree, "dpkg-query", rows(f"nvidia-dkms-570\t570.1-1\t{status}"))

    found = package_facts.packages()

    assert found.get("nvidia-dkms-570", {}).get("held") == held


def test_the_first_of_several_architectures_counts(tree):
    put(tree, "dpkg-query", rows("libnvidia-x\t570.1-1\tii ", "libnvidia-x\t535.1-1\tii "))

    assert package_facts.packages() == {"libnvidia-x": {"version": "570.1-1", "held": False}}


def test_dnf_locks_hold_packages(tree):
    put(
        tree,
        "rpm",
        rows(
            "nvidia-driver\t570.124.06-1.el9\tx86_64",
            "kernel-core\t5.14-1\tx86_64",
            "zlib\t1-1\tx86_64",
        ),
    )
    write(tree, "etc/dnf/plugins/versionlock.list", "# mine\nnvidia-driver-3:570.124.06-1.el9.*\n")
    write(tree, "etc/dnf/dnf.conf", "[main]\nexcludepkgs=kernel*\n")

    assert package_facts.packages() == {
        "kernel-core": {"version": "5.14-1", "held": False},
        "nvidia-driver": {"version": "570.124.06-1.el9", "held": True},
    }
    assert package_facts.upgrades()["blacklist"] == ["kernel*"]


@pytest.mark.parametrize(
    ("installed", "timers", "applies", "wanted"),
    [
        (False, ("enabled", "enabled"), "yes", False),
        (True, ("disabled", "disabled"), "yes", False),
        (True, ("enabled", "disabled"), "no", False),  # it only downloads
        (True, ("enabled", "disabled"), "yes", True),
        (True, ("disabled", "enabled"), "no", True),
    ],
)
def test_dnf_upgrades_by_itself_when_a_timer_lets_it(tree, installed, timers, applies, wanted):
    put(tree, "rpm", "true")
    write(tree, "etc/dnf/automatic.conf", f"[commands]\napply_updates = {applies}\n")
    units = dict(zip(("dnf-automatic.timer", "dnf-automatic-install.timer"), timers, strict=True))
    there = {"dnf-automatic": {"version": "4", "held": False}} if installed else {}

    found = package_facts.unattended_upgrade_settings(
        package_facts.upgrades(), there, {name: {"enabled": state} for name, state in units.items()}
    )

    assert found["enabled"] is wanted


def test_a_machine_without_any_package_manager_has_no_packages(tree):
    assert read(package_facts.packages)["missing"] == "no_program"
    assert read(package_facts.upgrades)["missing"] == "no_program"


def test_only_debians_family_says_that_it_wants_a_reboot(found):
    assert found("h100x8", reboot_required=True)["system"]["reboot_required"] is True
    assert found("h100x8", reboot_required=False)["system"]["reboot_required"] is False
    assert found("l40sx8")["system"]["reboot_required"]["missing"] == "not_supported"  # Rocky


# --- the driver on the disk


def test_every_installed_kernel_is_told_with_its_module(found):
    """6.8.0-100 is newer than 6.8.0-90, whatever the alphabet says."""
    driver = found(
        "h100x8",
        kernel="6.8.0-90-generic",
        kernels=(
            Kernel("6.8.0-100-generic", None),
            Kernel("6.8.0-90-generic", "570.124.06", "somebody"),
            Kernel("6.8.0-9-generic", "570.86.15"),
        ),
    )["driver"]

    told = {kernel.pop("kernel"): kernel for kernel in driver["kernels"]}
    assert [name for name, kernel in told.items() if kernel["newest"]] == ["6.8.0-100-generic"]
    assert [name for name, kernel in told.items() if kernel["running"]] == ["6.8.0-90-generic"]
    assert told["6.8.0-100-generic"]["nvidia"]["missing"] == "absent"
    assert told["6.8.0-90-generic"]["signer"] == "somebody"
    assert told["6.8.0-9-generic"]["signer"] == {"missing": "absent"}
    assert driver["disk"]["version"] == "570.124.06"


def test_a_machine_without_modinfo_is_not_one_without_modules(library, tmp_path):
    built = machine.of("h100x8")
    root = machine.write(built, tmp_path / "root")
    (root / "usr/sbin/modinfo").unlink()

    told = probe(library, nvml.profile("h100x8"), sysroot=str(root))["driver"]

    assert told["disk"] == {"missing": "no_program", "detail": "modinfo"}


def test_the_library_is_the_file_that_the_loader_took(library, tmp_path):
    real = tmp_path / "libnvidia-ml.so.570.124.06"
    real.symlink_to(tmp_path / "there/libnvidia-ml.so.570.124.06")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / real.name).write_bytes((library / nvml.SONAME).read_bytes())
    (tmp_path / nvml.SONAME).symlink_to(real.name)

    told = probe(tmp_path, nvml.profile("t4x1"))["driver"]["library"]

    assert told == {"file": str(tmp_path / "there" / real.name), "version": "570.124.06"}


# --- processes


def test_a_process_on_a_gpu_has_a_name_a_unit_and_a_user(library):
    trainer = Process(4242, "python3", "train.service", 1001)
    built = with_nvml_lines(
        replace(machine.of("h100x8"), processes=(trainer,)),
        "gpu.2.proc.0 = 4242,30000,/opt/train.py",
        "gpu.2.graphics.0 = 4343,10,/usr/bin/Xorg",
    )

    gpu = probe_machine(library, built)["gpus"][2]

    (compute,), (graphics,) = gpu["processes"], gpu["graphics_processes"]
    assert (compute["pid"], compute["usedGpuMemory"]) == (4242, 30000 << 20)
    assert (compute["name"], compute["unit"]) == ("python3", "train.service")
    assert compute["uid"] == 1001
    # Not in the probe's /proc, as from another PID namespace.
    assert graphics["unit"] == graphics["uid"] == {"missing": "absent"}


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/vllm-tiny.service\n", "vllm-tiny.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/job.service\n", "job.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/system.slice/vllm-tiny.service/worker/0\n", "vllm-tiny.service"),
        ("4:memory:/x\n1:name=systemd:/system.slice/a.service\n0::/\n", "a.service"),
        ("0::/machine.slice/libpod-1f.scope/container\n", "libpod-1f.scope"),
    ],
)
def test_the_unit_is_the_innermost_one(tree, cgroup, unit):
    write(tree, "proc/7/cgroup", cgroup)

    assert processes.unit(7) == unit


def test_our_own_process_is_as_ps_says():
    own = processes.describe_process(os.getpid(), str)
    by_ps = subprocess.run(
        ["ps", "-o", "ruid=,comm=", "-p", str(os.getpid())],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip

    assert [str(own["uid"]), own["name"]] == by_ps


# --- what the kernel alone knows


def test_the_clock_is_read_as_c_reads_it(tmp_path):
    """The layout of struct timex is the kernel's; a C compiler has it from the header."""
    source = tmp_path / "clock.c"
    source.write_text(
        "#include <stdio.h>\n#include <string.h>\n#include <sys/timex.h>\n"
        "int main(void) { struct timex t; memset(&t, 0, sizeof t); adjtimex(&t);\n"
        'printf("%d %ld", !(t.status & STA_UNSYNC), t.maxerror); return 0; }\n'
    )
    subprocess.run(["gcc", "-o", tmp_path / "clock", source], check=True)
    synchronized, error = subprocess.run(
        [tmp_path / "clock"], capture_output=True, text=True, check=True
    ).stdout.split()

    told = system.clock()

    assert told["synchronized"] == bool(int(synchronized))
    assert abs(told["max_error_us"] - int(error)) <= 5000  # it grows by 500 us a second


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/dev/shm/not/there/yet", "/opt/vllm/not/yet"])
def test_a_disk_is_the_one_that_a_path_will_be_on(path):
    there = Path(path)
    while not there.exists():
        there = there.parent
    by_df = subprocess.run(
        ["df", "-P", "-B1M", there], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1].split()  # fmt: skip

    told = system.disk(path)

    assert told["mount"] == by_df[5]
    assert abs(told["size_mib"] - int(by_df[1])) <= 1
    assert abs(told["free_mib"] - int(by_df[3])) <= 200  # somebody writes meanwhile


def test_the_paths_asked_for_are_told(library):
    told = probe(library, nvml.profile("t4x1"), disks=["/", "/dev/shm/x"])["system"]["disks"]

    assert [told["/"]["mount"], told["/dev/shm/x"]["mount"]] == ["/", "/dev/shm"]


# --- programs that hang, fail, or are somebody else's


@pytest.mark.parametrize(
    ("program", "fact"),
    [
        ("journalctl", ("kernel_log",)),
        ("systemctl", ("system", "units")),
        ("dpkg-query", ("system", "packages")),
        ("apt-config", ("system", "unattended_upgrades")),
        ("modinfo", ("driver", "kernels")),
    ],
)
def test_a_program_that_hangs_costs_its_own_fact_only(library, tmp_path, program, fact):
    """The GPUs do not wait for it; it is gone afterwards, with what it started."""
    root = machine.write(machine.of("h100x8"), tmp_path / "root")
    (root / "usr/sbin/modinfo").rename(root / "usr/bin/modinfo")
    mark = f"61.{os.getpid()}"
    put(root, program, f"sleep {mark}; true")
    if program == "journalctl":
        put(root, "dmesg", f"sleep {mark}; true")
    began = time.monotonic()

    told = probe(library, nvml.profile("h100x8"), sysroot=str(root), seconds={"beside": 1})

    assert time.monotonic() - began < 30  # of the 61 that it would take
    value = told
    for part in fact:
        value = value[part]
    assert value == {"missing": "timeout", "seconds": 1}
    assert all("uuid" in gpu for gpu in told["gpus"])
    others = {"systemctl": "packages"}.get(program, "units")
    assert "missing" not in told["system"][others]
    assert subprocess.run(["pgrep", "-f", f"sleep {mark}"], check=False).returncode == 1


def test_a_program_that_fails_says_in_its_own_words_why(library, tmp_path):
    root = machine.write(machine.of("h100x8"), tmp_path / "root")
    put(root, "dpkg-query", "echo 'dpkg-query: error: the database is locked' >&2; exit 2")

    told = probe(library, nvml.profile("h100x8"), sysroot=str(root))["system"]

    assert told["packages"]["missing"] == "error"
    assert "the database is locked" in told["packages"]["detail"]
    # Without it nobody knows whether unattended-upgrades is there.
    assert told["unattended_upgrades"]["enabled"] == told["packages"]
    assert told["unattended_upgrades"]["blacklist"] != []


def test_programs_get_no_input_and_the_c_locale(library, tmp_path):
    root = machine.write(machine.of("h100x8"), tmp_path / "root")
    put(root, "apt-config", 'cat; echo "Unattended-Upgrade::Package-Blacklist:: \\"$LC_ALL\\";"')

    told = probe(library, nvml.profile("h100x8"), sysroot=str(root))["system"]

    assert told["unattended_upgrades"]["blacklist"] == ["C"]


def test_a_machine_without_systemd_has_no_units(library, tmp_path):
    root = machine.write(machine.of("h100x8"), tmp_path / "root")
    words = "System has not been booted with systemd as init system (PID 1). Can't operate."
    put(root, "systemctl", f'echo "{words}" >&2; exit 1')

    told = probe(library, nvml.profile("h100x8"), sysroot=str(root))

    assert told["system"]["units"]["missing"] == "absent"
    assert told["errors"] == []
