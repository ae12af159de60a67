"""Define the findings of checks, and the report that contains them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

SCHEMA = 1
"""Version of `Report.as_json()`. It increases when a key is removed or its meaning changes."""


class Severity(IntEnum):
    """The severity of a finding. A larger number is worse."""

    OK = 0
    INFO = 1
    WARN = 2
    UNKNOWN = 3  # could not be checked: never a pass
    BLOCK = 4

    @property
    def word(self) -> str:
        """Return the severity's name in reports."""
        return self.name.lower()

    @property
    def stops(self) -> bool:
        """Return whether a finding of this severity excludes its node or GPU from work."""
        return self >= Severity.UNKNOWN


class Action(StrEnum):
    """The kinds of steps in a remedy, ordered from the least to the most disruptive."""

    LOOK = "look"  # nothing to do, or a person has to investigate first
    CONFIGURE = "configure"  # a setting of the node or of gpufleet; replicas keep serving
    DRAIN = "drain"
    RESTART_SERVICE = "restart_service"
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    POWER_CYCLE = "power_cycle"
    SERVICE = "service"  # the part has to be inspected or replaced


@dataclass(frozen=True)
class Step:
    """
    One step of a remedy: its kind, and the command or instruction.

    `INVENTORY` in `text` stands for the path of the inventory file.
    """

    action: Action
    text: str


@dataclass(frozen=True)
class Problem:
    """
    A problem that a check found on a node, or on one of its GPUs.

    `found` and `expected` are short sentences without a full stop. `source` tells where the
    expected value comes from: the key of a setting, the node's siblings, the device, or a document.
    `remedy` has the steps of the repair, the least disruptive step first.
    """

    severity: Severity
    found: str
    expected: str
    source: str
    remedy: tuple[Step, ...] = ()
    # The GPU's index in NVML. For a GPU that NVML does not list: its PCI address, or "" if the
    # address is unknown. None if the problem is of the whole node.
    gpu: int | str | None = None


@dataclass(frozen=True)
class GpuId:
    """
    The identifiers of one GPU. A field is None if the GPU did not report the value.

    `index` is None for an expected GPU that NVML does not list.
    """

    index: int | None
    uuid: str | None = None
    bus_id: str | None = None
    serial: str | None = None

    @property
    def name(self) -> str:
        """Return the GPU's index in NVML, or the PCI address of a missing GPU."""
        return str(self.index) if self.index is not None else self.bus_id or "that is gone"


@dataclass(frozen=True)
class Finding:
    """
    The result of one check for one node or GPU.

    `accepted` is the operator's reason and date for accepting the finding. An accepted finding is
    still shown, but does not exclude its node or GPU from work. `cause` is set if this check could
    not run: it names the check whose finding prevented it. Operators read and accept the finding of
    that check instead.
    """

    check: str
    node: str
    severity: Severity
    found: str
    expected: str = ""
    source: str = ""
    remedy: tuple[Step, ...] = ()
    gpu: GpuId | None = None
    accepted: str | None = None
    cause: str | None = None

    @property
    def stops(self) -> bool:
        """Return whether the finding excludes its node or GPU from work."""
        return self.severity.stops and self.accepted is None

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
        return {
            "check": self.check,
            "node": self.node,
            "gpu": None if self.gpu is None else vars(self.gpu),
            "severity": self.severity.word,
            "found": self.found,
            "expected": self.expected,
            "source": self.source,
            "remedy": [{"action": str(step.action), "text": step.text} for step in self.remedy],
            "accepted": self.accepted,
            "runbook": f"docs/checks/{self.check}.md",
        }


@dataclass(frozen=True)
class Report:
    """
    All findings about a fleet, including passed checks, and the facts that the checks used.

    `facts` maps each node to the document of its probe. Nodes without a probe are not in it.
    """

    findings: tuple[Finding, ...]
    facts: Mapping[str, Mapping[str, Any]] = field(repr=False)
    nodes: tuple[str, ...] = ()

    @cached_property
    def node_findings(self) -> Mapping[str, tuple[Finding, ...]]:
        """Return the findings of each node."""
        found: dict[str, list[Finding]] = {name: [] for name in self.nodes}
        for finding in self.findings:
            found.setdefault(finding.node, []).append(finding)
        return {name: tuple(each) for name, each in found.items()}

    def verdict(self, node: str | None = None) -> Severity:
        """
        Return the worst severity, of one node or of all nodes. Accepted findings do not count.
        """
        about = self.findings if node is None else self.node_findings[node]
        worst = (finding.severity for finding in about if finding.accepted is None)
        return max(worst, default=Severity.OK)

    def as_json(self) -> dict[str, Any]:
        """
        Return the report as JSON data (docs/reference/check-report.schema.json).

            {"schema": 1, "fit": false, "verdict": "block", "nodes": {"gpu-01": {"verdict": ...}},
             "findings": [...], "facts": {"gpu-01": the probe's document}}
        """
        return {
            "schema": SCHEMA,
            "fit": not self.verdict().stops,
            "verdict": self.verdict().word,
            "nodes": {
                node: {
                    "verdict": self.verdict(node).word,
                    "stopped": bool(self.stopping(node)),
                    "unfit_gpus": sorted(self.unfit(node)),
                    "gone_gpus": sorted(
                        {
                            each.gpu.bus_id or ""
                            for each in self.missing_gpu_findings(node)
                            if each.gpu
                        }
                    ),
                }
                for node in self.nodes
            },
            "findings": [finding.as_json() for finding in worst_first(self.findings)],
            "facts": dict(self.facts),
        }

    def stopping(self, node: str) -> tuple[Finding, ...]:
        """Return the findings that exclude the whole node from work."""
        return tuple(f for f in self.node_findings[node] if f.gpu is None and f.stops)

    def unfit(self, node: str) -> dict[int, tuple[Finding, ...]]:
        """
        Return the GPUs of a node that are excluded from work, each with the findings that exclude
        it.
        """
        found: dict[int, tuple[Finding, ...]] = {}
        for finding in self.node_findings[node]:
            index = finding.gpu.index if finding.gpu else None
            if index is not None and finding.stops:
                found[index] = (*found.get(index, ()), finding)
        return found

    def missing_gpu_findings(self, node: str) -> tuple[Finding, ...]:
        """Return the findings about expected GPUs that NVML does not list."""
        return tuple(
            f for f in self.node_findings[node] if f.gpu and f.gpu.index is None and f.stops
        )


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings sorted for a reader, the worst first. Accepted findings come last."""
    return sorted(
        findings,
        key=lambda f: (
            f.accepted is not None,
            -f.severity,
            f.node,
            -1 if f.gpu is None or f.gpu.index is None else f.gpu.index,
            f.check,
        ),
    )


SEE_LOG = Step(Action.LOOK, "`dmesg | grep -E 'NVRM|Xid' | tail -30` on the node")


STOP = Step(Action.DRAIN, "stop what uses the GPUs: `systemctl stop 'vllm-*'`")


REBOOT_IT = Step(Action.REBOOT, "`reboot`")


POWER_CYCLE = Step(
    Action.POWER_CYCLE,
    "power the node off and on over the BMC, because GPUs stay powered during a reboot",
)


RETURN_IT = Step(
    Action.SERVICE,
    "if the problem comes back after that: run `nvidia-bug-report.sh`, then have the GPU replaced",
)


def reset_step(index: int) -> Step:
    """Return the step that resets a GPU. GPUs that share NVSwitches have to be reset together."""
    return Step(
        Action.RESET_GPU,
        f"`nvidia-smi -r -i {index}`; on nodes with NVSwitches, reset all GPUs at once: "
        f"`nvidia-smi -r`",
    )
