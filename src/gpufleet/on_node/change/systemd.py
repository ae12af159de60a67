"""RUNS ON THE NODE: read gpufleet's units on disk and in systemd; run systemctl with a deadline.

A unit belongs to gpufleet if its file records its fingerprint (`desired.started_line`). An
operator's vllm-router.service, for example, does not.
"""

from __future__ import annotations

import re
import time
from typing import Any, Dict, Iterable, List, Optional

from gpufleet.on_node.common import change_files, stages
from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.change_files import RefusedError
from gpufleet.on_node.common.commands import refusal_of, run
from gpufleet.on_node.common.stage_units import is_stage_unit
from gpufleet.on_node.common.systemctl import show_each

FINGERPRINT = re.compile(r"printf %%s ([0-9A-Za-z]+) > /run/gpufleet/started/%n")
STARTED = "/run/gpufleet/started"
PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "UnitFileState",
    "NeedDaemonReload",
    "NRestarts",
    "ActiveEnterTimestampMonotonic",
    "StateChangeTimestampMonotonic",
)
# The same deadline as in diff.py, for the same commands.
SHOW_SECONDS = 20
SHORT_SECONDS = 60
RELOAD_SECONDS = 120
# Longer than systemd's own deadline of a start (DefaultTimeoutStartSec=) and its job queue.
START_SECONDS = 120
UNIT_MARGIN_SECONDS = 30
GONE = ("inactive", "failed")


def unit_names() -> List[str]:
    """Return the names of gpufleet's units that have a file on this node."""
    return [
        name
        for name in change_files.directory_names(stages.UNITS)
        if is_stage_unit(name) and fingerprint(text(name))
    ]


def text(unit: str) -> str:
    """Return the text of a unit's file, or "" if there is no file."""
    content = change_files.read(stages.UNITS + "/" + change_files.must_be_name(unit))
    return "" if content is None else content.decode("utf-8", "replace")


def fingerprint(content: str) -> Optional[str]:
    """Return the fingerprint in a unit's file, or None if the file has no fingerprint."""
    found = FINGERPRINT.search(content)
    return found.group(1) if found else None


def started_fingerprint(unit: str) -> Optional[str]:
    """Return the fingerprint with which a unit's process was started, or None if not recorded."""
    content = change_files.read(STARTED + "/" + unit)
    return None if content is None else content.decode("ascii", "replace").strip()


def states(units: Iterable[str]) -> Dict[str, Dict[str, str]]:
    """Return {unit: systemd's properties}. Raises `CannotRead` if systemd does not answer."""
    names = sorted(units)
    if not names:
        return {}
    output = run(
        "systemctl", "show", "--property=" + ",".join(PROPERTIES), "--", *names,
        seconds=SHOW_SECONDS,
    )  # fmt: skip
    if output.status != 0:
        raise refusal_of("systemctl", output)
    found = {about["Id"]: about for about in show_each(output.out) if "Id" in about}
    if missing := [name for name in names if name not in found]:
        raise CannotRead("error", detail="systemctl does not show " + ", ".join(missing))
    return {name: found[name] for name in names}


def is_up(state: Dict[str, str]) -> bool:
    """Return whether a unit's process runs and is not being stopped."""
    return state.get("ActiveState") in ("active", "reloading")


def is_gone(state: Dict[str, str]) -> bool:
    """Return whether a unit is stopped and not about to start."""
    return state.get("ActiveState") in GONE


def active_since(state: Dict[str, str]) -> Optional[float]:
    """Return when a unit entered its current state, in seconds since 1970, or None if unknown."""
    name = "ActiveEnterTimestampMonotonic" if is_up(state) else "StateChangeTimestampMonotonic"
    at = int(state.get(name) or 0)
    if not at:
        return None
    # The time is computed with the node's clock as it is now, so the result is right even if the
    # clock was set after the unit's start.
    return round(time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + at / 1e6, 3)


def systemctl(*words: str, seconds: float) -> None:
    """Run a systemctl command. Raises `RefusedError` with the command's error text."""
    try:
        output = run("systemctl", *words, seconds=seconds)
    except CannotRead as error:
        why = error.missing.get("missing")
        raise RefusedError(
            "`systemctl %s` %s"
            % (" ".join(words), "did not end within %d s" % seconds if why == "timeout" else why)
        ) from None
    if output.status != 0:
        said = output.err.strip().splitlines()
        raise RefusedError(
            "`systemctl %s` ended with status %d%s"
            % (" ".join(words), output.status, ": " + said[-1] if said else "")
        )


def look(unit: str, state: Dict[str, str]) -> Dict[str, Any]:
    """Return the state of a unit that matters for a change, in the form of `UnitLook`."""
    content = text(unit)
    release = stages.RELEASE.search(content)
    return {
        "unit": unit,
        "active": state.get("ActiveState", ""),
        "sub": state.get("SubState", ""),
        "since": active_since(state),
        "started": started_fingerprint(unit),
        "fingerprint": fingerprint(content),
        "release": release.group(1) if release else "",
        "restarts": int(state.get("NRestarts") or 0),
    }
