"""What a node is asked to do while the fleet is changed, and what its answers say.  Pure.

Each function returns a `NodeQuestion`: the text for the node's python3, and the deadline and the
name that `fleet.run.asking` takes. What it answers is read by the class that its docstring names:

    asked = node_protocol.switch("2026-11-22-1", ["vllm-tiny-0.service"], stop_seconds=150)
    answers = ask(lambda node: asked.program, asked.seconds, asked.what)
    switched = {node: SwitchAnswer.read(node, answer) for node, answer in answers.items()}

`read` raises `FleetError`, which names the node, where there was no answer: what happened there is
not known then, and `look` says it. What was asked and could not be done is no exception: it is the
answer's `problem`, a sentence. Every question may be asked again: what is done already stays so.
`on_node/change/change.py` is the program, and says what lies where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.node.change_marks import Lock, Mark
from gpufleet.remote import payload
from gpufleet.remote.payload import Payload
from gpufleet.serving import readiness

Answer: TypeAlias = Mapping[str, Any] | str
"""What a node printed, or a sentence why there is nothing, as `fleet.run.asking` has it."""

SCHEMA = 1

# Beside what is waited for: to connect (a probe is given ten seconds), to start Python on a busy
# node, and to wait until another one there has made its marks (on_node/common/change_files.py: 30
# s).
WAY_SECONDS = 60
# Files and marks: the disk's own time.
SHORT_SECONDS = 60
# Beside the stop itself: daemon-reload (converge/diff.py gives it 120 s), enabling, starting.
# Another replica's stop on the same node, or one whose controller was lost, may go before it.
SWITCH_SECONDS = 240
# One look of `on_node/serving/endpoints.py` at a stage that answers late.
LOOK_SECONDS = 100
# Removing a release of 10 GB in 30,000 files took 4 s on the lab's disk; there may be several.
COLLECT_SECONDS = 540
LINES = 300
"""Of a unit's journal, where one died: the first error may be some hundred lines back."""


@dataclass(frozen=True)
class NodeQuestion:
    """A question to a node: its program, its deadline, and what it is called in sentences."""

    program: Payload
    seconds: float
    what: str


# -- questions -------------------------------------------------------------------------------------


def look() -> NodeQuestion:
    """Ask for everything that concerns a change: `NodeLook`. Changes nothing."""
    return _question("look", SHORT_SECONDS, "the look at changes")


def lock(upgrade: str, owner: str, origin: str, what: str, *, steal: bool = False) -> NodeQuestion:
    """
    Take the node's lock for an upgrade, unless another one has it: `LockAnswer`.

    `owner` is who (`ann@laptop`), `origin` from where (a directory, a host), `what` what for, in
    words. Taken by the same upgrade again it stays as it is. `steal` takes it from another one, and
    the answer says from whom.
    """
    return _question(
        "lock",
        SHORT_SECONDS,
        "the lock",
        id=upgrade,
        owner=owner,
        origin=origin,
        what=what,
        steal=steal,
    )


def unlock(upgrade: str) -> NodeQuestion:
    """Give the lock back, if this upgrade has it: `LockAnswer`. Another's stays."""
    return _question("unlock", SHORT_SECONDS, "the lock", id=upgrade)


def cordon(by: str, why: str, *, upgrade: str | None = None) -> NodeQuestion:
    """
    Mark the node: nothing new is placed there. `Marks`.

    `by` is `user@host`. `upgrade` None: a person does. A mark that is there stays as it is,
    whoever's it is; only a person's takes the place of an upgrade's, which can then not lift it.
    """
    return _question("cordon", SHORT_SECONDS, "the cordon", by=by, why=why, upgrade=upgrade)


def uncordon(*, upgrade: str | None = None, force: bool = False) -> NodeQuestion:
    """
    Take the mark away: `Marks`, with a `problem` where it is somebody else's.

    An upgrade lifts its own only. A person (None) lifts a person's, and an upgrade's with `force`.
    """
    return _question("uncordon", SHORT_SECONDS, "the cordon", upgrade=upgrade, force=force)


def drain(
    replicas: Iterable[str], by: str, why: str, *, upgrade: str | None = None
) -> NodeQuestion:
    """Mark replicas (`tiny-0`) as drained: `Marks`. Only marks; as `cordon` in all else."""
    return _question(
        "drain",
        SHORT_SECONDS,
        "the drain mark",
        replicas=sorted(replicas),
        by=by,
        why=why,
        upgrade=upgrade,
    )


def undrain(
    replicas: Iterable[str], *, upgrade: str | None = None, force: bool = False
) -> NodeQuestion:
    """Take marks away: `Marks`; as `uncordon`."""
    return _question(
        "undrain",
        SHORT_SECONDS,
        "the drain mark",
        replicas=sorted(replicas),
        upgrade=upgrade,
        force=force,
    )


def wait_quiet(units: Iterable[str], seconds: float) -> NodeQuestion:
    """
    Wait until the servers of these units have no request, at most `seconds`: `RequestsLeft`.

    Where they answer is in the units' files. Quiet means that no request runs or waits in vLLM in
    two looks, a second apart: a balancer may still be sending one. A unit that does not run has
    none.
    """
    return _question(
        "quiet",
        seconds,
        "the wait for requests",
        units=sorted(units),
        seconds=seconds,
    )


def stop(units: Iterable[str], *, stop_seconds: float) -> NodeQuestion:
    """Stop units at once: `SwitchAnswer`. `stop_seconds`: the longest TimeoutStopSec of them."""
    return _question(
        "stop",
        2 * stop_seconds + 2 * SHORT_SECONDS,
        "the stop",
        units=sorted(units),
        seconds=stop_seconds,
    )


def switch(
    upgrade: str, units: Iterable[str] | None = None, *, stop_seconds: float
) -> NodeQuestion:
    """
    Have units run what `deploys/prepare.py` has put into `next/`: `SwitchAnswer`.

    What they were is kept as `upgrade`'s, once: switching again, after a kill too, keeps nothing
    anew. `units` None: all of `next/`, and those that it says are to go. One that already runs with
    its fingerprint of `next/` is left alone. `stop_seconds`: the longest TimeoutStopSec= of what
    runs now, `units.stop_seconds`.
    """
    return _question(
        "switch",
        2 * stop_seconds + SWITCH_SECONDS,
        "the switch",
        id=upgrade,
        units=None if units is None else sorted(units),
        seconds=stop_seconds,
    )


def restore(
    upgrade: str, units: Iterable[str] | None = None, *, stop_seconds: float
) -> NodeQuestion:
    """
    Have units run what they ran before `switch`: `SwitchAnswer`. Needs no network.

    `units` None: all that are kept as `upgrade`'s. What is not kept, for its switch never began, is
    as it was: `unchanged`.
    """
    return _question(
        "restore",
        2 * stop_seconds + SWITCH_SECONDS,
        "the way back",
        id=upgrade,
        units=None if units is None else sorted(units),
        seconds=stop_seconds,
    )


def wait_ready(units: Iterable[str], seconds: float) -> NodeQuestion:
    """
    Wait until each unit's server completes a prompt, at most `seconds`: `ReadyAnswer`.

    Ends at once with a unit that died. One without a server (a rank that has none) is ready when it
    runs with what its file says.
    """
    return _question(
        "ready",
        seconds + LOOK_SECONDS,
        "the wait for answers",
        units=sorted(units),
        seconds=seconds,
        journal=LINES,
    )


def collect(keep: int, days: float) -> NodeQuestion:
    """
    Remove releases and kept units that nothing needs: `CollectAnswer`.

    Never one that a unit, a kept set or `next/` names. Of the others the `keep` newest stay, and
    those younger than `days`.
    """
    return _question(
        "collect", COLLECT_SECONDS, "the removal of old releases", keep=keep, days=days
    )


def _question(do: str, limit: float, what: str, /, **parameters: Any) -> NodeQuestion:
    program = payload.program("change/change", do=do, **parameters)
    return NodeQuestion(program, limit + WAY_SECONDS, what)


# -- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitLook:
    """A unit of ours on a node."""

    unit: str
    active: str
    """systemd's ActiveState: active, activating, failed, inactive ...; "" if it did not say."""
    sub: str
    since: float | None
    """When it came to that state, in seconds since 1970; None: not known."""
    started: str | None
    """The fingerprint that its process was started with."""
    fingerprint: str | None
    """The one that its file has now; None: there is no file."""
    release: str
    """The release that its file starts; "": not known."""
    restarts: int
    """How often it was started again by itself (NRestarts)."""

    @property
    def replica(self) -> str:
        """The id of its replica: `tiny-0` of `vllm-tiny-0.service`."""
        return self.unit.removeprefix("vllm-").removesuffix(".service")

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.active in {"active", "reloading", "activating", "deactivating"}

    def is_running_with(self, fingerprint: str | None) -> bool:
        """Say whether it runs, and was started with that."""
        up = self.active in {"active", "reloading"}
        return up and fingerprint is not None and self.started == fingerprint


@dataclass(frozen=True)
class NextUnits:
    """What `deploys/prepare.py` has put on a node, to be switched to."""

    plan: str
    """Names its content: two that are the same have the same."""
    units: Mapping[str, str]
    """Fingerprints by unit."""
    remove: tuple[str, ...]
    """Units that the plan has no place for here."""


@dataclass(frozen=True)
class KeptUnits:
    """What units were before an upgrade switched them."""

    id: str
    at: float
    """When the first of them was kept, in seconds since 1970."""
    units: Mapping[str, str | None]
    """Fingerprints by unit; None: there was no such unit."""


@dataclass(frozen=True)
class ReleaseLook:
    """A release on a node's disk."""

    id: str
    whole: bool
    built: float | None
    """When it was whole, in seconds since 1970."""
    users: tuple[str, ...]
    """What names it: units, `next/...`, `kept/ID/...`."""


@dataclass(frozen=True)
class NodeLook:
    """Everything on a node that concerns a change."""

    node: str
    boot_id: str
    clock: float
    lock: Lock | None
    cordon: Mark | None
    drained: Mapping[str, Mark]
    """By replica."""
    next: NextUnits | None
    kept: Mapping[str, KeptUnits]
    """By the upgrade's id, oldest first."""
    units: Mapping[str, UnitLook]
    releases: Mapping[str, ReleaseLook]
    problem: str | None = None
    """What of all this could not be read."""

    @classmethod
    def read(cls, node: str, answer: Answer) -> NodeLook:
        """Return what a node answered to `look`."""
        said = _document(node, answer)
        following = said.get("next")
        drained = {name: Mark.of(each) for name, each in (said.get("drained") or {}).items()}
        return cls(
            node=node,
            boot_id=said.get("boot_id") or "",
            clock=said.get("clock") or 0.0,
            lock=Lock.of(said.get("lock")),
            cordon=Mark.of(said.get("cordon")),
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
            problem=said.get("problem"),
        )


@dataclass(frozen=True)
class LockAnswer:
    """A node's lock after it was asked for, or given back."""

    lock: Lock | None
    """Who has it now."""
    before: Lock | None
    """Who had it."""
    ours: bool
    """Whether it is as was asked."""
    problem: str | None = None

    @classmethod
    def read(cls, node: str, answer: Answer) -> LockAnswer:
        """Return what a node answered to `lock` or `unlock`."""
        said = _document(node, answer)
        return cls(
            Lock.of(said.get("lock")),
            Lock.of(said.get("before")),
            bool(said.get("ours")),
            said.get("problem"),
        )


@dataclass(frozen=True)
class Marks:
    """A node's marks after they were made or taken away."""

    cordon: Mark | None
    drained: Mapping[str, Mark]
    changed: tuple[str, ...]
    """`cordon`, or replicas, whose mark is another one now."""
    problem: str | None = None
    """Whose mark stays and why."""

    @classmethod
    def read(cls, node: str, answer: Answer) -> Marks:
        """Return what a node answered to `cordon`, `uncordon`, `drain` or `undrain`."""
        said = _document(node, answer)
        drained = {name: Mark.of(each) for name, each in (said.get("drained") or {}).items()}
        return cls(
            Mark.of(said.get("cordon")),
            {name: mark for name, mark in drained.items() if mark},
            tuple(said.get("changed") or ()),
            said.get("problem"),
        )


@dataclass(frozen=True)
class RequestsLeft:
    """How many requests servers had when the wait was over."""

    left: Mapping[str, int | None]
    """By address, running and waiting together; None: it did not say."""
    seconds: float
    """How long was waited."""
    problem: str | None = None

    @property
    def total(self) -> int:
        """All that are left, of those servers that said so."""
        return sum(each or 0 for each in self.left.values())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Servers that run and did not say how many they have."""
        return tuple(sorted(url for url, count in self.left.items() if count is None))

    @property
    def quiet(self) -> bool:
        """Whether none is left and none is unknown."""
        return not self.total and not self.unknown and self.problem is None

    @classmethod
    def read(cls, node: str, answer: Answer) -> RequestsLeft:
        """Return what a node answered to `quiet`."""
        said = _document(node, answer)
        return cls(said.get("left") or {}, said.get("seconds") or 0.0, said.get("problem"))


@dataclass(frozen=True)
class SwitchAnswer:
    """What became of units that were to be stopped, switched or brought back."""

    changed: tuple[str, ...]
    """Units that were stopped, and started where they were to run."""
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    cut: tuple[str, ...]
    """Units that systemd killed at TimeoutStopSec=: what they were answering was cut off."""
    stopped_at: float | None
    """Seconds since 1970 by the node's clock: when the first was told to stop."""
    down_at: float | None
    """When the last one had stopped."""
    started_at: float | None
    """When the last one was started. It loads from then on."""
    clock: float
    """The node's clock when it answered."""
    problem: str | None = None
    """Why it is not as was asked. What was done until then stays; ask again, or `restore`."""
    journal: tuple[str, ...] = ()
    """Where a unit did not start: the last lines of it."""

    @property
    def gap(self) -> float | None:
        """Seconds from the first stop to the last start."""
        if self.stopped_at is None or self.started_at is None:
            return None
        return self.started_at - self.stopped_at

    @classmethod
    def read(cls, node: str, answer: Answer) -> SwitchAnswer:
        """Return what a node answered to `switch`, `restore` or `stop`."""
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
    """How long was waited for it."""
    since: float | None
    """When its process was started, in seconds since 1970 by the node's clock; None: not known."""
    at: float | None
    """When it had completed its first prompt, by the same clock; None: it did not."""
    why: str
    """Why it is not ready: a sentence with its likely cause, lines of its journal below."""


@dataclass(frozen=True)
class ReadyAnswer:
    """Which units answer."""

    units: Mapping[str, UnitReady] = field(default_factory=dict)
    problem: str | None = None

    @property
    def ready(self) -> bool:
        """Whether all do."""
        return self.problem is None and all(each.ready for each in self.units.values())

    @property
    def why(self) -> tuple[str, ...]:
        """Why not, a sentence for each that does not."""
        own = () if self.problem is None else (self.problem,)
        return (*own, *(each.why for each in self.units.values() if not each.ready))

    @classmethod
    def read(cls, node: str, answer: Answer) -> ReadyAnswer:
        """Return what a node answered to `ready`."""
        said = _document(node, answer)
        units = {each["unit"]: _unit_ready(each) for each in said.get("units") or ()}
        return cls(units, said.get("problem"))


@dataclass(frozen=True)
class CollectAnswer:
    """What was removed of a node's releases."""

    removed: tuple[str, ...]
    """Ids of releases."""
    stays: Mapping[str, str]
    """Ids of releases, and why each stays."""
    freed_bytes: int
    problem: str | None = None

    @classmethod
    def read(cls, node: str, answer: Answer) -> CollectAnswer:
        """Return what a node answered to `collect`."""
        said = _document(node, answer)
        return cls(
            tuple(said.get("removed") or ()),
            said.get("stays") or {},
            said.get("freed_bytes") or 0,
            said.get("problem"),
        )


def _document(node: str, answer: Answer) -> Mapping[str, Any]:
    """Return a node's document. Raises `FleetError` where there is none, or another one."""
    if isinstance(answer, str):
        raise FleetError(f"{node}: {answer}")
    if answer.get("schema") != SCHEMA:
        raise FleetError(f"{node}: on_node/change/change.py answered in another way than was asked")
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
    seen = said.get("seen") or {"error": "it was not looked at"}
    if said.get("served_name") is None:
        return _why_unit(said, seen)
    found = readiness.verdict(
        seen,
        served_name=said["served_name"],
        unit=said["unit"],
        fingerprint=said.get("fingerprint"),
        keyed=bool(said.get("keyed")),
        restarts=int(said.get("restarts") or 0),
    )
    if found.state in {readiness.State.WAITING, readiness.State.READY}:
        lines: Sequence[str] = seen.get("journal", [])
        return str(readiness.unready(int(said["seconds"]), said["unit"], lines))
    return found.text


def _why_unit(said: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """Return why a rank without a server is not ready."""
    properties = seen.get("unit") or {}
    lines = readiness.relevant(seen.get("journal", []))
    told = "".join(f"\n    {line}" for line in lines)
    state = properties.get("ActiveState") or seen.get("error") or "not there"
    return f"{said['unit']} is {state} after {said['seconds']:.0f} s{told}"
