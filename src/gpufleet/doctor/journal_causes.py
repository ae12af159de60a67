"""Find the causes of failures in the journals of replicas and in kernel logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from gpufleet.checks.finding import Report, Severity
from gpufleet.doctor.node_evidence import JournalLine, NodeEvidence
from gpufleet.doctor.observations import LogCause
from gpufleet.failures.diagnosis import Finding, Findings, explain
from gpufleet.failures.evidence import Evidence
from gpufleet.failures.log_reader import LogLine
from gpufleet.failures.rule_file import Advice
from gpufleet.sanitize import printable
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import FleetStatus, ReplicaStatus

LIVES = 2
"""
The number of a unit's runs to read. If the unit has just restarted, the failure is in the run
before.
"""
GATEWAY = "gateway"
"""
The key of a node's gateway in dicts that have replicas' ids as keys. It cannot be the id of a
replica, because these ids end with a number.
"""
OF_HOSTS = frozenset({"host", "rdma"})
"""The components of rules about kernel messages. The node's checks judge messages about GPUs."""


def replica_causes(
    status: FleetStatus, evidence: Mapping[str, NodeEvidence], report: Report, inventory: str
) -> dict[str, tuple[LogCause, ...]]:
    """Return, by replica, the causes that the replica's journals show, the earliest first."""
    found = {}
    for each in status.replicas:
        # Journals of multi-node replicas are read even if the replica serves.
        if each.health is Health.SERVES and not any(rank.restarts for rank in each.ranks):
            continue
        journals = {
            rank.node: (rank.rank, lines)
            for rank in each.ranks
            if (known := evidence.get(rank.node)) and (lines := known.stages.get(each.id))
        }
        if journals:
            facts = _facts(journals, report, _signal(each, evidence))
            found[each.id] = tuple(_of_replica(each, journals, facts, inventory))
    return found


def _signal(replica: ReplicaStatus, evidence: Mapping[str, NodeEvidence]) -> str | None:
    """
    Return the signal that ended the replica's process on one of its nodes, "" if there was none, or
    None if it is unknown.
    """
    known = [evidence[rank.node] for rank in replica.ranks if rank.node in evidence]
    if any(is_killed_for_memory(line.text, replica.id) for each in known for line in each.kernel):
        return "SIGKILL"
    said = [each.units[replica.id].signal for each in known if replica.id in each.units]
    return next(filter(None, said), None if None in said or not said else "")


def is_killed_for_memory(line: str, replica: str) -> bool:
    """
    Return whether the kernel's line reports that it killed a process of the replica's unit because
    memory was short.
    """
    return line.startswith("oom-kill:") and f"/vllm-{replica}.service," in f"{line},"


def _of_replica(
    replica: ReplicaStatus,
    journals: Mapping[str, tuple[int, Sequence[JournalLine]]],
    facts: Evidence,
    inventory: str,
) -> Iterator[LogCause]:
    places = {
        f"rank {rank} on {node}" if len(replica.ranks) > 1 else node: lines
        for node, (rank, lines) in journals.items()
    }
    kept = {
        place: last_lives(lines, LIVES if replica.health is Health.STARTS else 1)
        for place, lines in places.items()
    }
    findings = explain(
        (line for place, lines in kept.items() for line in log_lines(place, lines)),
        facts,
    )
    yield from _causes(findings, inventory, replica.id)


def gateway_causes(
    evidence: Mapping[str, NodeEvidence], inventory: str
) -> dict[str, tuple[LogCause, ...]]:
    """Return the causes that the journals of gateways show. The keys are `gateway NODE`."""
    found = {}
    for node, each in evidence.items():
        if lines := each.stages.get(GATEWAY):
            place = f"gateway on {node}"
            last = last_lives(lines, 1)
            if all(line.by_systemd for line in last):
                last = last_lives(lines, 2)  # the unit has just been started again
            findings = explain(log_lines(place, last))
            found[f"{GATEWAY} {node}"] = tuple(_causes(findings, inventory, "REPLICA"))
    return found


def kernel_causes(evidence: NodeEvidence, inventory: str) -> tuple[LogCause, ...]:
    """
    Return the failures of the host that the node's kernel log shows. The node's checks judge GPUs.
    """
    place = f"kernel of {evidence.node}"
    findings = explain(log_lines(place, evidence.kernel))
    causes = replace(
        findings,
        causes=tuple(each for each in findings.causes if each.rule.component in OF_HOSTS),
        unknown=None,
    )
    return tuple(_causes(causes, inventory, "REPLICA"))


def last_lives(lines: Sequence[JournalLine], count: int) -> Sequence[JournalLine]:
    """Return the lines of a unit's last `count` runs. The last run may still be going on."""
    starts = [
        at for at, line in enumerate(lines) if line.by_systemd and line.text.startswith("Starting ")
    ] or [
        at for at, line in enumerate(lines) if line.by_systemd and line.text.startswith("Started ")
    ]
    return lines[starts[-count] :] if len(starts) >= count else lines


def log_lines(place: str, lines: Iterable[JournalLine]) -> Iterator[LogLine]:
    """
    Yield the lines of a journal in the form that the log rules need, with the journal's own times.
    """
    for number, line in enumerate(lines, 1):
        moment = f"{datetime.fromtimestamp(line.at, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        for text in line.text.splitlines():
            yield LogLine(place, number, f"{moment} {text}")


def _facts(nodes: Iterable[str], report: Report, signal: str | None) -> Evidence:
    """
    Return the evidence outside the replica's journals. Rules with several possible causes need it.
    """
    checks: dict[str, bool] = {}
    names: list[str] = []
    for node in nodes:
        for each in report.node_findings.get(node, ()):
            if each.severity is not Severity.UNKNOWN:
                good = each.severity <= Severity.INFO or each.accepted is not None
                checks[each.check] = checks.get(each.check, True) and good
        gpus = report.facts.get(node, {}).get("gpus")
        if isinstance(gpus, list):
            names += [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, Mapping)]
    return Evidence(checks=checks, gpus=tuple(names) if names else None, signal=signal)


def _causes(findings: Findings, inventory: str, replica: str) -> Iterator[LogCause]:
    for each in findings.causes:
        yield _cause(each, inventory, replica)
    if not findings.causes and (known := _told_apart(findings)):
        yield _cause(known, inventory, replica)
    elif findings.unknown and (place := findings.unknown.exception or findings.unknown.first_error):
        at = place.stamp.moment.replace(tzinfo=UTC).timestamp() if place.stamp else None
        yield LogCause("", "", printable(place.text), place.source, at=at)


def _told_apart(findings: Findings) -> Finding | None:
    """
    Return a consequence whose own cause the evidence shows, such as a worker that a signal ended.
    """
    return next(
        (
            each
            for each in findings.consequences
            if len(each.causes) == 1 and each.causes[0] in [tell.advice for tell in each.rule.tells]
        ),
        None,
    )


def _cause(found: Finding, inventory: str, replica: str) -> LogCause:
    looks = found.looks or ("",) * len(found.causes)
    return LogCause(
        f"{found.detail}; {found.cause}" if found.detail else found.cause,
        "\n".join(
            _advice(each, inventory, replica) + (f" (if {look})" if look else "")
            for each, look in zip(found.causes, looks, strict=True)
        ),
        printable(found.first.text),
        found.first.source,
        found.rule.component,
        found.first_at.timestamp() if found.first_at else None,
        found.rule.id,
    )


def _advice(advice: Advice, inventory: str, replica: str) -> str:
    text = advice.fix
    if advice.setting:
        text += f" Setting: {advice.setting}."
    if advice.command:
        command = advice.command.replace("INVENTORY", inventory).replace("REPLICA", replica)
        text += f" Type `{command}`."
    return text
