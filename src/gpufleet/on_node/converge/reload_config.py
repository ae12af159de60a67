"""RUNS ON THE NODE: check whether a server has loaded its configuration on disk, or reload it.

Takes (`PARAMETERS`):
  action   look: only check; reload: reload the unit, and wait until the server has loaded its
           configuration
  unit     the server's unit
  url      URL of the server's metrics
  server   prefix of the server's metrics: prometheus or alertmanager
  watched  patterns of the files and directories of the server's configuration
  seconds  the most time to wait for the server's answer, and for the reload
Prints one JSON document {"error": null or a sentence, "active": bool, "in_force": bool}.
`in_force` is true if the last successful load of the configuration is not older than its files.

The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}
COMMAND_SECONDS = 30
LINES = 8


def main() -> None:
    """Check the server, reload it on request, and print the document."""
    found = {"error": None, "active": is_active(), "in_force": False}
    if found["active"]:
        found.update(check_loaded())
        if PARAMETERS["action"] == "reload" and not found["error"] and not found["in_force"]:
            found.update(reload())
    sys.stdout.write(json.dumps(found) + "\n")


def is_active() -> bool:
    """Return whether the unit runs."""
    done = command("systemctl", "is-active", "--quiet", "--", PARAMETERS["unit"])
    return bool(done.returncode == 0)


def command(*argv: str) -> Any:
    """Run a command and return its result."""
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMMAND_SECONDS,
        check=False,
    )


def check_loaded() -> "dict[str, Any]":
    """
    Return whether the server has loaded the files on disk. Try again until the deadline.
    """
    deadline = time.monotonic() + PARAMETERS["seconds"]
    while True:
        try:
            read_at = metrics()["%s_config_last_reload_success_timestamp_seconds"]
        except (OSError, ValueError, KeyError) as problem:
            if time.monotonic() > deadline:
                return {"error": "%s cannot be read: %s" % (PARAMETERS["url"], problem)}
            time.sleep(0.2)
            continue
        return {"in_force": read_at >= config_changed_at(), "error": None}


def reload() -> "dict[str, Any]":
    """Reload the server, and wait until it has accepted the whole configuration."""
    done = command("systemctl", "reload", "--", PARAMETERS["unit"])
    if done.returncode != 0:
        return {"error": done.stdout.decode("utf-8", "replace").strip() or "reload failed"}
    deadline = time.monotonic() + PARAMETERS["seconds"]
    while time.monotonic() < deadline:
        found = check_loaded()
        if found["error"] or found["in_force"]:
            return found
        time.sleep(0.2)
    said = command(
        "journalctl", "-u", PARAMETERS["unit"], "-n", str(LINES), "-o", "cat", "--no-pager"
    )
    return {
        "error": "%s keeps its old configuration; it reports: %s"
        % (PARAMETERS["unit"], said.stdout.decode("utf-8", "replace").strip())
    }


def metrics() -> "dict[str, float]":
    """
    Return the server's metrics about reloads, by name. In the names, `%s` replaces the server's
    name.
    """
    with urllib.request.urlopen(PARAMETERS["url"], timeout=5) as answer:
        text = answer.read(16 << 20).decode("utf-8", "replace")
    wanted = PARAMETERS["server"] + "_config_last_reload_"
    rows = (line.split() for line in text.splitlines() if line.startswith(wanted))
    return {row[0].replace(PARAMETERS["server"], "%s", 1): float(row[1]) for row in rows}


def config_changed_at() -> float:
    """Return when the configuration was last changed."""
    found = [path for pattern in PARAMETERS["watched"] for path in glob.glob(pattern)]
    return max((os.stat(path).st_mtime for path in found), default=0.0)


if __name__ == "__main__":
    main()
