"""IMEX, by which nodes of one NVL72 rack map each other's GPU memory; nowhere else."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, UnitGone
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.converge import Converge
from gpufleet.operations.join_imex_domain import SERVICE, join_imex_domain


@deploy("IMEX")
def nvidia_imex(node: BareNode) -> None:
    """
    Converge IMEX, after the driver is in force: before, it is unknown which nodes share a fabric.

    Its package comes with the driver's, of its version. The module option that makes its channel
    (NVreg_CreateImexChannel0) is the driver's.
    """
    lock = node.settings.gpu_lock
    if lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    if not node.machine.imex:
        Converge(DesiredState(UnitGone(SERVICE))).units(name="no service")
        return
    join_imex_domain(lock.driver, name="domain and service")
