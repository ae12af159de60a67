"""Run NVIDIA's persistence daemon, which keeps idle GPUs initialised."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, Unit, UnitGone
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.converge import Converge
from gpufleet.serving.unit import drop_in

SERVICE = "nvidia-persistenced.service"
# Ubuntu's packaged unit starts the daemon with --no-persistence-mode as this user, which the
# package creates. The units of Debian and Red Hat keep the daemon's default: persistence on.
UNDONE = {"ubuntu": "nvidia-persistenced"}


@deploy("persistence daemon")
def persistenced(node: BareNode) -> None:
    """Converge the daemon, whose packages are installed with the driver's in the same version."""
    service = Converge(wanted(node))
    service.files(name="drop-in")
    service.units(name="service")


def wanted(node: BareNode) -> DesiredState:
    """Return the unit with gpufleet's drop-in, or as off if `gpu_lock.persistence` is false."""
    lock = node.settings.gpu_lock
    if lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    if not lock.persistence:
        return DesiredState(UnitGone(SERVICE))
    user = UNDONE.get(node.system.id)
    file = drop_in(
        "persistenced/nvidia-persistenced.conf.j2",
        SERVICE,
        started_with={"driver": lock.driver},
        undone=user is not None,
        user=user,
    )
    return DesiredState(file.file, Unit(SERVICE, fingerprint=file.fingerprint))
