"""
Find the problems of a fleet from its nodes, gateways, journals and alerts. Pure.

Each symptom is combined with what explains it. For a replica that is down, these are a line of its
log, a check of its GPU, and earlier changes. All verdicts come from `status`, `check` and the log
rules, and this module only combines them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from gpufleet.checks.finding import Finding, Severity
from gpufleet.doctor.fleet_diagnosis import Diagnosis, Impact, Problem, worst_first
from gpufleet.doctor.gateway_problems import certificate_problems, gateway_problems
from gpufleet.doctor.journal_causes import is_killed_for_memory
from gpufleet.doctor.node_problems import failed_checks, kernel_subject, marks_of, node_problems
from gpufleet.doctor.observations import FleetObservations, LogCause
from gpufleet.doctor.planned_memory import RULES, size_sentence
from gpufleet.doctor.slow_replicas import slow_problems, unknown_speeds
from gpufleet.errors import FleetError
from gpufleet.formatting import count_of, format_duration, join_names, suggestion
from gpufleet.serving.rank_status import Health, LastRestart, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus

RECENT_SECONDS = 86400.0
"""Restarts and changes that are older than this do not explain a current problem."""
AGAIN_SECONDS = 3600.0
"""A replica that serves is still shown for this time after a restart, because it may fail again."""
KERNEL_SECONDS = 600.0
"""
The longest time between a kernel message and a failure that it explains. The kernel reports a hung
task only after two minutes, and then repeatedly.
"""
CLOCK_SECONDS = 60.0
"""A cause may be logged up to this time after its effect, as in `diagnosis.SKEW`."""
OF_NODES = frozenset({"driver", "cuda", "nccl", "rdma", "host"})
"""The components of rules whose cause may be in the node."""
STOPPED = "the replica was stopped by hand, or by a deploy that did not finish"
MOST_SENTENCES = 4
"""
The most sentences for one replica. A sentence for each of eight ranks would not help the reader.
"""


def diagnose(observed: FleetObservations, now: float, inventory: str = "INVENTORY") -> Diagnosis:
    """Return the problems of the fleet, the worst first. `now` is in seconds since 1970."""
    problems = [
        *_replicas(observed, now, inventory),
        *_missing(observed, inventory),
        *gateway_problems(observed, inventory),
        *certificate_problems(observed, now),
        *marks_of(observed, now, inventory),
        *slow_problems(observed, inventory),
    ]
    causes = {each.because for each in problems if each.impact >= Impact.DEGRADED}
    causes |= {node for nodes in observed.status.may_have.values() for node in nodes}
    problems += [
        replace(each, impact=Impact.DEGRADED) if each.subject in causes else each
        for each in node_problems(observed, inventory)
    ]
    named = {name for each in problems for name in (each.subject, *each.names)}
    problems += _alerts(observed, named)
    unseen = (
        *observed.unseen,
        *unknown_speeds(observed),
        *(text for each in observed.evidence.values() for text in each.unread),
    )
    return Diagnosis(worst_first(problems), _serving(observed.status), tuple(dict.fromkeys(unseen)))


def problems_of(
    found: Diagnosis, name: str, status: FleetStatus, nodes: Collection[str]
) -> Diagnosis:
    """
    Return the problems of one model, replica or node, and the problems that cause them.

    Raises `FleetError` if there is no model, replica or node with this name.
    """
    known = {*nodes, *(each.id for each in status.replicas), *(e.model for e in status.replicas)}
    if name not in known:
        raise FleetError(
            f"{name}: there is no model, replica or node with this "
            f"name{suggestion(name, sorted(known))}"
        )
    replicas = [each for each in status.replicas if name in (each.model, each.id)]
    names = {name, *(each.id for each in replicas)}
    places = {rank.node for each in replicas for rank in each.ranks}
    kept = [
        each
        for each in found.problems
        # Also the problems of its nodes, but not those of other replicas on these nodes.
        if names & {*each.names} or (places & {*each.names} and {*each.names} <= {*nodes})
    ]
    causes = {each.because for each in kept}
    return replace(
        found, problems=tuple(e for e in found.problems if e in kept or e.subject in causes)
    )


def journals_to_read(status: FleetStatus, now: float) -> dict[str, tuple[str, ...]]:
    """Return, by node, the replicas whose journals may explain a failure."""
    found: dict[str, list[str]] = defaultdict(list)
    for replica in status.replicas:
        if replica.health is not Health.SERVES or _restarted(replica, now):
            for rank in replica.ranks:
                found[rank.node].append(replica.id)
    return {node: tuple(each) for node, each in found.items()}


def ranks_to_connect(status: FleetStatus) -> dict[str, tuple[str, ...]]:
    """
    Return, by node, the replicas that have an unhealthy rank on this node and rank 0 on a different
    node.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for replica in status.replicas:
        for rank in replica.ranks:
            if rank.rank and not rank.health.is_good and not rank.stopped:
                found[rank.node].append(replica.id)
    return {node: tuple(each) for node, each in found.items()}


# -- replicas


def _replicas(observed: FleetObservations, now: float, inventory: str) -> Iterator[Problem]:
    for replica in observed.status.replicas:
        if replica.health is not Health.SERVES or _restarted(replica, now):
            yield _replica(observed, replica, now, inventory)


def _replica(
    observed: FleetObservations, replica: ReplicaStatus, now: float, inventory: str
) -> Problem:
    serves = replica.health is Health.SERVES
    drained = all(observed.status.out.drains(replica.id, rank.node) for rank in replica.ranks)
    nodes = tuple(dict.fromkeys(rank.node for rank in replica.ranks))
    ends = [rank.last_restart for rank in replica.ranks if rank.last_restart]
    last = max(ends, key=lambda each: each.when, default=None)
    if last and now - last.when > RECENT_SECONDS:
        last = None
    since = [rank.since for rank in replica.ranks if not rank.health.is_good and rank.since]
    log = next(iter(observed.logs.get(replica.id, ())), None)
    stopped = [rank.node for rank in replica.ranks if rank.stopped]
    if stopped:
        log = last = None  # the unit was stopped on purpose, so earlier failures do not matter
    began = log.at if log and log.at else last.when if last else min(since, default=None)
    evidence = list(replica.why[:MOST_SENTENCES])
    if log:
        evidence.append(log.quote)
        if log.rule in RULES and (size := observed.sizes.get((replica.model, nodes[0]))):
            evidence.append(size_sentence(size))
    if last:
        evidence.append(f"ended {format_duration(now - last.when)} ago: {last.cause}")
    evidence += _changes(observed, nodes, began)
    ways = [] if serves or stopped else [*_ways_to_head(observed, replica)]
    evidence += [each.sentence for each in ways]
    differs = list(_differs(observed, replica.id, nodes))
    damaged = dict(_damaged(observed, replica.id, nodes, inventory)) if not serves else {}
    do = (log.do if log else "") or _look(replica, inventory)
    lost = [each for each in ways if each.is_lost]
    if lost:
        do = (
            f"`gpufleet reach {inventory} {replica.id}` tests all ports between the replica's "
            f"nodes\n{do}"
        )
    if stopped:
        do = f"`systemctl start vllm-{replica.id}` on {join_names(stopped)}"
    elif differs or damaged:
        undo = [_undo(replica.id)] if differs else []
        do = "\n".join([*undo, *damaged.values(), do])
    elif not (log and log.cause):
        do += (
            f"\n`gpufleet drift {inventory} --limit {nodes[0]}` shows how the node differs from "
            f"its declaration"
        )
    if serves:
        what = f"{replica.id} serves again, but ended within the last hour"
    else:
        what = f"{replica.id} {replica.health}"
    return Problem(
        replica.id,
        what + ("; it is drained" if drained else ""),
        _impact(observed.status, replica, drained=drained),
        tuple(dict.fromkeys([*evidence, *differs, *damaged])),
        STOPPED if stopped else _cause(log, last, damaged, lost),
        do,
        "docs/alerts/vllm-down.md",
        began,
        (replica.id, replica.model, *nodes),
        "" if serves or stopped else _because(observed, replica, log, began),
    )


def _because(
    observed: FleetObservations, replica: ReplicaStatus, log: LogCause | None, began: float | None
) -> str:
    """
    Return the subject of the node problem that certainly stopped the replica, or "".

    In these cases it is not certain that the node stopped the replica:

    - The check is of a GPU that the replica does not use, or the check could not run.
    - The kernel's messages are from a different time.
    - The log of the server shows a cause that is not in the node, such as a wrong flag.
    """
    for rank in replica.ranks:
        if rank.node in observed.status.silent:
            return rank.node
    if log and log.cause and log.component not in OF_NODES:
        return ""
    for subject, findings in failed_checks(observed):
        if any(_uses(rank, each) for each in findings for rank in replica.ranks):
            return subject
    for rank in replica.ranks:
        for each in observed.kernels.get(rank.node, ()):
            if each.component == "host" and _is_of_another_unit(each.line, replica.id):
                continue
            early = None if began is None or each.at is None else began - each.at
            if early is not None and -CLOCK_SECONDS <= early <= KERNEL_SECONDS:
                return kernel_subject(rank.node)
    return ""


def _uses(rank: RankStatus, found: Finding) -> bool:
    """Return whether a finding blocks the whole node of a rank, or one of the rank's GPUs."""
    if found.severity is not Severity.BLOCK or found.node != rank.node:
        return False
    return found.gpu is None or found.gpu.uuid in rank.gpus or found.gpu.index in rank.indices


def _is_of_another_unit(line: str, replica: str) -> bool:
    """Return whether the kernel's OOM killer ended a process of a different unit."""
    return line.startswith("oom-kill:") and not is_killed_for_memory(line, replica)


def _differs(observed: FleetObservations, replica: str, nodes: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each change of the replica's unit that was not made by gpufleet."""
    for node in nodes:
        known = observed.evidence.get(node)
        unit = known.units.get(replica) if known else None
        if unit and unit.drop_ins:
            names = ", ".join(unit.drop_ins)
            yield f"{node}: the replica's unit has drop-ins that gpufleet did not write: {names}"
        if unit and unit.reload:
            yield (
                f"{node}: the file of the replica's unit was changed, but systemd has not "
                "reloaded it"
            )


def _damaged(
    observed: FleetObservations, replica: str, nodes: Iterable[str], inventory: str
) -> Iterator[tuple[str, str]]:
    """
    Yield a sentence for each difference of the model's files from the deployed files, and the
    command that repairs it.
    """
    for node in nodes:
        known = observed.evidence.get(node)
        model = known.models.get(replica) if known else None
        if model is None:
            continue
        deploy = f"`gpufleet deploy vllm {inventory}`"
        # A deploy skips a directory that is marked as complete.
        again = f"`rm {model.directory}/.complete` on {node}, then {deploy}"
        if not model.complete:
            yield f"{node}: {model.directory} is not complete", deploy
        if model.missing:
            yield f"{node}: {model.directory} does not contain {', '.join(model.missing)}", again
        if model.changed:
            changed = ", ".join(model.changed)
            yield f"{node}: {model.directory}: {changed}: changed after the deploy", again


@dataclass(frozen=True)
class _WayToHead:
    """The result of a connection attempt from a rank to rank 0 of its replica."""

    sentence: str
    is_lost: bool


def _ways_to_head(observed: FleetObservations, replica: ReplicaStatus) -> Iterator[_WayToHead]:
    """
    Yield the result of each rank's attempt to connect to rank 0. Ranks whose nodes did not try are
    left out.
    """
    head = next((rank.node for rank in replica.ranks if rank.rank == 0), "")
    if not head or head in observed.status.silent:
        return
    for rank in replica.ranks:
        known = observed.evidence.get(rank.node)
        tried = known.connections.get(replica.id) if known else None
        if tried:
            more = " (no program listens on this port)" if tried.is_refused else ""
            sentence = f"{rank.node} to rank 0 on {head}, {tried}{more}"
            yield _WayToHead(sentence, tried.is_lost)


def _cause(
    log: LogCause | None,
    last: LastRestart | None,
    damaged: Collection[str],
    lost: Collection[_WayToHead],
) -> str:
    found = log.cause if log else last.cause if last else ""
    parts = [
        "the replica's nodes cannot reach each other, because of a firewall, route, switch or cable"
        if lost
        else "",
        "the model's files differ from what a deploy placed" if damaged else "",
        found,
    ]
    return ": ".join(filter(None, parts))


def _undo(replica: str) -> str:
    return (
        f"`systemctl cat vllm-{replica}` shows the lines that were added to the unit. Move them "
        f"into settings, or remove them and run `systemctl daemon-reload && systemctl restart "
        f"vllm-{replica}`"
    )


def _look(replica: ReplicaStatus, inventory: str) -> str:
    return f"`gpufleet logs {inventory} {replica.id} --lines 300`"


def _impact(status: FleetStatus, replica: ReplicaStatus, *, drained: bool) -> Impact:
    if replica.health is Health.SERVES:
        return Impact.RISK
    others = [
        each
        for each in status.replicas
        if each.model == replica.model and each.health is Health.SERVES
    ]
    if not others:
        return Impact.OUTAGE
    # An operator drained the replica, so the others are expected to serve its requests.
    return Impact.NOTICE if drained else Impact.DEGRADED


def _restarted(replica: ReplicaStatus, now: float) -> bool:
    """Return whether systemd restarted a rank of the replica within the last hour."""
    return any(
        rank.last_restart is not None
        and bool(rank.restarts)
        and now - rank.last_restart.when <= AGAIN_SECONDS
        for rank in replica.ranks
    )


def _changes(
    observed: FleetObservations, nodes: Iterable[str], began: float | None
) -> Iterator[str]:
    """Yield a sentence on the last change of each node before the problem began."""
    if began is None:
        return
    for node in nodes:
        known = observed.evidence.get(node)
        if known and (last := known.last_change(began, RECENT_SECONDS)):
            yield f"{node}: {format_duration(began - last[0])} before: {last[1]}"


def _missing(observed: FleetObservations, inventory: str) -> Iterator[Problem]:
    serving = {each.model for each in observed.status.replicas if each.health is Health.SERVES}
    for sentence in observed.status.missing:
        model = sentence.partition(":")[0]
        nodes = observed.status.may_have.get(model, ())
        yield Problem(
            f"{model} (replicas)",
            sentence,
            Impact.DEGRADED if model in serving else Impact.OUTAGE,
            (f"nodes that are declared for this model but do not answer: {join_names(nodes)}",)
            * bool(nodes),
            do=f"`gpufleet deploy vllm {inventory} --dry` shows where the replicas would run, or "
            f"why they cannot run",
            page="docs/alerts/vllm-down.md",
            names=(model, *nodes),
            # The replicas may still run on nodes that do not answer. `sentence` mentions that.
            because=next(iter(nodes), ""),
        )


def _alerts(observed: FleetObservations, named: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each alert about something that no other problem covers."""
    for each in observed.alerts:
        if each.subject not in named:
            yield Problem(
                f"alert {each.name}" + (f" of {each.subject}" if each.subject else ""),
                each.summary or each.name,
                Impact.RISK,
                (f"fires since {each.since}",) if each.since else (),
                page=each.page,
                names=(each.subject,) if each.subject else (),
            )


# -- what serves


def _serving(status: FleetStatus) -> tuple[str, ...]:
    models: dict[str, list[ReplicaStatus]] = defaultdict(list)
    for each in status.replicas:
        models[each.model].append(each)
    return tuple(
        f"{model}: {sum(each.health is Health.SERVES for each in replicas)} of "
        f"{count_of(len(replicas), 'replica')} serve"
        for model, replicas in sorted(models.items())
    )
