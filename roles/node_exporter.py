"""Run Prometheus' node exporter, from the distribution's package or the publisher's program."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.artifacts import program_archive
from gpufleet.converge.desired import DesiredState
from gpufleet.monitoring.exporters import Access
from gpufleet.monitoring.node_exporter import CREDENTIALS, archive, required_state, services, unit
from gpufleet.operations.check_exporter_flags import CHECK_SECONDS, check_exporter_flags
from gpufleet.operations.converge import Converge
from gpufleet.operations.install_archive import (
    install_archive,
    installed_versions,
    remove_other_versions,
)
from gpufleet.settings.monitoring_settings import NodeExporter


@deploy("node exporter")
def node_exporter(wanted: NodeExporter, access: Access) -> None:
    """
    Converge program, credentials, unit and the running process.

    The running exporter is not changed before the program on the node has accepted its flags.
    """
    program = archive(wanted)
    rendered = unit(wanted, access)
    ground = Converge(
        DesiredState(*required_state(wanted)), watch=(program.directory,) if program else ()
    )
    ground.packages(name="packages")
    ground.accounts(name="account")
    if program:
        install_archive(ground, program, name="program", _timeout=program_archive.DOWNLOAD_SECONDS)
    node = Converge(
        DesiredState(*required_state(wanted), *services(rendered, access)), probed=False
    )
    check_exporter_flags(
        node, rendered, wanted, access, name="check the exporter's flags", _timeout=CHECK_SECONDS
    )
    node.files(name="unit and credentials")
    node.units(name="service")
    if program:
        remove_other_versions(installed_versions(program), program, name="no other versions")
    old = Converge(DesiredState(*access.only_these(CREDENTIALS)), probed=False)
    old.files(name="no other credentials")
