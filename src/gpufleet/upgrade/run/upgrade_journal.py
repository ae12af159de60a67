"""What an upgrade did and is about to do: a file to which every step is written before it is made.

One JSON object a line, in a file that only its owner can read, and each line is on the disk
(`fsync`) before the step that it announces begins. So whoever reads it after a `kill -9` knows at
most too much: that something had begun, never that something is missing. `fold` makes of it what
the fleet is left in; what is done next is `state_machine`'s.

A line that was being written when the machine went down has no end and announces nothing: its step
was not made. There is one writer at a time, held by `flock`, which dies with its process. No secret
is written: what nodes say is made harmless for a terminal first, and shortened.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from gpufleet.errors import FleetError
from gpufleet.upgrade.plan.wave import Group, Wave

FOLDER = Path(".gpufleet/upgrades")
"""Where journals lie in an operator's project, which its `.gitignore` leaves out."""
SUFFIX = ".jsonl"
SCHEMA = 1

WORDS: Mapping[str, str] = MappingProxyType(
    {
        # Of the whole upgrade. Those that end in -ing come before their step, the others after.
        "started": "id, schema, kind (upgrade|rollback), inventory, what, of (kind rollback: the "
        "upgrade that is undone), limit",
        "owner": "by (user@host), pid",
        "declared": "files: [{file, line, key, before, after}], before it writes them",
        "locking": "nodes, steal (why, or null)",
        "locked": "nodes",
        "planned": "waves: [{number, canary, groups: [Group]}], settings (of Upgrade), needs, "
        "seconds (estimated, by wave), remarks",
        "confirmed": "by (a person, --yes); wave: which one, none for the start",
        "preparing": "log (file)",
        "prepared": "",
        "baseline": "replicas: {replica: what was seen}, findings, alerts",
        "wave": "it begins; loads, needs",
        "paused": "why; nothing more is begun until it is resumed",
        "aborting": "why; what is in hand is undone",
        "resumed": "by",
        "finishing": "log (file)",
        "unlocking": "nodes",
        "unlocked": "nodes",
        "finished": "everything is as declared",
        "stopped": "why: [sentences], how (to go on)",
        "noted": "text: worth knowing, changes no state; with a group where it is about one",
        # Of a group: each has wave and group, those about one of its nodes a node.
        "draining": "nodes get their marks, gateways send no more",
        "drained": "left (requests that were cut off), seconds",
        "changing": "log (file): what is below vLLM is changed; kind node alone",
        "changed": "",
        "switching": "from here on units may be the new ones, and are down",
        "switched": "seconds (by node: down to started)",
        "ready": "seconds (since it was started), load_seconds",
        "judged": "gate (golden|traffic), passed (true|false|null: not known), reasons",
        "undraining": "marks are lifted, gateways send again",
        "undrained": "",
        "soaked": "seconds, seen",
        "done": "it is as declared, and serves",
        "failed": "why: [sentences], by (engine: it failed | wave: another one of its wave did)",
        "restoring": "from here on units may be the kept ones, and are down",
        "restored": "seconds (by node)",
        "returned": "it is as it was before, and serves",
        "stuck": "why: [sentences]: it does not serve and stays drained, a person is needed",
    }
)
"""What an entry may be called, and what is in its `said`."""

Phase: TypeAlias = Literal[
    "waiting",
    "draining",
    "drained",
    "changing",
    "changed",
    "switching",
    "switched",
    "ready",
    "judged",
    "undraining",
    "undrained",
    "soaked",
    "done",
    "failed",
    "restoring",
    "restored",
    "returned",
    "stuck",
]

_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
_MOST = 2000  # characters of a text in an entry: what nodes say is quoted, not kept


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    at: float
    """Seconds since the epoch, by the controller's clock."""
    what: str
    """One of `WORDS`."""
    wave: int | None = None
    group: str | None = None
    node: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "at": round(self.at, 3),
            "what": self.what,
            "wave": self.wave,
            "group": self.group,
            "node": self.node,
            "said": dict(self.said),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Entry:
        """Return what `as_json` has written. Raises `ValueError` and the like for anything else."""
        if found["what"] not in WORDS:
            raise ValueError(f"{found['what']!r} is no word of this release's journals")
        return cls(
            float(found["at"]),
            found["what"],
            found.get("wave"),
            found.get("group"),
            found.get("node"),
            dict(found.get("said") or {}),
        )


def new_id() -> str:
    """Return a name for an upgrade that sorts by time: a directory's on nodes, a file's here."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


def is_id(text: str) -> bool:
    """Tell whether a text may be an upgrade's name."""
    return _ID.fullmatch(text) is not None


# -- the file --------------------------------------------------------------------------------------


class Journal:
    """
    A journal that is being written, by this process alone.

        with Journal.begin(folder, new_id()) as journal:
            journal.append("draining", wave=1, group="tiny-0")
            ...  # now it may be drained

    `entries` are all that it has, also those of runs before.
    """

    def __init__(self, path: Path, file: int, entries: Iterable[Entry]) -> None:
        self.path = path
        self.entries: list[Entry] = list(entries)
        self.state = fold(self.entries)
        """What the entries come to."""
        self.on_entry: Callable[[Entry], None] | None = None
        """Is told each entry once it is on the disk: for what is shown meanwhile."""
        self._file = file

    @classmethod
    def begin(cls, folder: Path, upgrade: str) -> Journal:
        """Create the journal of a new upgrade. Raises `FleetError` where that cannot be done."""
        path = folder / f"{upgrade}{SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            _sync_folder(folder)
        except OSError as error:
            raise FleetError(
                f"{path}: cannot be written ({error.strerror}), and no step is made that is not "
                "written down: name another directory by --journal"
            ) from None
        _lock_file(path, file)
        return cls(path, file, ())

    @classmethod
    def reopen(cls, path: Path) -> Journal:
        """
        Go on with a journal. Raises `FleetError` where another process does, or it has mistakes.

        A last line without its end is taken off: its step was not made.
        """
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise FleetError(f"{path}: cannot be opened: {error.strerror}") from None
        _lock_file(path, file)
        whole, entries = _read(path)
        os.ftruncate(file, whole)
        os.fsync(file)
        return cls(path, file, entries)

    def append(
        self,
        what: str,
        /,
        *,
        wave: int | None = None,
        group: str | None = None,
        node: str | None = None,
        **said: Any,
    ) -> Entry:
        """
        Write an entry, and return once it is on the disk.

        Raises `FleetError` when it cannot be written: then nothing more is done.
        """
        if what not in WORDS:
            raise ValueError(what)
        entry = Entry(time.time(), what, wave, group, node, _shorten(said))
        line = json.dumps(entry.as_json(), separators=(",", ":"), default=str) + "\n"
        try:
            # One write: greenlets of several groups append, and none comes between.
            _write(self._file, line.encode())
            os.fsync(self._file)
        except OSError as error:
            raise FleetError(
                f"{self.path}: cannot be written ({error.strerror}), so {what} is not begun: make "
                "room, and go on by `gpufleet upgrade --resume`"
            ) from None
        self.entries.append(entry)
        self.state = _apply(self.state, entry)
        if self.on_entry:
            self.on_entry(entry)
        return entry

    def close(self) -> None:
        """Let another process write."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> tuple[Entry, ...]:
    """Return what a journal has, whoever writes it. Raises `FleetError` for what is none."""
    return _read(path)[1]


def is_written(path: Path) -> bool:
    """Tell whether a process has a journal open to write."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def list_journals(folder: Path) -> tuple[Path, ...]:
    """Return the journals in a directory, the oldest first."""
    with contextlib.suppress(OSError):
        return tuple(
            sorted(each for each in folder.iterdir() if each.suffix == SUFFIX and is_id(each.stem))
        )
    return ()


def find(folder: Path, upgrade: str) -> Path:
    """Return an upgrade's journal. Raises `FleetError` if there is none."""
    path = folder / f"{upgrade}{SUFFIX}"
    if is_id(upgrade) and path.is_file():
        return path
    there = ", ".join(each.stem for each in list_journals(folder)) or "none"
    raise FleetError(f"{folder}: has no upgrade {upgrade!r}; there is {there}")


def _read(path: Path) -> tuple[int, tuple[Entry, ...]]:
    """Return how many bytes are whole lines, and the entries in them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FleetError(f"{path}: cannot be read: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            entries.append(Entry.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FleetError(
                f"{path}:{number}: is no entry of a journal ({error}): it was changed by hand, or "
                "by another release of gpufleet; what nodes know is in `gpufleet status`"
            ) from None
    return whole, tuple(entries)


def _lock_file(path: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise FleetError(
            f"{path}: another process on this machine is at it: wait for it, or end it "
            "(`fuser` names it)"
        ) from None


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _sync_folder(folder: Path) -> None:
    """Have a directory's new name survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shorten(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MOST else value[: _MOST - 1] + "…"
    if isinstance(value, Mapping):
        return {str(key): _shorten(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shorten(each) for each in value]
    return value


# -- what it comes to ------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupState:
    """How far one group is."""

    group: Group
    wave: int
    phase: Phase = "waiting"
    """The last word about it."""
    since: float = 0
    """When that was."""
    undoing: bool = False
    """It failed, and goes back to what it was."""
    marked: bool = False
    """Its nodes may have marks of this upgrade, and gateways may send it nothing."""
    open: bool = True
    """Gateways may send it requests."""
    replaced: bool = False
    """Its units may be the new ones."""
    below: bool = False
    """What is below vLLM may be the new one, to which there is no way back."""
    left: int = 0
    """Requests that were not finished when its drain ended."""
    passed: Mapping[str, bool | None] = field(default_factory=dict)
    """By gate: the last verdict of this attempt."""
    why: tuple[str, ...] = ()
    """Of a failed one, the reasons; of a stuck one what a person needs to know."""
    alone: bool = False
    """It failed by itself, and not because another one of its wave did."""

    @property
    def is_over(self) -> bool:
        """Nothing more is to be done with it."""
        return self.phase in {"done", "returned", "stuck"}


@dataclass(frozen=True)
class State:
    """What an upgrade is left in."""

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
    """As `Upgrade.model_dump` had them when it was planned."""
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    """Nodes that may have its lock."""
    confirmed: frozenset[int] = frozenset()
    """Waves that somebody said yes to; 0: the start."""
    planned: bool = False
    prepared: bool = False
    baseline: Mapping[str, Any] = field(default_factory=dict)
    wave: int = 0
    """The last one that was begun; 0: none."""
    declared: tuple[Mapping[str, Any], ...] = ()
    """Lines that it rewrote in group_vars."""
    paused: tuple[str, ...] = ()
    """Why nothing more is begun; empty: it goes on."""
    aborting: bool = False
    finished: float | None = None
    """When everything was as declared."""
    stopped: tuple[str, ...] = ()
    """Why it ended before that."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    """Estimated, by wave."""
    last: float = 0
    """When the last entry was written."""

    @property
    def is_over(self) -> bool:
        """Nothing of it is left to be done."""
        return bool(self.finished or self.stopped) and not self.locked

    @property
    def failures(self) -> int:
        """Groups that failed by themselves."""
        return sum(each.alone for each in self.groups.values())

    @property
    def marked(self) -> tuple[str, ...]:
        """Replicas that may be drained by this upgrade, by name."""
        return tuple(
            sorted(r for each in self.groups.values() if each.marked for r in each.group.replicas)
        )

    def marks_on(self, node: str) -> tuple[str, ...]:
        """Return the replicas that this upgrade may have drained there; for any, it is cordoned."""
        return tuple(
            sorted(
                replica
                for each in self.groups.values()
                if each.marked and node in each.group.nodes
                for replica in each.group.replicas
            )
        )


def fold(entries: Iterable[Entry]) -> State:
    """Return what a journal's entries come to."""
    state = State()
    for entry in entries:
        state = _apply(state, entry)
    return state


def _apply(state: State, entry: Entry) -> State:
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
    """Take up what was left: groups that are stuck, too, for another attempt."""
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


def entries_of(entries: Iterable[Entry], group: str) -> Iterator[Entry]:
    """Yield what a journal has about one group, in its order."""
    return (each for each in entries if each.group == group)
