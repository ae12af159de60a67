"""Compute the desired state of the timer that writes a node's facts every minute.

Pure, except that this module reads lock files.
"""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.desired import UNIT_DIRECTORY, DesiredState, Directory, File, Unit
from gpufleet.errors import FleetError
from gpufleet.fleet import node_records
from gpufleet.remote import payload
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.templates import read_template

SERVICE, TIMER = "gpufleet-facts.service", "gpufleet-facts.timer"

UNITS = (SERVICE, TIMER)

PROGRAM = node_paths.NODE_FACTS

FACTS = f"{node_paths.TEXTFILES}/facts.prom"


def facts_state(settings: NodeSettings, gpus: int | None) -> DesiredState:
    """Return the desired state for a node's facts. `gpus` is the number of GPUs on its PCI bus."""
    told = node_records.declaration(settings, gpus=gpus, release=_release(settings))
    return DesiredState(
        # The exporter, which is not root, must enter it; secret files in it belong to root.
        Directory(node_paths.STATE),
        Directory(node_paths.TEXTFILES),
        Directory(node_paths.DEPLOYS),
        Directory(node_paths.CONFIGURATION),
        File(node_paths.FACTS_DECLARED, told),
        # Compiled programs of the run, so that the next run need not compile them.
        Directory(payload.CODE.rpartition("/")[0]),
        Directory(payload.CODE, mode=0o700),
        Directory(node_paths.PROGRAMS, mode=0o755),
        File(PROGRAM, payload.archive("monitoring/node_facts", nvml=True), mode=0o755),
        *(
            File(f"{UNIT_DIRECTORY}/{each}", read_template(f"node_facts/{each}").encode())
            for each in UNITS
        ),
        Unit(TIMER),
    )


def _release(settings: NodeSettings) -> str | None:
    """Return the id of the release that the node should serve, or None if it is unknown."""
    engines = settings.used_engines
    # A node with two engines has no single release that it should serve.
    if len(engines) != 1 or not settings.gpu_node:
        return None
    try:
        return release_of(engines[0]).id
    except FleetError:
        return None  # its installer reports what is wrong with its lock
