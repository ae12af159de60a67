"""
Evaluate one node's report on its ranks: the health of each rank, the reason, and its last end.
Pure.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from gpufleet.serving import readiness
from gpufleet.serving.readiness import likely_cause

# rank.json is written every 5 s (on_node/rank/state.py); a node under load gets a margin.
STALE_SECONDS = 20
# A rank's program records the end of a group before systemd records the end of the program. The
# drain between these two times takes at most its default time.
SAME_END_SECONDS = 120
WENT_DOWN = "the node went down without a shutdown: a power failure, a crash or a reset"


class Health(StrEnum):
    """The health of a rank or a replica, best first."""

    SERVES = "serves"
    RUNS = "runs"  # a rank without an endpoint, in its group
    STARTS = "starts"
    BUSY = "busy"
    UNKNOWN = "unknown"
    WRONG = "wrong"  # it answers, but not as planned
    DOWN = "down"

    @property
    def is_good(self) -> bool:
        """Return whether the rank serves, or runs in its group."""
        return self in {Health.SERVES, Health.RUNS}


_HEALTH = {
    readiness.State.READY: Health.SERVES,
    readiness.State.WAITING: Health.STARTS,
    readiness.State.DEAD: Health.DOWN,
    readiness.State.BUSY: Health.BUSY,
    readiness.State.WRONG: Health.WRONG,
    readiness.State.UNKNOWN: Health.UNKNOWN,
}


@dataclass(frozen=True)
class LastRestart:
    """Time and cause of a stage's last restart; the time is in seconds since 1970."""

    when: float
    cause: str


@dataclass(frozen=True)
class RankStatus:
    """One node's part of a replica."""

    node: str
    rank: int
    health: Health
    why: str = ""
    """Text for the operator, of one or more lines; "" if the rank serves."""
    since: float | None = None
    """When the unit entered its present state, in seconds since 1970."""
    gpus: tuple[str, ...] = ()
    """GPU UUIDs in the order of ranks."""
    indices: tuple[int, ...] = ()
    """NVML indices of the same GPUs; empty if unknown."""
    port: int | None = None
    """The endpoint's port; None for a rank without an endpoint."""
    ports: tuple[int, ...] = ()
    """`port`, and the ports of the node's other engines if each engine has its own server."""
    release: str = ""
    kind: str = "generate"
    """The kind of requests for the model, from the unit."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that the server loads, from the unit."""
    restarts: int | None = None
    """Restarts by systemd since the last manual start."""
    last_restart: LastRestart | None = None
    phase: str = ""
    """Phase of a multi-node rank, from rank.json."""
    incarnation: str = ""
    incarnation_number: int | None = None
    formed: float | None = None
    """When the incarnation began, in seconds since 1970."""
    stopped: bool = False
    """Whether a person or a deploy stopped the unit, and the unit was not started again."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values. Times are in ISO 8601 in UTC."""
        return {
            "node": self.node,
            "rank": self.rank,
            "state": str(self.health),
            "why": self.why,
            "since": iso(self.since),
            "gpus": list(self.gpus),
            "gpu_indices": list(self.indices),
            "port": self.port,
            "ports": list(self.ports),
            "release": self.release,
            "kind": self.kind,
            "adapters": list(self.adapters),
            "restarts": self.restarts,
            "last_restart": self.last_restart
            and {"when": iso(self.last_restart.when), "cause": self.last_restart.cause},
            "phase": self.phase,
            "incarnation": self.incarnation,
            "incarnation_number": self.incarnation_number,
            "incarnation_since": iso(self.formed),
        }


def iso(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second."""
    if seconds is None:
        return None
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def reason(missing: Mapping[str, Any]) -> str:
    """Return the reason for a missing value, as text."""
    words = str(missing.get("missing", "unknown")).replace("_", " ")
    if "seconds" in missing:
        words += f" after {missing['seconds']} s"
    return f"{words} ({missing['detail']})" if missing.get("detail") else words


def rank_status(node: str, stage: Mapping[str, Any], answer: Mapping[str, Any]) -> RankStatus:
    seen, state = stage["seen"], stage["state"]
    known = "missing" not in state
    incarnation = (known and state.get("incarnation")) or {}
    health, why = _judge(stage, float(answer["clock"]))
    gpus = tuple(map(str, stage["gpus"]))
    indices = answer["gpus"]
    count = seen.get("unit", {}).get("NRestarts")
    return RankStatus(
        node=node,
        rank=int(stage["rank"]),
        health=health,
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
        kind=str(stage.get("kind", "generate")),
        adapters=tuple(sorted(map(str, stage.get("adapters", ())))),
        restarts=int(count) if str(count).isdigit() else None,
        last_restart=last_restart(stage, str(answer["boot_id"])),
        phase=str(state["phase"]) if known else "",
        incarnation=str(incarnation.get("id", "")),
        incarnation_number=incarnation.get("counter"),
        formed=_seconds(incarnation.get("since")),
        stopped=_is_stopped(seen.get("unit", {})),
    )


def _judge(stage: Mapping[str, Any], clock: float) -> tuple[Health, str]:
    """Return a rank's health and reason, from its unit, its endpoint and its group."""
    seen = stage["seen"]
    unit = str(stage["unit"])
    properties = seen.get("unit", {})
    if properties.get("ActiveState") == "deactivating":
        return Health.DOWN, f"{unit} is being stopped"
    if _is_stopped(properties):
        again = f"run `systemctl start {unit}` on the node, or deploys/vllm.py"
        return Health.DOWN, f"{unit} is stopped: {again}"
    if "Permission denied" in seen.get("key_error", ""):
        return Health.UNKNOWN, f"{unit}: reading its API key needs root ({seen['key_error']})"
    models = seen.get("models") or [""]
    verdict = readiness.verdict(
        seen,
        served_name=str(stage["served_name"] or models[0]),
        unit=unit,
        fingerprint=stage["fingerprint"],
        keyed=bool(stage["keyed"]),
        restarts=int(properties.get("NRestarts") or 0),
        adapters=tuple(map(str, stage.get("adapters", ()))),
        alone=bool(stage.get("adapters_named")),
    )
    health, why = _HEALTH[verdict.state], verdict.text
    if health is Health.WRONG and seen.get("started") != stage["fingerprint"]:
        why = f"{unit}: the unit file has changed since the unit was started: run deploys/vllm.py"
    if health is Health.STARTS:
        why = f"{unit} starts: {why}{_health_answer(seen)}"
    if health in {Health.DOWN, Health.UNKNOWN}:
        return health, why
    group = _group(stage, clock)
    if group is not None and not group[0].is_good:
        return group
    if stage["url"] is None and health is Health.STARTS:
        # The rank has no endpoint: only its unit and its group are known.
        return group or (Health.RUNS, "")
    if health is Health.SERVES:
        ill = [place for place, health in stage["engines"].items() if health.get("status") != 200]
        if ill:
            return Health.STARTS, f"{unit}: /health is not 200 yet on {', '.join(ill)}"
    return health, "" if health is Health.SERVES else why


def _is_stopped(unit: Mapping[str, Any]) -> bool:
    return (unit.get("ActiveState"), unit.get("Result")) == ("inactive", "success")


def _health_answer(seen: Mapping[str, Any]) -> str:
    health = seen.get("health")
    if not health:
        return ""
    return f" (/health: {health.get('error') or 'HTTP {}'.format(health.get('status'))})"


_PHASES = {
    "waiting": Health.STARTS,
    "refused": Health.WRONG,
    "pausing": Health.DOWN,  # after several short runs in a row
    "starting": Health.STARTS,
    "running": Health.RUNS,
    "draining": Health.DOWN,
    "ending": Health.DOWN,
    "ended": Health.DOWN,
}


def _group(stage: Mapping[str, Any], clock: float) -> tuple[Health, str] | None:
    """Return a rank's health and reason from its report on its group, or None without a group."""
    state, unit = stage["state"], stage["unit"]
    if "missing" in state:
        if len(stage["nodes"]) < 2 and state["missing"] == "absent":
            return None
        if state["missing"] == "absent":
            return Health.STARTS, f"{unit}: the rank has not written its state yet"
        return Health.UNKNOWN, f"{unit}: rank.json cannot be read: {reason(state)}"
    silence = clock - float(state["at"])
    if silence > STALE_SECONDS:
        return (
            Health.UNKNOWN,
            f"{unit}: the rank's program has reported nothing for {silence:.0f} s",
        )
    phase = str(state["phase"])
    health = _PHASES.get(phase, Health.UNKNOWN)
    told = f": {state['why']}" if state.get("why") else ""
    if phase == "refused":
        told += "; run deploys/vllm.py for all nodes of the replica"
    return health, "" if health is Health.RUNS else f"{unit}: the rank is {phase}{told}"


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def last_restart(stage: Mapping[str, Any], boot_id: str) -> LastRestart | None:
    """
    Return the time and cause of a stage's last end before its present run, or None if unknown.

    `stage` is from on_node/serving/status.py. For the end of a group, the rank's own report has
    precedence. For the end of a killed program, systemd's report has precedence.
    """
    unit = _by_unit(stage, boot_id)
    end = stage["state"].get("last_end")
    if not end:
        return unit
    which = f"rank {end['rank']} on {end['node']}"
    why = str(end["why"])
    group = LastRestart(float(end["when"]), why if str(end["node"]) in why else f"{which}: {why}")
    if unit is None:
        return group
    if abs(unit.when - group.when) <= SAME_END_SECONDS:
        # The rank's program always exits with 1 when its group has ended.
        told = "" if unit.cause == "exit status 1" else f" ({unit.cause})"
        return replace(group, cause=group.cause + told)
    return max(unit, group, key=lambda each: each.when)


def _by_unit(stage: Mapping[str, Any], boot_id: str) -> LastRestart | None:
    """Return the time and cause of a stage's last end from systemd's events, or None if unknown."""
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
            return LastRestart(float(ends[-1]["at"]), "the node was shut down or rebooted")
        # The time of the end was not recorded. Only the time of the unit's next start is known.
        back = [event["at"] for event in stage["events"] if event["boot"] == boot_id]
        return LastRestart(float(back[0] if back else events[-1]["at"]), WENT_DOWN)
    if not ends:
        return None
    told = stage["before"] if isinstance(stage["before"], list) else []
    return LastRestart(float(ends[0]["at"]), _cause(ends, told))


def _cause(ends: Sequence[Mapping[str, Any]], told: Sequence[str]) -> str:
    """Return the cause of a run's end, from systemd's events and the process' own last lines."""
    known = {event["what"]: event for event in ends}
    by_itself = "restarts" in known
    asked = not by_itself and "stops" in known
    if asked and "failed" not in known:
        return "stopped by a deploy or by hand"
    exited = known.get("exited", {})
    status = str(exited.get("exit_status", "0"))
    how = _words(known, exited, status)
    if asked:
        return f"stopped by a deploy or by hand, and did not end cleanly: {how}"
    cause = likely_cause(told, _number(exited, status))
    return f"{how}: {cause}" if cause else how


def _words(known: Mapping[str, Any], exited: Mapping[str, Any], status: str) -> str:
    result = str(known.get("failed", {}).get("unit_result", ""))
    if "out of memory" in known or result == "oom-kill":
        return "killed by the kernel: the node was out of memory"
    if result in {"timeout", "watchdog", "start-limit-hit", "resources"}:
        return f"systemd gave up on the unit ({result})"
    if exited.get("exit_code") in {"killed", "dumped"}:
        return f"killed by signal {exited.get('signal', status)}"
    return f"exit status {status}"


def _number(exited: Mapping[str, Any], status: str) -> str | None:
    """Return the exit status for `readiness.likely_cause`, or None after a signal."""
    return status if exited.get("exit_code") == "exited" else None
