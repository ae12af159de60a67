"""Run the fabric manager, which joins GPUs through NVSwitches, on nodes that have them."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, File, Unit, UnitGone
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.operations.converge import Converge
from gpufleet.operations.load_modules import load_modules
from gpufleet.serving.unit import drop_in

SERVICE = "nvidia-fabricmanager.service"

# With NVLink 5, the fabric manager talks to its switches over InfiniBand's management datagrams.
# Its start script fails if these modules are not loaded.
MODULES = ("ib_umad", "mlx5_core")

LOADED_AT_BOOT = "/etc/modules-load.d/gpufleet-fabric.conf"

# The fabric manager is ready when every NVLink is trained. This usually takes tens of seconds, and
# at most REGISTRATION_SECONDS.
START_SECONDS = 300

MODPROBE_SECONDS = 60


@deploy("fabric manager")
def fabric_manager(node: BareNode) -> None:
    """
    Converge the fabric manager after its driver, because it accepts only its own version.

    Its package and NSCQ are installed with the driver's packages in the same version, and need no
    configuration. Without NVSwitches, or if another machine manages the fabric, it would fail and
    is therefore off.
    """
    service = Converge(wanted(node))
    service.files(name="files")
    if node.machine.nvlink5 and node.machine.nvswitch:
        load_modules(MODULES, name="load the modules for the switches", _timeout=MODPROBE_SECONDS)
    service.units(name="service")


def wanted(node: BareNode) -> DesiredState:
    """Return the unit with its files, or the unit as off."""
    lock = node.settings.gpu_lock
    if lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    if not node.machine.nvswitch:
        return DesiredState(UnitGone(SERVICE))
    file = drop_in(
        "nvidia_driver/nvidia-driver-service.conf.j2", SERVICE, started_with={"driver": lock.driver}
    )
    unit = Unit(SERVICE, fingerprint=file.fingerprint, start_seconds=START_SECONDS)
    if not node.machine.nvlink5:
        return DesiredState(file.file, unit)
    text = "# Written by gpufleet.\n" + "".join(f"{name}\n" for name in MODULES)
    return DesiredState(file.file, unit, File(LOADED_AT_BOOT, text.encode()))
