"""RUNS ON THE NODE: read nftables' table `inet gpufleet`, or replace it with automatic rollback.

Takes (JSON header `PARAMETERS`):
  action   look, apply, confirm or revert
  wanted   the wanted table as text for nft
  seconds  for `apply`: if the rules are not confirmed within this time, the previous rules are
           restored
  rules    the file with the rules that is loaded at boot
  service  the unit that loads this file
Prints one JSON document {"schema": 1, "error": sentence or "", ...}. After `look` and `confirm`, it
also has:
  installed  whether nft is installed
  user       whether the user in the table exists
  loaded     the loaded table as nft lists it; null if no table is loaded
  canonical  the wanted table as nft lists it after loading it in an empty network namespace
  saved      whether the file has the wanted text
  pending    whether the loaded rules have not been confirmed yet
  service    the unit's ActiveState

`apply` first starts a timer, then loads the table. It does not change the file, so a reboot undoes
the rules too. `confirm` ends the timer and writes the file. The controller sends the confirmation
over a new connection that it opens under the new rules. The program needs only Python 3.8 and the
standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import subprocess
from typing import Any

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

TABLE = ("inet", "gpufleet")
RUN = "/run/gpufleet/firewall"
BEFORE = RUN + "/before.nft"
REVERT = "gpufleet-firewall-revert"
# Deadline of a command. Listing a table with some thousand addresses takes less than a second.
SECONDS = 15
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EMPTY = "table inet gpufleet {}\ndelete table inet gpufleet\n"


class FailedError(Exception):
    """Raised if a command fails. Its text is the command's output."""


def run(*argv: str, text: str = "") -> str:
    """Run a command and return its output. Raises `FailedError` with the command's error text."""
    try:
        done = subprocess.run(
            argv,
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=SECONDS,
            check=False,
            env=dict(os.environ, PATH=PATH, LC_ALL="C"),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedError("%s: %s" % (argv[0], error)) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip() or "status %d" % done.returncode
        raise FailedError("%s: %s" % (" ".join(argv[:3]), " ".join(said.split())[:400]))
    return done.stdout.decode("utf-8", "replace")


def is_installed(name: str) -> bool:
    """Return whether a program is in one of the directories of `PATH`."""
    return any(os.access(os.path.join(where, name), os.X_OK) for where in PATH.split(":"))


def loaded_table() -> str | None:
    """Return gpufleet's loaded table without counter values, or None if no table is loaded."""
    names = run("nft", "list", "tables").splitlines()
    if "table %s %s" % TABLE not in [line.strip() for line in names]:
        return None
    return run("nft", "-s", "list", "table", *TABLE)


def canonical(wanted: str) -> str:
    """Return the wanted table as this node's nft and kernel list it."""
    script = "nft -f - && nft -s list table %s %s" % TABLE
    return run("unshare", "--net", "sh", "-c", script, text=wanted)


def all_users_exist(wanted: str) -> bool:
    """Return whether all users in a table exist."""
    for name in re.findall(r'skuid != "([^"]+)"', wanted):
        try:
            pwd.getpwnam(name)
        except KeyError:
            return False
    return True


def is_saved(path: str, wanted: str) -> bool:
    """Return whether a file has the wanted text."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read() == wanted
    except (OSError, ValueError):
        return False


def active(unit: str) -> str:
    """Return a unit's state, or "" if systemd does not answer."""
    try:
        return run("systemctl", "show", "-p", "ActiveState", "--value", "--", unit).strip()
    except FailedError:
        return ""


def write(path: str, text: str, mode: int) -> None:
    """Replace a file atomically and durably."""
    new = path + ".new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def look(wanted: str) -> dict[str, Any]:
    """
    Return the loaded rules, the wanted rules as nft lists them, and the state of the boot's rules.
    """
    installed, known = is_installed("nft"), all_users_exist(wanted)
    return {
        "installed": installed,
        "user": known,
        "loaded": loaded_table() if installed else None,
        "canonical": canonical(wanted) if installed and known else None,
        "saved": is_saved(PARAMETERS["rules"], wanted),
        "pending": active(REVERT + ".timer") == "active",
        "service": active(PARAMETERS["service"]),
    }


def cancel_rollback() -> None:
    """Stop the timer that would restore the previous rules."""
    for verb in ("stop", "reset-failed"):
        with contextlib.suppress(FailedError):  # there is no such timer
            run("systemctl", verb, "--", REVERT + ".timer", REVERT + ".service")


def apply(wanted: str, seconds: int) -> dict[str, Any]:
    """Start the timer that restores the previous rules, then load the table."""
    os.makedirs(RUN, mode=0o700, exist_ok=True)
    run("nft", "-c", "-f", "-", text=wanted)
    # If the loaded rules were never confirmed, they must not be restored later. Keep the rules from
    # before them.
    if active(REVERT + ".timer") != "active" or not os.path.exists(BEFORE):
        write(BEFORE, EMPTY + (loaded_table() or ""), 0o600)
    cancel_rollback()
    run(
        "systemd-run",
        "--quiet",
        "--collect",
        "--unit=" + REVERT,
        "--description=Rolls back firewall rules that were not confirmed",
        "--on-active=%d" % seconds,
        "--timer-property=AccuracySec=1s",
        *("nft", "-f", BEFORE),
    )
    try:
        run("nft", "-f", "-", text=wanted)
    except FailedError:
        cancel_rollback()  # nothing has changed, because nft loads a table completely or not at all
        raise
    return {}


def confirm(wanted: str) -> dict[str, Any]:
    """Keep the loaded rules, also after a reboot."""
    cancel_rollback()
    seen = look(wanted)
    if seen["loaded"] is None or seen["loaded"] != seen["canonical"]:
        raise FailedError("the rules were rolled back before they were confirmed")
    write(PARAMETERS["rules"], wanted, 0o644)
    return dict(seen, saved=True)


def revert() -> dict[str, Any]:
    """Restore the previously loaded rules at once."""
    with open(BEFORE, encoding="utf-8") as file:
        run("nft", "-f", "-", text=file.read())
    cancel_rollback()
    return {}


def main() -> None:
    """Run the requested action and print the document."""
    wanted = PARAMETERS["wanted"]
    actions = {
        "look": lambda: look(wanted),
        "apply": lambda: apply(wanted, PARAMETERS["seconds"]),
        "confirm": lambda: confirm(wanted),
        "revert": revert,
    }
    try:
        found = dict(actions[PARAMETERS["action"]](), error="")
    except (FailedError, OSError) as error:
        found = {"error": str(error)}
    print(json.dumps(dict(found, schema=1)))


if __name__ == "__main__":
    main()
