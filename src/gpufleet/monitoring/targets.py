"""Collect the targets of a monitoring node: the inventory's nodes and their servers.

Pure, except that it reads the secrets named in the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.monitoring import prometheus
from gpufleet.monitoring.prometheus import Scrape, Target
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.serving.servers import Server
from gpufleet.settings.monitoring_settings import Monitoring
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars


@dataclass(frozen=True)
class MonitoringTargets:
    """One monitoring node and its targets."""

    name: str
    nodes: Mapping[str, NodeVars] = field(repr=False)
    servers: tuple[Server, ...]
    """The vLLM servers."""
    silent: frozenset[str] = frozenset()
    """Nodes whose running servers are unknown."""
    measured: tuple[MeasuredReplica, ...] = ()
    """Running replicas with an applicable measurement; empty if rules are not rendered."""

    @property
    def settings(self) -> NodeSettings:
        return self.nodes[self.name].settings

    @property
    def monitoring(self) -> Monitoring:
        """The node's monitoring settings. Raises `ValueError` unless it is a monitoring node."""
        if self.settings.monitoring is None:
            raise ValueError(f"{self.name} is not a monitoring node")
        return self.settings.monitoring

    def scrapes(self, before: Mapping[str, Iterable[Target]]) -> tuple[Scrape, ...]:
        """Return the node's scrapes; `before` has the current target files by path."""
        wanted = prometheus.scrapes(self.nodes, self.servers, self.name)
        return prometheus.keep_silent_targets(wanted, before, self.silent)


def secrets(wanted: Mapping[str, str], where: str) -> dict[str, bytes]:
    """
    Return the contents of files of this machine, by their path on the node.

    `where` is the setting that names the files. Raises `FleetError` with every file that is
    unreadable or empty.
    """
    found: dict[str, bytes] = {}
    problems: list[str] = []
    for path, file in sorted(wanted.items()):
        try:
            content = Path(file).read_bytes().strip()
        except OSError as error:
            problems.append(
                f"{file} cannot be read ({error.strerror}): see `{where}` in group_vars"
            )
            continue
        if not content:
            problems.append(f"{file} is empty: see `{where}` in group_vars")
        # A certificate or a key has lines, each of which ends. A password is one, without an end:
        # some servers would take a line's end for a part of it.
        found[path] = (content + b"\n") if b"\n" in content else content
    if problems:
        raise FleetError(*problems)
    return found
