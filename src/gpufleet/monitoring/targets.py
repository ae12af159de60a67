"""
Collect the targets of a monitoring node: the nodes of the inventory and their servers.

Pure, except that it reads the secret files that the settings name.
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
    """One monitoring node, and the targets that it monitors."""

    name: str
    nodes: Mapping[str, NodeVars] = field(repr=False)
    servers: tuple[Server, ...]
    """The vLLM servers."""
    silent: frozenset[str] = frozenset()
    """The nodes for which it is not known which servers run."""
    measured: tuple[MeasuredReplica, ...] = ()
    """
    The running replicas that have a stored measurement which applies to their settings. Empty if no
    rules are rendered.
    """

    @property
    def settings(self) -> NodeSettings:
        return self.nodes[self.name].settings

    @property
    def monitoring(self) -> Monitoring:
        """
        The node's monitoring settings. Raises `ValueError` if the node is not a monitoring node.
        """
        if self.settings.monitoring is None:
            raise ValueError(f"{self.name} is not a monitoring node")
        return self.settings.monitoring

    def scrapes(self, before: Mapping[str, Iterable[Target]]) -> tuple[Scrape, ...]:
        """
        Return the scrape configurations of the node. `before` has the current targets by file.
        """
        wanted = prometheus.scrapes(self.nodes, self.servers, self.name)
        return prometheus.keep_silent_targets(wanted, before, self.silent)


def secrets(wanted: Mapping[str, str], where: str) -> dict[str, bytes]:
    """
    Return the contents of files on this machine, by the path that each file gets on the node.

    `where` is the setting that names the files. Raises `FleetError` with all files that cannot be
    read or are empty.
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
        # Certificates and keys have several lines and end with a newline. A password gets no
        # newline, because some servers would treat it as a part of the password.
        found[path] = (content + b"\n") if b"\n" in content else content
    if problems:
        raise FleetError(*problems)
    return found
