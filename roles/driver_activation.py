"""Activate the installed driver, and let a node serve again after its check."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState
from gpufleet.gpu_software import quarantine
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.activate_driver import (
    activate_driver,
    check_node,
    driver_policy,
    refuse_unchecked_node,
)
from gpufleet.operations.converge import Converge


@deploy("driver in force")
def driver_activation(node: BareNode) -> None:
    """
    Reload the driver or reboot, until the module on disk is the loaded one.

    This runs after the packages and before the parts that require their own driver version: the
    fabric manager, IMEX, DCGM. A node that needs a change is marked first, and no stage starts on
    it before `check_driver` has passed.
    """
    guard_unchecked_node()
    activate_driver(driver_policy(node), name="driver")


@deploy("check")
def check_driver(node: BareNode) -> None:
    """Check a node whose driver was changed, and start its stages if it is fit."""
    check_node(driver_policy(node), name="node")


def require_in_service() -> None:
    """
    Fail a node that waits for its check, before a deploy changes it: no stage would start there.
    """
    refuse_unchecked_node(Converge(DesiredState(), watch=(quarantine.MARK,)), name="in service")


def guard_unchecked_node() -> None:
    """
    Converge the guard that keeps a marked node's stages from starting, before packages change.
    """
    node = Converge(quarantine.stage_guard())
    node.files(name="guard of unchecked nodes")
    node.units(name="reload systemd for the guard")
