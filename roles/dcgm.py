"""NVIDIA's GPU monitoring: the DCGM host engine, and its exporter for Prometheus beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from pyinfra.api import deploy

from gpufleet import units
from gpufleet.converge import Converge
from gpufleet.serving import Metrics
from gpufleet.settings import Dcgm, Repository
from gpufleet.vendor_repository import source
from gpufleet.wanted import File, Package, Unit, UnitGone, Value, Wanted

ENGINE = "nvidia-dcgm.service"
EXPORTER = "nvidia-dcgm-exporter.service"
# The packaged list lacks ECC, row remapping, NVLink and throttling: most public alert rules would
# never fire with it.
COUNTERS = PurePosixPath("/etc/dcgm-exporter/gpufleet-counters.csv")


@deploy("DCGM")
def dcgm(wanted: Dcgm, repository: Repository, packages: Iterable[Value] = ()) -> None:
    """
    Converge the packages (one version for all of them, held), the exporter and its counters.

    `packages` are those that suit the node's machine; without any, the settings' own.
    """
    node = Converge(Wanted(source(repository), *(packages or settled(wanted)), *services(wanted)))
    node.packages(name="packages")
    node.files(name="drop-ins and counters")
    node.units(name="services")


def settled(wanted: Dcgm) -> tuple[Package, ...]:
    """Return DCGM's packages as the settings alone have them."""
    # Every package by version: strict dependencies between them are not resolved by apt when only
    # one is named and a newer one exists.
    versions = {
        "datacenter-gpu-manager-4-core": wanted.version,
        f"datacenter-gpu-manager-4-cuda{wanted.cuda_major}": wanted.version,
    }
    if wanted.exporter_version:
        versions["datacenter-gpu-manager-exporter"] = wanted.exporter_version
    return tuple(Package(name, version, hold=True) for name, version in versions.items())


def services(wanted: Dcgm) -> tuple[Value, ...]:
    """Return the host engine's unit, and the exporter's where one is wanted."""
    engine = units.drop_in("nvidia-dcgm.conf.j2", ENGINE, started_with={"version": wanted.version})
    found: list[Value] = [engine.file, Unit(ENGINE, fingerprint=engine.fingerprint)]
    if wanted.exporter_version is None:
        return (*found, UnitGone(EXPORTER))
    counters = units.template("dcgm-counters.csv").encode()
    exporter = units.drop_in(
        "nvidia-dcgm-exporter.conf.j2",
        EXPORTER,
        port=wanted.port,
        counters=str(COUNTERS),
        started_with={"version": wanted.exporter_version, "counters": counters},
    )
    return (
        *found,
        File(str(COUNTERS), counters),
        exporter.file,
        Unit(EXPORTER, fingerprint=exporter.fingerprint),
    )


def metrics(wanted: Dcgm) -> Metrics:
    """Return what the exporter must serve: the families that our alerts rest on."""
    return Metrics(
        id="dcgm_exporter",
        unit=EXPORTER,
        url=f"http://127.0.0.1:{wanted.port}/metrics",
        families=(
            "DCGM_FI_DEV_GPU_TEMP",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_POWER_USAGE",
            "DCGM_FI_DEV_XID_ERRORS",
        ),
    )
