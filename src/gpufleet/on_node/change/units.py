"""RUNS ON THE NODE: switch units to a new configuration, and back to the previous one.

First the files of a unit change on disk, and systemd reloads them. Only then the process is stopped
and started, without any step in between. If a switch is killed, the next call resumes it. Units
that are already correct stay unchanged. A running unit is judged by its fingerprint, and not by who
wrote its file (docs/decisions/0002).

All units of the node share the other files that units read at start (keys, the launcher, the ranks'
program). A switch replaces these files, and the first rollback of a unit restores them. So a
process that is started then reads the same files as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from gpufleet.on_node.change import systemd, wait
from gpufleet.on_node.common import change_files, linux_facts, stages, unit_journal
from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.change_files import RefusedError
from gpufleet.on_node.common.stage_units import stage_of
from gpufleet.on_node.serving import endpoints

# Number of log lines of a unit that did not start. The last lines show a refused flag or a missing
# file.
LINES = 40
# TimeoutStopSec= of a stage is the time of its drain and half a minute (units.stop_seconds). A unit
# that stops sooner is not killed.
CUT_SECONDS = 30


class StartFile(NamedTuple):
    """A file, other than the unit's file, that units read when they start."""

    content: bytes
    mode: int
    owner: "tuple[int, int]"


class Target(NamedTuple):
    """
    The desired state of a node: {name: unit file, or None for a unit to remove}, {path: file}.
    """

    units: Dict[str, Optional[bytes]]
    beside: Dict[str, StartFile]


class Due(NamedTuple):
    """The units to restart, to remove, and to leave unchanged."""

    restart: List[str]
    remove: List[str]
    unchanged: List[str]


def judge_units(
    target: Dict[str, Optional[bytes]],
    present: Dict[str, str],
    started: Dict[str, Optional[str]],
    states: Dict[str, Dict[str, str]],
) -> Due:
    """
    Return which units must be restarted, which must be removed, and which stay unchanged. Pure.

    `present` has the units' files, and `started` the fingerprints of their processes.

    A desired unit is correct if it runs and its process was started with the desired file's
    fingerprint. A unit to remove is correct if it has no file and is stopped.
    """
    restart: List[str] = []
    remove: List[str] = []
    unchanged: List[str] = []
    for unit, content in sorted(target.items()):
        if content is None:
            there = bool(present[unit]) or not systemd.is_gone(states[unit])
            (remove if there else unchanged).append(unit)
            continue
        wanted = systemd.fingerprint(content.decode("utf-8", "replace"))
        runs = systemd.is_up(states[unit]) and wanted is not None and started[unit] == wanted
        (unchanged if runs else restart).append(unit)
    return Due(restart, remove, unchanged)


def switch(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Switch units to the files in `next/`, and store their previous state."""
    found = Progress()
    with units_lock(asked):
        try:
            target = read_next(asked.get("units"))
            keep(change_files.must_be_name(asked["id"]), target)
            carry_out(target, asked["seconds"], found, asked["metrics"])
        except (RefusedError, CannotRead, OSError) as error:
            found.problem = sentence(error)
    return found.document()


def restore(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Switch units back to their stored previous state."""
    found = Progress()
    with units_lock(asked):
        try:
            target, unkept = kept_units(change_files.must_be_name(asked["id"]), asked.get("units"))
            found.unchanged += unkept
            carry_out(target, asked["seconds"], found, asked["metrics"])
        except (RefusedError, CannotRead, OSError) as error:
            found.problem = sentence(error)
    return found.document()


def stop(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Stop all units at the same time, and return the steps."""
    found = Progress()
    with units_lock(asked):
        try:
            units = [change_files.must_be_name(unit) for unit in asked["units"]]
            states = systemd.states(units)
            up = [unit for unit in units if not systemd.is_gone(states[unit])]
            found.unchanged = [unit for unit in units if unit not in up]
            stop_units(up, asked["seconds"], found)
            found.changed = up
        except (RefusedError, CannotRead, OSError) as error:
            found.problem = sentence(error)
    return found.document()


def units_lock(asked: Dict[str, Any]) -> "contextlib.AbstractContextManager[None]":
    """
    Wait for this node's lock for changes of units, and hold the lock.

    The current holder may be the change of a different replica in the same wave. It may also be a
    program that lost its controller while it stops a unit, and that completes the stop.
    """
    return change_files.exclusive_lock(
        change_files.UNITS_TURN, asked["seconds"] + systemd.UNIT_MARGIN_SECONDS
    )


class Progress:
    """The steps that have been completed, for the answer."""

    def __init__(self) -> None:
        self.changed: List[str] = []
        self.unchanged: List[str] = []
        self.removed: List[str] = []
        self.cut: List[str] = []
        self.stopped_at: Optional[float] = None
        self.down_at: Optional[float] = None
        self.started_at: Optional[float] = None
        self.problem: Optional[str] = None
        self.journal: List[str] = []

    def document(self) -> Dict[str, Any]:
        """Return the answer."""
        return {**vars(self), "clock": round(time.time(), 3)}


def sentence(error: Exception) -> str:
    """Return an error as a sentence for the operator."""
    if isinstance(error, CannotRead):
        more = error.missing.get("detail") or error.missing.get("seconds")
        return "systemd could not be queried: %s%s" % (
            error.missing["missing"],
            "" if more is None else " (%s)" % more,
        )
    if isinstance(error, OSError):
        return "%s: %s" % (error.filename or "a file", error.strerror or error)
    return str(error)


# --- the target, from next/ or from the stored units


def read_next(units: Optional[Sequence[str]]) -> Target:
    """Return the target in `next/`. Raises `RefusedError` if `next/` is incomplete."""
    manifest = change_files.document(change_files.NEXT + "/" + change_files.MANIFEST)
    if manifest is None:
        raise RefusedError("nothing is prepared on this node: run deploys/prepare.py")
    known = {**manifest["units"], **dict.fromkeys(manifest["remove"])}
    chosen = sorted(known) if units is None else [change_files.must_be_name(unit) for unit in units]
    if strange := [unit for unit in chosen if unit not in known]:
        raise RefusedError(
            "%s is prepared on this node, not %s: run deploys/prepare.py"
            % (", ".join(sorted(known)) or "no unit", ", ".join(strange))
        )
    target = Target({}, {})
    for unit in chosen:
        content = None
        if known[unit] is not None:
            content = pending_file(unit, manifest["sha256"].get(unit))
            if systemd.fingerprint(content.decode("utf-8", "replace")) != known[unit]:
                raise RefusedError(repair_hint(unit))
        target.units[unit] = content
    for path, about in manifest["files"].items():
        content = pending_file(about["name"], manifest["sha256"].get(about["name"]))
        target.beside[path] = StartFile(content, int(about["mode"], 8), (0, 0))
    return target


def pending_file(name: str, sha256: Optional[str]) -> bytes:
    """
    Return the content of a file in `next/`.

    The content is verified against its hash. Secrets have no hash.
    """
    content = change_files.read("%s/%s" % (change_files.NEXT, name))
    if content is None or (sha256 and hashlib.sha256(content).hexdigest() != sha256):
        raise RefusedError(repair_hint(name))
    return content


def repair_hint(name: str) -> str:
    """Return what to do if a file of `next/` differs from its manifest."""
    return (
        "%s/%s differs from its manifest, for example because a run was interrupted. Nothing was "
        "changed. Run deploys/prepare.py again" % (change_files.NEXT, name)
    )


def kept_units(upgrade: str, units: Optional[Sequence[str]]) -> "tuple[Target, List[str]]":
    """Return the units stored for an upgrade, and the requested units that were not stored."""
    folder = change_files.KEPT + "/" + upgrade
    manifest = change_files.document(folder + "/" + change_files.MANIFEST) or {
        "units": {},
        "files": {},
    }
    chosen = sorted(manifest["units"]) if units is None else sorted(units)
    target = Target({}, {})
    for unit in chosen:
        if unit not in manifest["units"]:
            continue
        content = None
        if manifest["units"][unit] is not None:
            content = change_files.read(folder + "/" + unit)
            if content is None:
                raise RefusedError("%s/%s is missing: nothing was changed" % (folder, unit))
        target.units[unit] = content
    if target.units:
        for path, about in manifest["files"].items():
            content = change_files.read(folder + "/" + about["name"])
            if content is None:
                raise RefusedError(
                    "%s/%s is missing: nothing was changed" % (folder, about["name"])
                )
            target.beside[path] = StartFile(content, int(about["mode"], 8), tuple(about["owner"]))
    return target, [unit for unit in chosen if unit not in manifest["units"]]


def keep(upgrade: str, target: Target) -> None:
    """
    Store the current units of the target and their files, unless they are already stored.

    The manifest is written after the files, but before any change. So even after repeated calls it
    describes the state before this upgrade's first switch. A rollback does not remove files that
    were added, because they are harmless.
    """
    folder = change_files.KEPT + "/" + upgrade
    manifest = change_files.document(folder + "/" + change_files.MANIFEST)
    change_files.make_directory(folder + "/files")
    now = manifest or {
        "schema": 1,
        "id": upgrade,
        "at": round(time.time(), 3),
        "units": {},
        "files": keep_files(folder, target.beside),
    }
    if fresh := [unit for unit in target.units if unit not in now["units"]]:
        for unit in fresh:
            content = change_files.read(stages.UNITS + "/" + unit)
            now["units"][unit] = None
            if content is not None:
                change_files.write(folder + "/" + unit, content, 0o644)
                # A unit that is not gpufleet's has no fingerprint. Its "" records that it existed.
                found = systemd.fingerprint(content.decode("utf-8", "replace"))
                now["units"][unit] = found or ""
        change_files.write_document(folder + "/" + change_files.MANIFEST, now)


def keep_files(folder: str, wanted: Dict[str, StartFile]) -> Dict[str, Any]:
    """Store the other files that units read at start; return their entries in the manifest."""
    found = {}
    for number, path in enumerate(sorted(wanted)):
        content = change_files.read(path)
        if content is not None:
            status = os.stat(linux_facts.ROOT + path)
            name = "files/%d" % number
            change_files.write("%s/%s" % (folder, name), content, 0o600)
            found[path] = {
                "name": name,
                "mode": "%04o" % (status.st_mode & 0o7777),
                "owner": [status.st_uid, status.st_gid],
            }
    return found


# --- changes


def carry_out(target: Target, seconds: float, found: Progress, metrics: Sequence[str]) -> None:
    """
    Install the target's files, and make the units run with them.

    `metrics` has the names of the gauges that count requests (wait.py).
    """
    names = sorted(target.units)
    states = systemd.states(names)
    place(target, states)
    states = systemd.states(names)
    present = {unit: systemd.text(unit) for unit in names}
    # The fingerprints are read only here. When the other ranks of its group are restarted, a rank
    # restarts by itself, with its new file if systemd has read the file. A second restart would end
    # the new group.
    started = {unit: systemd.started_fingerprint(unit) for unit in names}
    found_due = judge_units(target.units, present, started, states)
    found.unchanged += found_due.unchanged
    moving = found_due.restart + found_due.remove
    up = [unit for unit in moving if not systemd.is_gone(states[unit])]
    # This is done before the stop, so that no step is between the stop and the start.
    forget_failures(found_due.restart)
    stop_units(up, seconds, found, idle=[unit for unit in up if is_idle(unit, metrics)])
    if found_due.restart:
        start(found_due.restart, found)
    found.changed = found_due.restart
    remove(found_due.remove)
    found.removed = found_due.remove


def place(target: Target, states: Dict[str, Dict[str, str]]) -> None:
    """Write the files that differ, let systemd reload its units, and enable units."""
    for path, wanted in sorted(target.beside.items()):
        if change_files.read(path) != wanted.content:
            folder = os.path.dirname(path)
            if not os.path.isdir(linux_facts.ROOT + folder):
                raise RefusedError("%s is missing: run deploys/prepare.py" % folder)
            change_files.write(path, wanted.content, wanted.mode, wanted.owner)
    wanted_units = {unit: each for unit, each in target.units.items() if each is not None}
    stale = [unit for unit in wanted_units if states[unit].get("NeedDaemonReload") == "yes"]
    stale += [
        unit
        for unit in wanted_units
        if states[unit].get("LoadState") == "not-found" and systemd.text(unit)
    ]
    for unit, content in sorted(wanted_units.items()):
        if change_files.read(stages.UNITS + "/" + unit) != content:
            change_files.write(stages.UNITS + "/" + unit, content, 0o644)
            stale.append(unit)
    if stale:
        systemd.systemctl("daemon-reload", seconds=systemd.RELOAD_SECONDS)
    off = [
        unit
        for unit in sorted(wanted_units)
        if not states[unit].get("UnitFileState", "").startswith("enabled")
    ]
    if off:
        systemd.systemctl("--quiet", "enable", "--", *off, seconds=systemd.SHORT_SECONDS)


def is_idle(unit: str, metrics: Sequence[str]) -> bool:
    """Return whether a server is drained and has no request, so that it can be killed."""
    if change_files.read("%s/%s.json" % (change_files.DRAINED, stage_of(unit))) is None:
        return False
    try:
        left = list(wait.requests([unit], metrics).values())
    except (CannotRead, OSError, ValueError):
        return False
    # The requests of a rank without a server are known only on a different node.
    return bool(left) and all(count == 0 for count in left)


def stop_units(units: List[str], seconds: float, found: Progress, idle: Sequence[str] = ()) -> None:
    """
    Stop all units at the same time, and verify that they are stopped.

    An `idle` server is killed, because it has no requests to finish. If vLLM stops by itself, it
    takes 5 to 15 s (measured), which would lengthen the outage. A kill also frees the server's GPU
    memory and its own /dev/shm.
    """
    if not units:
        return
    found.stopped_at = round(time.time(), 3)
    limit = seconds + systemd.UNIT_MARGIN_SECONDS
    if idle:
        # The stop must be requested first. A unit that is killed before it would be started again
        # (Restart=always).
        with contextlib.suppress(RefusedError):
            systemd.systemctl("stop", "--no-block", "--", *idle, seconds=systemd.SHORT_SECONDS)
            systemd.systemctl("kill", "--signal=KILL", "--", *idle, seconds=systemd.SHORT_SECONDS)
    systemd.systemctl("stop", "--", *units, seconds=limit)
    found.down_at = round(time.time(), 3)
    if found.down_at - found.stopped_at < CUT_SECONDS:
        return  # do not query again, because the stopped units must start soon
    states = systemd.states(units)
    found.cut = [unit for unit in units if states[unit].get("Result") == "timeout"]
    if still := [unit for unit in units if not systemd.is_gone(states[unit])]:
        raise RefusedError("%s still run after a stop" % ", ".join(still))


def start(units: List[str], found: Progress) -> None:
    """
    Start all units at the same time.

    If this fails, add their last log lines to `found` and raise the error.
    """
    try:
        systemd.systemctl("start", "--", *units, seconds=systemd.START_SECONDS)
    except RefusedError:
        found.journal = [line for unit in units for line in last_lines(unit)]
        raise
    finally:
        found.started_at = round(time.time(), 3)


def forget_failures(units: List[str]) -> None:
    """
    Reset the failures and the start counters of units.

    If a unit was started too often, systemd refuses to start it (StartLimitBurst= in
    systemd.unit(5)). systemctl reports a unit that does not exist, and still handles the others.
    """
    if units:
        with contextlib.suppress(RefusedError):
            systemd.systemctl("reset-failed", "--", *units, seconds=systemd.SHORT_SECONDS)


def last_lines(unit: str) -> List[str]:
    """Return the last log lines of a unit, with secrets redacted."""
    hide = unit_journal.secret_redactor(unit_journal.secrets(systemd.text(unit)))
    life = endpoints.unit_state(unit).get("InvocationID")
    return [hide(line)[:1000] for line in endpoints.journal(unit, life, LINES)]


def remove(units: List[str]) -> None:
    """
    Remove stopped units in the same way as a deploy.

    Drop-ins of other programs stay. They may be an operator's, and a rollback needs them.
    """
    if not units:
        return
    systemd.systemctl("--quiet", "disable", "--", *units, seconds=systemd.SHORT_SECONDS)
    for unit in units:
        # The unit's file is removed last. While it exists, a second call removes the rest.
        change_files.remove(systemd.STARTED + "/" + unit)
        change_files.remove(stages.UNITS + "/" + unit)
    systemd.systemctl("daemon-reload", seconds=systemd.RELOAD_SECONDS)
    forget_failures(units)
