"""All observations of a fleet by `gpufleet doctor`, as values."""

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
    """The cause of a failure that a log line states."""

    cause: str
    """The cause; "": no rule matches the line."""
    do: str
    line: str
    where: str
    """The source of the line, for example `rank 1 on gpu-02` or `kernel of gpu-02`."""
    component: str = ""
    """The rule's component, for example `vllm`, `driver` or `host`."""
    at: float | None = None
    """Time of the line, in seconds since 1970; None: unknown."""
    rule: str = ""
    """The rule's id; "": no rule matches the line."""

    @property
    def quote(self) -> str:
        """Return the line with its source and time."""
        moment = f", {iso(self.at)}" if self.at is not None else ""
        return f"{self.where}{moment}: {self.line}"


@dataclass(frozen=True)
class Alert:
    """A firing alert."""

    name: str
    summary: str
    subject: str = ""
    """The node, model or gateway in its labels."""
    page: str = ""
    since: str = ""


@dataclass(frozen=True)
class FleetObservations:
    """All observations of a fleet."""

    status: FleetStatus
    report: Report
    gateways: Mapping[str, GatewayState | str] = field(default_factory=dict)
    """Gateways' states by node; a sentence if the gateway could not be queried."""
    evidence: Mapping[str, NodeEvidence] = field(default_factory=dict)
    """Evidence by node."""
    logs: Mapping[str, Sequence[LogCause]] = field(default_factory=dict)
    """Causes in each replica's log, the earliest first, without their consequences."""
    kernels: Mapping[str, Sequence[LogCause]] = field(default_factory=dict)
    """Causes in each node's kernel log."""
    speeds: Mapping[str, ReplicaSpeed | str] = field(default_factory=dict)
    """The speed of each replica; a sentence if it could not be read."""
    objectives: Mapping[str, Objectives] = field(default_factory=dict)
    """The objectives of each declared model."""
    sizes: Mapping[tuple[str, str], Sizing] = field(default_factory=dict)
    """The planned memory, by model and node, of models whose log reports too little memory."""
    alerts: Sequence[Alert] = ()
    unseen: tuple[str, ...] = ()
