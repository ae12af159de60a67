"""Define the paths that a node's probe reads, and build the probe's program. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet import node_paths
from gpufleet.remote import payload

DISKS = ("/", node_paths.RELEASES, node_paths.UV_CACHE, node_paths.MODELS)
"""Directories whose free space is measured, of the system, releases, wheels and models."""


@dataclass(frozen=True)
class ProbePaths:
    """Paths that a node's probe reads."""

    models: tuple[str, ...] = ()
    """Directories of models whose descriptions are read."""
    files: tuple[str, ...] = ()
    """Files and directories in the flags of servers."""


def probe_program(paths: ProbePaths) -> payload.Payload:
    """Return the probe's program for one node."""
    return payload.program(
        "probe/probe", nvml=True, disks=DISKS, models=paths.models, files=paths.files
    )
