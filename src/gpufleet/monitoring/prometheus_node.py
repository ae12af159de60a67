"""
Compute the desired state of Prometheus on a monitoring node: unit, configuration, targets. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet import node_paths
from gpufleet.artifacts.program_archive import ProgramArchive
from gpufleet.converge.desired import DesiredState, Directory, File, NoOtherFiles
from gpufleet.monitoring import render
from gpufleet.monitoring.prometheus import Scrape, host_port
from gpufleet.monitoring.server_files import STATE, credentials, directories
from gpufleet.serving.unit import UnitFile, whole_unit
from gpufleet.settings.monitoring_settings import Prometheus

UNIT = "prometheus.service"
HOME = node_paths.PROMETHEUS
DATA = f"{STATE}/metrics2"


def unit(server: Prometheus, program: ProgramArchive | None) -> UnitFile:
    """
    Return Prometheus' unit, for the program of the distribution's package or of the publisher.
    """
    return whole_unit(
        "prometheus/prometheus.service.j2",
        UNIT,
        started_with={"archive": program.version if program else ""},
        program=program.program("prometheus") if program else "/usr/bin/prometheus",
        home=HOME,
        data=DATA,
        retention_days=server.retention_days,
        address=host_port(server.listen, server.port),
    )


def configuration_files(
    configuration: Mapping[str, bytes], secrets: Mapping[str, bytes]
) -> DesiredState:
    """
    Return Prometheus' directories, configuration and credentials. Other rules and credentials are
    removed.
    """
    return DesiredState(
        *directories(HOME, DATA),
        # These directories must exist when Prometheus starts. Prometheus does not watch directories
        # that are created later.
        *(Directory(f"{HOME}/{each}") for each in ("own-rules", "own-targets", "targets")),
        *(File(f"{HOME}/{path}", content) for path, content in configuration.items()),
        *credentials(HOME, secrets),
        NoOtherFiles(f"{HOME}/rules/*.yml"),
    )


def target_files(wanted: tuple[Scrape, ...]) -> DesiredState:
    """Return the files with targets. Other files with targets are removed."""
    found = render.targets(wanted).items()
    return DesiredState(
        *(File(f"{HOME}/{path}", content) for path, content in found),
        NoOtherFiles(f"{HOME}/targets/*.json"),
    )
