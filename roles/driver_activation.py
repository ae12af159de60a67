"""Activate the installed driver, and let a node serve again once it is checked."""

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
    Unload and load, or reboot, until the module on the disk is the loaded one.

    After the packages and before whatever only works with the driver of its own version: the
    fabric manager, IMEX, DCGM. A node that has to be touched is marked first, and no stage starts
    on it before `check_driver` has passed.
    """
    guard_unchecked_node()
    activate_driver(driver_policy(node), name="driver")


@deploy("check")
def check_driver(node: BareNode) -> None:
    """Judge a node whose driver was touched; when it is fit, its stages may start, and do."""
    check_node(driver_policy(node), name="node")


def require_in_service() -> None:
    """Fail a node that waits for its check, before a deploy touches it: no stage would start."""
    refuse_unchecked_node(Converge(DesiredState(), watch=(quarantine.MARK,)), name="in service")


def guard_unchecked_node() -> None:
    """Converge what keeps the stages of a marked node from starting; before packages change."""
    node = Converge(quarantine.stage_guard())
    node.files(name="guard of unchecked nodes")
    node.units(name="have systemd read the guard")
