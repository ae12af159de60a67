"""Define the values that `gpufleet doctor` has observed on a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpufleet.checks.finding import Report
from gpufleet.doctor.node_evidence import NodeEvidence
from gpufleet.doctor.replica_speed import ReplicaSpeed
from gpufleet.network.haproxy import GatewayState
from gpufleet.serving.rank_status import iso
from gpufleet.serving.status import FleetStatus
from gpufleet.settings.monitoring_settings import Objectives
from gpufleet.sizing.options import Sizing


@dataclass(frozen=True)
class LogCause:
    """A line of a log, and the cause of the failure that it shows."""

    cause: str
    """The cause, or "" if no rule matches the line."""
    do: str
    line: str
    where: str
    """Where the line is, for example `rank 1 on gpu-02` or `kernel of gpu-02`."""
    component: str = ""
    """The component of the rule, for example `vllm`, `driver` or `host`."""
    at: float | None = None
    """The time of the line, in seconds since 1970. None if it is unknown."""
    rule: str = ""
    """The id of the rule, or "" if no rule matches the line."""

    @property
    def quote(self) -> str:
        """Return the line with its source and time."""
        moment = f", {iso(self.at)}" if self.at is not None else ""
        return f"{self.where}{moment}: {self.line}"


@dataclass(frozen=True)
class Alert:
    """An alert that fires."""

    name: str
    summary: str
    subject: str = ""
    """The node, model or gateway in the alert's labels."""
    page: str = ""
    since: str = ""


@dataclass(frozen=True)
class FleetObservations:
    """Everything that was observed on a fleet."""

    status: FleetStatus
    report: Report
    gateways: Mapping[str, GatewayState | str] = field(default_factory=dict)
    """The state of the gateway on each node, or a sentence if the gateway could not be queried."""
    evidence: Mapping[str, NodeEvidence] = field(default_factory=dict)
    """The evidence from each node."""
    logs: Mapping[str, Sequence[LogCause]] = field(default_factory=dict)
    """The causes that each replica's log shows, the earliest first, without their consequences."""
    kernels: Mapping[str, Sequence[LogCause]] = field(default_factory=dict)
    """The causes that each node's kernel log shows."""
    speeds: Mapping[str, ReplicaSpeed | str] = field(default_factory=dict)
    """The speed of each replica, or a sentence if the speed could not be read."""
    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    """The objectives of each declared model."""
    sizes: Mapping[tuple[str, str], Sizing] = field(default_factory=dict)
    """The planned memory of models whose log reports too little memory, by model and node."""
    alerts: Sequence[Alert] = ()
    unseen: tuple[str, ...] = ()
