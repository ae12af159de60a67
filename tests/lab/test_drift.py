"""What somebody does to a node behind a deploy's back is found; on a node left alone, nothing is.

Each test moves one thing over plain ssh, looks, and puts it back by hand: were it mended by a
deploy, a drift that hides another would not show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.lab.bare_node import NODE, BareNode, bare_node
from tests.support.checkout import ROOT, own_lab

pytestmark = pytest.mark.long

LAB_ID = own_lab("gfg")
DRIVER, OTHER = "580.95.05", "580.178.04"
SCHEMA = json.loads((ROOT / "docs/reference/drift.schema.json").read_text())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareNode]:
    """A node that was bare, after both deploys."""
    with bare_node(LAB_ID, tmp_path_factory.mktemp("drift")) as found:
        found.lock(DRIVER)
        for deploy in ("deploys/node.py", "deploys/vllm.py"):
            run = found.pyinfra("-y", deploy=deploy, seconds=900)
            assert run.status == 0, run.output
        yield found


def looked(node: BareNode, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status of the command, and its document."""
    run = node.gpufleet("drift", node.inventory, "--json", *arguments, seconds=300)
    assert run.stdout, run.output
    document = json.loads(run.stdout)
    jsonschema.validate(document, SCHEMA)
    return run.status, document


def moved(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Return when each thing matters, and its words."""
    return {(each["matters"], each["what"]) for each in document["nodes"][NODE]["moved"]}


def test_a_node_that_both_deploys_have_made_has_no_drift(node: BareNode) -> None:
    """The same command that finds each of those below."""
    status, document = looked(node)
    assert document["nodes"][NODE] == {"drift": "clean", "moved": [], "unread": []}
    assert (status, document["drift"], document["refused"]) == (0, "clean", [])


@dataclass(frozen=True)
class Planted:
    """
    What somebody does on a node, how it is undone, and what has to be said of it.

    Attributes:
        says: a part of what is said.
        matters: when it is felt.
    """

    do: str
    undo: str
    says: str
    matters: str = "now"


def unheld(package: str) -> Planted:
    return Planted(
        f"apt-mark unhold {package}", f"apt-mark hold {package}", f"hold {package}", "next upgrade"
    )


def stopped(unit: str) -> Planted:
    return Planted(f"systemctl stop {unit}", f"systemctl start {unit}", f"start {unit}")


def disabled(unit: str) -> Planted:
    turn = "systemctl -q {} " + unit
    return Planted(turn.format("disable"), turn.format("enable"), f"enable {unit}", "next boot")


def moved_file(do: str, path: str, says: str, matters: str = "now") -> Planted:
    """`do` is done to the file, which is put back with its owner and mode; `says` is of it."""
    kept = f"/root/kept{path.replace('/', '-')}"
    return Planted(
        f"cp -a {path} {kept} && {do} {path}", f"mv {kept} {path}", f"{path}: {says}", matters
    )


FABRIC, DCGM = "nvidia-fabricmanager.service", "nvidia-dcgm.service"
EXPORTER = "prometheus-node-exporter.service"
GUARD = "/etc/systemd/system/vllm-.service.d/gpufleet-unchecked.conf"
DROP_IN = "/etc/systemd/system/nvidia-dcgm-exporter.service.d/gpufleet.conf"
COUNTERS = "/etc/dcgm-exporter/gpufleet-counters.csv"
UPGRADES = "/etc/apt/apt.conf.d/52gpufleet-unattended-upgrades"
KERNEL = "6.99.0-1-amd64"
STRAY = "/etc/apt/sources.list.d/cuda-somebodys.list"

# Those of one area are planted together, so that they are looked for once.
PLANTED: dict[str, dict[str, Planted]] = {
    "packages": {
        "a hold of the driver is lost": unheld("nvidia-driver-cuda"),
        "a hold of its library is lost": unheld("libnvidia-ml1"),
        "a hold of the fabric manager is lost": unheld("nvidia-fabricmanager"),
        "a hold of DCGM is lost": unheld("datacenter-gpu-manager-4-core"),
        "unattended upgrades may take the driver": moved_file(
            "rm", UPGRADES, "it is missing", "next upgrade"
        ),
        "the vendor's index is in the node's own apt": Planted(
            f"echo 'deb http://192.0.2.1/ /' > {STRAY}", f"rm -f {STRAY}", STRAY
        ),
    },
    "settings": {
        "a sysctl of the running kernel": Planted(
            "sysctl -q vm.swappiness=60", "sysctl -q vm.swappiness=10", "vm.swappiness"
        ),
        "the sysctls of the next boot": moved_file(
            "echo vm.swappiness=60 >>",
            "/etc/sysctl.d/99-gpufleet.conf",
            "its content differs",
            "next boot",
        ),
        "options of the driver's module": moved_file(
            "rm", "/etc/modprobe.d/gpufleet-nvidia.conf", "it is missing", "next boot"
        ),
        "modules of the next boot": moved_file(
            "truncate -s 0",
            "/etc/modules-load.d/gpufleet-nvidia.conf",
            "its content differs",
            "next boot",
        ),
        "the mode of a file": moved_file("chmod 666", COUNTERS, "its mode is 0666"),
        "the owner of a file": moved_file("chown nobody", GUARD, "it is nobody:root's"),
    },
    "units": {
        "the fabric manager does not start at boot": disabled(FABRIC),
        "DCGM does not start at boot": disabled(DCGM),
        "the device files are not made at boot": disabled("gpufleet-gpu-devices.service"),
        "the persistence daemon is stopped": stopped("nvidia-persistenced.service"),
        "DCGM is stopped": stopped(DCGM),
        "the exporter runs with something else": Planted(
            f"sed -i s/^./x/ /run/gpufleet/started/{EXPORTER}",
            f"systemctl restart {EXPORTER}",
            f"restart {EXPORTER}",
        ),
        "a drop-in was edited": moved_file("echo '#' >>", DROP_IN, "its content differs"),
    },
    "driver": {
        "the fabric manager is stopped": stopped(FABRIC),
        "a guard of unchecked nodes is gone": moved_file("rm", GUARD, "it is missing"),
        "the vendor's key is gone": Planted(
            "mv /etc/gpufleet/keys /root/kept-keys",
            "rm -rf /etc/gpufleet/keys && mv /root/kept-keys /etc/gpufleet/keys",
            "trust the key",
        ),
        "a kernel has no module": Planted(
            f"mkdir /lib/modules/{KERNEL} && touch /lib/modules/{KERNEL}/modules.builtin",
            f"rm -r /lib/modules/{KERNEL}",
            f"kernel {KERNEL} is installed but has no NVIDIA module",
            "next boot",
        ),
    },
}


@pytest.mark.parametrize("area", PLANTED)
def test_everything_that_was_planted_is_found(node: BareNode, area: str) -> None:
    """And it is said when each of them is felt."""
    try:
        for planted in PLANTED[area].values():
            node.sh(planted.do)
        status, document = looked(node)
    finally:
        for planted in PLANTED[area].values():
            node.sh(planted.undo)
        node.sh("systemctl daemon-reload")

    found = moved(document)
    missed = {
        name
        for name, planted in PLANTED[area].items()
        if not any(when == planted.matters and planted.says in what for when, what in found)
    }
    assert missed == set(), found
    assert status == 1


def test_after_all_that_nothing_is_left_to_find(node: BareNode) -> None:
    """None of the tests above was passed by what an earlier one had left."""
    status, document = looked(node)
    assert (status, moved(document)) == (0, set())


def test_another_lock_is_drift_of_each_part_of_the_driver(node: BareNode) -> None:
    node.lock(OTHER)
    try:
        status, document = looked(node)
    finally:
        node.lock(DRIVER)

    assert status == 1
    locked = [
        each["what"]
        for each in document["nodes"][NODE]["moved"]
        if each["source"] == "gpu_lock.driver"
    ]
    assert locked == [
        f"{part} is {DRIVER}, the lock has {OTHER}"
        for part in ("the loaded kernel module", "the module on the disk", "libnvidia-ml.so.1")
    ]


def test_a_node_that_is_off_is_unknown(node: BareNode) -> None:
    """The one thing that must never be taken for no drift."""
    node.lab.power(NODE, "off")
    try:
        status, document = looked(node, "--seconds", "60")
    finally:
        node.lab.power(NODE, "on")

    assert (status, document["drift"]) == (2, "unknown")
    assert "cannot be reached" in document["nodes"][NODE]["unread"][0]["why"]


def test_looking_changes_nothing(node: BareNode) -> None:
    every = "find /etc /run/gpufleet /var/lib/gpufleet -xdev -printf '%p %T@ %m %u\\n' | sort"
    before = node.written(), node.sh(every)
    looked(node)
    assert before == (node.written(), node.sh(every))
