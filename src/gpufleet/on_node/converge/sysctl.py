"""RUNS ON THE NODE: read or set sysctl settings, and find the file that sets each one last at boot.

Takes (`PARAMETERS`):
  wanted    {name: [value, least]}; if `least` is true, a larger value is accepted too
  file      gpufleet's file that sets these settings at boot
  apply     true: set the settings that differ, as root
  sysroot   prefix of every path; "" on the real machine
Prints one JSON document {"schema": 1, "applied": bool, "settings": {name: ...}}. A setting is one
of:
  {"value": N, "later": {"file", "value"} or null}   `later` is a file that is read after `file` and
                                                     sets this setting again
  {"absent": true}                                   this kernel has no setting with this name
  {"error": reason}                                  the setting could not be read or set
The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import json
import os
from typing import Any

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# sysctl.d(5): if several directories have a file with the same name, the file in the first
# directory counts. Files are read in the order of their names, whatever their directory.
DIRECTORIES = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d")


def path_of(name: str, root: str) -> str:
    """Return the path of a sysctl setting in /proc."""
    return root + "/proc/sys/" + name.replace(".", "/")


def read_setting(name: str, file: str, root: str) -> dict[str, Any]:
    """Return the current value of one setting."""
    try:
        with open(path_of(name, root)) as kernel:
            value = int(kernel.read())
    except FileNotFoundError:
        return {"absent": True}
    except (OSError, ValueError) as error:
        return {"error": "it could not be read: %s" % error}
    return {"value": value, "later": later_override(name, file, root)}


def later_override(name: str, file: str, root: str) -> dict[str, Any] | None:
    """
    Return the last file that is read after gpufleet's file and sets `name`, with its value.

    If there is no such file, return None.
    """
    found = None
    for path in read_after(file, root):
        for key, value in pairs(root + path):
            if key == name:
                found = {"file": path, "value": value}
    return found


def read_after(file: str, root: str) -> list[str]:
    """Return the files that are read after gpufleet's file, in the order of reading."""
    by_name: dict[str, str] = {}
    for directory in DIRECTORIES:
        try:
            there = os.listdir(root + directory)
        except OSError:
            continue
        for name in there:
            if name.endswith(".conf"):
                by_name.setdefault(name, directory + "/" + name)
    return [by_name[name] for name in sorted(by_name) if name > os.path.basename(file)]


def pairs(path: str) -> list[tuple[str, int]]:
    """Return the settings in a file that have integer values. Other lines are ignored."""
    try:
        with open(path, errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for text in lines:
        key, equals, value = text.strip().partition("=")
        key = key.strip().lstrip("-").replace("/", ".")
        try:
            found.append((key, int(value)))
        except ValueError:
            continue
        if not equals:
            found.pop()
    return found


def apply(name: str, value: int, root: str) -> str:
    """Set one value. Return the error, or "" on success."""
    try:
        with open(path_of(name, root), "w") as kernel:
            kernel.write(str(value))
    except OSError as error:
        return "it could not be set to %d: %s" % (value, error.strerror)
    return ""


def main() -> None:
    """Set the values if requested, then print the current values."""
    root, file = PARAMETERS.get("sysroot", ""), PARAMETERS["file"]
    found = {name: read_setting(name, file, root) for name in PARAMETERS["wanted"]}
    for name, (value, least) in PARAMETERS["wanted"].items():
        is_now = found[name].get("value")
        if not PARAMETERS["apply"] or is_now is None:
            continue
        if is_now < value if least else is_now != value:
            error = apply(name, value, root)
            found[name] = {"error": error} if error else read_setting(name, file, root)
    print(json.dumps({"schema": 1, "applied": PARAMETERS["apply"], "settings": found}))


if __name__ == "__main__":
    main()
