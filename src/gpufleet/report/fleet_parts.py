"""Assemble the parts of a report's document from a fleet's data. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpufleet.artifacts.model_files import checkpoint
from gpufleet.artifacts.model_lock import Models
from gpufleet.doctor.fleet_diagnosis import Diagnosis
from gpufleet.fleet import drift
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.fleet.measured_rates import ModelRate
from gpufleet.formatting import ranges
from gpufleet.planning.explanation import Action, candidate_rows
from gpufleet.planning.gpu_totals import equal_nodes, gpus_text, replica_names
from gpufleet.preflight.tls_lines import TlsServer, certificate_verdict, read_certificate
from gpufleet.remote.query import Answer
from gpufleet.report.fleet_document import (
    Candidate,
    Capacity,
    Certificate,
    Drift,
    Finding,
    Model,
    Moved,
    NodeDrift,
    Plan,
    PlanRow,
    Replica,
    Upgrade,
)
from gpufleet.serving.status import FleetStatus
from gpufleet.settings.adapter_settings import Adapter
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.report.report import Report as UpgradeReport

MOST_UPGRADES = 10
"""Maximum number of upgrades of an inventory in a report. The newest ones are shown."""


def replicas(status: FleetStatus) -> Iterator[Replica]:
    """Yield the fleet's replicas in their current state."""
    for each in status.replicas:
        yield Replica(
            name=each.id,
            model=each.model,
            state=str(each.health),
            serves=each.health.is_good,
            why=each.why,
            nodes=tuple(dict.fromkeys(rank.node for rank in each.ranks)),
        )


def models(
    settings: Mapping[str, NodeSettings],
    locks: Mapping[str, Models],
    releases: Mapping[tuple[str, str], str],
) -> Iterator[Model]:
    """
    Yield each entry of `serving`. If nodes declare it differently, yield each declaration once.

    `locks` has the locks of models by file, and `releases` the declared releases by node and
    engine.
    """
    alike: dict[tuple[str, str, str, str, str, str, tuple[str, ...]], list[str]] = {}
    for node, here in sorted(settings.items()):
        if here.servers is None:
            continue
        for name, served in here.serving.items():
            key = (
                name,
                served.model,
                served.revision or "",
                str(served.replicas),
                releases.get((node, served.engine), ""),
                here.servers.models_lock if checkpoint(served) else "",
                tuple(_adapter(name, each) for name, each in sorted(served.adapters.items())),
            )
            alike.setdefault(key, []).append(node)
    for (name, source, revision, declared, release, lock, adapters), nodes in sorted(alike.items()):
        yield Model(
            name=name,
            source=source,
            revision=revision,
            declared=declared,
            nodes=tuple(nodes),
            files=dict(sorted(locks.get(lock, {}).get((source, revision), {}).items())),
            adapters=adapters,
            release=release,
        )


def _adapter(name: str, of: Adapter) -> str:
    """Return a line about an adapter: its source, and its revision or hash if one is set."""
    pinned = of.revision or of.sha256
    return f"{name}: {of.source}{f' at {pinned}' if pinned else ', without a revision or hash'}"


def plan(found: Assessment) -> Plan:
    """Return the part of the document that describes the plan."""
    return Plan(
        rows=tuple(_rows(found)),
        reasons=(*found.plan.reasons, *found.remarks),
        candidates=tuple(_candidates(found)),
        changes=tuple(
            f"{each.replica}: {each.action}" + (f": {each.why}" if each.why else "")
            for each in found.changes
            if each.action is not Action.STAY
        ),
        totals=str(found.totals),
    )


def _rows(found: Assessment) -> Iterator[PlanRow]:
    for block in equal_nodes(found.plan, found.nodes.values()):
        for stage, numbers in zip(block.stages, block.replicas, strict=True):
            yield PlanRow(
                nodes=block.names,
                model=stage.model,
                replicas=replica_names(stage.model, numbers),
                gpus=gpus_text(stage),
                tensor_parallel=stage.tensor_parallel,
                pipeline_parallel=stage.pipeline_parallel,
                data_parallel=stage.data_parallel,
                ports=ranges(stage.ports),
            )


def _candidates(found: Assessment) -> Iterator[Candidate]:
    for row in candidate_rows(found.plan):
        parts = [f"TP {row.tensor_parallel}"]
        parts += [f"PP {row.pipeline_parallel}"] if row.pipeline_parallel > 1 else []
        parts += [f"DP {row.data_parallel}"] if row.data_parallel > 1 else []
        parts += ["EP"] if row.expert_parallel else []
        parts += [f"{row.over_nodes} nodes"] if row.over_nodes > 1 else []
        yield Candidate(
            model=row.model,
            nodes=row.nodes,
            chosen=row.chosen,
            division=", ".join(parts),
            replicas=row.replicas,
            verdict=row.verdict,
            reason=row.reason,
        )


def capacities(
    entries: Iterable[Model], found: Assessment | None, rates: Iterable[ModelRate]
) -> Iterator[Capacity]:
    """
    Yield the capacity of replicas.

    The measured capacity is used if there is one. Otherwise it is estimated from the memory, or
    unknown if no estimate is possible.
    """
    measured = list(rates)
    told: set[str] = set()
    for each in measured:
        if each.rate is None:
            continue
        told.add(each.model)
        yield Capacity(
            model=each.model,
            replicas=replica_names(each.model, each.replicas),
            source="measured",
            requests_per_second=each.rate.requests_per_second,
            measured=each.rate.when.astimezone(dt.UTC),
            why=f"holds for what {' and '.join(_HOLDS[name] for name in each.holds_for)}",
        )
    why = {each.model: str(each.planned) for each in measured if each.rate is None}
    sized = [
        row
        for row in (candidate_rows(found.plan) if found else ())
        if row.chosen and row.model not in told and row.kv_cache_tokens is not None
    ]
    for row in sized:
        told.add(row.model)
        yield Capacity(
            model=row.model,
            replicas=f"each replica on {row.nodes}",
            source="estimate",
            kv_tokens=row.kv_cache_tokens,
            concurrency=row.max_concurrency,
            why=why.get(row.model, "the model was not measured"),
        )
    for name in sorted({each.name for each in entries} - told):
        no_plan = "there is no plan, so there is no estimate" if found is None else "not sized"
        yield Capacity(model=name, replicas="", source="not known", why=why.get(name) or no_plan)


_HOLDS = {"planned": "is planned", "running": "runs"}


def findings(found: Diagnosis) -> Iterator[Finding]:
    """Yield the problems of `gpufleet doctor`, worst first."""
    for each in found.problems:
        plain = each.as_json()
        yield Finding(
            severity=plain["impact"],
            subject=each.subject,
            what=each.what,
            evidence=each.evidence,
            cause=each.cause,
            do=each.do,
            page=each.page,
        )


def fleet_drift(
    nodes: Mapping[str, drift.NodeDrift], refused: Sequence[str], inventory: str, *, whole: bool
) -> Drift:
    """
    Return the drift of the nodes. `whole` is true if the changes of deploys were compared too.
    """
    return Drift(
        whole=whole,
        nodes=tuple(
            NodeDrift(
                node=name,
                state=str(each.state),
                moved=tuple(
                    Moved(
                        matters=str(one.matters),
                        what=one.what,
                        source=one.source,
                        remedy=one.remedy.replace("INVENTORY", inventory),
                    )
                    for one in each.moved
                ),
                unread=tuple(f"{one.source}: {one.why}" for one in each.unread),
            )
            for name, each in sorted(nodes.items())
        ),
        refused=tuple(refused),
    )


def upgrades(found: Iterable[UpgradeReport]) -> Iterator[Upgrade]:
    """Yield the last upgrades, with the newest one first."""
    for each in sorted(found, key=lambda one: (-one.started, one.id))[:MOST_UPGRADES]:
        yield Upgrade(
            id=each.id,
            kind=each.kind,
            what=each.what,
            by=each.by,
            started=dt.datetime.fromtimestamp(int(each.started), dt.UTC),
            ended=dt.datetime.fromtimestamp(int(each.ended), dt.UTC),
            outcome=each.outcome,
            why=each.why,
        )


def certificates(
    servers: Iterable[TlsServer], looks: Mapping[str, Answer], now: dt.datetime
) -> Iterator[Certificate]:
    """Yield each server's certificate, as the node that connects to the server received it."""
    for each in sorted(servers, key=lambda one: one.id):
        look = looks.get(each.asked_from, "the node was not queried")
        verdict = certificate_verdict(each, look, now)
        ends = None
        if not isinstance(look, str):
            said = look["tls"].get(each.id, {"missing": "not queried"})
            if "missing" not in said:
                ends, _ = read_certificate(said["certificate"])
        yield Certificate(
            server=each.id,
            status=verdict.status.value,
            ends=ends.date() if ends else None,
            what=verdict.what,
            proof=verdict.proof,
        )
