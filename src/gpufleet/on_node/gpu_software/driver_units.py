"""RUNS ON THE NODE, as root: stop and start the units that use the driver, in order.

These units are gpufleet's stages that a plan placed on this node, and the driver's services. Units
that will be stopped are recorded on disk (`KEPT`) before the first one is stopped. A unit is
removed from the record when it runs again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any, Sequence

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import ENVIRONMENT, path_of
from gpufleet.on_node.common.linux_facts import directory_names, line
from gpufleet.on_node.common.stage_units import is_stage_unit
from gpufleet.on_node.common.systemctl import show_each

KEPT = "/var/lib/gpufleet/driver-reload.json"
UNITS = "/etc/systemd/system"
OURS = "/run/gpufleet/started/"  # in each gpufleet unit: desired.started_line

SHORT_SECONDS = 60
# Longer than systemd's default time for a stop or a start (DefaultTimeoutStopSec=), and for the
# kill after it.
SERVICE_SECONDS = 180


class FailedError(Exception):
    """
    Raised on a failure. Its text is a sentence for the operator. It also has facts for the answer.
    """

    def __init__(self, sentence: str, **more: Any) -> None:
        super().__init__(sentence)
        self.more = more


def run_program(name: str, *arguments: str, seconds: float = SHORT_SECONDS) -> str:
    """Run a program and return its output. Raises `FailedError` with its error text."""
    try:
        done = subprocess.run(
            [path_of(name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
            env=ENVIRONMENT,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        words = " ".join((name, *arguments))
        raise FailedError("`%s` did not end within %d s" % (words, seconds)) from None
    except CannotRead:
        raise FailedError("the program %s is not installed on this node" % name) from None
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
        raise FailedError("`%s`: %s" % (" ".join((name, *arguments)), said or done.returncode))
    return done.stdout.decode("utf-8", "replace")


def active(services: Sequence[str]) -> list[str]:
    """Return the stages and services that run or are starting."""
    return [unit for unit, about in unit_properties([*stages(), *services]).items() if is_up(about)]


def is_up(about: dict[str, str]) -> bool:
    """
    Return whether a unit runs or is starting. A stage that waits for its restart counts as well.
    """
    return about.get("ActiveState") in {"active", "activating", "reloading"}


def blocked_stages() -> list[str]:
    """Return the enabled stages that do not start because the node is marked as unchecked."""
    return [
        unit
        for unit, about in unit_properties(stages()).items()
        if about.get("ConditionResult") == "no"
        and about.get("ActiveState") == "inactive"
        and about.get("UnitFileState") == "enabled"
    ]


def unit_properties(units: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {unit: systemd's properties}, without units that systemd does not know."""
    if not units:
        return {}
    wanted = "Id,LoadState,ActiveState,ConditionResult,UnitFileState"
    output = run_program("systemctl", "show", "--no-pager", "--property=" + wanted, "--", *units)
    loaded = (about for about in show_each(output) if about.get("LoadState") == "loaded")
    return {about["Id"]: about for about in loaded}


def stages() -> list[str]:
    """Return the units of gpufleet's stages. Other units, as vllm-router.service, are left out."""
    found = read(directory_names, UNITS)
    if is_missing(found):
        return []
    return [
        name
        for name in found
        if is_stage_unit(name) and OURS in (text_of(UNITS + "/" + name) or "")
    ]


def stop(units: Sequence[str], services: Sequence[str], seconds: float) -> None:
    """
    Stop all stages at the same time, within `seconds`. Then stop the services one after the other.
    """
    ours = [unit for unit in units if unit not in services]
    if ours:
        run_program("systemctl", "stop", "--", *ours, seconds=seconds + SHORT_SECONDS)
    for unit in services:
        if unit in units:
            run_program("systemctl", "stop", "--", unit, seconds=SERVICE_SECONDS)


def start(units: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Start the units that exist and do not run, in order. Return the started units and the failures.
    """
    known = unit_properties(units)
    started, failed = [], []
    for unit in units:
        if unit not in known or is_up(known[unit]):  # a later plan may have removed a stage
            continue
        try:
            with contextlib.suppress(FailedError):  # it may have failed too often
                run_program("systemctl", "reset-failed", "--", unit)
            run_program("systemctl", "start", "--", unit, seconds=SERVICE_SECONDS)
            started.append(unit)
        except FailedError as error:
            failed.append("%s (%s; `journalctl -u %s`)" % (unit, error, unit))
    return started, failed


# The record on disk


def stopped_units() -> dict[str, list[str]]:
    """
    Return the stopped units and modules that must be started again.

    Raises `ValueError` if the file is damaged.
    """
    text = text_of(KEPT)
    return {"units": [], "modules": []} if text is None else dict(json.loads(text))


def keep(units: Sequence[str], modules: Sequence[str]) -> dict[str, list[str]]:
    """
    Add units and modules to the record of what must be started again.

    The record is on disk when this function returns.
    """
    before = stopped_units()
    now = {
        "units": sorted({*before["units"], *units}),
        "modules": sorted({*before["modules"], *modules}),
    }
    if now != before:
        write(KEPT, json.dumps(now))
    return now


def services_kept(services: Sequence[str]) -> list[str]:
    """Return the services that must be started again, in the order of their start."""
    units = stopped_units()["units"]
    return [unit for unit in reversed(services) if unit in units]


def forget_units(units: Sequence[str]) -> None:
    """Remove these units and all modules from the record of what must be started again."""
    left = [unit for unit in stopped_units()["units"] if unit not in units]
    if left:
        write(KEPT, json.dumps({"units": left, "modules": []}))
    else:
        remove(KEPT)


def text_of(path: str) -> str | None:
    """Return a file's text, or None if it does not exist."""
    try:
        return line(path)
    except (FileNotFoundError, IsADirectoryError):
        return None


def write(path: str, text: str) -> None:
    """Write a file completely. The file is on disk when this function returns."""
    at = linux_facts.ROOT + path
    os.makedirs(os.path.dirname(at), mode=0o755, exist_ok=True)
    new = at + ".new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, at)
    directory = os.open(os.path.dirname(at), os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(linux_facts.ROOT + path)
