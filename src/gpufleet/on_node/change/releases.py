"""RUNS ON THE NODE: find the releases in use, and remove the others.

A release is in use if its name is in a unit's file, in a unit of `next/` or in a stored unit. It is
also in use if a process has mapped one of its files, because a process may continue to run after
its unit was changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set

from gpufleet.on_node.common import change_files, linux_facts, stages

RELEASES = "/opt/vllm/releases"
LOCKS = "/opt/vllm/locks"
# Lock file that is held while a release is built (build_script in release.py).
BUILDING = "/opt/vllm/.building"
# uv's cache. Its files are hard links to files of releases (release.py). If a file stayed in the
# cache, the removal of a release would free no space. The next build unpacks its wheels again.
CACHE = "/var/cache/gpufleet/uv"
COMPLETE = ".complete"
NAMED = re.compile(rb"/opt/vllm/releases/([A-Za-z0-9][A-Za-z0-9._+-]*)")
DAY = 86400.0


class Release(NamedTuple):
    """A release on disk."""

    id: str
    whole: bool
    built: Optional[float]
    """
    Time when the release was completed. For an incomplete release: the last change of its folder.
    """
    users: List[str]


class KeptUnits(NamedTuple):
    """The previous units that an upgrade has stored, and the releases that they use."""

    id: str
    at: float
    releases: Set[str]


def releases() -> List[Release]:
    """Return the releases on disk, sorted by name, with what uses them."""
    used = release_users()
    return [
        release(name, sorted(used.get(name, ()))) for name in change_files.directory_names(RELEASES)
    ]


def release(name: str, used: List[str]) -> Release:
    """Return one release, with whether it is complete."""
    folder = "%s%s/%s" % (linux_facts.ROOT, RELEASES, name)
    try:
        return Release(name, True, os.stat(folder + "/" + COMPLETE).st_mtime, used)
    except OSError:
        with contextlib.suppress(OSError):
            return Release(name, False, os.stat(folder).st_mtime, used)
    return Release(name, False, None, used)


def release_users() -> Dict[str, Set[str]]:
    """
    Return {release: what uses it}.

    A release is used by units, `next/UNIT`, `kept/ID/UNIT` or `process PID`.
    """
    found: Dict[str, Set[str]] = {}
    for label, path in texts():
        for name in NAMED.findall(change_files.read(path) or b""):
            found.setdefault(name.decode("ascii"), set()).add(label)
    for pid, names in processes():
        for name in names:
            found.setdefault(name, set()).add("process %d" % pid)
    return found


def texts() -> Iterator["tuple[str, str]"]:
    """Yield (label, path) of every file that may contain a release's name."""
    for unit in services(stages.UNITS):
        yield unit, stages.UNITS + "/" + unit
    for unit in services(change_files.NEXT):
        yield "next/" + unit, change_files.NEXT + "/" + unit
    for upgrade in change_files.directory_names(change_files.KEPT):
        for unit in services(change_files.KEPT + "/" + upgrade):
            yield "kept/%s/%s" % (upgrade, unit), "%s/%s/%s" % (change_files.KEPT, upgrade, unit)


def services(folder: str) -> List[str]:
    """Return the names of the units in a directory."""
    return [name for name in change_files.directory_names(folder) if name.endswith(".service")]


def processes() -> Iterator["tuple[int, Set[str]]"]:
    """Yield (PID, names of the releases whose files the process has mapped) for each process."""
    for name in change_files.directory_names("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or it is the kernel's
            with open("%s/proc/%s/maps" % (linux_facts.ROOT, name), "rb") as file:
                found = {each.decode("ascii") for each in NAMED.findall(file.read())}
            if found:
                yield int(name), found


def kept_sets() -> List[KeptUnits]:
    """Return the units that upgrades have stored, oldest first."""
    found = []
    for upgrade in change_files.directory_names(change_files.KEPT):
        folder = change_files.KEPT + "/" + upgrade
        about = change_files.document(folder + "/" + change_files.MANIFEST)
        # Without a manifest, storing the units was interrupted before anything was changed.
        at = float(about["at"]) if about else 0.0
        names = {
            each.decode("ascii")
            for unit in services(folder)
            for each in NAMED.findall(change_files.read(folder + "/" + unit) or b"")
        }
        found.append(KeptUnits(upgrade, at, names))
    return sorted(found, key=lambda each: (each.at, each.id))


def stale_sets(
    sets: List[KeptUnits], keep: int, days: float, now: float, locked: Optional[str]
) -> List[str]:
    """
    Return the ids of the stored sets that can be removed. Pure.

    The `keep` newest sets, the sets that are younger than `days`, and the set of the upgrade that
    holds the lock must stay.
    """
    newest = {each.id for each in sets[-keep:]} if keep else set()
    return [
        each.id
        for each in sets
        if each.id not in newest and each.id != locked and now - each.at >= days * DAY
    ]


def kept_releases(found: List[Release], keep: int, days: float, now: float) -> Dict[str, str]:
    """
    Return the releases that must stay, each with the reason. Pure.

    These are the releases in use, the `keep` newest of the complete releases that are not in use,
    and the releases that are younger than `days`.
    """
    unused = [each for each in found if each.whole and not each.users]
    unused.sort(key=lambda each: (each.built or 0.0, each.id), reverse=True)
    newest = {each.id for each in unused[:keep]}
    stays = {}
    for each in found:
        age = now - (each.built or 0.0)
        if each.users:
            stays[each.id] = "used by " + ", ".join(each.users)
        elif each.id in newest:
            stays[each.id] = "one of the %d newest unused releases" % keep
        elif age < days * DAY:
            stays[each.id] = "built within %g days" % days
    return stays


def collect(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Remove releases that are not in use, and old stored units."""
    keep, days = int(asked["keep"]), float(asked["days"])
    with change_files.exclusive_lock(change_files.UNITS_TURN), hold_build_lock() as free:
        now = time.time()
        lock = change_files.document(change_files.LOCK)
        old = stale_sets(kept_sets(), keep, days, now, lock["id"] if lock else None)
        for upgrade in old:
            change_files.remove_directory(change_files.KEPT + "/" + upgrade)
        change_files.remove_leftovers(change_files.KEPT)
        there = releases()
        if not free:
            stays = {each.id: "a release is being built" for each in there}
        else:
            stays = kept_releases(there, keep, days, now)
        go = [each.id for each in there if each.id not in stays]
        freed = sum(size(RELEASES + "/" + name) for name in go)
        if free:
            for name in go:
                change_files.remove_directory(RELEASES + "/" + name)
                change_files.remove(LOCKS + "/" + name + ".txt")
            change_files.remove_leftovers(RELEASES)
            if go:
                change_files.remove_directory(CACHE)
        return {"removed": go, "stays": stays, "freed_bytes": freed}


@contextlib.contextmanager
def hold_build_lock() -> Iterator[bool]:
    """
    Hold the lock that prevents builds of releases. Yield False if a build already holds it.
    """
    path = linux_facts.ROOT + BUILDING
    if not os.path.isdir(os.path.dirname(path)):
        yield True
        return
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


def size(path: str) -> int:
    """
    Return the size in bytes of a release's files that no other release shares.

    Links to these files in uv's cache do not count as sharing.
    """
    total = 0
    for folder, _, names in os.walk(linux_facts.ROOT + path):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total += status.st_blocks * 512 if status.st_nlink <= 2 else 0
    return total
