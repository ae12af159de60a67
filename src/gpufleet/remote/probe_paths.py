"""What a node's probe looks for on its disks, and the probe's program.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet import node_paths
from gpufleet.remote import payload

DISKS = ("/", node_paths.RELEASES, node_paths.UV_CACHE, node_paths.MODELS)
"""Directories whose free space matters: the system's, the releases', their wheels', the models'."""


@dataclass(frozen=True)
class ProbePaths:
    """Paths that a node's probe looks for."""

    models: tuple[str, ...] = ()
    """Directories of models whose descriptions are read."""
    files: tuple[str, ...] = ()
    """Files and directories that flags of servers name."""


def probe_program(paths: ProbePaths) -> payload.Payload:
    """Return the probe of one node."""
    return payload.program(
        "probe/probe", nvml=True, disks=DISKS, models=paths.models, files=paths.files
    )
