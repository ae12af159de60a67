"""
Broken hardware, and fourteen nodes of which some are dead, as `gpufleet doctor` names them.

Nothing is deployed: the checks of a node need no server. `make test-long PART=doctor-hardware`
writes what it measured into docs/measured/doctor.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.test_doctor import NAMED_SECONDS, NODE, PAGE, Failure, doctor, play
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfdh")
NODES = {f"gpu-{number:02}": "h100x8" for number in range(1, 15)}
OFF, CUT = "gpu-05", "gpu-09"
DEAD_SECONDS = 8
"""What dead nodes may cost, all together."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HARDWARE = (
    Failure(
        "/dev/shm is full",
        "MiB of shared memory",
        "ls -la /dev/shm",
        fault="shm-small",
        before="head -c 62M /dev/zero > /dev/shm/psm_dead",
        after="rm -f /dev/shm/psm_dead",
        serves=True,
        fix="ls -la /dev/shm; rm /dev/shm/psm_dead; mount -o remount,size=50% /dev/shm",
    ),
    *(
        Failure(f"hardware: {fault}", says, do, fault=fault, serves=True, fix="; ".join(fix))
        for fault, says, do, *fix in (
            ("gpu-lost", "fallen off the bus", "dmesg"),
            ("gpu-missing", "does not list", "lspci"),
            ("recovery-reset", "asks you to reset the GPU", "nvidia-smi -r", "nvidia-smi -r -i 0"),
            ("recovery-reboot", "asks you to reboot the node", "reboot"),
            ("ecc-uncorrected", "uncorrectable memory errors", "stop"),
            ("remap-pending", "row remap is pending", "nvidia-smi -r", "nvidia-smi -r"),
            ("remap-failed", "could not be remapped", "stop"),
            ("nvlink-dead-link", "1 of 18 links down", "nvidia-smi nvlink"),
            ("throttle-hw-thermal", "heat throttles it", "TEMPERATURE"),
            ("pcie-x8", "8 PCIe lanes", "lspci"),
            ("mig-on", "MIG is on", "nvidia-smi -mig 0", "nvidia-smi -mig 0 -i 0"),
            ("persistence-off", "persistence", "nvidia-smi -pm 1", "nvidia-smi -pm 1"),
            ("compute-exclusive", "process", "nvidia-smi -c 0", "nvidia-smi -c 0 -i 0"),
            ("foreign-memory", "lists no process", "check again"),
            ("mismatch", "different versions", "modprobe"),
            ("fabric-unhealthy", "bandwidth is degraded", "nvidia-fabricmanager"),
            ("xid-48", "Xid 48", "stop"),
            ("xid-79", "fallen off the bus", "stop"),
            ("clock-unsynced", "clock", "chrony"),
            ("inforom-corrupt", "InfoROM", ""),
            ("power-capped", "power", "nvidia-smi -i 0 -pl", "nvidia-smi -i 0 -pl 700"),
            ("shm-small", "/dev/shm", "mount -o", "mount -o remount,size=50% /dev/shm"),
            ("disk-full", "0.7 GiB are free", "du -xh"),
            ("hot", "°C", ""),
            ("clocks-locked", "clock", "-rgc", "nvidia-smi -i 0 -rac", "nvidia-smi -i 0 -rgc"),
        )
    ),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One bare node with eight simulated GPUs; no model is declared."""
    project = tmp_path_factory.mktemp("doctor-hardware")
    with standing(LAB_ID, {NODE: NODES[NODE]}, project) as found:
        variables = found.project / "group_vars/lab.yml"
        data = yaml.safe_load(variables.read_text())
        del data["serving"], data["dcgm"]
        variables.write_text(yaml.safe_dump(data))
        yield found


@pytest.mark.parametrize("failure", HARDWARE, ids=lambda each: each.name)
def test_broken_hardware_is_named_with_what_to_do(fleet: Fleet, failure: Failure) -> None:
    play(fleet, failure)


def silent(found: dict[str, Any]) -> dict[str, str]:
    """Return what is said of nodes that did not answer."""
    return {each["subject"]: each["what"] for each in found["problems"] if each["subject"] in NODES}


def test_fourteen_nodes_are_looked_at_and_dead_ones_are_named_without_a_wait_for_them(
    fleet: Fleet,
) -> None:
    fleet.lab.up(NODES)
    doctor(fleet)  # the first login of each node starts its user manager
    found, whole = doctor(fleet)
    assert silent(found) == {}
    note(
        PAGE, "fourteen nodes, none of them dead", "none", "nothing", f"{whole:.1f} s", "not typed"
    )
    fleet.lab.power(OFF, "off")
    fleet.lab.net(CUT, "cut")
    try:
        found, seconds = doctor(fleet)
    finally:
        fleet.lab.net(CUT, "heal")
        fleet.lab.power(OFF, "on")
    named = silent(found)
    assert named.keys() == {OFF, CUT}
    assert all("not reached" in what for what in named.values()), named
    assert {each["do"] for each in found["problems"] if each["subject"] in named} == {
        f"`ssh {node}`; if the node does not answer, its BMC shows whether the node has power"
        for node in (OFF, CUT)
    }
    note(
        PAGE,
        "fourteen nodes, one without power and one without network",
        "; ".join(named.values()),
        "`ssh NODE`; if the node does not answer, its BMC shows whether the node has power",
        f"{seconds:.1f} s",
        "gone after the simulated repair",
    )
    assert silent(doctor(fleet)[0]) == {}
    assert seconds - whole < DEAD_SECONDS
    assert max(whole, seconds) < NAMED_SECONDS
