"""Reduce a journal's entries to the state of an upgrade.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.run.journal_entry import Entry, Phase


@dataclass(frozen=True)
class GroupState:
    """The progress of one group."""

    group: Group
    wave: int
    phase: Phase = "waiting"
    """The last event of the group."""
    since: float = 0
    """Time of that event, in seconds since the epoch."""
    undoing: bool = False
    """Whether it failed and is rolled back."""
    marked: bool = False
    """Whether its nodes may have marks of this upgrade, and gateways may send it no requests."""
    open: bool = True
    """Whether gateways may send it requests."""
    replaced: bool = False
    """Whether its units may be the new ones."""
    below: bool = False
    """Whether the node below vLLM may be changed already, which cannot be undone."""
    left: int = 0
    """Requests that had not finished when its drains ended."""
    passed: Mapping[str, bool | None] = field(default_factory=dict)
    """The last verdict of this attempt, by gate."""
    why: tuple[str, ...] = ()
    """The reasons of its failure; for a stuck group, the information that an operator needs."""
    alone: bool = False
    """Whether it failed itself, not because of another group of its wave."""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self.phase in {"done", "returned", "stuck"}


@dataclass(frozen=True)
class State:
    """The state of an upgrade after its journal's last entry."""

    id: str = ""
    kind: str = "upgrade"
    inventory: str = ""
    what: str = ""
    of: str | None = None
    by: str = ""
    started: float = 0
    limit: tuple[str, ...] = ()
    waves: tuple[Wave, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The `upgrade` settings at planning time, from `Upgrade.model_dump`."""
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    """Nodes that may have its lock."""
    confirmed: frozenset[int] = frozenset()
    """Confirmed waves; 0: the start."""
    planned: bool = False
    prepared: bool = False
    baseline: Mapping[str, Any] = field(default_factory=dict)
    wave: int = 0
    """Number of the last wave that was begun; 0: none."""
    declared: tuple[Mapping[str, Any], ...] = ()
    """Lines of group_vars that it rewrote."""
    paused: tuple[str, ...] = ()
    """Why no further group is begun; empty: not paused."""
    aborting: bool = False
    finished: float | None = None
    """Time at which everything was as declared, in seconds since the epoch; None: not finished."""
    stopped: tuple[str, ...] = ()
    """Why it ended early; empty: not stopped."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Estimated durations in seconds, by wave."""
    last: float = 0
    """Time of the last entry, in seconds since the epoch."""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return bool(self.finished or self.stopped) and not self.locked

    @property
    def failures(self) -> int:
        """Return the number of groups that failed by themselves."""
        return sum(each.alone for each in self.groups.values())

    @property
    def marked(self) -> tuple[str, ...]:
        """Return the replicas that this upgrade may have drained, by name."""
        return tuple(
            sorted(r for each in self.groups.values() if each.marked for r in each.group.replicas)
        )

    def marks_on(self, node: str) -> tuple[str, ...]:
        """
        Return the replicas on a node that this upgrade may have drained; with any, the node is
        cordoned.
        """
        return tuple(
            sorted(
                replica
                for each in self.groups.values()
                if each.marked and node in each.group.nodes
                for replica in each.group.replicas
            )
        )


def fold(entries: Iterable[Entry]) -> State:
    """Compute an upgrade's state from its journal's entries."""
    state = State()
    for entry in entries:
        state = apply(state, entry)
    return state


def apply(state: State, entry: Entry) -> State:
    return replace(_apply_entry(state, entry), last=entry.at)


def _apply_entry(state: State, entry: Entry) -> State:  # noqa: PLR0912  # one case a word
    said = entry.said
    if entry.group is not None:
        return _apply_group_entry(state, entry)
    match entry.what:
        case "started":
            return replace(
                state,
                id=str(said.get("id", "")),
                kind=str(said.get("kind", "upgrade")),
                inventory=str(said.get("inventory", "")),
                what=str(said.get("what", "")),
                of=said.get("of"),
                limit=tuple(said.get("limit") or ()),
                started=entry.at,
            )
        case "owner":
            return replace(state, by=str(said.get("by", "")))
        case "declared":
            return replace(state, declared=(*state.declared, *(said.get("files") or ())))
        case "locking" | "locked":
            return replace(state, locked=tuple(said.get("nodes") or ()))
        case "unlocked":
            return replace(state, locked=())
        case "planned":
            return _plan(state, said)
        case "confirmed":
            return replace(state, confirmed=state.confirmed | {entry.wave or 0})
        case "prepared":
            return replace(state, prepared=True)
        case "baseline":
            return replace(state, baseline=said)
        case "wave":
            return replace(state, wave=entry.wave or 0)
        case "paused":
            return replace(state, paused=_sentences(said.get("why")) or ("paused",))
        case "aborting":
            return replace(state, aborting=True, paused=())
        case "resumed":
            return _resume(state)
        case "finished":
            return replace(state, finished=entry.at)
        case "stopped":
            return replace(state, stopped=_sentences(said.get("why")) or ("stopped",))
        case _:
            return state


def _plan(state: State, said: Mapping[str, Any]) -> State:
    waves = tuple(
        Wave(
            int(each["number"]),
            tuple(Group.from_json(group) for group in each["groups"]),
            bool(each.get("canary", False)),
        )
        for each in said["waves"]
    )
    return replace(
        state,
        planned=True,
        waves=waves,
        settings=dict(said.get("settings") or {}),
        seconds={int(key): float(each) for key, each in (said.get("seconds") or {}).items()},
        groups={each.id: GroupState(each, wave.number) for wave in waves for each in wave.groups},
    )


def _resume(state: State) -> State:
    """Clear pause and stop, and give stuck groups another attempt."""
    return replace(
        state,
        paused=(),
        stopped=(),
        groups={name: _unstick(each) for name, each in state.groups.items()},
    )


def _unstick(group: GroupState) -> GroupState:
    if group.phase != "stuck":
        return group
    if group.below:  # there is only the way forward
        return replace(group, phase="drained", undoing=False, alone=False, why=(), passed={})
    return replace(group, phase="failed", undoing=True)


def _apply_group_entry(state: State, entry: Entry) -> State:
    before = state.groups.get(entry.group or "")
    # What is about one of its nodes, or only worth knowing, moves no group.
    if before is None or entry.node is not None or entry.what not in get_args(Phase):
        return state
    after = replace(before, phase=cast("Phase", entry.what), since=entry.at)
    match entry.what:
        case "draining":
            # Gates are for the way there; on the way back they stay as they were.
            passed = before.passed if before.undoing else {}
            after = replace(after, marked=True, passed=passed)
        case "drained":
            left = before.left + int(entry.said.get("left") or 0)
            after = replace(after, open=False, left=left)
        case "changing":
            after = replace(after, below=True)
        case "switching":
            after = replace(after, replaced=True)
        case "restored":
            after = replace(after, replaced=False)
        case "judged":
            gate = str(entry.said.get("gate"))
            after = replace(after, passed={**before.passed, gate: entry.said.get("passed")})
        case "undraining":
            after = replace(after, open=True)
        case "undrained":
            after = replace(after, marked=False)
        case "failed":
            after = replace(
                after,
                undoing=True,
                why=_sentences(entry.said.get("why")),
                alone=before.alone or entry.said.get("by") != "wave",
            )
        case "stuck":
            after = replace(after, why=(*before.why, *_sentences(entry.said.get("why"))))
        case _:
            pass
    return replace(state, groups={**state.groups, before.group.id: after})


def _sentences(said: Any) -> tuple[str, ...]:
    if isinstance(said, str):
        return (said,)
    return tuple(map(str, said or ()))
