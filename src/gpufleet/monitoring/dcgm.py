"""
Compute the desired state of DCGM on a node: the host engine and its Prometheus exporter. Pure.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from gpufleet import node_paths
from gpufleet.converge.desired import File, Package, Unit, UnitGone, Value
from gpufleet.errors import FleetError
from gpufleet.gpu_software.repository import vendor_repository
from gpufleet.monitoring.dcgm_counters import counters
from gpufleet.monitoring.exporters import WEB_CONFIG, Access, Metrics
from gpufleet.node.machine import Machine, System, generation
from gpufleet.serving.unit import drop_in
from gpufleet.settings.cuda_settings import Dcgm

ENGINE = "nvidia-dcgm.service"

ENGINE_PORT = 5555

EXPORTER = "nvidia-dcgm-exporter.service"

CREDENTIALS = node_paths.DCGM_EXPORTER

# The list of counters in the package has no counters for ECC, row remapping, NVLink and throttling,
# so most public alert rules would never fire with it.
COUNTERS = PurePosixPath("/etc/dcgm-exporter/gpufleet-counters.csv")

# On these GPUs, profiling needs no root permissions. On older GPUs, it needs root permissions or a
# parameter of the driver's module, and also NVIDIA's proprietary package
# (docs.nvidia.com/datacenter/dcgm, "Profiling Metrics").
_PROFILED = frozenset({"hopper", "blackwell"})


def require_published(system: System, node: str) -> None:
    """
    Raise `FleetError` if NVIDIA publishes no DCGM for the node's operating system.

    An operating system that is not in gpufleet's table is accepted, because the operator's own
    repository may have DCGM.
    """
    try:
        has = vendor_repository(system).dcgm
    except FleetError:
        return
    if has is False:
        raise FleetError(
            f"{node}: `dcgm` is set, but NVIDIA publishes no DCGM for {system}. Write `dcgm: "
            f"null` for these nodes and remove `gpu_lock.dcgm`. The node exporter then serves "
            f"the GPUs' values from NVML (docs/monitor/exporters.md)"
        )


def has_profiling(wanted: Dcgm, machine: Machine) -> bool:
    """Return whether the exporter may read profiling counters of all GPUs of the machine."""
    if wanted.profiling is not None:
        return wanted.profiling
    # The GPUs are found on the PCI bus, which every deploy can read. With the driver's answer, the
    # file would change while the driver does not work.
    return bool(machine.gpus) and all(generation(each) in _PROFILED for each in machine.gpus)


def declared_packages(wanted: Dcgm) -> tuple[Package, ...]:
    """Return DCGM's packages in the versions of the settings, without a lock file."""
    # Every package has a version here. If only one package had a version and newer packages exist,
    # apt could not resolve the strict dependencies between the packages.
    versions = {
        "datacenter-gpu-manager-4-core": wanted.version,
        f"datacenter-gpu-manager-4-cuda{wanted.cuda_major}": wanted.version,
    }
    if wanted.exporter_version:
        versions["datacenter-gpu-manager-exporter"] = wanted.exporter_version
    return tuple(Package(name, version, hold=True) for name, version in versions.items())


def services(wanted: Dcgm, access: Access, *, profiling: bool) -> tuple[Value, ...]:
    """
    Return the units and files of the host engine. If an exporter version is declared, include those
    of the exporter.
    """
    engine = drop_in("dcgm/nvidia-dcgm.conf.j2", ENGINE, started_with={"version": wanted.version})
    found: list[Value] = [engine.file, Unit(ENGINE, fingerprint=engine.fingerprint)]
    if wanted.exporter_version is None:
        return (*found, UnitGone(EXPORTER))
    asked = counters(profiling=profiling)
    exporter = drop_in(
        "dcgm/nvidia-dcgm-exporter.conf.j2",
        EXPORTER,
        address=access.address(wanted.port),
        counters=str(COUNTERS),
        credentials=list(access.credentials),
        directory=CREDENTIALS,
        web_config=WEB_CONFIG,
        started_with={
            "version": wanted.exporter_version,
            "counters": asked,
            **access.started_with(),
        },
    )
    return (
        *found,
        File(str(COUNTERS), asked),
        *access.files(CREDENTIALS),
        exporter.file,
        Unit(EXPORTER, fingerprint=exporter.fingerprint),
    )


def metrics(wanted: Dcgm, access: Access) -> Metrics:
    """Return the metrics of the exporter that alerts need."""
    return Metrics(
        id="dcgm_exporter",
        unit=EXPORTER,
        url=access.url(wanted.port),
        families=(
            "DCGM_FI_DEV_GPU_TEMP",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_POWER_USAGE",
            # The last Xid is not required: exporter 4.8.2 has no series for it before the first
            # Xid.
            "DCGM_EXP_XID_ERRORS_COUNT",
        ),
        access=access,
        loopback_port=ENGINE_PORT,
    )
