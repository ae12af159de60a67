"""RUNS ON THE NODE: remove units, packages, tables, files and accounts, or list them.

Takes (`PARAMETERS`):
  action    "look" (change nothing) or "remove"
  marks     shell patterns of paths; if no path matches them, nothing is listed or removed
  units     shell patterns of unit names; the units' files in /etc/systemd/system are removed too
  packages  shell patterns of package names
  tables    tables of nftables, for example "inet gpufleet"
  paths     shell patterns of files, links and folders; folders are removed with their content
  empty     folders that are removed if they are empty
  keep      paths that stay; the folders above them stay too
  accounts  users that are removed, with the group of the same name
  purge     false: the packages' settings and data stay
Prints one JSON document {"schema": 1, "error": "", "found": {"units": [...], "packages": [...],
"tables": [...], "paths": [...], "accounts": [...]}}. `found` has what exists, or after a removal,
what is left. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import grp
import json
import os
import pwd
import shutil
import subprocess
from typing import Any, Dict, List

from gpufleet.on_node.common import deploy_mark

PARAMETERS: Dict[str, Any] = globals().get("PARAMETERS") or {}

UNITS = "/etc/systemd/system"
# Stages drain before they stop, and apt may wait for a different run of apt.
STOP_SECONDS = 3700
PACKAGES_SECONDS = 900
LOCK_SECONDS = 300

Found = Dict[str, List[str]]


def run(*command: str, seconds: float = 60) -> str:
    """Run a program. Return its output, or "" if the program does not exist or has failed."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def units(patterns: List[str]) -> List[str]:
    """Return the matching units that have a file on this node, or were loaded from such a file."""
    names = {os.path.basename(path) for each in patterns for path in glob.glob(UNITS + "/" + each)}
    listed = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager")
    for line in listed.splitlines():
        words = line.split()
        if len(words) > 1 and words[1] == "loaded" and matches(words[0], patterns):
            names.add(words[0])
    return sorted(name for name in names if not os.path.isdir(UNITS + "/" + name))


def packages(patterns: List[str]) -> List[str]:
    """Return the installed packages that match."""
    if not patterns:
        return []
    text = run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n")
    names = [line.split()[0] for line in text.splitlines() if not line.endswith("not-installed")]
    if not text:
        names = run("rpm", "-qa", "--qf", "%{NAME}\\n").split()
    return sorted({name for name in names if matches(name, patterns)})


def tables(wanted: List[str]) -> List[str]:
    """Return the requested nftables tables that are loaded."""
    listed = [line.strip() for line in run("nft", "list", "tables").splitlines()] if wanted else []
    return [name for name in wanted if "table " + name in listed]


def paths(patterns: List[str], empty: List[str], keep: List[str]) -> List[str]:
    """
    Return the paths to remove. Paths in folders that are removed completely are left out.
    """
    found = {path for each in patterns for path in glob.glob(each)}
    found = {
        below
        for path in found
        if has_removable(path, keep)
        for below in removable_paths(path, keep)
    }
    found |= {path for path in empty if os.path.isdir(path) and not os.listdir(path)}
    return sorted(found)


def removable_paths(path: str, keep: List[str]) -> List[str]:
    """
    Return the paths to remove at or below a path.

    This is the path itself, or if some of its content must stay, everything else in it.
    """
    if not any(is_inside(each, path) for each in keep):
        return [path]
    there = [os.path.join(path, name) for name in os.listdir(path)]
    return [
        below
        for each in there
        if has_removable(each, keep)
        for below in removable_paths(each, keep)
    ]


def has_removable(path: str, keep: List[str]) -> bool:
    """Return whether a path has content to remove, other than kept paths and this run's mark."""
    if any(is_inside(path, each) for each in keep):
        return False
    if os.path.islink(path) or not os.path.isdir(path):
        return path != deploy_mark.DEPLOY
    if is_inside(deploy_mark.DEPLOY, path) or any(is_inside(each, path) for each in keep):
        there = [os.path.join(path, name) for name in os.listdir(path)]
        return any(has_removable(each, keep) for each in there)
    return True


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is this folder or is inside it."""
    return path == folder or path.startswith(folder + "/")


def matches(name: str, patterns: List[str]) -> bool:
    """Return whether a name matches one of several patterns."""
    return any(fnmatch.fnmatchcase(name, each) for each in patterns)


def accounts(names: List[str]) -> List[str]:
    """Return the accounts that exist."""
    found = []
    for name in names:
        for known in (pwd.getpwnam, grp.getgrnam):
            with contextlib.suppress(KeyError):
                known(name)
                found.append(name)
                break
    return found


def look(wanted: Dict[str, Any]) -> Found:
    """Return the parts that exist. If no mark exists, return no parts."""
    marks = wanted["marks"]
    if marks and not any(glob.glob(each) for each in marks):
        return {"units": [], "packages": [], "tables": [], "paths": [], "accounts": []}
    return {
        "units": units(wanted["units"]),
        "packages": packages(wanted["packages"]),
        "tables": tables(wanted["tables"]),
        "paths": paths(wanted["paths"], wanted["empty"], wanted["keep"]),
        "accounts": accounts(wanted["accounts"]),
    }


def remove(wanted: Dict[str, Any]) -> None:
    """Remove all parts that exist. Running units are removed first, marks last."""
    found = look(wanted)
    if found["units"]:
        run("systemctl", "disable", "--now", "--", *found["units"], seconds=STOP_SECONDS)
        run("systemctl", "stop", "--", *found["units"], seconds=STOP_SECONDS)
    if found["packages"]:
        remove_packages(found["packages"], purge=wanted["purge"])
    for name in found["tables"]:
        run("nft", "delete", "table", *name.split())
    for name in found["accounts"]:
        run("userdel", "--", name)
        run("groupdel", "--", name)
    # The units' files are marks too. So they are removed after the steps that may be interrupted.
    for name in found["units"]:
        with contextlib.suppress(OSError):
            os.unlink(UNITS + "/" + name)
    for _ in range(2):  # folders that have become empty
        for path in paths(wanted["paths"], wanted["empty"], wanted["keep"]):
            remove_path(path)
    run("systemctl", "daemon-reload")
    run("systemctl", "reset-failed")


def remove_packages(names: List[str], purge: bool) -> None:
    """
    Remove packages, and with `purge` also their settings and data. Their dependencies stay.
    """
    if shutil.which("apt-get"):
        wait = "DPkg::Lock::Timeout=%d" % LOCK_SECONDS
        allowed = ["--allow-change-held-packages", "--no-auto-remove"]
        command = ["apt-get", "-y", "-q", "-o", wait, *allowed, "purge" if purge else "remove"]
    else:
        command = ["dnf", "-y", "-q", "--setopt=clean_requirements_on_remove=False", "remove"]
    run(*command, "--", *names, seconds=PACKAGES_SECONDS)


def remove_path(path: str) -> None:
    """Remove a file, a link, or a folder with its content."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def main() -> None:
    """Remove the parts if requested. Print the parts that exist or are left."""
    if PARAMETERS["action"] == "remove":
        remove(PARAMETERS)
    print(json.dumps({"schema": 1, "error": "", "found": look(PARAMETERS)}))


if __name__ == "__main__":
    main()
