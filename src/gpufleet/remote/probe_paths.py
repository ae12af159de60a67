"""Define the paths that a node's probe reads, and build the probe's program. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet import node_paths
from gpufleet.remote import payload

DISKS = ("/", node_paths.RELEASES, node_paths.UV_CACHE, node_paths.MODELS)
"""The directories whose free space a probe measures: the system, releases, wheels and models."""


@dataclass(frozen=True)
class ProbePaths:
    """The paths that the probe of a node reads."""

    models: tuple[str, ...] = ()
    """The directories of models whose descriptions are read."""
    files: tuple[str, ...] = ()
    """The files and directories that flags of servers contain."""


def probe_program(paths: ProbePaths) -> payload.Payload:
    """Return the probe's program for one node."""
    return payload.program(
        "probe/probe", nvml=True, disks=DISKS, models=paths.models, files=paths.files
    )
