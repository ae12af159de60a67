"""Upgrades of a driver that fail or are interrupted, and what the next deploy makes of them.

Long: `make test-long PART=driver-upgrades` writes docs/measured/driver-upgrade-faults.md.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.lab.bare_node import NODE, BareNode, Triple, bare_node, vendor_state
from tests.lab.faults import reached
from tests.lab.test_node_deploy import BRANCH, FIRST, PATCH, in_force
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfq")
PAGE = "measured/driver-upgrade-faults.md"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# What the vendor's repository may have become since the last run: `gpufleet lab vendor`.
STATES = (
    "unsigned",
    "bad-signature",
    "wrong-hash",
    "malformed-index",
    "missing-dependency",
    "dkms-fails",
    "gone",
)
# Drawn once and written down by the seed. An upgrade takes some 20 s on two cores: the first half
# looks and downloads, the second changes packages, reloads and checks.
DRAW = random.Random(20261122)
CUTS = [round(DRAW.uniform(1, 25), 1) for _ in range(10)]
KILLS = [round(DRAW.uniform(1, 25), 1) for _ in range(4)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareNode]:
    """A node that runs the first driver."""
    with bare_node(LAB_ID, tmp_path_factory.mktemp("bare")) as found:
        found.lock(FIRST)
        run = found.deploy()
        assert run.status == 0, run.output
        yield found


def other(node: BareNode) -> str:
    """Return the driver to go to next: up a patch, up a branch, down to the first."""
    return {FIRST: PATCH, PATCH: BRANCH}.get(node.triple().module, FIRST)


def stands(node: BareNode) -> str:
    """Say in a few words how the node stands; a state that we call good has one version."""
    found, mark = node.triple(), node.is_marked()
    service = "out of service" if mark else "in service"
    if not mark:
        assert found.is_one, found
    return f"{service}, {described(found)}"


def described(found: Triple) -> str:
    if found.is_one:
        return f"{found.module} in all parts" if found.module else "no driver"
    parts = (found.module, found.library, found.fabric_manager)
    return "module {}, library {}, fabric manager {}".format(*(part or "none" for part in parts))


def sentence(output: str) -> str:
    """Return the line in which the transaction said what was wrong."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    ours = [line.partition("] ")[2] for line in lines if line.startswith(f"[{NODE}]")]
    return next((line for line in ours if re.search(r"nothing was touched|Restored:", line)), "")


@pytest.mark.parametrize("state", STATES)
def test_an_upgrade_from_a_harmed_repository_is_refused_and_later_succeeds(
    node: BareNode, state: str
):
    """The node serves on with what it has, and its own apt works throughout."""
    wanted = other(node)
    if state == "dkms-fails" and wanted != PATCH:  # only those later than the first do not compile
        node.lock(FIRST)
        assert node.deploy().status == 0
        wanted = PATCH
    node.lock(wanted)
    vendor_state(node, state)
    try:
        run = node.deploy()
        assert run.status != 0, run.output
        assert "Traceback" not in run.output
        assert node.broken_packages() == ""
        stood = stands(node)
        assert node.sh("apt-get -q update >/dev/null 2>&1 && echo well", seconds=120) == "well"
    finally:
        vendor_state(node, "good")
    began = time.monotonic()
    again = node.deploy()
    assert again.status == 0, again.output
    in_force(node, wanted)
    words = said(run.output)
    assert words, run.output
    spent = time.monotonic() - began
    note(PAGE, f"repository: {state}", words, stood, f"{spent:.0f} s")


@pytest.mark.parametrize(("number", "seconds"), list(enumerate(CUTS, 1)))
def test_a_power_cut_in_an_upgrade_converges(node: BareNode, number: int, seconds: float):
    wanted = other(node)
    node.lock(wanted)
    run = node.begin()
    time.sleep(seconds)
    node.lab.power(NODE, "off")
    operation = reached(node)
    run.wait(timeout=400)
    node.lab.power(NODE, "on")
    converged(node, wanted, f"power cut after {seconds} s", operation)


@pytest.mark.parametrize(("number", "seconds"), list(enumerate(KILLS, 1)))
def test_a_killed_upgrade_converges(node: BareNode, number: int, seconds: float):
    wanted = other(node)
    node.lock(wanted)
    run = node.begin()
    time.sleep(seconds)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(timeout=10)
    converged(node, wanted, f"kill -9 of the deploy after {seconds} s", reached(node))


def converged(node: BareNode, wanted: str, fault: str, operation: str) -> None:
    """What is called good is whole; the next deploy succeeds, and one more changes nothing."""
    stood = stands(node)
    began = time.monotonic()
    run = node.deploy()
    assert run.status == 0, run.output
    spent = time.monotonic() - began
    in_force(node, wanted)
    again = node.deploy("--json")
    assert again.changed == {}, again.output
    note(PAGE, fault, f"while: {operation.replace(' | ', ': ')}", stood, f"{spent:.0f} s")


def said(output: str) -> str:
    return sentence(output)[:300]
