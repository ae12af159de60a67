"""What Prometheus and Alertmanager have in common on a node: account, program, directories."""

from __future__ import annotations

from gpufleet.artifacts import program_archive
from gpufleet.artifacts.program_archive import Archived
from gpufleet.converge.desired import (
    File,
    Group,
    Package,
    User,
    Wanted,
)
from gpufleet.monitoring.server_files import ACCOUNT, STATE
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import install_archive
from gpufleet.settings.monitoring_settings import Archive


def of_archive(name: str, archive: Archive | None, programs: tuple[str, ...]) -> Archived | None:
    """Return the publisher's own program, None if the distribution's package is wanted."""
    return Archived(name, archive, programs) if archive else None


def install(package: Package, program: Archived | None, unit: File) -> None:
    """
    Converge the account, the unit's file and the program, in this order.

    A package starts what it brings at once, with its own configuration on all addresses: the unit
    is there before, and does not start without a configuration of ours.
    """
    account = Converge(Wanted(Group(ACCOUNT), User(ACCOUNT, ACCOUNT, STATE)))
    account.accounts(name="account")
    Converge(Wanted(unit)).files(name="unit")
    if program is None:
        Converge(Wanted(package)).packages(name="package")
        return
    Converge(Wanted(*map(Package, program_archive.PACKAGES))).packages(name="what downloads need")
    there = Converge(Wanted(), watch=(program.directory,))
    install_archive(there, program, name="program", _timeout=program_archive.DOWNLOAD_SECONDS)
