"""One command: from a bare Debian 12 node to a checked GPU node, and to any other driver after it.

The tests are one story of one node, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.bare_node import NODE, BareNode, Triple, bare_node, vendor_state
from tests.lab.test_driver_in_force import STAGE, UNIT
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfe")
FIRST, PATCH, BRANCH = "580.95.05", "580.178.04", "595.91.07"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareNode]:
    with bare_node(LAB_ID, tmp_path_factory.mktemp("bare")) as found:
        found.lock(FIRST)
        leave_as_formerly(found)
        yield found


def leave_as_formerly(node: BareNode) -> None:
    """Put there what gpufleet once had in the node's own apt: that takes no second key for it."""
    place = f"{node.repository['url']}/"
    source = f"Types: deb\nURIs: {place}\nSuites: /\nSigned-By: /usr/share/keyrings/none.gpg\n"
    pin = "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 500\n"
    for path, content in (
        ("/etc/apt/sources.list.d/gpufleet-cuda.sources", source),
        ("/etc/apt/preferences.d/00-gpufleet-cuda.pref", pin),
    ):
        node.ssh(NODE, f"cat > {path}", stdin=content)


def in_force(node: BareNode, driver: str) -> None:
    """The node runs this driver, whole, held, checked and in service."""
    assert node.triple() == Triple(driver, driver, driver)
    assert node.broken_packages() == ""
    assert node.is_marked() == ""
    ours = node.installed("*nvidia*")
    assert {version.rpartition("-")[0] for version in ours.values()} == {driver}, ours
    assert set(ours) <= node.held()
    report = node.gpufleet("check", node.inventory, "--json")
    assert report.status == 0, report.output
    assert json.loads(report.stdout)["fit"]


def test_a_dry_run_on_a_bare_node_says_what_would_change_and_changes_nothing(node: BareNode):
    before = node.written(), node.sh("find /etc /usr /lib/modules -xdev -type f | sha256sum")

    run = node.pyinfra("--dry", deploy="deploys/node.py")

    assert run.status == 0, run.output
    assert "would" in run.output
    assert before == (
        node.written(),
        node.sh("find /etc /usr /lib/modules -xdev -type f | sha256sum"),
    )


def test_one_command_makes_a_bare_node_a_checked_gpu_node(node: BareNode):
    run = node.deploy()

    assert run.status == 0, run.output
    in_force(node, FIRST)
    assert node.sh("systemctl is-active nvidia-dcgm nvidia-dcgm-exporter").split() == ["active"] * 2
    assert node.sh("cat /proc/sys/vm/swappiness") == "10"


def test_the_nodes_own_apt_knows_nothing_of_the_vendor(node: BareNode):
    """Whatever becomes of the vendor's index, the node's own upgrades go on."""
    everything = "find /etc/apt -type f -exec cat {} +"
    assert node.repository["url"] not in node.sh(everything)
    assert "NVIDIA CUDA" not in node.sh(everything)
    assert "/vendor" not in node.sh("apt-get -qq update && apt-cache policy", seconds=120)


def test_a_second_run_changes_nothing_and_writes_no_package(node: BareNode):
    before = node.written(), node.boot_id()

    run = node.deploy("--json")

    assert run.status == 0, run.output
    assert run.changed == {}
    assert (node.written(), node.boot_id()) == before


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(PATCH, id="patch-up"),
        pytest.param(BRANCH, id="branch-up"),
        pytest.param(FIRST, id="branch-down"),
    ],
)
def test_another_lock_is_another_driver(node: BareNode, driver: str):
    """Nobody holds the devices, so none of them needs a reboot."""
    boot = node.boot_id()
    node.lock(driver)

    run = node.deploy()

    assert run.status == 0, run.output
    in_force(node, driver)
    assert node.boot_id() == boot


def test_a_node_that_was_left_alone_has_no_drift_and_one_thing_moved_is_found(node: BareNode):
    """After both deploys, which are what is compared; every kind of drift is test_drift.py's."""
    run = node.pyinfra("-y", deploy="deploys/vllm.py", seconds=600)
    assert run.status == 0, run.output
    looked = node.gpufleet("drift", node.inventory, "--json", seconds=300)
    assert looked.status == 0, looked.output

    node.sh("apt-mark unhold nvidia-fabricmanager")
    looked = node.gpufleet("drift", node.inventory, "--json", seconds=300)
    node.sh("apt-mark hold nvidia-fabricmanager")

    assert looked.status == 1, looked.output
    moved = json.loads(looked.stdout)["nodes"][NODE]["moved"]
    found = {each["matters"] for each in moved if "hold nvidia-fabricmanager" in each["what"]}
    assert found == {"next upgrade"}, moved


@pytest.mark.parametrize(
    ("state", "says"), [("bad-signature", "signature"), ("dkms-fails", "nvidia-kernel-open-dkms")]
)
def test_an_upgrade_that_fails_costs_a_node_that_serves_nothing(
    node: BareNode, state: str, says: str
):
    """Before packages change, or after their module did not build: two of all kinds."""
    node.ssh(NODE, f"cat > /etc/systemd/system/{STAGE}", stdin=UNIT)
    node.sh(f"systemctl daemon-reload; systemctl enable -q --now {STAGE}")
    process = node.sh(f"systemctl show -P MainPID {STAGE}")
    vendor_state(node, state)
    node.lock(PATCH)

    run = node.deploy()

    assert run.status == 1, run.output
    assert says in run.output
    assert "the node keeps serving with the installed packages" in run.output
    in_force(node, FIRST)
    assert node.sh(f"systemctl is-active {STAGE}") == "active"
    assert node.sh(f"systemctl show -P MainPID {STAGE}") == process, "it was not even restarted"


def test_with_the_old_lock_nothing_is_left_to_do(node: BareNode):
    vendor_state(node, "good")
    node.lock(FIRST)

    run = node.deploy("--json")

    assert run.status == 0, run.output
    assert run.changed == {}


def test_dcgm_that_is_not_declared_any_more_goes_and_the_driver_stays(node: BareNode):
    """Read with dpkg, systemctl and ls, on the node; the lock gets it back."""
    left = "ls -d /etc/systemd/system/nvidia-dcgm*.d /etc/gpufleet/dcgm* 2>/dev/null || true"
    assert node.installed("datacenter-gpu-manager*")
    assert node.sh(left)
    boot = node.boot_id()
    node.lock(FIRST, dcgm=None)

    dry = node.pyinfra("--dry", deploy="deploys/node.py")
    assert dry.status == 0, dry.output
    assert "remove package datacenter-gpu-manager" in dry.output
    assert node.installed("datacenter-gpu-manager*")
    run = node.deploy()

    assert run.status == 0, run.output
    assert node.installed("datacenter-gpu-manager*") == {}
    assert node.sh(left) == ""
    assert node.sh("systemctl is-active nvidia-dcgm nvidia-dcgm-exporter || true").split() == [
        "inactive",
        "inactive",
    ]
    assert node.triple() == Triple(FIRST, FIRST, FIRST)
    assert (node.boot_id(), node.broken_packages(), node.is_marked()) == (boot, "", "")
    assert node.deploy("--json").changed == {}

    node.lock(FIRST)
    assert node.deploy().status == 0
    in_force(node, FIRST)
    assert node.sh("systemctl is-active nvidia-dcgm nvidia-dcgm-exporter").split() == ["active"] * 2
