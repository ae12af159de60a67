"""RUNS ON THE NODE: read the packages that dpkg or rpm has installed, for the snapshot.

The program changes nothing. One query of the package database answers all questions. If dpkg and
rpm are both installed, the node's package manager is the one that has packages in its database,
because Debian has rpm for other purposes.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, List, Tuple

DPKG_STATUS = "/var/lib/dpkg/status"
# dpkg stores its status changes here until they are merged. Files in this directory show that a run
# was interrupted.
DPKG_UPDATES = "/var/lib/dpkg/updates"
# dpkg-query(1): the letters of the status are the wanted state, the current state, and an error.
DPKG_ROW = "${db:Status-Abbrev}\t${Package}\t${Architecture}\t${Version}\n"
RPM_ROW = "%{NAME}\\t%{ARCH}\\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\n"
# Packages of which several versions are installed on purpose (installonlypkgs in dnf.conf(5)).
SEVERAL = re.compile(r"kernel($|-)|gpg-pubkey$|kmod-.*-\d")
# The file in which `dnf versionlock` writes NAME-EPOCH:VERSION-RELEASE.*
LOCKS = "/etc/dnf/plugins/versionlock.list"
LOCK = re.compile(r"([^#!\s]\S*)-(?:\d+:)?[^-\s]+-[^-\s]+$")
MODULES = "/etc/dnf/modules.d"

Run = Callable[..., str]


def read(
    names: List[str],
    patterns: List[str],
    modules: List[str],
    run: Run,
    said: Callable[[BaseException], str],
) -> Dict[str, Any]:
    """
    Return the snapshot's entries about packages.

    `run` is a function that runs a program, and `said` a function that returns an error's text.
    """
    manager = "apt" if os.path.exists(DPKG_STATUS) else "dnf"
    found: Dict[str, Any] = {
        "package_manager": manager,
        "packages": {},
        "packages_like": {},
        "streams": {name: stream_of(name) for name in modules},
        "dpkg_unfinished": [],
    }
    if not names and not patterns:
        return found
    try:
        known, unfinished = dpkg(run) if manager == "apt" else rpm(run)
    except Exception as error:
        problem = {"error": said(error)}
        return {
            **found,
            "packages": dict.fromkeys(names, problem),
            "packages_like": dict.fromkeys(patterns, problem),
            "dpkg_unfinished": problem,
        }
    # Include packages that are installed only for a foreign architecture, because they may have to
    # be removed.
    plain = {name.partition(":")[0] for name in known}
    return {
        **found,
        "packages": {name: known.get(name) for name in names},
        "packages_like": {
            pattern: sorted(name for name in plain if fnmatchcase(name, pattern))
            for pattern in patterns
        },
        "dpkg_unfinished": sorted(unfinished),
    }


def dpkg(run: Run) -> Tuple[Dict[str, Any], List[str]]:
    """Return ({name: state}, packages that dpkg has left unfinished)."""
    rows = run("dpkg-query", "-W", "-f", DPKG_ROW)
    interrupted = any(name.isdigit() for name in os.listdir(DPKG_UPDATES))
    known: Dict[str, Any] = {}
    unfinished = ["an interrupted dpkg"] if interrupted else []
    fields = [row.split("\t") for row in rows.splitlines()]
    own = own_architectures(fields)
    for status, name, architecture, version in fields:
        # n: the package is not installed. c: only its configuration is left.
        if status[1] in "nc":
            continue
        whole = status[1] == "i" and status[2:3] != "R"
        state = {"version": version, "installed": whole, "held": status[0] == "h"}
        # A name without an architecture is the native package, as in apt. A foreign package needs
        # its architecture, for example `:i386`.
        if architecture in own:
            known[name] = state
        known[name + ":" + architecture] = state
        if not whole:
            unfinished.append(name)
    return known, unfinished


def own_architectures(fields: List[List[str]]) -> List[str]:
    """
    Return the architectures of the node's native packages. `fields` has rows of DPKG_ROW's format.
    """
    # The package dpkg itself always has the native architecture.
    return ["all", *(architecture for _, name, architecture, _ in fields if name == "dpkg")]


def rpm(run: Run) -> Tuple[Dict[str, Any], List[str]]:
    """Return ({name: state}, packages that an interrupted run of rpm left in two versions)."""
    held = locked_names()
    known: Dict[str, Any] = {}
    twice = []
    for row in sorted(run("rpm", "-qa", "--qf", RPM_ROW).splitlines()):
        name, architecture, version = row.split("\t")
        key = name + ":" + architecture
        if key in known and not SEVERAL.match(name):
            twice.append(name)
        state = {"version": version, "installed": True, "held": name in held}
        known[name] = known[key] = state
        if SEVERAL.match(name):
            known[with_version(name, version)] = state
    for name in twice:
        known[name]["installed"] = False
    return known, twice


def with_version(name: str, version: str) -> str:
    """Return the package name that selects one of several installed versions."""
    return "%s-%s" % (name, version.rpartition(":")[2])


def locked_names(root: str = "") -> List[str]:
    """Return the names of the packages that dnf's versionlock locks."""
    try:
        with open(root + LOCKS) as file:
            lines = [line.strip() for line in file]
    except FileNotFoundError:
        return []
    matches = (LOCK.match(line[:-2] if line.endswith(".*") else line) for line in lines)
    return [match.group(1) for match in matches if match]


def stream_of(module: str) -> Any:
    """Return the enabled stream of a dnf module, or None if no stream is enabled."""
    try:
        with open(os.path.join(MODULES, module + ".module")) as file:
            pairs = dict(line.strip().split("=", 1) for line in file if "=" in line)
    except FileNotFoundError:
        return None
    except Exception as error:
        return {"error": str(error)}
    return pairs.get("stream") if pairs.get("state") == "enabled" else None
