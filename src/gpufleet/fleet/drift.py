"""Compare nodes with their declaration. Pure: values in, values out.

Drift has three sources:

  * the changes that the deploys would make, from their dry run (`dry_run.py`);
  * the findings of the checks of the driver's versions and of the next boot, from a node's probe;
  * the driver's versions in that probe, compared with the lock. The dry run cannot replace this
    comparison, because on a node whose packages differ it does not reach the loaded module.

A failed comparison is `unknown`, and an unknown node never counts as clean.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpufleet.checks.driver import library_version, loaded_version
from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Finding, Severity
from gpufleet.checks.probe_facts import Reading
from gpufleet.gpu_software.driver_activation import matches_lock
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.node_settings import NodeSettings

SCHEMA = 1
"""Version of `Drift.as_json()`; increased when a key changes its meaning or is removed."""

NODE, SERVE, WATCH = "deploys/node.py", "deploys/vllm.py", "deploys/monitoring.py"
GATEWAY, LITELLM = "deploys/gateway.py", "deploys/litellm.py"


class Urgency(StrEnum):
    """The time at which a difference takes effect."""

    NOW = "now"
    NEXT_BOOT = "next boot"  # fine now, broken after the next reboot
    NEXT_UPGRADE = "next upgrade"  # as soon as the node's own apt or dnf runs


class DriftState(StrEnum):
    """The result of a node's comparison."""

    CLEAN = "clean"
    DRIFTED = "drifted"
    UNKNOWN = "unknown"


# Changes of a deploy that take effect later; all others matter now.
_LATER = (
    (re.compile(r"(enable|disable) "), Urgency.NEXT_BOOT),
    (re.compile(r"\w+ /etc/(modprobe|modules-load|sysctl)\.d/"), Urgency.NEXT_BOOT),
    (re.compile(r"hold "), Urgency.NEXT_UPGRADE),
    (re.compile(r"\w+ /etc/apt/apt\.conf\.d/"), Urgency.NEXT_UPGRADE),
)
# The checks of a node's declared state, and when their findings take effect. All other checks judge
# hardware and load: `gpufleet check`.
WATCHED = {
    "driver-loaded": Urgency.NOW,
    "driver-versions": Urgency.NOW,
    "fabric-manager": Urgency.NOW,
    "nouveau": Urgency.NOW,
    "secure-boot": Urgency.NOW,
    "reboot-module": Urgency.NEXT_BOOT,
    "reboot-kernel": Urgency.NEXT_BOOT,
    "reboot-signature": Urgency.NEXT_BOOT,
    "unattended-upgrades": Urgency.NEXT_UPGRADE,
}


@dataclass(frozen=True)
class Deviation:
    """
    One deviation from the declaration.

    Attributes:
        source: what reported the deviation: "deploys/vllm.py: DCGM | packages",
            "check: reboot-kernel", "gpu_lock".
        what: the deploy's change ("write /etc/x: its content differs"), or the finding.
        matters: when the deviation takes effect.
        remedy: how to correct the deviation.
    """

    source: str
    what: str
    matters: Urgency = Urgency.NOW
    remedy: str = ""


@dataclass(frozen=True)
class Unread:
    """One comparison that was impossible, with the reason."""

    source: str
    why: str


@dataclass(frozen=True)
class NodeDrift:
    """The drift of one node."""

    moved: tuple[Deviation, ...] = ()
    unread: tuple[Unread, ...] = ()

    @property
    def state(self) -> DriftState:
        """
        Return the node's state. A node with a difference has drifted, even if other comparisons
        failed.
        """
        if self.moved:
            return DriftState.DRIFTED
        return DriftState.UNKNOWN if self.unread else DriftState.CLEAN

    def __add__(self, other: NodeDrift) -> NodeDrift:
        return NodeDrift((*self.moved, *other.moved), (*self.unread, *other.unread))


@dataclass(frozen=True)
class Drift:
    """
    The drift of all compared nodes.

    `refused` are the reasons why any deploy would be refused now.
    """

    nodes: Mapping[str, NodeDrift]
    refused: tuple[str, ...] = field(default=())

    @property
    def state(self) -> DriftState:
        """
        Return the state of all nodes.

        The state is drifted if any node has drifted. Otherwise it is unknown if any node is
        unknown, if `refused` has reasons, or if there are no nodes.
        """
        stands = {each.state for each in self.nodes.values()}
        if DriftState.DRIFTED in stands:
            return DriftState.DRIFTED
        unknown = DriftState.UNKNOWN in stands or self.refused or not self.nodes
        return DriftState.UNKNOWN if unknown else DriftState.CLEAN

    @property
    def status(self) -> int:
        """Return the exit status: 0 no drift, 1 drift, 2 unknown."""
        return {DriftState.CLEAN: 0, DriftState.DRIFTED: 1, DriftState.UNKNOWN: 2}[self.state]

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`, as docs/reference/drift.schema.json describes them.

            {"schema": 1, "drift": "drifted", "refused": [], "nodes": {"gpu-01": {"drift": "clean",
             "moved": [{"source": ..., "what": ..., "matters": ..., "remedy": ...}],
             "unread": [{"source": ..., "why": ...}]}}}
        """
        return {
            "schema": SCHEMA,
            "drift": str(self.state),
            "refused": list(self.refused),
            "nodes": {
                name: {
                    "drift": str(node.state),
                    "moved": [{**vars(each), "matters": str(each.matters)} for each in node.moved],
                    "unread": [vars(each) for each in node.unread],
                }
                for name, node in sorted(self.nodes.items())
            },
        }


def deploy_files(settings: NodeSettings) -> tuple[str, ...]:
    """Return the deploy files that bring a node to its declared state, in their order."""
    found = []
    if settings.gpu_node:
        found = [NODE, SERVE] if settings.gpu_lock else [SERVE]
    parts = ((settings.gateway, GATEWAY), (settings.litellm, LITELLM), (settings.monitoring, WATCH))
    return (*found, *(file for part, file in parts if part))


def urgency_of(change: str) -> Urgency:
    """
    Return the urgency of a pending change.

    >>> urgency_of("enable nvidia-fabricmanager.service")
    <Urgency.NEXT_BOOT: 'next boot'>
    """
    later = (when for words, when in _LATER if words.match(change))
    return next(later, Urgency.NOW)


def drift_from_probes(
    answers: Mapping[str, Mapping[str, Any] | str],
    settings: Mapping[str, NodeSettings],
    today: dt.date,
) -> dict[str, NodeDrift]:
    """
    Return each node's drift from its probe.

    If `answers` has a sentence instead of a probe, the node's drift is unknown.
    """
    report = evaluate(answers, settings, today)
    return {
        name: _of_findings(report.node_findings[name])
        + _of_lock(Reading(name, report.facts[name]), settings.get(name, NodeSettings()))
        if name in report.facts
        else _of_findings(report.node_findings[name])
        for name in answers
    }


def _of_findings(findings: Iterable[Finding]) -> NodeDrift:
    moved, unread = [], []
    for each in findings:
        source = f"check: {each.check}"
        if each.accepted is not None or each.severity <= Severity.INFO:
            continue
        if each.severity is Severity.UNKNOWN and (each.check in WATCHED or each.check == "probe"):
            unread.append(Unread(source, each.found))
        elif each.check in WATCHED:
            remedy = each.remedy[0].text if each.remedy else f"docs/checks/{each.check}.md"
            moved.append(Deviation(source, each.found, WATCHED[each.check], remedy))
    return NodeDrift(tuple(moved), tuple(unread))


def _of_lock(node: Reading, settings: NodeSettings) -> NodeDrift:
    """Compare the driver in a probe with the lock. A node without a lock has no drift."""
    if settings.gpu_lock is None:
        return NodeDrift()
    return NodeDrift(tuple(_unlocked(node, settings.gpu_lock)))


def _unlocked(node: Reading, lock: GpuLock) -> Iterator[Deviation]:
    """
    Yield each part of the driver whose version differs from the lock.

    Missing parts, and the fabric manager's version, are left to the checks and the deploy.
    """
    parts = {
        "the loaded kernel module": (loaded_version(node), Urgency.NOW),
        "the module on the disk": (node.known("driver", "disk", "version"), Urgency.NEXT_BOOT),
        "libnvidia-ml.so.1": (library_version(node), Urgency.NOW),
    }
    for part, (version, when) in parts.items():
        if version is not None and not matches_lock(str(version), lock.driver):
            said = f"{part} is {version}, but the lock has {lock.driver}"
            yield Deviation("gpu_lock.driver", said, when, "gpufleet deploy node INVENTORY")
