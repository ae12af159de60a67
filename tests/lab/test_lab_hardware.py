"""A lab node shows its machine to ordinary programs, and can be broken and mended while it runs.

What is asserted is read in the node with cat, lspci, modinfo, journalctl, systemctl, dpkg-query and
the like, not with the lab's code and not with the probe.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from lab.active_faults import Broken
from lab.nodes import Lab
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfhw")
HGX, PCIE = "gpu-01", "gpu-02"
NODES = {HGX: "h100x8", PCIE: "a100x4-pcie"}
STATE = Path("/var/lib/gpufleet-lab")
DRIVER = "570.124.06"  # of lab/profiles/h100x8.conf
GPU = "0000:18:00.0"  # its first one

# Asks NVML for GPU 0's persistence mode, or switches it.
PERSISTENCE = """python3 -c '
import ctypes, sys
nvml, gpu, mode = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_int()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
[nvml.nvmlDeviceSetPersistenceMode(gpu, int(wanted)) for wanted in sys.argv[1:]]
nvml.nvmlDeviceGetPersistenceMode(gpu, ctypes.byref(mode))
print(mode.value)' """
COUNT_GPUS = """python3 -c '
import ctypes
nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
print(nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value)'"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("lab nodes need root: they are made of mounts, namespaces and interfaces")
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a test run that was killed has left
    lab.up(NODES)
    yield lab
    lab.purge()


@pytest.fixture(autouse=True)
def _mended(lab: Lab) -> Iterator[None]:
    yield
    for node in NODES:
        lab.clear(node)


def ssh(node: str, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", STATE / LAB_ID / "ssh_config", node, command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def said(node: str, command: str) -> str:
    """Return what a command prints on a node where it succeeds."""
    done = ssh(node, command)
    assert done.returncode == 0, f"{node}: {command}: {done.stderr}"
    return done.stdout.strip()


# -- a healthy node --------------------------------------------------------------------------------


def test_the_pci_bus_is_the_profiles(lab: Lab) -> None:
    """Eight GPUs with their driver and four NVSwitches; this machine's own devices are not seen."""
    bus = said(HGX, "lspci -D -k")
    gpus = re.findall(
        r"^(\S+) 3D controller: NVIDIA.*\n\tKernel driver in use: (\w+)", bus, re.MULTILINE
    )
    assert len(gpus) == 8
    assert gpus[0] == (GPU, "nvidia")
    assert len(re.findall(r"^\S+ Bridge: NVIDIA", bus, re.MULTILINE)) == 4
    assert "Virtio" not in bus
    assert len(re.findall("3D controller: NVIDIA", said(PCIE, "lspci"))) == 4


def test_the_driver_is_loaded_and_on_the_disk_in_one_version(lab: Lab) -> None:
    assert f"  {DRIVER}  " in said(HGX, "cat /proc/driver/nvidia/version")
    assert said(HGX, "cat /sys/module/nvidia/version /sys/module/nvidia/initstate") == (
        f"{DRIVER}\nlive"
    )
    assert len(said(HGX, "ls /proc/driver/nvidia/gpus").split()) == 8
    assert said(HGX, "modinfo -F version nvidia") == DRIVER
    assert said(HGX, "modinfo -F vermagic nvidia").split()[0] == platform.release()
    assert "key" in said(HGX, "modinfo -F signer nvidia")
    library = said(HGX, "readlink -f /usr/lib/*/libnvidia-ml.so.1")
    assert library.endswith(f"libnvidia-ml.so.{DRIVER}")


def test_the_kernels_log_is_in_the_journal_of_this_boot(lab: Lab) -> None:
    """The node's own journalctl finds it, and finds the file sound."""
    log = said(HGX, "journalctl -k -b --no-pager -o short-monotonic")
    assert f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}" in log
    assert f"Linux version {platform.release()}" in log.splitlines()[0]
    times = [float(line[1:].split("]")[0]) for line in log.splitlines()]
    assert times == sorted(times)
    assert times[-1] <= float(said(HGX, "cut -d' ' -f1 /proc/uptime"))
    checked = ssh(HGX, "journalctl --verify --file /var/log/journal/*/kernel.journal")
    assert checked.returncode == 0, checked.stderr


def test_units_and_packages_are_there(lab: Lab) -> None:
    """HGX boards have a fabric manager of the driver's version, which runs; PCIe boards none."""
    fabric_manager = "nvidia-fabricmanager.service"
    shown = said(
        HGX, f"systemctl show -P ActiveState -P SubState -P UnitFileState {fabric_manager}"
    )
    assert shown.split() == ["active", "running", "enabled"]
    assert said(HGX, "dpkg-query -W -f '${Version}' nvidia-fabricmanager-570") == f"{DRIVER}-1"
    assert said(PCIE, f"systemctl show -P LoadState {fabric_manager}") == "not-found"
    for node in NODES:
        assert said(node, "systemctl is-system-running --wait") == "running"
        assert said(node, "dpkg --audit && apt-get -qq check") == ""


def test_memory_rdma_and_firmware_are_the_machines(lab: Lab) -> None:
    assert int(said(HGX, "free -g | awk '/^Mem:/ {print $2}'")) > 1900
    assert int(said(HGX, "df -BG --output=size /dev/shm | tail -1").rstrip("G")) > 900
    ports = said(HGX, "cat /sys/class/infiniband/*/ports/1/state").splitlines()
    assert ports == ["4: ACTIVE"] * 8
    assert ssh(PCIE, "ls /sys/class/infiniband").returncode == 2, "it has no RDMA device"
    assert "iommu=pt" in said(HGX, "cat /proc/cmdline")
    assert said(HGX, "timedatectl show -p NTPSynchronized --value") == "yes"


def test_what_is_not_simulated_is_real(lab: Lab) -> None:
    """The network, processors, processes and disks are reached through the same directories."""
    mac = "cat /sys/class/net/eth0/address && ip -br link show eth0 | awk '{print $3}'"
    assert len(set(said(HGX, mac).split())) == 1
    assert said(HGX, "readlink -f /sys/class/net/eth0") == "/sys/devices/virtual/net/eth0"
    online = Path("/sys/devices/system/cpu/online").read_text().strip()
    assert said(HGX, "cat /sys/devices/system/cpu/online") == online
    assert said(HGX, "cat /proc/1/comm") == "systemd"
    disks = sorted(path.name for path in Path("/sys/block").iterdir())
    assert said(HGX, "ls /sys/block").split() == disks
    assert said(HGX, "cat /sys/block/*/size").split() == [
        (Path("/sys/block") / name / "size").read_text().strip() for name in disks
    ]


def test_a_node_boots_with_its_own_boot_id(lab: Lab) -> None:
    """It is new at each boot, and the one that its journal files entries under."""
    ask = "cat /proc/sys/kernel/random/boot_id"
    before = said(PCIE, ask)
    lab.power(PCIE, "cycle")
    now = said(PCIE, ask)
    assert now != before
    assert now.replace("-", "") == said(PCIE, "journalctl --list-boots").splitlines()[-1].split()[1]
    assert said(PCIE, "journalctl -k -b -o cat | grep -c 'Linux version'") == "1"


def test_what_an_administrator_does_with_the_software_stays(lab: Lab) -> None:
    """Delivered software is the node's own: it is not put back at the next boot, nor by `up`."""
    said(HGX, "apt-mark hold nvidia-utils-570 && dpkg --remove nvidia-dkms-570-open")
    said(HGX, "systemctl -q disable nvidia-fabricmanager")
    lab.power(HGX, "cycle")
    lab.up()
    assert said(HGX, "apt-mark showhold") == "nvidia-utils-570"
    assert ssh(HGX, "dpkg-query -W nvidia-dkms-570-open").returncode == 1
    assert said(HGX, "systemctl show -P ActiveState nvidia-fabricmanager") == "inactive"
    said(HGX, "systemctl -q enable --now nvidia-fabricmanager")


# -- faults ----------------------------------------------------------------------------------------

BLACKLIST = "apt-config dump | grep -c 'Package-Blacklist:: ' || true"
# The control register of ACS (its low byte), where lab/machine/tree.py has that capability.
BRIDGE = "od -An -tu1 -j334 -N1 /sys/bus/pci/devices/0000:14:01.0/config | tr -d ' '"
EFI = "od -An -tu1 -j4 /sys/firmware/efi/efivars/SecureBoot-*"
MANAGER = "systemctl show -p ActiveState,Result nvidia-fabricmanager | sort | paste -sd' '"
RUNS, DIED = "ActiveState=active Result=success", "ActiveState=failed Result=signal"
XIDS = "journalctl -k -b -o cat | grep -c Xid || true"

# Fault, GPU, a command, what it prints on a healthy node and on the broken one.
SEEN = [
    ("gpu-missing", 3, COUNT_GPUS, "0 0 8", "0 0 7"),
    ("nvml-unknown", None, COUNT_GPUS, "0 0 8", "999 1 0"),
    ("no-library", None, "ls /usr/lib/*/libnvidia-ml.so.1 | wc -l", "1", "0"),
    ("no-driver", None, "ls /proc/driver", "nvidia", ""),
    ("nouveau", None, f"lspci -k -s {GPU} | awk '/driver/ {{print $5}}'", "nvidia", "nouveau"),
    ("nouveau", None, "lsmod | grep -o '^n[ov][a-z]*' | sort -u | paste -sd' '", "nvidia nvme",
     "nouveau nvme"),
    ("module-differs", None, "modinfo -F version nvidia", DRIVER, "570.211.01"),
    ("kernel-without-module", None, "ls /lib/modules | wc -l; ls /run | grep -c reboot-r || true",
     "1\n0", "2\n2"),
    ("module-unsigned", None, "modinfo -F signer nvidia | wc -l", "1", "0"),
    ("secure-boot-unsigned", None, EFI, "0", "1"),
    ("unattended-upgrades-on", None, BLACKLIST, "3", "0"),
    ("fabric-not-started", None, MANAGER, RUNS, "ActiveState=inactive Result=success"),
    ("fabric-stale", None, MANAGER, RUNS, DIED),
    ("fabric-manager-version", None, "dpkg-query -W -f '${Version}' nvidia-fabricmanager-570",
     f"{DRIVER}-1", "570.211.01-1"),
    ("xid-79", 2, XIDS, "0", "1"),
    ("sxid-fatal", None, "journalctl -k -b -o cat | grep -c SXid || true", "0", "2"),
    ("log-unreadable", None, "journalctl -k -b -q -o cat | grep -c NVRM || true", "1", "0"),
    ("acs-on", None, BRIDGE, "1", "29"),
    ("disk-full", None, "df -BM --output=avail / | tail -1 | grep -cx ' *700M' || true", "0", "1"),
    ("clock-unsynced", None, "timedatectl show -p NTPSynchronized --value", "yes", "no"),
    ("shm-small", None, "df -BM --output=size /dev/shm | tail -1 | grep -cx ' *64M' || true",
     "0", "1"),
    ("memory-low", None, "awk '/MemAvailable/ {print $2 < 30e6}' /proc/meminfo", "0", "1"),
    ("rdma-down", 0, "cat /sys/class/infiniband/*/ports/1/state | sort -u", "4: ACTIVE",
     "1: DOWN\n4: ACTIVE"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "gpu", "command", "prints"),
    [(*row[:3], row[3:]) for row in SEEN],
    ids=[row[0] for row in SEEN],
)
def test_a_fault_is_seen_at_once_and_gone_when_it_is_cleared(
    lab: Lab, fault: str, gpu: int | None, command: str, prints: tuple[str, str]
) -> None:
    healthy, broken = prints
    assert said(HGX, command) == healthy
    lab.fault(HGX, fault, gpu)
    assert said(HGX, command) == broken
    lab.clear(HGX)
    assert said(HGX, command) == healthy
    assert said(HGX, "systemctl is-system-running --wait") == "running"


def test_faults_add_up_and_last_through_reboots_until_they_are_cleared(lab: Lab) -> None:
    """Through a power cycle, the node's own reboot and `up`; `status` shows them."""
    ask = f"{MANAGER}; {XIDS}; cat /sys/class/infiniband/mlx5_0/ports/1/state; ls /run/reboot-r*"
    wrong = f"{DIED}\n1\n1: DOWN\n/run/reboot-required\n/run/reboot-required.pkgs"
    faults = ("fabric-stale", "xid-79", "rdma-down", "kernel-without-module")
    for fault in faults:
        lab.fault(HGX, fault)
    assert said(HGX, ask) == wrong

    lab.power(HGX, "cycle")
    assert said(HGX, ask) == wrong

    before = said(HGX, "cat /proc/sys/kernel/random/boot_id")
    ssh(HGX, "systemctl reboot")
    deadline = time.monotonic() + 30
    while ssh(HGX, "cat /proc/sys/kernel/random/boot_id").stdout.strip() in ("", before):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    said(HGX, "systemctl is-system-running --wait || true")
    assert said(HGX, ask) == wrong

    lab.up()
    assert said(HGX, ask) == wrong
    assert [each.fault for each in lab.status()[0].faults] == list(faults)
    assert lab.status()[1].faults == ()

    lab.clear(HGX)
    assert said(HGX, f"{MANAGER}; {XIDS}; ls /run/reboot-r* 2>/dev/null | wc -l") == (
        f"{RUNS}\n0\n0"
    )
    assert lab.status()[0].faults == ()


def test_a_node_that_is_off_is_broken_when_it_comes_up(lab: Lab) -> None:
    lab.power(PCIE, "off")
    lab.fault(PCIE, "shm-small")
    lab.power(PCIE, "on")
    assert said(PCIE, "df -BM --output=size /dev/shm | tail -1").strip() == "64M"


def test_a_fault_outweighs_what_a_setter_did_and_a_setter_repairs_it(lab: Lab) -> None:
    assert said(HGX, f"{PERSISTENCE} 1") == "1"
    lab.fault(HGX, "persistence-off")
    assert said(HGX, PERSISTENCE) == "0"
    assert said(HGX, f"{PERSISTENCE} 1") == "1"


def test_other_hardware_needs_the_node_to_be_off(lab: Lab) -> None:
    """A profile that is exchanged is another machine: it boots, and faults it cannot have go."""
    lab.fault(PCIE, "nvlink-dead-link")
    lab.fault(PCIE, "memory-low")
    boot = said(PCIE, "cat /proc/sys/kernel/random/boot_id")
    lab.up({**NODES, PCIE: "t4x1"})
    assert said(PCIE, "cat /proc/sys/kernel/random/boot_id") != boot
    assert len(re.findall("3D controller: NVIDIA", said(PCIE, "lspci"))) == 1
    assert lab.faults(PCIE) == (Broken("memory-low"),)
    lab.up(NODES)
    assert len(re.findall("3D controller: NVIDIA", said(PCIE, "lspci"))) == 4


REFUSED = [
    ("xid-97", None, "xid-79"),  # no such fault: near ones are named
    ("fabric-stale", None, "a100x4-pcie cannot have"),
    ("shm-small", 2, "omit --gpu"),
    ("hot", 4, "0 to 3"),
    ("log-wrapped", None, "A live node cannot have the fault"),
]


@pytest.mark.parametrize(("fault", "gpu", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_fault_that_cannot_be_is_refused_and_nothing_changes(
    lab: Lab, fault: str, gpu: int | None, words: str
) -> None:
    with pytest.raises(FleetError, match=words):
        lab.fault(PCIE, fault, gpu)
    assert lab.faults(PCIE) == ()


@pytest.mark.parametrize("seconds", [0.35, 0.45, 0.55, 0.65])
def test_a_fault_whose_command_was_killed_is_there_or_not_but_never_half(
    lab: Lab, seconds: float
) -> None:
    """After `up`, what the node shows is what is remembered, whenever the kill came."""
    command = [sys.executable, "-m", "lab", "--id", LAB_ID, "fault", HGX, "fabric-stale"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    lab.up()
    there = lab.faults(HGX) != ()
    assert said(HGX, MANAGER) == (DIED if there else RUNS)


def test_the_command_says_what_it_did(lab: Lab) -> None:
    """`gpufleet lab fault`: on, listed, refused with status 2, cleared."""

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lab", "--id", LAB_ID, "fault", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert typed(HGX, "nvlink-dead-link", "--gpu", "3").stdout == (
        "gpu-01: nvlink-dead-link (GPU 3): one NVLink is down\n"
    )
    assert json.loads((STATE / LAB_ID / f"nodes/{HGX}/faults.json").read_text())
    assert "on " in typed(HGX, "--list").stdout
    assert "fabric-stale" not in typed(PCIE, "--list").stdout
    refused = typed(HGX, "nvlink-dead")
    assert refused.returncode == 2
    assert "nvlink-dead-link" in refused.stderr
    assert typed(HGX, "--clear").stdout == "gpu-01: nvlink-dead-link (GPU 3) is cleared\n"
