"""A driver on a node that came without one: installed, loaded, changed and lost as on a server.

What is asserted is read on the node with ordinary tools: apt, dpkg, modinfo, lsmod, the C library.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from lab import vendor
from lab.nodes import Lab
from lab.vendor import driver, kernels, states
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfm")
SWITCHED, PLAIN = "gpu-01", "gpu-02"
NODES = {SWITCHED: "h100x8", PLAIN: "a100x4-pcie"}
STATE = Path("/var/lib/gpufleet-lab")
OLD, NEW, NEXT = driver.VERSIONS[0], driver.VERSIONS[1], driver.VERSIONS[2]
NOT_LOADED, MISMATCH = 9, 18

PARTS = (
    *("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1"),
    *("nvidia-modprobe", "nvidia-smi", "nvidia-persistenced", "nvidia-fabricmanager"),
)
DAEMONS = ("nvidia-persistenced", "nvidia-fabricmanager")

OPENS = """python3 -c '
import ctypes
print(ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2())'"""

NO_NOUVEAU = "echo blacklist nouveau > /etc/modprobe.d/no-nouveau.conf"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("lab nodes need root: they are made of mounts, namespaces and interfaces")
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a test run that was killed has left
    lab.up(NODES, without_driver=NODES)
    vendor.build(lab.state, lab.facts.mirror_url)
    for node in NODES:
        source = f"deb [signed-by=/usr/share/keyrings/gpufleet-lab.gpg] {lab.facts.mirror_url}"
        ssh(node, f"echo '{source}/vendor/ /' > /etc/apt/sources.list.d/vendor.list")
        ssh(node, "apt-get update -qq")
    yield lab
    lab.purge()


def ssh(node: str, command: str, *, check: bool = True, limit: float = 120) -> str:
    """Run a command on a node; return what it printed on both streams."""
    done = subprocess.run(
        ["ssh", "-F", STATE / LAB_ID / "ssh_config", node, f"exec 2>&1; {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def install(node: str, version: str, *, check: bool = True) -> str:
    wanted = shlex.join(f"{name}={version}-1" for name in PARTS)
    return ssh(node, f"apt-get install -y -q --allow-downgrades {wanted}", check=check)


def reboot(lab: Lab, node: str) -> None:
    """Boot the node anew as an administrator would, and wait until it answers."""
    before = ssh(node, "cat /proc/sys/kernel/random/boot_id")
    ssh(node, "systemctl reboot", check=False)
    deadline = time.monotonic() + 60
    while ssh(node, "cat /proc/sys/kernel/random/boot_id", check=False) in ("", before):
        assert time.monotonic() < deadline, f"{node} did not come back"
        time.sleep(0.3)


def opens(node: str) -> int:
    return int(ssh(node, OPENS))


def loaded(node: str) -> str:
    return ssh(node, "cat /sys/module/nvidia/version 2> /dev/null || echo none")


def on_disk(node: str, kernel: str = platform.release()) -> str:
    return ssh(node, f"modinfo -k {kernel} -F version nvidia 2> /dev/null || true")


def unload(node: str) -> None:
    ssh(node, f"systemctl stop {' '.join(DAEMONS)}")
    ssh(node, "rmmod nvidia_uvm; rmmod nvidia", check=False)
    assert loaded(node) == "none"


@pytest.fixture
def running(lab: Lab) -> str:
    """The node with NVSwitches; the old driver is installed and loaded."""
    states.put(lab.state / "vendor", states.GOOD)
    ssh(SWITCHED, "apt-get update -qq; rm -f /etc/gpufleet-lab/dkms-fails")
    ssh(SWITCHED, f"{NO_NOUVEAU}; dpkg --configure -a", check=False)
    if f"{OLD}-1" not in ssh(SWITCHED, "dpkg-query -W libnvidia-ml1", check=False):
        install(SWITCHED, OLD)
    if loaded(SWITCHED) != OLD:
        unload(SWITCHED)
        ssh(SWITCHED, "modprobe nvidia")
    return SWITCHED


# -- as it is handed over --------------------------------------------------------------------------


def test_a_node_is_handed_over_with_gpus_and_without_software_for_them(lab: Lab) -> None:
    ssh(PLAIN, "! command -v nvidia-smi; ! ls /usr/lib/*/libnvidia-ml* /dev/nvidia*")
    assert ssh(PLAIN, "lspci -d 10de: | wc -l") == "4"
    assert ssh(PLAIN, "lspci -k -d 10de: | grep -c nouveau") == "4"
    assert "not found in directory" in ssh(PLAIN, "modprobe nvidia", check=False)


@pytest.mark.long
def test_nouveau_keeps_the_gpus_until_it_is_blacklisted_and_the_node_booted(lab: Lab) -> None:
    """Neither a module on the disk nor the blacklist alone changes what is loaded."""
    install(PLAIN, OLD)

    assert "could not insert 'nvidia': No such device" in ssh(PLAIN, "modprobe nvidia", check=False)
    assert "in use" in ssh(PLAIN, "rmmod nouveau", check=False)
    ssh(PLAIN, NO_NOUVEAU)
    assert opens(PLAIN) == NOT_LOADED

    reboot(lab, PLAIN)

    assert loaded(PLAIN) == OLD
    assert opens(PLAIN) == 0
    assert "nouveau" not in ssh(PLAIN, "lsmod")
    assert ssh(PLAIN, "lspci -k -d 10de: | grep -c 'in use: nvidia'") == "4"


@pytest.mark.long
def test_a_fabric_manager_without_switches_does_not_run(lab: Lab) -> None:
    ssh(PLAIN, f"apt-get install -y -q nvidia-fabricmanager={OLD}-1 --allow-downgrades")

    ssh(PLAIN, "systemctl start nvidia-fabricmanager; sleep 1")

    assert ssh(PLAIN, "systemctl is-active nvidia-fabricmanager", check=False) == "failed"
    assert "NV_WARN_NOTHING_TO_DO" in ssh(PLAIN, "journalctl -u nvidia-fabricmanager")


# -- loading and unloading -------------------------------------------------------------------------


def test_a_new_driver_is_in_force_only_after_it_was_loaded(running: str) -> None:
    """Until then the library is one version and the module another: 18, and nothing else."""
    assert opens(running) == 0

    install(running, NEW)

    assert (on_disk(running), loaded(running)) == (NEW, OLD)
    assert opens(running) == MISMATCH
    assert "Driver/library version mismatch" in ssh(running, "nvidia-smi", check=False)
    unload(running)
    assert opens(running) == NOT_LOADED
    ssh(running, "modprobe nvidia")
    assert (loaded(running), opens(running)) == (NEW, 0)
    assert NEW in ssh(running, "cat /proc/driver/nvidia/version")


def test_a_boot_loads_what_is_on_the_disk(lab: Lab, running: str) -> None:
    install(running, NEW)

    reboot(lab, running)

    assert (loaded(running), opens(running)) == (NEW, 0)


@pytest.mark.long
def test_a_power_cut_loses_what_was_loaded_and_nothing_else(lab: Lab, running: str) -> None:
    install(running, NEW)

    lab.power(running, "cycle")

    assert (loaded(running), on_disk(running), opens(running)) == (NEW, NEW, 0)


@pytest.mark.parametrize("device", ["nvidiactl", "nvidia3"])
def test_a_module_is_not_unloaded_under_a_program_that_holds_its_device(
    running: str, device: str
) -> None:
    ssh(running, f"systemctl stop {' '.join(DAEMONS)}; rmmod nvidia_uvm; nvidia-modprobe")
    ssh(running, f"systemd-run -q --unit=holder sh -c 'exec sleep 1000 3< /dev/{device}'")
    time.sleep(0.5)

    assert "Module nvidia is in use" in ssh(running, "rmmod nvidia", check=False)
    assert opens(running) == 0

    ssh(running, "systemctl stop holder")
    ssh(running, "rmmod nvidia")
    assert loaded(running) == "none"


@pytest.mark.long
def test_whoever_has_the_library_open_holds_the_driver(running: str) -> None:
    ssh(running, f"systemctl stop {' '.join(DAEMONS)}; rmmod nvidia_uvm", check=False)
    program = 'import ctypes, time; ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2(); time.sleep(999)'
    ssh(running, f"systemd-run -q --unit=client python3 -c '{program}'")
    time.sleep(1)

    assert "Module nvidia is in use" in ssh(running, "rmmod nvidia", check=False)

    ssh(running, "systemctl stop client; rmmod nvidia")


@pytest.mark.long
def test_modules_go_in_the_order_in_which_they_need_each_other(running: str) -> None:
    ssh(running, "nvidia-modprobe -c0 -u")
    ssh(running, f"systemctl stop {' '.join(DAEMONS)}; test -e /dev/nvidia-uvm")

    refused = ssh(running, "rmmod nvidia", check=False)
    ssh(running, "rmmod nvidia_uvm nvidia")

    assert "in use by: nvidia_uvm" in refused
    assert loaded(running) == "none"


@pytest.mark.long
def test_other_modules_are_kmods_own_business(running: str) -> None:
    assert "not found in directory" in ssh(running, "modprobe dm_crypt", check=False)
    assert "insmod" in ssh(running, "modprobe --show-depends nvidia")


@pytest.mark.long
def test_options_are_those_that_the_module_was_loaded_with(running: str) -> None:
    options = "options nvidia NVreg_RestrictProfilingToAdminUsers=0"
    ssh(running, f"echo {options} > /etc/modprobe.d/options.conf")
    shown = "cat /proc/driver/nvidia/params"

    before = ssh(running, shown)
    unload(running)
    ssh(running, "modprobe nvidia")

    assert "RestrictProfilingToAdminUsers" not in before
    assert "RestrictProfilingToAdminUsers: 0" in ssh(running, shown)
    ssh(running, "rm /etc/modprobe.d/options.conf")


# -- daemons ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_fabric_manager_of_another_version_does_not_run(running: str) -> None:
    ssh(running, "systemctl restart nvidia-fabricmanager; sleep 1")
    assert ssh(running, "systemctl is-active nvidia-fabricmanager") == "active"

    ssh(running, f"apt-get install -y -q nvidia-fabricmanager={NEXT}-1")
    ssh(running, "systemctl restart nvidia-fabricmanager; sleep 1", check=False)

    assert ssh(running, "systemctl is-active nvidia-fabricmanager", check=False) == "failed"
    ssh(running, f"apt-get install -y -q --allow-downgrades nvidia-fabricmanager={OLD}-1")


# -- building --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_module_that_does_not_compile_leaves_the_package_half_configured(
    lab: Lab, running: str
) -> None:
    """And the version before it can be gone back to; meanwhile the old one stays loaded."""
    states.put(lab.state / "vendor", "dkms-fails")
    ssh(running, "apt-get update -qq")

    said = install(running, NEXT, check=False)

    assert "Bad return status for module build" in said
    assert f"dkms/nvidia/{NEXT}/build/make.log" in said
    state = "dpkg-query -W -f '${db:Status-Status}' nvidia-kernel-open-dkms"
    assert ssh(running, state) == "half-configured"
    assert (on_disk(running), loaded(running)) == ("", OLD)

    install(running, OLD)

    assert ssh(running, state) == "installed"
    assert on_disk(running) == OLD


@pytest.mark.long
def test_the_node_itself_can_be_told_that_nothing_compiles(running: str) -> None:
    ssh(running, "touch /etc/gpufleet-lab/dkms-fails")

    assert "Bad return status" in install(running, NEW, check=False)

    ssh(running, "rm /etc/gpufleet-lab/dkms-fails; dpkg --configure -a")
    assert on_disk(running) == NEW


@pytest.mark.long
def test_modules_are_built_for_kernels_with_headers_and_no_others(running: str) -> None:
    """dkms passes a kernel without headers over and succeeds: what is on the disk tells."""
    _, newer, without = kernels.releases()
    ssh(running, f"apt-get install -y -q linux-image-{newer} linux-image-{without}")
    assert (on_disk(running, newer), on_disk(running, without)) == ("", "")

    ssh(running, f"apt-get install -y -q linux-headers-{newer}")
    install(running, NEW)

    assert on_disk(running, newer) == on_disk(running) == NEW
    assert on_disk(running, without) == ""
    assert "Unable to locate" in ssh(
        running, f"apt-get install -y -q linux-headers-{without}", check=False
    )
    ssh(running, f"apt-get purge -y -q 'linux-*-{newer}' linux-image-{without}")
    assert newer not in ssh(running, "ls /lib/modules")


@pytest.mark.long
def test_without_headers_a_package_installs_and_no_module_is_built(running: str) -> None:
    headers = f"linux-headers-{platform.release()}"
    ssh(running, f"apt-get remove -y -q {headers}")

    said = install(running, NEW)

    assert "was skipped" in said
    assert on_disk(running) == ""
    ssh(running, f"apt-get install -y -q {headers}")
    assert on_disk(running) == NEW


# -- Secure Boot -----------------------------------------------------------------------------------


@pytest.mark.long
def test_secure_boot_lets_in_what_a_known_key_has_signed(lab: Lab, running: str) -> None:
    unload(running)
    lab.fault(running, "secure-boot-unsigned")

    refused = ssh(running, "modprobe nvidia", check=False)
    assert "Key was rejected by service" in refused
    assert opens(running) == NOT_LOADED
    signer = ssh(running, "modinfo -F signer nvidia")
    ssh(running, f"echo '{signer}' > /var/lib/gpufleet-lab/machine/enrolled; modprobe nvidia")

    assert opens(running) == 0
    lab.clear(running)
    ssh(running, "rm /var/lib/gpufleet-lab/machine/enrolled")


# -- the lab's own verbs ---------------------------------------------------------------------------


@pytest.mark.long
def test_up_and_faults_change_nothing_that_is_loaded(lab: Lab, running: str) -> None:
    seen = "lsmod | sort; ls /dev/nvidia*; cat /sys/module/nvidia/version; lspci -k"
    before = ssh(running, seen)

    lab.fault(running, "nvlink-dead-link", 3)
    lab.clear(running)
    lab.up()

    assert ssh(running, seen) == before
    assert lab.facts.without_driver == frozenset(NODES)


@pytest.mark.long
def test_a_driver_fault_is_not_put_on_a_node_that_has_its_own(lab: Lab) -> None:
    with pytest.raises(FleetError, match="delivered without a driver"):
        lab.fault(SWITCHED, "mismatch")


@pytest.mark.long
def test_a_node_that_is_to_have_a_driver_starts_afresh(lab: Lab) -> None:
    """And one that is to have none, too; the last test, because nothing of before is left."""
    lab.up(NODES, without_driver=[SWITCHED])

    assert ssh(PLAIN, "cat /sys/module/nvidia/version").startswith("550.")
    assert ssh(PLAIN, "dpkg-query -W nvidia-smi", check=False).startswith("dpkg-query: no packages")
    assert opens(PLAIN) == 0

    lab.up(NODES, without_driver=NODES)

    assert ssh(PLAIN, "! ls /usr/lib/*/libnvidia-ml*; lspci -k -d 10de: | grep -c nouveau") != "0"
