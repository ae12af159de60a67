"""Run NVIDIA's GPU monitoring: the DCGM host engine and its exporter for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, Value
from gpufleet.gpu_software.repository import package_source
from gpufleet.monitoring.dcgm import CREDENTIALS, declared_packages, services
from gpufleet.monitoring.exporters import Access
from gpufleet.operations.converge import Converge
from gpufleet.settings.cuda_settings import Dcgm, Repository


@deploy("DCGM")
def dcgm(
    wanted: Dcgm,
    repository: Repository,
    access: Access,
    *,
    profiling: bool,
    packages: Iterable[Value] = (),
) -> None:
    """
    Converge the packages (one version for all of them, held), the exporter and its counters.

    `packages` has the packages for the node's machine. Without `packages`, the packages of the
    settings are used. `profiling` is the result of `has_profiling`.
    """
    node = Converge(
        DesiredState(
            package_source(repository),
            *(packages or declared_packages(wanted)),
            *services(wanted, access, profiling=profiling),
        )
    )
    node.packages(name="packages")
    node.files(name="drop-ins, counters and credentials")
    node.units(name="services")
    kept = access if wanted.exporter_version else Access()
    Converge(DesiredState(*kept.only_these(CREDENTIALS))).files(name="no other credentials")
