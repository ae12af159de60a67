"""Read Prometheus' targets from its node, so that nodes that do not answer keep their targets."""

from __future__ import annotations

from collections.abc import Mapping

from pyinfra import host, logger
from pyinfra.context import ctx_host, ctx_state

from gpufleet.monitoring.prometheus import Target
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.remote import payload
from gpufleet.remote.query import query

LOOK_SECONDS = 30


def known_targets(node: MonitoringTargets, directory: str) -> Mapping[str, list[Target]]:
    """Return the contents of the target files in a directory, or {} if every node answered."""
    if not node.silent:
        return {}
    program = payload.program("monitoring/target_files", directory=directory)
    here = ctx_host.get()
    answer = query(ctx_state.get(), [here], lambda _: program, LOOK_SECONDS, "the query of targets")
    found = answer[here.name]
    if isinstance(found, str):
        logger.warning("%s%s; known targets may be lost", host.print_prefix, found)
        return {}
    files: Mapping[str, list[Target]] = found["files"]
    return files
