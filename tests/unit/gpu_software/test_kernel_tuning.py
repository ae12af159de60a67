"""A node's kernel: what is wanted, what the program on the node reads and sets, what is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.converge.desired import Absent, File, Unit, UnitGone
from gpufleet.gpu_software import kernel_tuning
from gpufleet.gpu_software.kernel_tuning import SYSCTL, KernelSetting
from gpufleet.remote import payload
from gpufleet.settings.gpu_settings import Gpu, HugePages

STOCK = {
    "kernel/numa_balancing": 1,
    "vm/swappiness": 60,
    "vm/max_map_count": 65530,
    "fs/nr_open": 1 << 30,
    "net/core/somaxconn": 4096,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a node as a distribution leaves it."""
    for name, value in STOCK.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (tmp_path / "etc/sysctl.d").mkdir(parents=True)
    (tmp_path / "usr/lib/sysctl.d").mkdir(parents=True)
    return tmp_path


def ask(root: Path, settings, *, apply: bool = False) -> dict:
    """Run the program that nodes get, over the files of a folder."""
    program = payload.program(
        "converge/sysctl",
        wanted={each.name: [each.value, each.least] for each in settings},
        file=SYSCTL,
        apply=apply,
        sysroot=str(root),
    )
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=program.encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_what_differs_is_set_once_and_what_is_as_good_stays(root):
    wanted = kernel_tuning.kernel_settings(Gpu())
    assert kernel_tuning.changes(wanted, ask(root, wanted)) == (
        "set kernel.numa_balancing = 0 (now 1)",
        "set vm.swappiness = 10 (now 60)",
        "set vm.max_map_count = 1048576 (now 65530)",
    )
    after = ask(root, wanted, apply=True)
    assert kernel_tuning.problems(wanted, after) == ()
    values = {name: int((root / "proc/sys" / name).read_text()) for name in STOCK}
    assert values == {
        "kernel/numa_balancing": 0,
        "vm/swappiness": 10,
        "vm/max_map_count": 1_048_576,
        "fs/nr_open": 1 << 30,
        "net/core/somaxconn": 4096,
    }
    assert kernel_tuning.changes(wanted, ask(root, wanted)) == ()


def test_a_look_changes_nothing(root):
    ask(root, kernel_tuning.kernel_settings(Gpu()))
    assert {name: int((root / "proc/sys" / name).read_text()) for name in STOCK} == STOCK


def test_a_kernel_without_a_setting_is_as_wanted(root):
    """A kernel that was built without NUMA has no balancing to turn off."""
    (root / "proc/sys/kernel/numa_balancing").unlink()
    wanted = kernel_tuning.kernel_settings(Gpu())
    seen = ask(root, wanted, apply=True)
    assert seen["settings"]["kernel.numa_balancing"] == {"absent": True}
    assert kernel_tuning.problems(wanted, seen) == ()


def test_what_cannot_be_read_is_said_and_never_taken_for_well(root):
    (root / "proc/sys/vm/swappiness").write_text("many\n")
    wanted = kernel_tuning.kernel_settings(Gpu())
    (said,) = kernel_tuning.problems(wanted, ask(root, wanted))
    assert said.startswith("vm.swappiness: it could not be read")


def test_what_cannot_be_set_is_said(root):
    """A setting that the kernel shows and nobody may change, not even root."""
    (root / "proc/sys/kernel/cap_last_cap").symlink_to("/proc/sys/kernel/cap_last_cap")
    setting = KernelSetting("kernel.cap_last_cap", 1, "")
    (said,) = kernel_tuning.problems((setting,), ask(root, (setting,), apply=True))
    assert said.startswith("kernel.cap_last_cap: it could not be set to 1")


def test_huge_pages_that_could_not_be_set_aside_need_a_reboot():
    (pages,) = (
        each
        for each in kernel_tuning.kernel_settings(Gpu(huge_pages=HugePages(count=1024)))
        if each.name == "vm.nr_hugepages"
    )
    seen = {"applied": True, "settings": {pages.name: {"value": 200, "later": None}}}
    (said,) = kernel_tuning.problems((pages,), seen)
    assert "the kernel has 200 of these pages" in said
    assert "reboot the node" in said


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("etc/sysctl.d/99-sysctl.conf", True),
        ("usr/lib/sysctl.d/zz-site.conf", True),
        ("etc/sysctl.d/10-site.conf", False),
        ("etc/sysctl.d/99-sysctl.conf.bak", False),
    ],
)
def test_a_file_that_undoes_a_setting_at_boot_is_named(root, file, named):
    """Only one that is read after ours: sysctl.d(5) reads them by name, whatever directory."""
    (root / file).write_text("# site\nkernel/numa_balancing=1\nvm.max_map_count = 2000000\n")
    wanted = kernel_tuning.kernel_settings(Gpu())
    remarks = kernel_tuning.remarks(wanted, ask(root, wanted))
    assert bool(remarks) == named
    assert all(f"/{file} has kernel.numa_balancing = 1" in each for each in remarks)


def test_of_two_files_of_a_name_the_administrators_counts(root):
    (root / "usr/lib/sysctl.d/99-zz.conf").write_text("vm.swappiness = 60\n")
    (root / "etc/sysctl.d/99-zz.conf").write_text("vm.swappiness = 10\n")
    wanted = kernel_tuning.kernel_settings(Gpu())
    assert kernel_tuning.remarks(wanted, ask(root, wanted)) == ()


def test_the_file_for_boot_says_what_the_running_kernel_gets():
    gpu = Gpu(huge_pages=HugePages(count=512))
    (file,) = (
        each for each in kernel_tuning.desired_tuning(gpu, 8).values_of(File) if each.path == SYSCTL
    )
    lines = [line for line in file.content.decode().splitlines() if not line.startswith("#")]
    assert lines == [f"-{each}" for each in kernel_tuning.kernel_settings(gpu)]
    assert "-vm.nr_hugepages = 512" in lines


def test_every_gpu_has_its_device_file_made_before_a_stage_starts():
    wanted = kernel_tuning.desired_tuning(Gpu(), 4)
    files = {each.path: each.content.decode() for each in wanted.values_of(File)}
    unit = files["/etc/systemd/system/gpufleet-gpu-devices.service"]
    assert "ExecStart=/usr/bin/nvidia-modprobe -u -c 0 -c 1 -c 2 -c 3\n" in unit
    assert "After=gpufleet-gpu-devices.service" in files[kernel_tuning.STAGES]
    assert wanted.values_of(Unit) == (Unit(kernel_tuning.DEVICES, running=None),)


def test_without_tuning_nothing_of_ours_stays():
    wanted = kernel_tuning.desired_tuning(Gpu(tuning=False), 8)
    assert kernel_tuning.kernel_settings(Gpu(tuning=False)) == ()
    assert not wanted.values_of(File)
    assert {each.path for each in wanted.values_of(Absent)} == {SYSCTL, kernel_tuning.STAGES}
    assert [each.name for each in wanted.values_of(UnitGone)] == [kernel_tuning.DEVICES]


def test_systemd_takes_the_unit(tmp_path):
    """systemd's own reader finds nothing to complain about but the program that is not here."""
    unit = tmp_path / kernel_tuning.DEVICES
    unit.write_text(kernel_tuning.devices_unit(8))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if kernel_tuning.DEVICES in line]
    assert [line for line in said if "is not executable" not in line] == []
