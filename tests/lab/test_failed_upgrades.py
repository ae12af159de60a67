"""An upgrade of the driver that fails costs a node that serves nothing.

What every kind of failure leaves on a node that serves nothing is test_node_upgrades.py's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.bare_node import NODE, BareNode, Triple, bare_node, vendor_state
from tests.lab.test_driver_in_force import STAGE, UNIT

LAB_ID = "gfu"
OLD, NEW = "580.95.05", "580.178.04"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareNode]:
    with bare_node(LAB_ID, tmp_path_factory.mktemp("failing")) as found:
        found.lock(OLD)
        run = found.deploy()
        assert run.status == 0, run.output
        found.ssh(NODE, f"cat > /etc/systemd/system/{STAGE}", stdin=UNIT)
        found.sh(f"systemctl daemon-reload; systemctl enable -q --now {STAGE}")
        yield found


def serves(node: BareNode, driver: str) -> None:
    """The node runs this driver as one, and its stage."""
    assert node.triple() == Triple(driver, driver, driver)
    assert node.is_marked() == ""
    assert node.broken_packages() == ""
    assert node.sh(f"systemctl is-active {STAGE}") == "active"


def test_what_the_vendor_breaks_touches_nothing_and_what_runs_runs_on(node: BareNode):
    before = node.sh(f"systemctl show -P MainPID {STAGE}")
    vendor_state(node, "bad-signature")
    node.lock(NEW)
    run = node.deploy()
    assert run.status == 1, run.output
    assert "signature" in run.output
    assert "the node serves on with what it has" in run.output
    serves(node, OLD)
    assert node.sh(f"systemctl show -P MainPID {STAGE}") == before, "it was not even restarted"


def test_a_module_that_does_not_build_is_taken_back_and_what_runs_runs_on(node: BareNode):
    before = node.sh(f"systemctl show -P MainPID {STAGE}")
    vendor_state(node, "dkms-fails")
    node.lock(NEW)
    run = node.deploy()
    assert run.status == 1, run.output
    serves(node, OLD)
    assert node.sh(f"systemctl show -P MainPID {STAGE}") == before


def test_with_the_old_lock_nothing_is_left_to_do(node: BareNode):
    vendor_state(node, "good")
    node.lock(OLD)
    run = node.deploy("--json")
    assert run.status == 0, run.output
    assert run.changed == {}
