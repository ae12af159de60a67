"""Parse nodes' answers to `node_questions`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeAlias, TypeVar

from gpufleet.errors import FleetError
from gpufleet.node.marks import Deploy, Lock, Mark
from gpufleet.on_node.common.stage_units import stage_of
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.serving import readiness

Answer: TypeAlias = Mapping[str, Any] | str
"""A node's document, or a sentence why there is none, as from `fleet.live.connect`."""

SCHEMA = 1

T = TypeVar("T")


def _named(read: Callable[[type[T], str, Answer], T]) -> Callable[[type[T], str, Answer], T]:
    """Decorate a reader: its errors become a `FleetError` that names the node."""

    @wraps(read)
    def named(cls: type[T], node: str, answer: Answer) -> T:
        with refuse_malformed(node):
            return read(cls, node, answer)

    return named


@dataclass(frozen=True)
class UnitLook:
    """The state of a gpufleet unit on a node."""

    unit: str
    active: str
    """systemd's ActiveState: active, activating, failed, inactive ...; "": not reported."""
    sub: str
    since: float | None
    """Time at which it entered that state, in seconds since 1970; None: unknown."""
    started: str | None
    """The fingerprint with which its process was started."""
    fingerprint: str | None
    """The fingerprint in its file now; None: there is no file."""
    release: str
    """The release that its file starts; "": unknown."""
    restarts: int
    """Number of restarts by systemd (NRestarts)."""

    @property
    def replica(self) -> str:
        """Return the id of its replica, for example `tiny-0` for `vllm-tiny-0.service`."""
        return stage_of(self.unit)

    @property
    def is_running(self) -> bool:
        """Return whether its process exists."""
        return self.active in {"active", "reloading", "activating", "deactivating"}

    def is_running_with(self, fingerprint: str | None) -> bool:
        """Return whether it runs and was started with that fingerprint."""
        up = self.active in {"active", "reloading"}
        return up and fingerprint is not None and self.started == fingerprint


@dataclass(frozen=True)
class NextUnits:
    """Units on a node that `deploys/prepare.py` has prepared for a switch."""

    plan: str
    """Identifies the content: equal contents have equal values."""
    units: Mapping[str, str]
    """Fingerprints by unit."""
    remove: tuple[str, ...]
    """Units that the plan does not place on this node."""


@dataclass(frozen=True)
class KeptUnits:
    """Units' state before an upgrade switched them."""

    id: str
    at: float
    """Time at which the first unit was kept, in seconds since 1970."""
    units: Mapping[str, str | None]
    """Fingerprints by unit; None: the unit did not exist."""


@dataclass(frozen=True)
class ReleaseLook:
    """A release on a node's disk."""

    id: str
    whole: bool
    built: float | None
    """Time of its completion, in seconds since 1970."""
    users: tuple[str, ...]
    """References to it: units, `next/...`, `kept/ID/...`."""


@dataclass(frozen=True)
class NodeLook:
    """The state of a node that matters for an upgrade."""

    node: str
    boot_id: str
    clock: float
    lock: Lock | None
    cordon: Mark | None
    drained: Mapping[str, Mark]
    """The drain marks, by replica."""
    next: NextUnits | None
    kept: Mapping[str, KeptUnits]
    """Kept units by the upgrade's id, oldest first."""
    units: Mapping[str, UnitLook]
    releases: Mapping[str, ReleaseLook]
    deploy: Deploy | None = None
    """The deploy that is changing the node."""
    problem: str | None = None
    """The part of the state that could not be read, and why."""

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> NodeLook:
        """Parse a node's answer to `look`."""
        said = _document(node, answer)
        following = said.get("next")
        drained = {name: Mark.from_file(each) for name, each in (said.get("drained") or {}).items()}
        return cls(
            node=node,
            boot_id=said.get("boot_id") or "",
            clock=said.get("clock") or 0.0,
            lock=Lock.from_file(said.get("lock")),
            cordon=Mark.from_file(said.get("cordon")),
            drained={name: mark for name, mark in drained.items() if mark},
            next=following
            and NextUnits(following["plan"], following["units"], tuple(following["remove"])),
            kept={
                each["id"]: KeptUnits(each["id"], each["at"], each["units"])
                for each in said.get("kept") or ()
            },
            units={each["unit"]: UnitLook(**each) for each in said.get("units") or ()},
            releases={
                each["id"]: ReleaseLook(**{**each, "users": tuple(each["users"])})
                for each in said.get("releases") or ()
            },
            deploy=Deploy.from_file(said.get("deploy")),
            problem=said.get("problem"),
        )


@dataclass(frozen=True)
class LockAnswer:
    """A node's lock after locking or unlocking."""

    lock: Lock | None
    """The present lock."""
    before: Lock | None
    """The lock before."""
    ours: bool
    """Whether the lock is as requested."""
    deploy: Deploy | None = None
    """The deploy that blocks the lock."""
    problem: str | None = None

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> LockAnswer:
        """Parse a node's answer to `lock` or `unlock`."""
        said = _document(node, answer)
        return cls(
            Lock.from_file(said.get("lock")),
            Lock.from_file(said.get("before")),
            bool(said.get("ours")),
            Deploy.from_file(said.get("deploy")),
            said.get("problem"),
        )


@dataclass(frozen=True)
class Marks:
    """A node's marks after a change."""

    cordon: Mark | None
    drained: Mapping[str, Mark]
    changed: tuple[str, ...]
    """`cordon` and replicas whose marks the request changed."""
    problem: str | None = None
    """Why a mark was not changed; None: no problem."""

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> Marks:
        """Parse a node's answer to `cordon`, `uncordon`, `drain` or `undrain`."""
        said = _document(node, answer)
        drained = {name: Mark.from_file(each) for name, each in (said.get("drained") or {}).items()}
        return cls(
            Mark.from_file(said.get("cordon")),
            {name: mark for name, mark in drained.items() if mark},
            tuple(said.get("changed") or ()),
            said.get("problem"),
        )


@dataclass(frozen=True)
class RequestsLeft:
    """The number of requests left on servers at the end of `wait_quiet`."""

    left: Mapping[str, int | None]
    """Running and waiting requests, by the server's address; None: not reported."""
    seconds: float
    """The duration of the wait, in seconds."""
    problem: str | None = None

    @property
    def total(self) -> int:
        """Return the sum over the servers that reported a number."""
        return sum(each or 0 for each in self.left.values())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the running servers that reported no number."""
        return tuple(sorted(url for url, count in self.left.items() if count is None))

    @property
    def quiet(self) -> bool:
        """Return whether no request is left and no number is unknown."""
        return not self.total and not self.unknown and self.problem is None

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> RequestsLeft:
        """Parse a node's answer to `wait_quiet`."""
        said = _document(node, answer)
        return cls(said.get("left") or {}, said.get("seconds") or 0.0, said.get("problem"))


@dataclass(frozen=True)
class SwitchAnswer:
    """The results of stopping, switching or restoring units."""

    changed: tuple[str, ...]
    """Units that were stopped; units that must run were started again."""
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    cut: tuple[str, ...]
    """Units that systemd killed at TimeoutStopSec=; their running requests were cut off."""
    stopped_at: float | None
    """Time of the first unit's stop request, in seconds since 1970 by the node's clock."""
    down_at: float | None
    """Time at which the last unit had stopped."""
    started_at: float | None
    """Start time of the last unit, which then loads its model."""
    clock: float
    """The time of the answer by the node's clock."""
    problem: str | None = None
    """Why the result is not as requested. Finished steps stay; repeat the request, or `restore`."""
    journal: tuple[str, ...] = ()
    """The last lines of a unit that did not start."""

    @property
    def gap(self) -> float | None:
        """Return the seconds from the first stop to the last start."""
        if self.stopped_at is None or self.started_at is None:
            return None
        return self.started_at - self.stopped_at

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> SwitchAnswer:
        """Parse a node's answer to `switch`, `restore` or `stop`."""
        said = _document(node, answer)
        return cls(
            changed=tuple(said.get("changed") or ()),
            unchanged=tuple(said.get("unchanged") or ()),
            removed=tuple(said.get("removed") or ()),
            cut=tuple(said.get("cut") or ()),
            stopped_at=said.get("stopped_at"),
            down_at=said.get("down_at"),
            started_at=said.get("started_at"),
            clock=said.get("clock") or 0.0,
            problem=said.get("problem"),
            journal=tuple(said.get("journal") or ()),
        )


@dataclass(frozen=True)
class UnitReady:
    """One unit at the end of the wait."""

    unit: str
    ready: bool
    seconds: float
    """Duration of the wait for the unit, in seconds."""
    since: float | None
    """Start time of its process, in seconds since 1970 by the node's clock; None: unknown."""
    at: float | None
    """Time of its first completed prompt, by the same clock; None: no prompt was completed."""
    why: str
    """Why it is not ready: a sentence with its likely cause, lines of its journal below."""


@dataclass(frozen=True)
class ReadyAnswer:
    """The result of `wait_ready` for a node's units."""

    units: Mapping[str, UnitReady] = field(default_factory=dict)
    problem: str | None = None

    @property
    def ready(self) -> bool:
        """Return whether all units answer."""
        return self.problem is None and all(each.ready for each in self.units.values())

    @property
    def why(self) -> tuple[str, ...]:
        """Return a sentence for each unit that does not answer."""
        own = () if self.problem is None else (self.problem,)
        return (*own, *(each.why for each in self.units.values() if not each.ready))

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> ReadyAnswer:
        """Parse a node's answer to `wait_ready`."""
        said = _document(node, answer)
        units = {each["unit"]: _unit_ready(each) for each in said.get("units") or ()}
        return cls(units, said.get("problem"))


@dataclass(frozen=True)
class CollectAnswer:
    """The releases that a node removed, and those that stay."""

    removed: tuple[str, ...]
    """Ids of the removed releases."""
    stays: Mapping[str, str]
    """Reasons why releases stay, by id."""
    freed_bytes: int
    problem: str | None = None

    @classmethod
    @_named
    def read(cls, node: str, answer: Answer) -> CollectAnswer:
        """Parse a node's answer to `collect`."""
        said = _document(node, answer)
        return cls(
            tuple(said.get("removed") or ()),
            said.get("stays") or {},
            said.get("freed_bytes") or 0,
            said.get("problem"),
        )


def _document(node: str, answer: Answer) -> Mapping[str, Any]:
    """Return a node's document. Raises `FleetError` if it is missing or of another kind."""
    if isinstance(answer, str):
        raise FleetError(f"{node}: {answer}")
    if answer.get("schema") != SCHEMA:
        raise FleetError(f"{node}: on_node/change/change.py returned an unexpected answer")
    return answer


def _unit_ready(said: Mapping[str, Any]) -> UnitReady:
    return UnitReady(
        unit=said["unit"],
        ready=bool(said["ready"]),
        seconds=said["seconds"],
        since=said.get("since"),
        at=said.get("at"),
        why="" if said["ready"] else _why(said),
    )


def _why(said: Mapping[str, Any]) -> str:
    """Return why a unit is not ready, with the likely cause and lines of its journal."""
    seen = said.get("seen") or {"error": "the unit was not queried"}
    if said.get("served_name") is None:
        return _why_unit(said, seen)
    found = readiness.verdict(
        seen,
        served_name=said["served_name"],
        unit=said["unit"],
        fingerprint=said.get("fingerprint"),
        keyed=bool(said.get("keyed")),
        adapters=said.get("adapters", ()),
        restarts=int(said.get("restarts") or 0),
    )
    if found.state in {readiness.State.WAITING, readiness.State.READY}:
        lines: Sequence[str] = seen.get("journal", [])
        return str(readiness.not_ready_error(int(said["seconds"]), said["unit"], lines))
    return found.text


def _why_unit(said: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """Return why a rank without a server is not ready."""
    properties = seen.get("unit") or {}
    lines = readiness.relevant_lines(seen.get("journal", []))
    told = "".join(f"\n    {line}" for line in lines)
    state = properties.get("ActiveState") or seen.get("error") or "not found"
    return f"{said['unit']} is {state} after {said['seconds']:.0f} s{told}"
