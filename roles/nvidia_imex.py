"""Run IMEX, with which nodes of one NVL72 rack map each other's GPU memory."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, UnitGone
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.converge import Converge
from gpufleet.operations.join_imex_domain import SERVICE, join_imex_domain


@deploy("IMEX")
def nvidia_imex(node: BareNode) -> None:
    """
    Converge IMEX after the driver, because the nodes that share a fabric are unknown before.

    Its package is installed with the driver's packages in the same version. The module option that
    makes its channel (NVreg_CreateImexChannel0) belongs to the driver.
    """
    lock = node.settings.gpu_lock
    if lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    if not node.machine.imex:
        Converge(DesiredState(UnitGone(SERVICE))).units(name="no service")
        return
    join_imex_domain(lock.driver, name="domain and service")
