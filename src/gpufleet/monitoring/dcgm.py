"""Desired state of DCGM on a node: the host engine, and its Prometheus exporter.  Pure."""

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

# The packaged list lacks ECC, row remapping, NVLink and throttling: most public alert rules would
# never fire with it.
COUNTERS = PurePosixPath("/etc/dcgm-exporter/gpufleet-counters.csv")

# Profiling needs no root on these; older ones need it, or a module parameter of the driver's, and
# NVIDIA's proprietary package (docs.nvidia.com/datacenter/dcgm, "Profiling Metrics").
_PROFILED = frozenset({"hopper", "blackwell"})


def require_published(system: System, node: str) -> None:
    """
    Raise `FleetError` if NVIDIA publishes no DCGM for a node's system.

    A system outside gpufleet's table is accepted, because the operator's repository may have DCGM.
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
    """Return whether the exporter may read profiling counters of all GPUs of a machine."""
    if wanted.profiling is not None:
        return wanted.profiling
    # By the PCI bus, which every deploy can read: the driver's answer would change the file while
    # the driver is broken.
    return bool(machine.gpus) and all(generation(each) in _PROFILED for each in machine.gpus)


def declared_packages(wanted: Dcgm) -> tuple[Package, ...]:
    """Return DCGM's packages from the settings, without a lock."""
    # Every package by version: strict dependencies between them are not resolved by apt when only
    # one is named and a newer one exists.
    versions = {
        "datacenter-gpu-manager-4-core": wanted.version,
        f"datacenter-gpu-manager-4-cuda{wanted.cuda_major}": wanted.version,
    }
    if wanted.exporter_version:
        versions["datacenter-gpu-manager-exporter"] = wanted.exporter_version
    return tuple(Package(name, version, hold=True) for name, version in versions.items())


def services(wanted: Dcgm, access: Access, *, profiling: bool) -> tuple[Value, ...]:
    """Return the units and files of the host engine, and of the exporter if declared."""
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
    """Return the metric families that alerts need from the exporter."""
    return Metrics(
        id="dcgm_exporter",
        unit=EXPORTER,
        url=access.url(wanted.port),
        families=(
            "DCGM_FI_DEV_GPU_TEMP",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_POWER_USAGE",
            # Not the last Xid: exporter 4.8.2 has no series of it before there was one.
            "DCGM_EXP_XID_ERRORS_COUNT",
        ),
        access=access,
        loopback_port=ENGINE_PORT,
    )
