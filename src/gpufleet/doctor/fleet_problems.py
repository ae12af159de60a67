"""
What is wrong with a fleet, from what its nodes, gateways, journals and alerts say.  Pure.

What one of them shows is joined with what explains it in another: a replica that is down with the
line of its log, the check of its GPU, what was changed before. Nothing is judged here that
`status`, `check` and the rules of logs do not judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from gpufleet.doctor.fleet_diagnosis import Diagnosis, Impact, Problem, span, worst_first
from gpufleet.doctor.gateway_problems import gateway_problems
from gpufleet.doctor.node_problems import marks_of, node_problems
from gpufleet.doctor.sights import Sights
from gpufleet.errors import FleetError
from gpufleet.formatting import count_of, suggestion
from gpufleet.serving.rank_status import Health
from gpufleet.serving.status import FleetStatus, ReplicaStatus

RECENT_SECONDS = 86400.0
"""A restart or a change that is older explains nothing that is wrong now."""
AGAIN_SECONDS = 3600.0
"""Restarts of a replica that serves again: within the last hour it may be about to do it again."""
MOST_SENTENCES = 4
"""Of a replica: one for each of eight ranks says no more."""


def diagnose(sights: Sights, now: float, inventory: str = "INVENTORY") -> Diagnosis:
    """Return what is wrong, worst first. `now` is in seconds since 1970."""
    of_nodes = node_problems(sights, inventory)
    broken = {
        name: each.subject
        for each in of_nodes
        if each.impact >= Impact.DEGRADED
        for name in each.nodes
    }
    problems = [
        *of_nodes,
        *_replicas(sights, broken, now, inventory),
        *_missing(sights, broken, inventory),
        *gateway_problems(sights, inventory),
        *marks_of(sights, now, inventory),
    ]
    told = " ".join(text for each in problems for text in (each.subject, each.what))
    problems += _alerts(sights, told)
    unseen = (*sights.unseen, *(text for each in sights.evidence.values() for text in each.unread))
    return Diagnosis(worst_first(problems), _serving(sights.status), tuple(dict.fromkeys(unseen)))


def concerning(
    found: Diagnosis, name: str, status: FleetStatus, nodes: Collection[str]
) -> Diagnosis:
    """
    Return the problems of a model, a replica or a node, and what caused them.

    Raises `FleetError` for a name that is none of these.
    """
    replicas = [each for each in status.replicas if name in (each.model, each.id)]
    known = {*nodes, *(each.id for each in status.replicas), *(e.model for e in status.replicas)}
    if name not in known:
        raise FleetError(
            f"{name}: neither a model nor a replica nor a node{suggestion(name, sorted(known))}"
        )
    places = {name, *(rank.node for each in replicas for rank in each.ranks)}
    subjects = {name, *(each.id for each in replicas)}
    kept = [
        each
        for each in found.problems
        if each.subject in subjects
        or places & set(each.nodes)
        or any(subject in each.subject for subject in subjects)
    ]
    causes = {each.because for each in kept}
    return replace(
        found, problems=tuple(e for e in found.problems if e in kept or e.subject in causes)
    )


def wanted_journals(status: FleetStatus, now: float) -> dict[str, tuple[str, ...]]:
    """Return the replicas whose journals may explain something, by node."""
    found: dict[str, list[str]] = defaultdict(list)
    for replica in status.replicas:
        if replica.health is not Health.SERVES or _restarted(replica, now):
            for rank in replica.ranks:
                found[rank.node].append(replica.id)
    return {node: tuple(each) for node, each in found.items()}


# -- replicas


def _replicas(
    sights: Sights, broken: Mapping[str, str], now: float, inventory: str
) -> Iterator[Problem]:
    for replica in sights.status.replicas:
        if replica.health is Health.SERVES and not _restarted(replica, now):
            continue
        yield _replica(sights, replica, broken, now, inventory)


def _replica(
    sights: Sights, replica: ReplicaStatus, broken: Mapping[str, str], now: float, inventory: str
) -> Problem:
    serves = replica.health is Health.SERVES
    drained = all(sights.status.out.drains(replica.id, rank.node) for rank in replica.ranks)
    nodes = tuple(dict.fromkeys(rank.node for rank in replica.ranks))
    restarts = [rank for rank in replica.ranks if rank.last_restart]
    last = max(
        (rank.last_restart for rank in restarts if rank.last_restart),
        key=lambda each: each.when,
        default=None,
    )
    since = [rank.since for rank in replica.ranks if not rank.health.good and rank.since]
    log = next(iter(sights.logs.get(replica.id, ())), None)
    recent = last is not None and now - last.when <= RECENT_SECONDS
    began = log.at if log and log.at else last.when if last else min(since, default=None)
    evidence = list(replica.why[:MOST_SENTENCES])
    if log:
        evidence.append(log.quote)
    if last and recent:
        evidence.append(f"ended {span(now - last.when)} ago: {last.cause}")
    evidence += _changes(sights, nodes, began)
    because = "" if serves else next((broken[node] for node in nodes if node in broken), "")
    if serves:
        what = f"{replica.id} serves again, and ended within the last hour"
    else:
        what = f"{replica.id} {replica.health}"
    return Problem(
        replica.id,
        what + ("; it is drained" if drained else ""),
        _impact(sights.status, replica, drained=drained),
        tuple(dict.fromkeys(evidence)),
        log.cause if log else last.cause if last and recent else "",
        log.do if log and log.do else _look(replica, inventory),
        (log.page if log else "") or "docs/alerts/vllm-down.md",
        began,
        nodes,
        because,
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
    # People took it out of service: the others were meant to carry its requests.
    return Impact.NOTICE if drained else Impact.DEGRADED


def _restarted(replica: ReplicaStatus, now: float) -> bool:
    """Return whether a rank came back by itself within the last hour."""
    return any(
        rank.last_restart is not None
        and bool(rank.restarts)
        and now - rank.last_restart.when <= AGAIN_SECONDS
        for rank in replica.ranks
    )


def _changes(sights: Sights, nodes: Iterable[str], began: float | None) -> Iterator[str]:
    """Yield what was changed last on nodes before a moment."""
    if began is None:
        return
    for node in nodes:
        known = sights.evidence.get(node)
        if known and (last := known.last_change(began, RECENT_SECONDS)):
            yield f"{node}: {span(began - last[0])} before: {last[1]}"


def _missing(sights: Sights, broken: Mapping[str, str], inventory: str) -> Iterator[Problem]:
    serving = {each.model for each in sights.status.replicas if each.health is Health.SERVES}
    for sentence in sights.status.missing:
        model = sentence.partition(":")[0]
        yield Problem(
            f"{model} (replicas)",
            sentence,
            Impact.DEGRADED if model in serving else Impact.OUTAGE,
            do=f"`pyinfra {inventory} deploys/vllm.py --dry` says where they would run, or why not",
            page="docs/alerts/vllm-down.md",
            because=next(iter(broken.values()), ""),
        )


def _alerts(sights: Sights, told: str) -> Iterator[Problem]:
    """Yield alerts about what nothing else here is about."""
    for each in sights.alerts:
        if each.subject and each.subject in told:
            continue
        yield Problem(
            f"alert {each.name}" + (f" of {each.subject}" if each.subject else ""),
            each.summary or each.name,
            Impact.RISK,
            (f"fires since {each.since}",) if each.since else (),
            page=each.page,
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
