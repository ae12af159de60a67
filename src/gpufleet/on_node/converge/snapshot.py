"""RUNS ON THE NODE: read all state that `gpufleet.converge.diff` compares.

Takes (`PARAMETERS`):
  asked   [[kind, argument, ...], ...], with these kinds and arguments: file PATH; secret PATH
          SHA256; line PATH LINE; user NAME; group NAME; package NAME; packages like PATTERN;
          stream MODULE; unit NAME; units like PATTERN; files like PATTERN; listing PATH
Prints one JSON document {"schema": 1, "files": {...}, ...}, for gpufleet.converge.snapshot. If a
thing does not exist, its value is null. If it could not be read, its value is {"error": reason}.

The program changes nothing. It needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import fnmatch
import glob
import grp
import hashlib
import json
import os
import pwd
import re
import stat
import subprocess
from collections.abc import Callable, Iterable
from typing import Any, Dict

from gpufleet.on_node.common.systemctl import show_each
from gpufleet.on_node.packages import installed

PARAMETERS = globals().get("PARAMETERS") or {}

Properties = Dict[str, str]
"""A unit's properties in systemd."""

UNIT_DIRECTORY = "/etc/systemd/system"
STARTED_DIRECTORY = "/run/gpufleet/started"
# This text is in every unit file or drop-in that records with what its unit was started
# (desired.started_line).
STARTED_MARKER = "/run/gpufleet/started/%n"
# Names of units that are not templates. A template (`x@.service`) has no state, and systemctl
# refuses to show it.
UNIT_NAME = re.compile(r"(?!.*@\.)[A-Za-z0-9:_.\\@-]+$")
# on_node/converge/place_files.py writes this file before it creates its first temporary file.
JOURNAL = "/var/lib/gpufleet/placing"
# Half of the controller's deadline for the whole snapshot. systemctl and dpkg-query take much less
# than a second. If they hang on a node, the node must still answer the other questions.
COMMAND_SECONDS = 25
UNIT_PROPERTIES = {
    "LoadState": "load",
    "ActiveState": "active",
    "SubState": "sub",
    "UnitFileState": "file_state",
    "NeedDaemonReload": "needs_reload",
    "FragmentPath": "fragment",
    "NRestarts": "restarts",
    "DropInPaths": "drop_ins",
}


def reason(error: BaseException) -> str:
    """Return the error's text without the path."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def run(*argv: str) -> str:
    """Return a command's output. Raises `OSError` with its error message."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
        )
    except subprocess.TimeoutExpired:
        raise OSError("%s did not answer within %d s" % (argv[0], COMMAND_SECONDS)) from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0 and not text:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise OSError("%s: %s" % (argv[0], words or "it exited with status %d" % done.returncode))
    return text


def read_each(arguments: Iterable[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """Return {argument: `read`'s result, or the reason why it failed}."""
    found = {}
    for argument in sorted(set(arguments)):
        try:
            found[argument] = read(argument)
        except Exception as error:
            found[argument] = {"error": reason(error)}
    return found


def name_of(number: int, database: Callable[[int], Any], attribute: str) -> str:
    """Return the name of a user or group id. If the id has no name, return the id as text."""
    try:
        return str(getattr(database(number), attribute))
    except KeyError:
        return str(number)


def file_state(path: str, secrets: set[str] | None) -> dict[str, Any] | None:
    """
    Return the state of a path.

    For a secret, the state has no hash, but the index of its hash in the sorted requested hashes.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = {
        "kind": "special file",
        "mode": stat.S_IMODE(status.st_mode),
        "user": name_of(status.st_uid, pwd.getpwuid, "pw_name"),
        "group": name_of(status.st_gid, grp.getgrgid, "gr_name"),
    }
    if stat.S_ISLNK(status.st_mode):
        found.update(kind="link", target=os.readlink(path))
    elif stat.S_ISDIR(status.st_mode):
        found.update(kind="directory")
    elif stat.S_ISREG(status.st_mode):
        sha256 = sha256_of(path)
        found.update(kind="file")
        if secrets is None:
            found.update(sha256=sha256)
        elif sha256 in secrets:
            found.update(secret=sorted(secrets).index(sha256))
    return found


def sha256_of(path: str) -> str:
    """Return a regular file's hash; O_NONBLOCK keeps a named pipe at the path from blocking."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def lines_of(path: str, wanted: set[str]) -> list[str]:
    """Return the wanted lines that a file contains."""
    try:
        with open(path, "rb") as file:
            have = set(file.read().decode("utf-8", "surrogateescape").split("\n"))
    except FileNotFoundError:
        have = set()
    return sorted(have & wanted)


def user_state(name: str) -> dict[str, Any] | None:
    """Return an account, or None if it does not exist."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = os.getgrouplist(name, entry.pw_gid)
    return {
        "home": entry.pw_dir,
        "shell": entry.pw_shell,
        "group": name_of(entry.pw_gid, grp.getgrgid, "gr_name"),
        "groups": sorted(name_of(group, grp.getgrgid, "gr_name") for group in groups),
    }


def group_state(name: str) -> int | None:
    """Return a group's id, or None if it does not exist."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def units_on_disk() -> list[str]:
    """Return the names of units that have a file or a drop-in in gpufleet's directory of units."""
    there = os.listdir(UNIT_DIRECTORY) if os.path.isdir(UNIT_DIRECTORY) else []
    return [name[:-2] if name.endswith(".d") else name for name in there]


def is_like(name: str, pattern: str) -> bool:
    """Return whether a unit's name matches a pattern, and systemctl can show the unit."""
    return fnmatch.fnmatchcase(name, pattern) and bool(UNIT_NAME.match(name))


def is_ours(name: str) -> bool:
    """
    Return whether gpufleet wrote a unit or one of its drop-ins.

    Raises `OSError` if the files cannot be read.
    """
    path = os.path.join(UNIT_DIRECTORY, name)
    if any(has_marker(part) for part in [path, *sorted(drop_ins(os.path.join(path + ".d", "")))]):
        return True
    # The unit may still run although its file was removed. If there is a file of a different
    # program, the record is from an earlier unit of this name.
    return not os.path.lexists(path) and os.path.lexists(os.path.join(STARTED_DIRECTORY, name))


def has_marker(path: str) -> bool:
    """Return whether a regular file has gpufleet's start marker. A link is not gpufleet's."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return STARTED_MARKER.encode() in file.read()
    except (FileNotFoundError, NotADirectoryError):
        return False


def units(asked: Iterable[str], patterns: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Return {name: state}, and {pattern: gpufleet's units that match it}.

    A matching unit may be on disk or only known to systemd, and it gets a state too. One call of
    systemctl reads all units.
    """
    patterns = sorted(set(patterns))
    try:
        there = {name for name in units_on_disk() if any(is_like(name, each) for each in patterns)}
        names = sorted({*asked, *there})
        shown, loaded = shown_units(names, patterns)
    except Exception as error:
        failed = {"error": reason(error)}
        return dict.fromkeys(asked, failed), dict.fromkeys(patterns, failed)
    shown = {**loaded, **shown}
    alike = read_each(
        patterns,
        lambda pattern: sorted(
            name for name in {*there, *loaded} if is_like(name, pattern) and is_ours(name)
        ),
    )
    ours = {name for found in alike.values() if isinstance(found, list) for name in found}
    return read_each({*asked, *ours}, lambda name: unit_state(name, shown[name])), alike


def shown_units(
    names: list[str], patterns: list[str]
) -> tuple[dict[str, Properties], dict[str, Properties]]:
    """
    Return systemd's properties of the given units, and of loaded units that match the patterns.

    systemctl answers in the requested order and patterns come last. It may show a unit under a
    different name.
    """
    if not names and not patterns:
        return {}, {}
    wanted = ",".join([*UNIT_PROPERTIES, "Id", "Names"])
    text = run("systemctl", "show", "-p", wanted, "--", *names, *patterns)
    shown = show_each(text)
    if len(shown) < len(names):
        raise OSError("systemctl showed only %d of %d units" % (len(shown), len(names)))
    for name, about in zip(names, shown):  # Python 3.8
        if name not in {about.get("Id"), *about.get("Names", "").split()}:
            raise OSError("systemctl showed %s instead of %s" % (about.get("Id"), name))
    more = {
        about["Id"]: about
        for about in shown[len(names) :]
        # Leave out units that do not exist and that are only mentioned in other units.
        if (about["LoadState"], about["ActiveState"]) != ("not-found", "inactive")
    }
    return dict(zip(names, shown)), more  # Python 3.8


def unit_state(name: str, about: Properties) -> dict[str, Any]:
    """Return one unit's state, from systemd's answer and from the files on disk."""
    found: dict[str, Any] = {
        key: about[name] for name, key in UNIT_PROPERTIES.items() if name in about
    }
    directory = os.path.join(UNIT_DIRECTORY, name + ".d", "")
    loaded = {path for path in found.pop("drop_ins", "").split() if path.startswith(directory)}
    # systemd 252 itself does not notice the first drop-in of a unit, because the drop-in's
    # directory is new.
    stale = found.get("load") == "loaded" and loaded != drop_ins(directory)
    found["needs_reload"] = stale or found.get("needs_reload") == "yes"
    found["restarts"] = int(found.get("restarts") or 0)
    path = os.path.join(UNIT_DIRECTORY, name)
    found["has_file"] = os.path.exists(path)
    found["on_disk"] = os.path.lexists(path) or os.path.lexists(path + ".d")
    try:
        with open(os.path.join(STARTED_DIRECTORY, name)) as file:
            found["started"] = file.read(200).strip()
    except FileNotFoundError:
        found["started"] = None
    return found


def drop_ins(directory: str) -> set[str]:
    """Return the drop-ins in a unit's directory, without links to /dev/null (systemd.unit(5))."""
    return {
        path
        for path in glob.glob(os.path.join(glob.escape(directory), "*.conf"))
        if os.path.realpath(path) != "/dev/null"
    }


def files_like(pattern: str) -> list[str]:
    """Return the files and links that match, without directories."""
    directory = os.path.dirname(pattern)
    if os.path.isdir(directory) and not os.access(directory, os.R_OK | os.X_OK):
        raise PermissionError(13, "Permission denied")
    found = (os.path.join(glob.escape(directory), os.path.basename(pattern)),)
    return sorted(
        path for path in glob.glob(found[0]) if os.path.islink(path) or not os.path.isdir(path)
    )


def listing(path: str) -> list[str] | None:
    """Return the names in a directory, or None if the directory does not exist."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def leftovers() -> Any:
    """Return the temporary files of an interrupted run of on_node/converge/place_files.py."""
    try:
        with open(JOURNAL) as file:
            return sorted({line.rstrip("\n") for line in file} | {JOURNAL})
    except FileNotFoundError:
        return []
    except Exception as error:
        return {"error": reason(error)}


def snapshot(asked: list[list[str]]) -> dict[str, Any]:
    """Return the document with the answers to all questions."""
    by_kind: dict[str, list[list[str]]] = {}
    for kind, *arguments in asked:
        by_kind.setdefault(kind, []).append(arguments)

    def only(kind: str) -> list[str]:
        return [arguments[0] for arguments in by_kind.get(kind, [])]

    secrets: dict[str, set[str]] = {}
    for path, sha256 in by_kind.get("secret", []):
        secrets.setdefault(path, set()).add(sha256)
    wanted_lines: dict[str, set[str]] = {}
    for path, line in by_kind.get("line", []):
        wanted_lines.setdefault(path, set()).add(line)
    packages = installed.read(only("package"), only("packages like"), only("stream"), run, reason)
    states, alike = units(only("unit"), only("units like"))
    return {
        "schema": 1,
        "files": read_each(
            [*only("file"), *secrets], lambda path: file_state(path, secrets.get(path))
        ),
        "lines": read_each(wanted_lines, lambda path: lines_of(path, wanted_lines[path])),
        "users": read_each(only("user"), user_state),
        "groups": read_each(only("group"), group_state),
        **packages,
        "units": states,
        "units_like": alike,
        "files_like": read_each(only("files like"), files_like),
        "listings": read_each(only("listing"), listing),
        "leftovers": leftovers(),
    }


if __name__ == "__main__":
    print(json.dumps(snapshot(PARAMETERS.get("asked", [])), separators=(",", ":")))
