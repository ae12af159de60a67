"""NVIDIA's GPU monitoring: the DCGM host engine, and its exporter for Prometheus beside it."""

from __future__ import annotations

from pathlib import PurePosixPath

from pyinfra.api import deploy

from gpufleet import units
from gpufleet.converge import Converge
from gpufleet.serving import Metrics
from gpufleet.settings import Dcgm
from gpufleet.wanted import File, Package, Unit, Wanted

ENGINE = "nvidia-dcgm.service"
EXPORTER = "nvidia-dcgm-exporter.service"
# The packaged list lacks ECC, row remapping, NVLink and throttling: most public alert rules would
# never fire with it.
COUNTERS = PurePosixPath("/etc/dcgm-exporter/gpufleet-counters.csv")


@deploy("DCGM")
def dcgm(wanted: Dcgm) -> None:
    """Converge the packages (one version for all of them, held), the exporter and its counters."""
    counters = units.template("dcgm-counters.csv").encode()
    packages = {
        # Every package by version: strict dependencies between them are not resolved by apt when
        # only one is named and a newer one exists.
        "datacenter-gpu-manager-4-core": wanted.version,
        f"datacenter-gpu-manager-4-cuda{wanted.cuda_major}": wanted.version,
        "datacenter-gpu-manager-exporter": wanted.exporter_version,
    }
    engine = units.drop_in("nvidia-dcgm.conf.j2", ENGINE, started_with={"version": wanted.version})
    exporter = units.drop_in(
        "nvidia-dcgm-exporter.conf.j2",
        EXPORTER,
        port=wanted.port,
        counters=str(COUNTERS),
        started_with={"version": wanted.exporter_version, "counters": counters},
    )
    node = Converge(
        Wanted(
            *(Package(name, version, hold=True) for name, version in packages.items()),
            File(str(COUNTERS), counters),
            engine.file,
            exporter.file,
            Unit(ENGINE, fingerprint=engine.fingerprint),
            Unit(EXPORTER, fingerprint=exporter.fingerprint),
        )
    )
    node.packages(name="packages")
    node.files(name="drop-ins and counters")
    node.units(name="services")


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
