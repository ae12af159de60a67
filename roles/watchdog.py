"""Run the watchdog, which detects a node's stalled vLLM servers."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import Absent, DesiredState, Directory, File, Unit, UnitGone
from gpufleet.fleet.run import NodePlan
from gpufleet.operations.converge import Converge
from gpufleet.remote import payload
from gpufleet.serving import watchdog_unit
from gpufleet.serving.credentials import API_KEY_FILE
from gpufleet.serving.unit import local_address


@deploy("watchdog")
def watchdog(here: NodePlan) -> None:
    """
    Converge the watchdog of this node's stages, one program for all watched stages.

    This runs after the operations on the stages, so new stages already run. A change restarts only
    the watchdog. If the node has no watched stages, the watchdog is removed and its dumps remain.
    """
    told = configuration(here)
    node = Converge(wanted(told), probed=False)
    if told is None:
        # The service stops first, because it would write its metrics again.
        node.units(name="remove the service")
        node.files(name="remove program, configuration and metrics")
        return
    node.files(name="program and configuration")
    node.units(name="service")


def wanted(told: str | None) -> DesiredState:
    """
    Return the desired state of a node with this watchdog configuration, or without a watchdog.
    """
    if told is None:
        # The metrics are removed too, because the watchdog no longer updates them.
        gone = (watchdog_unit.METRICS, watchdog_unit.CONFIGURATION, watchdog_unit.PROGRAM)
        return DesiredState(UnitGone(watchdog_unit.SERVICE), *map(Absent, gone))
    unit = watchdog_unit.service(told)
    return DesiredState(
        Directory(node_paths.CONFIGURATION),
        Directory(watchdog_unit.STATE),
        Directory(watchdog_unit.TEXTFILE),
        Directory(watchdog_unit.DUMPS, mode=0o700),
        File(watchdog_unit.PROGRAM, payload.archive("watchdog/watchdog"), mode=0o755),
        File(watchdog_unit.CONFIGURATION, told.encode()),
        unit.file,
        Unit(watchdog_unit.SERVICE, fingerprint=unit.fingerprint),
    )


def configuration(here: NodePlan) -> str | None:
    """Return the watchdog's configuration of the node, or None without watched stages."""
    settings = here.settings
    if settings.servers is None or not watchdog_unit.is_needed(here.stages, settings.serving):
        return None
    return watchdog_unit.configuration(
        here.stages,
        settings.serving,
        address=local_address(settings.servers.listen),
        key_file=API_KEY_FILE if settings.servers.api_key_file else None,
        releases={each.engine: release_of(each) for each in settings.used_engines},
        listen=settings.servers.listen,
        port=settings.servers.watchdog_port,
    )
