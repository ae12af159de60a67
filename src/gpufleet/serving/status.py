"""Which replicas serve, which do not, and what ended them last.  Pure.

Takes what `on_node/serving/status.py` printed on each node, and what is declared. A replica serves
when every endpoint of it is ready (`readiness.py`) and every rank of it is in one and the same
incarnation. What could not be asked is unknown, which is not serving.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from gpufleet.serving import readiness
from gpufleet.serving.readiness import likely_cause
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.run.node_protocol import Lock, Mark

SCHEMA = 1
"""Version of `FleetStatus.as_json()`; raised when a key changes its meaning or goes."""

# rank.json is written every 5 s (on_node/rank/state.py); a node under load gets a margin.
STALE_SECONDS = 20
# A rank's program notes the end of a group a moment before systemd notes the end of the program,
# whose drain may take as long as settings allow by default.
SAME_END_SECONDS = 120

WENT_DOWN = "the node went down without a shutdown: power, a crash or a reset"


class Stand(StrEnum):
    """How a rank or a replica is, best first."""

    SERVES = "serves"
    RUNS = "runs"  # a rank without an endpoint, in its group
    STARTS = "starts"
    BUSY = "busy"
    UNKNOWN = "unknown"
    WRONG = "wrong"  # it answers, and not as it should
    DOWN = "down"

    @property
    def good(self) -> bool:
        """Say whether nothing is amiss."""
        return self in {Stand.SERVES, Stand.RUNS}


_STANDS = {
    readiness.State.READY: Stand.SERVES,
    readiness.State.WAITING: Stand.STARTS,
    readiness.State.DEAD: Stand.DOWN,
    readiness.State.BUSY: Stand.BUSY,
    readiness.State.WRONG: Stand.WRONG,
    readiness.State.UNKNOWN: Stand.UNKNOWN,
}
_WORST_FIRST = tuple(reversed(Stand))


class Declared(Protocol):
    """What variables say of one node, as `nodevars.NodeVars` has it."""

    @property
    def settings(self) -> NodeSettings: ...


@dataclass(frozen=True)
class Restart:
    """The last time that a stage ended and came back, in seconds since 1970, and why."""

    when: float
    cause: str


@dataclass(frozen=True)
class Rank:
    """What one node runs of a replica."""

    node: str
    rank: int
    stand: Stand
    why: str = ""
    """For the operator, one line or a few; "" where it serves."""
    since: float | None = None
    """When its unit came to the state it is in, in seconds since 1970."""
    gpus: tuple[str, ...] = ()
    """UUIDs in the order of ranks."""
    indices: tuple[int, ...] = ()
    """NVML's, of the same GPUs; empty: not known."""
    port: int | None = None
    """None: it has no endpoint."""
    ports: tuple[int, ...] = ()
    """That and those of the node's other engines, where each has a server of its own."""
    release: str = ""
    restarts: int | None = None
    """By itself, since somebody started it."""
    last_restart: Restart | None = None
    phase: str = ""
    """Of a rank of several, as rank.json has it."""
    incarnation: str = ""
    counter: int | None = None
    formed: float | None = None
    """When its incarnation began, in seconds since 1970."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; times as ISO 8601 in UTC."""
        return {
            "node": self.node,
            "rank": self.rank,
            "state": str(self.stand),
            "why": self.why,
            "since": iso(self.since),
            "gpus": list(self.gpus),
            "gpu_indices": list(self.indices),
            "port": self.port,
            "ports": list(self.ports),
            "release": self.release,
            "restarts": self.restarts,
            "last_restart": self.last_restart
            and {"when": iso(self.last_restart.when), "cause": self.last_restart.cause},
            "phase": self.phase,
            "incarnation": self.incarnation,
            "incarnation_number": self.counter,
            "incarnation_since": iso(self.formed),
        }


@dataclass(frozen=True)
class Replica:
    """One replica: all of its ranks that were found, by rank."""

    model: str
    number: int
    ranks: tuple[Rank, ...]
    stand: Stand
    why: tuple[str, ...]
    """A sentence for everything that keeps it from serving."""

    @property
    def id(self) -> str:
        """Names it as the plan does: `llama-0`."""
        return f"{self.model}-{self.number}"

    @property
    def incarnation(self) -> str:
        """The one that its ranks agree on; "" for a replica of one node, or where they do not."""
        found = {rank.incarnation for rank in self.ranks}
        return found.pop() if len(found) == 1 else ""

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "replica": self.id,
            "model": self.model,
            "number": self.number,
            "state": str(self.stand),
            "why": list(self.why),
            "incarnation": self.incarnation,
            "ranks": [rank.as_json() for rank in self.ranks],
        }


@dataclass(frozen=True)
class Change:
    """An upgrade that has its lock on nodes: it goes on, or waits to be resumed."""

    lock: Lock
    """As the first of its nodes has it."""
    nodes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values; times as ISO 8601 in UTC."""
        return {
            "id": self.lock.id,
            "owner": self.lock.owner,
            "from": self.lock.origin,
            "since": iso(self.lock.since),
            "what": self.lock.what,
            "nodes": list(self.nodes),
        }


@dataclass(frozen=True)
class OutOfService:
    """What people and upgrades have marked on nodes; gateways send nothing to what is drained."""

    cordoned: tuple[tuple[str, Mark], ...] = ()
    """Pairs of (node, who and why)."""
    drained: tuple[tuple[str, str, Mark], ...] = ()
    """Triples of (replica, node, who and why)."""
    changes: tuple[Change, ...] = ()

    def drains(self, replica: str, node: str) -> bool:
        """Say whether a replica is drained there."""
        return any((each, at) == (replica, node) for each, at, _ in self.drained)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "cordoned": [{"node": node, **_mark(mark)} for node, mark in self.cordoned],
            "drained": [
                {"replica": replica, "node": node, **_mark(mark)}
                for replica, node, mark in self.drained
            ],
            "upgrades": [each.as_json() for each in self.changes],
        }


def _mark(mark: Mark) -> dict[str, Any]:
    return {"by": mark.by, "why": mark.why, "since": iso(mark.since), "upgrade": mark.upgrade}


@dataclass(frozen=True)
class FleetStatus:
    """All replicas, by name, and what is not known of the fleet."""

    replicas: tuple[Replica, ...]
    silent: Mapping[str, str]
    """{node: a sentence why nothing is known of its stages}."""
    missing: tuple[str, ...] = ()
    """A sentence for each model that has fewer replicas than are declared."""
    remarks: tuple[str, ...] = ()
    out: OutOfService = OutOfService()

    @property
    def serves(self) -> bool:
        """Say whether all that is declared serves, and nothing is unknown."""
        good = all(replica.stand is Stand.SERVES for replica in self.replicas)
        return good and not self.silent and not self.missing

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "serves": self.serves,
            "replicas": [replica.as_json() for replica in self.replicas],
            "silent": dict(self.silent),
            "missing": list(self.missing),
            "remarks": list(self.remarks),
            **self.out.as_json(),
        }


def status(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, Declared],
    *,
    whole: bool = True,
) -> FleetStatus:
    """
    Return how the fleet's replicas are.

    `answers` has on_node/serving/status.py's document, or a sentence, for each node that was asked;
    `whole`: that is all of the fleet, so replicas that are declared and not found are missing.
    """
    silent: dict[str, str] = {}
    remarks: list[str] = []
    found: dict[tuple[str, int], list[Rank]] = defaultdict(list)
    members: dict[tuple[str, int], tuple[str, ...]] = {}
    for node, answer in sorted(answers.items()):
        if isinstance(answer, str):
            silent[node] = answer
            continue
        try:
            if isinstance(answer["stages"], Mapping):
                silent[node] = f"its units cannot be read: {_reason(answer['stages'])}"
                continue
            for stage in _stages(answer):
                if "model" not in stage:
                    if "foreign" in stage:
                        remarks.append(f"{node}: {stage['unit']} is none of ours: left alone")
                    else:
                        why = f"{stage['unit']} could not be looked at: {_reason(stage)}"
                        silent[node] = "; ".join(filter(None, [silent.get(node), why]))
                    continue
                key = str(stage["model"]), int(stage["replica"])
                rank = _rank(node, stage, answer)
                rank.as_json()  # raises for a time that no calendar has
                found[key].append(rank)
                names = tuple(map(str, stage["nodes"]))
                members[key] = max(members.get(key, ()), names, key=len)
        # A node that is broken or hostile costs the others nothing.
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
            silent[node] = f"its answer makes no sense ({type(problem).__name__}: {problem})"
    replicas = tuple(
        _replica(key, tuple(ranks), members[key], silent) for key, ranks in sorted(found.items())
    )
    missing, undeclared = _compared(replicas, declared, silent) if whole else ((), ())
    out, unread = _out_of_service(answers)
    return FleetStatus(replicas, silent, missing, (*remarks, *undeclared, *unread), out)


def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second."""
    if seconds is None:
        return None
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _stages(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a node says of its stages; raises `ValueError` for another kind of document."""
    if answer["schema"] != 1:
        raise ValueError(f"schema {answer['schema']!r}, expected 1")
    return list(answer["stages"])


def _out_of_service(
    answers: Mapping[str, Mapping[str, Any] | str],
) -> tuple[OutOfService, list[str]]:
    """Return the marks of all nodes, and a sentence for each node whose marks are not known."""
    cordoned, drained, unread = [], [], []
    locks: dict[str, tuple[Lock, list[str]]] = {}
    for node, answer in sorted(answers.items()):
        found = None if isinstance(answer, str) else answer.get("change")
        if found is None:
            continue
        try:
            if refused := [each for each in found.values() if each and "missing" in each]:
                unread.append(f"{node}: its cordon and drains are not known: {_reason(refused[0])}")
                continue
            lock, cordon = Lock.of(found["lock"]), Mark.of(found["cordon"])
            read = {name: Mark.of(each) for name, each in found["drained"].items()}
            marks = {name: mark for name, mark in read.items() if mark}
            for each in (cordon, lock, *marks.values()):
                iso(float(each.since) if each else None)  # raises for a time that no calendar has
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
            why = f"{type(problem).__name__}: {problem}"
            unread.append(f"{node}: its cordon and drains make no sense ({why})")
            continue
        cordoned += [(node, cordon)] if cordon else []
        drained += [(name, node, mark) for name, mark in marks.items()]
        if lock:
            locks.setdefault(lock.id, (lock, []))[1].append(node)
    changes = tuple(Change(lock, tuple(nodes)) for lock, nodes in locks.values())
    drained.sort(key=lambda each: each[:2])
    return OutOfService(tuple(cordoned), tuple(drained), changes), unread


def _reason(missing: Mapping[str, Any]) -> str:
    """Return why a value is missing, in words."""
    words = str(missing.get("missing", "unknown")).replace("_", " ")
    if "seconds" in missing:
        words += f" after {missing['seconds']} s"
    return f"{words} ({missing['detail']})" if missing.get("detail") else words


# -- one rank


def _rank(node: str, stage: Mapping[str, Any], answer: Mapping[str, Any]) -> Rank:
    seen, state = stage["seen"], stage["state"]
    known = "missing" not in state
    incarnation = (known and state.get("incarnation")) or {}
    stand, why = _stand(stage, float(answer["clock"]))
    gpus = tuple(map(str, stage["gpus"]))
    indices = answer["gpus"]
    count = seen.get("unit", {}).get("NRestarts")
    return Rank(
        node=node,
        rank=int(stage["rank"]),
        stand=stand,
        why=why,
        since=_seconds(stage["since"]),
        gpus=gpus,
        indices=tuple(int(indices[gpu]) for gpu in gpus) if set(gpus) <= set(indices) else (),
        port=int(stage["port"]) if stage["url"] else None,
        ports=tuple(
            port
            for each in (stage["url"], *stage["engines"])
            if each and (port := urlsplit(each).port)
        ),
        release=str(stage["release"]),
        restarts=int(count) if str(count).isdigit() else None,
        last_restart=last_restart(stage, str(answer["boot_id"])),
        phase=str(state["phase"]) if known else "",
        incarnation=str(incarnation.get("id", "")),
        counter=incarnation.get("counter"),
        formed=_seconds(incarnation.get("since")),
    )


def _stand(stage: Mapping[str, Any], clock: float) -> tuple[Stand, str]:
    """Judge one rank by its unit, its endpoint and, where it is one of several, by its group."""
    seen = stage["seen"]
    unit = str(stage["unit"])
    properties = seen.get("unit", {})
    if properties.get("ActiveState") == "deactivating":
        return Stand.DOWN, f"{unit} is being stopped"
    if (properties.get("ActiveState"), properties.get("Result")) == ("inactive", "success"):
        again = f"`systemctl start {unit}` there, or run deploys/vllm.py"
        return Stand.DOWN, f"{unit} is stopped, and was not started since: {again}"
    if "Permission denied" in seen.get("key_error", ""):
        return Stand.UNKNOWN, f"{unit}: reading its API key needs root ({seen['key_error']})"
    models = seen.get("models") or [""]
    verdict = readiness.verdict(
        seen,
        served_name=str(stage["served_name"] or models[0]),
        unit=unit,
        fingerprint=stage["fingerprint"],
        keyed=bool(stage["keyed"]),
        restarts=int(properties.get("NRestarts") or 0),
    )
    stand, why = _STANDS[verdict.state], verdict.text
    if stand is Stand.WRONG and seen.get("started") != stage["fingerprint"]:
        why = f"{unit}: its unit has changed since it was started: run deploys/vllm.py"
    if stand is Stand.STARTS:
        why = f"{unit} starts: {why}{_health(seen)}"
    if stand in {Stand.DOWN, Stand.UNKNOWN}:
        return stand, why
    group = _group(stage, clock)
    if group is not None and not group[0].good:
        return group
    if stage["url"] is None and stand is Stand.STARTS:
        # It answers nowhere: its unit and its group are all that is known.
        return group or (Stand.RUNS, "")
    if stand is Stand.SERVES:
        ill = [place for place, health in stage["engines"].items() if health.get("status") != 200]
        if ill:
            return Stand.STARTS, f"{unit}: no /health yet of {', '.join(ill)}"
    return stand, "" if stand is Stand.SERVES else why


def _health(seen: Mapping[str, Any]) -> str:
    health = seen.get("health")
    if not health:
        return ""
    return f" (/health: {health.get('error') or 'HTTP {}'.format(health.get('status'))})"


_PHASES = {
    "waiting": Stand.STARTS,
    "refused": Stand.WRONG,
    "pausing": Stand.DOWN,  # after several short lives in a row
    "starting": Stand.STARTS,
    "running": Stand.RUNS,
    "draining": Stand.DOWN,
    "ending": Stand.DOWN,
    "ended": Stand.DOWN,
}


def _group(stage: Mapping[str, Any], clock: float) -> tuple[Stand, str] | None:
    """Judge a rank by what it says of its group; None for a replica of one node."""
    state, unit = stage["state"], stage["unit"]
    if "missing" in state:
        if len(stage["nodes"]) < 2 and state["missing"] == "absent":
            return None
        if state["missing"] == "absent":
            return Stand.STARTS, f"{unit}: the rank has not said anything yet"
        return Stand.UNKNOWN, f"{unit}: rank.json cannot be read: {_reason(state)}"
    silence = clock - float(state["at"])
    if silence > STALE_SECONDS:
        return Stand.UNKNOWN, f"{unit}: the rank's program has said nothing for {silence:.0f} s"
    phase = str(state["phase"])
    stand = _PHASES.get(phase, Stand.UNKNOWN)
    told = f": {state['why']}" if state.get("why") else ""
    if phase == "refused":
        told += "; run deploys/vllm.py for all nodes of the replica"
    return stand, "" if stand is Stand.RUNS else f"{unit}: the rank is {phase}{told}"


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# -- why it restarted


def last_restart(stage: Mapping[str, Any], boot_id: str) -> Restart | None:
    """
    Return when a stage last ended before its present life, and why; None: not that is known.

    `stage` is one of on_node/serving/status.py's. A rank of several knows better than systemd why
    its group ended; systemd knows better how a program that was killed ended.
    """
    unit = _by_unit(stage, boot_id)
    end = stage["state"].get("last_end")
    if not end:
        return unit
    which = f"rank {end['rank']} on {end['node']}"
    why = str(end["why"])
    group = Restart(float(end["when"]), why if str(end["node"]) in why else f"{which}: {why}")
    if unit is None:
        return group
    if abs(unit.when - group.when) <= SAME_END_SECONDS:
        # The rank's program itself ends with 1 whenever its group is over.
        told = "" if unit.cause == "exit status 1" else f" ({unit.cause})"
        return replace(group, cause=group.cause + told)
    return max(unit, group, key=lambda each: each.when)


def _by_unit(stage: Mapping[str, Any], boot_id: str) -> Restart | None:
    """Return what systemd's own lines say."""
    if not isinstance(stage["events"], list):
        return None
    present = stage["seen"].get("unit", {}).get("InvocationID")
    lives: dict[str, list[Mapping[str, Any]]] = {}
    for event in stage["events"]:
        if event["life"]:
            lives.setdefault(str(event["life"]), []).append(event)
    earlier = [events for life, events in lives.items() if life != present]
    if not earlier:
        return None
    events = earlier[-1]
    ends = [event for event in events if event["what"] not in {"starts", "started"}]
    if events[-1]["boot"] != boot_id:
        if any(event["what"] == "stops" for event in ends):
            return Restart(float(ends[-1]["at"]), "the node was shut down or rebooted")
        # Nobody wrote down when that was: it is known only when the unit was back.
        back = [event["at"] for event in stage["events"] if event["boot"] == boot_id]
        return Restart(float(back[0] if back else events[-1]["at"]), WENT_DOWN)
    if not ends:
        return None
    told = stage["before"] if isinstance(stage["before"], list) else []
    return Restart(float(ends[0]["at"]), _cause(ends, told))


def _cause(ends: Sequence[Mapping[str, Any]], told: Sequence[str]) -> str:
    """Return why a life ended, by what systemd wrote of it and what it wrote itself last."""
    known = {event["what"]: event for event in ends}
    by_itself = "restarts" in known
    asked = not by_itself and "stops" in known
    if asked and "failed" not in known:
        return "stopped by a deploy or by hand"
    exited = known.get("exited", {})
    status = str(exited.get("exit_status", "0"))
    how = _words(known, exited, status)
    if asked:
        return f"stopped by a deploy or by hand, and it ended badly: {how}"
    cause = likely_cause(told, _number(exited, status))
    return f"{how}: {cause}" if cause else how


def _words(known: Mapping[str, Any], exited: Mapping[str, Any], status: str) -> str:
    result = str(known.get("failed", {}).get("unit_result", ""))
    if "out of memory" in known or result == "oom-kill":
        return "killed by the kernel: the node was out of memory"
    if result in {"timeout", "watchdog", "start-limit-hit", "resources"}:
        return f"systemd gave up on it ({result})"
    if exited.get("exit_code") in {"killed", "dumped"}:
        return f"killed by signal {exited.get('signal', status)}"
    return f"exit status {status}"


def _number(exited: Mapping[str, Any], status: str) -> str | None:
    """Return the exit status that `readiness.likely_cause` knows; a signal is none."""
    return status if exited.get("exit_code") == "exited" else None


# -- replicas


def _replica(
    key: tuple[str, int],
    ranks: tuple[Rank, ...],
    members: tuple[str, ...],
    silent: Mapping[str, str],
) -> Replica:
    model, number = key
    ranks = tuple(sorted(ranks, key=lambda each: (each.rank, each.node)))
    several = len(ranks) > 1 or len(members) > 1
    told = [
        (rank.stand, f"rank {rank.rank} on {rank.node}: {rank.why}" if several else rank.why)
        for rank in ranks
        if not rank.stand.good
    ]
    told += [*_doubled(ranks), *_absent(ranks, members, silent), *_estranged(ranks)]
    stand = next((each for each in _WORST_FIRST if each in {s for s, _ in told}), Stand.SERVES)
    if not told and not any(rank.stand is Stand.SERVES for rank in ranks):
        stand, told = Stand.UNKNOWN, [(Stand.UNKNOWN, "none of its ranks has an endpoint")]
    return Replica(model, number, ranks, stand, tuple(text for _, text in told))


def _doubled(ranks: Iterable[Rank]) -> Iterator[tuple[Stand, str]]:
    """Yield a sentence for each rank that two nodes claim."""
    nodes: dict[int, list[str]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.rank].append(rank.node)
    for number, names in nodes.items():
        if len(names) > 1:
            yield (
                Stand.WRONG,
                f"{' and '.join(names)} both have rank {number} of it: one of them was left "
                "behind; run deploys/vllm.py",
            )


def _absent(
    ranks: Iterable[Rank], members: Sequence[str], silent: Mapping[str, str]
) -> Iterator[tuple[Stand, str]]:
    """Yield a sentence for each rank that was not found."""
    there = {rank.node for rank in ranks}
    for number, node in enumerate(members):
        if node in there:
            continue
        if node in silent:
            yield Stand.UNKNOWN, f"rank {number} on {node}: {silent[node]}"
        else:
            yield Stand.UNKNOWN, f"rank {number} on {node}: that node was not asked, or has no unit"


def _estranged(ranks: Sequence[Rank]) -> Iterator[tuple[Stand, str]]:
    """Yield a sentence if ranks that run are of several incarnations."""
    running = [rank for rank in ranks if rank.stand.good and rank.incarnation]
    if len({rank.incarnation for rank in running}) > 1:
        which = ", ".join(f"rank {rank.rank} {rank.incarnation}" for rank in running)
        yield Stand.WRONG, f"its ranks are of different incarnations: {which}"


def _compared(
    replicas: Iterable[Replica], declared: Mapping[str, Declared], silent: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return sentences on what is declared and not there, and on what is there and not declared."""
    counts: dict[str, int] = defaultdict(int)
    for replica in replicas:
        counts[replica.model] += 1
    wanted: dict[str, int] = {}
    for each in declared.values():
        if each.settings.vllm is not None:
            for model, served in each.settings.serving.items():
                wanted[model] = 1 if served.replicas == "fit" else served.replicas
    perhaps = "; some may be on nodes that did not answer" if silent else ""
    missing = tuple(
        f"{model}: {_counted(count, 'replica')} declared, {counts[model] or 'none'} found{perhaps}"
        for model, count in sorted(wanted.items())
        if counts[model] < count
    )
    undeclared = tuple(
        f"{model} is not declared any more: the next deploy stops it"
        for model in sorted(counts)
        if model not in wanted
    )
    return missing, undeclared


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
