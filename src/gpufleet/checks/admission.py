"""Decide from the findings of checks on which GPUs gpufleet may place replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpufleet.checks.finding import Finding, Report
from gpufleet.formatting import node_ranges
from gpufleet.node.topology import Node
from gpufleet.sanitize import printable
from gpufleet.settings.node_settings import NodeSettings

# If one of these checks stops a node, the probe of the node may lack GPUs, their memory, links
# between them, or the driver. The probe therefore does not show the node as it is after a repair.
_HIDES_HARDWARE = frozenset(
    {
        "driver-loaded",
        "fabric-manager",
        "fabric-state",
        "fabric-units",
        "gpu-answers",
        "gpu-count",
        "gpu-identical",
        "gpu-start",
        "mig",
        "nouveau",
        "nvlink-errors",
        "nvlink-links",
        "nvlink-width",
        "probe",
        "rdma",
        "row-remap-failed",
        "secure-boot",
        "sxid",
    }
)


@dataclass(frozen=True)
class Admission:
    """The nodes with their usable GPUs, and the reasons that exclude nodes from work."""

    nodes: Mapping[str, Node]
    """
    All nodes by name. `Node.gpus` has only the usable GPUs, and `Node.unfit` has the reasons that
    exclude the other GPUs.

    A node with problems keeps all GPUs of its probe.
    """
    problems: tuple[str, ...]
    hidden: frozenset[str]
    """The names of nodes with problems because of which their probes do not show all hardware."""


def admit(report: Report, nodes: Iterable[Node], settings: Mapping[str, NodeSettings]) -> Admission:
    """
    Return which nodes and GPUs may serve, and the problems that stop the run.

    Only nodes with declared models or a declared number of GPUs are judged, because an inventory
    may also have load balancers.

    If `checks.degraded` is set for a node, its unfit GPUs are excluded, its missing GPUs are
    ignored, and neither stops the run. Problems of the whole node always stop the run.
    """
    found: dict[str, Node] = {}
    everything: list[Finding | str] = []
    hidden = set()
    for node in nodes:
        wanted = settings.get(node.name, NodeSettings())
        if not wanted.serving and wanted.gpus.count is None:
            found[node.name] = node
            continue
        # A check that was skipped because of another finding needs no repair of its own.
        problems: list[Finding | str] = [
            finding for finding in report.stopping(node.name) if finding.cause is None
        ]
        reserved = set(wanted.gpus.reserved)
        # Problems of reserved GPUs do not count, because other programs use these GPUs.
        unfit = {gpu: each for gpu, each in report.unfit(node.name).items() if gpu not in reserved}
        gone = report.missing_gpu_findings(node.name)
        if (unfit or gone) and not wanted.checks.degraded:
            problems += (*gone, *(each[0] for each in unfit.values()))
            rest = len(node.gpus) - len({gpu.index for gpu in node.gpus} & set(unfit))
            problems.append(
                f"{node.name}: {rest} of its GPUs are fit. To serve on these GPUs until the "
                f"others are repaired, set `checks.degraded: true` in group_vars or host_vars"
            )
        everything += problems
        if problems and (gone or not node.gpus or _hides_hardware(report, node.name)):
            hidden.add(node.name)
        found[node.name] = node if problems else _without(node, unfit)
    return Admission(found, tuple(_sentences(everything)), frozenset(hidden))


def _sentences(problems: Iterable[Finding | str]) -> Iterator[str]:
    """
    Yield each problem as a sentence, without duplicates.

    Nodes with the same finding about the whole node share one sentence.
    """
    nodes: dict[Finding | str, list[str]] = {}
    for each in problems:
        if isinstance(each, Finding):
            key = replace(each, node="") if each.gpu is None else each
            nodes.setdefault(key, []).append(each.node)
        else:
            nodes.setdefault(each, [])
    for problem, names in nodes.items():
        if isinstance(problem, Finding):
            yield finding_sentence(replace(problem, node=node_ranges(names)))
        else:
            yield problem


def _hides_hardware(report: Report, node: str) -> bool:
    return any(each.stops and each.check in _HIDES_HARDWARE for each in report.node_findings[node])


def _without(node: Node, unfit: Mapping[int, tuple[Finding, ...]]) -> Node:
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.index not in unfit),
        unfit={index: short_reasons(each) for index, each in sorted(unfit.items())},
    )


def finding_sentence(finding: Finding) -> str:
    """
    Return the message of a finding that stops a run: what was found, what was expected, the first
    step of the remedy, and the documentation.

    Characters that could disturb terminals and logs are replaced, because the text comes from the
    node.
    """
    gpu = f" GPU {finding.gpu.name}" if finding.gpu else ""
    expected = f"; expected {finding.expected} ({finding.source})" if finding.expected else ""
    first = f": {finding.remedy[0].text}" if finding.remedy else ""
    return printable(
        f"{finding.node}{gpu}: {finding.check} ({finding.severity.word}): {finding.found}"
        f"{expected}{first} (docs/checks/{finding.check}.md; `gpufleet check` shows everything)"
    )


def short_reasons(findings: tuple[Finding, ...]) -> str:
    """Return the names of the checks that exclude a GPU: `nvlink-links, ecc-uncorrected`."""
    worst = max(finding.severity for finding in findings)
    names = dict.fromkeys(each.check for each in findings if each.severity == worst)
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
