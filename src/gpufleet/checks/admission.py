"""Which GPUs work may be placed on, by what the checks found. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpufleet.checks.finding import Finding, Report
from gpufleet.errors import FleetError
from gpufleet.node.topology import Node
from gpufleet.sanitize import printable
from gpufleet.settings.node_settings import NodeSettings


def admitted_nodes(
    report: Report, nodes: Iterable[Node], settings: Mapping[str, NodeSettings]
) -> dict[str, Node]:
    """
    Return the nodes with the GPUs that may be used; `Node.unfit` says why not the others.

    Raises `FleetError` naming everything that stops work, on every node that declares models or
    GPUs: a load balancer may be in the same inventory. Where `checks.degraded` is set, a GPU that
    is unfit is left out, one that is gone is not waited for, and neither stops anything; what
    concerns the whole node always does.
    """
    found: dict[str, Node] = {}
    problems: list[str] = []
    for node in nodes:
        wanted = settings.get(node.name, NodeSettings())
        if not wanted.serving and wanted.gpus.count is None:
            found[node.name] = node
            continue
        # What was not asked because of another finding is right again with that one.
        problems += (
            finding_sentence(finding)
            for finding in report.stopping(node.name)
            if finding.cause is None
        )
        reserved = set(wanted.gpus.reserved)
        # What is wrong with GPUs that others use is theirs to put right.
        unfit = {gpu: each for gpu, each in report.unfit(node.name).items() if gpu not in reserved}
        gone = report.missing_gpu_findings(node.name)
        if (unfit or gone) and not wanted.checks.degraded:
            problems += map(finding_sentence, (*gone, *(each[0] for each in unfit.values())))
            rest = len(node.gpus) - len({gpu.index for gpu in node.gpus} & set(unfit))
            problems.append(
                f"{node.name}: {rest} of its GPUs are fit: set `checks.degraded: true` in "
                "group_vars or host_vars to serve on those meanwhile"
            )
        found[node.name] = replace(
            node,
            gpus=tuple(gpu for gpu in node.gpus if gpu.index not in unfit),
            unfit={index: short_reasons(each) for index, each in sorted(unfit.items())},
        )
    if problems:
        raise FleetError(*problems)
    return found


def finding_sentence(finding: Finding) -> str:
    """
    Return a finding for a run that it stops: what, why, what to do, where to read on.

    For terminals and logs: what the node put into it is printable.
    """
    gpu = f" GPU {finding.gpu.name}" if finding.gpu else ""
    expected = f"; expected {finding.expected} ({finding.source})" if finding.expected else ""
    first = f": {finding.remedy[0].text}" if finding.remedy else ""
    return printable(
        f"{finding.node}{gpu}: {finding.check} ({finding.severity.word}): {finding.found}"
        f"{expected}{first} (docs/checks/{finding.check}.md; `gpufleet check` shows everything)"
    )


def short_reasons(findings: tuple[Finding, ...]) -> str:
    """Return why a GPU is left out, short: `nvlink-links, ecc-uncorrected`."""
    worst = max(finding.severity for finding in findings)
    names = dict.fromkeys(each.check for each in findings if each.severity == worst)
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
