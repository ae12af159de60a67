"""Converge shared parts of Prometheus and Alertmanager: account, program, directories."""

from __future__ import annotations

from gpufleet.artifacts import program_archive
from gpufleet.artifacts.program_archive import ProgramArchive
from gpufleet.converge.desired import (
    DesiredState,
    File,
    Group,
    Package,
    User,
)
from gpufleet.monitoring.server_files import ACCOUNT, STATE
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import install_archive
from gpufleet.settings.monitoring_settings import PublishedProgram


def of_archive(
    name: str, archive: PublishedProgram | None, programs: tuple[str, ...]
) -> ProgramArchive | None:
    """Return the publisher's own program, or None for the distribution's package."""
    return ProgramArchive(name, archive, programs) if archive else None


def install(package: Package, program: ProgramArchive | None, unit: File) -> None:
    """
    Converge the account, the unit's file and the program, in this order.

    A package starts its service at once, with its own configuration and on all addresses. So
    gpufleet's unit file is written first, and this unit does not start without gpufleet's
    configuration.
    """
    account = Converge(DesiredState(Group(ACCOUNT), User(ACCOUNT, ACCOUNT, STATE)))
    account.accounts(name="account")
    Converge(DesiredState(unit)).files(name="unit")
    if program is None:
        Converge(DesiredState(package)).packages(name="package")
        return
    Converge(DesiredState(*map(Package, program_archive.PACKAGES))).packages(
        name="what downloads need"
    )
    there = Converge(DesiredState(), watch=(program.directory,))
    install_archive(there, program, name="program", _timeout=program_archive.DOWNLOAD_SECONDS)
