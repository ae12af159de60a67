"""Compare the desired and the actual state, and return the changes as sentences and as commands.

Pure. Only `difference(wanted, snapshot)` compares the states, so dry runs, real runs and drift
detection all use the same `Difference`. A fact that could not be read, and a file that must not be
overwritten, are problems. A part with a problem has no commands, so it changes nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpufleet.converge import package_plan
from gpufleet.converge.desired import (
    STARTED_DIRECTORY,
    UNIT_DIRECTORY,
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Line,
    Link,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    UnitGone,
    User,
    unit_of,
)
from gpufleet.converge.package_commands import TRANSACTION_SECONDS, Plan
from gpufleet.converge.snapshot import FileState, Snapshot, UnitState, Unknown, UserState

# Deadlines of remote commands, in seconds. useradd, `systemctl enable` and similar commands take
# less than a second. The limit is higher for busy nodes.
SHORT_SECONDS = 60
# daemon-reload rereads every unit and runs the generators.
RELOAD_SECONDS = 120
# on_node/converge/place_files.py waits up to 30 s if another run places files.
PLACE_SECONDS = 120
# Added to the times of a unit, for systemd's job queue, and to kill a unit whose stop has timed
# out.
UNIT_MARGIN_SECONDS = 30
# A script that starts or restarts the units in its arguments. Several units are all stopped before
# the first one starts. `systemctl restart` of several units would run independent jobs, so a unit
# could start on a GPU or port that another unit still uses. Everything is one command that ignores
# the end of the connection, so that an interrupted run cannot leave the units stopped. If a start
# fails, the script prints the reason. The number of lines is limited, and so is the time to read a
# slow journal (within UNIT_MARGIN_SECONDS). An argument `UNIT=FINGERPRINT` is skipped if the unit
# already runs with this fingerprint. Example: when another node restarts its rank, the other ranks
# of the group end, and systemd starts them again with the new file. A second start would then end
# the new group.
_START = f"""\
trap '' HUP PIPE
left=$#
while [ "$left" -gt 0 ]; do
  unit=${{1%%=*}} wanted=${{1#"$unit"}}
  shift
  left=$((left - 1))
  if [ -n "$wanted" ] && [ "=$(cat "{STARTED_DIRECTORY}/$unit" 2>/dev/null)" = "$wanted" ] &&
    systemctl is-active --quiet -- "$unit"; then continue; fi
  set -- "$@" "$unit"
done
case $# in
  0) exit 0 ;;
  1) systemctl restart -- "$1" ;;
  *) systemctl stop -- "$@" && systemctl start -- "$@" ;;
esac && exit
status=$?
timeout 15 systemctl status --no-pager --lines=15 -- "$@" >&2
exit $status"""
# States of systemctl(1), is-enabled, in which `systemctl enable` is not needed. Such units start at
# boot, or have no [Install] section because other units start them.
_ENABLED = frozenset({"enabled", "enabled-runtime", "static", "alias", "indirect", "generated"})


@dataclass(frozen=True)
class Command:
    """One command line as a list of words, with its time limit in seconds."""

    argv: tuple[str, ...]
    seconds: int = SHORT_SECONDS


@dataclass(frozen=True)
class Placement:
    """
    One run of on_node/converge/place_files.py.

    Its entries contain the files' contents, so they are not printed.
    """

    entries: tuple[dict[str, Any], ...] = field(repr=False)
    seconds: int = PLACE_SECONDS


@dataclass(frozen=True)
class Transaction:
    """
    One run of on_node/packages/transaction.py, which makes all package changes in one transaction.
    """

    plan: Plan
    seconds: int = TRANSACTION_SECONDS


@dataclass(frozen=True)
class Part:
    """
    The changes of one operation.

    Attributes:
        noop: the message that is shown if there are no changes.
        changes: one line for each change, as an imperative, such as "write /etc/hosts: it is
            missing".
        commands: the commands that make these changes, in order. Empty if there are problems.
        problems: why the operation must not begin, as sentences.
        rewritten: the files whose content the commands change.
    """

    noop: str
    changes: tuple[str, ...] = ()
    commands: tuple[Command | Placement | Transaction, ...] = ()
    problems: tuple[str, ...] = ()
    rewritten: tuple[File, ...] = ()


@dataclass(frozen=True)
class Difference:
    """The changes on one node, with one part for each of the five operations."""

    packages: Part
    accounts: Part
    files: Part
    lines: Part
    units: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return all parts, in the order in which a role usually runs them."""
        return (self.packages, self.accounts, self.files, self.lines, self.units)

    @property
    def changes(self) -> tuple[str, ...]:
        """Return all changes, one line each."""
        return tuple(change for part in self.parts for change in part.changes)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return all problems that prevent the run."""
        return tuple(problem for part in self.parts for problem in part.problems)


def difference(wanted: DesiredState, snapshot: Snapshot) -> Difference:
    """Compare the desired state with a snapshot. The result depends on nothing else."""
    return Difference(
        packages=_packages(wanted, snapshot),
        accounts=_accounts(wanted, snapshot),
        files=_files(wanted, snapshot),
        lines=_lines(wanted, snapshot),
        units=_units(wanted, snapshot),
    )


def units_to_start(wanted: DesiredState, snapshot: Snapshot) -> tuple[str, ...]:
    """
    Return the units that would be started or restarted now.

    Units with an unknown state are omitted.
    """
    return tuple(
        unit.name
        for unit in wanted.values_of(Unit)
        if isinstance(state := snapshot.unit(unit.name), UnitState) and _why_start(unit, state)
    )


class _Work:
    """A part that is being built."""

    def __init__(self, noop: str) -> None:
        self.noop = noop
        self.changes: list[str] = []
        self.commands: list[Command | Placement | Transaction] = []
        self.problems: list[str] = []
        self.rewritten: list[File] = []

    def report_unknown(self, what: str, reason: str) -> None:
        self.problems.append(
            f"{what} could not be read on the node ({reason}), so gpufleet changed nothing. If the "
            "user of the connection lacks the permission, connect as root or set `_sudo: true`"
        )

    def run(self, *argv: str, seconds: int = SHORT_SECONDS) -> None:
        self.commands.append(Command(argv, seconds))

    def part(self) -> Part:
        # If there is a problem, nothing of the part must be done.
        commands = () if self.problems else tuple(self.commands)
        rewritten = () if self.problems else tuple(self.rewritten)
        return Part(self.noop, tuple(self.changes), commands, tuple(self.problems), rewritten)


# --- packages


def _packages(wanted: DesiredState, snapshot: Snapshot) -> Part:
    found = package_plan.packages(wanted, snapshot)
    work = _Work(f"{len(wanted.values_of(Package))} packages are up to date")
    work.changes += found.changes
    for what, reason in found.unknown:
        work.report_unknown(what, reason)
    work.problems += found.problems
    if found.plan:
        work.commands.append(Transaction(found.plan))
    return work.part()


# --- accounts


def _accounts(wanted: DesiredState, snapshot: Snapshot) -> Part:
    groups, users = wanted.values_of(Group), wanted.values_of(User)
    work = _Work(f"{len(groups)} groups and {len(users)} users are up to date")
    for group in groups:
        number = snapshot.groups.get(group.name, Unknown(snapshot.missed))
        if isinstance(number, Unknown):
            work.report_unknown(f"group {group.name}", number.reason)
        elif number is None:
            work.changes.append(f"create group {group.name}")
            work.run("groupadd", *(("--system",) if group.system else ()), "--", group.name)
    for user in users:
        found = snapshot.users.get(user.name, Unknown(snapshot.missed))
        if isinstance(found, Unknown):
            work.report_unknown(f"user {user.name}", found.reason)
        elif found is None:
            work.changes.append(f"create user {user.name}")
            work.run("useradd", *_new_user(user), "--", user.name)
        elif changed := list(_changed_user(user, found)):
            said = ", ".join(text for text, _ in changed)
            work.changes.append(f"change user {user.name}: {said}")
            options = (option for _, options in changed for option in options)
            work.run("usermod", *options, "--", user.name)
    return work.part()


def _new_user(user: User) -> tuple[str, ...]:
    return (
        *(("--system",) if user.system else ()),
        "--no-create-home",
        *("--home-dir", user.home, "--shell", user.shell, "--gid", user.group),
        *(("--groups", ",".join(user.groups)) if user.groups else ()),
    )


def _changed_user(user: User, found: UserState) -> Iterator[tuple[str, tuple[str, ...]]]:
    if found.home != user.home:
        yield f"home is {found.home}, declared {user.home}", ("--home", user.home)
    if found.shell != user.shell:
        yield f"shell is {found.shell}, declared {user.shell}", ("--shell", user.shell)
    if found.group != user.group:
        yield f"group is {found.group}, declared {user.group}", ("--gid", user.group)
    if missing := [group for group in user.groups if group not in found.groups]:
        names = ",".join(missing)
        yield f"not in {names}", ("--append", "--groups", names)


# --- files


def _files(wanted: DesiredState, snapshot: Snapshot) -> Part:
    values = [v for v in wanted if isinstance(v, File | Directory | Link | Absent)]
    work = _Work(f"{len(values)} paths are as declared")
    entries: list[dict[str, Any]] = []
    # Directories come first, and parent directories before their children, so that they exist when
    # files are placed in them.
    for value in sorted(values, key=lambda v: (0, v.path) if isinstance(v, Directory) else (1, "")):
        found = snapshot.file(value.path)
        if found.kind == "unknown":
            work.report_unknown(value.path, found.error)
        elif problem := _in_the_way(value, found):
            work.problems.append(problem)
        elif reason := _why_place(value, found):
            work.changes.append(f"{_VERBS[type(value)]} {value.path}: {reason}")
            entries.append(_entry(value))
            if isinstance(value, File) and found.sha256 != value.sha256:
                work.rewritten.append(value)
    named = {value.path for value in values}
    for pattern in wanted.values_of(NoOtherFiles):
        matches = snapshot.files_like.get(pattern.pattern, Unknown(snapshot.missed))
        if isinstance(matches, Unknown):
            work.report_unknown(pattern.pattern, matches.reason)
            continue
        for path in sorted(matches - named):
            work.changes.append(f"remove {path}: it is not declared")
            entries.append({"kind": "absent", "path": path})
    if isinstance(snapshot.leftovers, Unknown):
        work.report_unknown("the journal of placed files", snapshot.leftovers.reason)
    elif snapshot.leftovers and values:
        work.changes.append("clean up after a run that was interrupted while placing files")
    if work.changes:
        work.commands.append(Placement(tuple(entries)))
    return work.part()


_VERBS = {File: "write", Directory: "make", Link: "link", Absent: "remove"}


def _in_the_way(value: File | Directory | Link | Absent, found: FileState) -> str | None:
    """
    Return why the file at a path must not be replaced, or None.

    An operator may have put it there.
    """
    if isinstance(value, Directory) and found.exists and found.kind != "directory":
        return (
            f"{value.path} must be a directory, but {_what(found)} exists there: move it away, or "
            "set a different path"
        )
    if not isinstance(value, Directory) and found.kind == "directory":
        return (
            f"{value.path} must be {type(value).__name__.lower()}, but a directory exists there: "
            "move the directory away"
        )
    return None


def _what(found: FileState) -> str:
    return f"a link to {found.target}" if found.kind == "link" else f"a {found.kind}"


def _why_place(value: File | Directory | Link | Absent, found: FileState) -> str | None:
    if isinstance(value, Absent):
        return "it is not declared" if found.exists else None
    if not found.exists:
        return "it is missing"
    if isinstance(value, Link):
        if found.kind != "link":
            return f"{_what(found)} exists there"
        return f"it points to {found.target}" if found.target != value.target else None
    if isinstance(value, File) and found.kind != "file":
        return f"{_what(found)} exists there"
    reasons = []
    if isinstance(value, File) and found.sha256 != value.sha256:
        reasons.append("its content differs")
    if (found.user, found.group) != (value.user, value.group):
        reasons.append(
            f"its owner is {found.user}:{found.group}, declared {value.user}:{value.group}"
        )
    if found.mode != value.mode:
        reasons.append(f"its mode is {found.mode:04o}, declared {value.mode:04o}")
    return ", ".join(reasons) or None


def _entry(value: File | Directory | Link | Absent) -> dict[str, Any]:
    """Return the parameters of on_node/converge/place_files.py for a file."""
    entry: dict[str, Any] = {"kind": type(value).__name__.lower(), "path": value.path}
    if isinstance(value, Link):
        entry["target"] = value.target
    if isinstance(value, File | Directory):
        entry.update(user=value.user, group=value.group, mode=value.mode)
    if isinstance(value, File):
        entry["content"] = base64.b64encode(value.content).decode()
    return entry


# --- lines


def _lines(wanted: DesiredState, snapshot: Snapshot) -> Part:
    values = wanted.values_of(Line)
    work = _Work(f"{len(values)} lines are in place")
    entries = []
    for value in values:
        have = snapshot.lines.get(value.path, Unknown(snapshot.missed))
        if isinstance(have, Unknown):
            work.report_unknown(value.path, have.reason)
        elif value.line not in have:
            work.changes.append(f"append to {value.path}: {value.line}")
            entries.append({"kind": "line", "path": value.path, "line": value.line})
    if entries:
        work.commands.append(Placement(tuple(entries)))
    return work.part()


# --- units


def _units(wanted: DesiredState, snapshot: Snapshot) -> Part:
    units = wanted.values_of(Unit)
    work = _Work(f"{len(units)} units are as declared")
    seen: dict[str, UnitState] = {}
    gone = tuple(_gone(wanted, snapshot, work))
    for name in dict.fromkeys([*(unit.name for unit in units), *(unit.name for unit in gone)]):
        found = snapshot.unit(name)
        if isinstance(found, Unknown):
            work.report_unknown(name, found.reason)
        else:
            seen[name] = found
    # Unwanted units are removed first, because they may use GPUs and ports that the other units
    # need.
    _remove([unit for unit in gone if unit.name in seen], seen, work)
    _reload(wanted, snapshot, work)
    known = [unit for unit in units if unit.name in seen]
    _refuse_masked(known, seen, work)
    _enable(known, seen, work)
    _stop(known, seen, work)
    _start(known, seen, work)
    return work.part()


def _gone(wanted: DesiredState, snapshot: Snapshot, work: _Work) -> Iterator[UnitGone]:
    """
    Yield the units to remove.

    These are the declared `UnitGone`, and the unwanted units that match a pattern.
    """
    named = {unit.name for unit in wanted.values_of(Unit)} | {
        unit.name for unit in wanted.values_of(UnitGone)
    }
    yield from wanted.values_of(UnitGone)
    for pattern in wanted.values_of(NoOtherUnits):
        found = snapshot.units_like.get(pattern.pattern, Unknown(snapshot.missed))
        if isinstance(found, Unknown):
            work.report_unknown(f"units {pattern.pattern}", found.reason)
            continue
        for name in sorted(found - named):
            named.add(name)
            yield UnitGone(name, stop_seconds=pattern.stop_seconds)


def _remove(gone: list[UnitGone], seen: dict[str, UnitState], work: _Work) -> None:
    there = [unit for unit in gone if _is_there(seen[unit.name])]
    if not there:
        return
    work.changes += [
        f"remove {unit.name}: it is {seen[unit.name].active}, and it is not declared"
        for unit in there
    ]
    if up := [unit for unit in there if _is_running(seen[unit.name])]:
        seconds = max(unit.stop_seconds for unit in up) + UNIT_MARGIN_SECONDS
        work.run("systemctl", "stop", "--", *(unit.name for unit in up), seconds=seconds)
    if enabled := [u.name for u in there if seen[u.name].file_state.startswith("enabled")]:
        work.run("systemctl", "--quiet", "disable", "--", *enabled)
    names = [unit.name for unit in there]
    paths = [f"{UNIT_DIRECTORY}/{name}" for name in names]
    work.run("rm", "-rf", "--", *paths, *(f"{path}.d" for path in paths))
    work.run("rm", "-f", "--", *(f"{STARTED_DIRECTORY}/{name}" for name in names))
    work.run("systemctl", "daemon-reload", seconds=RELOAD_SECONDS)
    _reset_failed(names, work)


def _is_there(state: UnitState) -> bool:
    enabled = state.file_state.startswith("enabled")
    return state.on_disk or _is_running(state) or enabled


def _is_running(state: UnitState) -> bool:
    return state.active not in {"inactive", "failed"}


def _reset_failed(names: Iterable[str], work: _Work) -> None:
    """
    Reset the failures and start counts of units. A unit that systemd does not know is not an error.
    """
    script = 'systemctl reset-failed -- "$@" 2>/dev/null || :'
    work.run("sh", "-c", script, "sh", *names)


def _reload(wanted: DesiredState, snapshot: Snapshot, work: _Work) -> None:
    """
    Add a reload of systemd if definitions of units on disk change.

    Files that the run will place also count, so that a dry run reports the reload.
    """
    placed = {
        unit
        for value in wanted
        if isinstance(value, File | Link | Absent)
        and (unit := unit_of(value.path))
        and _why_place(value, snapshot.file(value.path))
    }
    stale = {
        name
        for name, state in snapshot.units.items()
        if isinstance(state, UnitState)
        and (
            state.needs_reload
            or (state.has_file and state.load == "not-found")
            or _hidden(wanted, name, state)
        )
        and name in _related(wanted)
    }
    if names := sorted(placed | stale):
        work.changes.append(f"reload systemd, because the definition of {', '.join(names)} changed")
        work.run("systemctl", "daemon-reload", seconds=RELOAD_SECONDS)


def _hidden(wanted: DesiredState, name: str, state: UnitState) -> bool:
    """
    Return whether systemd has loaded a package's unit file although gpufleet's file has precedence.

    systemd checks only the file that it has loaded, and does not notice a new file with precedence.
    """
    path = f"{UNIT_DIRECTORY}/{name}"
    ours = any(value.path == path for value in wanted.values_of(File))
    loaded = state.load == "loaded" and state.fragment not in {"", path}
    return ours and state.has_file and loaded


def _related(wanted: DesiredState) -> frozenset[str]:
    """Return the units whose definition gpufleet manages."""
    named = {unit.name for unit in wanted.values_of(Unit)}
    defined = {unit_of(v.path) for v in wanted if isinstance(v, File | Link | Absent)}
    return frozenset(named | {name for name in defined if name})


def _refuse_masked(units: list[Unit], seen: dict[str, UnitState], work: _Work) -> None:
    work.problems += [
        f"{unit.name} must start, but is masked with `systemctl mask`: unmask it with `systemctl "
        f"unmask {unit.name}`"
        for unit in units
        if seen[unit.name].load == "masked" and (unit.running or unit.enabled)
    ]


def _enable(units: list[Unit], seen: dict[str, UnitState], work: _Work) -> None:
    on = [u.name for u in units if u.enabled and seen[u.name].file_state not in _ENABLED]
    off = [
        unit.name
        for unit in units
        if unit.enabled is False and seen[unit.name].file_state.startswith("enabled")
    ]
    for verb, names in (("enable", on), ("disable", off)):
        if names:
            work.changes += [f"{verb} {name}" for name in names]
            work.run("systemctl", "--quiet", verb, "--", *names)


def _stop(units: list[Unit], seen: dict[str, UnitState], work: _Work) -> None:
    up = [unit for unit in units if unit.running is False and _is_running(seen[unit.name])]
    if up:
        work.changes += [f"stop {unit.name}: it is {seen[unit.name].active}" for unit in up]
        seconds = max(unit.stop_seconds for unit in up) + UNIT_MARGIN_SECONDS
        work.run("systemctl", "stop", "--", *(unit.name for unit in up), seconds=seconds)


def _start(units: list[Unit], seen: dict[str, UnitState], work: _Work) -> None:
    """
    Start units that must run, and restart units that were started with a different fingerprint.
    """
    due = [(unit, reason) for unit in units if (reason := _why_start(unit, seen[unit.name]))]
    if not due:
        return
    work.changes += [reason for _, reason in due]
    names = [unit.name for unit, _ in due]
    # systemd refuses to start a unit that was started too often, and gpufleet's restarts also count
    # (systemd.unit(5), StartLimitBurst=).
    _reset_failed(names, work)
    # The unit that stops slowest may not be the unit that starts slowest.
    stop = max(unit.stop_seconds for unit, _ in due)
    start = max(unit.start_seconds for unit, _ in due)
    words = (f"{u.name}={u.fingerprint}" if u.fingerprint else u.name for u, _ in due)
    work.run("sh", "-c", _START, "sh", *words, seconds=stop + start + UNIT_MARGIN_SECONDS)


def _why_start(unit: Unit, state: UnitState) -> str | None:
    if not unit.running:
        return None
    if not state.is_up:
        return f"start {unit.name}: it is {state.active} ({state.sub})"
    if unit.fingerprint is None or state.started == unit.fingerprint:
        return None
    before = state.started[:12] if state.started else "an unknown fingerprint"
    return f"restart {unit.name}: started with {before}, declared {unit.fingerprint[:12]}"
